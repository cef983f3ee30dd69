"""The workers: one process per engine and file. Each reads phases as lines of JSON and answers with what they took.

    python -m benchmarks.cpu.engines nano-vllm '{"model": "FILE.gguf", "threads": 2, "longest": 2304, "requests": 64}'

The first line says that it is ready, or why not. An engine answers a phase with `seconds`, `first_s` (until the first request
has its first token; null where it is not told), `tokens` and, if it counts them, `prefix_hits`; with null where it does not serve
such a phase. This runs in Pythons that do not have this project.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time

import numpy as np

from .llama_server import LlamaServer
from .onnx_genai import OnnxGenAI

OURS = "nano-vllm"
KV_GB = 2


class Nano:
    """This project. The prefix cache is on, as it is by default; hits are counted."""

    def __init__(self, model: str, threads: int, longest: int, requests: int) -> None:
        from nano_vllm import LLM

        self.asked = {"model": model, "threads": threads, "backend": "cpu", "max_model_len": longest}
        self.llm = LLM(**self.asked, max_num_seqs=requests, kv_cache_memory=f"{KV_GB}GB")

    def run(self, phase: list) -> dict:
        from nano_vllm import SamplingParams

        params = [SamplingParams(temperature=0, max_tokens=new, ignore_eos=True) for _, new in phase]
        prompts = [{"prompt_token_ids": ids} for ids, _ in phase]
        hits = self.llm.stats()["prefix_hit_tokens"]
        begin = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        tokens = sum(len(o.token_ids) for o in outputs)
        hits = self.llm.stats()["prefix_hit_tokens"] - hits
        return {"seconds": seconds, "first_s": outputs[0].timings.first_token_s, "tokens": tokens, "prefix_hits": hits}

    def facts(self) -> dict:
        """Bytes that a step reads, and the hash of the logits of a fixed prompt's last token."""
        stats = self.llm.stats()
        self.llm.close()
        return {name: stats[name] for name in ("weight_bytes", "kv_bytes_per_token")} | {"logits_sha256": self._hash()}

    def _hash(self) -> str:
        from nano_vllm.loading import load
        from nano_vllm.options import options
        from nano_vllm.perplexity import _batch

        loaded = load(options(**self.asked, kv_cache_memory="256MB", max_num_batched_tokens=512))
        ids = np.random.default_rng(0).integers(1000, 40000, 128).astype(np.int32)
        table = np.arange(len(ids) // 16 + 1, dtype=np.int32)[None]
        try:
            logits = loaded.engine.session.submit(_batch(ids, 0, len(ids), len(ids) - 1, table)).result().logits
            return hashlib.sha256(logits[-1].astype("<f4").tobytes()).hexdigest()
        finally:
            loaded.close()


class Llama:
    """llama.cpp through the plain C functions of llama-cpp-python, whose own loop would cost time. One stream only."""

    def __init__(self, model: str, threads: int, longest: int, requests: int) -> None:
        import llama_cpp

        self.c = llama_cpp
        self.llama = llama_cpp.Llama(
            model, n_ctx=longest, n_batch=longest, n_ubatch=512, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def _eval(self, ids: list[int]) -> int:
        array = (self.c.llama_token * len(ids))(*ids)
        if self.c.llama_decode(self.llama.ctx, self.c.llama_batch_get_one(array, len(ids))):
            raise RuntimeError("llama_decode failed")
        logits = self.c.llama_get_logits_ith(self.llama.ctx, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self.llama.n_vocab(),)).argmax())

    def run(self, phase: list) -> dict | None:
        if len(phase) > 1:
            return None
        ids, new = phase[0]
        self.c.llama_memory_clear(self.c.llama_get_memory(self.llama.ctx), True)
        begin = time.perf_counter()
        token = self._eval(ids)
        first = time.perf_counter() - begin
        for _ in range(new - 1):
            token = self._eval([token])
        return {"seconds": time.perf_counter() - begin, "first_s": first, "tokens": new, "prefix_hits": 0}


class OpenVINO:
    """OpenVINO GenAI's continuous batching, prefix cache on; it does not count the hits."""

    def __init__(self, model: str, threads: int, longest: int, requests: int) -> None:
        import openvino
        import openvino_genai

        self.ov, self.genai, self.id = openvino, openvino_genai, 0
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs, scheduler.dynamic_split_fuse = KV_GB, requests, True
        scheduler.max_num_batched_tokens, scheduler.enable_prefix_caching = 2048, True
        self.pipe = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})

    def run(self, phase: list) -> dict:
        handles, first = [], None
        begin = time.perf_counter()
        for ids, new in phase:
            config = self.genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample, config.stop_token_ids = new, True, False, set()
            handles.append(self.pipe.add_request(self.id, self.ov.Tensor(np.array([ids], np.int64)), config))
            self.id += 1
        while self.pipe.has_non_finished_requests():
            self.pipe.step()
            if first is None and handles[0].can_read():
                first = time.perf_counter() - begin
        seconds = time.perf_counter() - begin
        tokens = sum(len(output.generated_ids) for handle in handles for output in handle.read_all())
        return {"seconds": seconds, "first_s": seconds if first is None else first, "tokens": tokens}


ENGINES = {OURS: Nano, "llama.cpp": Llama, "llama-server": LlamaServer, "OpenVINO": OpenVINO, "onnxruntime": OnnxGenAI}
# Groups that an engine is asked for; others are asked for all.
SERVES = {"llama-server": ("throughput", "shared", "scaling"), "onnxruntime": ("latency", "prefill")}
INSTALL = {
    OURS: "pip install .",
    "llama.cpp": "`make bench-cpu` builds it for this processor",
    "llama-server": "`make llama-server` builds it from llama-cpp-python's source; or name one that you have with --llama-server",
    "OpenVINO": "python -m venv .venv/openvino && .venv/openvino/bin/pip install openvino-genai==2026.4.1",
    "onnxruntime": "python -m venv .venv/onnx && .venv/onnx/bin/pip install onnxruntime-genai==0.18.0 onnx-ir torch==2.13.0 "
    "transformers==5.24.0 accelerate gguf==0.19.0",
}


def serves(name: str, groups: list[str]) -> list[str]:
    return [group for group in groups if group in SERVES.get(name, groups)]


def work(name: str, settings: dict) -> None:
    """A worker's life: ready, then an answer for every line until the input ends."""
    try:
        engine = ENGINES[name](**settings)
    except ModuleNotFoundError as error:
        return print(json.dumps({"absent": f"not installed ({error.name}): {INSTALL[name]}"}), flush=True)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return print(json.dumps({"absent": f"does not read this file: {lines[-1][:200]}"}), flush=True)
    print(json.dumps({"ready": True}), flush=True)
    try:
        for line in sys.stdin:
            phase = json.loads(line)
            try:
                answer = engine.facts() if phase == "facts" else engine.run(phase)
            except Exception as error:
                answer = {"absent": f"failed: {type(error).__name__}: {error}"[:300]}
            print(json.dumps(answer), flush=True)
    finally:
        if hasattr(engine, "close"):
            engine.close()


if __name__ == "__main__":
    work(sys.argv[1], json.loads(sys.argv[2]))
