"""unload_model and load_model of LLM and AsyncLLM, on every backend."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from nano_vllm import LLM, AsyncLLM, SamplingParams, registry
from nano_vllm.errors import EngineClosed, ModelFileError, ModelNotFound, ModelUnloaded, NotEnoughMemory
from nano_vllm.options import options
from tests.core.models import CONFIG, numbers, write_folder

GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
PROMPT = [5, 1, 30, 7]


def usable() -> list:
    """Every backend that there is; those that cannot run here are skipped."""
    found = []
    for name, backend in registry.modules("backends").items():
        probe = backend.probe(options(backend=name))
        found.append(pytest.param(name, marks=pytest.mark.skipif(not probe.usable, reason=probe.reason)))
    return found


def write(folder: Path, **changes) -> Path:
    """A model of CONFIG with `changes`, and a tokenizer of as many words."""
    write_folder(folder, numbers(CONFIG | changes), **changes)
    words = {f"w{i}": i for i in range(CONFIG["vocab_size"])}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model} | empty
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("unload") / "model", num_hidden_layers=1)


@pytest.fixture
def llm(folder):
    with LLM(str(folder), backend="reference") as made:
        yield made


def answer(llm) -> list[int]:
    return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].token_ids


def stand_still(llm) -> None:
    """From now on a step computes nothing."""
    llm._thread.call(lambda engine: setattr(engine, "step", lambda: time.sleep(0.001)))


@pytest.mark.parametrize("backend", usable())
def test_a_model_comes_back_as_it_was(folder, backend):
    asked = dict(num_blocks=9, max_num_seqs=3, max_num_batched_tokens=32, seed=5)
    with LLM(str(folder), backend=backend, **asked) as llm:
        right, plan = answer(llm), replace(llm.plan, share=None)  # of what is free, which changes
        for _ in range(2):
            session = llm._thread.engine.session
            llm.unload_model()
            llm.unload_model()
            assert llm._running.loaded.engine is None
            with pytest.raises(EngineClosed):
                session.submit(None)
            llm.load_model()
            engine = llm._thread.engine
            llm.load_model()
            assert llm._thread.engine is engine and engine.session is not session
            assert answer(llm) == right and replace(llm.plan, share=None) == plan
            assert llm.stats()["received"] == 1


def test_requests_to_an_unloaded_model_say_the_mend(llm):
    llm.unload_model()
    asks = (
        lambda: llm.generate(PROMPT, GREEDY),
        lambda: llm.generate([PROMPT] * 2, GREEDY),
        lambda: llm.chat([{"role": "user", "content": "w1"}], GREEDY, chat_template="{{ messages[0].content }}"),
        lambda: llm.stream(PROMPT, GREEDY),
        lambda: llm.stats(),
    )
    for ask in asks:
        with pytest.raises(ModelUnloaded, match=r"load_model\(\)"):
            ask()
    assert llm.encode("w3 w4") == [3, 4] and llm.plan.num_blocks and llm.default_sampling_params()


def test_requests_that_run_end_with_what_they_have(llm):
    right = answer(llm)
    stream = llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    waiting = llm.stream(PROMPT, GREEDY)
    said = next(stream).token_ids
    stand_still(llm)
    outputs: list = []

    def generate() -> None:
        try:
            outputs.extend(llm.generate([PROMPT, PROMPT], GREEDY, use_tqdm=False))
        except ModelUnloaded as error:
            outputs.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    while llm.stats()["received"] < 4:
        time.sleep(0.001)
    begun = time.perf_counter()
    llm.unload_model()
    thread.join(30)
    assert time.perf_counter() - begun < 10 and isinstance(outputs[0], ModelUnloaded) and len(outputs) == 1
    with pytest.raises(ModelUnloaded, match="then send the request again"):
        for piece in stream:
            said += piece.token_ids
    assert said[: len(right)] == right[: len(said)] and said
    llm.load_model()
    with pytest.raises(ModelUnloaded):  # it was made for the engine before
        next(waiting)
    assert answer(llm) == right


def test_threads_are_answered_or_told(llm):
    right, ends = answer(llm), threading.Event()
    answers, told = [], []

    def ask() -> None:
        while not ends.is_set():
            try:
                answers.append(answer(llm))
            except ModelUnloaded:
                told.append(True)
                time.sleep(0.002)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(8):
            llm.unload_model()
            llm.load_model()
            enough, deadline = len(answers) + 3, time.monotonic() + 30
            while len(answers) < enough and time.monotonic() < deadline:
                time.sleep(0.001)
    finally:
        ends.set()
        for thread in threads:
            thread.join()
    assert told and len(answers) >= 24 and all(ids == right for ids in answers)


def test_what_cannot_be_loaded_stays_unloaded(llm, monkeypatch):
    right = answer(llm)
    llm.unload_model()

    def full(*_):
        raise NotEnoughMemory("the model cannot be loaded")

    with monkeypatch.context() as patched, pytest.raises(NotEnoughMemory):
        patched.setattr(registry.load("backends", "reference"), "open", full)
        llm.load_model()
    with pytest.raises(ModelUnloaded):
        answer(llm)
    llm.load_model()
    assert answer(llm) == right


def test_another_model_in_its_place_is_refused(tmp_path):
    with LLM(str(write(tmp_path / "model")), backend="reference") as llm:
        llm.unload_model()
        write(tmp_path / "model", rope_theta=500.0)
        with pytest.raises(ModelFileError, match="another model"):
            llm.load_model()
        (tmp_path / "model").rename(tmp_path / "elsewhere")
        with pytest.raises(ModelNotFound):
            llm.load_model()
        write(tmp_path / "model")
        llm.load_model()
        assert len(answer(llm)) == 2


def test_closing_is_for_good(folder):
    for unloaded in (False, True):
        llm = LLM(str(folder), backend="reference")
        if unloaded:
            llm.unload_model()
        llm.close()
        for ask in (lambda: answer(llm), llm.load_model):
            with pytest.raises(EngineClosed) as told:
                ask()
            assert not isinstance(told.value, ModelUnloaded) and "closed" in str(told.value)
        llm.unload_model()
        llm.close()


def test_a_broken_engine_is_mended_by_loading_again(llm):
    right = answer(llm)
    llm._thread.call(lambda engine: setattr(engine, "step", lambda: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        answer(llm)
    llm.unload_model()
    llm.load_model()
    assert answer(llm) == right


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_leaves_the_engine_alone(llm):
    child = os.fork()
    if child == 0:
        told = 0
        for change in (llm.unload_model, llm.load_model):
            try:
                change()
            except EngineClosed as error:
                told += "fork" in str(error)
        llm.close()
        os._exit(told)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert answer(llm)


def test_async(folder):
    async def collect(llm) -> list[int]:
        return sum([piece.token_ids async for piece in llm.generate(PROMPT, GREEDY)], [])

    async def main() -> None:
        async with await AsyncLLM.load(str(folder), backend="reference") as llm:
            right = await collect(llm)
            running = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
            await anext(running)
            stand_still(llm.llm)
            await llm.unload_model()
            with pytest.raises(ModelUnloaded):
                async for _ in running:
                    pass
            with pytest.raises(ModelUnloaded, match="load_model"):
                await collect(llm)
            await llm.abort("nobody")
            await llm.load_model()
            assert await collect(llm) == right

    asyncio.run(main())


MEMORY = """
import gc, sys
from nano_vllm import LLM, SamplingParams
def held():
    gc.collect()
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmRSS"))
path, backend = sys.argv[1:]
llm = LLM(path, backend=backend, max_num_batched_tokens=32, max_num_seqs=2, num_blocks=4)
if backend != "cuda":  # where kernels are interpreted, steps of such a model take long
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)
for _ in range(3):
    loaded = held()
    llm.unload_model()
    print(loaded, held())
    llm.load_model()
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="this system does not tell what a process holds")
@pytest.mark.parametrize("backend", usable())
def test_the_process_gives_the_memory_back(tmp_path, backend):
    if backend == "cuda" and not registry.load("backends", "cuda").interpreted():
        pytest.skip("the weights are on the card: tests/cuda/test_card.py")
    path = write(tmp_path / "model", hidden_size=512, intermediate_size=6144, num_hidden_layers=3)
    weights = (path / "model.safetensors").stat().st_size  # 115 MB in float32
    done = subprocess.run([sys.executable, "-c", MEMORY, str(path), backend], capture_output=True, text=True, timeout=300)
    lines = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(lines) == 3, done.stderr
    assert min(loaded - unloaded for loaded, unloaded in lines) > 0.9 * weights, lines
    assert max(unloaded for _, unloaded in lines) < lines[0][1] + 0.1 * weights, lines
