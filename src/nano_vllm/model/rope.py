"""From a config's rotary settings to `Rope`: every scaling is a change of the frequencies, made once, here.

Two spellings are read: `rope_theta` with `rope_scaling`, and `rope_parameters` that holds both (transformers 5).
Arithmetic is float32 in the order of transformers' own, so that positions far out turn by the same angle. Powers are taken
in float64 and rounded, which no library's float32 power misses by more than one unit in the last place.
"""

from __future__ import annotations

import math

import numpy as np

from ..errors import ModelFileError, UnsupportedModel
from .spec import Rope

THETA = 10000.0
ORIGINAL = "original_max_position_embeddings"
EVERY = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned", ORIGINAL}  # settings any type may carry


def rope(config: dict, head_size: int) -> Rope:
    """The rotary embedding that a Hugging Face config asks for.

    Raises:
        UnsupportedModel: a type or setting of scaling that is not known, or rotation of a part of the head only.
        ModelFileError: a setting that its type needs is missing or is no positive number.
    """
    settings = parameters(config)
    kind = settings["rope_type"]
    if kind not in SCALINGS:
        known = ", ".join(sorted(SCALINGS))
        raise UnsupportedModel(f"rope_type {kind!r} is not supported", f"supported are {known}")
    if float(settings.get("partial_rotary_factor") or 1.0) != 1.0:
        why = f"partial_rotary_factor is {settings['partial_rotary_factor']}"
        raise UnsupportedModel("rotation of a part of each head is not supported", why)
    scaling, used = SCALINGS[kind]
    for name, value in settings.items():
        if value is not None and name not in EVERY and name not in used:
            raise UnsupportedModel(f"rope setting {name!r} is not supported", f"rope_type {kind!r} does not use it")
    if head_size % 2:
        raise UnsupportedModel("an odd head size cannot be rotated", f"head_dim is {head_size}")
    frequencies, scale = scaling(settings, periods(number(settings, "rope_theta"), head_size))
    return Rope(tuple(float(f) for f in frequencies), float(scale))


def parameters(config: dict) -> dict:
    """Both spellings as one dict with `rope_type`, `rope_theta` and, for types that need it, the original context."""
    settings = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    for key, value in settings.items():
        if isinstance(value, dict):
            raise UnsupportedModel("rope settings per kind of layer are not supported", f"the config has them for {key!r}")
    settings["rope_type"] = settings.get("rope_type") or settings.get("type") or "default"
    for name in ("rope_theta", "partial_rotary_factor"):
        if settings.get(name) is None:
            settings[name] = config.get(name)
    if settings["rope_theta"] is None:
        settings["rope_theta"] = THETA
    context = config.get("max_position_embeddings")
    settings[ORIGINAL] = config.get(ORIGINAL) or settings.get(ORIGINAL) or context
    if settings["rope_type"] == "yarn" and settings.get("factor") is None and context:
        settings["factor"] = context / number(settings, ORIGINAL)
    return settings


def number(settings: dict, name: str, default: float | None = None) -> float:
    """A positive, finite number of the settings."""
    value = settings.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ModelFileError(f"rope setting {name!r} must be a positive number", f"it is {value!r}")
    return value


def periods(theta: float, size: int) -> np.ndarray:
    """(size / 2,) float32 positions per radian before scaling: theta^(2 i / size) (Su et al. 2021)."""
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    return np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)


def default(settings: dict, periods: np.ndarray) -> tuple[np.ndarray, float]:
    return np.float32(1) / periods, 1.0


def linear(settings: dict, periods: np.ndarray) -> tuple[np.ndarray, float]:
    """Positions are divided by the factor (Chen et al. 2023)."""
    return np.float32(1) / periods / np.float32(number(settings, "factor")), 1.0


def factors(settings: dict, periods: np.ndarray) -> tuple[np.ndarray, float]:
    """Each frequency has its own divisor, as a GGUF's rope_freqs tensor gives them."""
    divisors = np.asarray(settings.get("factors"), np.float32)
    if divisors.shape != periods.shape or not (np.isfinite(divisors) & (divisors > 0)).all():
        raise ModelFileError(f"rope factors must be {len(periods)} positive numbers", f"they have the shape {divisors.shape}")
    return np.float32(1) / periods / divisors, 1.0


def llama3(settings: dict, periods: np.ndarray) -> tuple[np.ndarray, float]:
    """Long wavelengths are divided by the factor, short ones kept, those between blended (Llama 3.1)."""
    factor, original = (np.float32(number(settings, name)) for name in ("factor", ORIGINAL))
    low, high = number(settings, "low_freq_factor"), number(settings, "high_freq_factor")
    if low >= high:
        raise ModelFileError("rope setting 'high_freq_factor' must exceed 'low_freq_factor'", f"they are {high} and {low}")
    base = np.float32(1) / periods
    wavelengths = np.float32(2 * math.pi) / base
    smooth = (original / wavelengths - np.float32(low)) / np.float32(high - low)
    blended = (1 - smooth) * base / factor + smooth * base
    long, short = wavelengths > original / np.float32(low), wavelengths < original / np.float32(high)
    return np.where(long, base / factor, np.where(short, base, blended)), 1.0


def yarn(settings: dict, periods: np.ndarray) -> tuple[np.ndarray, float]:
    """YaRN (Peng et al. 2023): frequencies that turn often within the original context are kept, slow ones divided by
    the factor, with a ramp over the dimensions between; cosine and sine are scaled by the attention factor."""
    size, theta = 2 * len(periods), number(settings, "rope_theta")
    factor, original = number(settings, "factor"), number(settings, ORIGINAL)

    def dimension(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(number(settings, "beta_fast", 32)), dimension(number(settings, "beta_slow", 1))
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low if high != low else 0.001
    ramp = np.clip((np.arange(size // 2, dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)
    kept = 1 - ramp
    divided = np.float32(1) / (np.float32(factor) * periods)
    return divided * (1 - kept) + np.float32(1) / periods * kept, attention_factor(settings, factor)


def attention_factor(settings: dict, factor: float) -> float:
    """Explicit; else a ratio of both mscales where both are given and not 0; else 0.1 · ln(factor) + 1."""

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if settings.get("attention_factor") is not None:
        return number(settings, "attention_factor")
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return magnitude(number(settings, "mscale")) / magnitude(number(settings, "mscale_all_dim"))
    return magnitude(1.0)


SCALINGS = {  # rope_type -> the function and the settings that only it uses
    "default": (default, set()),
    "linear": (linear, {"factor"}),
    "factors": (factors, {"factors"}),
    "llama3": (llama3, {"factor", "low_freq_factor", "high_freq_factor"}),
    "yarn": (yarn, {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
}
