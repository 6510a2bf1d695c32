"""Many streams of many processes at once: nothing lost, doubled or reordered, the tokens those of the engine itself.

python streams_soak.py --tokens 1000000 --json FILE; --tokens 100000000 --seconds 3000 goes on for so long at most, with
one request of a stream after the other. Half of the processes use Client with a thread a stream, half AsyncClient.
"""

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from pathlib import Path

from fake_process import fake_process
from soak import milliseconds, percentile, record, start_worker

STEP_S = 0.001
MAX_REQUEST = 20_000  # tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="in all, at least")
    parser.add_argument("--seconds", type=float, default=None, help="no request begins after so long")
    parser.add_argument("--tokens-per-step", type=int, default=1, help="that a stream gets, as speculation would bring")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--streams", type=int, default=8, help="of each process")
    parser.add_argument("--json", default=os.devnull)
    chosen = parser.parse_args()
    num_streams = chosen.processes * chosen.streams
    requests = -(-chosen.tokens // (num_streams * MAX_REQUEST))
    max_tokens = -(-chosen.tokens // (num_streams * requests))
    engine = {
        "step_s": STEP_S,
        "tokens_per_step": chosen.tokens_per_step,
        "max_running": num_streams,
        "max_context": max_tokens + 64,
    }
    request = {"requests": requests, "max_tokens": max_tokens, "until_s": chosen.seconds}
    workers = []
    with tempfile.TemporaryDirectory() as folder, fake_process(Path(folder), engine=engine):
        try:
            for place in range(chosen.processes):
                api = ("blocking", "asyncio")[place % 2]
                options = {"place": place, "num_streams": chosen.streams, **request}
                workers.append(start_worker(f"ipc://{folder}/s.sock", api=api, **options))
            for worker in workers:
                assert worker.stdout is not None
                assert worker.stdout.readline() == "ready\n"
            started = time.perf_counter()
            for worker in workers:
                assert worker.stdin is not None
                worker.stdin.write("\n")
                worker.stdin.flush()
            founds = [json.loads(worker.communicate()[0]) for worker in workers]
            seconds = time.perf_counter() - started
        finally:
            for worker in workers:
                worker.kill()
    totals = {
        name: sum(found[name] for found in founds)
        for name in ("num_requests", "num_tokens", "num_chunks", "lost", "doubled", "reordered")
    }
    gaps, first = (
        milliseconds(sum(map(Counter, (found[name] for found in founds)), Counter[str]()))
        for name in ("gaps_us", "first_us")
    )
    figures = {
        "processes": chosen.processes,
        "step_ms": STEP_S * 1000,
        "tokens_per_step": chosen.tokens_per_step,
        "num_streams": num_streams,
        **totals,
        "seconds": round(seconds, 2),
        "tokens_per_s": round(totals["num_tokens"] / seconds),
        "tokens_per_chunk": round(totals["num_tokens"] / totals["num_chunks"], 3),
        "first_token_ms": {"p50": percentile(first, 0.5), "p99": percentile(first, 0.99)},
        "between_chunks_ms": {"p50": percentile(gaps, 0.5), "p99": percentile(gaps, 0.99), "max": gaps[-1]},
    }
    record(figures, chosen.json)


if __name__ == "__main__":
    main()
