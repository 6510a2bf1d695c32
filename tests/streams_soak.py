"""Many streams of many processes at once: nothing lost, doubled or reordered, the tokens those of the engine itself.

python streams_soak.py --tokens 1000000 --json FILE. Half of the processes use Client with a thread a stream, half
AsyncClient.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from fake_process import fake_process
from soak import percentile, record, start_worker

STEP_S = 0.001


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="in all, at least")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--streams", type=int, default=8, help="of each process")
    parser.add_argument("--json", default=os.devnull)
    chosen = parser.parse_args()
    num_streams = chosen.processes * chosen.streams
    max_tokens = -(-chosen.tokens // num_streams)
    engine = {"step_s": STEP_S, "max_running": num_streams, "max_context": max_tokens + 64}
    workers = []
    with tempfile.TemporaryDirectory() as folder, fake_process(Path(folder), engine=engine):
        try:
            for place in range(chosen.processes):
                api = ("blocking", "asyncio")[place % 2]
                options = {"place": place, "num_streams": chosen.streams, "requests": 1, "max_tokens": max_tokens}
                workers.append(start_worker(f"ipc://{folder}/s.sock", api=api, **options))
            for worker in workers:
                assert worker.stdout is not None
                assert worker.stdout.readline() == "ready\n"
            started = time.perf_counter()
            for worker in workers:
                assert worker.stdin is not None
                worker.stdin.write("\n")
                worker.stdin.flush()
            founds = [json.loads(worker.communicate(timeout=570)[0]) for worker in workers]
            seconds = time.perf_counter() - started
        finally:
            for worker in workers:
                worker.kill()
    totals = {
        name: sum(found[name] for found in founds)
        for name in ("num_streams", "num_tokens", "num_chunks", "lost", "doubled", "reordered")
    }
    gaps = [gap / 1000 for found in founds for gap in found["gaps_us"]]
    first = [gap / 1000 for found in founds for gap in found["first_us"]]
    figures = {
        "processes": chosen.processes,
        "step_ms": STEP_S * 1000,
        **totals,
        "seconds": round(seconds, 2),
        "tokens_per_s": round(totals["num_tokens"] / seconds),
        "tokens_per_chunk": round(totals["num_tokens"] / totals["num_chunks"], 3),
        "first_token_ms": {"p50": percentile(first, 0.5), "p99": percentile(first, 0.99)},
        "between_chunks_ms": {"p50": percentile(gaps, 0.5), "p99": percentile(gaps, 0.99), "max": max(gaps)},
    }
    record(figures, chosen.json)


if __name__ == "__main__":
    main()
