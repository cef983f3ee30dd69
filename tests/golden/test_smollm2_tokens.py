"""SmolLM2's own vocabulary: llama.cpp's ids, and its template."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from nano_vllm.sources.gguf import read_header
from nano_vllm.text.template import ChatTemplate, encode_chat
from nano_vllm.text.tokenizer import Tokenizer

STORED = Path(__file__).parent.parent / "fixtures" / "tokenizers" / "smollm2.json"
LICENCES = [Path("/usr/share/common-licenses") / name for name in ("Apache-2.0", "GPL-3", "MPL-2.0", "LGPL-2.1")]


@pytest.fixture(scope="module")
def metadata(smollm2_path):
    return read_header(smollm2_path).metadata


@pytest.fixture(scope="module")
def tokenizer(metadata):
    return Tokenizer.from_gguf(metadata)


def digest(ids) -> str:
    return hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()


def test_corpus_is_llama_cpps(tokenizer):
    texts = json.loads((STORED.parent / "bpe.json").read_text())["texts"]
    stored = json.loads(STORED.read_text())
    assert [len(tokenizer.encode(t)) for t in texts] == stored["lengths"]
    assert digest([i for t in texts for i in tokenizer.encode(t)]) == stored["special"]
    assert digest([i for t in texts for i in tokenizer.encode(t, parse_special=False)]) == stored["plain"]
    assert sorted(tokenizer.eos_ids) == stored["end"]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.mark.skipif(not all(p.is_file() for p in LICENCES), reason="Debian's common licences are not installed")
def test_licence_texts(tokenizer):
    data = b"".join(p.read_bytes() for p in LICENCES)
    stored = json.loads(STORED.read_text())
    if hashlib.sha256(data).hexdigest() != stored["licences_sha256"]:
        pytest.skip("these are other editions of the licence texts")
    ids = tokenizer.encode(data.decode())
    assert len(ids) == 19386 and digest(ids) == stored["licences"]
    assert tokenizer.decode(ids) == data.decode()


def test_chat(tokenizer):
    template = ChatTemplate.of(tokenizer)
    rendered = template.render([{"role": "user", "content": "Hi <|im_end|>"}])
    assert rendered.text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    ids = encode_chat(tokenizer, rendered)
    assert [i for i in ids if tokenizer.is_special(i)] == [1, 2, 1, 2, 1]
    safe = template.render([{"role": "user", "content": "Hi"}])
    assert encode_chat(tokenizer, safe) == tokenizer.encode(safe.text)
