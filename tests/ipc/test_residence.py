"""A server whose engine sleeps: requests wait and wake it, whoever keeps the memory is asked, refusals are told."""

import threading
from collections.abc import Iterable, Sequence

import pytest
from fake_engine import FakeEngine, expected_tokens
from served import Serve, eventually

from lowlat.errors import Busy, CapacityError
from lowlat.ipc import Chunk, Client
from lowlat.ipc.server.generations.residence import State


def read(chunks: Iterable[Chunk]) -> tuple[int, ...]:
    """The tokens of chunks."""
    return tuple(token for chunk in chunks for token in chunk.token_ids)


def tokens_of(client: Client, prompt: Sequence[int], count: int = 5) -> tuple[int, ...]:
    """An answer's tokens."""
    return read(client.generate(list(prompt), max_tokens=count, seed=1))


def test_a_request_wakes_the_engine(serve: Serve) -> None:
    served = serve()
    with Client(served.server.endpoint) as client:
        assert client.sleep() == client.sleep() == "asleep"
        assert served.engine.asleep and client.health().state == client.stats()["state"] == "asleep"
        assert tokens_of(client, [3]) == expected_tokens([3], 5, 1)
        assert client.health().state == "serving" and served.engine.num_wakes == 1
        assert client.sleep() == "asleep" and client.wake() == client.wake() == "serving"
        assert not served.engine.asleep


def test_what_runs_goes_on_before_the_sleep_and_what_comes_waits_for_the_wake(serve: Serve) -> None:
    served = serve(FakeEngine(0.01))
    with Client(served.server.endpoint) as client, Client(served.server.endpoint) as admin:
        running = client.generate([5], max_tokens=30, seed=1)
        first = read([next(iter(running))])
        states: list[str] = []
        sleeping = threading.Thread(target=lambda: states.append(admin.sleep()))
        sleeping.start()
        eventually(lambda: client.health().state == "falling asleep")
        later = client.generate([6], max_tokens=4, seed=1)
        assert first + read(running) == expected_tokens([5], 30, 1)
        assert read(later) == expected_tokens([6], 4, 1)
        sleeping.join(5)
        assert states == ["asleep"] and served.engine.num_wakes == 1


def test_refusals_are_told_and_the_next_one_tries_again(serve: Serve) -> None:
    served = serve(FakeEngine(0.001, wake_problems=["the memory is another's"] * 2))
    with Client(served.server.endpoint) as client:
        client.sleep()
        with pytest.raises(CapacityError, match="the memory is another's"):
            client.wake()
        with pytest.raises(Busy, match="the memory is another's") as caught:
            tokens_of(client, [3])
        assert caught.value.retry_after_s is not None and caught.value.retry_after_s >= 2.0
        assert tokens_of(client, [3]) == expected_tokens([3], 5, 1)
        served.engine.sleep_problem = "no host memory"
        with pytest.raises(CapacityError, match="no host memory"):
            client.sleep()
        assert tokens_of(client, [4]) == expected_tokens([4], 5, 1)


def test_an_engine_that_cannot_sleep_says_so(serve: Serve) -> None:
    engine = FakeEngine(0.001)
    object.__setattr__(engine.info, "can_sleep", False)
    with Client(serve(engine).server.endpoint) as client:
        with pytest.raises(CapacityError, match="can_sleep"):
            client.sleep()
        assert tokens_of(client, [3]) == expected_tokens([3], 5, 1)


class Keeper:
    """A keeper that notes what it is told."""

    def __init__(self) -> None:
        self.num_wanted = 0
        self.seen: list[tuple[State, bool, str]] = []

    def wanted(self) -> None:
        """See lowlat.ipc.server.generations.residence.Keeper."""
        self.num_wanted += 1

    def told(self, state: State, *, idle: bool, problem: str) -> None:
        """See lowlat.ipc.server.generations.residence.Keeper."""
        self.seen.append((state, idle, problem))


def test_a_keeper_says_when(serve: Serve) -> None:
    keeper = Keeper()
    served = serve(FakeEngine(0.001), max_wake_s=0.2, keeper=keeper)
    with Client(served.server.endpoint) as client:
        served.server.reside(asleep=True)
        eventually(lambda: client.health().state == "asleep")
        with pytest.raises(Busy, match=r"could not be woken within 0\.2 s \(max_wake_s\)"):
            tokens_of(client, [3])
        assert keeper.num_wanted == 1 and served.engine.asleep
        waiting = client.generate([3], max_tokens=5, seed=1)
        eventually(lambda: keeper.num_wanted == 2)
        served.server.reside(asleep=False)
        assert read(waiting) == expected_tokens([3], 5, 1)
        eventually(lambda: keeper.seen[-1] == (State.AWAKE, True, ""))
        assert (State.ASLEEP, True, "") in keeper.seen and (State.ASLEEP, False, "") in keeper.seen
        served.engine.wake_problems = ["another holds it"]
        served.server.reside(asleep=True)
        eventually(lambda: client.health().state == "asleep")
        served.server.reside(asleep=False)
        eventually(lambda: (State.ASLEEP, True, "another holds it") in keeper.seen)
        with pytest.raises(CapacityError, match="max_wake_s"):
            client.wake()
