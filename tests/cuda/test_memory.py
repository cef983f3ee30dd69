"""The arithmetic of a device's memory, on a device that is made up: tests/cuda/test_card.py has the same on a card."""

from __future__ import annotations

import dataclasses
import gc
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the backend is PyTorch's")
pytest.importorskip("triton", reason="Triton has no package for this system")

from nano_vllm.backends import cuda, reference  # noqa: E402
from nano_vllm.backends.cuda import memory, sizing, warmup  # noqa: E402
from nano_vllm.backends.cuda.graphs import Shapes  # noqa: E402
from nano_vllm.backends.cuda.kernels import cache  # noqa: E402
from nano_vllm.backends.cuda.session import Session  # noqa: E402
from nano_vllm.errors import ModelFileError, NotEnoughMemory  # noqa: E402
from nano_vllm.memory.plan import Device, kv_bytes_per_token, resolve, settle  # noqa: E402
from nano_vllm.model.program import lower  # noqa: E402
from nano_vllm.options import options  # noqa: E402
from nano_vllm.sampling.params import SamplingParams  # noqa: E402
from tests.backends import tiny  # noqa: E402

from . import DEVICE  # noqa: E402
from .test_session import ids, model, opened, run, weights  # noqa: E402

MB = 10**6


def planned(program, needs: int, **asked):
    """A plan for a device of 1 GB, 0.2 of which others have, and a guess of what the model needs there."""
    device = Device("a card", 1000 * MB, 800 * MB, "f32", 64, lambda *_: needs)
    return resolve(options(backend="cuda", **asked), program, "cuda", "f32", device)


PROGRAM = lower(model(layers=1))
BLOCK = 16 * kv_bytes_per_token(PROGRAM, "f32")


@pytest.mark.parametrize("asked", [{"device_memory_budget": 300 * MB}, {"gpu_memory_utilization": 0.5}])
def test_a_plan_promises_the_budget_and_keeps_it_once_measured(asked):
    budget = 300 * MB
    plan = planned(PROGRAM, 100 * MB, max_num_seqs=2**20, **asked)
    assert (plan.share.budget, plan.share.beside) == (budget, 100 * MB) and 0 <= budget - plan.device_bytes < BLOCK
    for beside in (50 * MB, 150 * MB, budget - BLOCK):
        settled = settle(plan, beside)
        assert settled.num_blocks == (budget - beside) // BLOCK and 0 <= budget - settled.device_bytes < BLOCK
        assert "measured" in settled.reasons["num_blocks"]
        tokens = settled.num_blocks * 16
        assert settled.max_model_len == min(plan.max_model_len, tokens)
        assert settled.max_num_batched_tokens == min(plan.max_num_batched_tokens, tokens)
    with pytest.raises(NotEnoughMemory, match="100 MB were expected"):
        settle(plan, budget - BLOCK + 1)


def test_what_was_asked_for_is_kept_or_refused():
    asked = planned(PROGRAM, 100 * MB, num_blocks=500, device_memory_budget=200 * MB)
    assert asked.device_bytes == 100 * MB + 500 * BLOCK
    settled = settle(asked, 120 * MB)
    assert settled.num_blocks == 500 and settled.reasons["num_blocks"] == asked.reasons["num_blocks"]
    assert settled.device_bytes == 120 * MB + 500 * BLOCK and settled.share.promised == asked.device_bytes
    with pytest.raises(NotEnoughMemory, match="500 blocks does not fit"):
        settle(asked, 200 * MB - 500 * BLOCK + 1)
    few = planned(PROGRAM, 100 * MB, max_num_seqs=2, device_memory_budget=200 * MB)
    assert settle(few, 50 * MB).num_blocks == few.num_blocks == 2 * 4096 // 16  # no request could use more
    long = planned(PROGRAM, 100 * MB, max_model_len=4096, device_memory_budget=102 * MB)
    with pytest.raises(NotEnoughMemory, match="max_model_len"):
        settle(long, 102 * MB - 255 * BLOCK)
    for wrong in ({"num_blocks": 30_000}, {"kv_cache_memory": 110 * MB}):
        with pytest.raises(NotEnoughMemory, match="does not fit"):
            planned(PROGRAM, 100 * MB, device_memory_budget=200 * MB, **wrong)
    assert planned(PROGRAM, 100 * MB, num_blocks=700 * MB // BLOCK).share.budget == 800 * MB  # all that is free


def test_layers_share_an_allocation_whose_size_is_known():
    for kind in (torch.float32, torch.int8):
        layers = [(3, 18), (2, 16), (1, 2)]
        caches = cache.allocate(3, 16, layers, kind, torch.device("cpu"))
        planes = [x for c in caches for x in (*c.planes, *c.scales) if x is not None]
        assert len({x.untyped_storage().data_ptr() for x in planes}) == 1
        assert 0 <= planes[0].untyped_storage().nbytes() - sum(c.nbytes for c in caches) < 6 * cache.ALIGNED
        for number, plane in enumerate(planes):
            plane.fill_(number + 1)
        assert all((plane == number + 1).all() for number, plane in enumerate(planes))  # none reaches into another
        assert [c.keys.shape for c in caches] == [(3, heads, 16, size) for heads, size in layers]
        assert all(c.keys.data_ptr() % cache.ALIGNED == caches[0].keys.data_ptr() % cache.ALIGNED for c in caches)
        assert (caches[0].key_scales is None) == (kind == torch.float32)


class Made(memory.Held):
    """A device on which every tensor of this process lies, beside 200 MB of others', a context, and 6 MB of libraries once steps
    have run."""

    ran = 0

    def reserved(self) -> int:
        storages = (x.untyped_storage() for x in gc.get_objects() if type(x) is torch.Tensor)
        found = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return sum(n if n < memory.PIECE else -(-n // memory.PIECE) * memory.PIECE for n in found.values())

    def used(self) -> int:
        return 200 * MB + self.context + self.ran * 6 * MB + self.reserved()


@pytest.fixture
def made(monkeypatch):
    """Opens a session on such a device."""
    helds = []

    def held(device):
        helds.append(Made(device, 9 * MB))
        return helds[-1]

    monkeypatch.setattr(memory, "held", held)
    monkeypatch.setattr(Session, "_warm_up", lambda session: setattr(session.held, "ran", 1))

    def open(plan, without=None):
        gc.collect()
        return cuda.open(PROGRAM, {n: tensor for n, tensor in weights(PROGRAM).items() if n != without}, plan)

    open.helds = helds
    return open


@pytest.mark.skipif(DEVICE == "cuda", reason="what the device holds is made up here; test_card.py asks a real one")
@pytest.mark.parametrize("guess", [40 * MB, 12 * MB])
def test_the_cache_gets_what_is_left_once_the_model_has_run(made, guess, caplog):
    budget = 60 * MB
    plan = planned(PROGRAM, guess, max_num_seqs=64, device_memory_budget=budget)
    session = made(plan)
    held = session.held
    assert budget - memory.PIECE - BLOCK - cache.ALIGNED < session.plan.device_bytes <= budget
    assert held.total() <= budget and abs(held.total() - session.plan.device_bytes) < 0.04 * budget
    owners = session.memory()
    assert owners["context"] == 9 * MB and owners["libraries"] == 6 * MB and owners["graphs"] == 0
    assert owners["kv"] == session.plan.num_blocks * BLOCK and abs(sum(owners.values()) - held.total()) <= 0.03 * held.total()
    fewer = session.plan.num_blocks < plan.num_blocks
    assert fewer == (guess == 12 * MB) == any("blocks, not" in message for message in caplog.messages)
    requests = [(ids(20).tolist(), SamplingParams(temperature=0, max_tokens=2))]
    assert run(session, requests) == run(opened(model(layers=1), reference), requests)


def test_a_budget_that_does_not_do_once_measured_is_an_error_and_leaves_nothing(made):
    plan = planned(PROGRAM, 5 * MB, max_num_seqs=64, device_memory_budget=16 * MB)
    with pytest.raises(NotEnoughMemory, match=r"of 16 MB the model took .* 5 MB were expected") as told:
        made(plan)
    gc.collect()
    assert made.helds[0].tensors() < MB and told.value.exit_code == 2


def test_a_model_that_cannot_be_loaded_leaves_nothing(made):
    """As long as somebody keeps the error, too, in whose frames the weights are."""
    plan = tiny.plan("cuda", num_blocks=9, max_num_seqs=4, max_num_batched_tokens=32)
    with pytest.raises(ModelFileError) as told:
        made(plan, without="final_norm")
    gc.collect()
    assert made.helds[0].tensors() < 10_000 and told.value.__traceback__ is not None


def test_a_plan_without_a_share_is_what_it_says(made):
    plan = tiny.plan("cuda", num_blocks=9, max_num_seqs=4, max_num_batched_tokens=32)
    session = made(plan)
    assert session.plan == plan and session.memory()["libraries"] == 6 * MB and plan.device_bytes == 0


class Stub:
    """A session whose graphs take 3 MB each when they first run."""

    def __init__(self, plan) -> None:
        self.plan = dataclasses.replace(plan, num_blocks=warmup.blocks(plan))
        self.graphs, self.drawn, self.kv_bytes, self.ran = None, 0, self.plan.num_blocks * BLOCK, 0
        self.held = SimpleNamespace(total=lambda: 80 * MB + self.kv_bytes + 3 * MB * self.ran, graph=0)
        self.record = None

    def submit(self, batch):
        self.ran += self.graphs.replay(self.graphs.shapes.decode(len(batch.tokens)))
        return SimpleNamespace(result=lambda: None)

    def allocate_cache(self, blocks: int) -> None:
        assert self.graphs is None
        self.kv_bytes = blocks * BLOCK


@pytest.mark.parametrize("budget, others", [(600 * MB, 0), (790 * MB, 0), (790 * MB, 40)])
def test_room_for_graphs_is_kept(monkeypatch, budget, others):
    monkeypatch.setattr(sizing, "Graphs", Recorded)
    plan = planned(PROGRAM, 50 * MB, max_num_seqs=2**12, max_num_batched_tokens=300, device_memory_budget=budget)
    stub, shapes = Stub(plan), Shapes(300, 256)
    each = -(-(3 * MB * 8 + memory.PIECE) // 8)
    usual = budget // 100 // each + others
    most = sizing.size_cache(stub, plan, shapes, usual)
    assert stub.held.graph == each and most == usual and stub.graphs is None
    beside = 80 * MB + memory.PIECE + most * each
    assert stub.plan.num_blocks * BLOCK == stub.kv_bytes == min(plan.share.most * BLOCK, (budget - beside) // BLOCK * BLOCK)
    assert sizing.size_cache(Stub(plan), plan, shapes, 1) == budget // 100 // each


class Recorded:
    """Stands in for `Graphs`."""

    def __init__(self, shapes, record) -> None:
        self.shapes, self.captured = shapes, set()

    def prepare(self, shapes) -> None:
        self.captured |= set(shapes)

    def replay(self, shape) -> bool:
        return shape in self.captured
