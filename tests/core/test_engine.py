"""The engine over a fake backend: chunks, cache hits, preemption, aborts, failures. No answer may depend on any of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_vllm.engine import blocks
from nano_vllm.errors import BackendUnavailable, ParameterError, PromptError, PromptTooLong
from nano_vllm.sampling.params import SamplingParams

from .fake import VOCAB, Client, answer

depths = pytest.mark.parametrize("depth", [0, 1])


def prompt(n: int, start: int = 0) -> list[int]:
    return [(start + 7 * i) % VOCAB for i in range(n)]


@depths
def test_one_request(depth):
    client = Client(depth)
    key = client.submit(prompt(5), 20)
    client.run()
    assert client.ids[key] == answer(prompt(5), 20)
    assert client.ends[key] == "length"


@depths
@pytest.mark.parametrize("length", [16, 32, 33])
def test_same_prompt_twice_recomputes_the_last_token(depth, length):
    client = Client(depth)
    first = client.submit(prompt(length), 4)
    client.run()
    second = client.submit(prompt(length), 4)
    client.run()
    assert client.ids[first] == client.ids[second] == answer(prompt(length), 4)
    assert client.engine.stats.prefix_hit_tokens == (length - 1) // 16 * 16


@depths
def test_preempted_requests_with_a_common_prefix(depth):
    client = Client(depth, num_blocks=12)
    prompts = [prompt(32) + [k, k + 1] for k in range(8)]
    keys = [client.submit(p, 60) for p in prompts]
    client.run()
    assert client.engine.stats.preemptions > 0
    assert [client.ids[k] for k in keys] == [answer(p, 60) for p in prompts]


@depths
def test_long_prompt_runs_in_chunks_beside_decoding(depth):
    client = Client(depth, max_num_batched_tokens=16)
    short = client.submit(prompt(3), 30)
    for _ in range(3):
        client.engine.step()
    long = client.submit(prompt(200, 1), 5)
    client.run()
    assert client.ids[short] == answer(prompt(3), 30)
    assert client.ids[long] == answer(prompt(200, 1), 5)
    mixed = [b for b in client.session.steps if len(b.starts) == 3]
    assert mixed and all(len(b.tokens) <= 16 for b in client.session.steps)


def test_request_waits_for_the_one_that_computes_its_prefix():
    client = Client(max_num_batched_tokens=64)
    keys = [client.submit(prompt(48) + [k], 4) for k in range(6)]
    client.run()
    assert client.engine.stats.prefix_hit_tokens == 5 * 48
    assert all(client.ids[k] == answer(prompt(48) + [i], 4) for i, k in enumerate(keys))


def test_blocks_behind_an_evicted_one_are_replaced():
    """A twin's own first block is not kept, as the cache has it; then the cache loses it while the twin still runs."""
    client = Client(num_blocks=16)
    client.submit(prompt(16), 1)
    client.run()
    twin = client.submit(prompt(16), 120)
    for _ in range(20):
        client.engine.step()
    client.submit(prompt(205, 50), 1, cache_salt="other")  # needs every block that the twin does not hold
    client.run()
    again = prompt(16) + client.ids[twin]
    client.submit(again, 1)
    client.run()
    hits = client.engine.stats.prefix_hit_tokens
    client.submit(again, 1)
    client.run()
    assert client.engine.stats.prefix_hit_tokens - hits == (len(again) - 1) // 16 * 16


def test_constant_hash_gives_no_false_hit(monkeypatch):
    class Constant:
        def copy(self):
            return self

        def update(self, data):
            pass

        def digest(self):
            return b"same"

    monkeypatch.setattr(blocks.hashlib, "blake2b", lambda **_: Constant())
    client = Client()
    for start in range(4):
        key = client.submit(prompt(50, start), 20)
        client.run()
        assert client.ids[key] == answer(prompt(50, start), 20)


def test_salt_separates(monkeypatch):
    client = Client()
    for salt in (None, "a", "b", "a"):
        client.submit(prompt(48), 2, cache_salt=salt)
        client.run()
    assert client.engine.stats.prefix_hit_tokens == 32


@depths
def test_abort_in_every_state(depth):
    client = Client(depth, num_blocks=16, max_num_seqs=2, max_num_batched_tokens=16)
    keys = [client.submit(prompt(40, k), 30) for k in range(5)]
    client.engine.abort(keys[4])  # queued
    client.engine.step()
    client.engine.abort(keys[0])  # in prefill
    for _ in range(8):
        client.engine.step()
    client.engine.abort(keys[1])  # decoding
    client.engine.abort(keys[1])  # already gone
    client.engine.abort("nobody")
    client.run()
    assert [client.ends[k] for k in keys] == ["abort", "abort", "length", "length", "abort"]
    assert client.ids[keys[2]] == answer(prompt(40, 2), 30)
    assert client.engine.pool.available == 16


def test_an_aborted_prompt_is_computed_no_further():
    client = Client(1, max_num_batched_tokens=16)
    key = client.submit(prompt(400), 4)
    client.engine.step()
    client.engine.step()
    client.engine.abort(key)
    client.run()
    assert client.ends[key] == "abort" and len(client.session.steps) == 2


@depths
def test_stop_id_ends_and_nothing_follows(depth):
    expected = answer(prompt(9), 40)
    stop = expected[11]
    client = Client(depth)
    params = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[stop], min_tokens=0)
    key = client.submit(prompt(9), params=params)
    client.run()
    assert client.ids[key] == expected[: expected.index(stop) + 1]
    assert client.ends[key] == "stop"


@depths
def test_a_failing_step_ends_its_own_requests_only(depth):  # one bad request does not stop the others
    client = Client(depth, max_num_batched_tokens=16)
    good = client.submit(prompt(16), 10)
    client.engine.step()
    client.session.fail_on = 96
    bad = client.submit([96] * 8, 10)
    with_bad = client.submit(prompt(40, 3), 3)
    client.run()
    assert client.ends[bad] == "error" and "fire" in str(client.errors[bad])
    assert set(client.ends) == {good, bad, with_bad}
    client.session.fail_on = None
    again = client.submit(prompt(16), 10)
    client.run()
    assert client.ids[again] == answer(prompt(16), 10)


def test_what_cannot_run_is_refused():
    client = Client(max_model_len=64)
    for bad in ([], [-1], [VOCAB], [1.0], ["a"], [True], [10**9]):
        with pytest.raises(PromptError):
            client.submit(bad)
    with pytest.raises(PromptTooLong, match="64"):
        client.submit(prompt(64))
    key = client.submit(prompt(63), 99)
    client.run()
    assert client.ends[key] == "length" and len(client.ids[key]) == 1
    assert client.engine.stats.received == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"priority": "high"}, {"priority": 0.5}, {"priority": True}, {"priority": None}, {"priority": 10**400},
        {"cache_salt": 5}, {"cache_salt": b"a"}, {"request_id": 5}, {"request_id": ["a"]},
    ],
    ids=lambda wrong: f"{wrong!r:.40}",
)  # fmt: skip
def test_wrong_priority_or_salt_is_refused(wrong):
    """They reach the scheduler, where an error would end everybody's requests."""
    client = Client(engine_options={"policy": "priority"})
    with pytest.raises(ParameterError, match=next(iter(wrong))):
        client.submit(prompt(40), **wrong)
    assert not client.engine.busy


@pytest.mark.parametrize("wrong", [{"max_tokens": 3}, 3, "greedy", [SamplingParams()], SamplingParams], ids=str)
def test_what_are_no_parameters(wrong):
    with pytest.raises(ParameterError, match="sampling_params"):
        Client().engine.make_request(prompt(4), wrong, print)


def test_a_salt_may_be_any_text():
    client = Client()
    client.submit(prompt(40), 2, cache_salt="\ud800")
    client.run()


def test_a_priority_that_nobody_reads_is_refused():
    client = Client()
    with pytest.raises(ParameterError, match="'fifo' does not read it.*scheduler_policy"):
        client.submit(prompt(4), priority=1)
    assert Client(engine_options={"policy": "priority"}).submit(prompt(4), priority=1)


@pytest.mark.parametrize("depth", [2, -1, None])
def test_only_one_step_may_run_ahead(depth):
    """Rows name ids of the step just before: with two ahead they would take another request's."""
    with pytest.raises(BackendUnavailable, match="0 or 1"):
        Client(depth)


def test_automatic_ids_collide_with_no_callers():
    client = Client()
    keys = [client.submit(prompt(4), request_id=f"r{i}") for i in range(3)] + [client.submit(prompt(4)) for _ in range(3)]
    assert len(set(keys)) == 6
    client.run()


def test_a_minimum_before_which_nothing_can_be_drawn_is_refused():
    client, everything = Client(), list(range(VOCAB))
    with pytest.raises(ParameterError, match="every token ends"):
        client.submit(prompt(4), params=SamplingParams(min_tokens=1, stop_token_ids=everything))
    client.submit(prompt(4), params=SamplingParams(min_tokens=1, stop_token_ids=everything[1:], temperature=0))
    client.submit(prompt(4), params=SamplingParams(stop_token_ids=everything))
    client.run()


def failing(*_):
    raise ValueError("a caller's own fault")


@depths
@pytest.mark.parametrize("policy", ["fifo", "priority"])
def test_an_observer_that_raises_ends_its_request_alone(depth, policy, caplog):
    client = Client(depth, engine_options={"policy": policy})
    good, bad = client.submit(prompt(20), 9), client.submit(prompt(20, 1), 9, observe=failing)
    client.run()
    assert client.ends == {bad: "error", good: "length"} and client.ids[bad] == []
    assert isinstance(client.errors[bad], ValueError) and "a caller's own fault" in caplog.text
    assert client.ids[good] == answer(prompt(20), 9)


@depths
@pytest.mark.parametrize("fails_at", [1, 4, 9])
def test_a_sink_that_raises_ends_its_request_alone(depth, fails_at, caplog):
    """At its first update, in the middle, at the last one; it still gets one last update, if it had none."""
    client, seen = Client(depth), []

    def sink(update) -> None:
        seen.append(update.finish_reason)
        if len(seen) == fails_at:
            failing()

    params = SamplingParams(temperature=0, max_tokens=9)
    client.engine.submit(client.engine.make_request(prompt(20, 1), params, sink))
    good = client.submit(prompt(20), 12)
    client.run()
    assert seen == [None] * min(fails_at, 8) + ["error" if fails_at < 9 else "length"]
    assert client.ids[good] == answer(prompt(20), 12) and "a caller's own fault" in caplog.text


def test_priority_order():
    client = Client(max_num_seqs=1, engine_options={"policy": "priority"})
    low = client.submit(prompt(4), 3, priority=5)
    high = client.submit(prompt(4, 1), 3, priority=-5)
    client.run()
    assert list(client.ends) == [high, low]


def test_fifo_order_is_arrival():
    client = Client(max_num_seqs=1)
    keys = [client.submit(prompt(4, k), 3) for k in range(4)]
    client.run()
    assert list(client.ends) == keys


def test_observer_sees_every_row_of_logits():
    client = Client(on_device=True)
    rows = []
    key = client.submit(prompt(20), 5, observe=lambda row: rows.append(int(row.argmax())))
    client.run()
    assert rows == client.ids[key] == answer(prompt(20), 5)


action = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 70), st.integers(0, 3), st.integers(1, 40)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("step"), st.integers(1, 6)),
)


@settings(max_examples=150, deadline=None)
@given(
    actions=st.lists(action, max_size=40),
    depth=st.integers(0, 1),
    block_size=st.sampled_from([16, 32, 128]),
    blocks=st.integers(8, 14),
    budget=st.sampled_from([1, 5, 16, 64]),
    seqs=st.integers(1, 8),
    caching=st.booleans(),
    policy=st.sampled_from(["fifo", "priority"]),
    on_device=st.booleans(),
)
def test_random_lives(actions, depth, block_size, blocks, budget, seqs, caching, policy, on_device):
    """Random arrivals, aborts and tiny pools: every answer is the model's own, every book balances after every action."""
    options = {"policy": policy, "prefix_caching": caching}
    client = Client(
        depth,
        on_device,
        options,
        num_blocks=blocks,
        block_size=block_size,
        max_num_seqs=seqs,
        max_num_batched_tokens=max(budget, 1),
    )
    asked: dict[str, tuple[list[int], int]] = {}
    for what, *args in actions:
        if what == "submit":
            length, start, n = args
            p = prompt(length, start)
            asked[client.submit(p, n, priority=start if policy == "priority" else 0)] = (p, n)
        elif what == "abort" and asked:
            client.engine.abort(list(asked)[args[0] % len(asked)])
        elif what == "step":
            for _ in range(args[0]):
                if client.engine.busy:
                    client.engine.step()
        client.engine.check()
    client.run()
    assert set(client.ends) == set(asked)
    for key, (p, n) in asked.items():
        full = answer(p, n)
        if client.ends[key] == "length":
            assert client.ids[key] == full
        else:
            assert client.ends[key] == "abort" and client.ids[key] == full[: len(client.ids[key])]
    assert client.engine.pool.available == blocks
