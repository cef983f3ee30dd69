"""Streams of text: the same whatever the cuts, nothing of a stop string, no half characters."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_vllm.errors import PromptError
from nano_vllm.text.detokenizer import Detokenizer


class Bytes:
    """A tokenizer whose ids below 256 are bytes, 256 a control token, and from 257 the given texts."""

    def __init__(self, *texts: str) -> None:
        self.texts = [bytes([b]) for b in range(256)] + [b""] + [t.encode() for t in texts]
        self.vocab_size = len(self.texts)

    def token_bytes(self, token: int, special: bool = False) -> bytes:
        return b"<|end|>" if special and token == 256 else self.texts[token]


def expected(data: bytes, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """The rule, said slowly: the match that ends first, and of those the longest."""
    text = data.decode("utf-8", "replace")
    matches = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not matches:
        return text, None
    end, length, stop = min(matches)
    return text[: end if include else end + length], stop


def stream(tokenizer, groups, stops=(), include=False):
    detokenizer = Detokenizer(tokenizer, tuple(stops), include)
    parts = [detokenizer.push(list(group)) for group in groups] + [detokenizer.finish()]
    assert detokenizer.text == "".join(parts)
    return parts, detokenizer


TEXT = st.text(alphabet="ab\n é😀", max_size=14)
STOPS = st.lists(st.text(alphabet="ab\n é😀", min_size=1, max_size=4), max_size=4).map(tuple)


@settings(max_examples=400, deadline=None)
@given(TEXT.map(str.encode) | st.binary(max_size=10), STOPS, st.booleans(), st.data())
def test_any_cut_gives_the_same(data, stops, include, draw):
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=5)))
    groups = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)])]
    parts, detokenizer = stream(Bytes(), groups, stops, include)
    assert ("".join(parts), detokenizer.stopped) == expected(data, stops, include)
    # the same bytes in one token
    whole = Bytes()
    whole.texts, whole.vocab_size = [data], 1
    parts, detokenizer = stream(whole, [[0]], stops, include)
    assert ("".join(parts), detokenizer.stopped) == expected(data, stops, include)


@pytest.mark.parametrize("stops", [("D E",), ("C D", "D E"), ("B C D", "C"), ("E", "D E"), ("aab", "ab"), ("zz",)])
@pytest.mark.parametrize("include", [False, True])
def test_every_split_in_three(stops, include):
    data = b"A B aaab C D E F"
    for first in range(len(data) + 1):
        for second in range(first, len(data) + 1):
            parts, detokenizer = stream(Bytes(), [data[:first], data[first:second], data[second:]], stops, include)
            assert ("".join(parts), detokenizer.stopped) == expected(data, stops, include)


def test_what_is_held_is_the_longest_beginning_of_a_stop_string():
    detokenizer = Detokenizer(Bytes(), ("abac", "bad"))
    assert [detokenizer.push([c]) for c in b"xabab"] == ["x", "", "", "", "ab"]
    assert detokenizer.push(list(b"q")) == "abq"
    assert detokenizer.push(list(b"ab")) == "" and detokenizer.finish() == "ab" and detokenizer.finish() == ""


def test_half_characters_are_held_and_flushed():
    data = "😀 데 щё".encode()
    parts, _ = stream(Bytes(), [[b] for b in data])
    assert "".join(parts) == "😀 데 щё" and parts[:4] == ["", "", "", "😀"]
    parts, _ = stream(Bytes(), [[b] for b in data[:2]])
    assert parts == ["", "", "\ufffd"]


def test_stop_inside_one_token_and_its_place():
    tokenizer = Bytes("one STOP two", "never")
    detokenizer = Detokenizer(tokenizer, ("STOP",))
    assert detokenizer.push([ord("x"), 257, 258]) == "xone "
    assert (detokenizer.stopped, detokenizer.stop_token_index, detokenizer.token_count) == ("STOP", 2, 2)
    assert detokenizer.push([258]) == "" and detokenizer.finish() == "" and detokenizer.text == "xone "


def test_stop_over_tokens_counts_the_last():
    detokenizer = Detokenizer(Bytes(), ("D E",))
    assert detokenizer.push(list(b"C D E F")) == "C "
    assert detokenizer.stop_token_index == 5


def test_control_tokens_and_padded_ids():
    tokenizer = Bytes()
    assert Detokenizer(tokenizer).push([65, 256, 66]) == "AB"
    assert Detokenizer(tokenizer, skip_special_tokens=False).push([65, 256, 66]) == "A<|end|>B"
    assert Detokenizer(tokenizer).push([65, 10**6]) == "A"


@pytest.mark.parametrize("stop", ["text", ("",), (1,)])
def test_wrong_stops(stop):
    with pytest.raises(PromptError):
        Detokenizer(Bytes(), stop)


def test_work_is_linear():
    """A stop string that is always nearly complete, and many pushes: at most one step back for each character."""
    steps = 0

    class Counted(list):
        def __getitem__(self, index):
            nonlocal steps
            steps += 1
            return super().__getitem__(index)

    detokenizer = Detokenizer(Bytes(), ("a" * 500 + "b",))
    detokenizer._stops[0].fallback = Counted(detokenizer._stops[0].fallback)
    for _ in range(4_000):
        detokenizer.push([97])
    assert 3_000 < steps <= 4_000
