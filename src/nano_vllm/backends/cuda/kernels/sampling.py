"""From logits to ids on the device: the stages of `sampling/stages`, with nothing read back and no sort of the vocabulary.

The odds are float32, where the stages define them in float64: on consumer cards that is slower by a factor of 64. The number
that a token is drawn with is `sampling/philox.py`'s, and sums run over chunks of the vocabulary in ascending order, so an id
differs from the definition's only where a float32 rounding decides. Without top_k, top_p and min_p the logits are read once.

A row that must yield no id (NaN or +inf among its logits) keeps such a number through every edit, and its id is -1.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = 4096  # ids of a program
HISTORIES = 16  # rows whose ids are counted at a time
BIG = tl.constexpr(2147483647)
MOST = tl.constexpr(3.4028234663852886e38)
PROMPT = tl.constexpr(1 << 30)  # in a count: the id is in the prompt; below are the answer's occurrences


@triton.jit
def _ban(logits, ids, starts, V: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0)
    end = tl.load(starts + row + 1)
    for first in range(tl.load(starts + row), end, TILE):
        at = first + tl.arange(0, TILE)
        to = logits + row.to(tl.int64) * V + tl.load(ids + at, mask=at < end, other=0)
        old = tl.load(to, mask=at < end, other=0.0)
        tl.store(to, tl.where(old < float("inf"), float("-inf"), float("nan")), mask=at < end)


@triton.jit(do_not_specialize=["first_row"])
def _count(history, starts, prompts, counts, first_row, V: tl.constexpr, TILE: tl.constexpr):
    row = first_row + tl.program_id(0)
    begin, end = tl.load(starts + row), tl.load(starts + row + 1)
    answer = begin + tl.load(prompts + row)
    for first in range(begin, end, TILE):
        at = first + tl.arange(0, TILE)
        to = counts + tl.program_id(0).to(tl.int64) * V + tl.load(history + at, mask=at < end, other=0)
        tl.atomic_or(to, tl.full((TILE,), PROMPT, tl.int32), mask=(at < end) & (at < answer))
        tl.atomic_add(to, tl.full((TILE,), 1, tl.int32), mask=(at < end) & (at >= answer))


@triton.jit(do_not_specialize=["first_row"])
def _penalize(logits, history, starts, counts, repetition, frequency, presence, first_row, V: tl.constexpr, TILE: tl.constexpr):
    """Whoever takes an id's count out changes its logit, once; the counts are zero again after that."""
    row = first_row + tl.program_id(0)
    end = tl.load(starts + row + 1)
    r, f, p = tl.load(repetition + row), tl.load(frequency + row), tl.load(presence + row)
    for first in range(tl.load(starts + row), end, TILE):
        at = first + tl.arange(0, TILE)
        token = tl.load(history + at, mask=at < end, other=0)
        zero = tl.zeros((TILE,), tl.int32)
        count = tl.atomic_xchg(counts + tl.program_id(0).to(tl.int64) * V + token, zero, mask=at < end)
        mine = (at < end) & (count != 0)
        to = logits + row.to(tl.int64) * V + token
        old = tl.load(to, mask=mine, other=0.0)
        divided = tl.minimum(tl.maximum(tl.div_rn(old, r), -MOST), MOST)
        multiplied = tl.where(old == float("-inf"), old, tl.maximum(old * r, -MOST))
        x = tl.where(r == 1.0, old, tl.where(old > 0, divided, multiplied))
        often = (count & (PROMPT - 1)).to(tl.float32)
        x = tl.where(often > 0, tl.where(f != 0, x - f * often, x), x)
        x = tl.where(often > 0, tl.where(p != 0, x - p, x), x)
        tl.store(to, tl.where(old < float("inf"), x, float("nan")), mask=mine)


@triton.jit
def _scaled(x, temperature):
    """The stage "temperature"; -inf stays."""
    y = tl.minimum(tl.maximum(tl.div_rn(x, temperature), -MOST), MOST)
    return tl.where(temperature == 1.0, x, tl.where(x == float("-inf"), x, y))


@triton.jit
def _chunk(logits, row, chunk, V: tl.constexpr, CHUNK: tl.constexpr):
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    return token, tl.load(logits + row.to(tl.int64) * V + token, mask=token < V, other=float("-inf"))


@triton.jit
def _survey(logits, temperatures, tops, arguments, sums, V: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """Of each chunk, the highest logit, its first id, and the odds' sum, as if the chunk were the whole vocabulary."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    token, x = _chunk(logits, row, chunk, V, CHUNK)
    x = tl.where(x < float("inf"), x, float("inf"))  # NaN counts as +inf
    top = tl.max(x, axis=0)
    tl.store(tops + row * CHUNKS + chunk, top)
    tl.store(arguments + row * CHUNKS + chunk, tl.min(tl.where(x == top, token, BIG), axis=0))
    temperature = tl.load(temperatures + row)
    if (temperature > 0) & (top < float("inf")) & (top > float("-inf")):
        tl.store(sums + row * CHUNKS + chunk, tl.sum(_odds(x, top, temperature), axis=0))
    else:
        tl.store(sums + row * CHUNKS + chunk, 0.0)


@triton.jit
def _top(tops, row, CHUNKS: tl.constexpr, PADDED: tl.constexpr):
    c = tl.arange(0, PADDED)
    return tl.max(tl.load(tops + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf")), axis=0)


@triton.jit
def _odds(x, top, temperature):
    """Of logits, relative to those of the logit `top`, which is finite. No division per logit."""
    return tl.exp2((x - top) * (1.4426950408889634 / temperature))


@triton.jit
def _kept(x, token, temperature, top, least, border, border_id):
    """Which tokens min_p and the border keep. `top`: the row's highest logit."""
    scaled = _scaled(x, temperature)
    likely = tl.exp(scaled - _scaled(top, temperature)) >= least
    return (x > float("-inf")) & likely & ((scaled > border) | ((scaled == border) & (token <= border_id)))


@triton.jit
def _mass(
    logits, temperatures, min_p, tops, borders, border_ids, sums,
    V: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr, BORDERS: tl.constexpr,
):  # fmt: skip
    """The sums of `_survey` over the tokens that are kept, for the rows that do not keep all."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    temperature, least = tl.load(temperatures + row), tl.load(min_p + row).to(tl.float32)
    if (temperature > 0) & (BORDERS | (least > 0)):
        top = _top(tops, row, CHUNKS, PADDED)
        here = tl.load(tops + row * CHUNKS + chunk)
        if (top < float("inf")) & (here > float("-inf")):
            border, border_id = float("-inf"), BIG
            if BORDERS:
                border, border_id = tl.load(borders + row), tl.load(border_ids + row)
            token, x = _chunk(logits, row, chunk, V, CHUNK)
            kept = _kept(x, token, temperature, top, least, border, border_id)
            tl.store(sums + row * CHUNKS + chunk, tl.sum(tl.where(kept, _odds(x, here, temperature), 0.0), axis=0))


@triton.jit
def _uniform(seeds, index, position):
    """`sampling.philox.uniform` of one draw. seeds: its two halves, the lower first."""
    k0, k1 = tl.load(seeds).to(tl.uint32), tl.load(seeds + 1).to(tl.uint32)
    a, b = position.to(tl.uint32), index.to(tl.uint32)
    c, d = tl.zeros_like(a), tl.zeros_like(a)
    for _ in tl.static_range(10):
        low, high = a.to(tl.uint64) * 0xD2511F53, c.to(tl.uint64) * 0xCD9E8D57
        a = (high >> 32).to(tl.uint32) ^ b ^ k0
        c = (low >> 32).to(tl.uint32) ^ d ^ k1
        b, d = high.to(tl.uint32), low.to(tl.uint32)
        k0, k1 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32), (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    bits = ((a.to(tl.uint64) << 32) | b.to(tl.uint64)) >> 11
    return tl.minimum((bits.to(tl.int64).to(tl.float64) + 0.5) * 1.1102230246251565e-16, 0.9999999999999999)


@triton.jit
def _pick(
    logits, temperatures, min_p, tops, arguments, borders, border_ids, sums, seeds, indices, positions, skip, ids,
    V: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr, BORDERS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    top = _top(tops, row, CHUNKS, PADDED)
    c = tl.arange(0, PADDED)
    inside = c < CHUNKS
    of_top = tl.load(tops + row * CHUNKS + c, mask=inside, other=float("-inf")) == top
    best = tl.min(tl.where(of_top, tl.load(arguments + row * CHUNKS + c, mask=inside, other=BIG), BIG), axis=0)
    sound = (top < float("inf")) & (top > float("-inf")) & (tl.load(skip + row) == 0)
    if sound & (temperature > 0):
        border, border_id = float("-inf"), BIG
        if BORDERS:
            border, border_id = tl.load(borders + row), tl.load(border_ids + row)
        highest = tl.load(tops + row * CHUNKS + c, mask=inside, other=float("-inf"))
        share = _odds(highest, top, temperature) * tl.load(sums + row * CHUNKS + c, mask=inside, other=0.0)
        until = tl.cumsum(share.to(tl.float64), axis=0)
        total = tl.max(until, axis=0)
        target = _uniform(seeds + 2 * row, tl.load(indices + row), tl.load(positions + row)) * total
        chunk = tl.minimum(tl.sum((until <= target).to(tl.int32), axis=0), CHUNKS - 1)
        before = tl.max(tl.where(c < chunk, until, 0.0), axis=0)
        token, x = _chunk(logits, row, chunk, V, CHUNK)
        kept = _kept(x, token, temperature, top, tl.load(min_p + row).to(tl.float32), border, border_id)
        odds = tl.where(kept, _odds(x, top, temperature), 0.0).to(tl.float64)
        exceeds = (before + tl.cumsum(odds, axis=0) > target) & (odds > 0)
        first = tl.min(tl.where(exceeds, token, BIG), axis=0)
        last = tl.max(tl.where(odds > 0, token, -1), axis=0)  # where the chunk's own sum was rounded below its part
        best = tl.where(first < BIG, first, tl.where(last >= 0, last, best))
    tl.store(ids + row, tl.where(sound, best, -1))


@triton.jit
def _key(x):
    """float32 -> int32 that orders as the floats do; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _above(
    logits, row, temperature, top, least, border, border_id, key, V: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr
):
    """Number and mass of the kept tokens whose key is at least `key`."""
    number, mass = tl.zeros((CHUNK,), tl.int32), tl.zeros((CHUNK,), tl.float32)
    for chunk in range(CHUNKS):
        token, x = _chunk(logits, row, chunk, V, CHUNK)
        kept = _kept(x, token, temperature, top, least, border, border_id)
        reached = kept & (_key(_scaled(x, temperature)).to(tl.int64) >= key)
        number += reached.to(tl.int32)
        mass += tl.where(reached, _odds(x, top, temperature), 0.0)
    return tl.sum(number, axis=0).to(tl.float64), tl.sum(mass.to(tl.float64), axis=0)


@triton.jit
def _narrow(
    logits, row, temperature, top, least, border, border_id, needed, MASS: tl.constexpr, V: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The border (a scaled logit, and the last id that is kept of those equal to it) above which `needed` tokens are, or the
    mass `needed`: by bisection over the float's bits."""
    high = _key(_scaled(top, temperature)).to(tl.int64) + 1
    low = tl.full((), -2147483648, tl.int64)
    while high - low > 1:
        middle = (high + low) >> 1
        number, mass = _above(logits, row, temperature, top, least, border, border_id, middle, V, CHUNKS, CHUNK)
        enough = (mass if MASS else number) >= needed
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    number, mass = _above(logits, row, temperature, top, least, border, border_id, low + 1, V, CHUNKS, CHUNK)
    bits = low.to(tl.int32)
    found = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    each = tl.exp(found - _scaled(top, temperature)).to(tl.float64)
    missing = tl.maximum(tl.ceil((needed - mass) / each) if MASS else needed - number, 1.0)
    seen = tl.zeros((), tl.float64)
    last = tl.full((), -1, tl.int32)
    for chunk in range(CHUNKS):
        token, x = _chunk(logits, row, chunk, V, CHUNK)
        kept = _kept(x, token, temperature, top, least, border, border_id)
        equal = kept & (_key(_scaled(x, temperature)).to(tl.int64) == low)
        order = seen + tl.cumsum(equal.to(tl.int32), axis=0).to(tl.float64)
        last = tl.maximum(last, tl.max(tl.where(equal & (order <= missing), token, -1), axis=0))
        seen += tl.sum(equal.to(tl.int32), axis=0).to(tl.float64)
    return found, last


@triton.jit
def _border(
    logits, temperatures, min_p, top_k, top_p, tops, borders, border_ids,
    V: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    temperature, k, p = tl.load(temperatures + row), tl.load(top_k + row), tl.load(top_p + row)
    top, least = _top(tops, row, CHUNKS, PADDED), tl.load(min_p + row).to(tl.float32)
    border, border_id = tl.full((), float("-inf"), tl.float32), tl.full((), BIG, tl.int32)
    if (temperature > 0) & (top < float("inf")) & (top > float("-inf")):
        if (k > 0) & (k < V):
            number, _ = _above(logits, row, temperature, top, least, border, border_id, -2147483648, V, CHUNKS, CHUNK)
            if number > k:
                border, border_id = _narrow(
                    logits, row, temperature, top, least, border, border_id, k.to(tl.float64), False, V, CHUNKS, CHUNK
                )
        if p < 1.0:
            _, mass = _above(logits, row, temperature, top, least, border, border_id, -2147483648, V, CHUNKS, CHUNK)
            border, border_id = _narrow(logits, row, temperature, top, least, border, border_id, p * mass, True, V, CHUNKS, CHUNK)
    tl.store(borders + row, border)
    tl.store(border_ids + row, border_id)
