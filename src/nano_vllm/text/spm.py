"""SentencePiece-type encoding of GGUF files (`tokenizer.ggml.model` = "llama"): greedy merges by score, bytes for what is left.

Always the pair whose joined text is the token of highest score is merged, the leftmost of equals. A list of merges cannot say
this: one token has several pairs, and the list would rank them where the scores call them equal (runs of spaces show it).
"""

from __future__ import annotations

import heapq
import re

SPACE = "▁"
CACHE_WORDS = 65536


class SentencePieces:
    """Encoder over a vocabulary.

    Args:
        ids: text -> id of the tokens that text may become (no control tokens).
        scores: (vocabulary,) of float, by id; None: all equal.
        unknown: id for a byte without a token, or None to drop it.
    """

    def __init__(self, ids: dict[str, int], scores, unknown: int | None) -> None:
        self.ids = ids
        self.scores = scores.tolist() if hasattr(scores, "tolist") else scores
        self.bytes = [ids.get(f"<0x{b:02X}>", ids.get(chr(b) if b < 128 else "", unknown)) for b in range(256)]
        # Where no token has a space inside, merges never cross the start of a word, and words are encoded apart and remembered.
        self.apart = not any(SPACE in t.lstrip(SPACE) for t in ids if SPACE in t)
        self.words = re.compile(f"{SPACE}*[^{SPACE}]*")
        self.known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of text, in which spaces become ▁; nothing is put before it."""
        text = text.replace(" ", SPACE)
        if not self.apart:
            return self._merge(text)
        out: list[int] = []
        for word in self.words.findall(text):
            found = self.known.get(word)
            if found is None:
                found = self._merge(word)
                if len(self.known) >= CACHE_WORDS:
                    self.known = {}
                if len(word) <= 64:
                    self.known[word] = found
            out += found
        return out

    def _merge(self, text: str) -> list[int]:
        parts = list(text)  # the text of a symbol, "" once it was merged into its left neighbour
        before, after = list(range(-1, len(parts) - 1)), [*range(1, len(parts)), -1]
        queue: list[tuple[float, int, int, str]] = []
        ids, scores = self.ids, self.scores

        def offer(left: int, right: int) -> None:
            joined = parts[left] + parts[right]
            token = ids.get(joined)
            if token is not None:
                heapq.heappush(queue, (-scores[token] if scores else 0.0, left, right, joined))

        for i in range(len(parts) - 1):
            offer(i, i + 1)
        while queue:
            _, left, right, joined = heapq.heappop(queue)
            if not parts[left] or not parts[right] or parts[left] + parts[right] != joined:
                continue
            parts[left], parts[right] = joined, ""
            after[left] = after[right]
            if after[right] >= 0:
                before[after[right]] = left
            if before[left] >= 0:
                offer(before[left], left)
            if after[left] >= 0:
                offer(left, after[left])
        out: list[int] = []
        for part in filter(None, parts):
            token = ids.get(part)
            out += [token] if token is not None else [i for i in map(self.bytes.__getitem__, part.encode()) if i is not None]
        return out
