"""The cost of a slow, a killed and a malicious client to the others: their inter-token p99 with and without them.

python bad_clients.py --rounds 5 --json FILE. Steps take 20 ms. Rounds of three kinds alternate in one server, which
begins again with none; the good streams hold their slots all the time.

without    no bad ones
elsewhere  the bad ones attack a second server as they attack this one in the next round: so their own processes, and
           the attacked server, take as much from a machine of few cores in both rounds
with       the bad ones are this server's clients

So p99_change_in_all, of `with` over `without`, is their whole cost to the others, and p99_change, of `with` over
`elsewhere`, the part of it that comes through the server. The bad ones and the second server have the last core, this
server and the good ones the others: where they share one, the system's scheduler lets any busy program delay another by
its time slice, whatever the server does (--any-core lets all run everywhere).

slow       reads a chunk of its four streams every 100 ms, with a window of 4 tokens; another reads nothing at all
killed     a process that submits, and is killed, again and again (forked, so that starting Python costs nobody)
malicious  sends the frames of bad_frames until it is dropped, floods of questions, requests that cannot be, bytes that
           are no ZeroMQ; and comes again after 10 ms
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Any

import zmq
from fake_process import fake_process
from raw_client import RawClient
from soak import milliseconds, percentile, record, start_worker

from lowlat.ipc import Client
from lowlat.ipc.wire import Bye, Error, Health, Sampling, Submit, encode, pack_tokens

STEP_S = 0.02
NUM_GOOD = 4
NUM_SLOTS = 8
PAUSE_S = 0.01  # between two attacks, on average: a process that takes a whole core slows others without a server, too
TABLE = Path(__file__).parents[1] / "ipc" / "bad_frames" / "v1.json"


def slow(endpoint: str) -> None:
    """Two that do not read as fast as tokens come."""
    deaf = RawClient(endpoint, rcvhwm=1, rcvbuf=4096)
    deaf.submit(1, [990], max_tokens=3000)
    with Client(endpoint, window=4) as client:
        streams = [client.generate([991, number], max_tokens=3000) for number in range(4)]
        while True:
            for stream in streams:
                next(stream)
                time.sleep(0.1)


def killed(endpoint: str) -> None:
    """One that dies with requests under way, fifteen times a second."""
    chooser = random.Random(1)
    while True:
        child = os.fork()
        if child == 0:
            with suppress(BaseException), Client(endpoint) as client:
                streams = [client.generate([992, number], max_tokens=3000) for number in range(3)]
                while True:
                    for stream in streams:
                        next(stream)
            os._exit(0)
        time.sleep(chooser.uniform(0.0, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def malicious(endpoint: str) -> None:
    """One that means ill."""
    chooser = random.Random(2)
    table: list[list[bytes]] = []
    for entry in json.loads(TABLE.read_text()):
        frames = [
            b"".join(bytes.fromhex(p) if isinstance(p, str) else bytes.fromhex(p[0]) * p[1] for p in parts)
            for parts in entry["frames"]
        ]
        if frames:  # nothing at all cannot be sent
            table.append(frames)
    attacks = (send_bad_frames, flood, impossible, no_zeromq)
    while True:
        with suppress(TimeoutError, zmq.ZMQError, OSError):
            chooser.choice(attacks)(endpoint, chooser, table)
        time.sleep(chooser.uniform(0.0, 2 * PAUSE_S))


def send_bad_frames(endpoint: str, chooser: random.Random, table: list[list[bytes]]) -> None:
    client = RawClient(endpoint)
    try:
        for _ in range(50):
            client.say_raw(*chooser.choice(table))
            message = client.receive(1.0)
            if isinstance(message, Bye):
                return
    finally:
        client.close()


def flood(endpoint: str, chooser: random.Random, table: list[list[bytes]]) -> None:
    client = RawClient(endpoint)
    question = encode(Health(1))
    try:
        for _ in range(20_000):
            client.socket.send(question, zmq.NOBLOCK)
        while not isinstance(client.receive(1.0), Bye):
            pass
    finally:
        client.close()


def impossible(endpoint: str, chooser: random.Random, table: list[list[bytes]]) -> None:
    client = RawClient(endpoint)
    try:
        for number in range(200):
            client.say(Submit(number, 1000, Sampling(max_tokens=1 << 30)), pack_tokens([1] * chooser.randint(1, 5000)))
            if not isinstance(client.receive(1.0), Error):
                return
    finally:
        client.close()


def no_zeromq(endpoint: str, chooser: random.Random, table: list[list[bytes]]) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(endpoint.removeprefix("ipc://"))
        connection.sendall(chooser.randbytes(chooser.randint(1, 10_000)))


BAD = {"slow": slow, "killed": killed, "malicious": malicious}


def forked(name: str, endpoint: str, cores: set[int]) -> int:
    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)
            os.sched_setaffinity(0, cores)
            BAD[name](endpoint)
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(1)
    return child


def measure(
    endpoint: str, place: int, seconds: float, bad: list[str], attacked: str, cores: set[int]
) -> dict[str, Any]:
    """A round: the good streams' times between tokens, ms, while the bad ones do what they do to a server."""
    children: list[int] = []
    options = {"place": place, "num_streams": NUM_GOOD, "requests": 1, "max_tokens": 4000, "num_seconds": seconds + 1}
    good = start_worker(endpoint, api="blocking", **options)
    try:
        assert good.stdout is not None
        assert good.stdin is not None
        assert good.stdout.readline() == "ready\n"
        good.stdin.write("\n")
        good.stdin.flush()
        time.sleep(0.5)
        children = [forked(name, attacked, cores) for name in bad]
        found = json.loads(good.communicate(timeout=seconds + 60)[0])
        alive = [name for name, child in zip(bad, children, strict=True) if os.waitpid(child, os.WNOHANG) == (0, 0)]
    finally:
        good.kill()
        for child in children:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
    assert not (found["lost"] or found["doubled"] or found["reordered"]), found
    assert alive == bad, f"of the bad ones only {alive} lasted"
    gaps = milliseconds(found["gaps_us"])
    return {"p50": percentile(gaps, 0.5), "p99": percentile(gaps, 0.99), "max": max(gaps), "num_gaps": len(gaps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a round")
    parser.add_argument("--bad", default="slow,killed,malicious")
    parser.add_argument("--any-core", action="store_true", help="all may run on all cores")
    parser.add_argument("--log", action="store_true", help="show the server's log")
    parser.add_argument("--json", default=os.devnull)
    chosen = parser.parse_args()
    bad = chosen.bad.split(",")
    all_cores = os.sched_getaffinity(0)
    cores = all_cores if chosen.any_core else {max(all_cores)}
    good_cores = (all_cores - cores) or all_cores
    engine = {"step_s": STEP_S, "max_running": NUM_SLOTS, "max_context": 5000}
    rounds: dict[str, list[dict[str, Any]]] = {"without": [], "elsewhere": [], "with": []}
    stderr = None if chosen.log else subprocess.DEVNULL
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory() as other_folder,
        ExitStack() as servers,
    ):
        for each, where in ((other_folder, cores), (folder, good_cores)):
            os.sched_setaffinity(0, where)  # inherited: by this server, and after the last by the good ones
            servers.enter_context(fake_process(Path(each), stderr, engine=engine))
        endpoint, other = f"ipc://{folder}/s.sock", f"ipc://{other_folder}/s.sock"
        kinds: tuple[tuple[str, list[str], str], ...] = (
            ("without", [], endpoint),
            ("elsewhere", bad, other),
            ("with", bad, endpoint),
        )
        for number in range(chosen.rounds):
            for name, present, attacked in kinds:
                rounds[name].append(measure(endpoint, number, chosen.seconds, present, attacked, cores))
                print(name, rounds[name][-1], file=sys.stderr)
                time.sleep(1.0)
        client = RawClient(endpoint)
        stats = client.stats()
        client.close()
    p99 = {name: median(one["p99"] for one in found) for name, found in rounds.items()}
    figures = {
        "bad": bad,
        "cores": len(all_cores),
        "cores_of_bad": len(cores),
        "step_ms": STEP_S * 1000,
        "good_streams": NUM_GOOD,
        "inter_token_ms": rounds,
        "median_p99_ms": p99,
        "p99_change": p99["with"] / p99["elsewhere"] - 1.0,
        "p99_change_in_all": p99["with"] / p99["without"] - 1.0,
        "server": {
            name: stats[name] for name in ("num_requests", "num_bad_messages", "num_dropped_peers", "ends", "refusals")
        },
    }
    record(figures, chosen.json)


if __name__ == "__main__":
    main()
