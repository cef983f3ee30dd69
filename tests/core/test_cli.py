"""The command line, against a stand-in for the model: what is read, what is printed where, and with which exit code it ends."""

from __future__ import annotations

import contextlib
import io
import math
import os
import subprocess
import sys
import types
from dataclasses import fields

import pytest

from nano_vllm import cli, registry
from nano_vllm.cli import _flags, _meter, _terminal, _text, chat
from nano_vllm.errors import NanoVLLMError, OptionError, PromptTooLong, UnknownOption
from nano_vllm.memory.machine import format_bytes
from nano_vllm.options import Options
from nano_vllm.sampling.params import SamplingParams
from nano_vllm.version import version

CONTEXT = 40


class Piece(types.SimpleNamespace):
    pass


class FakeLLM:
    """Answers "one two three …", a word a token; counts a prompt's words as its tokens."""

    made: list[FakeLLM] = []
    fail: Exception | None = None  # raised by the next stream
    stop_after: int | None = None  # Ctrl-C arrives before this token
    words = ["one", " two", " three", " four", " five\n"]

    def __init__(self, **options) -> None:
        self.asked, self.closed = options, False
        self.options, self.plan = Options(**options), types.SimpleNamespace(max_model_len=CONTEXT)
        self.prompts: list = []
        self.params: list[SamplingParams] = []
        self.counted = {"weight_bytes": 1000, "kv_bytes_per_token": 10, "prompt_tokens": 0}
        self.counted |= {"prefix_hit_tokens": 0, "scheduled_tokens": 0, "steps": 0}
        FakeLLM.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True

    def default_sampling_params(self):
        return SamplingParams(temperature=0.25)

    def stats(self):
        return dict(self.counted)

    def stream(self, prompt, params):
        self.prompts.append(prompt)
        self.params.append(params)
        return self._pieces(len(str(prompt).split()), params)

    def stream_chat(self, messages, params):
        self.prompts.append(messages)
        self.params.append(params)
        return self._pieces(sum(len(m["content"].split()) for m in messages), params)

    def _pieces(self, count, params):
        if FakeLLM.fail:
            raise FakeLLM.fail
        if count >= CONTEXT:
            raise PromptTooLong(f"prompt has {count} tokens", f"the context holds {CONTEXT}")
        self.counted["prompt_tokens"] += count
        self.counted["scheduled_tokens"] += 2 if FakeLLM.stop_after == 0 else count
        self.counted["steps"] += 5
        words = self.words[: params.max_tokens]
        for i, word in enumerate(words):
            if i == FakeLLM.stop_after:
                raise KeyboardInterrupt
            last = i == len(words) - 1
            yield Piece(text=word, token_ids=[i], finish_reason=None, output=self._output(count, words) if last else None)

    def _output(self, count, words):
        return types.SimpleNamespace(
            text="".join(words),
            finish_reason="stop" if len(words) == len(self.words) else "length",
            error=NanoVLLMError("no token can be drawn") if count == 3 else None,
            usage=types.SimpleNamespace(prompt_tokens=count, completion_tokens=len(words), cached_tokens=0),
            timings=types.SimpleNamespace(queued_s=0.0, first_token_s=0.5, prefill_s=0.5, decode_s=2.0),
        )

    def generate(self, prompts, params):
        self.prompts += prompts
        self.counted["steps"] += 5
        return [self._output(len(p.split()), self.words[: params.max_tokens]) for p in prompts]


@pytest.fixture
def fake(monkeypatch):
    """Puts FakeLLM where the commands look for LLM; stdin is empty."""
    FakeLLM.made, FakeLLM.fail, FakeLLM.stop_after = [], None, None
    monkeypatch.setitem(sys.modules, "nano_vllm.llm", types.SimpleNamespace(LLM=FakeLLM))
    monkeypatch.setattr(_text, "read_stdin", lambda: "")
    return FakeLLM


def command(*words: str, stdin: bytes | None = None, **more) -> subprocess.CompletedProcess:
    """The command as a user starts it."""
    how = {"input": stdin} if stdin is not None else {"stdin": subprocess.DEVNULL}
    return subprocess.run([sys.executable, "-m", "nano_vllm", *words], capture_output=True, timeout=60, **how, **more)


def refused(capsys, *words: str) -> str:
    """The one sentence with which a wrong command line is refused."""
    assert cli.main(list(words)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "Traceback" not in err
    return err


# --- flags ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Options, SamplingParams])
def test_every_field_is_a_documented_flag(cls):
    made = {flag.field: flag for flag in _flags.flags(cls)}
    assert list(made) == [f.name for f in fields(cls)]
    assert not [name for name, flag in made.items() if not flag.help], "fields without a line in the docstring"


def test_names_that_share_a_docstring_line_share_its_text():
    texts = _flags.documented(SamplingParams)
    assert texts["presence_penalty"] == texts["frequency_penalty"] != texts["repetition_penalty"]


def test_a_flag_is_the_same_in_every_command():
    seen: dict[str, tuple] = {}
    for name in registry.names("cli"):
        for action in cli.parser(name)._actions:
            for flag in action.option_strings:
                if flag.removeprefix("--").replace("-", "_") in {f.name for f in fields(Options)}:
                    assert seen.setdefault(flag, (action.dest, action.help, action.nargs)) == (
                        action.dest,
                        action.help,
                        action.nargs,
                    )
    assert "--kv-cache-memory" in seen


def test_flags_reach_options_and_parameters_with_their_types(fake):
    code = cli.main(
        ["run", "hi", "-m", "m.gguf", "--block-size", "32", "--no-enable-prefix-caching", "--kv-cache-memory", "512MB"]
        + ["--temperature", "0.5", "--stop", "a", "--stop", "b", "--stop-token-ids", "7", "--ignore-eos", "--seed", "3"]
    )
    llm = fake.made[0]
    assert code == 0 and llm.closed
    assert llm.asked == {"model": "m.gguf", "block_size": 32, "enable_prefix_caching": False, "kv_cache_memory": "512MB"}
    p = llm.params[0]
    assert (p.temperature, p.stop, p.stop_token_ids, p.ignore_eos, p.seed) == (0.5, ("a", "b"), (7,), True, 3)


def test_what_is_not_given_comes_from_the_model_and_run_is_bounded_by_the_context_alone(fake):
    cli.main(["run", "hi"])
    cli.main(["generate", "hi"])
    run, generate = (llm.params[0] for llm in fake.made)
    assert run.temperature == generate.temperature == 0.25
    assert run.max_tokens is None and generate.max_tokens == SamplingParams().max_tokens


# --- refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, part",
    [
        (["rum"], "mean 'run'?"),
        (["frobnicate"], "Commands are: "),
        (["run", "x", "--max-token", "5"], "mean '--max-tokens'?"),
        (["run", "x", "--temprature=0"], "mean '--temperature'?"),
        (["run", "x", "--temp", "0"], "mean '--temperature'?"),
        (["run", "x", "--qqq"], "--help"),
        (["run", "x", "--max-tokens", "many"], "'many' is not a whole number"),
        (["run", "x", "--temperature", "warm"], "'warm' is not a number"),
        (["run", "x", "--max-tokens"], "--max-tokens"),
        (["run", "x", "--temperature", "nan"], "temperature"),
        (["run", "x", "--top-p", "2"], "top_p"),
        (["run", "two", "words"], "quotes"),
        (["run", "--", "-x", "--seed", "1"], "options before it"),
        (["help", "rum"], "mean 'run'?"),
        (["run"], "no prompt"),
        (["run", "x", "--raw", "--system", "y"], "--system"),
        (["chat", "--min-tokens", "5", "--max-tokens", "2"], "min_tokens"),
        (["perplexity"], "file"),
        (["perplexity", "/no/such/file"], "/no/such/file"),
    ],
)
def test_wrong_command_lines_are_refused_in_one_sentence_before_a_model_is_loaded(capsys, fake, words, part):
    assert part in refused(capsys, *words)
    assert not fake.made


def test_options_are_refused_by_the_real_thing():
    done = command("run", "x", "--model", "/no/such/model.gguf")
    assert done.returncode == 2 and done.stdout == b""
    assert b"Traceback" not in done.stderr and done.stderr.count(b"\n") == 1 and b"/no/such/model.gguf" in done.stderr


def test_unexpected_errors_are_one_line_and_a_traceback_only_when_debugging(capsys, fake):
    fake.fail = ValueError("strange\nthing")
    assert cli.main(["run", "x"]) == 1
    err = capsys.readouterr().err.splitlines()
    assert err[-1] == "nano-vllm: ValueError: strange thing (--log-level debug shows where)"
    for words in (["--log-level", "debug"], ["--log-level=debug"]):
        with pytest.raises(ValueError, match="strange"):
            cli.main(["run", "x", *words])


def test_an_expected_error_is_its_sentence_when_debugging_too_and_the_traceback_comes_before(capsys, fake):
    try:
        raise NanoVLLMError("the disk is gone", "unplugged", "Plug it in.") from OSError("no such device")
    except NanoVLLMError as error:
        fake.fail = error
    sentence = "nano-vllm: the disk is gone: unplugged. Plug it in.\n"
    for words in ([], ["--log-level", "info"]):
        assert cli.main(["run", "x", *words]) == 1
        assert capsys.readouterr().err == sentence
    assert cli.main(["run", "x", "--log-level", "debug"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("nano-vllm: debug: where the error below was raised\n") and err.endswith("\n" + sentence)
    assert "Traceback" in err and "OSError: no such device\n" in err and "NanoVLLMError:" not in err


def test_the_exit_code_is_the_errors_own(capsys, fake):
    fake.fail = NanoVLLMError("the disk is gone", "unplugged", "Plug it in.")
    assert cli.main(["run", "x"]) == 1
    assert "nano-vllm: the disk is gone: unplugged. Plug it in.\n" in capsys.readouterr().err


# --- run and generate ----------------------------------------------------------------------------------------------------


def test_run_streams_the_answer_and_ends_with_the_summary_on_stderr(capsys, fake):
    assert cli.main(["run", "a b c", "--system", "be brief"]) == 0
    out, err = capsys.readouterr()
    assert out == "one two three four five\n"
    assert err.count("\n") == 1
    assert (
        "5 prompt tokens (10.0 tok/s), 5 output tokens (2.0 tok/s), 0.0 GB/s weights and cache, first token after 500 ms" in err
    )
    assert "peak memory" in err or _meter.peak_memory() is None
    assert fake.made[0].prompts == [[{"role": "system", "content": "be brief"}, {"role": "user", "content": "a b c"}]]


def test_raw_leaves_the_template_out(fake):
    cli.main(["run", "--raw", "a b"])
    assert fake.made[0].prompts == ["a b"]


def test_argument_and_stdin_are_joined_by_a_blank_line(monkeypatch):
    monkeypatch.setattr(_text, "read_stdin", lambda: "the text")
    assert _text.prompt("Summarise:") == "Summarise:\n\nthe text"
    assert _text.prompt(None) == "the text"


@pytest.mark.skipif(sys.platform == "win32", reason="arguments are no bytes on Windows")
def test_arguments_are_utf_8_in_every_locale(capsys, fake, monkeypatch):
    for words in (
        ["run", "h\udce9"],
        ["generate", "a", "h\udce9"],
        ["run", "x", "--system", "\udce9"],
        ["chat", "--system", "\udce9"],
    ):
        assert "is not UTF-8 text" in refused(capsys, *words)
    assert not fake.made
    monkeypatch.setattr(os, "fsencode", lambda text: text.encode("ascii", "surrogateescape"))  # as in the locale C
    assert _text.argument("h\udcc3\udca9", "the prompt") == "hé"
    assert _text.argument("hé", "the prompt") == "hé"  # not from the command line


def test_stdin_is_read_from_pipes_and_files_and_must_be_text(monkeypatch, tmp_path):
    file = tmp_path / "in.txt"
    for data, text in ((b"h\xc3\xa9\n\n", "hé\n"), (b"", "")):
        file.write_bytes(data)
        with open(file) as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            assert _text.read_stdin() == text
    file.write_bytes(b"ab\xff")
    with open(file) as stdin, pytest.raises(OptionError, match="byte 2"):
        monkeypatch.setattr(sys, "stdin", stdin)
        _text.read_stdin()
    with open(os.devnull) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert _text.read_stdin() == ""


def test_ctrl_c_ends_run_with_the_summary_and_130(capsys, fake):
    fake.stop_after = 2
    assert cli.main(["run", "a b c"]) == 130
    out, err = capsys.readouterr()
    assert out == "one two\n" and "3 prompt tokens" in err and "2 output tokens" in err
    assert fake.made[0].closed


def test_ctrl_c_in_the_midst_of_a_prompt_counts_what_was_computed(capsys, fake):
    fake.stop_after = 0
    assert cli.main(["run", "a b c d e"]) == 130
    err = capsys.readouterr().err
    assert err.startswith("2 prompt tokens (") and "output" not in err


def test_several_prompts_run_as_one_batch(capsys, fake):
    assert cli.main(["generate", "a", "b c", "--max-tokens", "2"]) == 0
    out, err = capsys.readouterr()
    assert out == "==> 1: a <==\none two\n\n==> 2: b c <==\none two\n" and len(fake.made) == 1
    summary = "3 prompt tokens (6.0 tok/s), 4 output tokens (1.0 tok/s), 0.0 GB/s weights and cache, first token after 500 ms"
    assert summary in err


def test_of_several_prompts_the_one_that_failed_is_told_and_the_others_are_printed(capsys, fake):
    assert cli.main(["generate", "a", "b c d", "--max-tokens", "2"]) == 1
    out, err = capsys.readouterr()
    assert "==> 1: a <==\none two\n" in out and "nano-vllm: prompt 2 failed: no token can be drawn\n" in err and "4 prompt" in err


def test_one_prompt_has_no_heading_and_headings_are_one_short_line(capsys, fake):
    from nano_vllm.cli.generate import heading

    assert cli.main(["generate", "a", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out == "one two\n"
    for long in ("word\n" * 100, "é" * 100, ""):
        line = heading(12, long)
        assert "\n" not in line and len(line) <= 80 and line.startswith(f"==> 12: {long[:4]}") and line.endswith(" <==")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGPIPE")
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_closed_stream_is_no_fault(monkeypatch, fake, name):
    """`nano-vllm run … >&-`: Python then has no stream at all."""
    monkeypatch.setattr(sys, name, None)
    assert cli.main(["run", "hello"]) == 0


def test_a_reader_that_leaves_ends_the_command_quietly():
    """`nano-vllm info --help | head -0`, in effect: the pipe is closed before anything is written."""
    read, write = os.pipe()
    os.close(read)
    code = "import sys; from nano_vllm import cli, registry; cli.usage = lambda: 'x' * 100000; sys.exit(cli.main(['--help']))"
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


# --- chat ----------------------------------------------------------------------------------------------------------------


def talk(monkeypatch, capsys, *lines: str, argv: tuple[str, ...] = ()) -> tuple[str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    assert cli.main(["chat", *argv]) == 0
    return capsys.readouterr()


def test_chat_keeps_the_history_and_ends_with_the_summary(monkeypatch, capsys, fake):
    out, err = talk(monkeypatch, capsys, "hello", "", "more", argv=("--system", "s"))
    assert out == "one two three four five\n" * 2
    assert [m["content"] for m in fake.made[0].prompts[1]] == ["s", "hello", "one two three four five\n", "more"]
    assert [m["role"] for m in fake.made[0].prompts[1]] == ["system", "user", "assistant", "user"]
    assert err.count("\n") == 1 and "10 output tokens" in err


def test_chat_without_stdin_ends_at_once(monkeypatch, capsys, fake):
    """`nano-vllm chat <&-`: Python then has no stream at all."""
    monkeypatch.setattr(sys, "stdin", None)
    assert cli.main(["chat"]) == 0
    assert capsys.readouterr().out == "" and fake.made[0].closed


def test_chat_commands(monkeypatch, capsys, fake, tmp_path):
    file = tmp_path / "talk.md"
    lines = [
        "/help",
        "hello",
        f"/save {file}",
        "/reset",
        "again",
        "/system be kind",
        "third",
        "/system",
        "fourth",
        "/nonsense",
        "/exit",
        "never",
    ]
    _, err = talk(monkeypatch, capsys, *lines)
    said = [[m["content"] for m in messages] for messages in fake.made[0].prompts]
    assert said == [["hello"], ["again"], ["be kind", "third"], ["fourth"]]
    assert err.count(chat.COMMANDS) == 2 and "no command /nonsense" in err
    assert file.read_text() == "**user**\n\nhello\n\n**assistant**\n\none two three four five\n\n\n"


@pytest.mark.parametrize("forget", ["/reset", "/system be kind"])
def test_save_does_not_write_an_empty_conversation_over_a_saved_one(forget, monkeypatch, capsys, fake, tmp_path):
    file = tmp_path / "talk.md"
    _, err = talk(monkeypatch, capsys, "hello", f"/save {file}", forget, f"/save {file}", argv=("--system", "s"))
    assert file.read_text().endswith("one two three four five\n\n\n")
    assert err.count("messages written") == 1 and f"(nothing has been said, so {file} was not written)" in err


def test_save_says_what_is_wrong(monkeypatch, capsys, fake, tmp_path):
    names = [f"{tmp_path}/none/talk.md", str(tmp_path), "~nobody-has-this-name/x", "a\0b", "x" * 5000]
    _, err = talk(monkeypatch, capsys, "hello", "/save", *(f"/save {name}" for name in names), "/help")
    assert "needs a file's name" in err and err.count("cannot write") == len(names) and chat.COMMANDS in err


def test_a_line_that_is_no_text_does_not_end_the_chat(monkeypatch, capsys, fake):
    lines = io.TextIOWrapper(io.BytesIO(b"one\n\xff\xfe\ntwo\n"), "utf-8", line_buffering=True)
    lines._CHUNK_SIZE = 4  # a terminal gives a line at a time
    monkeypatch.setattr(sys, "stdin", lines)
    assert cli.main(["chat"]) == 0
    assert "not utf-8 text" in capsys.readouterr().err and fake.made[0].prompts[0][-1]["content"] == "one"


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(monkeypatch, capsys, fake):
    fake.stop_after = 2
    out, err = talk(monkeypatch, capsys, "hello", "go on")
    assert out == "one two\n" * 2 and err.count("(stopped)") == 2
    assert [m["content"] for m in fake.made[0].prompts[1]] == ["hello", "one two", "go on"]


def test_a_history_that_outgrows_the_context_is_refused_with_the_mend_and_nothing_is_cut(monkeypatch, capsys, fake):
    long = " ".join(["word"] * (CONTEXT - 2))
    _, err = talk(monkeypatch, capsys, "hello", long, "/reset", "hello")
    said = [[m["content"] for m in messages] for messages in fake.made[0].prompts]
    assert said[1] == ["hello", "one two three four five\n", long] and said[2] == ["hello"]
    assert "prompt has 44 tokens: the context holds 40" in err and "/reset starts over" in err


def test_a_refused_turn_leaves_no_trace(monkeypatch, capsys, fake):
    long = " ".join(["word"] * CONTEXT)
    talk(monkeypatch, capsys, long, "hello")
    assert [m["content"] for m in fake.made[0].prompts[1]] == ["hello"]


def test_chat_says_that_the_context_is_full(monkeypatch, capsys, fake):
    monkeypatch.setattr(
        FakeLLM,
        "_output",
        lambda self, *_: types.SimpleNamespace(
            finish_reason="length",
            usage=types.SimpleNamespace(prompt_tokens=1, completion_tokens=5, cached_tokens=0),
            timings=types.SimpleNamespace(first_token_s=1.0, decode_s=1.0),
        ),
    )
    _, err = talk(monkeypatch, capsys, "hello")
    assert "the context is full" in err
    _, err = talk(monkeypatch, capsys, "hello", argv=("--max-tokens", "3"))
    assert "the context is full" not in err


# --- info ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def opened(monkeypatch, tmp_path):
    """A llama of its own test config, in two formats, without a file; `info` finds it under any name."""
    from nano_vllm.architectures import llama
    from nano_vllm.formats import describe
    from nano_vllm.model import weights
    from nano_vllm.model.spec import parameters
    from nano_vllm.sources import resolve

    spec = llama.describe(llama.TINY[0])
    infos = {n: describe(n, shape, "f32" if len(shape) == 1 else "f16") for n, shape in parameters(spec).items()}
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.chat_template": "x"}
    made = types.SimpleNamespace(
        spec=spec, weights=types.SimpleNamespace(infos=infos), metadata=metadata, path=tmp_path, close=lambda: None
    )
    monkeypatch.setattr(resolve, "resolve", lambda model, options: tmp_path)
    monkeypatch.setattr(weights, "open_model", lambda path: made)
    return made


def test_info_tells_sizes_formats_plan_and_backends(capsys, opened):
    assert cli.main(["info", "any", "--backend", "reference", "--num-blocks", "7", "--max-model-len", "32"]) == 0
    out = capsys.readouterr().out
    shapes = [info.shape for info in opened.weights.infos.values()]
    assert f"{sum(math.prod(shape) for shape in shapes):,}" in out
    assert f"{sum(len(shape) == 2 for shape in shapes)} tensors" in out.split("  f16 ")[1].splitlines()[0]
    assert "gpt2, smollm; has a chat template" in out
    lines = [line.split(None, 2) for line in out.splitlines()]
    attentions = [layer.attention for layer in opened.spec.layers]
    size = format_bytes(7 * 16 * sum(2 * a.kv_heads * a.head_size * 4 for a in attentions))
    assert f"cache {size} reserved; a block takes memory only when it is first used" in " ".join(out.split())
    assert ["num_blocks", "7", "num_blocks as asked"] in lines and ["max_model_len", "32", "as asked"] in lines
    assert [line.split()[0] for line in out.split("\nbackends\n")[1].splitlines() if line[2] != " "] == list(
        registry.names("backends")
    )


def test_info_fits_a_terminal_and_is_cut_nowhere_else(capsys, opened, monkeypatch):
    opened.path = opened.path / ("long-" * 10) / "model.gguf"
    words = ["info", "--backend", "reference", "--num-blocks", "7"]
    assert cli.main(words) == 0
    whole = capsys.readouterr().out
    assert max(map(len, whole.splitlines())) > 80 and f"{opened.path}\n" in whole
    monkeypatch.setattr(_terminal, "columns", lambda stream: 80)
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert out.split() == whole.split()
    assert [line for line in out.splitlines() if len(line) > 80 and line.split() != [str(opened.path)]] == []


def test_info_says_why_there_is_no_plan(capsys, opened):
    assert cli.main(["info", "--backend", "reference", "--kv-cache-memory", "1"]) == 0
    assert "none" in (out := capsys.readouterr().out) and "one block of 16 tokens takes" in out


def test_info_wants_one_model(capsys, opened):
    assert "two models" in refused(capsys, "info", "a", "-m", "b")


def test_info_of_a_folder_without_a_template(opened, tmp_path):
    from nano_vllm.cli import info
    from nano_vllm.text.files import Folder

    opened.metadata, opened.files = None, Folder(tmp_path)
    assert info.tokenizer(opened) == "none; no chat template"
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "y"}')
    assert info.tokenizer(opened) == "BPE; has a chat template"


# --- start ---------------------------------------------------------------------------------------------------------------


def test_version_is_the_projects_and_needs_nothing_heavy():
    code = "import sys; from nano_vllm import cli; cli.main(['--version']); print({m.split('.')[0] for m in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    line, loaded = done.stdout.splitlines()
    assert done.returncode == 0 and line == f"nano-vllm {version()}"
    assert not {"numpy", "tokenizers", "jinja2", "huggingface_hub", "tqdm", "torch"} & set(eval(loaded))


def test_help_lists_every_command():
    done = command("--help")
    assert done.returncode == 0
    for name in registry.names("cli"):
        assert f"\n  {name} ".encode() in done.stdout
        assert command(name, "--help").returncode == 0


@pytest.mark.parametrize("words", [(), *((name,) for name in registry.names("cli"))], ids=lambda words: " ".join(words))
def test_help_fits_80_columns(words, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.suppress(SystemExit):
        assert cli.main([*words, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 3 and max(map(len, lines)) <= 80
    assert max(map(len, chat.COMMANDS.splitlines())) <= 80


def test_help_of_a_command(capsys):
    with pytest.raises(SystemExit):
        cli.main(["help", "pull"])
    assert capsys.readouterr().out.startswith("usage: nano-vllm pull ")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such terminals")
def test_columns_are_the_terminals_of_the_stream():
    import fcntl
    import pty
    import struct
    import termios

    master, slave = pty.openpty()
    for columns, told in ((80, 80), (0, None)):
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        with open(slave, "w", closefd=False) as terminal:
            assert _terminal.columns(terminal) == told
    os.close(slave), os.close(master)
    assert _terminal.columns(io.StringIO()) is None
    with open(os.devnull, "w") as nothing:
        assert _terminal.columns(nothing) is None


def test_unknown_options_name_the_nearest():
    with pytest.raises(UnknownOption, match="--threads"):
        cli.parse("run", ["x", "--thread", "2"])
