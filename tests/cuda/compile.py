"""Compiles every kernel for sm_90 at the sizes of Qwen3-0.6B; needs no card. `PYTHONPATH=src python -m tests.cuda.compile`

Prints what each takes: shared memory, lines of PTX, whether it has wgmma and asynchronous copies.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nano_vllm.backends.cuda.kernels import (
    attend_row,
    attention,
    decode_int8,
    linear,
    one_row,
    one_row_packed,
    packed,
    prefill,
    rotate,
    rows,
    sampling,
    tiled,
)

TYPES = {
    "*bf16": "table qkv keys values src x weight",
    "*fp32": "cosines sines q_norm k_norm norm key_scales value_scales sums parts logits "
    "temperatures tops borders repetition frequency presence bias",
    "*fp64": "min_p top_p",
    "*i32": "tokens sources slots positions arrived stride rows sequences counts begins ids starts history prompts arguments "
    "border_ids last_ids seeds indices skip top_k",
    "*fp16": "scales mins",
    "fp32": "eps scale",
    "i32": "count first first_row",
}
OF = {name: kind for kind, names in TYPES.items() for name in names.split()}
ATTENTION = dict(QKV=4096, OUT=2048, BLOCK=16, KV=8, SCALED=False, GROUP=2, SIZE=128, PADDED=128, WINDOW=0, KIND=tl.bfloat16)
INT8, FP8 = (dict(keys=kind, values=kind) for kind in ("*i8", "*fp8e4nv"))
ATTEND_ROW = ATTENTION | dict(STRIDE=4096, ROWS=16, TILE=64, SPLITS=32, NORM=True, PDL=True)
del ATTEND_ROW["QKV"], ATTEND_ROW["SCALED"]
NORMALIZE = dict(WIDTH=1024, PADDED=1024, PARTS=4, ROWS=1, PDL=True)
ROTATE = dict(STRIDE=4096, Q=16, KV=8, SIZE=128, HALF=64, PADDED=64, NORM=True, LINES=8, UNITS=0, BLOCK=16, KEEP=False, PDL=True)
VOCABULARY = dict(V=151936, CHUNKS=38, PADDED=64, CHUNK=4096)
MATRIX = dict(N=4096, K=1024, BIASED=False, PARTS=1)
PACKED = MATRIX | dict(GROUP=32, FOUR=True, MINIMUM=True)
QUANTS8 = MATRIX | dict(GROUP=32, FOUR=False, MINIMUM=False)
DECODE = ATTENTION | dict(ROWS=16, TILE=64, PDL=True)
PREFILL = ATTENTION | dict(LANES=2, ROWS=64, TILE=64, OWN=True, TMA=False)
PAGED = PREFILL | dict(SCALED=True, OWN=False)
DECODE_INT8 = dict(QKV=4096, OUT=2048, BLOCK=16, KV=8, GROUP=2, LANES=2, SIZE=128, WORDS=32, TILE=8, WINDOW=0, SPLITS=1, PDL=True)
BF16 = dict(table="*i32", out="*bf16")
F32, ROW = dict(out="*fp32"), dict(x="*fp32")
ONE = dict(NORM=True, BIASED=False, ACTIVATION="", ADD=False, PDL=True)
GATED = ONE | dict(N=6144, ACTIVATION="silu")
ONE_Q4 = dict(N=4096, K=1024, GROUP=32, FOUR=True, MINIMUM=True, OUTPUTS=8, GROUPS=32, UNITS=1, STAGES=4)
KERNELS = [  # kernel, constants, types that differ, warps, stages
    (rows._embed, dict(WIDTH=1024, COLUMNS=1024), F32, 4, 2),
    (
        rows._normalize,
        dict(WIDTH=1024, PADDED=1024, PARTS=4, ROWS=1, PDL=True),
        dict(x="*fp32", weight="*fp32", out="*bf16"),
        4,
        2,
    ),
    (rows._add, dict(WIDTH=1024, COLUMNS=1024, PARTS=2), dict(x="*fp32"), 4, 2),
    (rows._gate, dict(SIZE=3072, STRIDE=6144, ACTIVATION="silu", COLUMNS=1024, PDL=True), dict(out="*bf16"), 4, 2),
    (rotate._rotate, ROTATE, {}, 4, 2),
    (rotate._rotate, ROTATE | dict(UNITS=127), INT8, 4, 2),
    (rotate._rotate, ROTATE | dict(UNITS=448), FP8, 4, 2),
    (attention._decode, DECODE | dict(SPLITS=1), BF16, 4, 3),
    (attention._decode, DECODE | dict(SPLITS=8), dict(table="*i32") | F32, 4, 3),
    (attention._decode, DECODE | dict(SCALED=True, SPLITS=1), INT8 | BF16, 4, 3),
    (decode_int8._decode, DECODE_INT8, dict(keys="*i32", values="*i32") | BF16, 2, 2),
    (attention._decode, DECODE | dict(SCALED=True, SPLITS=1), FP8 | BF16, 4, 3),
    (attention._merge, dict(OUT=2048, HEADS=16, SIZE=128, PADDED=128, SPLITS=8, PDL=True), dict(out="*bf16"), 2, 2),
    (attend_row._attend, ATTEND_ROW, dict(table="*i32", out="*bf16"), 4, 3),
    (prefill._prefill, PREFILL | dict(TMA=True), BF16 | dict(own="tensordesc<bf16[64,128]>"), 4, 3),
    (prefill._prefill, PREFILL, BF16 | dict(own="*bf16"), 4, 2),
    (prefill._prefill, PAGED, INT8 | BF16 | dict(own="*bf16"), 4, 2),
    (prefill._prefill, PAGED, FP8 | BF16 | dict(own="*bf16"), 4, 2),
    (one_row._product, ONE | dict(N=4096, K=1024, LINES=8, TILE=1024), ROW | dict(out="*bf16"), 4, 2),
    (one_row._product, ONE | dict(N=6144, K=1024, LINES=8, TILE=1024, ACTIVATION="silu"), ROW | dict(out="*bf16"), 4, 2),
    (one_row._product, ONE | dict(N=1024, K=3072, LINES=2, TILE=4096, NORM=False, ADD=True), F32, 4, 2),
    (one_row._product, ONE | dict(N=4096, K=12288, LINES=4, TILE=2048, NORM=False, ADD=True), F32, 4, 2),
    (tiled._tiled, MATRIX | dict(PARTS=4, ROWS=64, LINES=32, TILE=128, PDL=True), dict(rows="i32") | F32, 4, 4),
    (tiled._tiled, MATRIX | dict(PARTS=4, ROWS=64, LINES=64, TILE=64, PDL=True), dict(rows="i32") | F32, 4, 8),
    (linear._few, MATRIX | dict(COLUMNS=16, TILE=128, ROWS=16), dict(rows="i32") | F32, 4, 4),
    (one_row_packed._product, ONE | ONE_Q4, ROW | dict(quants="*i32", out="*bf16"), 4, 2),
    (one_row_packed._product, ONE_Q4 | GATED, ROW | dict(quants="*i32", out="*bf16"), 4, 2),
    (one_row_packed._product, ONE | ONE_Q4 | dict(FOUR=False, MINIMUM=False), ROW | dict(quants="*i32", out="*bf16"), 4, 2),
    (packed._several, PACKED | dict(OUTPUTS=64, BLOCKS=4, ROWS=64), dict(quants="*u8", rows="i32", out="*bf16"), 4, 4),
    (packed._several, QUANTS8 | dict(OUTPUTS=64, BLOCKS=4, ROWS=64), dict(quants="*i8", rows="i32", out="*bf16"), 4, 4),
    (
        packed._unpack,
        dict(K=1024, GROUP=32, FOUR=False, MINIMUM=False, GATHER=True, COLUMNS=1024),
        dict(quants="*i8", out="*bf16"),
        4,
        2,
    ),
    (sampling._ban, dict(V=151936, TILE=128), {}, 4, 2),
    (sampling._count, dict(V=151936, TILE=128), {}, 4, 2),
    (sampling._penalize, dict(V=151936, TILE=128), {}, 4, 2),
    (sampling._survey, dict(V=151936, CHUNKS=38, CHUNK=4096), {}, 4, 2),
    (sampling._mass, VOCABULARY | dict(BORDERS=True), {}, 4, 2),
    (sampling._pick, VOCABULARY | dict(BORDERS=True), {}, 8, 2),
    (sampling._border, VOCABULARY, {}, 8, 2),
]


def main() -> None:
    for kernel, constants, types, warps, stages in KERNELS:
        names = kernel.arg_names
        signature = {name: "constexpr" if name in constants else types.get(name, OF.get(name)) for name in names}
        places = {(i,): constants[name] for i, name in enumerate(names) if name in constants}
        aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
        source = ASTSource(kernel, signature, places, aligned)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})
        text = made.asm["ptx"]
        has = [word for word in ("wgmma", "cp.async", "ld.global.v4") if word in text]
        print(
            f"{kernel.__name__:<12}{made.metadata.shared:>8} B shared{text.count(chr(10)):>7} lines  {', '.join(has)}", flush=True
        )


if __name__ == "__main__":
    main()
