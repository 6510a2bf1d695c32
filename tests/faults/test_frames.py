"""Malformed, oversized and unknown frames against a live server: an ERROR each, the peer dropped, others unaffected."""

import json
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine, expected_tokens
from served import Serve, eventually

from lowlat.ipc.wire import Bye, Error

TABLE: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "ipc" / "bad_frames" / "v1.json").read_text())
SENDABLE = [entry for entry in TABLE if entry["frames"]]  # a message without frames ZeroMQ itself refuses
MAX_BYTES = 16 << 20  # some are longer than the default lets through


def frames_of(entry: dict[str, Any]) -> list[bytes]:
    return [
        b"".join(bytes.fromhex(part) if isinstance(part, str) else bytes.fromhex(part[0]) * part[1] for part in parts)
        for parts in entry["frames"]
    ]


def test_every_bad_frame_is_one_error_with_its_code_and_field(serve: Serve) -> None:
    served = serve(FakeEngine(0.002), max_bad_messages=1 << 16, max_message_bytes=MAX_BYTES)
    bad, good = served.client(), served.client()
    running = good.submit(1, [8], max_tokens=200)
    last_number = -1
    for entry in SENDABLE:
        bad.say_raw(*frames_of(entry))
        error = bad.hear(Error)
        assert error.code == entry["code"], entry["name"]
        assert entry["field"] in ("any", error.field), entry["name"]
        number = entry["number"]
        if isinstance(number, int):  # the request's own error, unless its number was used before
            assert error.number == (number if number > last_number else None), entry["name"]
        if error.number is not None:
            last_number = error.number
        assert len(error.message) <= 400
    assert bad.pong().state == "serving"  # one answer each, and none too many
    good.finish(running)
    assert running.token_ids == expected_tokens([8], 200)
    stats = good.stats()
    assert stats["num_bad_messages"] == len(SENDABLE) >= 300
    assert stats["num_running"] == stats["num_waiting"] == 0
    assert len(served.engine.order) == 1


def test_the_peer_is_dropped_after_so_many_and_its_requests_with_it(serve: Serve) -> None:
    most = 8
    served = serve(FakeEngine(0.002), max_bad_messages=most, max_message_bytes=MAX_BYTES)
    good = served.client()
    running = good.submit(1, [9], max_tokens=4000)
    num_peers = 0
    for start in range(0, len(SENDABLE), most):
        entries = SENDABLE[start : start + most]
        bad = served.client()
        lost = bad.submit(1 << 60, [8], max_tokens=4000)
        for entry in entries:
            bad.say_raw(*frames_of(entry))
            assert bad.hear(Error).code == entry["code"]
        if len(entries) == most:
            num_peers += 1
            assert bad.hear(Bye).reason == "dropped"
            bad.say_raw(b"\xff")
            assert bad.is_quiet(0.002)  # it is not even heard any more
            assert lost.end is None
        bad.close()
    eventually(lambda: good.stats()["num_clients"] == 1 and good.pong().num_running == 1)
    assert good.stats()["num_dropped_peers"] == num_peers > 40
    good.cancel(1)
    good.finish(running)
    assert running.token_ids == expected_tokens([9], 4000)[: len(running.token_ids)]


def test_a_frame_over_the_limit_ends_its_connection_alone(serve: Serve, transport: dict[str, str]) -> None:
    served = serve(FakeEngine(0.002), max_message_bytes=4096, **transport)
    large, good = served.client(), served.client()
    lost = large.submit(1, [7], max_tokens=4000)
    running = good.submit(1, [8], max_tokens=100)
    large.wait_tokens(lost, 1)
    large.say_raw(b"\x06" + bytes(4097))
    good.finish(running)
    assert running.token_ids == expected_tokens([8], 100)
    eventually(lambda: not served.engine.busy and good.stats()["num_clients"] == 1)
