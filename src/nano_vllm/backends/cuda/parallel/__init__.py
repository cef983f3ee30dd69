"""A model over several GPUs (`tensor_parallel_size`), one process each: every rank has a part of each matrix.

`split` says which part, `session` starts the ranks and hands them the batches, `rank` is the process of one of them.
"""
