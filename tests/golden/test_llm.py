"""LLM and AsyncLLM as users call them, with the default model on the CPU backend."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from nano_vllm import LLM, AsyncLLM, SamplingParams
from nano_vllm.errors import (
    EngineClosed,
    ModelNotFound,
    NanoVLLMError,
    OptionError,
    ParameterError,
    PromptError,
    PromptTooLong,
    TemplateError,
    UnknownOption,
)

GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def llm(smollm2_path):
    with LLM(str(smollm2_path), backend="cpu", max_model_len=1024) as made:
        yield made


def test_forms_of_a_prompt(llm):
    text = "The capital of France is"
    ids = llm.encode(text)
    assert llm.decode(ids) == text
    forms = [text, {"prompt": text}, {"prompt_token_ids": ids}, ids, np.array(ids), [np.int64(i) for i in ids]]
    outputs = [llm.generate(form, GREEDY, use_tqdm=False)[0] for form in forms]
    assert len({o.text for o in outputs}) == 1 and "Paris" in outputs[0].text
    together = llm.generate(forms, GREEDY, use_tqdm=False)
    assert [o.text for o in together] == [o.text for o in outputs]
    first = together[0]
    assert first.prompt == text and first.prompt_token_ids == ids
    assert first.text == first.outputs[0].text and first.token_ids == first.outputs[0].token_ids
    assert first.usage.prompt_tokens == len(ids) and first.usage.completion_tokens == len(first.token_ids)
    assert 0 <= first.timings.queued_s <= first.timings.first_token_s and first.timings.decode_s > 0


def test_one_params_each_and_order(llm):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (5, 1, 9)]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(o.token_ids) for o in outputs] == [5, 1, 9]
    assert [o.finish_reason for o in outputs] == ["length"] * 3
    with pytest.raises(PromptError, match="3 prompts"):
        llm.generate(["a", "b", "c"], params[:2], use_tqdm=False)


def test_chat_ends_by_itself(llm):
    question = [{"role": "user", "content": "Say hello."}]
    output = llm.chat(question, SamplingParams(temperature=0, max_tokens=200), use_tqdm=False)[0]
    assert output.finish_reason == "stop" and output.outputs[0].stop_reason is None
    assert output.token_ids[-1] in llm.tokenizer.eos_ids and "<|im_end|>" not in output.text
    two = llm.chat([question, question], SamplingParams(temperature=0, max_tokens=200), use_tqdm=False)
    assert [o.text for o in two] == [output.text] * 2


@pytest.mark.parametrize("interval", [1, 2, 3, 7])
def test_stream_is_generate(llm, interval):
    params = SamplingParams(temperature=0, max_tokens=23, ignore_eos=True)
    whole = llm.generate("Once upon a time 😀 дети", params, use_tqdm=False)[0]
    pieces = list(llm.generate_stream("Once upon a time 😀 дети", params, stream_interval=interval))
    assert "".join(p.text for p in pieces) == whole.text
    assert sum((p.token_ids for p in pieces), []) == whole.token_ids
    assert [p.finish_reason for p in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert pieces[-1].output.text == whole.text
    assert all(len(p.token_ids) == interval for p in pieces[:-1])


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_across_tokens(llm, include):
    free = llm.generate("Count: 1, 2, 3, 4,", SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)[0]
    at = len(free.text) // 2
    stop = free.text[at - 2 : at + 3]
    end = free.text.index(stop) + (len(stop) if include else 0)
    params = SamplingParams(temperature=0, max_tokens=30, stop=["never this", stop], include_stop_str_in_output=include)
    output = llm.generate("Count: 1, 2, 3, 4,", params, use_tqdm=False)[0]
    assert output.text == free.text[:end] and output.finish_reason == "stop" and output.outputs[0].stop_reason == stop
    assert len(output.token_ids) < len(free.token_ids)
    assert output.token_ids == free.token_ids[: len(output.token_ids)]
    assert "".join(p.text for p in llm.stream("Count: 1, 2, 3, 4,", params)) == output.text


def test_min_tokens_holds_ends_back(llm):
    free = llm.generate("Count: 1, 2, 3, 4,", SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)[0]
    stop_id = free.token_ids[3]
    params = SamplingParams(temperature=0, max_tokens=30, min_tokens=10, stop_token_ids=[stop_id], stop=[free.text[:4]])
    output = llm.generate("Count: 1, 2, 3, 4,", params, use_tqdm=False)[0]
    assert len(output.token_ids) > 10 and stop_id not in output.token_ids[:10]


def test_seeds_do_not_depend_on_company(llm):
    seeded = SamplingParams(temperature=1.0, seed=7, max_tokens=16, ignore_eos=True)
    free = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
    alone = llm.generate("Once", seeded, use_tqdm=False)[0].text
    for _ in range(3):
        texts = [o.text for o in llm.generate(["Once"] * 4, [seeded, free, seeded, free], use_tqdm=False)]
        assert texts[0] == texts[2] == alone
        assert texts[1] != texts[3]


def test_penalties_and_filters_run(llm):
    params = SamplingParams(temperature=0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5, max_tokens=40)
    plain = llm.generate("la la la la la", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), use_tqdm=False)[0]
    held = llm.generate("la la la la la", params, use_tqdm=False)[0]
    assert len(set(held.token_ids)) / len(held.token_ids) > len(set(plain.token_ids)) / len(plain.token_ids)
    one = SamplingParams(temperature=5.0, top_k=1, max_tokens=10, ignore_eos=True)
    assert llm.generate("Once", one, use_tqdm=False)[0].token_ids == llm.generate(
        "Once", SamplingParams(temperature=0, max_tokens=10, ignore_eos=True), use_tqdm=False
    )[0].token_ids


def test_bad_messages(llm):
    for bad in (None, 5, "hi", {"role": "user", "content": "hi"}, iter([]), [], [[]], [5]):
        with pytest.raises(PromptError):
            llm.chat(bad, GREEDY, use_tqdm=False)
    hello = [{"role": "user", "content": "hi"}]
    with pytest.raises(UnknownOption, match="max_tokens.*SamplingParams"):
        llm.chat(hello, max_tokens=3, use_tqdm=False)
    with pytest.raises(UnknownOption, match="enable_thinkin'.*enable_thinking"):
        llm.chat(hello, GREEDY, chat_template="{{ enable_thinking }}", enable_thinkin=True, use_tqdm=False)
    for source in (5, ["a"]):
        with pytest.raises(TemplateError, match="must be text"):
            llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False, chat_template=source)


def test_tools_that_the_template_does_not_read_are_refused_and_nothing_is_nothing(llm):
    hello, tools = [{"role": "user", "content": "hi"}], [{"type": "function", "function": {"name": "add"}}]
    plain = llm.chat(hello, GREEDY, use_tqdm=False)[0].prompt
    with pytest.raises(UnknownOption, match="does not read 'tools'"):
        llm.chat(hello, GREEDY, use_tqdm=False, tools=tools)
    for nothing in ({"tools": None}, {"tools": []}, {"enable_thinking": False}, {"documents": None}):
        assert llm.chat(hello, GREEDY, use_tqdm=False, **nothing)[0].prompt == plain
    read = llm.chat(hello, GREEDY, use_tqdm=False, tools=tools, chat_template="{{ tools[0].function.name }}")
    assert read[0].prompt == "add"
    with pytest.raises(UnknownOption, match="stop.*SamplingParams"):
        llm.chat(hello, GREEDY, use_tqdm=False, stop=[])


@pytest.fixture
def poisoned(llm, monkeypatch):
    """Requests with this id in a step have logits that are not numbers, and such a session says -1."""
    session, poison = llm._thread.engine.session, llm.encode(" poison")[-1]
    submit = session.submit

    def spoilt(batch):
        ticket = submit(batch)
        for i, row in enumerate(batch.wanted):
            sequence = np.searchsorted(batch.starts, row, "right") - 1
            if poison in batch.tokens[batch.starts[sequence] : batch.starts[sequence + 1]]:
                ticket.result().ids[i] = -1
        return ticket

    monkeypatch.setattr(session, "submit", spoilt)


def test_a_request_that_fails_does_not_lose_the_others_answers(llm, poisoned):
    good = llm.generate("Once", GREEDY, use_tqdm=False)[0]
    first, failed, last = llm.generate(["Once", "drink poison", "Once"], GREEDY, use_tqdm=False)
    assert first.text == last.text == good.text and first.error is None and good.error is None
    assert failed.finish_reason == failed.outputs[0].finish_reason == "error" and failed.finished
    assert isinstance(failed.error, NanoVLLMError) and "no token can be drawn" in str(failed.error)
    assert failed.token_ids == [] and failed.usage.prompt_tokens == len(llm.encode("drink poison"))


def test_where_every_request_fails_the_error_is_raised(llm, poisoned):
    for prompts in ("drink poison", ["drink poison", "eat poison"]):
        with pytest.raises(NanoVLLMError, match="no token can be drawn"):
            llm.generate(prompts, GREEDY, use_tqdm=False)
    with pytest.raises(NanoVLLMError, match="no token can be drawn"):
        list(llm.stream("drink poison", GREEDY))
    assert llm.generate([], GREEDY, use_tqdm=False) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_is_told_that_the_engine_stayed_behind(llm):
    """In it there is no engine thread: every call would wait for ever."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            llm.generate("Once", GREEDY, use_tqdm=False)
        except EngineClosed as error:
            llm.close()
            os._exit(7 if "fork" in str(error) else 8)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert llm.generate("Once", GREEDY, use_tqdm=False)[0].text


def test_an_instruction_set_that_is_not_here_is_not_ignored(smollm2_path):
    with pytest.raises(OptionError, match="sse9.*generic"):
        LLM(str(smollm2_path), isa="sse9")


def test_bad_requests_do_not_touch_good_ones(llm):
    before = llm.generate("Once", GREEDY, use_tqdm=False)[0].text
    ids = [{"prompt_token_ids": ids} for ids in ([], [-1], [10**9], [1.5], ["a"])]
    ids += [{"prompt_token_ids": ids} for ids in (None, 5, "ab")]
    for bad in ("", [[]], {"text": "x"}, [5.5], [None], None, 5, b"ab", np.array(3), *ids):
        with pytest.raises(PromptError):
            llm.generate(bad, GREEDY, use_tqdm=False)
    with pytest.raises(PromptTooLong, match="1,024"):
        llm.generate([[5] * 1024], GREEDY, use_tqdm=False)
    with pytest.raises(ParameterError, match="stop_token_ids"):
        llm.generate("a", SamplingParams(stop_token_ids=[10**8]), use_tqdm=False)
    assert llm.generate("Once", GREEDY, use_tqdm=False)[0].text == before
    assert llm.generate([[5] * 1023], SamplingParams(temperature=0), use_tqdm=False)[0].finish_reason == "length"


def test_of_several_prompts_the_one_that_is_wrong_is_named(llm):
    hello = [{"role": "user", "content": "hi"}]
    for prompts in (["a", "", "c"], ["a", [], "c"], ["a", None, ""], ["a", [5] * 1024, "c"]):
        with pytest.raises(PromptError, match="^prompt 2 of 3: "):
            llm.generate(prompts, GREEDY, use_tqdm=False)
    with pytest.raises(PromptError, match="^prompt 2 of 2: message 0 "):
        llm.chat([hello, [{"role": "user"}]], GREEDY, use_tqdm=False)
    for alone in ("", [""], [[]]):
        with pytest.raises(PromptError, match="^prompt is empty"):
            llm.generate(alone, GREEDY, use_tqdm=False)


def test_leaving_a_stream_frees_everything(llm):
    for _ in range(3):
        for piece in llm.stream("Once upon a time", SamplingParams(max_tokens=500, ignore_eos=True)):
            break
    llm.stream("Once upon a time", SamplingParams(max_tokens=500, ignore_eos=True)).close()
    free = llm._thread.call(lambda engine: (engine.check(), engine.pool.available, len(engine.requests)))
    assert free[1] == llm.plan.num_blocks and free[2] == 0


def test_threads_share_one_engine(llm):
    results: list = [None] * 6
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    def ask(i: int) -> None:
        results[i] = llm.generate(f"Number {i % 3}:", params, use_tqdm=False)[0].text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results[:3] == results[3:] and None not in results


def test_counters_balance(llm):
    stats = llm.stats()
    assert stats["received"] == sum(stats["finished"].values())
    assert 0 <= stats["prefix_hit_tokens"] <= stats["prompt_tokens"]


def test_wrong_names():
    with pytest.raises(UnknownOption, match="max_model_len"):
        LLM("smollm2", max_model_length=5)
    with pytest.raises(OptionError, match="power of two"):
        LLM("smollm2", block_size=24)
    with pytest.raises(ModelNotFound):
        LLM("no-such-model-here")


@pytest.mark.parametrize("path", ["./nope", "~/nope/tokenizer.json", "a" * 5000])
def test_a_tokenizer_that_does_not_exist(smollm2_path, path):
    with pytest.raises(ModelNotFound, match=f"no tokenizer '{path:.190}.*: this file or folder does not exist"):
        LLM(str(smollm2_path), backend="cpu", tokenizer=path)


def test_closing(smollm2_path):
    llm = LLM(str(smollm2_path), backend="cpu", max_model_len=512)
    pieces = llm.stream("Once", SamplingParams(max_tokens=400, ignore_eos=True))
    next(pieces)
    llm.close()
    assert list(pieces)[-1].finish_reason == "abort"
    llm.close()
    with pytest.raises(EngineClosed):
        llm.generate("Once", GREEDY, use_tqdm=False)


MEMORY = """
import gc, sys
from nano_vllm import LLM, SamplingParams
for _ in range(4):
    with LLM(sys.argv[1], backend="cpu", num_blocks=64) as llm:
        llm.generate(["Once"] * 4, SamplingParams(max_tokens=4), use_tqdm=False)
    gc.collect()
    print(next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmRSS")))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="this system does not tell what a process holds")
def test_closing_gives_the_memory_back(smollm2_path):
    """What is left is the interpreter, libraries and the tokenizer's few words: less than the weights, and no more each time."""
    done = subprocess.run([sys.executable, "-c", MEMORY, str(smollm2_path)], capture_output=True, text=True, timeout=120)
    held = [int(line) for line in done.stdout.split()]
    assert len(held) == 4 and max(held) < smollm2_path.stat().st_size and held[3] < held[1] + 10e6, (held, done.stderr)


RESERVED = """
import sys
from nano_vllm import LLM, SamplingParams
def held():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmRSS"))
with LLM(sys.argv[1], backend=sys.argv[2], kv_cache_dtype="f16", num_blocks=4) as small:
    small.generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)
    before = held()
with LLM(sys.argv[1], backend=sys.argv[2], kv_cache_dtype="f16", num_blocks=2000) as llm:
    llm.generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)
    print(held() - before, llm.plan.num_blocks * llm.plan.block_size * llm.stats()["kv_bytes_per_token"])
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="this system does not tell what a process holds")
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_cache_takes_memory_only_where_it_is_used(smollm2_path, backend):
    """As `info` says. Of each layer's part a huge page may be taken, where the system gives them unasked."""
    words = [sys.executable, "-c", RESERVED, str(smollm2_path), backend]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    more, reserved = map(int, done.stdout.split())
    assert reserved > 700e6 and more < reserved / 4, done.stderr


def test_async(smollm2_path):
    async def collect(llm, prompt, **options) -> str:
        return "".join([p.text async for p in llm.generate(prompt, GREEDY, **options)])

    async def main() -> None:
        async with await AsyncLLM.load(str(smollm2_path), backend="cpu", max_model_len=512) as llm:
            prompts = ["The capital of France is", "Once upon", [{"role": "user", "content": "Say hello."}]]
            one_by_one = [await collect(llm, p) for p in prompts]
            assert await asyncio.gather(*[collect(llm, p) for p in prompts]) == one_by_one
            endless = SamplingParams(max_tokens=450, ignore_eos=True)
            stream = llm.generate("Once", endless, request_id="mine")
            await anext(stream)
            await llm.abort("mine")
            assert [p.finish_reason async for p in stream][-1] == "abort"
            kept, twin = (llm.generate("Once", endless, request_id="same") for _ in range(2))
            await anext(kept)
            with pytest.raises(PromptError, match="in use"):  # and the one that has the id goes on
                await anext(twin)
            assert (await anext(kept)).finish_reason is None
            task = asyncio.create_task(anext(kept))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert llm.llm._thread.call(lambda engine: (engine.check(), len(engine.requests)))[1] == 0

    asyncio.run(main())
