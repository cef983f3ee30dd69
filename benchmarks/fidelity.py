"""What rounding costs: how far predictions are from float32 arithmetic on the same (dequantised) weights.

    python benchmarks/fidelity.py [--model smollm2] [--windows 6]

Windows of 512 tokens, spread evenly over the licence text (licence_text.py); the second half of each is scored. Per line: the
mean divergence (KL, in nats) of the next token's probabilities from those of the reference backend in float32, and the
perplexity. All lines but float32 keep keys and values in f16; the two that follow it round activations in NumPy, in one plane
throughout, and as the CPU backend does (position 0 in two). llama.cpp is asked where llama-cpp-python is installed (the `bench`
extra) and the model is a .gguf file. Takes minutes: NumPy rounds slowly.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from licence_text import licence_text

from nano_vllm import perplexity, registry
from nano_vllm.backends import reference
from nano_vllm.backends._rounding import linear_int8
from nano_vllm.loading import open_tokenizer
from nano_vllm.memory.plan import resolve
from nano_vllm.model.program import lower
from nano_vllm.model.weights import open_model
from nano_vllm.options import Options, options
from nano_vllm.sources.resolve import resolve as resolve_path

WINDOW = 512
HALF = WINDOW // 2
Logits = Callable[[np.ndarray], np.ndarray]  # (WINDOW,) ids -> (WINDOW − 1 − HALF, vocabulary) float32, of the scored rows


class OnePlane(reference.Session):
    """The reference with int8 activations, position 0 rounded as all others."""

    def _linear(self, x, weight, bias, first):
        if weight not in self.quantized:
            return super()._linear(x, weight, bias, first)
        return linear_int8(x, self.quantized[weight], self.weights[bias] if bias else None, np.zeros(len(x), bool))


class Engines:
    """What is compared, opened one at a time: all at once need gigabytes."""

    def __init__(self, asked: Options) -> None:
        self.asked, self.path = asked, resolve_path(asked.model, asked)
        self.opened = open_model(self.path)
        self.program = lower(self.opened.spec)
        self.tokenizer = open_tokenizer(asked, self.opened, self.program)

    def plan(self, backend: str, dtype: str):
        asked = replace(self.asked, kv_cache_dtype=dtype, num_blocks=WINDOW // 16, max_num_batched_tokens=WINDOW)
        return resolve(asked, self.program, backend, dtype)

    def session(self, open_session, dtype: str, backend: str = "reference") -> Logits:
        session = open_session(self.program, self.opened.weights, self.plan(backend, dtype))
        table = np.arange(WINDOW // 16, dtype=np.int32)[None]
        return lambda ids: session.submit(perplexity._batch(ids, 0, WINDOW - 1, HALF, table)).result().logits

    def llama_cpp(self) -> Logits:
        import llama_cpp

        llm = llama_cpp.Llama(str(self.path), n_ctx=WINDOW, n_batch=WINDOW, logits_all=True, verbose=False)

        def logits(ids: np.ndarray) -> np.ndarray:
            llm.reset()
            llm.eval(ids.tolist())
            return llm.scores[HALF : WINDOW - 1]

        return logits

    def each(self) -> Iterator[tuple[str, Callable[[], Logits]]]:
        """Names, and what opens them."""
        yield "int8, one plane (NumPy)", lambda: self.session(lambda *a: OnePlane(*a, "int8"), "f16")
        yield "int8 (NumPy)", lambda: self.session(lambda *a: reference.open(*a, activations="int8"), "f16")
        yield "cpu backend", lambda: self.session(registry.load("backends", "cpu").open, "f16", "cpu")
        if self.path.suffix == ".gguf":
            yield "llama.cpp", self.llama_cpp


def windows_of(ids: np.ndarray, count: int) -> np.ndarray:
    """(count, WINDOW) ids: the first whole window, the last, and others evenly between them."""
    whole = ids[: len(ids) // WINDOW * WINDOW].reshape(-1, WINDOW)
    chosen = np.unique(np.linspace(0, len(whole) - 1, min(count, len(whole))).round().astype(int))
    print(f"windows of {WINDOW} tokens: {', '.join(map(str, chosen))} of 0 to {len(whole) - 1}", end="")
    print(f"; {len(chosen) * (WINDOW - 1 - HALF):,} rows scored")
    return whole[chosen]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """(rows, vocabulary) -> float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def losses(logits: np.ndarray, window: np.ndarray) -> np.ndarray:
    return -perplexity.log_likelihoods(logits, window[HALF + 1 :])


def main(args: argparse.Namespace) -> None:
    asked = options(model=args.model, max_model_len=WINDOW)
    engines = Engines(asked)
    windows = windows_of(np.array(engines.tokenizer.encode(licence_text().decode(), parse_special=False), np.int32), args.windows)
    exact = engines.session(reference.open, "f32")
    kept = [exact(window).copy() for window in windows]
    loss = np.concatenate([losses(logits, window) for logits, window in zip(kept, windows)])
    print(f"\n{'':<26}{'KL to float32':>15}{'perplexity':>12}")
    print(f"{'float32 (NumPy)':<26}{'':>15}{math.exp(loss.mean()):>12.4f}", flush=True)
    del exact
    for name, opened in engines.each():
        try:
            logits_of = opened()
        except ImportError:
            print(f"{name:<26}{'not installed':>15}")
            continue
        divergence, loss = [], []
        for window, logits in zip(windows, kept):
            found = logits_of(window)
            loss.append(losses(found, window))
            for row, theirs in zip(logits, found):  # a row at a time: float64 of all would be large
                p, q = log_softmax(row[None]), log_softmax(theirs[None])
                divergence.append(float((np.exp(p) * (p - q)).sum()))
        print(f"{name:<26}{np.mean(divergence):>15.5f}{math.exp(np.concatenate(loss).mean()):>12.4f}", flush=True)
        del logits_of
    engines.opened.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2", help="alias, Hugging Face id, folder, or .gguf file (default smollm2)")
    parser.add_argument("--windows", type=int, default=6, metavar="N", help="how many windows (default 6)")
    main(parser.parse_args())
