"""Random numbers as a function of what they are for, so that batching, order and preemption cannot change them."""

from __future__ import annotations

import numpy as np

ROUNDS = 10
MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
WEYL = np.array([0x9E3779B9, 0xBB67AE85], np.uint32)
LOW, HIGH = np.uint64(0xFFFFFFFF), np.uint64(32)
BELOW_ONE = 1.0 - 2.0**-53


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011).

    Args:
        counter: (n, 4) uint32.
        key: (n, 2) uint32.

    Returns:
        (n, 4) uint32.
    """
    counter, key = np.asarray(counter, np.uint32), np.asarray(key, np.uint32)
    words = [counter[:, j] for j in range(4)]
    for _ in range(ROUNDS):
        products = [words[0].astype(np.uint64) * MULTIPLIERS[0], words[2].astype(np.uint64) * MULTIPLIERS[1]]
        high = [(p >> HIGH).astype(np.uint32) for p in products]
        low = [(p & LOW).astype(np.uint32) for p in products]
        words = [high[1] ^ words[1] ^ key[:, 0], low[1], high[0] ^ words[3] ^ key[:, 1], low[0]]
        key = key + WEYL
    return np.stack(words, axis=1)


def uniform(seed, index, position, purpose=0) -> np.ndarray:
    """(n,) float64 strictly between 0 and 1; arguments are numbers or (n,) arrays, broadcast.

    Key: low and high half of the seed. Counter: position, sample index, purpose, 0. The upper 53 of the first two words'
    64 bits, plus a half, times 2^-53; the one pattern that rounds to 1 gives the float64 below 1.

    Args:
        seed: uint64, or an int that is taken modulo 2^64.
        index: which sample of its request, from 0.
        position: of the token that is drawn.
        purpose: 0 for the draw of a token; other uses of a position take other numbers.
    """
    if isinstance(seed, int):
        seed = np.uint64(seed % 2**64)
    seed, index, position, purpose = np.broadcast_arrays(*(np.atleast_1d(x) for x in (seed, index, position, purpose)))
    seed = seed.astype(np.uint64)
    key = np.stack([seed & LOW, seed >> HIGH], axis=1).astype(np.uint32)
    counter = np.stack([position, index, purpose, np.zeros_like(position)], axis=1).astype(np.uint32)
    words = philox4x32(counter, key).astype(np.uint64)
    bits = (words[:, 0] << HIGH | words[:, 1]) >> np.uint64(11)
    return np.minimum((bits.astype(np.float64) + 0.5) * 2.0**-53, BELOW_ONE)
