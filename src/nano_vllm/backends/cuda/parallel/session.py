"""A session over several ranks: starts their processes, hands each batch to all of them, and ends them.

A rank is a process of its own. It has one end of a socket pair, the memory that batches come in, and a file through which ranks
find each other, all by descriptor: no name or port is taken. Its death closes its socket; the parent's death closes all of them.
Whatever goes wrong in one rank ends all, as the others would wait for it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from mmap import mmap
from multiprocessing.connection import Connection, wait
from signal import Signals

from ....engine.backend import Batch, Result
from ....errors import BatchError, EngineClosed, NanoVLLMError, RankLost
from ....formats import Tensor
from ....memory.plan import Plan
from ....model.program import Program
from .. import layout
from ..session import STAGES
from .rank import Ready, Setup, written
from .split import share

MAIN = "import sys; sys.path[:] = sys.argv[3:]; from {0} import main; main(int(sys.argv[1]), int(sys.argv[2]))"
OPEN = 2  # steps at once, with `max_outstanding` 1
ALIGNED = 64  # bytes: where an array begins
GRACE = 5.0  # seconds that a rank has to end by itself


class Ticket:
    """A step under way."""

    def __init__(self, session: ParallelSession) -> None:
        self.session = session
        self.outcome: Result | Exception | None = None

    def result(self) -> Result:
        """Waits for the step. Raises what went wrong in it; RankLost where a rank has ended."""
        while self.outcome is None:
            self.session._collect()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@dataclass
class Rank:
    number: int
    process: subprocess.Popen
    connection: Connection


class ParallelSession:
    """See `engine.backend.Session`. For one thread at a time.

    Args:
        size: ranks.
        card: each on a GPU of its own; else on the CPU, where kernels are interpreted.

    Raises:
        OptionError: the model cannot be divided among so many.
        RankLost: a rank ended while it opened its part.
        NanoVLLMError: what a rank raised there.
    """

    stages = STAGES
    max_outstanding = OPEN - 1

    def __init__(self, program: Program, weights: Mapping[str, Tensor], plan: Plan, size: int, card: bool) -> None:
        share(program, 0, size)  # refuses what cannot be divided before a process is started
        self.plan, self.size = plan, size
        self.failure: NanoVLLMError | None = None
        self.open: deque[Ticket] = deque()
        self.ranks: list[Rank] = []
        self.submitted = 0
        self.end = weakref.finalize(self, _end, self.ranks, os.getpid())  # at exit, too
        table = plan.max_num_seqs * -(-plan.max_model_len // plan.block_size)
        numbers = 2 * layout.capacity(plan.max_num_batched_tokens, plan.max_num_seqs, table)
        numbers += plan.max_num_seqs * (plan.max_model_len + program.vocab_size)  # history and banned ids
        self.slot = -(-4 * numbers // ALIGNED) * ALIGNED + 2**20
        store, ring = os.memfd_create("ranks"), os.memfd_create("batches")
        try:
            os.ftruncate(ring, OPEN * self.slot)  # takes memory where it is written to
            self.ring = mmap(ring, OPEN * self.slot)
            for number in range(size):
                self.ranks.append(_start(number, store, ring))
            for rank in self.ranks:
                setup = Setup(rank.number, size, card, store, ring, OPEN * self.slot, program, weights, plan)
                self._send(rank, setup)
            ready: list[Ready] = self._answers()
        except BaseException:
            self.end()
            raise
        finally:
            os.close(store)
            os.close(ring)
        self.ready = ready
        self.opening = ready[0].opening
        self.weight_bytes = sum(r.weight_bytes for r in ready)
        self.kv_bytes_per_token = sum(r.kv_bytes_per_token for r in ready)

    def submit(self, batch: Batch) -> Ticket:
        """Hands the batch to the ranks; what is wrong with it is raised by the ticket's `result`."""
        if self.failure is not None:
            raise self.failure
        while len(self.open) >= OPEN:  # their place in the ring is still read
            self._collect()
        places = self._write(batch)
        for rank in self.ranks:
            self._send(rank, places)
        self.submitted += 1
        self.open.append(Ticket(self))
        return self.open[-1]

    def memory(self) -> dict[str, int]:
        """Bytes allocated by owner (weights, kv, scratch) on the first rank's device; the others have as much."""
        return self.ready[0].memory

    def close(self) -> None:
        """Ends the ranks' processes, and with them all that they have of the devices' memory."""
        self.failure = self.failure or EngineClosed("the session is closed")
        self.end()
        self.ring.close()

    def _write(self, batch: Batch) -> list[tuple[int, int]]:
        """Puts the batch in the ring and says where its parts are."""
        pickled, arrays = written(batch)
        places, at = [], self.submitted % OPEN * self.slot
        end = at + self.slot
        for part in (pickled, *arrays):
            places.append((at, at + len(part)))
            at += -(-len(part) // ALIGNED) * ALIGNED
            if at > end:
                raise BatchError("a step is outside what the session was made for", f"it has over {self.slot:,} bytes")
            self.ring[slice(*places[-1])] = part
        return places

    def _collect(self) -> None:
        """Settles the oldest open step."""
        ticket = self.open.popleft()
        try:
            if self.failure is not None:
                raise self.failure
            for rank in self.ranks:
                self._send(rank, None)
            ticket.outcome = self._answers()[0]
        except NanoVLLMError as error:
            ticket.outcome = error

    def _send(self, rank: Rank, message: object) -> None:
        try:
            rank.connection.send(message)
        except OSError:
            self._lost(rank)

    def _answers(self) -> list:
        """One answer of each rank. Watches all, those that have answered, too."""
        found: dict[int, object] = {}
        by_connection = {rank.connection: rank for rank in self.ranks}
        while len(found) < self.size:
            for connection in wait(list(by_connection)):
                rank = by_connection[connection]
                try:
                    found[rank.number] = answer = connection.recv()
                except (EOFError, OSError):
                    self._lost(rank)
                if isinstance(answer, Exception) and not isinstance(answer, BatchError):
                    self._fail(answer)
        return [found[number] for number in range(self.size)]

    def _lost(self, rank: Rank) -> None:
        """A rank's connection has ended: says how its process did."""
        try:
            if rank.connection.poll():  # its last words
                answer = rank.connection.recv()
                if isinstance(answer, NanoVLLMError):
                    self._fail(answer)
        except (EOFError, OSError):
            pass
        try:
            code = rank.process.wait(GRACE)
            how = f"was killed by {Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        except subprocess.TimeoutExpired:
            how = "closed its connection"
        why = f"process {rank.process.pid} {how}, and the others cannot go on without its part"
        mend = "Load the model again. If the system ended it for want of memory, its log says so."
        self._fail(RankLost(f"rank {rank.number} of {self.size} is lost", why, mend))

    def _fail(self, error: Exception) -> None:
        self.failure = error
        _end(self.ranks, os.getpid(), grace=0)  # they may wait for each other, for ever
        raise error


def _start(number: int, store: int, ring: int) -> Rank:
    """A new interpreter, in a session of its own: Ctrl-C is for this process to answer."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", MAIN.format(Setup.__module__), str(theirs.fileno()), str(os.getpid()), *sys.path]
    with theirs:
        kept = (theirs.fileno(), store, ring)
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=kept, start_new_session=True)
    return Rank(number, process, Connection(ours.detach()))


def _end(ranks: list[Rank], owner: int, grace: float = GRACE) -> None:
    """Closes the connections, at which ranks end; those that do not within `grace` seconds are killed."""
    if os.getpid() != owner:  # forked from the process that started them
        return
    for rank in ranks:
        rank.connection.close()
        if not grace:
            rank.process.kill()
    for rank in ranks:
        try:
            rank.process.wait(grace or GRACE)
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()
    ranks.clear()
