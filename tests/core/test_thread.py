"""The engine thread: whatever happens, every request gets one last update and nobody waits for ever."""

from __future__ import annotations

import queue
import time

import pytest

from nano_vllm.engine.thread import EngineThread
from nano_vllm.errors import EngineClosed, ModelUnloaded
from nano_vllm.sampling.params import SamplingParams

from .fake import Client, answer

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


class Threaded:
    """An engine over the fake backend in its thread, and the updates of all its requests."""

    def __init__(self, **options) -> None:
        self.engine = Client(**options).engine
        self.updates: queue.SimpleQueue = queue.SimpleQueue()
        self.thread = EngineThread(self.engine)

    def submit(self, *prompts, **options) -> list:
        requests = [self.engine.make_request(p, PARAMS, self.updates.put, **options) for p in prompts]
        self.thread.submit(requests)
        return requests

    def ends(self, count: int) -> list:
        """The next `count` last updates, in their order."""
        found = []
        while len(found) < count:
            update = self.updates.get(timeout=30)
            if update.finish_reason is not None:
                found.append(update)
        return found

    def stand_still(self) -> None:
        """From now on a step computes nothing."""
        self.thread.call(lambda engine: setattr(engine, "step", lambda: time.sleep(0.001)))


@pytest.fixture
def threaded():
    made = Threaded()
    yield made
    made.thread.close()
    assert made.updates.empty()


def test_requests_are_answered(threaded):
    requests = threaded.submit([1, 2, 3], [4, 5, 6])
    assert [u.finish_reason for u in threaded.ends(2)] == ["length"] * 2
    assert [r.tokens[3:] for r in requests] == [answer([1, 2, 3], 8), answer([4, 5, 6], 8)]
    threaded.thread.call(lambda engine: engine.check())


def test_a_call_raises_what_its_function_raises(threaded):
    with pytest.raises(ZeroDivisionError):
        threaded.thread.call(lambda engine: 1 / 0)
    assert threaded.thread.call(lambda engine: 5) == 5


def test_an_id_in_use_is_refused_and_its_abort_touches_nobody(threaded):
    threaded.stand_still()
    (first,) = threaded.submit([1, 2, 3], request_id="a")
    (twin,) = threaded.submit([1, 2, 3], request_id="a")
    threaded.thread.abort([twin])
    assert [(u.request, u.finish_reason) for u in threaded.ends(1)] == [(twin, "error")]
    assert threaded.thread.call(lambda engine: list(engine.requests.values())) == [first]
    threaded.thread.abort([first])
    assert [(u.request, u.finish_reason) for u in threaded.ends(1)] == [(first, "abort")]


def test_closing_ends_what_runs_and_refuses_what_comes(threaded):
    threaded.stand_still()
    requests = threaded.submit([1, 2, 3], [4, 5, 6])
    threaded.thread.close()
    assert [(u.request, u.finish_reason) for u in threaded.ends(2)] == [(r, "abort") for r in requests]
    with pytest.raises(EngineClosed):
        threaded.submit([1, 2, 3])
    threaded.thread.abort(requests)


@pytest.mark.parametrize("broken", ["step", "_commit", "_accept", "_retire"])
def test_a_fault_of_the_engine_ends_every_request(broken):
    """Also where it comes after a request's end and before its blocks are given back."""
    threaded = Threaded(max_num_seqs=1)

    def fault(*_):
        raise RuntimeError("the books are wrong")

    threaded.thread.call(lambda engine: setattr(engine, broken, fault))
    requests = threaded.submit([1, 2, 3], [4, 5, 6], [7, 8, 9])
    assert {u.request.id for u in threaded.ends(3)} == {r.id for r in requests}
    threaded.thread.close()
    assert threaded.updates.empty()
    with pytest.raises(EngineClosed, match="the books are wrong"):
        threaded.submit([1, 2, 3])


def test_a_block_that_is_lost_is_noticed_when_idle():
    threaded = Threaded()
    threaded.thread.call(lambda engine: engine.pool._available.popitem())
    threaded.thread._thread.join(30)
    with pytest.raises(EngineClosed, match="1 of 64 blocks"):
        threaded.submit([1, 2, 3])


def test_closing_with_an_error_ends_what_runs_with_it(threaded):
    threaded.stand_still()
    requests = threaded.submit([1, 2, 3], [4, 5, 6])
    threaded.thread.close(ModelUnloaded("gone", "for a reason", "a mend"))
    ends = threaded.ends(2)
    assert [(u.request, u.finish_reason, str(u.error)) for u in ends] == [
        (r, "error", "gone: for a reason. a mend") for r in requests
    ]
    errors = []
    for _ in range(2):
        with pytest.raises(ModelUnloaded, match="gone: for a reason. a mend") as told:
            threaded.submit([1, 2, 3])
        errors.append(told.value)
    assert errors[0] is not errors[1]


def test_steps_under_way_are_not_kept_after_closing():
    threaded = Threaded(max_outstanding=1)
    threaded.submit([1, 2, 3])
    threaded.ends(1)
    threaded.thread.call(lambda engine: engine.outstanding.append("a step"))
    threaded.thread.close()
    assert not threaded.engine.outstanding


def test_closing_from_the_engines_own_thread(threaded):
    """The garbage collector ends a model that nobody holds in whatever thread it happens to run."""
    threaded.thread.call(lambda engine: threaded.thread.close())
    threaded.thread.close()
    with pytest.raises(EngineClosed):
        threaded.submit([1, 2])
