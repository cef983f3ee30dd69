"""Stages of sampling, one file each, applied in the order of their ORDER.

A stage has

    NAME: str                                       # the file's name
    ORDER: int                                      # ban 10, repetition 20, frequency 30, presence 40, temperature 50,
                                                    # min_p 60, top_k 70, top_p 80, draw 90
    PARAMETERS: dict[str, dtype]                    # fields of SamplingParams that it reads
    HISTORY: bool                                   # it reads the ids of prompt and answer
    def active(batch) -> (wanted,) bool             # the rows that it may change
    def apply(logits, batch, i) -> logits           # row i, (vocabulary,) float32; its input is left as it is

Excluded tokens become -inf. `apply` is called for active rows alone, with logits that have a finite maximum.
"""
