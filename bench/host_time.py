"""What the host costs a step: microseconds of Python, and what a busy host does to the step's times.

    python -m bench.host_time

Without a GPU: a runtime over a step that costs nothing, so that all that is timed is the host's. On a GPU also: the
time to launch a step, the time from seeing a publication to launching the next step, and how even steps are, launched
one by one and looping on the device, while threads and processes keep the host's cores busy. One line of JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lowlat
from bench.clock import percentile
from lowlat import Runtime, RuntimeConfig, SamplingParams, SpeculativeConfig
from lowlat.graphs import Bucket, BufferSet
from lowlat.host.loading import Loaded, load
from lowlat.kernels.reference.step.publish import COMMITTED, LENGTH_AFTER, SLOT, VERIFIED, VERIFIED_DEPTH

__all__ = ["FreeExecutor", "Stopwatch", "measure_host"]

DEMO = Path(lowlat.__file__).parent / "demo"
DEPTH = 3
CONTEXT = 2048
STEPS = 400
RUN = 8  # steps that one sample of the device's time covers
LOOPS = 24  # loops queued together
BATCHES = 6
SLEEP_CYCLES = 1_000_000_000
MAX_LATE = 10
PROMPT = list(range(300, 364))


class Stopwatch:
    """Wraps an executor's `step` and `wait_published`: us from the end of a wait to the next launch, us of a launch."""

    def __init__(self, executor: Any) -> None:
        self.gaps_us: list[float] = []
        self.launches_us: list[float] = []
        self._seen = 0
        step, wait = executor.step, executor.wait_published

        def timed_step(bucket: Bucket) -> None:
            start = time.perf_counter_ns()
            step(bucket)
            end = time.perf_counter_ns()
            if self._seen:
                self.gaps_us.append((start - self._seen) / 1e3)
                self.launches_us.append((end - start) / 1e3)
            self._seen = 0

        def timed_wait(count: int) -> None:
            wait(count)
            self._seen = time.perf_counter_ns()

        executor.step, executor.wait_published = timed_step, timed_wait


class FreeExecutor:
    """An executor whose step is an entry of the ring and nothing else: every slot that joined gets DEPTH tokens."""

    name = "free"

    def __init__(self, inner: Any, *, asynchronous: bool) -> None:
        self.inner, self.device, self.asynchronous = inner, inner.device, asynchronous
        self.state: BufferSet = inner.state
        arrays = {name: self.state[name].numpy() for name in self.state if name.startswith("ring_")}
        self._head, self._records = arrays["ring_head"], arrays["ring_records"]
        self._ready = np.full(self._records.shape[1:], -1, self._records.dtype)
        arrays["ring_logprob_ids"].fill(-1)
        arrays["ring_tokens"][...] = np.arange(arrays["ring_tokens"].size).reshape(arrays["ring_tokens"].shape) % 4000

    def decode(self, num_slots: int) -> None:
        """Let slots 0 to num_slots - 1 take part in each step."""
        self._ready[:] = 0
        self._ready[:, SLOT] = -1
        for slot in range(num_slots):
            for column, value in ((SLOT, slot), (COMMITTED, DEPTH), (VERIFIED, DEPTH), (VERIFIED_DEPTH, DEPTH)):
                self._ready[slot, column] = value
            self._ready[slot, LENGTH_AFTER] = len(PROMPT)

    def step(self, bucket: Bucket) -> None:
        """Publish."""
        self._records[int(self._head[0]) % len(self._records)] = self._ready
        self._head[0] += 1

    def wait_published(self, count: int) -> None:
        """Everything is published at once."""

    def prefill(self, size: int, first: Bucket | None = None) -> None:
        """Publish, where a first token is asked for."""
        if first is not None:
            self.step(first)

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Release the buffers."""
        self.inner.close()


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """The median, the 99th percentile, the second over the first, and how many values."""
    p50, p99 = percentile(values, 50), percentile(values, 99)
    return {"p50": round(p50, 2), "p99": round(p99, 2), "ratio": round(p99 / p50, 3), "samples": len(values)}


def config_of(device: str) -> RuntimeConfig:
    """The runtime that is measured."""
    return RuntimeConfig(device=device, max_batch=4, max_context=CONTEXT)


def loaded_demo(config: RuntimeConfig) -> tuple[Loaded, SpeculativeConfig]:
    """The bundled pair."""
    speculative = SpeculativeConfig(model=DEMO / "head", num_speculative_tokens=DEPTH, strict=True)
    return load(DEMO / "target", speculative, config), speculative


def measure_host(num_slots: int, steps: int, *, asynchronous: bool) -> dict[str, Any]:
    """us of `Runtime.step` and us from a publication to the next launch, over a step that costs nothing."""
    config = config_of("cpu")
    loaded, speculative = loaded_demo(config)
    free = FreeExecutor(loaded.executor, asynchronous=asynchronous)
    watch = Stopwatch(free)
    with Runtime(replace(loaded, executor=free), config, speculative) as runtime:  # type: ignore[arg-type]
        params = SamplingParams(max_tokens=CONTEXT - len(PROMPT), ignore_eos=True)
        for _ in range(num_slots):
            runtime.submit(PROMPT, params)
        while runtime.scheduler.num_active < num_slots:
            runtime.step(DEPTH)
        free.decode(num_slots)
        times = []
        for _ in range(steps):
            start = time.perf_counter_ns()
            outputs = runtime.step()
            times.append((time.perf_counter_ns() - start) / 1e3)
            assert len(outputs) == num_slots
    return {"step_us": quantiles(times[8:]), "gap_us": quantiles(watch.gaps_us[8:])}


@contextmanager
def busy_host(num_threads: int, num_processes: int) -> Iterator[None]:
    """Threads of this process and other processes that spin."""
    over = threading.Event()

    def spin() -> None:
        while not over.is_set():
            sum(range(200))

    threads = [threading.Thread(target=spin, daemon=True) for _ in range(num_threads)]
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_processes)]
    for thread in threads:
        thread.start()
    time.sleep(0.5 if processes else 0.0)
    try:
        yield
    finally:
        over.set()
        for process in processes:
            process.kill()
            process.wait()
        for thread in threads:
            thread.join()


class Pace:
    """One slot that decodes on a GPU for as long as is wanted; us a step by the device's clock, over RUN steps each."""

    def __init__(self, runtime: Runtime) -> None:
        self.executor: Any = runtime.executor
        params = SamplingParams(max_tokens=CONTEXT - len(PROMPT), ignore_eos=True)
        runtime.submit(PROMPT, params)
        while not runtime.step(DEPTH):
            pass
        self.bucket = runtime.scheduler.choose_bucket(DEPTH)
        self.executor.synchronize()
        self.head = self.executor.state["ring_head"].numpy()
        self.late = 0

    def _reset(self) -> None:
        """Put the slot back to its start, on the executor's stream."""
        with torch.cuda.stream(self.executor.stream):
            self.executor.state["lengths"].fill_(len(PROMPT))
            self.executor.state["active"][:1] = 1

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.executor.stream)
        return event

    def loops(self, batches: int, sleep_cycles: int) -> list[float]:
        """Loops queued one behind the other while the device sleeps, so that the host has no part in what is timed."""
        found: list[float] = []
        while batches:
            self._reset()
            with torch.cuda.stream(self.executor.stream):
                torch.cuda._sleep(sleep_cycles)
            events = [self._record()]
            for _ in range(LOOPS):
                self.executor.start_loop(self.bucket, RUN)
                events.append(self._record())
            late = events[0].query()
            self.executor.synchronize()
            if late and self.late < MAX_LATE:
                self.late += 1  # the device woke up before all was queued
                continue
            found += [1e3 * before.elapsed_time(after) / RUN for before, after in pairwise(events)]
            batches -= 1
        return found

    def steps(self, samples: int) -> list[float]:
        """Steps of which each is launched when the one before was seen."""
        found = []
        for _ in range(samples):
            self._reset()
            before = self._record()
            for _ in range(RUN):
                count = int(self.head[0]) + 1
                self.executor.step(self.bucket)
                self.executor.wait_published(count)
            after = self._record()
            self.executor.synchronize()
            found.append(1e3 * before.elapsed_time(after) / RUN)
        return found


def measure_gpu(steps: int) -> dict[str, Any]:
    """Launch times, gaps, and the evenness of steps on a GPU."""
    config = replace(config_of("cuda"), device_loop=True, executor="graph", max_batch=1, dtype="bfloat16")
    loaded, speculative = loaded_demo(config)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "cores": len(os.sched_getaffinity(0))}
    watch = Stopwatch(loaded.executor)
    with Runtime(loaded, replace(config, device_loop=False), speculative) as runtime:
        params = SamplingParams(max_tokens=CONTEXT - len(PROMPT), ignore_eos=True, temperature=1.0, seed=1)
        while len(watch.gaps_us) < steps:
            runtime.submit(PROMPT, params)
            while runtime.busy:
                runtime.step()
        found["launch_us"], found["gap_us"] = quantiles(watch.launches_us), quantiles(watch.gaps_us)
        pace = Pace(runtime)
        pace.loops(1, SLEEP_CYCLES)  # warm-up
        for name, threads, processes in (("idle", 0, 0), ("threads", 2, 0), ("processes", 0, 2 * found["cores"])):
            with busy_host(threads, processes):
                found[f"{name}_loop_us"] = quantiles(pace.loops(BATCHES, SLEEP_CYCLES * (3 if threads else 1)))
                found[f"{name}_steps_us"] = quantiles(pace.steps(32 if threads else 4 * LOOPS))
        found["late_batches"] = pace.late
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="steps that are timed on the CPU; eight times on a GPU"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found: dict[str, Any] = {"torch": torch.__version__}
    for num_slots in (1, 4):
        for asynchronous in (False, True):
            name = f"slots_{num_slots}_{'ahead' if asynchronous else 'in_turn'}"
            found[name] = measure_host(num_slots, options.steps, asynchronous=asynchronous)
    if torch.cuda.is_available():
        found["gpu"] = measure_gpu(8 * options.steps)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
