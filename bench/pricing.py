"""The cost of other clients' attacks to a client: its time to a first token with the attack and without it, in turns.

    python -m bench.pricing --out bench/results/cpu/pricing.json
    python -m bench.pricing --only texts,stops --rounds 2

The server is `lowlat serve` with the bundled pair, a process of its own; an attack is `attackers` processes, and comes
again when the server drops it. A client asks for "Hi" every 50 ms and notes when the first token comes.
Rounds with and without an attack alternate. Beside the times stands by how much the server's memory grew in the
rounds with the attack. Two controls are no attacks: `idle_cores` is a process that computes and asks the
server nothing, which takes from a machine of few cores what attackers take as well; `plain` asks for as many tokens
as `stops` and `deadlines` do, and takes slots.
"""

import argparse
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import quantiles
from typing import Any

import zmq

from bench.host_conditions import host_conditions
from bench.ready_process import ready_process
from lowlat.ipc import Client
from lowlat.ipc.wire import Bye, End, Error, Hello, Message, Sampling, Stats, Submit, decode_server, encode, pack_tokens

__all__ = ["ATTACKS", "main", "measure"]

EVERY_S = 0.05
MAX_ROUND_S, MIN_REQUESTS = 20.0, 3
STATS_PER_S = 9_000  # just under what a client may say in a second
LONG_TEXT = "sixteen texts, all of them too long for any answer; " * 36_500  # 1.9 MB
FITTING_TEXT = "one text of few tokens for its length" + " " * 60_000
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
STOPS = tuple(chr(0x61 + place) * 1000 + f" the end of answer {place:05d}" for place in range(16))


class Attacker:
    """A DEALER that sends any message; `hear` ends the attack's turn by an error when the server has dropped it."""

    def __init__(self, endpoint: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 0), (zmq.SNDTIMEO, 2000), (zmq.RCVTIMEO, 2000)):
            self._socket.setsockopt(option, value)
        self._socket.connect(endpoint)
        self._number = -1
        self.path = endpoint.removeprefix("ipc://")
        self.say(Hello(name="attacker"))
        self.hear()

    def say(self, header: Any, *body: bytes) -> None:
        self._socket.send_multipart([encode(header), *body])

    def say_raw(self, frame: bytes) -> None:
        self._socket.send(frame)

    def submit(self, *body: bytes, **fields: Any) -> None:
        self._number += 1
        self.say(Submit(self._number, 1000, **fields), *body)

    def hear(self, timeout_ms: int = 2000) -> Any:
        """The next message, None when none came. Raises ConnectionError after BYE."""
        if not self._socket.poll(timeout_ms):
            return None
        message = decode_server(self._socket.recv())
        if isinstance(message, Bye):
            raise ConnectionError(message.message)
        return message

    def hear_ends(self, count: int) -> None:
        """Hear messages until so many requests have ended, or none comes."""
        while count:
            message = self.hear()
            if message is None:
                return
            count -= isinstance(message, End | Error)

    def close(self) -> None:
        self._socket.close()


def stats(attacker: Attacker) -> None:
    """Questions for figures, at just under the rate that a client may ask at all."""
    begin, num_asked = time.monotonic(), 0
    while True:
        while num_asked < (time.monotonic() - begin) * STATS_PER_S:
            attacker.say(Stats())
            num_asked += 1
        while attacker.hear(1) is not None:
            pass


def texts(attacker: Attacker) -> None:
    """Sixteen texts at a time, which can never be served."""
    while True:
        for _ in range(16):
            attacker.submit(text=LONG_TEXT, sampling=Sampling(max_tokens=1))
        attacker.hear_ends(16)


def fitting(attacker: Attacker) -> None:
    """Sixteen texts at a time, each of which could be as few tokens as the context holds."""
    while True:
        for _ in range(16):
            attacker.submit(text=FITTING_TEXT, sampling=Sampling(max_tokens=1))
        attacker.hear_ends(16)


def plain(attacker: Attacker, stop: tuple[str, ...] = ()) -> None:
    """Three short requests at a time, which take slots as anybody's do."""
    while True:
        for _ in range(3):
            attacker.submit(pack_tokens([5, 6, 7]), sampling=Sampling(max_tokens=2, stop=stop))
        attacker.hear_ends(3)


def stops(attacker: Attacker) -> None:
    """The same with sixteen stop strings of a thousand characters."""
    plain(attacker, STOPS)


def deadlines(attacker: Attacker) -> None:
    """Requests that end long before their deadline, each with 16 kB of stop strings."""
    sampling = Sampling(max_tokens=2, stop=tuple(f"{place:04d}" * 256 for place in range(16)))
    while True:
        for _ in range(3):
            attacker.submit(pack_tokens([5, 6, 7]), sampling=sampling, deadline_ms=3_600_000)
        attacker.hear_ends(3)


def malformed(attacker: Attacker) -> None:
    """Requests with values that JSON lacks, and messages of no kind, until dropped."""
    while True:
        for _ in range(8):
            attacker.submit(messages=[Message("user", tool_calls=[{"x": float("nan")}])])
        attacker.hear_ends(8)
        attacker.say_raw(b"\xff")


def strangers(attacker: Attacker) -> None:
    """Sixteen connections that never say HELLO: half send most of a message, half a byte of one every 10 ms."""
    attacker.close()
    said = _GREETING + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    frame = b"\x02" + struct.pack(">Q", 8 << 20)
    while True:
        with ExitStack() as stack:
            connections = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(16)]
            for connection in connections:
                connection.connect(attacker.path)
                connection.sendall(said + frame)
            for connection in connections[:8]:
                connection.sendall(bytes((8 << 20) - 1))
            with suppress(OSError):
                while True:
                    for connection in connections[8:]:
                        connection.sendall(b"x")
                    time.sleep(0.01)


def idle_cores(attacker: Attacker) -> None:
    """Compute, and send the server nothing."""
    attacker.close()
    while True:
        sum(range(1000))


ATTACKS: dict[str, tuple[Callable[[Attacker], None], int]] = {
    "idle_cores": (idle_cores, 1),
    "stats": (stats, 4),
    "texts": (texts, 1),
    "fitting": (fitting, 1),
    "plain": (plain, 1),
    "stops": (stops, 1),
    "deadlines": (deadlines, 1),
    "malformed": (malformed, 1),
    "strangers": (strangers, 1),
}


def attack(name: str, endpoint: str) -> None:
    """Attack, and come again when dropped, until killed."""
    while True:
        with suppress(ConnectionError, zmq.ZMQError):
            ATTACKS[name][0](Attacker(endpoint))
        time.sleep(0.01)


@contextmanager
def attacked(name: str, endpoint: str) -> Iterator[None]:
    """The attack's processes, under way."""
    command = [sys.executable, "-m", "bench.pricing", "--attack", name, "--endpoint", endpoint]
    processes = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for _ in range(ATTACKS[name][1])]
    try:
        time.sleep(1.0)
        yield
        ended = [process for process in processes if process.poll() is not None]
        if ended:
            raise RuntimeError(f"{len(ended)} attackers of {name} ended by themselves")
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, int]]:
    """`lowlat serve` of the bundled pair: its endpoint and its process's id."""
    endpoint = f"ipc://{folder}/s.sock"
    command = ("-m", "lowlat.cli", "serve", "--json", "--endpoint", endpoint)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with ready_process(*command, stderr=subprocess.DEVNULL, env=environment) as server:
        yield endpoint, server.pid


def first_tokens(client: Client, count: int) -> list[float]:
    """Times from asking to the first token, ms; fewer than `count` where they take very long."""
    times: list[float] = []
    end = time.monotonic() + MAX_ROUND_S
    while len(times) < count and (len(times) < MIN_REQUESTS or time.monotonic() < end):
        begin = time.perf_counter()
        with client.generate("Hi", max_tokens=1) as generation:
            next(generation)
            times.append((time.perf_counter() - begin) * 1e3)
            for _ in generation:
                pass
        time.sleep(EVERY_S)
    return times


def memory_mb(process: int) -> float:
    """Memory of a process, MB."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmRSS:"))


def measure(endpoint: str, process: int, name: str, rounds: int, count: int) -> dict[str, Any]:
    """A row: first tokens with the attack and without it, ms, and the server's growth, MB."""
    times: dict[str, list[float]] = {"without": [], "with": []}
    grown_mb = 0.0
    with Client(endpoint) as client:
        first_tokens(client, 5)
        for _ in range(rounds):
            times["without"] += first_tokens(client, count)
            before = memory_mb(process)
            with attacked(name, endpoint):
                times["with"] += first_tokens(client, count)
            time.sleep(1.0)  # for what the attack left behind to end
            grown_mb += memory_mb(process) - before
    return {
        "attack": name,
        "attackers": ATTACKS[name][1],
        "requests": len(times["with"]),
        **{f"{kind}_ms": _summary(found) for kind, found in times.items()},
        "server_grew_mb": round(grown_mb, 1),
    }


def _summary(values: Sequence[float]) -> dict[str, float]:
    return {"p50": round(quantiles(values, n=2)[0], 2), "max": round(max(values), 2)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all attacks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="attacks by name, with commas between them; all by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=40, help="of a round, with and without the attack each")
    parser.add_argument("--out", type=Path, help="JSON file; without it the figures are printed")
    parser.add_argument("--attack", choices=ATTACKS, help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.attack is not None:
        attack(options.attack, options.endpoint)
        return
    result: dict[str, Any] = {**host_conditions(), "rows": []}
    for name in options.only.split(",") if options.only else ATTACKS:
        with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as (endpoint, process):
            result["rows"].append(measure(endpoint, process, name, options.rounds, options.requests))
        print(json.dumps(result["rows"][-1]), file=sys.stderr)
    text = json.dumps(result, indent=1) + "\n"
    if options.out is None:
        print(text, end="")
    else:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
