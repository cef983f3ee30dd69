"""Products with packed matrices on the device, at the shapes of a layer of Qwen3-8B, beside PyTorch's in bf16.

    python -m benchmarks.gpu_packed [--rows 1 8 64 ...] [--json FILE]

For each number of rows and kind of weights: microseconds of the layer's four products, the bytes of the weights a second that
this makes, and how many times bf16's speed it is. `unpacked` is the way that steps of more rows take: unpack, then PyTorch.
Where it overtakes, `packed.MAX_ROWS` should stand. Weights rotate through more memory than a cache holds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

SHAPES = ((6144, 4096, False), (4096, 4096, True), (24576, 4096, False), (4096, 12288, True))  # N, K, sums may stay in parts
ROWS = (1, 8, 16, 32, 64, 128, 256, 1024)
KINDS = ("bf16", "q8", "q4", "q4 128", "q4 minimum")
CACHED = 2**28  # bytes of weights between two uses of the same: several times the last cache of a large card
REPEATS = 20


def matrix(kind: str, n: int, k: int):
    import torch

    from nano_vllm.backends.cuda.kernels.packed import Packed

    if kind == "bf16":
        return torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    group, four = 128 if "128" in kind else 32, "q4" in kind
    quants = torch.randint(0, 256, (n, k // 2 if four else k), dtype=torch.uint8, device="cuda")
    scales = torch.full((n, k // group), 0.01, dtype=torch.float16, device="cuda")
    mins = -8 * scales if "minimum" in kind else None
    return Packed((n, k), quants if four else quants.view(torch.int8), scales, mins)


def seconds(work, copies: int) -> float:
    """Median seconds of `work(i)`, as one graph, over REPEATS graphs of every copy."""
    import torch

    for i in range(copies):
        work(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            work(i)
    begins, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(REPEATS)] for _ in range(2))
    for begin, end in zip(begins, ends):
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return sorted(b.elapsed_time(e) for b, e in zip(begins, ends))[REPEATS // 2] / 1e3 / copies


def product(weights: list, x, splittable: bool, unpacked: bool) -> float:
    """Seconds of x · weightᵀ the way a step does it."""
    import torch

    from nano_vllm.backends.cuda.kernels import linear, one_row, one_row_packed, packed
    from nano_vllm.backends.cuda.kernels.packed import Packed

    rows, (n, k) = len(x), weights[0].shape
    compact, parts = isinstance(weights[0], Packed), 1
    inside = not unpacked and rows <= (packed.max_rows(weights[0], x.dtype) if compact else linear.MAX_ROWS)
    if inside and splittable and rows > 1:
        parts = packed.parts(rows, n, k) if compact else linear.tiles(rows, n, k, True)[2]
    out = torch.empty(parts, rows, n, dtype=torch.float32 if inside and splittable else x.dtype, device="cuda")
    values = torch.empty(n, k, dtype=x.dtype, device="cuda") if compact and not inside else None

    def work(i: int) -> None:
        if rows == 1:
            (one_row_packed if compact else one_row).product(x, weights[i], None, out[0])
            return
        if inside:
            (packed if compact else linear).linear(x, weights[i], None, out)
            return
        if compact:
            packed.unpack(weights[i], 0, values)
        torch.mm(x, (values if compact else weights[i]).t(), out=out[0])

    return seconds(work, len(weights))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    import torch

    from nano_vllm.backends.cuda.kernels import packed

    found: list[dict] = []
    for kind in KINDS:
        weights = {}
        for n, k, _ in SHAPES:
            first = matrix(kind, n, k)
            copies = -(-CACHED // first.nbytes)
            weights[n, k] = [first, *(matrix(kind, n, k) for _ in range(copies - 1))]
        size = sum(group[0].nbytes for group in weights.values())
        for rows in args.rows:
            inputs = {k: torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for k in {k for _, k, _ in SHAPES}}
            fits = kind == "bf16" or rows <= packed.max_rows(weights[SHAPES[0][:2]][0], torch.bfloat16)
            for unpacked in (False, True) if kind != "bf16" and fits and rows > 1 else (not fits,):
                each = [product(weights[n, k], inputs[k], split, unpacked) for n, k, split in SHAPES]
                way = "unpacked" if unpacked else ""
                found.append({"kind": kind, "rows": rows, "way": way, "us": [1e6 * t for t in each]})
                plain = next((sum(f["us"]) for f in found if f["kind"] == "bf16" and f["rows"] == rows), 0)
                times, total = "  ".join(f"{1e6 * t:8.1f}" for t in each), 1e6 * sum(each)
                rate = f"{size / total / 1e3:8,.0f} GB/s  {plain / total:5.2f} x bf16"
                print(f"{kind:<11}{rows:>5} {way:<9}{times}  {rate}", flush=True)
        del weights
        torch.cuda.empty_cache()
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
