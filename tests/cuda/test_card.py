"""What only a card can show: sizes of real models, graphs, every kernel compiled. Skipped where there is none."""

from __future__ import annotations

import gc

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the backend is PyTorch's")
pytest.importorskip("triton", reason="Triton has no package for this system")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from nano_vllm import LLM, registry  # noqa: E402
from nano_vllm.backends import cuda, reference  # noqa: E402
from nano_vllm.backends.cuda import memory  # noqa: E402
from nano_vllm.backends.cuda.kernels import attention, linear, one_row  # noqa: E402
from nano_vllm.memory.plan import resolve  # noqa: E402
from nano_vllm.model.program import lower  # noqa: E402
from nano_vllm.options import options  # noqa: E402
from nano_vllm.sampling import pipeline  # noqa: E402
from nano_vllm.sampling.params import SamplingParams  # noqa: E402
from tests.backends import tiny  # noqa: E402
from tests.backends.test_unload import write  # noqa: E402

from .test_draw import draw, sampling  # noqa: E402
from .test_kernels import WITH_SCALES, Paged, array, close, ints, poisoned, prefilled, random  # noqa: E402
from .test_session import BOUNDS, ids, model, opened, run, weights  # noqa: E402


@pytest.mark.parametrize("heads, kv_heads, size", [(16, 8, 128), (32, 8, 128), (9, 3, 64), (8, 1, 256)])
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("block, cache", [(16, "bf16"), (256, "bf16"), *((16, name) for name in WITH_SCALES)])
def test_decode_over_long_contexts(heads, kv_heads, size, window, block, cache):
    lengths = (1, 33, 3000, 1025)
    paged, scale = Paged(lengths, kv_heads, size, cache, block), size**-0.5
    q, out = random(4, heads * size, type="bf16"), poisoned(4, heads * size, type="bf16")
    space = torch.empty(attention.scratch(8, heads, kv_heads, size), device="cuda")
    attention.decode(
        q, paged.cache, out, ints(paged.table), ints([paged.table.shape[1]]), ints([0, 1, 2, 3]), ints([0, 1, 2, 3]),
        ints(np.array(lengths) - 1), space, scale, window, heads,
    )  # fmt: skip
    right = [paged.attend(array(q)[s].reshape(heads, size), s, n - 1, scale, window) for s, n in enumerate(lengths)]
    close(out, np.stack(right).reshape(4, -1), "bf16")


@pytest.mark.parametrize("heads, kv_heads, size", [(16, 8, 128), (32, 8, 128), (9, 3, 64), (8, 1, 256)])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("cache", ["bf16", *WITH_SCALES])
def test_prefill_of_long_prompts(heads, kv_heads, size, window, cache):
    out, right = prefilled([(0, 1031), (513, 700), (0, 128), (1, 333)], heads, kv_heads, size, "bf16", cache, window)
    some = [0, 1, 63, 64, 128, 1030, 1031, 1032, 1364, 1730, 1731, 1858, 1859, 2191]
    close(out[some], np.stack([right(r) for r in some]), "bf16")
    assert torch.isfinite(out.float()).all()


@pytest.mark.parametrize("count", [2, 16])
@pytest.mark.parametrize("n, k", [(4096, 1024), (1024, 3072), (151936, 1024), (4096, 12288)])
def test_linear(count, n, k):
    x, weight = random(count, k, type="bf16"), torch.randn(n, k, device="cuda").bfloat16()
    parts = linear.tiles(count, n, k, True)[2]
    out = poisoned(parts, count, n)
    linear.linear(x, weight, None, out)
    close(out.sum(0), array(x.double() @ weight.double().T), "bf16")


@pytest.mark.parametrize("n, k", [(4096, 1024), (1024, 2048), (1024, 3072), (151936, 1024), (24576, 4096), (4096, 12288)])
def test_product_of_one_row(n, k):
    x, norm, weight = random(1, k), random(k, seed=1), torch.randn(n, k, device="cuda").bfloat16()
    out = poisoned(1, n)
    one_row.product(x, weight, None, out, norm, 1e-6)
    close(out, array(torch.nn.functional.rms_norm(x.double(), (k,), norm.double(), 1e-6) @ weight.double().T), "bf16")


def test_draws_from_a_large_vocabulary():
    cases = [
        dict(), dict(temperature=0), dict(temperature=0.6), dict(top_k=50), dict(top_p=0.9),
        dict(top_k=20, top_p=0.95, min_p=0.01),
        dict(repetition_penalty=1.2, frequency_penalty=0.1), dict(min_p=0.05, temperature=1.5),
    ]  # fmt: skip
    logits = (3 * np.random.default_rng(1).standard_normal((len(cases), 151936))).astype(np.float32)
    batch = sampling([SamplingParams(**case) for case in cases], 151936)
    np.testing.assert_array_equal(draw(logits, batch), pipeline.sample(logits, batch))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("architecture, index", tiny.variants())
def test_logits_of_every_architecture(architecture, index, dtype):
    """Against the reference backend, which tests/backends holds to transformers."""
    module = registry.load("architectures", architecture)
    spec = module.describe(tiny.configs(module)[index])
    settings = dict(max_num_batched_tokens=64, max_model_len=4096)
    prompt = tiny.tokens(spec.vocab_size)
    exact = tiny.logits(opened(spec, reference, **settings), prompt)
    ours = tiny.logits(opened(spec, dtype=dtype, **settings), prompt)
    # these models are made sharp: an error of one layer grows in the next ones
    assert np.sqrt(np.mean((ours - exact) ** 2)) <= 3 * BOUNDS[dtype] * np.sqrt(np.mean(exact**2))


@pytest.mark.parametrize("dtype, kv", [("f32", "f32"), ("bf16", "bf16"), *(("f32", name) for name in WITH_SCALES)])
def test_graphs_change_no_answer(dtype, kv):
    """Batches that grow and shrink, with graphs captured before and on the way, against every kernel launched by itself. The
    second round runs on graphs alone."""
    requests = [
        (ids(3 + 7 * i, seed=i).tolist(), SamplingParams(temperature=0.9 * (i % 3), seed=i, max_tokens=3 + 4 * i))
        for i in range(11)
    ]
    plan = dict(num_blocks=128, max_num_seqs=9, max_num_batched_tokens=96)
    spec = model(head_size=64, hidden=256, mlp=512)
    eager = run(opened(spec, dtype=dtype, kv=kv, enforce_eager=True, **plan), requests)
    session = opened(spec, dtype=dtype, kv=kv, **plan)
    assert set(session.graphs.captured) == set(session.graphs.shapes.usual(session.runner.tile_tokens))
    first = run(session, requests)
    assert not session.graphs.refused
    second = run(session, requests)
    if dtype == "f32":  # in bf16, padding may change a product's order of sums
        assert first == eager and second == eager
    assert list(map(len, second)) == list(map(len, eager))


def held() -> int:
    """Bytes in use on the device, by anybody."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_an_unloaded_model_gives_the_device_back(tmp_path):
    """The first time leaves CUDA's context, the code of kernels and the libraries' handles; later times leave nothing."""
    with LLM(str(write(tmp_path / "model")), backend="cuda", num_blocks=2**17) as llm:
        params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        right = llm.generate([[1, 2, 3]] * 9, params, use_tqdm=False)[0].token_ids
        llm.unload_model()
        before = held()
        for _ in range(2):
            llm.load_model()
            assert llm.generate([[1, 2, 3]] * 9, params, use_tqdm=False)[0].token_ids == right
            cache = llm.plan.num_blocks * llm.plan.block_size * llm.stats()["kv_bytes_per_token"]
            assert held() - before > cache > 10**9
            llm.unload_model()
            assert held() - before < 20e6


@pytest.mark.parametrize("budget, eager", [(4 * 10**9, False), (12 * 10**9, False), (4 * 10**9, True)])
def test_the_device_holds_what_was_promised(budget, eager):
    """Before loading, after it, and as the sum of the owners: within 3 %, and never more than the budget."""
    program = lower(model(heads=16, kv_heads=8, head_size=128, hidden=1024, mlp=3072, layers=8))
    packed = weights(program, "bf16")
    gc.collect()
    torch.cuda.empty_cache()
    before = held() - memory.context_bytes(torch.cuda.current_device())
    asked = options(backend="cuda", device_memory_budget=budget, enforce_eager=eager)
    planned = resolve(asked, program, "cuda", cuda.KV_DTYPE, cuda.device(asked, {n: t.info for n, t in packed.items()}))
    session = cuda.open(program, packed, planned)
    first, plan = held() - before, session.plan
    prompts = [(ids(40 + 15 * i, seed=i).tolist(), SamplingParams(max_tokens=4 + i % 9, ignore_eos=True)) for i in range(256)]
    run(session, prompts)
    used, owners = held() - before, session.memory()
    session.close()
    print(f"promised {planned.device_bytes / 1e6:,.0f} MB, after measuring {plan.device_bytes / 1e6:,.0f}; held after opening "
          f"{first / 1e6:,.0f}, after {len(prompts)} requests {used / 1e6:,.0f};", owners)  # fmt: skip
    assert max(first, used) <= budget
    for said in (planned.device_bytes, plan.device_bytes, sum(owners.values())):
        assert abs(said - used) <= 0.03 * used


def test_a_closed_session_gives_its_memory_back():
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    session = opened(num_blocks=4096)
    assert torch.cuda.memory_allocated() > before
    session.close()
    del session
    gc.collect()
    assert torch.cuda.memory_allocated() <= before  # less: libraries keep workspaces for the streams of sessions before it
