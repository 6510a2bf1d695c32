"""This program loads mutated session files: each is refused by name, or gives the tokens of the intact file.

    python -m bench.session_fuzz --count 100000 --out bench/results/cpu/session_fuzz.json

A tiny random target runs on the CPU. Mutations flip, insert, remove, repeat and cut bytes, or change the header's
fields; half of those of the header get a right digest again, as no accident gives, so that the reader's own checks are
tried. A file that is taken makes a session whose next tokens are compared; its load may also read it again (force).
--append adds to the counts of a result that is there; give another --seed then.
"""

import hashlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.lib.conditions import bench_parser, stamps_of, write_json
from bench.lib.subjects import known_geometry
from lowlat import Runtime, SamplingParams, Session
from lowlat.errors import LowlatError
from lowlat.tools.bench.geometry import random_target

__all__ = ["fuzz", "main"]

CHUNK = 16
DIGEST_BYTES = 32
NEXT = SamplingParams(max_tokens=4, temperature=0.8, seed=3)
VALUES: tuple[Any, ...] = (None, -1, 0, 1, 3, 1 << 40, 1 << 70, 0.5, "", "x" * 300, "\ud800", [], [[]], {}, True)
Mutation = Callable[[bytes, random.Random], bytes]


def _flip(data: bytes, source: random.Random) -> bytes:
    place = source.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << source.randrange(8))]) + data[place + 1 :]


def _insert(data: bytes, source: random.Random) -> bytes:
    place = source.randrange(len(data) + 1)
    return data[:place] + source.randbytes(source.randint(1, 64)) + data[place:]


def _remove(data: bytes, source: random.Random) -> bytes:
    place = source.randrange(len(data))
    return data[:place] + data[place + source.randint(1, 64) :]


def _repeat(data: bytes, source: random.Random) -> bytes:
    place, size = source.randrange(len(data)), source.randint(1, 4096)
    return data[: place + size] + data[place:]


def _cut(data: bytes, source: random.Random) -> bytes:
    return data[: source.randrange(len(data))]


def _swap(data: bytes, source: random.Random) -> bytes:
    size = source.randint(1, len(data) // 4)
    one, other = sorted(source.sample(range(len(data) - size), 2))
    other = max(other, one + size)
    return (
        data[:one]
        + data[other : other + size]
        + data[one + size : other]
        + data[one : one + size]
        + data[other + size :]
    )


def _change_header(data: bytes, source: random.Random, *, sealed: bool) -> bytes:
    line, _, rest = data.partition(b"\n")
    header: dict[str, Any] = json.loads(line)
    name = source.choice(list(header))
    if name == "contents" and source.random() < 0.7:
        own = header["contents"]
        row = source.randrange(len(own))
        kind = source.randrange(4)
        if kind == 0:
            own.pop(row)
        elif kind == 1:
            own.append(own[row])
        elif kind == 2:
            own[row][source.randrange(3)] = source.choice(VALUES)
        else:
            source.shuffle(own)
    elif source.random() < 0.2:
        del header[name]
    else:
        header[name] = source.choice(VALUES)
    body = json.dumps(header).encode() + b"\n" + rest[:-DIGEST_BYTES]
    seal = hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest() if sealed else rest[-DIGEST_BYTES:]
    return body + seal


MUTATIONS: dict[str, Mutation] = {
    "flip": _flip,
    "insert": _insert,
    "remove": _remove,
    "repeat": _repeat,
    "cut": _cut,
    "swap": _swap,
    "header": lambda data, source: _change_header(data, source, sealed=False),
    "sealed header": lambda data, source: _change_header(data, source, sealed=True),
}
WEIGHTS = (6, 3, 3, 2, 3, 2, 1, 1)


def fuzz(count: int, folder: Path, seed: int = 0, limit_s: float = float("inf")) -> dict[str, Any]:
    """Try mutations of a file; returns counts of what became of them, and those that were wrong."""
    source, path = random.Random(seed), folder / "session"
    with _load(folder) as runtime:
        session = runtime.session("fuzzed")
        session.data["messages"] = [{"role": "user", "content": "hello"}]
        _tokens(runtime, list(range(3 * CHUNK + 2)), session)
        session.save(path)
        data, said = path.read_bytes(), session.token_ids
    with _load(folder) as runtime:
        expected = _tokens(runtime, list(said), None)
        counts: Counter[str] = Counter()
        refusals: Counter[str] = Counter()
        wrong: list[dict[str, Any]] = []
        begun = time.monotonic()
        for number in range(count):
            if time.monotonic() - begun > limit_s:
                break
            kind = source.choices(list(MUTATIONS), WEIGHTS)[0]
            mutated = MUTATIONS[kind](data, source)
            path.write_bytes(mutated)
            force = source.random() < 0.1
            counts["mutations"] += 1
            try:
                taken = runtime.load_session(path, session_id=f"s{number}", force=force)
            except LowlatError as error:
                counts["refused"] += 1
                refusals[str(error).replace(str(path), "").partition(":")[0].strip()[:60]] += 1
            except Exception as error:
                wrong.append({"number": number, "kind": kind, "error": f"{type(error).__name__}: {error!s:.200}"})
            else:
                counts["forced" if force else "taken"] += 1
                right = taken.token_ids == said and _tokens(runtime, list(said), taken) == expected
                if not right:
                    wrong.append({"number": number, "kind": kind, "error": "other tokens"})
                taken.close()
        runtime.kvcache.invariants()
    return {
        **counts,
        "wrong": len(wrong),
        "faults": wrong[:20],
        "refusals": dict(refusals.most_common(20)),
        "file_bytes": len(data),
        "seconds": round(time.monotonic() - begun, 1),
    }


def _load(folder: Path) -> Runtime:
    model = random_target(known_geometry("tiny"), folder / "target")
    sizes: dict[str, Any] = {"block_size": 8, "prefill_chunk": CHUNK, "max_batch": 1, "max_context": 128}
    return Runtime.load(model, device="cpu", dtype="float32", **sizes)


def _tokens(runtime: Runtime, prompt: list[int], session: Session | None) -> tuple[int, ...]:
    found: list[int] = []
    runtime.submit(prompt, NEXT, session=session)
    while runtime.busy:
        for output in runtime.step():
            found += output.token_ids
    return tuple(found)


def _added(before: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The counts of both, where numbers are added."""
    both = [{name: value for name, value in each.items() if isinstance(value, int | float)} for each in (before, found)]
    own = {name: round(sum(each.get(name, 0) for each in both), 1) for name in {**both[0], **both[1]}}
    refusals = Counter(before.get("refusals", {})) + Counter(found["refusals"])
    faults = [*before.get("faults", []), *found["faults"]]
    return {**own, "faults": faults, "refusals": dict(refusals.most_common()), "file_bytes": found["file_bytes"]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the mutations and write the file; returns 1 where one was wrong."""
    parser = bench_parser(__doc__, device=None)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    parser.add_argument("--append", action="store_true", help="add to the counts of the file")
    options = parser.parse_args(arguments)
    before = json.loads(options.out.read_text()) if options.append and options.out.exists() else {}
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = fuzz(options.count, Path(folder), options.seed, options.limit_s)
    seeds = [*before.get("seeds", []), options.seed]
    write_json(
        options.out,
        {**stamps_of(torch.device("cpu"), options.commit), "seeds": seeds, **_added(before, found)},
    )
    print(json.dumps({name: found[name] for name in ("mutations", "refused", "wrong", "seconds")}))
    return int(found["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
