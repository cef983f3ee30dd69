"""Prints what the kernels give as hashes, so that two machines can be compared: python -m tests.native.bits [model file]

One line per kernel, and an end with what differs if the machine's own instruction sets do. A NaN counts as one NaN; everything
else counts bit for bit. `native/arm.sh` holds the lines of this processor against those of emulated AArch64 ones.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator

import numpy as np

from nano_vllm import formats
from nano_vllm._native import kernels
from nano_vllm.backends.cpu.session import draw
from nano_vllm.sampling.params import SamplingParams

from . import models, test_linear, test_sampling, test_session, test_simd


def digest(*arrays: np.ndarray) -> str:
    total = hashlib.sha256()
    for array in arrays:
        array = np.array(array)
        if array.dtype == np.float32:
            array[np.isnan(array)] = np.nan
        total.update(repr((array.shape, array.dtype.str)).encode() + array.tobytes())
    return total.hexdigest()[:16]


def exact(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Numbers in −1..1 from a generator that takes no logarithm, so that they are the same on every machine."""
    return 2 * np.random.default_rng(seed).random(shape, np.float32) - 1


def lanes(isa: str) -> Iterator[tuple[str, str]]:
    any_bits = [np.random.default_rng(s).integers(0, 2**32, 20_000, np.uint32).view(np.float32) for s in range(3)]
    common = [30 * exact((20_011,), s) for s in range(3)]
    specials = np.array(np.meshgrid(*[np.float32(test_simd.SPECIAL)] * 3)).reshape(3, -1)
    a, b, c = (np.concatenate(parts) for parts in zip(any_bits, common, specials, strict=True))
    for name in kernels.Probe.__members__:
        got = test_simd.probe(isa, name, a, b, c)
        yield f"probe {name}", digest(got.view(np.int32) if name == "to_i32" else got)


def matrices(isa: str) -> Iterator[tuple[str, str]]:
    for format, group, minimum, k in test_linear.MATRICES:
        options = {"q4": {"group": group, "minimum": minimum}}.get(format, {})
        tensor = formats.pack("w", exact((83, k), k) / 8, format, **options)
        w, x, table = test_linear.packed(tensor), exact((33, k), 5), np.empty((83, k), np.float32)
        kernels.embed(isa, w, np.arange(83, dtype=np.int32), table)
        results = [test_linear.linear(isa, w, x[:rows], 83, group > 0) for rows in test_linear.ROWS]
        name = format + (f", groups of {group}" if group else "") + (", minimum" if minimum else "") + f", k {k}"
        yield f"linear {name}", digest(*results)
        yield f"embed {name}", digest(table)
    x = kernels.quantize(isa, np.ldexp(exact((9, 256), 6), np.arange(-60, 61, 15)[:, None]))
    yield "quantize", digest(x.quants, x.scales, x.sums, x.shifts)


def sessions(isa: str) -> Iterator[tuple[str, str]]:
    """Embedding, norms, projections, rotation with the cache write, attention and gate, by op, of whole steps."""
    settings = (("q4", "silu"), ("q8", "gelu_tanh"), ("f32", "silu"))
    for i, kv in enumerate(("f32", "f16", "bf16", "int16", "int8")):
        for j, (name, spec) in enumerate(test_session.SPECS.items()):
            format, activation = settings[(i + j) % 3]  # every two of cache, shape and format meet once
            session = models.session(models.model(**spec, activation=activation), format=format, isa=isa, kv=kv)
            table = models.blocks(session, 531)
            first = models.step(session, [(models.ids(530), 0, table)])
            then = models.step(session, [(models.ids(1, 2), 530, table)])
            yield f"session {name}, weights {format}, cache {kv}, {activation}", digest(*first.values(), *then.values())


def draws(isa: str) -> Iterator[tuple[str, str]]:
    logits = 6 * exact((test_sampling.ROWS, 1000), 7)
    native = test_sampling.holding(logits)
    for name, case in test_sampling.CASES.items():
        batch = test_sampling.sampling([SamplingParams(**case)] * len(logits), logits.shape[1])
        yield f"draw {name}", digest(draw(native, batch, np.zeros(len(logits), bool)))


def whole_model(isa: str, path: str) -> Iterator[tuple[str, str]]:
    from nano_vllm import LLM
    from tests.golden import test_same_bits

    prompts = [test_same_bits.prompts()[i] for i in (3, 8)]  # 17 and 100 tokens
    with LLM(path, backend="cpu", isa=isa) as llm:
        for ids, found in zip(prompts, test_same_bits.hashes(llm, prompts, together=True, new=3), strict=True):
            yield f"logits of three steps after {len(ids)} tokens", found[:16]


def results(isa: str) -> Iterator[tuple[str, str]]:
    for part in (lanes, matrices, sessions, draws):
        yield from part(isa)
    for path in sys.argv[1:]:
        yield from whole_model(isa, path)


def main() -> None:
    first, *others = models.ISAS
    expected = {}
    for name, found in results(first):
        expected[name] = found
        print(found, name, flush=True)
    wrong = [f"{isa}: {name}" for isa in others for name, found in results(isa) if expected[name] != found]
    if wrong:
        raise SystemExit("\n".join([f"not the bits of {first}:", *wrong]))
    print(f"{len(expected)} hashes, the same on {', '.join(models.ISAS)}", file=sys.stderr)


if __name__ == "__main__":
    main()
