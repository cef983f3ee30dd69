"""Philox4x32-10 against Random123's published answers, and what is made of its words."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_vllm.sampling import philox
from nano_vllm.sampling.philox import philox4x32, uniform

# Random123 1.14, tests/kat_vectors, the lines "philox4x32 10": counter, key, answer
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def plain(counter: list[int], key: list[int]) -> list[int]:
    """The paper's rounds on Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b % 2**32, (a >> 32) ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter, key, answer):
    got = philox4x32(np.array([words(counter)], np.uint32), np.array([words(key)], np.uint32))
    assert got.dtype == np.uint32
    assert got.tolist() == [words(answer)]


def test_rows_are_independent():
    counters = np.array([words(c) for c, _, _ in KNOWN], np.uint32)
    keys = np.array([words(k) for _, k, _ in KNOWN], np.uint32)
    assert philox4x32(counters, keys).tolist() == [words(a) for _, _, a in KNOWN]
    assert philox4x32(counters[:0], keys[:0]).shape == (0, 4)


@settings(deadline=None)
@given(
    seed=st.integers(-(2**63), 2**64 - 1),
    index=st.integers(0, 2**31 - 1),
    position=st.integers(0, 2**31 - 1),
    purpose=st.integers(0, 3),
)
def test_uniform_is_its_definition(seed, index, position, purpose):
    s = seed % 2**64
    w = plain([position, index, purpose, 0], [s % 2**32, s >> 32])
    expected = (((w[0] << 32 | w[1]) >> 11) + 0.5) * 2.0**-53
    assert uniform(seed, index, position, purpose).tolist() == [expected]


@pytest.mark.parametrize(("word", "expected"), [(0, 2.0**-54), (2**32 - 1, 1 - 2.0**-53)])
def test_uniform_never_reaches_its_ends(monkeypatch, word, expected):
    monkeypatch.setattr(philox, "philox4x32", lambda c, k: np.full((len(c), 4), word, np.uint32))
    assert uniform(0, 0, 0).tolist() == [expected]
    assert 0 < expected < 1


def test_every_argument_matters():
    base = uniform(7, 0, 5)[0]
    others = [uniform(8, 0, 5), uniform(7 + 2**32, 0, 5), uniform(7, 1, 5), uniform(7, 0, 6), uniform(7, 0, 5, 1)]
    assert len({base, *(o[0] for o in others)}) == 6


@pytest.mark.parametrize("along", ["seed", "index", "position"])
def test_uniform_is_uniform_and_not_correlated(along):
    """Along each argument: chi-square over 100 cells (99 degrees, 99.9 %: 148.2), and of neighbours in a 10 x 10 grid."""
    n = 20000
    u = uniform(**{"seed": 3, "index": 0, "position": 11, along: np.arange(n)})
    counts = np.bincount((u * 100).astype(int), minlength=100)
    assert ((counts - n / 100) ** 2 / (n / 100)).sum() < 148.2
    pairs = (u[0::2] * 10).astype(int) * 10 + (u[1::2] * 10).astype(int)
    counts = np.bincount(pairs, minlength=100)
    assert ((counts - n / 200) ** 2 / (n / 200)).sum() < 148.2
