"""A server refuses bad frames: every entry of the table, in no time, without memory, with the field that is wrong."""

import gc
import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.msgpack import encode as pack

from lowlat.ipc import wire
from lowlat.ipc.structure import count_values
from lowlat.ipc.wire import MAX_SUBMIT_BYTES, MAX_VALUES, Message, Submit, WireError, decode_client, encode

FOLDER = Path(__file__).parent / "bad_frames"
TABLE: list[dict[str, Any]] = json.loads((FOLDER / "v1.json").read_text())


def frame(parts: list[Any]) -> bytes:
    """A frame from its parts: hexadecimal, or [hexadecimal, how often]."""
    return b"".join(bytes.fromhex(p) if isinstance(p, str) else bytes.fromhex(p[0]) * p[1] for p in parts)


def test_there_are_enough_and_none_twice() -> None:
    assert len(TABLE) >= 300
    assert len({entry["name"] for entry in TABLE}) == len(TABLE)


def test_bad_frames_are_refused_without_memory_and_in_no_time() -> None:
    """By the field that is wrong and the request's number; over sockets: tests/faults/test_frames.py."""
    longest = 0.0
    for entry in TABLE:
        name, frames = entry["name"], [frame(parts) for parts in entry["frames"]]
        size = sum(map(len, frames))
        tracemalloc.start()
        with pytest.raises(WireError) as caught:
            decode_client(frames)
            pytest.fail(f"{name} is taken")
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert entry["field"] in ("any", caught.value.field), f"{name}: {caught.value}"
        assert entry["number"] in ("any", caught.value.number), f"{name}: {caught.value}"
        assert len(str(caught.value)) <= 400, name
        # at most MAX_VALUES values are built before they are looked at; of more, none
        assert peak < 4 << 20, f"{name}: {peak} bytes for {size}"
        begin = time.thread_time()
        with pytest.raises(WireError):
            decode_client(frames)
        longest = max(longest, time.thread_time() - begin)
    assert longest < 0.25


def worst_frames() -> Iterator[tuple[str, list[bytes]]]:
    """The slowest that the limits let through, and what is just over them, of every shape that costs a decoder time."""
    head = b"\x02\x85" + pack("number") + b"\x01" + pack("credit") + b"\x01" + pack("messages") + pack([{"role": "u"}])
    options = head + pack("sampling") + b"\x80" + pack("template_options") + b"\x81\xa1a"
    shapes = {
        "maps": b"\x80",
        "arrays": b"\x90",
        "pairs": b"\x92\x01\x01",
        "strings": b"\xa1a",
        "numbers": b"\xcb" + bytes(8),
    }
    for name, unit in shapes.items():
        for size in (MAX_VALUES // 2, MAX_VALUES - len(options), MAX_VALUES, 1 << 20):
            number = size // len(unit)
            yield f"{name}-{size}", [options + b"\xdd" + number.to_bytes(4, "big") + unit * number]
    for depth in (40, 900, MAX_VALUES // 4, MAX_VALUES, 1 << 20):
        yield f"deep-arrays-{depth}", [options + b"\x91" * depth + b"\x01"]
        yield f"deep-maps-{depth}", [options + b"\x81\xa1a" * depth + b"\x01"]
    few = MAX_VALUES // 2 - 30
    for size in (2, 100):
        keys = pack({f"{place:0{size}}": None for place in range(few)})
        yield f"keys-of-{size}", [options + keys]
    for name, text in (("plain", "a"), ("wide-last", "a"), ("narrow", "aé"), ("broad", "中"), ("widest", "a😀")):
        for size in (MAX_SUBMIT_BYTES - 100, MAX_SUBMIT_BYTES + 100, 8 << 20):
            whole = text * (size // len(text.encode()) - 2) + ("😀" if name == "wide-last" else "")
            yield f"text-{name}-{size}", [encode(Submit(number=1, credit=1, text=whole))]
        many = [Message("user", text * (MAX_SUBMIT_BYTES // 2000 // len(text.encode())))] * 1900
        yield f"messages-{name}", [encode(Submit(number=1, credit=1, messages=many))]
    yield (
        "broken-text",
        [
            b"\x02"
            + pack({"number": 1, "credit": 1})[:-1]
            + b"\xdb"
            + (2 << 20).to_bytes(4, "big")
            + b"\xff" * (2 << 20)
        ],
    )
    yield "control", [b"\x06" + b"\x80" * 4096]


@pytest.fixture
def old_objects_left_alone() -> Iterator[None]:
    """A collection of garbage looks at what is made meanwhile, not at all that the tests before it left."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("old_objects_left_alone")
def test_no_frame_gives_a_decoder_more_than_two_milliseconds_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test counts a decoder's input, since times depend on the machine; the slowest has a loose bound in time."""
    given: list[memoryview] = []

    class Recorded:
        def __init__(self, decoder: Any) -> None:
            self._decoder = decoder

        def decode(self, data: memoryview) -> Any:
            given.append(data)
            return self._decoder.decode(data)

    for name in ("_NUMBERED", "_NUMBER"):
        monkeypatch.setattr(wire, name, Recorded(getattr(wire, name)))
    decoders = {kind: Recorded(decoder) for kind, decoder in wire._FROM_CLIENT.items()}
    monkeypatch.setattr(wire, "_FROM_CLIENT", decoders)
    table = ((entry["name"], [frame(parts) for parts in entry["frames"]]) for entry in TABLE)
    num_refused_unread, slowest = 0, 0.0
    for name, frames in (*worst_frames(), *table):
        given.clear()
        begin = time.thread_time()
        try:
            decode_client(frames)
        except WireError:
            unread = all(len(data) <= 9 for data in given)
            num_refused_unread += unread and sum(map(len, frames)) > MAX_VALUES
        slowest = max(slowest, time.thread_time() - begin)
        for data in given:
            assert len(data) <= MAX_SUBMIT_BYTES, name
            assert count_values(data, MAX_VALUES, b"")[0] <= MAX_VALUES or len(data) <= MAX_VALUES, name
    assert num_refused_unread > 20
    assert slowest < 0.1


def test_the_table_is_what_its_script_writes(tmp_path: Path) -> None:
    before = (FOLDER / "v1.json").read_bytes()
    script = (FOLDER / "generate.py").read_text()
    (tmp_path / "bad_frames").mkdir()
    (tmp_path / "golden").symlink_to(FOLDER.parent / "golden")
    (tmp_path / "bad_frames" / "generate.py").write_text(script)
    subprocess.run([sys.executable, str(tmp_path / "bad_frames" / "generate.py")], check=True, timeout=60)
    assert (tmp_path / "bad_frames" / "v1.json").read_bytes() == before
