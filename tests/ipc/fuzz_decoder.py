"""Fuzzes what decodes a peer's frames: anything but a message or a WireError is a fault.

By hand, guided by coverage:  python tests/ipc/fuzz_decoder.py --executions 1000000 --json result.json
(needs atheris, `pip install atheris`). test_wire_fuzz.py runs `check` on a bounded number of seeded mutations.

An input is a byte, then frames: its lowest bit says whose they are, the next whether there is a body, the rest how many
bytes from the end it takes.
"""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from lowlat.ipc.wire import Tokens, WireError, decode_client, decode_server, encode, unpack_tokens

FOLDER = Path(__file__).parent
MAX_INPUT_BYTES = 4096


def check(data: bytes) -> bool:
    """Decode an input; whether it is a message. Raises whatever is not allowed to be raised."""
    if not data:
        return False
    side, rest = data[0], data[1:]
    try:
        if side & 1:
            reply = decode_server(rest)
            if isinstance(reply, Tokens):
                unpack_tokens(reply.token_ids)
            return reply is not None
        split = max(len(rest) - (side >> 2), 0)
        frames = [rest[:split], rest[split:]] if side & 2 else [rest]
        message, body = decode_client(frames)
        ids = unpack_tokens(body)
    except WireError:
        return False
    again, same = decode_client([encode(message), body] if ids else [encode(message)])
    if (again, same) != (message, body):
        raise ValueError(f"{message!r} comes back as {again!r}")
    return True


def corpus() -> Iterator[bytes]:
    """Golden messages, and the bad ones that are short."""
    for entry in json.loads((FOLDER / "golden" / "v1.json").read_text()):
        frames = [bytes.fromhex(frame) for frame in entry["frames"]]
        yield as_input(frames, server=frames[0][0] >= 0x80)
    for entry in json.loads((FOLDER / "bad_frames" / "v1.json").read_text()):
        parts = [part for frame in entry["frames"] for part in frame]
        frames = [bytes.fromhex("".join(frame)) for frame in entry["frames"]] if all(map(is_text, parts)) else []
        if 1 <= len(frames) <= 2 and len(frames[0]) < MAX_INPUT_BYTES and (len(frames) == 1 or len(frames[1]) < 64):
            yield as_input(frames, server=False)


def is_text(part: Any) -> bool:
    return isinstance(part, str)


def as_input(frames: list[bytes], *, server: bool) -> bytes:
    """The input that `check` cuts into these frames."""
    if server:
        return b"\x01" + frames[0]
    if len(frames) == 1:
        return b"\x00" + frames[0]
    return bytes((len(frames[1]) << 2 | 2,)) + frames[0] + frames[1]


def mutate(data: bytes, chooser: random.Random) -> bytes:
    """A few changes: flipped bits, bytes put in, taken out or repeated, a number that is an edge."""
    changed = bytearray(data)
    for _ in range(chooser.randint(1, 6)):
        place = chooser.randrange(len(changed) + 1)
        match chooser.randrange(6):
            case 0 if place < len(changed):
                changed[place] ^= 1 << chooser.randrange(8)
            case 1:
                changed[place:place] = chooser.randbytes(chooser.randint(1, 8))
            case 2:
                del changed[place : place + chooser.randint(1, 8)]
            case 3:
                changed[place:place] = changed[place : place + chooser.randint(1, 64)]
            case 4 if place < len(changed):
                changed[place] = chooser.choice(
                    b"\x7f\x80\x90\xa0\xc0\xc1\xc4\xc7\xca\xcb\xcf\xd3\xd6\xd9\xdb\xdc\xdd\xdf\xff"
                )
            case _:
                changed[place : place + 8] = chooser.choice((b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\x00" * 8))
    return bytes(changed[:MAX_INPUT_BYTES])


def fuzz(executions: int, seed: int, result: str) -> None:
    """Run libFuzzer in a child of its own, for it ends the process; then write what was done."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "corpus"
        found.mkdir()
        inputs = list(corpus())
        for place, data in enumerate(inputs):
            (found / f"{place:04d}").write_bytes(data)
        options = [f"-runs={executions}", f"-seed={seed}", f"-max_len={MAX_INPUT_BYTES}", "-rss_limit_mb=512"]
        command = [sys.executable, __file__, "--child", *options, "-timeout=5", "-print_final_stats=1", str(found)]
        begin = time.perf_counter()
        child = subprocess.run(command, stderr=subprocess.PIPE, text=True, cwd=folder)
        seconds = time.perf_counter() - begin
        if child.returncode:
            raise SystemExit(child.stderr[-4000:])
        stats = dict(
            line[6:].replace(" ", "").split(":", 1) for line in child.stderr.splitlines() if line.startswith("stat::")
        )
        figures = {
            "executions": int(stats["number_of_executed_units"]),
            "seconds": round(seconds, 1),
            "seed": seed,
            "corpus_before": len(inputs),
            "corpus_after": len(list(found.iterdir())),
            "peak_rss_mb": int(stats["peak_rss_mb"]),
            "faults": 0,
            "commit": commit(),
            "versions": versions(),
        }
        Path(result).write_text(json.dumps(figures, indent=2) + "\n")
        print(json.dumps(figures))


def commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=FOLDER, capture_output=True, text=True, check=True
    ).stdout.strip()


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"python": platform.python_version(), "msgspec": msgspec.__version__, "atheris": version("atheris")}


def child(options: list[str]) -> None:
    """Hand over to libFuzzer; lowlat's own modules are instrumented, msgspec's C code is not."""
    import atheris  # type: ignore[import-untyped, import-not-found, unused-ignore]

    for name in ("lowlat.ipc.wire", "lowlat.ipc.messages"):
        sys.modules.pop(name, None)
    with atheris.instrument_imports(include=["lowlat.ipc"]):
        import lowlat.ipc.wire as wire

    names = ("Tokens", "WireError", "decode_client", "decode_server", "encode", "unpack_tokens")
    globals().update({name: getattr(wire, name) for name in names})
    atheris.Setup([sys.argv[0], *options], lambda data: (check(data), None)[1])
    atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--executions", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", default=os.devnull)
    chosen = parser.parse_args()
    fuzz(chosen.executions, chosen.seed, chosen.json)
