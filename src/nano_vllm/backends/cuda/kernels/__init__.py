"""Triton kernels, each with a launcher that says shapes and dtypes.

What varies from step to step is `do_not_specialize`d or read from memory, so that a kernel compiles once per model and size
class. Tile sizes are plain tables beside the launchers; nothing is tuned at run time.
"""
