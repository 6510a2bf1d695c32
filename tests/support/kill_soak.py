"""Servers and clients killed (SIGKILL) at random moments: what survives is whole and right, and nothing is left after.

python kill_soak.py --servers 60 --clients 120 --model-clients 20 --json FILE

servers        this process's clients, a blocking and an asyncio one, live on: each stream ends by ServerGone with a
               prefix of its tokens, and the next server on the same path serves them
clients        the server lives on, and so does a client of this process, whose streams must be whole
model-clients  the same with the bundled model on the reference executor, in this process: the blocks of the KV cache,
               and the tokens of the neighbours, which must be those of the model alone
"""

import argparse
import asyncio
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fake_engine import expected_tokens
from fake_process import await_fake, fake_process, start_fake
from raw_client import RawClient
from soak import num_descriptors, record, resident_bytes, start_worker, steady_growth

from lowlat.errors import ServerGone
from lowlat.ipc import AsyncClient, Client
from lowlat.ipc.limits import Limits
from lowlat.ipc.server import Server

NUM_STREAMS = 4
WARM_UP = 0.3  # of the rounds
SETTLE_S = 5.0
TARGET = Path(__file__).parents[2] / "lowlat" / "demo" / "target"
HEAD = TARGET.with_name("head")


class Books:
    """The books record a long-lived process's resources after each round; its own figures must not grow."""

    def __init__(self, pid: int, folder: Path) -> None:
        self.pid = pid
        self.folder = folder
        self.resident: list[int] = []
        self.descriptors: list[int] = []

    def note(self) -> None:
        """After a round: only the socket and its lock may lie in the folder, and no descriptor may be new."""
        names = {path.name for path in self.folder.iterdir()}
        assert names <= {"s.sock", "s.sock.lock"}, names
        settled = max(self.descriptors[:2], default=1 << 30)
        end = time.monotonic() + SETTLE_S
        while num_descriptors(self.pid) > settled and time.monotonic() < end:
            time.sleep(0.01)
        self.descriptors.append(num_descriptors(self.pid))
        self.resident.append(resident_bytes(self.pid))

    def to_dict(self) -> dict[str, Any]:
        warm_up = int(WARM_UP * len(self.resident))
        return {
            "descriptors": [self.descriptors[0], self.descriptors[-1]],
            "resident_mib": [round(self.resident[place] / 2**20, 2) for place in (0, warm_up, -1)],
            "growth_after_warm_up": round(steady_growth(self.resident, warm_up), 5),
        }


def kill_servers(folder: Path, kills: int, chooser: random.Random) -> dict[str, Any]:
    """Kill server after server; a tenth of them while they start."""
    endpoint = f"ipc://{folder}/s.sock"
    books = Books(os.getpid(), folder)
    slowest = 0.0
    num_streams = 0
    options = {"engine": {"step_s": 0.001, "tokens_per_step": 2, "max_running": 3}}
    client = Client(endpoint, connect_timeout_s=20.0)
    with asyncio.Runner() as runner:
        patient = AsyncClient(endpoint, connect_timeout_s=20.0)
        for number in range(kills):
            with start_fake(folder, **options) as server:
                if number % 10 == 9:
                    time.sleep(chooser.uniform(0.0, 0.2))
                    server.kill()
                    continue
                await_fake(server)
                prompts = [[1 + number % 900, place] for place in range(NUM_STREAMS)]
                killing = Killing(server, chooser.uniform(0.0, 0.15))
                if number % 2:
                    seconds = runner.run(ride_async(patient, prompts, killing))
                else:
                    seconds = ride(client, prompts, killing)
                slowest = max(slowest, seconds)
                num_streams += NUM_STREAMS
            books.note()
        runner.run(patient.close())
    with fake_process(folder, **options):
        check(client, [5, 6])
    client.close()
    assert slowest < 5.0, f"a client noticed after {slowest} s"
    return {"kills": kills, "streams": num_streams, "slowest_notice_s": round(slowest, 4), "client": books.to_dict()}


class Killing:
    """A server that dies after so long, counted from the first token."""

    def __init__(self, server: Any, delay_s: float) -> None:
        self.server = server
        self.delay_s = delay_s
        self.at = 0.0

    def begin(self) -> None:
        threading.Timer(self.delay_s, self._kill).start()

    def _kill(self) -> None:
        self.at = time.monotonic()
        self.server.kill()


def check(client: Client, prompt: Sequence[int]) -> None:
    """A request from beginning to end."""
    found = tuple(token for chunk in client.generate(prompt, max_tokens=40) for token in chunk.token_ids)
    assert found == expected_tokens(prompt, 40), (found, prompt)


def ride(client: Client, prompts: Sequence[Sequence[int]], killing: Killing) -> float:
    """Streams of a server that dies; returns the seconds from its death to the last stream's end."""
    check(client, [7, *prompts[0]])
    streams = [client.generate(prompt, max_tokens=3900) for prompt in prompts]
    killing.begin()
    for prompt, stream in zip(prompts, streams, strict=True):
        found: list[int] = []
        try:
            for chunk in stream:
                found.extend(chunk.token_ids)
        except ServerGone as error:
            check_gone(prompt, found, error)
        else:
            raise AssertionError("a stream outlived its server")
    return time.monotonic() - killing.at


async def ride_async(client: AsyncClient, prompts: Sequence[Sequence[int]], killing: Killing) -> float:
    """The same, all streams at once."""

    async def one(prompt: Sequence[int]) -> None:
        found: list[int] = []
        try:
            async for chunk in client.generate(prompt, max_tokens=3900):
                found.extend(chunk.token_ids)
        except ServerGone as error:
            check_gone(prompt, found, error)
        else:
            raise AssertionError("a stream outlived its server")

    await client.connect()
    killing.begin()
    await asyncio.gather(*(one(prompt) for prompt in prompts))
    return time.monotonic() - killing.at


def check_gone(prompt: Sequence[int], found: Sequence[int], error: ServerGone) -> None:
    assert error.token_ids == tuple(found)
    assert tuple(found) == expected_tokens(prompt, 3900)[: len(found)]


def kill_clients(folder: Path, kills: int, chooser: random.Random) -> dict[str, Any]:
    """Kill processes of clients next to one that goes on."""
    engine = {"step_s": 0.002, "tokens_per_step": 2, "max_running": 6}
    with fake_process(folder, engine=engine) as server, Client(f"ipc://{folder}/s.sock") as client:
        books = Books(server.pid, folder)
        killed = 0
        while killed < kills:
            wave = min(3, kills - killed)
            victims = [victim(client.endpoint, place, chooser) for place in range(wave)]
            stream = client.generate([3, killed], max_tokens=600)
            end_victims(victims, chooser)
            found = tuple(token for chunk in stream for token in chunk.token_ids)
            assert found == expected_tokens([3, killed], 600)
            killed += wave
            stats = await_rest(client.stats)
            assert stats["num_clients"] == 1, stats
            books.note()
        await_free(client.stats, 100)
    return {"kills": kills, "server": books.to_dict()}


def victim(endpoint: str, place: int, chooser: random.Random) -> Any:
    """A client that starts, runs, reads slowly or cancels: whatever it does when it is killed."""
    return start_worker(
        endpoint,
        api=chooser.choice(("blocking", "asyncio")),
        place=place,
        num_streams=chooser.randint(1, 4),
        max_tokens=chooser.choice((20, 200)),
        window=chooser.choice((4, 1024)),
        pause_s=chooser.choice((0.0, 0.05)),
        cancel_after=chooser.choice((3, 1 << 30)),
    )


def end_victims(victims: Sequence[Any], chooser: random.Random) -> None:
    for one in victims:
        if chooser.random() < 0.8:  # else it may still be connecting
            assert one.stdout.readline() == "ready\n"
            one.stdin.write("\n")
            one.stdin.flush()
    for one in victims:
        time.sleep(chooser.uniform(0.0, 0.15))
        one.kill()
        one.communicate()


def await_rest(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The figures when nothing is under way, which must soon be."""
    end = time.monotonic() + SETTLE_S
    while True:
        stats = ask()
        if stats["num_running"] == stats["num_waiting"] == 0 and stats["num_clients"] == 1:
            return stats
        assert time.monotonic() < end, stats
        time.sleep(0.005)


def await_free(ask: Callable[[], dict[str, Any]], num_free: int) -> None:
    end = time.monotonic() + SETTLE_S
    while (kv := ask()["engine"]["kv"])["num_free"] != num_free:
        assert time.monotonic() < end, kv
        time.sleep(0.01)


def kill_clients_of_the_model(folder: Path, kills: int, chooser: random.Random) -> dict[str, Any]:
    """The same with blocks and logits: a server in this process, and the bundled model."""
    from lowlat import Runtime, SamplingParams, SpeculativeConfig
    from lowlat.serving.engine import RuntimeEngine

    options: dict[str, Any] = {"max_batch": 3, "max_context": 256, "device": "cpu", "check": "all"}
    runtime = Runtime.load(TARGET, SpeculativeConfig(model=HEAD, num_speculative_tokens=3), **options)
    alone: list[list[int]] = []
    for seed in range(3):
        runtime.submit([11, 12, 13], SamplingParams(max_tokens=40, temperature=0.8, seed=seed, ignore_eos=True))
        alone.append([token for output in iterate(runtime) for token in output.token_ids])
    books = Books(os.getpid(), folder)
    killed = 0
    with Server(RuntimeEngine(runtime), None, f"ipc://{folder}/s.sock", Limits()) as server:
        raw = RawClient(server.endpoint)
        while killed < kills:
            wave = min(2, kills - killed)
            victims = [victim(server.endpoint, place, chooser) for place in range(wave)]
            seed = chooser.randrange(3)
            done = raw.submit(killed, [11, 12, 13], max_tokens=40, temperature=0.8, seed=seed, ignore_eos=True)
            end_victims(victims, chooser)
            raw.finish(done, timeout_s=60)
            assert list(done.token_ids) == alone[seed], (done.token_ids, alone[seed])
            killed += wave
            await_rest(raw.stats)
            end = time.monotonic() + SETTLE_S
            while runtime.busy:
                assert time.monotonic() < end
                time.sleep(0.01)
            runtime.kvcache.invariants()
            assert runtime.kvcache.stats().num_used == 0
            assert not runtime.slots()
            assert not any(runtime.summary()["checks"]["failed"].values())
            books.note()
        raw.close()
    return {"kills": kills, "blocks_used": 0, "server": books.to_dict()}


def iterate(runtime: Any) -> Any:
    while runtime.busy:
        yield from runtime.step()


PARTS: dict[str, Callable[[Path, int, random.Random], dict[str, Any]]] = {
    "servers": kill_servers,
    "clients": kill_clients,
    "model_clients": kill_clients_of_the_model,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for part, default in zip(PARTS, (60, 120, 20), strict=True):
        parser.add_argument(f"--{part.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", default=os.devnull)
    chosen = parser.parse_args()
    chooser = random.Random(chosen.seed)
    started = time.monotonic()
    figures: dict[str, Any] = {"kills": 0, "seed": chosen.seed}
    for part, run in PARTS.items():
        kills = getattr(chosen, part)
        if kills:
            with tempfile.TemporaryDirectory() as folder:
                figures[part] = run(Path(folder), kills, chooser)
            figures["kills"] += kills
    figures["seconds"] = round(time.monotonic() - started, 1)
    record(figures, chosen.json)


if __name__ == "__main__":
    main()
