"""What the CUDA backend computes on the host: sizes, tiles, the layout of a step's inputs, the plan."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

pytest.importorskip("torch", reason="the backend is PyTorch's")
pytest.importorskip("triton", reason="Triton has no package for this system")

from nano_vllm.backends import cuda  # noqa: E402
from nano_vllm.backends.cuda import graphs, layout, warmup  # noqa: E402
from nano_vllm.backends.cuda.graphs import Shapes, is_decode, padded_sizes  # noqa: E402
from nano_vllm.errors import NotEnoughMemory, OptionError  # noqa: E402
from nano_vllm.memory.plan import Device, kv_bytes_per_token, resolve  # noqa: E402
from nano_vllm.model.program import lower  # noqa: E402
from nano_vllm.options import options  # noqa: E402
from tests.backends import tiny  # noqa: E402

from .test_session import ids, model, opened, weights  # noqa: E402


@pytest.mark.parametrize("most", [1, 2, 16, 100, 256, 1024])
def test_padding_wastes_less_than_a_tenth(most):
    sizes = padded_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    for rows in range(1, most + 1):
        size = next(s for s in sizes if s >= rows)
        assert size - rows < 0.1 * rows
    assert len(sizes) <= 64


def test_shapes_of_graphs_hold_the_steps():
    shapes = Shapes(100, 12)
    assert shapes.decode(11) == layout.Shape(12, 12, 0, 12) and is_decode(shapes.decode(11))
    for shape in (layout.Shape(33, 3, 2, 5), layout.Shape(96, 11, 8, 12), layout.Shape(2, 0, 1, 1)):
        padded = shapes.mixed(shape)
        assert not is_decode(padded) and padded.rows % 32 == 0 and padded.rows <= 100
        assert all(getattr(padded, f) >= getattr(shape, f) for f in ("rows", "decodes", "tiles", "wanted"))
        assert max(padded.decodes, padded.wanted) <= 12 and (padded.decodes == 0) == (shape.decodes == 0)
    assert shapes.mixed(layout.Shape(97, 0, 2, 1)) is None


@pytest.mark.parametrize("pad", [0, 3])
def test_a_layout_holds_the_batch(pad):
    parts = [(ids(1), 20, [3, 1]), (ids(37), 5, [7, 2, 4]), (ids(1), 0, [6])]
    batch = tiny.batch(parts, "last", want_logits=False)
    shape = layout.shape_of(batch, 16)
    assert (shape.rows, shape.decodes, shape.tiles, shape.wanted) == (39, 2, 3, 3)
    shape = layout.Shape(shape.rows + pad, shape.decodes + pad, shape.tiles + pad, shape.wanted + pad)
    out = np.full(layout.capacity(64, 8, 100), -99, np.int32)
    used = layout.fill(out, shape, batch, 16, 16)
    found, table = layout.parts(shape)
    assert used == table + 9 and all(part.start % layout.ALIGNED == 0 for part in found.values())

    def read(name):
        part = found[name]
        return out[part.start : part.start + part.count].view(part.dtype)

    np.testing.assert_array_equal(read("tokens")[:39], batch.tokens)
    np.testing.assert_array_equal(read("slots")[[0, 1, 38]], [1 * 16 + 4, 7 * 16 + 5, 6 * 16])
    assert (read("slots")[39:] == -1).all() and (read("sources")[39:] == -1).all()
    assert read("decode_rows").tolist() == [0, 38] + [-1] * pad and read("decode_sequences")[:2].tolist() == [0, 2]
    assert read("tile_rows")[:3].tolist() == [33, 17, 1]  # those with the most keys first
    assert read("tile_begins")[:3].tolist() == [5, 5, 5] and read("tile_sequences")[:3].tolist() == [1, 1, 1]
    assert read("tile_counts").tolist() == [5, 16, 16] + [0] * pad and read("skip").tolist() == [0, 0, 0] + [1] * pad
    np.testing.assert_array_equal(read("stride"), [3])
    np.testing.assert_array_equal(out[table:used].reshape(3, 3), batch.block_tables[0])
    assert read("temperature").dtype == np.float32 and read("top_p").tolist()[:3] == [1.0, 1.0, 1.0]


def test_warm_up_stays_within_the_plan():
    for plan in (tiny.plan("cuda"), tiny.plan("cuda", num_blocks=1, max_num_seqs=1, max_num_batched_tokens=1, max_model_len=2)):
        for batch in warmup.batches(plan):
            assert len(batch.tokens) <= plan.max_num_batched_tokens and len(batch.starts) - 1 <= plan.max_num_seqs
            assert batch.block_tables[0].max() < plan.num_blocks and batch.positions.max() < plan.max_model_len


DEVICE = Device("a card", 10**9, 8 * 10**8, "bf16", 64, partial(cuda.needs, {}, 1))


def made(program, **asked):
    needs = Device(**{**DEVICE.__dict__, "needs": lambda *args: 10**8})
    return resolve(options(backend="cuda", **asked), program, "cuda", "bf16", needs)


def test_the_cache_gets_what_the_device_has_left():
    program = lower(model())
    block = 16 * kv_bytes_per_token(program, "bf16")
    plan = made(program, max_num_seqs=2**20)
    assert (plan.dtype, plan.kv_cache_dtype, plan.max_num_batched_tokens) == ("bf16", "bf16", 64)
    assert plan.num_blocks == (9 * 10**8 - 2 * 10**8 - 10**8) // block  # 0.9 of all, less what others use and what is not cache
    assert "a card" in plan.reasons["num_blocks"]
    assert made(program, max_num_seqs=2**20, gpu_memory_utilization=0.5).num_blocks == (2 * 10**8) // block
    assert made(program, max_num_seqs=2**20, device_memory_budget="300MB").num_blocks == (2 * 10**8) // block
    assert made(program, max_num_seqs=2**20, dtype="f32").kv_cache_dtype == "f32"
    assert made(program, max_num_seqs=2).num_blocks == 2 * 4096 // 16
    with pytest.raises(NotEnoughMemory, match="800 MB of a card are free"):
        made(program, device_memory_budget="900MB")
    with pytest.raises(NotEnoughMemory, match="holds no block"):
        made(program, device_memory_budget="100MB")
    for wrong in ({"gpu_memory_utilization": 1.5}, {"gpu_memory_utilization": 0.5, "device_memory_budget": 1}, {"dtype": "int8"}):
        with pytest.raises(OptionError):
            made(program, **wrong)


def test_needs_count_weights_and_buffers():
    program = lower(model())
    weights = sum(int(np.prod(shape)) * (2 if len(shape) == 2 else 4) for shape in program.parameters.values())
    least = cuda.needs({}, 1, program, "bf16", 1, 1, 1) - cuda.OTHERS
    assert (
        least > weights
        and cuda.needs({}, 1, program, "bf16", 1000, 1, 1) - cuda.OTHERS > least + 999 * 2 * sum(program.widths.values()) / 2
    )


@pytest.mark.parametrize("dtype, format", [("f32", "f32"), ("bf16", "bf16"), ("bf16", "q4")])
def test_needs_are_what_a_session_takes(dtype, format):
    spec = model(hidden=64, mlp=64, bias=format == "bf16")
    program, sizes = lower(spec), (96, 12, 512)
    infos = {name: tensor.info for name, tensor in weights(program, format).items()}
    session = opened(spec, dtype=dtype, format=format, **dict(zip(LIMITS, sizes)))
    takes, needs = session.memory(), cuda.needs(infos, 1, program, dtype, *sizes)
    assert takes["weights"] + takes["scratch"] == pytest.approx(needs - cuda.OTHERS, rel=1e-3)


LIMITS = ("max_num_batched_tokens", "max_num_seqs", "max_model_len")


def test_a_step_that_only_looks_like_decoding_when_padded_has_no_graph():
    shapes = Shapes(64, 32)
    assert shapes.mixed(layout.Shape(20, 20, 0, 18)) is None  # all of one row, but two ids are not wanted
    assert shapes.mixed(layout.Shape(32, 20, 3, 32)).tiles == 4


class Recorder:
    """Stands in for torch.cuda.CUDAGraph."""

    made: list = []

    def capture_begin(self, pool, capture_error_mode):
        pass

    def capture_end(self):
        pass

    def replay(self):
        self.made.append(self)


@pytest.mark.parametrize("rows, sequences", [(8192, 256), (100, 12), (1, 1), (20, 64)])
def test_usual_shapes_are_those_of_decode_steps_and_single_prompts(rows, sequences):
    shapes = Shapes(rows, sequences)
    usual = list(shapes.usual(16))
    assert len(set(usual)) == len(usual) < graphs.MOST
    assert {shapes.decode(n) for n in range(1, shapes.sequences + 1)} == {shape for shape in usual if is_decode(shape)}
    for n in range(2, min(rows, graphs.MIXED_ROWS) + 1):
        padded = shapes.mixed(layout.Shape(n, 0, -(-n // 16), 1))
        assert padded is None or padded in usual


def test_the_largest_step_of_warming_up_is_about_the_largest_there_may_be():
    assert sum(warmup.largest(tiny.plan("cuda", num_blocks=1000, max_num_batched_tokens=8192))) == 8192  # of 4096 each
    assert sum(warmup.largest(tiny.plan("cuda", num_blocks=9, max_model_len=64))) == 3 * 48
    assert sum(warmup.largest(tiny.plan("cuda", num_blocks=2, max_model_len=4, max_num_batched_tokens=20))) == 8


def captures(monkeypatch, record, rows=64, sequences=6):
    monkeypatch.setattr(graphs.torch.cuda, "CUDAGraph", Recorder)
    monkeypatch.setattr(graphs.torch.cuda, "graph_pool_handle", lambda: None)
    return graphs.Graphs(Shapes(rows, sequences), record)


def test_graphs_are_captured_while_a_decode_step_is_waited_for(monkeypatch):
    recorded = []

    def record(shape):
        if shape.rows == 3:
            raise RuntimeError("this one cannot be captured")
        recorded.append(shape)

    made = captures(monkeypatch, record)
    prompt, one, three = made.shapes.mixed(layout.Shape(5, 0, 1, 1)), made.shapes.decode(1), made.shapes.decode(3)
    for shape in (three, prompt, one):
        assert not made.replay(shape)
    assert not recorded
    made.idle(lambda: False)
    assert recorded == [one] and made.replay(one) and not made.replay(prompt)
    left = iter([True, False])
    made.idle(lambda: next(left))
    assert recorded == [one, prompt] and made.replay(prompt)
    made.idle(lambda: True)
    assert made.refused == {three} and not made.replay(three) and not made.wishes


def test_captures_beforehand_end_in_time(monkeypatch):
    made = captures(monkeypatch, lambda shape: None)
    made.prepare(made.shapes.usual(16))
    assert set(made.captured) == set(made.shapes.usual(16))
    clock = iter([0.0, 0.5, 1.0, 9.0])
    monkeypatch.setattr(graphs.time, "perf_counter", lambda: next(clock))
    made = captures(monkeypatch, lambda shape: None)
    made.prepare(made.shapes.usual(16))
    assert list(made.captured) == list(made.shapes.usual(16))[:2]
