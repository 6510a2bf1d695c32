"""The costs of one client for the others: questions, long texts, ended requests, wrong messages; and users' shares."""

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq.auth
from fake_engine import FakeCodec, FakeEngine, expected_tokens
from raw_client import TIMEOUT_S, Completion, RawClient, raw_client
from served import Serve, eventually

import lowlat.ipc.server.peer
from lowlat.errors import RequestError
from lowlat.ipc import Server
from lowlat.ipc.client.request import make_request
from lowlat.ipc.limits import Limits
from lowlat.ipc.server import router
from lowlat.ipc.server.admission import Curve
from lowlat.ipc.server.generations.requests import Requests
from lowlat.ipc.server.generations.streams import Stream
from lowlat.ipc.wire import (
    Bye,
    Error,
    Health,
    Hello,
    Message,
    Pong,
    Sampling,
    Stats,
    StatsReply,
    Submit,
    encode,
    pack_tokens,
)

LONG = 100_000  # bytes; by FakeCodec as many tokens


class SlowCodec(FakeCodec):
    """Waits at each long text until it may go on, and notes whose it was by its first letter."""

    def __init__(self) -> None:
        super().__init__()
        self.order = ""
        self.turns = threading.Semaphore(0)

    def encode(self, text: str, **how: Any) -> list[int]:
        if len(text) == LONG:
            self.order += text[0]
            assert self.turns.acquire(timeout=TIMEOUT_S)
        return [1, 2, 3]


def hear_bye(client: RawClient) -> Bye:
    """Return the server's BYE to a client that it drops, after all other messages."""
    while not isinstance(message := client.receive(), Bye):
        pass
    return message


def test_figures_are_made_ten_times_a_second_however_many_ask(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve()
    made: list[float] = []
    figures = Requests.figures

    def counted(requests: Requests, now: float) -> dict[str, Any]:
        made.append(now)
        return figures(requests, now)

    monkeypatch.setattr(Requests, "figures", counted)
    clients = [served.client() for _ in range(4)]
    started = time.monotonic()
    for _ in range(40):
        for client in clients:
            client.say(Stats())
    replies = [client.hear(StatsReply) for client in clients for _ in range(40)]
    assert 1 <= len(made) <= 1 + (time.monotonic() - started) / 0.1
    assert replies[0].stats["num_clients"] == 4
    time.sleep(0.11)
    clients[0].stats()
    assert len(made) >= 2


def test_a_question_for_figures_costs_ten_others(serve: Serve) -> None:
    served = serve(max_messages_per_s=1000)
    modest, greedy = served.client(), served.client()
    for _ in range(50):
        modest.say(Stats())
    for _ in range(400):
        modest.say(Health(5))
    heard = Counter(type(modest.receive()) for _ in range(450))
    assert heard == {StatsReply: 50, Pong: 400}
    for _ in range(110):
        greedy.say(Stats())
    bye = hear_bye(greedy)
    assert (bye.reason, "1000 messages in a second, STATS counted as 10" in bye.message) == ("dropped", True)


def test_a_short_text_waits_for_no_long_one_and_long_ones_take_turns(serve: Serve) -> None:
    codec = SlowCodec()
    served = serve(FakeEngine(0.001, max_running=32), codec)
    many, one = served.client(), served.client()
    first = [many.submit_text(number, "m" * LONG, max_tokens=1) for number in range(12)]
    eventually(lambda: codec.order == "m")
    for number in range(3):
        one.finish(one.submit_text(number, "s", max_tokens=1))
    assert codec.order == "m"  # the first long one is under way still
    late = one.submit_text(10, "l" * LONG, max_tokens=1)
    one.pong()
    codec.turns.release(3)
    one.finish(late)
    assert codec.order.index("l") <= 2  # after the one that was under way, and one of the other's
    for number in range(12):
        many.cancel(number)
    many.finish(*first)
    assert many.pong().num_waiting == 0  # at once, although the text thread has one of them still
    codec.turns.release(9)
    one.finish(one.submit_text(11, "l" * LONG, max_tokens=1))
    assert len(codec.order) <= 5  # nobody wants the others' token ids


def test_a_codec_is_told_what_fits(serve: Serve) -> None:
    served = serve(FakeEngine(0.001, max_context=1000), FakeCodec())
    client = served.client()
    fits = client.submit_text(1, "x" * 900, max_tokens=100)
    too_long = client.submit_text(2, "x" * 901, max_tokens=100)
    fitted = client.completions[3] = Completion()
    client.say(Submit(3, 100, Sampling(max_tokens=100), text="x" * 990, fit_context=True))
    client.finish(fits, too_long, fitted)
    assert (len(fits.token_ids), len(fitted.token_ids)) == (100, 10)
    assert too_long.error is not None
    assert "901 bytes and max_tokens 100 exceed 1000" in too_long.error.message


def test_requests_that_ended_leave_nothing_to_their_deadline(serve: Serve) -> None:
    served = serve(FakeEngine(0.001, max_running=1), FakeCodec())
    client = served.client()
    hour = 3_600_000
    for number in range(0, 45, 3):
        running = client.submit(number, max_tokens=3, deadline_ms=hour)
        waiting = client.submit(number + 1, [1] * 3000, max_tokens=3, deadline_ms=hour)
        starving = client.submit(number + 2, [1] * 3000, credit=1, max_tokens=50, deadline_ms=hour)
        client.wait_tokens(running, 1)
        client.cancel(number + 1)
        client.wait_tokens(starving, 1)
        client.cancel(number + 2)
        client.finish(running, waiting, starving)

    def num_streams() -> int:
        gc.collect()
        return sum(type(one) is Stream for one in gc.get_objects())

    eventually(lambda: num_streams() <= 2)  # of 45: what was seen last


def test_a_request_that_cannot_be_is_refused_by_itself(serve: Serve) -> None:
    served = serve(FakeEngine(0.002), FakeCodec(), max_bad_messages=4)
    client = served.client()
    healthy = client.submit(0, max_tokens=60)
    wrong = [Message("user", tool_calls=[{"a": float("nan")}])]
    for number in range(1, 21):
        refused = client.completions[number] = Completion()
        client.say(Submit(number, 100, messages=wrong))
        client.finish(refused)
        assert refused.error is not None
        assert (refused.error.code, refused.error.field) == ("malformed", "$.messages[0].tool_calls")
    client.finish(healthy)
    assert healthy.token_ids == expected_tokens([1, 2, 3], 60)
    assert client.stats()["refusals"] == {"malformed": 20}


def test_wrong_messages_count_for_a_minute(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowlat.ipc.server.peer, "BAD_MESSAGES_WINDOW_S", 0.3)
    served = serve(max_bad_messages=4)
    client = served.client()
    for _ in range(2):
        for _ in range(3):
            client.say_raw(b"\xff")
            assert client.hear(Error).code == "malformed"
        time.sleep(0.35)
    assert client.pong().state == "serving"
    for _ in range(12):
        client.say_raw(b"\xff")
    assert "wrong messages in a minute (max_bad_messages)" in hear_bye(client).message


def test_a_salt_is_the_users_and_the_requests(serve: Serve) -> None:
    served = serve()
    client = served.client()
    client.finish(client.submit(1, max_tokens=1))
    salted = client.completions[2] = Completion()
    client.say_raw(encode(Submit(2, 10, Sampling(max_tokens=1), cache_salt="mine")), pack_tokens([1]))
    client.finish(salted)
    plain, own = served.engine.salts
    assert plain.startswith("uid ") and own == plain + "mine"
    named = client.completions[3] = Completion()
    client.say_raw(encode(Submit(3, 10, Sampling(max_tokens=1), session="agent")), pack_tokens([1]))
    client.finish(named)
    assert served.engine.sessions == ["", "", "agent"] and served.engine.salts[-1] == plain
    client.say(Submit(4, 10, text="a", cache_salt="x" * 257))
    assert client.hear(Error).field == "$.cache_salt"
    with pytest.raises(RequestError, match="cache_salt must be a string of at most 256 characters"):
        make_request("a", {}, cache_salt="x" * 257)
    with pytest.raises(RequestError, match="session must be a string of at most 128 characters"):
        make_request("a", {}, session="x" * 129)
    with pytest.raises(RequestError, match="allow_special must be true or false"):
        make_request("a", {}, allow_special=1)  # type: ignore[arg-type]


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[Callable[..., tuple[FakeEngine, Callable[[str], RawClient]]]]:
    """A server that lets in two keys, and clients of either."""
    with ExitStack() as stack:

        def start(engine: FakeEngine, **limits: Any) -> tuple[FakeEngine, Callable[[str], RawClient]]:
            clients, secrets = tmp_path / "clients", tmp_path / "secrets"
            clients.mkdir()
            secrets.mkdir()
            _, server_file = zmq.auth.create_certificates(secrets, "server")
            keys = {}
            for name in "ab":
                public_file, secret_file = zmq.auth.create_certificates(secrets, name)
                Path(public_file).rename(clients / f"{name}.key")
                keys[name] = zmq.auth.load_certificate(secret_file)
            server_key, _ = zmq.auth.load_certificate(server_file)
            curve = Curve(Path(server_file), clients)
            server = stack.enter_context(Server(engine, None, "tcp://127.0.0.1:*", Limits(**limits), curve=curve))

            def client(name: str, *, greet: bool = True) -> RawClient:
                public, secret = keys[name]
                options = {"curve_publickey": public, "curve_secretkey": secret, "curve_serverkey": server_key}
                return stack.enter_context(raw_client(server.endpoint, greet=greet, **options))

            return engine, client

        yield start


def test_turns_and_slots_are_a_keys_over_all_its_connections(keyed: Any) -> None:
    engine, client = keyed(FakeEngine(0.005, max_running=2), max_queue=40)
    many = [client("a") for _ in range(5)]
    first = [(one, one.submit(number, [7], max_tokens=4)) for one in many for number in range(4)]
    for one in many:
        one.pong()
    other = client("b")
    late = [other.submit(number, [8], max_tokens=4) for number in range(4)]
    other.finish(*late)
    begun = [salt == engine.salts[0] for salt in engine.salts]
    last = len(begun) - begun[::-1].index(False)  # what begins after its last may begin while this thread looks
    assert begun[begun.index(False) : last].count(True) <= 5  # one of theirs next to each of its own, not five
    assert engine.max_seen_running == 2
    for one in many:
        one.finish(*[done for owner, done in first if owner is one])
    assert {salt.split()[0] for salt in engine.salts} == {"key"} and len(set(engine.salts)) == 2


def test_one_key_takes_neither_all_connections_nor_all_places(keyed: Any) -> None:
    begun = threading.Event()
    engine, client = keyed(FakeEngine(max_running=1, on_step=begun.wait), max_queue=7, max_clients=8)
    greedy = [client("a") for _ in range(6)]
    one_more = client("a", greet=False)
    one_more.say(Hello())
    full = one_more.hear(Error)
    assert (full.code, full.message) == ("busy", "6 clients are connected (max_clients 8), 6 of them this user's")
    taken = [greedy[0].submit(0, [7], max_tokens=8)]
    eventually(lambda: greedy[0].pong().num_running == 1)
    taken += [greedy[0].submit(number, [7], max_tokens=2) for number in range(1, 8)]
    other = client("b")
    own = other.submit(0, [8], max_tokens=2)
    other.pong()
    begun.set()
    other.finish(own)
    assert own.end is not None
    greedy[0].finish(*taken)
    refused = [done.error for done in taken if done.error is not None]
    assert [error.code for error in refused] == ["busy"] * 2
    assert "this user has 6 requests under way, and 2 places are left for others" in refused[0].message
    eventually(lambda: not engine.busy)


def test_who_has_a_key_and_never_says_hello_is_ended(keyed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, client = keyed(FakeEngine(), heartbeat_interval_s=0.05)
    good = client("b")
    monkeypatch.setattr(router, "HELLO_TIMEOUT_S", 0.3)
    silent = client("a", greet=False)
    monitor = silent.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    events = [int.from_bytes(monitor.recv_multipart()[0][:2], "little") for _ in range(2) if monitor.poll(5000)]
    silent.socket.disable_monitor()
    monitor.close()
    assert zmq.EVENT_DISCONNECTED in events
    assert good.stats()["num_clients"] == 1
