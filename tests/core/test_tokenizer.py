"""Ids, spellings and roles of tokens against llama.cpp (stored answers) and the Hugging Face tokenizer."""

from __future__ import annotations

import hashlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from nano_vllm.errors import ModelFileError, ModelNotFound, PromptError, UnsupportedModel
from nano_vllm.text.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parent.parent / "fixtures"))
import hf_tokenizers  # noqa: E402

FIXTURES = Path(__file__).parent.parent / "fixtures" / "tokenizers"
STORED = {name: json.loads((FIXTURES / f"{name}.json").read_text()) for name in ("bpe", "spm")}
VARIANTS = [(name, variant) for name, stored in STORED.items() for variant in stored["variants"]]


def make(name: str, variant: str) -> tuple[Tokenizer, dict, list[str]]:
    stored = STORED[name]
    answers = stored["variants"][variant]
    return Tokenizer.from_gguf(stored["metadata"] | answers["metadata"]), answers, stored["texts"]


@pytest.mark.parametrize("name,variant", VARIANTS)
def test_ids_are_llama_cpps(name, variant):
    tokenizer, answers, texts = make(name, variant)
    for text, special, plain in zip(texts, answers["special"], answers["plain"], strict=True):
        assert tokenizer.encode(text) == special, repr(text)
        assert tokenizer.encode(text, add_special_tokens=False, parse_special=False) == plain, repr(text)


@pytest.mark.parametrize("name,variant", VARIANTS)
def test_roles_and_spellings_are_llama_cpps(name, variant):
    tokenizer, answers, _ = make(name, variant)
    assert sorted(tokenizer.eos_ids) == answers["end"]
    unknown = {0} if name == "spm" else set()
    assert sorted(set(tokenizer.special_tokens.values()) - unknown) == answers["control"]
    pieces = [tokenizer.token_bytes(i, special=True).hex() for i in range(tokenizer.vocab_size)]
    assert hashlib.sha256(" ".join(pieces).encode()).hexdigest() == answers["pieces"]


@pytest.mark.parametrize("kind", hf_tokenizers.KINDS)
def test_folder_is_hugging_faces(kind, tmp_path):
    theirs = hf_tokenizers.save(kind, tmp_path, "{{ messages }}", bos_token="<s>", eos_token="<|im_end|>")
    ours = Tokenizer.from_folder(tmp_path)
    for text in hf_tokenizers.TEXTS:
        ids = theirs(text, add_special_tokens=True)["input_ids"]
        assert ours.encode(text) == ids, repr(text)
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"], repr(text)
        plain = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ours.encode(text, add_special_tokens=False, parse_special=False) == plain, repr(text)
        if "\ufffd" not in theirs.decode(ids):  # byte by byte there, run by run here
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False), repr(
                text
            )
    assert ours.vocab_size == len(theirs)
    assert ours.chat_template == "{{ messages }}"
    assert (ours.bos_id, ours.eos_ids) == (theirs.bos_token_id, {theirs.eos_token_id})
    assert ours.template_variables == {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    assert ours.is_special(ours.special_tokens["<|im_start|>"]) and "<think>" not in ours.special_tokens


@pytest.mark.parametrize("name,variant", [("bpe", "smollm"), ("spm", "plain")])
def test_round_trip(name, variant):
    tokenizer, _, texts = make(name, variant)
    for text in texts:
        if name == "spm" and "<think>" in text:
            continue  # a space goes before what follows a user-defined token, and decoding cannot know
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert tokenizer.decode(ids) == (text.replace("▁", " ") if name == "spm" else text)
        assert not any(tokenizer.is_special(i) for i in ids)


def test_bytes_of_a_split_character():
    tokenizer, _, _ = make("bpe", "gpt-2")
    ids = tokenizer.encode("🧿", add_special_tokens=False)
    assert len(ids) > 1
    assert b"".join(map(tokenizer.token_bytes, ids)) == "🧿".encode()
    assert tokenizer.decode(ids[:1]) == "\ufffd"


def test_control_tokens_have_no_text_unless_asked():
    tokenizer, _, _ = make("bpe", "gpt-2")
    token = tokenizer.special_tokens["<|im_end|>"]
    assert tokenizer.token_bytes(token) == b"" and tokenizer.token_bytes(token, special=True) == b"<|im_end|>"
    assert tokenizer.decode([token]) == "" and tokenizer.decode([token], skip_special_tokens=False) == "<|im_end|>"


@pytest.mark.parametrize("ids", [None, 5.0, "ab", [1.5], [[1]], [None]], ids=str)
def test_what_is_no_list_of_ids(ids):
    with pytest.raises(PromptError, match="whole numbers"):
        make("bpe", "smollm")[0].decode(ids)


@pytest.mark.parametrize("token", [-1, 10**9])
def test_ids_outside_the_vocabulary(token):
    tokenizer, _, _ = make("bpe", "gpt-2")
    with pytest.raises(PromptError, match=str(token)):
        tokenizer.decode([0, token])


@pytest.mark.parametrize("text", [5, None, b"x", "\ud800"])
def test_what_is_not_text(text):
    tokenizer, _, _ = make("bpe", "gpt-2")
    with pytest.raises(PromptError):
        tokenizer.encode(text)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
def test_merges_cannot_spell_a_control_token(pre):
    """The vocabulary joins "end" from its letters, and the file calls "end" a control token."""
    tokens = ["e", "n", "d", "en", "end"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.token_type": np.array([1, 1, 1, 1, 3], np.int32),
        "tokenizer.ggml.merges": ["e n", "en d"],
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("end") == [4]
    assert tokenizer.encode("end", parse_special=False) == [0, 1, 2]
    assert tokenizer.encode_segments(["end", 4, "end"]) == [0, 1, 2, 4, 0, 1, 2]


def test_pieces_with_a_space_inside():
    """Merges may then cross words, so words cannot be encoded apart."""
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "▁b", "a▁b", "▁a▁b"]
    scores = np.array([0, 0, 0, 0, 0, 0, -2, -4, -3, -1], np.float32)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1, 1, 1],
        "tokenizer.ggml.add_bos_token": False,
    }
    assert Tokenizer.from_gguf(metadata).encode("a b") == [9]


def _broken(**changes):
    return {k: v for k, v in (STORED["bpe"]["metadata"] | changes).items() if v is not None}


@pytest.mark.parametrize(
    "changes,error,word",
    [
        ({"tokenizer.ggml.pre": "klingon"}, UnsupportedModel, "klingon"),
        ({"tokenizer.ggml.model": "t5"}, UnsupportedModel, "t5"),
        ({"tokenizer.ggml.model": None}, UnsupportedModel, "None"),
        ({"tokenizer.ggml.tokens": None}, ModelFileError, "vocabulary"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, ModelFileError, "twice"),
        ({"tokenizer.ggml.token_type": [1]}, ModelFileError, "types"),
        ({"tokenizer.ggml.merges": None}, ModelFileError, "merges"),
        ({"tokenizer.ggml.merges": ["qqq zzz"]}, ModelFileError, "merges"),
    ],
)
def test_broken_metadata(changes, error, word):
    with pytest.raises(error, match=word):
        Tokenizer.from_gguf(_broken(**changes))


@pytest.mark.parametrize(
    "key",
    ["ggml.model", "ggml.pre", "ggml.tokens", "ggml.token_type", "ggml.merges", "ggml.bos_token_id", "ggml.eot_token_id",
     "ggml.padding_token_id", "ggml.add_bos_token", "chat_template"],
)  # fmt: skip
@pytest.mark.parametrize("value", [1.5, float("nan"), np.array([1.5, 2]), np.ones(2, bool), [1, "a"]], ids=str)
def test_metadata_of_a_wrong_type(key, value):
    with pytest.raises(ModelFileError, match=rf"tokenizer\.{key}' must be"):
        Tokenizer.from_gguf(_broken(**{f"tokenizer.{key}": value}))


def test_broken_folder(tmp_path):
    with pytest.raises(ModelNotFound, match="tokenizer.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFileError):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelFileError, match="tokenizer_config"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(ModelFileError, match="tokenizer_config"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelFileError, match="chat_template"):
        Tokenizer.from_folder(tmp_path)


def test_named_templates_and_old_special_tokens(tmp_path):
    hf_tokenizers.gpt2_like().save(str(tmp_path / "tokenizer.json"))
    config = {
        "chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}],
        "eos_token": {"content": "</s>"},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>"}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.chat_template == "d" and tokenizer.template_variables == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("kind", ["gpt2_like", "llama2_like"])
def test_the_post_processor_says_where_bos_stands(kind, tmp_path):
    """As in transformers, not add_bos_token of the config."""
    from transformers import AutoTokenizer

    hf_tokenizers.save(kind, tmp_path, bos_token="<s>", eos_token="</s>")
    path = tmp_path / "tokenizer_config.json"
    for flag in (True, False):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"add_bos_token": flag, "add_eos_token": flag}))
        assert (
            Tokenizer.from_folder(tmp_path).encode("Hello a") == AutoTokenizer.from_pretrained(tmp_path)("Hello a")["input_ids"]
        )


def test_threads_do_not_mix_the_parse_settings(tmp_path):
    """One tokenizer encodes for many requests at once, and the library's setting is shared."""
    hf_tokenizers.save("gpt2_like", tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    text = "<|im_end|>" * 20
    expected = {flag: tokenizer.encode(text, parse_special=flag) for flag in (True, False)}
    with ThreadPoolExecutor(4) as pool:
        flags = [i % 2 == 0 for i in range(400)]
        for flag, ids in zip(flags, pool.map(lambda flag: tokenizer.encode(text, parse_special=flag), flags)):
            assert ids == expected[flag]
