"""Requests of one server: what comes, in what order, and how each of them ends."""

import json
import statistics
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
from fake_engine import FakeCodec, FakeEngine, expected_text, expected_tokens
from raw_client import TIMEOUT_S, Completion
from served import Serve, eventually

from lowlat.errors import RequestError
from lowlat.ipc.messages import Parse
from lowlat.ipc.wire import Error, Message, Sampling, StatsReply, Submit, Welcome, encode, pack_tokens
from lowlat.ipc.wire import Stats as AskStats


def test_tokens_come_whole_and_in_order(serve: Serve) -> None:
    served = serve(FakeEngine(0.001, tokens_per_step=3, text=True, tokenizer="abc"), FakeCodec(), name="lowlat 9")
    client = served.client()
    assert isinstance(client.welcome, Welcome)
    assert (client.welcome.server, client.welcome.model, client.welcome.tokenizer) == ("lowlat 9", "fake", "abc")
    assert client.welcome.epoch == served.server.epoch
    done = client.submit(7, [4, 5], max_tokens=100, seed=3, logprobs=0)
    client.finish(done)
    assert done.token_ids == expected_tokens([4, 5], 100, 3)
    assert done.text == expected_text(done.token_ids)
    assert [one.token_id for chunk in done.chunks for one in chunk.logprobs or ()] == list(done.token_ids)
    assert done.end is not None
    assert (done.end.finish_reason, done.end.code) == ("length", None)
    assert done.end.metrics["completion_tokens"] == 100
    assert done.end.metrics["server"]["time_to_first_token_s"] > 0


def test_a_stop_token_ends_a_request_and_is_named(serve: Serve) -> None:
    client = serve().client()
    tokens = expected_tokens([1, 2, 3], 5)
    done = client.submit(1, max_tokens=50, stop_token_ids=(tokens[4],))
    client.finish(done)
    assert done.end is not None
    assert (done.token_ids, done.end.finish_reason, done.end.stop_reason) == (tokens, "stop", tokens[4])


def test_text_and_chats_are_encoded_by_the_codec(serve: Serve) -> None:
    client = serve(codec=FakeCodec()).client()
    plain = client.submit_text(1, "hello", max_tokens=3)
    chat = client.completions[2] = Completion()
    client.say(Submit(2, 100, Sampling(max_tokens=3), messages=[Message("user", "hi")], template_options={"a": 1}))
    empty = client.submit_text(3, "")
    failing = client.completions[4] = Completion()
    client.say(Submit(4, 100, messages=[Message("user", "hi")], template_options={"fail": True}))
    client.finish(plain, chat, empty, failing)
    assert plain.token_ids == expected_tokens(list(b"hello"), 3)
    assert chat.token_ids == expected_tokens(list(b"<user>hi"), 3)
    for refused, words in ((empty, "empty"), (failing, "'fail'")):
        assert refused.error is not None
        assert refused.error.code == "invalid"
        assert words in refused.error.message


def test_text_without_a_codec_and_a_codec_that_breaks(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    client = serve(codec=FakeCodec(fails=ValueError("the secret prompt"))).client()
    broken = client.submit_text(1, "the secret prompt")
    fine = client.submit(2, max_tokens=2)
    client.finish(broken, fine)
    assert broken.error is not None
    assert broken.error.code == "internal"
    assert "secret" not in broken.error.message
    assert "secret" not in caplog.text
    assert "ValueError at" in caplog.text


def test_a_chats_tools_go_with_calls_that_are_parsed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve(codec=FakeCodec())
    client = served.client()
    seen: list[Sampling] = []
    monkeypatch.setattr(served.engine, "validate", lambda prompt, sampling: seen.append(sampling))
    tools = [{"type": "function", "function": {"name": "f"}}]
    cases: list[tuple[Parse, str | None]] = [("tools", None), ("tools", "[]"), ("reasoning", None)]
    for number, (parse, own) in enumerate(cases, 1):
        done = client.completions[number] = Completion()
        sampling = Sampling(max_tokens=1, parse=parse, tools=own)
        client.say(Submit(number, 10, sampling, messages=[Message("user", "hi")], template_options={"tools": tools}))
        client.finish(done)
    assert [json.loads(one.tools) if one.tools else None for one in seen] == [tools, [], None]


def test_ids_alone_are_served_without_a_codec(serve: Serve) -> None:
    client = serve().client()
    refused = client.submit_text(1, "hello")
    client.finish(refused)
    assert refused.error is not None
    assert "token ids" in refused.error.message


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ([1] * 600 + [5000], {}, "5000"),  # long enough for the text thread
        ([1] * 5000, {"max_tokens": 5}, "prompt of 5000 tokens and max_tokens 5 exceed 4096 (max_context)"),
    ],
)
def test_what_cannot_be_served_is_refused_before_it_queues(
    serve: Serve, prompt: list[int], sampling: dict[str, int], words: str
) -> None:
    served = serve()
    client = served.client()
    refused = client.submit(1, prompt, **sampling)
    client.finish(refused)
    assert refused.error is not None
    assert (refused.error.code, refused.error.number) == ("invalid", 1)
    assert words in refused.error.message
    assert served.engine.order == []


@pytest.mark.parametrize(("fault", "code"), [("refuse", "invalid"), ("full", "busy")])
def test_a_refusal_of_the_engine_itself_is_an_error_of_that_request(serve: Serve, fault: str, code: str) -> None:
    client = serve(FakeEngine(0.001, faults={9: fault}, max_running=1)).client()
    refused, fine = client.submit(1, [9]), client.submit(2, max_tokens=2)
    client.finish(refused, fine)
    assert refused.error is not None
    assert (refused.error.code, refused.error.retry_after_ms is not None) == (code, code == "busy")
    assert fine.token_ids == expected_tokens([1, 2, 3], 2)


def test_not_finite_fails_that_request_alone(serve: Serve) -> None:
    client = serve(FakeEngine(0.001, faults={9: "nan"})).client()
    bad, good = client.submit(1, [9], max_tokens=20), client.submit(2, [8], max_tokens=20)
    client.finish(bad, good)
    assert bad.end is not None
    assert (bad.end.finish_reason, bad.end.code) == ("error", "not_finite")
    assert "position 2" in str(bad.end.message)
    assert bad.token_ids == expected_tokens([9], 20)[:2]
    assert good.token_ids == expected_tokens([8], 20)


def test_no_more_tokens_come_than_were_granted(serve: Serve, transport: dict[str, str]) -> None:
    served = serve(FakeEngine(0.001, tokens_per_step=4), **transport)
    client = served.client()
    done = client.submit(1, credit=10, max_tokens=40)
    client.wait_tokens(done, 10)
    assert client.is_quiet(0.1)
    assert 10 <= len(done.token_ids) < 10 + 4  # overdrawn by less than a step
    eventually(lambda: not served.engine.busy)
    client.grant(1, 5)
    client.wait_tokens(done, 15)
    assert client.is_quiet(0.05)
    assert len(done.token_ids) < 15 + 4
    num_chunks = len(done.chunks)
    client.grant(1, 1000)
    client.finish(done)
    assert len(done.chunks) == num_chunks + 1  # what waited comes as one message
    assert done.token_ids == expected_tokens([1, 2, 3], 40)


def test_without_credit_for_too_long_the_stream_ends(serve: Serve) -> None:
    served = serve(FakeEngine(0.002), slow_consumer_s=0.15)
    slow, quick = served.client(), served.client()
    starved = slow.submit(1, credit=3, max_tokens=1000)
    other = quick.submit(1, [8], max_tokens=100)
    quick.finish(other)
    slow.finish(starved)
    assert starved.end is not None
    assert (starved.end.finish_reason, starved.end.code) == ("error", "slow_consumer")
    assert "slow_consumer_s" in str(starved.end.message)
    assert starved.token_ids == expected_tokens([1, 2, 3], 3)
    assert other.token_ids == expected_tokens([8], 100)
    eventually(lambda: not served.engine.busy)  # its slot is free
    slow.grant(1, 5)  # crosses the end
    assert slow.is_quiet()


def test_grants_in_time_keep_a_starving_stream_alive(serve: Serve) -> None:
    client = serve(FakeEngine(0.0), slow_consumer_s=0.4).client()
    done = client.submit(1, credit=1, max_tokens=4)
    for count in range(1, 4):
        client.wait_tokens(done, count)
        time.sleep(0.15)
        client.grant(1, 1)
    client.finish(done)
    assert done.token_ids == expected_tokens([1, 2, 3], 4)


def test_credit_beyond_its_limit_is_refused(serve: Serve) -> None:
    client = serve(max_credit=100).client()
    refused = client.submit(1, credit=101)
    client.finish(refused)
    assert refused.error is not None
    assert (refused.error.code, refused.error.field) == ("invalid", "$.credit")
    done = client.submit(2, credit=100, max_tokens=1000)
    client.grant(2, 100)
    error = client.hear(Error)
    assert (error.code, error.number) == ("invalid", None)
    assert "max_credit" in error.message
    client.cancel(2)
    client.finish(done)


def test_cancel_ends_a_running_request_within_two_steps(serve: Serve, transport: dict[str, str]) -> None:
    steps = threading.Semaphore(4)  # that the engine may take
    served = serve(FakeEngine(on_step=lambda: steps.acquire(timeout=TIMEOUT_S)), **transport)
    client = served.client()
    done, other = client.submit(1, max_tokens=500), client.submit(2, [8], max_tokens=30)
    client.wait_tokens(done, 3)
    client.cancel(1)
    client.cancel(1)  # twice is once
    client.pong()
    steps.release(2)  # the one that ran, and another
    client.finish(done)
    assert done.end is not None
    assert (done.end.finish_reason, done.end.code) == ("cancelled", None)
    assert done.token_ids == expected_tokens([1, 2, 3], 500)[: len(done.token_ids)]
    client.cancel(1)  # after its end
    steps.release(30)
    client.finish(other)
    assert other.token_ids == expected_tokens([8], 30)
    assert client.is_quiet()


def test_cancel_ends_waiting_and_preparing_requests_at_once(serve: Serve) -> None:
    go_on = threading.Event()

    class WaitingCodec(FakeCodec):
        def encode(self, text: str, **how: Any) -> list[int]:
            assert go_on.wait(TIMEOUT_S)
            return super().encode(text, **how)

    served = serve(FakeEngine(max_running=1, on_step=lambda: go_on.wait(TIMEOUT_S)), WaitingCodec())
    client = served.client()
    running, waiting = client.submit(1, max_tokens=4), client.submit(2)
    preparing, behind = client.submit_text(3, "a"), client.submit_text(4, "b", max_tokens=1)
    client.cancel(2)
    client.cancel(3)
    client.finish(waiting, preparing)
    for one in (waiting, preparing):
        assert one.end is not None
        assert (one.end.finish_reason, one.end.num_tokens) == ("cancelled", 0)
    go_on.set()
    client.finish(running, behind)
    assert len(served.engine.order) == 2


def test_a_request_that_waits_for_credit_can_be_cancelled(serve: Serve) -> None:
    served = serve(FakeEngine(0.0))
    client = served.client()
    done = client.submit(1, credit=2, max_tokens=10)
    client.wait_tokens(done, 2)
    eventually(lambda: not served.engine.busy)
    client.cancel(1)
    client.finish(done)
    assert done.end is not None
    assert (done.end.finish_reason, done.end.num_tokens) == ("cancelled", 2)


def test_nobody_cancels_another_connections_request(serve: Serve, transport: dict[str, str]) -> None:
    served = serve(**transport)
    first, second = served.client(), served.client()
    done = first.submit(5, max_tokens=50)
    own = second.submit(5, [8], max_tokens=10)
    second.cancel(5)
    second.finish(own)
    first.finish(done)
    assert done.token_ids == expected_tokens([1, 2, 3], 50)
    third = served.client()
    third.cancel(5)
    assert third.hear(Error).code == "unexpected"


def test_a_deadline_counts_from_arrival(serve: Serve) -> None:
    served = serve(FakeEngine(0.01, max_running=1))
    client = served.client()
    late = client.submit(1, max_tokens=1000, deadline_ms=100)
    waiting = client.submit(2, [8], max_tokens=1000, deadline_ms=50)
    in_time = client.submit(3, [7], max_tokens=2, deadline_ms=5000)
    client.finish(late, waiting, in_time)
    for one in (late, waiting):
        assert one.end is not None
        assert (one.end.finish_reason, one.end.code) == ("cancelled", "deadline")
    assert 0 < len(late.token_ids) < 20
    assert waiting.token_ids == ()
    assert in_time.end is not None
    assert in_time.end.finish_reason == "length"


def test_no_queue_at_all_still_serves_what_has_a_slot(serve: Serve) -> None:
    client = serve(FakeEngine(0.05, max_running=2), max_queue=0).client()
    taken = [client.submit(number, max_tokens=2) for number in range(3)]
    client.finish(*taken)
    assert [one.error is not None for one in taken] == [False, False, True]


def test_a_clients_own_share_is_bounded(serve: Serve) -> None:
    served = serve(FakeEngine(0.01), max_requests_per_client=2)
    greedy, modest = served.client(), served.client()
    taken = [greedy.submit(number, max_tokens=5) for number in range(3)]
    other = modest.submit(0, max_tokens=5)
    greedy.finish(*taken)
    modest.finish(other)
    assert taken[2].error is not None
    assert taken[2].error.code == "busy"
    assert "max_requests_per_client" in taken[2].error.message
    assert other.end is not None


def test_no_more_run_at_once_than_the_engine_has_slots(serve: Serve) -> None:
    served = serve(FakeEngine(0.001, max_running=3))
    client = served.client()
    done = [client.submit(number, [number + 1], max_tokens=7) for number in range(20)]
    client.finish(*done)
    assert served.engine.max_seen_running == 3
    assert [one.token_ids for one in done] == [expected_tokens([number + 1], 7) for number in range(20)]


def test_the_engine_is_made_and_driven_in_one_thread(serve: Serve) -> None:
    made: list[int] = []
    engine = FakeEngine(0.001)

    def make() -> FakeEngine:
        made.append(threading.get_ident())
        return engine

    served = serve(make)
    client = served.client()
    done = client.submit(1, max_tokens=5)
    client.cancel(1)
    client.finish(done)
    served.server.close()
    assert engine.threads == set(made)
    assert threading.get_ident() not in made
    assert engine.closed


def test_many_streams_of_many_clients_lose_nothing(serve: Serve, transport: dict[str, str]) -> None:
    served = serve(FakeEngine(0.0, tokens_per_step=2, max_running=8), **transport)
    clients = [served.client() for _ in range(4)]
    done = {
        (place, number): client.submit(number, [place + 1, number + 1], max_tokens=200, credit=1000)
        for place, client in enumerate(clients)
        for number in range(16)
    }
    for place, client in enumerate(clients):
        client.finish(*[one for (owner, _), one in done.items() if owner == place], timeout_s=60)
    for (place, number), one in done.items():
        assert one.token_ids == expected_tokens([place + 1, number + 1], 200)


def test_numbers_grow(serve: Serve) -> None:
    client = serve(FakeEngine(0.01)).client()
    done = client.submit(5, max_tokens=5)
    for number in (5, 4):
        client.say_raw(encode(Submit(number, 10)), pack_tokens([1]))
        error = client.hear(Error)
        assert (error.code, error.number, error.field) == ("unexpected", None, "$.number")
    client.finish(done)
    assert done.token_ids == expected_tokens([1, 2, 3], 5)


def test_figures(serve: Serve) -> None:
    times: list[float] = []
    served = serve(FakeEngine(0.005, tokens_per_step=2, on_step=lambda: times.append(time.monotonic())))
    client = served.client()
    done = client.submit(1, max_tokens=60)
    client.wait_tokens(done, 10)
    pong = client.pong()
    assert (pong.nonce, pong.state, pong.num_running, pong.num_waiting) == (77, "serving", 1, 0)
    client.finish(done)
    time.sleep(0.1)  # the engine's own follow when it rests
    client.say(AskStats())
    stats = client.hear(StatsReply).stats
    assert stats["num_tokens"] == 60
    assert stats["ends"] == {"length": 1}
    assert stats["num_clients"] == 1
    assert stats["step_ms"]["count"] == 30
    assert stats["engine"]["num_steps"] == 30
    assert stats["inter_token_ms"]["count"] == 58
    token_ms = statistics.median(1e3 * (end - begin) / 2 for begin, end in pairwise(times))
    assert 0.8 * token_ms < stats["inter_token_ms"]["p50"] < 1.6 * token_ms
    assert stats["time_to_first_token_ms"]["p50"] > 5.0
    assert client.pong().last_step_age_s == 0.0


def test_a_wrong_prompt_is_not_repeated_in_the_log(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()

    def validate(prompt: object, sampling: object) -> None:
        raise RequestError("prompt token 0 is 424242")

    engine.validate = validate  # type: ignore[method-assign]
    client = serve(engine).client()
    refused = client.submit(1, [1])
    client.finish(refused)
    assert "424242" not in caplog.text
