"""The process of one rank: opens its part of the model on its card, then does as the session asks, in the order that it asks.

All ranks get the same batches and draw the same ids from the same logits, so that nothing but sums and logits goes between cards.
Nothing that a rank decides may depend on time: their collectives have to meet in the same order.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass, fields
from mmap import mmap
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from ....engine.backend import Batch, Result
from ....errors import BatchError, NanoVLLMError
from ....memory.plan import Plan
from ....model.program import Program
from ..session import Session
from .split import Share, Shards, share

LOOK = 1.0  # seconds between looks at whether the parent still lives


@dataclass(frozen=True)
class Setup:
    """The first message to a rank.

    Attributes:
        card: a GPU for each rank; False: the CPU, where Triton's interpreter runs the kernels.
        store: a file's descriptor, through which the ranks find each other.
        ring: of the memory that batches come in; its bytes.
    """

    rank: int
    size: int
    card: bool
    store: int
    ring: int
    bytes: int
    program: Program
    weights: object
    plan: Plan


@dataclass(frozen=True)
class Ready:
    """What a rank says when it has opened its part."""

    memory: dict[str, int]
    opening: dict[str, float]
    weight_bytes: int
    kv_bytes_per_token: int


class Group:
    """What a rank's session asks of the others."""

    def __init__(self, setup: Setup, mine: Share, device: torch.device) -> None:
        self.size, self.first, self.device = setup.size, mine.vocabulary.first, device
        store = dist.FileStore(f"/proc/self/fd/{setup.store}", setup.size)
        how = {"backend": "nccl", "device_id": device} if setup.card else {"backend": "gloo"}
        dist.init_process_group(store=store, rank=setup.rank, world_size=setup.size, **how)
        self._gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the first is newer

    def reduce(self, x: torch.Tensor) -> None:
        """x, in place, summed over ranks."""
        dist.all_reduce(x)

    def gather(self, part: torch.Tensor, out: torch.Tensor) -> None:
        """out (ranks, …) = every rank's `part` (…)."""
        self._gather(out.view(-1), part.view(-1))

    def agree(self, yes: bool) -> bool:
        """Whether all ranks say so. Waits for them."""
        votes = torch.tensor([yes], dtype=torch.int32, device=self.device)
        dist.all_reduce(votes, dist.ReduceOp.MIN)
        return bool(votes.item())


class Refused:
    """Stands for the ticket of a step that was not begun."""

    def __init__(self, error: BatchError) -> None:
        self.error = error

    def result(self) -> Result:
        raise self.error


def read(places: list[tuple[int, int]], ring: memoryview) -> Batch:
    """The batch at these places: its pickle, and the bytes of its arrays, which stay where they are."""
    pickled, *arrays = (ring[start:end] for start, end in places)
    return Batch(**pickle.loads(pickled, buffers=arrays))


def written(batch: Batch) -> tuple[bytes, list[memoryview]]:
    """What `read` reads."""
    arrays: list[pickle.PickleBuffer] = []
    parts = {field.name: getattr(batch, field.name) for field in fields(Batch)}
    return pickle.dumps(parts, protocol=5, buffer_callback=arrays.append), [array.raw() for array in arrays]


def main(connection: int, parent: int) -> None:
    """Ends when the connection does.

    Args:
        connection: its descriptor.
        parent: process id.
    """
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()
    to_parent = Connection(connection)
    try:
        setup = to_parent.recv()
        ring = memoryview(mmap(setup.ring, setup.bytes))
        serve(_opened(setup), setup.rank, to_parent, ring)
    except (EOFError, OSError):  # closed, or the parent is gone
        os._exit(0)  # other ranks need not be there any more, as the libraries' own ends would want them to be
    except Exception as error:
        _complain(to_parent, error)
        os._exit(1)


def _die_with(parent: int) -> None:
    """The connection tells of the parent's end, too, but not while a kernel or another rank is waited for."""
    while os.getppid() == parent:
        time.sleep(LOOK)
    os._exit(1)


def _complain(to_parent: Connection, error: Exception) -> None:
    if not isinstance(error, NanoVLLMError):
        traceback.print_exception(error)
        error = NanoVLLMError("the model cannot go on", f"{type(error).__name__}: {error}", "Load it again.")
    try:
        to_parent.send(error)
    except OSError:
        pass  # nobody listens


def _opened(setup: Setup) -> Session:
    if setup.card:
        torch.cuda.set_device(setup.rank)
    device = torch.device("cuda", setup.rank) if setup.card else torch.device("cpu")
    mine = share(setup.program, setup.rank, setup.size)
    shards = Shards(setup.weights, mine)
    session = Session(mine.program, shards, setup.plan, device, Group(setup, mine, device))
    if hasattr(setup.weights, "close"):
        setup.weights.close()
    return session


def serve(session: Session, rank: int, to_parent: Connection, ring: memoryview) -> None:
    """Answers that it is ready, then takes messages: places of a batch to submit, or None, for the oldest open step's result.
    An answer is a Ready, a Result, a BatchError, or None from all ranks but the first; any other error ends the process."""
    to_parent.send(Ready(session.memory(), session.opening, session.weight_bytes, session.kv_bytes_per_token))
    tickets: deque = deque()
    while True:
        places = to_parent.recv()
        if places is None:
            try:
                result = tickets.popleft().result()
            except BatchError as error:
                result = error
            to_parent.send(result if rank == 0 or isinstance(result, BatchError) else None)
            continue
        try:
            tickets.append(session.submit(read(places, ring)))
        except BatchError as error:  # all ranks refuse it
            tickets.append(Refused(error))
