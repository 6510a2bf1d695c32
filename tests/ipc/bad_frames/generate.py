"""Writes v1.json: messages that a server must refuse, with the code and the path of the field that it must name.

Run it as `python tests/ipc/bad_frames/generate.py`; the seed is fixed, so the file is the same every time. A frame is
a list of parts, each hexadecimal or [hexadecimal, how often], for some are long. Of the systematic cases the field is
known beforehand; of the mutated ones the table keeps what the decoder said when it was written, and the script fails
where it raises anything but WireError.
"""

import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lowlat.ipc.wire import WireError, decode_client

HERE = Path(__file__).parent
SEED = 20_251
NUM_MUTATED = 160
Part = str | list[Any]
pack = msgspec.msgpack.encode
GOOD: dict[int, dict[str, Any]] = {
    0x01: {"min_version": 1, "max_version": 1, "name": "n"},
    0x02: {"number": 1, "credit": 8, "text": "a"},
    0x05: {},
    0x06: {"nonce": 1},
    0x07: {"deadline_s": 1.0},
}
WRONG: dict[str, list[Any]] = {
    "number": [-1, 1 << 63, 1.5, "1", None, [1], {}, True, b"1"],
    "credit": [0, -1, 1 << 31, 1.5, "1", None, [], True],
    "text": [1, 1.5, [], {}, True, b"raw"],
    "messages": [[], "hi", 5, {}, [1], ["a"], [None], [[]], True],
    "template_options": [[], "a", 5, True, 1.5],
    "deadline_ms": [0, -1, (1 << 40) + 1, 1.5, "1", [], True],
    "sampling": [None, [], "greedy", 5, True],
}
WRONG_SAMPLING: dict[str, list[Any]] = {
    "temperature": [-0.1, 100.5, math.nan, math.inf, -math.inf, "hot", None, True, [], {}],
    "top_k": [-1, 1 << 31, 1.5, "5", None, True],
    "top_p": [0.0, -1.0, 1.01, math.nan, "1", None, []],
    "min_p": [-0.01, 1.01, math.nan, "0", None],
    "repetition_penalty": [0.0, -1.0, 10.5, math.nan, math.inf, None],
    "presence_penalty": [-2.5, 2.5, math.nan, "1"],
    "frequency_penalty": [-2.5, 2.5, math.nan, "1"],
    "logit_bias": [[], "a", 5],
    "seed": [-1, 1 << 63, 1.5, "1", True, []],
    "stop_token_ids": [[1] * 17, "12", 5, {}, None],
    "stop": [["a"] * 17, "END", 5, {}, None],
    "max_tokens": [0, -1, 1 << 31, 1.5, "5", None, True],
    "min_tokens": [-1, 1 << 31, "5", None],
    "ignore_eos": [0, 1, "yes", None, []],
    "logprobs": [-1, 21, 1.5, "5", True],
    "max_draft_tokens": [-1, 64, 1.5, "5"],
}
INSIDE: list[tuple[dict[str, Any], str]] = [
    ({"sampling": {"stop": ["a", ""]}}, "$.sampling.stop[1]"),
    ({"sampling": {"stop": ["a" * 1025]}}, "$.sampling.stop[0]"),
    ({"sampling": {"stop": [5]}}, "$.sampling.stop[0]"),
    ({"sampling": {"stop_token_ids": [1, -1]}}, "$.sampling.stop_token_ids[1]"),
    ({"sampling": {"stop_token_ids": [1 << 31]}}, "$.sampling.stop_token_ids[0]"),
    ({"sampling": {"logit_bias": {5: 100.5}}}, "$.sampling.logit_bias[...]"),
    ({"sampling": {"logit_bias": {5: math.nan}}}, "$.sampling.logit_bias[...]"),
    ({"sampling": {"logit_bias": {-5: 0.0}}}, "$.sampling.logit_bias"),
    ({"sampling": {"logit_bias": {"5": 0.0}}}, "$.sampling.logit_bias"),
    ({"sampling": {"logit_bias": dict.fromkeys(range(301), 0.0)}}, "$.sampling.logit_bias"),
    ({"sampling": {"beam": 5}}, "$.sampling.beam"),
    ({"messages": [{"content": "a"}]}, "$.messages[0].role"),
    ({"messages": [{"role": "user"}, {"role": ""}]}, "$.messages[1].role"),
    ({"messages": [{"role": "r" * 65}]}, "$.messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "$.messages[0].content"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "$.messages[0].content"),
    ({"messages": [{"role": "user", "thinking": 5}]}, "$.messages[0].thinking"),
    ({"messages": [{"role": "user", "name": "n" * 257}]}, "$.messages[0].name"),
    ({"messages": [{"role": "user", "mood": "good"}]}, "$.messages[0].mood"),
    ({"messages": [{"role": "user", "tool_calls": {}}]}, "$.messages[0].tool_calls"),
    ({"messages": [{"role": "user", "tool_calls": [5]}]}, "$.messages[0].tool_calls[0]"),
    ({"messages": [{"role": "user", "tool_calls": [{"a": b"raw"}]}]}, "$.messages[0].tool_calls"),
    ({"messages": [{"role": "user", "tool_calls": [{"a": math.nan}]}]}, "$.messages[0].tool_calls"),
    ({"messages": [{"role": "user"}] * 4097}, "$.messages"),
    ({"messages": [{"role": "user"}], "template_options": {"a": b"raw"}}, "$.template_options.a"),
    ({"messages": [{"role": "user"}], "template_options": {"a": {5: 1}}}, "$.template_options.a"),
    ({"messages": [{"role": "user"}], "template_options": {"a": math.inf}}, "$.template_options.a"),
    ({"messages": [{"role": "user"}], "template_options": {"a": [0] * 10_001}}, "$.template_options.a"),
]


def systematic() -> Iterator[dict[str, Any]]:
    """Every field with every wrong value; the path is known from the field."""
    for name, values in WRONG.items():
        for place, value in enumerate(values):
            header = {"number": 1, "credit": 8, name: value}
            header.setdefault("text", "a")
            if name == "messages":
                del header["text"]
            fields = f"$.{name}"
            if name == "messages" and isinstance(value, list) and value:
                fields += "[0]"
            yield case(f"submit-{name}-{place}", [b"\x02" + pack(header)], fields)
    for name, values in WRONG_SAMPLING.items():
        for place, value in enumerate(values):
            header = {"number": 1, "credit": 8, "text": "a", "sampling": {name: value}}
            yield case(f"sampling-{name}-{place}", [b"\x02" + pack(header)], f"$.sampling.{name}")
    for place, (extra, field) in enumerate(INSIDE):
        header = {"number": 1, "credit": 8, **extra}
        if "messages" not in extra:
            header["text"] = "a"
        yield case(f"inside-{place}", [b"\x02" + pack(header)], field)
    for kind, good in GOOD.items():
        yield case(f"unknown-field-{kind}", [bytes((kind,)) + pack({**good, "extra": 1})], "$.extra")
        yield case(f"array-for-map-{kind}", [bytes((kind,)) + pack(list(good.values()))], None)
        yield case(f"trailing-{kind}", [bytes((kind,)) + pack(good) + b"\xc0"], None)
        yield case(f"nothing-{kind}", [bytes((kind,))], None)
    for name in ("number", "credit"):
        header = {key: value for key, value in GOOD[0x02].items() if key != name}
        yield case(f"missing-{name}", [b"\x02" + pack(header)], f"$.{name}")
    yield from arrays_and_control()


def arrays_and_control() -> Iterator[dict[str, Any]]:
    """CANCEL and CREDIT, whose headers are arrays, and what belongs to a connection."""
    for place, (value, field) in enumerate(
        [([], None), ([1, 2], None), ([-1], "$[0]"), (["1"], "$[0]"), ([1 << 63], "$[0]"), ([None], "$[0]"), ({}, None)]
    ):
        yield case(f"cancel-{place}", [b"\x03" + pack(value)], field)
    for place, (value, field) in enumerate(
        [
            ([1], None),
            ([1, 0], "$[1]"),
            ([1, -5], "$[1]"),
            ([1, 1 << 31], "$[1]"),
            ([1, 1.5], "$[1]"),
            ([1, 1, 1], None),
        ]
    ):
        yield case(f"credit-{place}", [b"\x04" + pack(value)], field)
    for place, (kind, name, value) in enumerate(
        [
            (0x01, "name", "n" * 65),
            (0x01, "name", 5),
            (0x01, "min_version", -1),
            (0x01, "max_version", "1"),
            (0x06, "nonce", -1),
            (0x06, "nonce", 1 << 63),
            (0x07, "deadline_s", -1.0),
            (0x07, "deadline_s", math.nan),
            (0x07, "deadline_s", 3601.0),
        ]
    ):
        yield case(f"control-{place}", [bytes((kind,)) + pack({name: value})], f"$.{name}")


def written() -> Iterator[dict[str, Any]]:
    """Yield the frames that an attacker would send."""
    head = b"\x02\x83" + pack("number") + b"\x01" + pack("credit") + b"\x01"
    options = b"\x02\x84" + head[2:] + pack("messages") + pack([{"role": "u"}]) + pack("template_options")
    good = b"\x02" + pack({"number": 1, "credit": 1})
    text = b"\x02" + pack({"number": 1, "credit": 1, "text": "a"})
    yield case("no-frames", [], None)
    yield case("empty-frame", [b""], None)
    yield case("three-frames", [good, b"\0\0\0\0", b""], None)
    yield entry("thousand-frames", [["00"]] * 1000, None)
    for kind in (0x00, 0x08, 0x7F, 0x80, 0x81, 0x82, 0x83, 0xFF):
        yield case(f"kind-{kind:02x}", [bytes((kind,)) + pack({})], None)
    yield case("body-empty", [good, b""], "$.body")
    for size in (1, 2, 3, 5, 4095):
        yield case(f"body-of-{size}", [good, b"\x01" * size], "$.body")
    yield case("body-and-text", [text, b"\0\0\0\0"], "$")
    yield case("no-prompt", [good], "$")
    yield case(
        "two-prompts", [b"\x02" + pack({"number": 1, "credit": 1, "text": "", "messages": [{"role": "u"}]})], "$"
    )
    yield case("options-for-text", [text[:1] + pack({**GOOD[2], "template_options": {}})], "$.template_options")
    for kind in (0x01, 0x03, 0x04, 0x05, 0x06, 0x07):
        header = GOOD.get(kind, [1] if kind == 0x03 else [1, 1])
        yield case(f"body-of-kind-{kind}", [bytes((kind,)) + pack(header), b"\0\0\0\0"], "$.body")
    for name, claim in (("str", b"\xdb"), ("bin", b"\xc6"), ("array", b"\xdd"), ("map", b"\xdf"), ("ext", b"\xc9")):
        field = "$.text" if name in ("array", "map") else None  # a container's type is refused before its size is read
        yield case(f"claim-4GiB-{name}", [head + pack("text") + claim + b"\xff\xff\xff\xff" + b"\x01"], field)
        yield case(f"claim-4GiB-any-{name}", [options + b"\x81\xa1a" + claim + b"\xff\xff\xff\xff\x01"], None)
        top = "$" if name == "map" else None  # its first key is no string
        yield case(f"claim-4GiB-top-{name}", [b"\x02" + claim + b"\xff\xff\xff\xff\x01"], top)
    yield case("claim-messages", [head + pack("messages") + b"\xdd\xff\xff\xff\xff"], "$.messages")
    yield case("claim-cancel", [b"\x03\xdd\xff\xff\xff\xff"], None)
    million = 1_000_000
    for name, opener, depth in (("arrays", "91", million), ("maps", "81a161", million), ("arrays-500", "91", 500)):
        yield entry(f"nested-{name}", [[options.hex(), "81a161", [opener, depth], "c0"]], "any")
        text_field = None if depth == million else "$.text"  # so long a header is measured first
        yield entry(f"nested-text-{name}", [[(head + pack("text")).hex(), [opener, depth], "c0"]], text_field)
        yield entry(f"nested-top-{name}", [["02", [opener, depth], "c0"]], "any", number=None)
        yield entry(f"nested-control-{name}", [["06", [opener, depth], "c0"]], "any", number=None)
    deep: list[Part] = [options.hex(), "81a161", ["91", 40], "c0"]
    yield entry("nested-40", [deep], "$.template_options.a", number=1)
    yield entry("heap-of-maps", [[options.hex(), "81a161", "dd00800000", ["80", 8 << 20]]], None, number=1)
    first = b"\x02\x85" + options[2:]
    twice: list[Part] = [
        first.hex(),
        "81a161",
        "dd00400000",
        ["80", 4 << 20],
        (pack("template_options") + b"\x80").hex(),
    ]
    yield entry("heap-of-maps-behind-a-second-field", [twice], None, number=1)
    yield entry("long-control", [["05", ["80", 5000]]], None, number=None)
    for place, raw in enumerate(
        (b"\xa2\xff\xfe", b"\xa1\x80", b"\xa3\xed\xa0\x80", b"\xa2\xc3\x28", b"\xa4\xf5\x80\x80\x80")
    ):
        yield case(f"utf8-value-{place}", [head + pack("text") + raw], None)
        yield case(f"utf8-key-{place}", [b"\x02\x81" + raw + b"\x01"], "any")
    yield case("timestamp", [options + b"\x81\xa1a\xd6\xff\x00\x00\x00\x01"], "$.template_options.a")
    yield case("ext-type", [options + b"\x81\xa1a\xd4\x05\x00"], "$.template_options.a")
    yield case("unhashable-key", [options + b"\x81\xa1a\x81\x81\x01\x02\x03"], None)
    yield case("never-used-byte", [head + pack("text") + b"\xc1"], None)
    yield case("http", [b"GET / HTTP/1.1\r\n\r\n"], None)
    yield case("json", [b'{"number": 1}'], None)
    yield case("pickle", [b"\x80\x04\x95\x00"], None)


def mutated(chooser: random.Random) -> Iterator[dict[str, Any]]:
    """Golden messages with a few bytes changed, cut off, or put in."""
    golden = json.loads((HERE.parent / "golden" / "v1.json").read_text())
    good = [[bytes.fromhex(frame) for frame in item["frames"]] for item in golden]
    good = [frames for frames in good if frames[0][0] < 0x80]
    seen: set[bytes] = set()
    while len(seen) < NUM_MUTATED:
        frames = list(chooser.choice(good))
        data = bytearray(frames[0])
        for _ in range(chooser.randint(1, 3)):
            place = chooser.randrange(len(data)) if data else 0
            match chooser.randrange(4):
                case 0 if data:
                    data[place] ^= 1 << chooser.randrange(8)
                case 1:
                    data[place:place] = chooser.randbytes(chooser.randint(1, 4))
                case 2:
                    del data[place : place + chooser.randint(1, 4)]
                case _:
                    del data[place:]
        frames[0] = bytes(data)
        try:
            decode_client(frames)
        except WireError as error:
            if frames[0] not in seen:
                seen.add(frames[0])
                yield case(f"mutated-{len(seen)}", frames, error.field)


def case(name: str, frames: list[bytes], field: str | None) -> dict[str, Any]:
    """One entry, its number found by the decoder's own second look."""
    return entry(name, [[frame.hex()] for frame in frames], field, number="any")


def entry(
    name: str, frames: Sequence[Sequence[Part]], field: str | None, number: int | str | None = "any"
) -> dict[str, Any]:
    return {"name": name, "frames": frames, "code": "malformed", "field": field, "number": number}


def main() -> None:
    entries = [*written(), *systematic(), *mutated(random.Random(SEED))]
    lines = ",\n".join(json.dumps(item) for item in entries)
    (HERE / "v1.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
