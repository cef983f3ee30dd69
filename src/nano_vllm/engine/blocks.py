"""BlockPool: free list and prefix cache in one. It owns block ids; the session owns their bytes.

A block is held (by requests), cached (full, committed, held by nobody, findable by its content) or free. Cached blocks are
given out last, least recently used first. Block tables only grow while a request runs, and blocks are never merged or copied,
so a table that a step was built from stays valid.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections import OrderedDict
from typing import NamedTuple

from .request import Request


class Entry(NamedTuple):
    """A block's content: its own tokens, and the serial of the entry before it, so that a hit is proved and not believed."""

    block: int
    digest: bytes
    tokens: bytes
    parent: int
    serial: int


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int, caching: bool = True) -> None:
        self.num_blocks, self.block_size, self.caching = num_blocks, block_size, caching
        # digests of one process mean nothing in another, nor to who sends prompts
        self._hash = hashlib.blake2b(key=os.urandom(32), digest_size=16)
        self._references = [0] * num_blocks
        self._available: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # free first, then cached by age
        self._entries: dict[bytes, Entry] = {}
        self._entry_of: list[Entry | None] = [None] * num_blocks
        self._computing: dict[bytes, Request] = {}
        self._serials = 0

    @property
    def available(self) -> int:
        """Blocks that can be allocated now: free ones and cached ones."""
        return len(self._available)

    @property
    def cached(self) -> int:
        return sum(self._entry_of[b] is not None for b in self._available)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def match(self, request: Request) -> list[Entry] | None:
        """Cached blocks that begin `request.tokens`, or None while another request is computing the block after them.

        The last token is always left to compute: its logits are wanted.
        """
        if not self.caching:
            return []
        hits: list[Entry] = []
        serial = 0
        for i in range((len(request.tokens) - 1) // self.block_size):
            digest = self._digests(request, i + 1)[i]
            entry = self._entries.get(digest)
            if entry is None or entry.parent != serial or entry.tokens != request.contents[i]:
                return None if self._computing.get(digest, request) is not request else hits
            hits.append(entry)
            serial = entry.serial
        return hits

    def admit(self, request: Request, hits: list[Entry]) -> bool:
        """Gives the request its hits and blocks for the rest of its tokens; False, and nothing changed, if there are too few."""
        idle_hits = sum(self._references[e.block] == 0 for e in hits)
        if self.blocks_for(len(request.tokens)) - len(hits) > self.available - idle_hits:
            return False
        for entry in hits:
            self._references[entry.block] += 1
            self._available.pop(entry.block, None)
            request.blocks.append(entry.block)
        request.registered = len(hits)
        request.serial = hits[-1].serial if hits else 0
        request.computed = len(hits) * self.block_size
        self.grow(request, len(request.tokens))
        if self.caching:
            for digest in self._digests(request, len(request.tokens) // self.block_size)[len(hits) :]:
                self._computing.setdefault(digest, request)
        return True

    def grow(self, request: Request, tokens: int) -> bool:
        """Extends the request's blocks to hold `tokens`; False, and nothing changed, if there are too few."""
        need = self.blocks_for(tokens) - len(request.blocks)
        if need > self.available:
            return False
        for _ in range(need):
            block, _ = self._available.popitem(last=False)
            self._forget(block)
            self._references[block] = 1
            request.blocks.append(block)
        return True

    def register(self, request: Request, tokens: int) -> None:
        """Offers the request's full blocks among its first `tokens` committed tokens to the prefix cache."""
        if not self.caching:
            return
        count = tokens // self.block_size
        digests, contents = self._digests(request, count), request.contents
        for i in range(request.registered, count):
            digest, content = digests[i], contents[i]
            entry = self._entries.get(digest)
            if entry is not None and (entry.tokens != content or entry.parent != request.serial):
                self._forget(entry.block)  # other content, or the entry before it is gone: no chain leads to it
                entry = None
            if entry is None:
                self._serials += 1
                entry = Entry(request.blocks[i], digest, content, request.serial, self._serials)
                self._entries[digest] = self._entry_of[entry.block] = entry
            self._done_computing(digest, request)
            request.serial = entry.serial
            request.registered = i + 1

    def release(self, request: Request) -> None:
        """Takes all blocks back. The last ones are reused first, so that a prefix outlives its continuations."""
        self._stop_computing(request)
        for block in reversed(request.blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._available[block] = None
                if self._entry_of[block] is None:
                    self._available.move_to_end(block, last=False)
        request.blocks.clear()
        request.registered = request.serial = request.computed = 0

    def check_idle(self) -> None:
        """Raises RuntimeError if a block is held while no request runs; in constant time, unlike `check`."""
        if self.available != self.num_blocks or self._computing:
            raise RuntimeError(f"{self.num_blocks - self.available} of {self.num_blocks} blocks were not given back")

    def check(self, requests=()) -> None:
        """Raises RuntimeError if the books do not balance: held + available = all, references = tables, entries = blocks."""
        held: dict[int, int] = {}
        for request in requests:
            for block in request.blocks:
                held[block] = held.get(block, 0) + 1
        wrong = [b for b in range(self.num_blocks) if self._references[b] != held.get(b, 0)]
        lost = [b for b in range(self.num_blocks) if (self._references[b] == 0) != (b in self._available)]
        stale = [e for e in self._entries.values() if self._entry_of[e.block] is not e]
        strangers = [r for r in self._computing.values() if r not in requests]
        if wrong or lost or stale or strangers:
            raise RuntimeError(f"blocks do not balance: references {wrong}, lost {lost}, stale {stale}, computing {strangers}")

    def _digests(self, request: Request, count: int) -> list[bytes]:
        """Chained keyed hashes, each of a full block and all before it, of the first `count` blocks at least; every part is
        tagged by its kind, and the salt by its length."""
        digests = request.digests
        if len(digests) < count:
            self._cut(request, count)
            before = b"parent" + digests[-1] if digests else _salted(request.cache_salt)
            for content in request.contents[len(digests) : count]:
                h = self._hash.copy()
                h.update(before + b"tokens" + content)
                digests.append(h.digest())
                before = b"parent" + digests[-1]
        return digests

    def _cut(self, request: Request, count: int) -> None:
        """Brings `contents`, the full blocks as bytes, to `count` at least; the first call for a prompt cuts all of it."""
        contents, size = request.contents, self.block_size
        if len(contents) < count:
            whole = len(request.tokens) // size * size
            raw = array("i", request.tokens[len(contents) * size : whole]).tobytes()
            step = size * array("i").itemsize
            contents.extend(raw[at : at + step] for at in range(0, len(raw), step))

    def _forget(self, block: int) -> None:
        entry = self._entry_of[block]
        if entry is not None:
            del self._entries[entry.digest]
            self._entry_of[block] = None

    def _done_computing(self, digest: bytes, request: Request) -> None:
        if self._computing.get(digest) is request:
            del self._computing[digest]

    def _stop_computing(self, request: Request) -> None:
        for digest in request.digests:
            self._done_computing(digest, request)


def _salted(salt: str | None) -> bytes:
    if salt is None:
        return b""
    raw = salt.encode("utf-8", "surrogatepass")
    return b"salt" + len(raw).to_bytes(8, "little") + raw
