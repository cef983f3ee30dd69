"""Nano-vLLM beside its peers on the CPU: same files, same threads, same prompts, one interleaved run. See `__main__.py`."""
