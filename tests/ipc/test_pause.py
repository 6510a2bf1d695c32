"""Requests that are paused, resumed and outranked through a server: none loses a token, and their slots are others'."""

from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import FakeEngine, expected_tokens
from served import Serve, eventually
from served_model import load_small

from lowlat.errors import CapacityError, RequestError
from lowlat.ipc import Client
from lowlat.ipc.server.server import Server
from lowlat.ipc.wire import Error, Pause, Resume
from lowlat.serving.engine import RuntimeEngine


def test_a_paused_request_leaves_its_place_to_another(serve: Serve) -> None:
    served = serve(FakeEngine(0.002, max_running=1))
    client = served.client()
    first = client.submit(0, [5], max_tokens=300)
    client.say(Pause(0))
    second = client.submit(1, [6], max_tokens=5)
    client.finish(second)
    assert first.end is None and second.token_ids == expected_tokens([6], 5)
    eventually(lambda: len(served.engine.paused) == 1)
    client.say(Pause(0))  # it is paused already
    client.say(Resume(0))
    client.finish(first)
    assert first.token_ids == expected_tokens([5], 300)
    client.say(Resume(0))  # it has ended
    client.say(Resume(7))
    assert client.hear(Error).code == "unexpected"
    assert [answer.paused for answer in client.paused] == [True, True, False, False]


def test_a_pause_that_is_refused_is_answered_by_name_and_the_request_runs_on(serve: Serve) -> None:
    engine = FakeEngine(0.002, max_running=2)
    engine.max_paused = 1
    served = serve(engine)
    with Client(served.server.endpoint) as client:
        held, other = (client.generate([number], max_tokens=100) for number in (5, 6))
        assert held.pause() and held.pause()
        with pytest.raises(CapacityError, match=r"request 1 runs on: .*\(pause_gib\)"):
            other.pause()
        assert [token for chunk in other for token in chunk.token_ids] == list(expected_tokens([6], 100))
        assert not other.pause()  # it has ended
        opened = client.open_prompt(max_tokens=5)
        opened.append([7, 8])
        with pytest.raises(RequestError, match="still being written"):
            opened.finish(speculative=True).pause()
        opened.finish()
        held.resume()
        assert [token for chunk in held for token in chunk.token_ids] == list(expected_tokens([5], 100))
    assert not served.engine.paused


def test_one_that_waits_may_be_paused_and_cancelled(serve: Serve) -> None:
    served = serve(FakeEngine(0.002, max_running=1))
    client = served.client()
    runs, waits, other = (client.submit(number, [number + 1], max_tokens=40) for number in range(3))
    client.say(Pause(1))
    client.finish(runs, other)
    assert waits.end is None
    client.cancel(1)
    client.finish(waits)
    assert waits.end is not None and waits.end.finish_reason == "cancelled"
    last = client.submit(4, [9], max_tokens=3)
    client.finish(last)


def test_the_highest_priority_is_handed_over_first_and_beyond_the_slots(serve: Serve) -> None:
    served = serve(FakeEngine(0.002, max_running=1))
    client = served.client()
    numbers = [(0, 0), (1, 0), (2, 0), (3, 5), (4, 5)]
    done = [client.submit(number, [number + 1], max_tokens=20, priority=priority) for number, priority in numbers]
    client.finish(*done)
    assert [one.token_ids for one in done] == [expected_tokens([number + 1], 20) for number, _ in numbers]
    handed = [int(name.rpartition("-")[2]) - 1 for name in served.engine.order]
    assert handed == [0, 3, 4, 1, 2]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = f"ipc://{tmp_path_factory.mktemp('run')}/s.sock"
    with Server(lambda: RuntimeEngine(load_small(max_batch=1, pause_deadline_s=1.0)), None, path):
        yield path


def test_the_model_goes_on_with_the_same_tokens(endpoint: str) -> None:
    options: dict[str, Any] = {"max_tokens": 30, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    with Client(endpoint) as client:
        expected = [token for chunk in client.generate([5, 6, 7], **options) for token in chunk.token_ids]
        paused = client.generate([5, 6, 7], **options)
        tokens = list(next(paused).token_ids)
        assert paused.pause()
        assert len([*client.generate([9], max_tokens=5)])
        paused.resume()
        tokens += [token for chunk in paused for token in chunk.token_ids]
        assert tokens == expected
        low = client.generate([5, 6, 7], **options)
        tokens = list(next(low).token_ids)
        assert len([*client.generate([9], max_tokens=5, priority=3)])
        assert tokens + [token for chunk in low for token in chunk.token_ids] == expected
        late = client.generate([5, 6, 7], **options)
        next(late)
        assert late.pause()
        with pytest.raises(Exception, match="longer than its deadline"):
            list(late)
