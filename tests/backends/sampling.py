"""Sampling parameters that every backend's draws are held to the definition with."""

from __future__ import annotations

CASES = {
    "greedy": dict(temperature=0),
    "greedy, banned": dict(temperature=0, min_tokens=50, max_tokens=99, stop_token_ids=(1,)),
    "greedy, penalties": dict(temperature=0, repetition_penalty=1.7, frequency_penalty=0.4, presence_penalty=-0.6),
    "temperature 1": dict(),
    "hot": dict(temperature=30.0),
    "cold": dict(temperature=1e-20),
    "top_k 1": dict(top_k=1),
    "top_k": dict(top_k=7, temperature=3.0),
    "top_k beyond the vocabulary": dict(top_k=10**9),
    "top_p": dict(top_p=0.7, temperature=2.0),
    "top_p tiny": dict(top_p=1e-6, temperature=2.0),
    "top_p nearly 1": dict(top_p=0.999999, temperature=2.0),
    "min_p": dict(min_p=0.2, temperature=4.0),
    "min_p 1": dict(min_p=1.0),
    "all": dict(
        temperature=1.3, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.3, frequency_penalty=-0.5, presence_penalty=1,
        min_tokens=99, max_tokens=99,
    ),
    "repetition below 1": dict(repetition_penalty=0.5, temperature=0.7),
}  # fmt: skip
