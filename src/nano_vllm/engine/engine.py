"""Engine: submit -> schedule -> batch -> session -> commit. One thread calls it; see `thread.py` for that thread."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np

from .. import registry
from ..errors import BackendUnavailable, NanoVLLMError, ParameterError, PromptError
from ..sampling import pipeline
from ..sampling.params import SamplingParams
from ..text.detokenizer import Detokenizer
from .backend import Session
from .batch import Rows, Step, build
from .blocks import BlockPool
from .checks import check_fields, check_params, checked_ids
from .request import ABORT, ERROR, LENGTH, STOP, Request, Update
from .scheduler import Scheduler
from .stats import Stats

log = logging.getLogger(__name__)


class Engine:
    """Args:
    session: an open backend, whose `plan` says how many blocks there are.
    vocab_size: ids are 0 to vocab_size − 1.
    eos_ids: ids that end an answer.
    tokenizer: for stop strings; None where no request has any.
    seed: from which requests without a seed draw theirs; None: from the operating system.

    Raises:
        BackendUnavailable: the session has more steps under way than the engine can name rows of.
    """

    def __init__(
        self,
        session: Session,
        vocab_size: int,
        eos_ids: frozenset[int] = frozenset(),
        tokenizer=None,
        seed: int | None = None,
        prefix_caching: bool = True,
        policy: str = "fifo",
    ) -> None:
        if session.max_outstanding not in (0, 1):
            why = f"its session has max_outstanding {session.max_outstanding!r}; a row names rows of the step just before"
            raise BackendUnavailable("the backend breaks the engine's contract", why, "Let it be 0 or 1.")
        plan = session.plan
        self.session, self.plan, self.vocab_size, self.eos_ids, self.tokenizer = session, plan, vocab_size, eos_ids, tokenizer
        self.pool = BlockPool(plan.num_blocks, plan.block_size, prefix_caching)
        self.policy = registry.load("policies", policy)
        self.rows = Rows(plan.max_num_seqs)
        self.scheduler = Scheduler(self.pool, self.rows, self.policy.key, plan.max_num_seqs, plan.max_num_batched_tokens)
        self.stats = Stats()
        self.outstanding: deque[Step] = deque()
        self.requests: dict[str, Request] = {}
        self._seeds = np.random.default_rng(seed if seed is not None else int.from_bytes(os.urandom(16), "little"))
        self._ids, self._own = count(), os.urandom(6).hex()  # no caller has our ids by accident

    def make_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        sink: Callable[[Update], None],
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        observe: Callable | None = None,
    ) -> Request:
        """Checks what can be checked and returns the request, or raises a RequestError that names the mend."""
        check_params(params, self.vocab_size, self.tokenizer)
        ids = checked_ids(prompt_ids, self.vocab_size, self.plan)
        check_fields(request_id, priority, cache_salt, self.policy)
        limit = self.plan.max_model_len
        budget = limit - len(ids) if params.max_tokens is None else params.max_tokens
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)
        if params.min_tokens and len(stop_ids) >= self.vocab_size:
            raise ParameterError("min_tokens", "every token ends the answer, so none could be drawn", "Use 0.")
        host = pipeline.needed(params) - self.session.stages
        request = Request(
            id=request_id if request_id is not None else f"r{next(self._ids)}-{self._own}",
            tokens=ids,
            prompt_length=len(ids),
            params=params,
            max_length=min(len(ids) + budget, limit),
            seed=int(self._seeds.integers(0, 2**63)) if params.seed is None else params.seed % 2**64,
            stop_ids=stop_ids,
            sink=sink,
            priority=priority,
            cache_salt=cache_salt,
            wants_logits=bool(host or observe),
            lockstep=bool(host or observe or params.stop or pipeline.needs_history(params)),
            observe=observe,
        )
        if params.stop:
            request.detokenizer = Detokenizer(
                self.tokenizer,
                params.stop,
                params.include_stop_str_in_output,
                params.skip_special_tokens,
                params.min_tokens,
            )
        return request

    def submit(self, request: Request) -> None:
        """Queues a request; from here on it gets exactly one last update."""
        if request.id in self.requests:
            raise PromptError(f"request id {request.id!r} is in use", "", "Choose another.")
        self.scheduler.add(request)
        self.requests[request.id] = request
        self.stats.received += 1

    def refuse(self, request: Request, error: Exception) -> None:
        """Ends a request that never entered."""
        self.stats.rejected += 1
        request.finish_reason, request.finished_at = ERROR, time.perf_counter()
        self._tell(request, Update(request, [], finish_reason=ERROR, error=error))

    @property
    def busy(self) -> bool:
        return bool(self.requests)

    def step(self) -> None:
        """Submits one step if there is work, and commits the oldest once more are outstanding than the session takes."""
        work = self.scheduler.schedule(may_preempt=not self.outstanding)
        while work is None:
            self._commit(self.outstanding.popleft())
            work = self.scheduler.schedule(may_preempt=not self.outstanding)
        self.stats.preemptions = self.scheduler.preemptions
        if work:
            self._submit(work)
        elif not self.outstanding and self.scheduler.waiting:
            raise RuntimeError("requests wait, none runs and none can be admitted")
        while len(self.outstanding) > (self.session.max_outstanding if work else 0):
            self._commit(self.outstanding.popleft())

    def abort(self, request_id: str, reason: str = ABORT, error: Exception | None = None) -> None:
        """Ends a request in whatever state it is; unknown and finished ids are no error."""
        request = self.requests.get(request_id)
        if request is not None and request.finish_reason is None:
            self._finish(request, Update(request, [], finish_reason=reason, error=error))

    def check(self) -> None:
        """Raises RuntimeError unless tokens, blocks and counters balance."""
        live = self.scheduler.running + self.scheduler.waiting
        self.pool.check(live)
        if len(live) != len(self.requests) or self.stats.received != len(live) + self.stats.finished.total() - self._retiring():
            raise RuntimeError(f"requests do not add up: {len(live)} live, {self.stats.as_dict()}")

    def _retiring(self) -> int:
        """Requests that are finished but still named by an outstanding step."""
        return sum(r.finish_reason is not None for r in self.requests.values())

    def _submit(self, work: list[tuple[Request, int]]) -> None:
        batch, step = build(work, self.rows)
        for request, n in work:
            request.computed += n
            request.in_flight += 1
        for request in step.sampled:
            request.promised += 1
        self.stats.steps += 1
        self.stats.scheduled_tokens += len(batch.tokens)
        try:
            step.ticket = self.session.submit(batch)
        except Exception as error:
            self._fail(step, error)
        else:
            self.outstanding.append(step)

    def _commit(self, step: Step) -> None:
        try:
            result = step.ticket.result()
        except Exception as error:
            self._fail(step, error)
            return
        ids = result.ids.tolist()
        for row, i in enumerate(step.observed):
            self._show(step.sampled[i], result.logits[row])
        if step.observed:
            drawn = pipeline.sample(result.logits, pipeline.rows(step.sampling, step.observed))
            for i, token in zip(step.observed, drawn.tolist()):
                ids[i] = token
        self._land(step)
        size, now = self.plan.block_size, time.perf_counter()
        for (request, _), end in zip(step.work, step.ends):
            if end >= (request.registered + 1) * size and request.finish_reason is None:
                self.pool.register(request, min(end, len(request.tokens)))
        for request, token in zip(step.sampled, ids):
            if request.finish_reason is None:
                self._accept(request, token, now)

    def _land(self, step: Step) -> None:
        """The step is outstanding no more: what it held back is settled."""
        for request in step.sampled:
            request.promised -= 1
        for request, _ in step.work:
            request.in_flight -= 1
            if request.finish_reason is not None and not request.in_flight:
                self._retire(request)

    def _fail(self, step: Step, error: Exception) -> None:
        """A step that raised ends the requests it names, and no others."""
        self._land(step)
        for request, _ in step.work:
            if request.finish_reason is None:
                self._finish(request, Update(request, [], finish_reason=ERROR, error=error))

    def _accept(self, request: Request, token: int, now: float) -> None:
        """One committed id of a live request, which came at `now`."""
        if token < 0:
            error = NanoVLLMError("no token can be drawn", "the model's logits are not numbers, or every token is excluded")
            self._finish(request, Update(request, [], finish_reason=ERROR, error=error))
            return
        request.tokens.append(token)
        if request.first_token is None:
            request.first_token = now
        update = Update(request, [token])
        if token in request.stop_ids and request.output_length >= request.params.min_tokens:
            update.finish_reason = STOP
            update.stop_reason = token if token in request.params.stop_token_ids else None
        if request.detokenizer is not None:
            self._match_stop(request, update)
        if update.finish_reason is None and len(request.tokens) >= request.max_length:
            update.finish_reason = LENGTH
        if update.finish_reason is None:
            self._tell(request, update)
        else:
            self._finish(request, update)

    def _tell(self, request: Request, update: Update) -> None:
        try:
            request.sink(update)
        except Exception as error:
            self._blame(request, "sink", error)

    def _show(self, request: Request, logits: np.ndarray) -> None:
        try:
            if request.observe is not None:
                request.observe(logits)
        except Exception as error:
            self._blame(request, "observe", error)

    def _blame(self, request: Request, whose: str, error: Exception) -> None:
        """A caller's function raised: that ends its request, if it still runs, and no other."""
        log.error("request %s: its %s raised", request.id, whose, exc_info=error)
        if request.finish_reason is None:
            self._finish(request, Update(request, [], finish_reason=ERROR, error=error))

    def _match_stop(self, request: Request, update: Update) -> None:
        """Stop strings are found where tokens are committed, so that nothing is generated past them."""
        ended = update.finish_reason is not None and not request.params.include_stop_str_in_output
        update.text = request.detokenizer.push([] if ended else update.ids)
        if request.detokenizer.stopped is not None:
            update.finish_reason, update.stop_reason = STOP, request.detokenizer.stopped

    def _finish(self, request: Request, update: Update) -> None:
        request.finish_reason = update.finish_reason
        request.finished_at = time.perf_counter()
        if request.detokenizer is not None:
            update.text = (update.text or "") + request.detokenizer.finish()
        self.stats.finished[update.finish_reason] += 1
        self.stats.prompt_tokens += request.prompt_length
        self.stats.output_tokens += request.output_length
        self.stats.prefix_hit_tokens += request.cached_tokens
        self._tell(request, update)
        if not request.in_flight:
            self._retire(request)

    def _retire(self, request: Request) -> None:
        """No outstanding step names the request: its blocks go back, the full ones stay findable."""
        self.scheduler.remove(request)
        del self.requests[request.id]
