"""The codec: what is said comes back, golden frames stay readable, defaults are the runtime's own."""

import json
import sys
from array import array
from datetime import UTC
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowlat.ipc import wire
from lowlat.ipc.messages import HEADERS
from lowlat.ipc.structure import count_values
from lowlat.ipc.wire import (
    Cancel,
    Credit,
    Health,
    Hello,
    Kind,
    Message,
    Sampling,
    Stats,
    Submit,
    Tokens,
    WireError,
    decode_client,
    decode_server,
    encode,
    pack_tokens,
    unpack_tokens,
)
from lowlat.options.request import ADVISED_OPTIONS, SamplingParams

GOLDEN = Path(__file__).parent / "golden" / "v1.json"
NAMES = {header.__name__: kind for kind, header in HEADERS.items()}


def golden() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(GOLDEN.read_text())
    return entries


@pytest.mark.parametrize("entry", golden(), ids=lambda entry: entry["name"])
def test_golden_frames_are_read_as_ever(entry: dict[str, Any]) -> None:
    frames = [bytes.fromhex(frame) for frame in entry["frames"]]
    kind = frames[0][0]
    message: msgspec.Struct | None
    if kind < 0x80:
        message, body = decode_client(frames)
        assert body == (frames[1] if len(frames) > 1 else b"")
    else:
        message = decode_server(frames[0])
    assert type(message).__name__ == entry["message"]
    assert message is not None
    seen = json.loads(msgspec.json.encode(fields_of(message)))
    for name, value in entry["fields"].items():  # later versions may add fields; those of v1 keep their meaning
        assert keeps(seen[name], value), name


def keeps(seen: Any, value: Any) -> bool:
    """Whether a value has what it had in v1; fields that were added have their defaults."""
    if isinstance(value, dict):
        return all(keeps(seen[name], part) for name, part in value.items())
    if isinstance(value, list):
        grown = seen[len(value) :]
        return all(map(keeps, seen, value)) and len(seen) >= len(value) and grown == [None] * len(grown)
    return bool(seen == value)


def fields_of(message: msgspec.Struct) -> dict[str, Any]:
    """A struct's fields by name, also where it travels as an array; one left to the server has lowlat's own default."""
    return {
        name: fields_of(value)
        if isinstance(value, msgspec.Struct)
        else getattr(SamplingParams, name, None)
        if value is msgspec.UNSET
        else value
        for name, value in msgspec.structs.asdict(message).items()
    }


def test_golden_frames_cover_every_kind() -> None:
    assert {entry["message"] for entry in golden()} == set(NAMES)


def test_golden_frames_are_what_is_written_today() -> None:
    for entry in golden():
        if entry["canonical"]:
            frame = bytes.fromhex(entry["frames"][0])
            message = decode_client([bytes.fromhex(f) for f in entry["frames"]])[0] if frame[0] < 0x80 else None
            again = encode(message or decode_server(frame))  # type: ignore[arg-type]
            assert again == frame, entry["name"]


def test_kinds_are_those_of_the_page() -> None:
    page = wire.__doc__ or ""
    for name, kind in vars(Kind).items():
        if not name.startswith("_"):
            shown = "STATS" if name == "STATS_REPLY" else name
            assert f"0x{kind:02x}" in page.lower(), name
            assert shown in page, name
    assert len(page.splitlines()) <= 84, "the format is one page"


def test_sampling_is_the_runtimes_own() -> None:
    ours = {field.name: field for field in msgspec.structs.fields(Sampling)}
    theirs = SamplingParams()
    assert set(ours) == set(SamplingParams.__dataclass_fields__)
    for name, field in ours.items():
        left_to_server = name in (*ADVISED_OPTIONS, "max_tokens")
        assert field.default == (msgspec.UNSET if left_to_server else getattr(theirs, name)), name


def test_a_default_that_is_given_is_told_from_one_that_is_not() -> None:
    """A client's greedy temperature is not the absence of one: a model's advice holds for that alone."""
    whole: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "max_tokens": 256}
    for options in (dict[str, Any](), whole):
        submit, _ = decode_client([encode(Submit(number=1, credit=1, sampling=Sampling(**options), text="a"))])
        assert isinstance(submit, Submit)
        for name in ADVISED_OPTIONS:
            assert getattr(submit.sampling, name) == options.get(name, msgspec.UNSET), name


@given(st.lists(st.integers(0, (1 << 31) - 1), max_size=50))
def test_tokens_come_back(ids: list[int]) -> None:
    packed = pack_tokens(ids)
    assert packed == b"".join(token.to_bytes(4, "little") for token in ids)
    assert unpack_tokens(packed) == tuple(ids)


def test_tokens_are_little_endian_on_every_host(monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = array("i", [1, 2])
    swapped.byteswap()
    monkeypatch.setattr(sys, "byteorder", "big" if sys.byteorder == "little" else "little")
    assert pack_tokens([1, 2]) == swapped.tobytes()
    assert unpack_tokens(swapped.tobytes()) == (1, 2)


@pytest.mark.parametrize("packed", [b"1", b"12345", b"123"])
def test_broken_tokens_are_refused(packed: bytes) -> None:
    with pytest.raises(WireError, match="multiple of 4"):
        unpack_tokens(packed)


@pytest.mark.parametrize("wrong", [[1 << 31], [-(1 << 31) - 1], ["1"], [1.5], [None]])
def test_what_is_no_int32_is_not_packed(wrong: list[Any]) -> None:
    with pytest.raises((OverflowError, TypeError)):
        pack_tokens(wrong)


@pytest.mark.parametrize(
    ("message", "body"),
    [
        (Hello(name="ä"), b""),
        (Submit(number=0, credit=1, text="", sampling=Sampling(stop=("a",), logit_bias={3: 1.0})), b""),
        (Submit(number=1 << 62, credit=1), b"\x00\x01\x02\x03"),
        (Submit(number=5, credit=1, messages=[Message("user", "hi")], template_options={"a": [1, None, 1.5]}), b""),
        (Cancel(7), b""),
        (Credit(7, 100), b""),
        (Health(5), b""),
        (Stats(), b""),
    ],
)
def test_messages_come_back(message: msgspec.Struct, body: bytes) -> None:
    frames = [encode(message), body] if body else [encode(message)]
    assert decode_client(frames) == (message, body)


def test_clients_ignore_what_they_do_not_know() -> None:
    frame = b"\x86" + msgspec.msgpack.encode(
        {"nonce": 1, "state": "serving", "last_step_age_s": 0.5, "num_running": 1, "num_waiting": 0, "mood": "good"}
    )
    pong = decode_server(frame)
    assert isinstance(pong, wire.Pong)
    assert pong.last_step_age_s == 0.5
    longer = b"\x82" + msgspec.msgpack.encode([1, 0, b"", None, None, False, None, None, None, None, "a later field"])
    assert decode_server(longer) == Tokens(1, 0, b"")
    assert decode_server(b"\xf0anything") is None


@pytest.mark.parametrize("frame", [b"", b"\x82", b"\x82\x90", b"\x83\xc0", b"\x81" + b"\x91" * 100_000])
def test_a_servers_broken_frames_are_refused(frame: bytes) -> None:
    with pytest.raises(WireError):
        decode_server(frame)


def test_a_long_text_passes_and_a_heap_of_small_values_does_not() -> None:
    text = "ü" * (1 << 18)
    submit, _ = decode_client([encode(Submit(number=1, credit=1, messages=[Message("user", text)] * 3))])
    assert isinstance(submit, Submit)
    assert submit.messages is not None
    assert submit.messages[2].content == text
    heap: dict[str, Any] = {"a": [{}] * (1 << 20)}
    with pytest.raises(WireError, match="more than 16384 values") as caught:
        decode_client([encode(Submit(number=9, credit=1, messages=[Message("user", "a")], template_options=heap))])
    assert caught.value.number == 9
    with pytest.raises(WireError, match=r"3145[0-9]* bytes, more than 2097152; send a longer prompt") as caught:
        decode_client([b"\x02" + msgspec.msgpack.encode({"text": "a" * (3 << 20), "credit": 1, "number": 1 << 62})])
    assert caught.value.number == 1 << 62


def test_a_number_out_of_its_range_is_no_number() -> None:
    for number in (-1, "1", [1], {"number": 5}, None, 1 << 63):
        with pytest.raises(WireError) as caught:
            decode_client([b"\x02" + msgspec.msgpack.encode({"number": number, "text": "a" * (3 << 20)})])
        assert caught.value.number is None


def num_values(value: object) -> int:
    """A value, keys, and all that is inside, by what the decoder made of it."""
    if isinstance(value, dict):
        return 1 + sum(num_values(part) for pair in value.items() for part in pair)
    return 1 + sum(map(num_values, value)) if isinstance(value, list) else 1


class Repeated(NamedTuple):
    """A part so many times over, which stands for the whole in what Hypothesis prints and compares."""

    part: Any
    times: int


def expanded(value: Any) -> Any:
    """A value with its repeated parts as long as they say."""
    if isinstance(value, Repeated):
        return value.part * value.times
    if isinstance(value, dict):
        return {key: expanded(part) for key, part in value.items()}
    return [expanded(part) for part in value] if isinstance(value, list) else value


# sizes to either side of where MessagePack counts in one byte more
SIZES = st.sampled_from([0, 1, 15, 16, 31, 32, 255, 256, 65_535, 65_536])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats()
    | st.text(max_size=20) | st.binary(max_size=20) | st.datetimes(timezones=st.just(UTC))
    | st.builds(Repeated, st.sampled_from(["a", b"a", [0]]), SIZES),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=5),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=settings().max_examples // 3)
@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=5), VALUES)
def test_values_are_counted_as_the_decoder_finds_them(described: dict[str, Any], last: Any) -> None:
    before, number = expanded(described), expanded(last)
    header = {**before, "number": number, "after": before}
    data = memoryview(msgspec.msgpack.encode(header))
    counted, place = count_values(data, 1 << 20, msgspec.msgpack.encode("number"))
    assert counted == num_values(header)
    assert place is not None and data[place] == msgspec.msgpack.encode(number)
    fewer, _ = count_values(data, counted - 1, b"")
    assert fewer > counted - 1


@given(st.binary(max_size=300), st.integers(0, 50))
def test_any_bytes_are_counted_in_bounded_turns(data: bytes, max_values: int) -> None:
    reads = 0

    class Read(bytes):
        def __getitem__(self, place: Any) -> Any:
            nonlocal reads
            reads += isinstance(place, int)
            return super().__getitem__(place)

    count_values(Read(data), max_values, b"")  # type: ignore[arg-type]
    assert reads <= max_values
