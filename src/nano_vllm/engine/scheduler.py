"""Scheduler: requests -> [(request, tokens), …]. The only decision: who gets how many tokens in this step.

There are no phases. A request gets `min(pending, what is left of the budget)`; a long prompt, a cache hit, a preempted
request that comes back and a decode step differ in that number alone.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from time import perf_counter

from .batch import Rows
from .blocks import BlockPool
from .request import Request


class Scheduler:
    """Args:
    rows: one for each request that may run.
    key: order of requests (a policy).
    max_num_seqs: requests that run at once.
    max_num_batched_tokens: tokens in a step.
    """

    def __init__(
        self,
        pool: BlockPool,
        rows: Rows,
        key: Callable[[Request], float],
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.pool, self.rows, self.key = pool, rows, key
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: list[Request] = []  # both sorted by key
        self.running: list[Request] = []
        self.preemptions = 0

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=self.key)

    def remove(self, request: Request) -> None:
        """Forgets a request and takes its blocks back; it is named by no outstanding step."""
        if request.row >= 0:
            self.running.remove(request)
            self.rows.leave(request)
        else:
            self.waiting.remove(request)
        self.pool.release(request)

    def schedule(self, may_preempt: bool = True) -> list[tuple[Request, int]] | None:
        """The next step, in order of the policy; empty if nothing can be computed now.

        Returns None where it would have to preempt while `may_preempt` is False (a step is outstanding): finish that first.
        """
        budget, size = self.max_num_batched_tokens, self.pool.block_size
        step: list[tuple[Request, int]] = []
        preempted = self.preemptions
        i = 0
        while i < len(self.running) and budget:
            request = self.running[i]
            n = min(request.pending, budget)
            full = request.computed + n > len(request.blocks) * size
            if n and full and not self._grow(request, request.computed + n, may_preempt):
                if not may_preempt:
                    return None
                continue  # it was itself preempted: the next one has moved to i, if there is one
            if n:
                step.append((request, n))
                budget -= n
            i += 1
        if self.preemptions == preempted:
            self._admit(step, budget)
        return step

    def _grow(self, request: Request, tokens: int, may_preempt: bool) -> bool:
        """Room for `tokens`, taken from the last of the running requests while there is too little."""
        while not self.pool.grow(request, tokens):
            if not may_preempt:
                return False
            last = self.running[-1]
            self._preempt(last)
            if last is request:
                return False
        return True

    def _admit(self, step: list[tuple[Request, int]], budget: int) -> None:
        i = 0
        while budget and i < len(self.waiting) and len(self.running) < self.max_num_seqs:
            request = self.waiting[i]
            hits = None if request.in_flight else self.pool.match(request)
            if hits is None:  # another request computes what this one needs: it will be a hit
                i += 1
                continue
            if not self.pool.admit(request, hits):
                break  # nobody overtakes: room will come when running requests end
            del self.waiting[i]
            insort(self.running, request, key=self.key)
            self.rows.enter(request)
            if request.first_scheduled is None:
                request.first_scheduled, request.cached_tokens = perf_counter(), request.computed
            n = min(request.pending, budget)
            step.append((request, n))
            budget -= n

    def _preempt(self, request: Request) -> None:
        """Back to the queue without blocks. Its tokens stay: they are computed again, or found in the prefix cache."""
        self.running.remove(request)
        self.rows.leave(request)
        self.pool.release(request)
        request.preemptions += 1
        self.preemptions += 1
        insort(self.waiting, request, key=self.key)
