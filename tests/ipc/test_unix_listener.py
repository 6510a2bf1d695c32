"""The server's end of ipc://: peers that say nothing, trickle, flood, are deaf, or go, and what it costs the others."""

import os
import threading
import time

import pytest
import zmq
from bare_peer import BarePeer, message_bytes
from fake_engine import FakeEngine, expected_tokens
from listening import Listen
from raw_client import RawClient, zmtp_bytes
from served import Serve, eventually

from lowlat.ipc.server.transport import rate, unix_listener
from lowlat.ipc.server.transport.unix_listener import MAX_BURST
from lowlat.ipc.wire import Health, Hello, Pong, Sampling, Submit, Welcome, encode, pack_tokens
from lowlat.ipc.zmtp import encode_message, encode_ping

LARGE = 1 << 20  # of several times what the kernel takes


def messages_of(peer: BarePeer) -> list[list[bytes]]:
    return [item for item in peer.heard if isinstance(item, list)]


def test_a_message_may_be_cut_anywhere(listen: Listen) -> None:
    listening = listen()
    message = [b"one", b"two" * 30]
    said = zmtp_bytes([message]) + encode_ping(b"x") + encode_message([b"last"])
    for cut in range(len(said)):
        with BarePeer(listening.endpoint, said[:cut]) as peer:
            listening.turn(3)
            peer.say_bytes(said[cut:])
            listening.turn(5)
            assert listening.messages == [message, [b"last"]]
            peer.hear_command(b"PONG")
        listening.turn(2)
        assert listening.count("ended") == 1
        listening.told.clear()


def test_one_byte_at_a_time(listen: Listen) -> None:
    listening = listen()
    said = zmtp_bytes([[b"one", b"two"], [b""]])
    with BarePeer(listening.endpoint, b"") as peer:
        for place in range(len(said)):
            peer.say_bytes(said[place : place + 1])
            listening.turn()
    listening.turn(2)
    assert listening.messages == [[b"one", b"two"], [b""]]
    assert listening.told[-1][0] == "ended"


def test_many_messages_at_once_come_in_order(serve: Serve) -> None:
    served = serve()
    said = zmtp_bytes([[encode(Hello())], *([encode(Health(number))] for number in range(500))])
    with BarePeer(served.server.endpoint, said) as peer:
        peer.hear(Welcome)
        assert [peer.hear(Pong).nonce for _ in range(500)] == list(range(500))


def test_who_asks_much_delays_who_asks_little_by_a_turn(listen: Listen) -> None:
    listening = listen()
    many = [encode(Health(number)) for number in range(5000)]
    with BarePeer(listening.endpoint) as flood, BarePeer(listening.endpoint) as modest:
        listening.turn(3)
        flood.say_bytes(b"".join(message_bytes([frame]) for frame in many))
        listening.turn()
        assert len(listening.messages) == MAX_BURST
        for _ in range(3):
            listening.told.clear()
            modest.say_bytes(message_bytes([b"little"]))
            listening.turn(2)
            assert [b"little"] in listening.messages
            assert len(listening.messages) <= 1 + 2 * MAX_BURST
        listening.turn_until(lambda: listening.messages[-1] == [many[-1]])
    listening.turn(3)
    assert listening.count("ended") == 2


def test_who_has_said_much_at_once_rests_and_wakes_nobody(listen: Listen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_listener, "REST_S", 0.2)
    listening = listen()
    with BarePeer(listening.endpoint) as flood, BarePeer(listening.endpoint) as modest:
        listening.turn(3)
        flood.say_bytes(b"".join(message_bytes([b"%d" % number]) for number in range(MAX_BURST + 3)))
        listening.turn()
        assert len(listening.messages) == MAX_BURST
        flood.close()  # an end is no reason to wake either, nor to forget what was said before it
        begin = time.monotonic()
        listening.listener.wait(50)
        assert time.monotonic() - begin > 0.045
        modest.say_bytes(message_bytes([b"modest"]))
        listening.turn(2)
        assert listening.messages[-1] == [b"modest"]
        listening.turn_until(lambda: listening.count("ended") == 1)
    assert [int(frames[0]) for frames in listening.messages if frames != [b"modest"]] == list(range(MAX_BURST + 3))


def test_a_connection_may_be_ended_while_it_rests(listen: Listen) -> None:
    listening = listen()
    with BarePeer(listening.endpoint) as flood:
        listening.turn(3)
        flood.say_bytes(message_bytes([b"x"]) * (MAX_BURST + 3))
        listening.turn()
        connection = listening.connection()
        connection.mute()
        connection.end()
        listening.turn_until(lambda: listening.count("ended") == 1)
        assert flood.ends()
    assert len(listening.messages) == MAX_BURST


def test_a_message_at_most_follows_when_there_is_enough(listen: Listen) -> None:
    listening = listen()
    with BarePeer(listening.endpoint, zmtp_bytes([[b"%d" % number] for number in range(10)])):
        for _ in range(30):
            before = len(listening.messages)
            listening.listener.wait(0)
            listening.listener.receive(lambda: True)
            assert len(listening.messages) <= before + 1
    assert listening.messages == [[b"%d" % number] for number in range(10)]


def test_a_flood_of_pings_ends_its_connection_alone(serve: Serve) -> None:
    served = serve(max_messages_per_s=100)
    good = served.client()
    running = good.submit(1, max_tokens=100)
    with BarePeer(served.server.endpoint, zmtp_bytes([[encode(Hello())]])) as flood:
        flood.hear(Welcome)
        flood.say_bytes(encode_ping() * 5000)
        assert flood.ends()
    good.finish(running)
    assert running.token_ids == expected_tokens([1, 2, 3], 100)
    assert good.stats()["num_clients"] == 1


def test_a_message_that_never_ends_delays_nobody_and_ends_its_connection(listen: Listen) -> None:
    listening = listen(max_messages_per_s=1000)
    with BarePeer(listening.endpoint) as endless, BarePeer(listening.endpoint) as good:
        endless.say_bytes(b"\1\0" * 5000)
        listening.turn(3)
        good.say_bytes(message_bytes([b"good"]))
        listening.turn(2)
        assert listening.messages == [[b"good"]]
        assert listening.count("ended") == 0
        listening.turn_until(lambda: listening.count("ended") == 1)
        assert endless.ends()
        assert not good.ends(0.01)


@pytest.mark.parametrize("heartbeat_interval_s", [0.05, 5.0])
def test_who_pings_now_and_then_does_not_flood(
    listen: Listen, monkeypatch: pytest.MonkeyPatch, heartbeat_interval_s: float
) -> None:
    monkeypatch.setattr(rate, "WINDOW_S", 0.05)
    listening = listen(max_messages_per_s=10, heartbeat_interval_s=heartbeat_interval_s)
    with BarePeer(listening.endpoint) as peer:
        for number in range(30):
            peer.say_bytes(encode_ping(b"%d" % number))
            begin = time.monotonic()
            listening.turn_until(lambda begin=begin: time.monotonic() - begin > 0.01)  # type: ignore[misc]
            assert peer.hear_command(b"PONG") == b"%d" % number


def test_answers_to_pings_go_on_after_there_was_no_room_for_some(listen: Listen) -> None:
    listening = listen()
    with BarePeer(listening.endpoint) as peer:
        for _ in range(2000):
            peer.say_bytes(encode_ping(b"much"))
            listening.turn()
        peer.socket.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            while True:
                peer.read()
        peer.socket.settimeout(1.0)
        listening.turn()
        peer.say_bytes(encode_ping(b"last"))
        listening.turn(3)
        while peer.hear_command(b"PONG") != b"last":
            pass


def test_a_full_queue_says_so_and_says_when_there_is_room(listen: Listen) -> None:
    listening = listen(high_water_mark=3)
    with BarePeer(listening.endpoint, zmtp_bytes([[b"hello"]])) as peer:
        connection = listening.connection()
        sent = [bytes((65 + place,)) * LARGE for place in range(3)]
        assert [connection.put(frame) for frame in [*sent, b"not"]] == [True, True, True, False]
        listening.turn(5)
        assert listening.count("unblocked") == 0
        while len(messages_of(peer)) < len(sent):
            if listening.count("unblocked") and len(sent) == 3:
                sent.append(b"more")
                assert connection.put(b"more")
            assert peer.read()
            listening.turn()
        assert messages_of(peer) == [[frame] for frame in sent]
        assert listening.count("unblocked") == 1


def test_a_peer_that_goes_with_a_full_queue_is_over_once(listen: Listen) -> None:
    listening = listen(high_water_mark=1)
    peer = BarePeer(listening.endpoint, zmtp_bytes([[b"hello"]]))
    connection = listening.connection()
    assert connection.put(b"x" * LARGE)
    assert not connection.put(b"not")
    peer.say_bytes(message_bytes([b"last"]))
    peer.close()
    listening.turn(5)
    assert listening.messages == [[b"hello"], [b"last"]]
    assert [(what, one) for what, one, _ in listening.told[-1:]] == [("ended", connection)]
    assert listening.count("ended") == 1
    assert connection.put(b"goes nowhere")
    connection.mute()
    connection.end()
    listening.turn()
    assert listening.told[-1][0] == "ended"


def test_who_is_muted_is_not_heard_and_hears_what_was_put(listen: Listen) -> None:
    listening = listen()
    with BarePeer(listening.endpoint, zmtp_bytes([[b"hello"], [b"more"]])) as peer:
        connection = listening.connection()
        peer.say_bytes(message_bytes([b"not heard"]))
        connection.mute()
        assert connection.put(b"bye")
        listening.turn(3)
        assert [b"not heard"] not in listening.messages
        assert listening.count("ended") == 0
        connection.end()
        listening.turn(2)
        assert listening.count("ended") == 1
        assert peer.ends()
        assert [b"bye"] in peer.heard
    with BarePeer(listening.endpoint, zmtp_bytes([[b"hello"]])) as peer:
        listening.told.clear()
        listening.connection().mute()
    listening.turn(2)
    assert listening.count("ended") == 1  # also when it goes by itself


def test_what_was_put_has_time_to_leave_and_no_more(listen: Listen) -> None:
    listening = listen()
    with (
        BarePeer(listening.endpoint, zmtp_bytes([[b"slow"]])) as slow,
        BarePeer(listening.endpoint, zmtp_bytes([[b"deaf"]])) as deaf,
    ):
        listening.turn_until(lambda: len(listening.messages) == 2)
        for place in range(2):
            assert listening.connection(place).put(bytes((65 + place,)) * LARGE)
            assert listening.connection(place).put(b"last")
        ended: list[bool] = []

        def read_slowly() -> None:
            time.sleep(0.05)
            ended.append(slow.ends())

        reader = threading.Thread(target=read_slowly)
        reader.start()
        begin = time.monotonic()
        listening.close(linger_s=0.3)
        took = time.monotonic() - begin
        reader.join()
        assert ended == [True]
        assert [[len(frame) for frame in frames] for frames in messages_of(slow)] == [[LARGE], [4]]
        assert 0.25 < took < 5.0  # it waited for the deaf one
        assert deaf.ends()
        assert [b"last"] not in deaf.heard


def test_without_anything_to_leave_it_closes_at_once(listen: Listen) -> None:
    listening = listen()
    with (
        BarePeer(listening.endpoint, zmtp_bytes([[b"a"]])) as peer,
        BarePeer(listening.endpoint, zmtp_bytes([[b"b"]])) as gone,
    ):
        for place in range(2):
            assert listening.connection(place).put(b"bye" if place else b"x" * LARGE)
        gone.close()
        peer.close()
        begin = time.monotonic()
        listening.close(linger_s=60.0)
        assert time.monotonic() - begin < 30.0


def test_what_was_put_arrives_although_something_was_left_unread(listen: Listen) -> None:
    """The kernel then resets the connection; what was sent before that can still be read."""
    listening = listen()
    with BarePeer(listening.endpoint, zmtp_bytes([[b"hello"]])) as peer:
        assert listening.connection().put(b"bye")
        peer.say_bytes(message_bytes([b"never read"]))
        listening.close()
        assert peer.ends()
        assert [b"bye"] in peer.heard


def test_a_connection_that_a_fork_holds_keeps_nobody_awake(listen: Listen) -> None:
    listening = listen()
    with BarePeer(listening.endpoint, zmtp_bytes([[b"hello"]])) as peer:
        held = os.dup(listening.connection().descriptor)
    try:
        listening.turn(3)
        assert listening.count("ended") == 1
        begin = time.monotonic()
        listening.listener.wait(50)
        assert time.monotonic() - begin > 0.045
        with BarePeer(listening.endpoint, zmtp_bytes([[b"another"]])) as peer:  # may have the same number
            listening.turn(5)
            assert listening.messages[-1] == [b"another"]
            assert not peer.ends(0.01)
    finally:
        os.close(held)


def test_who_comes_in_a_crowd_is_let_in(listen: Listen) -> None:
    listening = listen()
    peers = [BarePeer(listening.endpoint, zmtp_bytes([[b"%d" % number]])) for number in range(150)]
    listening.turn_until(lambda: len(listening.messages) == 150)
    assert {frames[0] for frames in listening.messages} == {b"%d" % number for number in range(150)}
    assert len({id(connection) for what, connection, _ in listening.told if what == "message"}) == 150
    for peer in peers:
        peer.close()
    listening.turn_until(lambda: listening.count("ended") == 150)
    assert len(listening.told) == 300


def test_a_silent_peer_is_asked_and_given_up_and_one_that_answers_is_not(listen: Listen) -> None:
    listening = listen(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.2)
    with (
        BarePeer(listening.endpoint, zmtp_bytes([[b"silent"]])) as silent,
        BarePeer(listening.endpoint, zmtp_bytes([[b"alive"]])) as alive,
    ):
        listening.turn_until(lambda: len(listening.messages) == 2)
        connection = next(one for _, one, frames in listening.told if frames == [b"silent"])
        begin = time.monotonic()
        while not listening.count("ended"):
            assert time.monotonic() - begin < 10.0
            listening.turn(timeout_ms=10)
            alive.say_bytes(b"\4\5\4PONG")
            time.sleep(0.01)
        assert time.monotonic() - begin > 0.2
        assert listening.told[-1][:2] == ("ended", connection)
        assert silent.ends()
        assert sum(getattr(item, "name", b"") == b"PING" for item in silent.heard) == 4


def test_a_libzmq_client_with_heartbeats_of_its_own_stays_connected(serve: Serve) -> None:
    client = serve().client(heartbeat_ivl=50, heartbeat_timeout=300)
    monitor = client.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        assert not monitor.poll(900)
        assert client.pong().state == "serving"
    finally:
        client.socket.disable_monitor()
        monitor.close()


@pytest.mark.parametrize("hears", [False, True])
def test_who_submits_and_goes_at_once(serve: Serve, hears: bool) -> None:
    served = serve(FakeEngine(0.002))
    good = served.client()
    submit = [encode(Submit(1, 1 << 20, Sampling(max_tokens=4000))), pack_tokens([1, 2])]
    for number in range(10):
        with BarePeer(served.server.endpoint, zmtp_bytes([[encode(Hello())], submit])) as peer:
            if hears:
                peer.hear(Welcome)
                peer.read()  # and leaves much unread
        eventually(lambda number=number: good.stats()["num_requests"] == number + 1)  # type: ignore[misc]
    eventually(lambda: not served.engine.busy and good.stats()["num_clients"] == 1)
    done = good.submit(1, max_tokens=5)
    good.finish(done)
    assert done.token_ids == expected_tokens([1, 2, 3], 5)


def test_a_client_of_libzmq_that_says_all_and_goes(serve: Serve) -> None:
    served = serve(FakeEngine(0.002))
    good = served.client()
    client = RawClient(served.server.endpoint)
    for number in range(200):
        client.say(Health(number))
    client.submit(1, max_tokens=4000)
    client.socket.linger = 5000
    client.close()
    eventually(lambda: good.stats()["num_requests"] == 1)
    eventually(lambda: not served.engine.busy and good.stats()["num_clients"] == 1)
