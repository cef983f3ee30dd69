"""Request: the only mutable state of one prompt and its answer, from submit to the last event."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..sampling.params import SamplingParams

if TYPE_CHECKING:
    from ..text.detokenizer import Detokenizer

STOP, LENGTH, ABORT, ERROR = "stop", "length", "abort", "error"


@dataclass(slots=True)
class Update:
    """What one step (or an abort) did to a request. The last one has a `finish_reason`.

    Attributes:
        ids: new ids, in order.
        text: new text, where the engine detokenises (requests with stop strings), else None.
        stop_reason: the id or string that ended the answer; None for end-of-text and for other reasons.
        error: what went wrong, with finish_reason "error".
    """

    request: Request
    ids: list[int]
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None


@dataclass(eq=False)
class Request:
    """Attributes:
    tokens: prompt and committed answer; only grows.
    computed: positions whose keys and values are in the cache, or are put there by an outstanding step.
    promised: ids that outstanding steps will sample and that have not come back.
    in_flight: outstanding steps that name this request; its blocks stay while there are any.
    blocks: block ids by position; only grows while the request runs.
    digests, contents: chained hash of each full block of `tokens`, and its bytes, as far as they were needed.
    registered: full blocks that were offered to the prefix cache.
    serial: of the prefix-cache entry of the last registered block.
    lockstep: its next id depends on host state, so it never runs ahead of its own last id.
    wants_logits: its rows' logits are wanted on the host.
    row: its row of what the engine keeps of running requests (`batch.Rows`); -1 while it does not run.
    sampled_at: where it stands among the requests that the last step that samples it does sample.
    sink, observe: called by the engine with each update, and (for tests and tools) with the float32 logits of each sampled row;
        what they raise is logged and ends this request alone.
    """

    id: str
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    max_length: int  # of `tokens`
    seed: int
    stop_ids: frozenset[int]
    sink: Callable[[Update], None]
    priority: int = 0
    cache_salt: str | None = None
    detokenizer: Detokenizer | None = None
    lockstep: bool = False
    wants_logits: bool = False
    observe: Callable | None = None
    index: int = 0

    row: int = -1
    sampled_at: int = -1
    computed: int = 0
    promised: int = 0
    in_flight: int = 0
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    contents: list[bytes] = field(default_factory=list)
    registered: int = 0
    serial: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    finish_reason: str | None = None

    arrival: float = field(default_factory=time.perf_counter)
    first_scheduled: float | None = None
    first_token: float | None = None
    finished_at: float | None = None

    @property
    def pending(self) -> int:
        """Tokens to compute before the next id can be sampled: the whole of scheduling is this subtraction."""
        if self.finish_reason is not None:  # still named by an outstanding step
            return 0
        if self.promised and (self.lockstep or len(self.tokens) + self.promised >= self.max_length):
            return 0
        return len(self.tokens) + self.promised - self.computed

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length
