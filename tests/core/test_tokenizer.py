"""Ids, spellings and roles of tokens against llama.cpp (stored answers) and the Hugging Face tokenizer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from nano_vllm.errors import ModelFileError, ModelNotFound, PromptError, UnsupportedModel
from nano_vllm.text.tokenizer import Tokenizer

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
