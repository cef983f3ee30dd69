"""The CUDA backend, on a card where there is one, else through Triton's interpreter (tests/conftest.py switches it on)."""

try:
    import torch

    DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
except ImportError:
    DEVICE = "cpu"
