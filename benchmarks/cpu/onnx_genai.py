"""onnxruntime-genai as an engine for one stream of SmolLM2, and how its model is made.

    python -m benchmarks.cpu.onnx_genai FILE.gguf FOLDER

Its own builder makes it, from the file's weights in float32: int4 without a minimum in blocks of 32, multiplied as int8 (accuracy
level 4). The engine does that where FOLDER is not there, by the Python that it runs on. What that Python needs is in
`engines.INSTALL`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

BUILD = "--precision int4 --execution_provider cpu --extra_options block_size=32 accuracy_level=4".split()


class OnnxGenAI:
    def __init__(self, model: str, threads: int, longest: int, requests: int, folder: str) -> None:
        import onnxruntime_genai

        self.og = onnxruntime_genai
        if not Path(folder).exists():
            command = [sys.executable, "-m", "benchmarks.cpu.onnx_genai", model, folder]
            made = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            if made.returncode:
                raise RuntimeError(f"its builder failed: {made.stderr.strip().splitlines()[-1]}")
        config = self.og.Config(folder)
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        self.model = self.og.Model(config)

    def run(self, phase: list) -> dict | None:
        if len(phase) > 1:
            return None
        ids, new = phase[0]
        params = self.og.GeneratorParams(self.model)
        params.set_search_options(max_length=len(ids) + new, min_length=len(ids) + new, do_sample=False)
        begin = time.perf_counter()
        generator = self.og.Generator(self.model, params)
        generator.append_tokens(np.array([ids], np.int32))
        generator.generate_next_token()
        first = time.perf_counter() - begin
        for _ in range(new - 1):
            generator.generate_next_token()
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "first_s": first, "tokens": len(generator.get_sequence(0)) - len(ids), "prefix_hits": 0}


def dequantise(source: Path, target: str) -> None:
    """A GGUF file as a Hugging Face folder in float32, with a config that no longer tells of a quantised file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = type(model.config)(**{k: v for k, v in model.config.to_dict().items() if k != "quantization_config"})
    config.architectures = [type(model).__name__]
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    plain.save_pretrained(target)


def build(source: Path, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)  # of a build that was broken off
    with tempfile.TemporaryDirectory(dir=folder.parent) as space:
        dequantise(source, f"{space}/float32")
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "--input", f"{space}/float32", "--output", str(part)]
        subprocess.run([*command, "--cache_dir", f"{space}/cache", *BUILD], check=True)
    part.rename(folder)


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]))
