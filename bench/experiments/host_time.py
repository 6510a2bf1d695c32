"""The host's own work in a step: microseconds of `Runtime.step` over a step that costs nothing.

    python -m bench.experiments.host_time

A device's step must take longer than this: then the next step is always launched in time (`ahead`), and the device
never waits for the host. `in_turn` is an executor whose steps have ended when they return; there `gap_us` passes
between the end of a step and the next launch. On a GPU also the time to launch a step of the bundled pair. One line of
JSON.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lowlat
from bench.lib.clock import percentile
from lowlat import Runtime, RuntimeConfig, SamplingParams, SpeculativeConfig
from lowlat.engine.loading import Loaded, load
from lowlat.graphs import Bucket, BufferSet
from lowlat.kernels.reference.step.publish import COMMITTED, LENGTH_AFTER, SLOT, VERIFIED, VERIFIED_DEPTH

__all__ = ["FreeExecutor", "Stopwatch", "measure_host"]

DEMO = Path(lowlat.__file__).parent / "demo"
DEPTH = 3
CONTEXT = 2048
STEPS = 400
PROMPT = list(range(300, 364))


class Stopwatch:
    """Times an executor's `step` and `wait_published`: us from the end of a wait to the next launch, us of a launch."""

    def __init__(self, executor: Any) -> None:
        self.gaps_us: list[float] = []
        self.launches_us: list[float] = []
        self._seen = 0
        step, wait = executor.step, executor.wait_published

        def timed_step(bucket: Bucket, meanwhile: Callable[[], None] | None = None) -> None:
            start = time.perf_counter_ns()
            step(bucket, meanwhile)
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
    """An executor whose step is an entry of the ring and nothing else: every slot that joined gets DEPTH tokens.

    The entry is there when it is waited for; a step is as long as the host takes until then.
    """

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

    def step(self, bucket: Bucket, meanwhile: Callable[[], None] | None = None) -> None:
        """Do nothing: the entry is made by `wait_published`."""

    def wait_until(self, seen: Callable[[], bool]) -> None:
        """Return at once: no request has a grammar."""

    def wait_for_ranks(self, count: int) -> None:
        """Return at once: there is one rank."""

    def wait_published(self, count: int) -> None:
        """Publish entries up to this count."""
        while self._head[0] < count:
            self._records[int(self._head[0]) % len(self._records)] = self._ready
            self._head[0] += 1

    def prefill(self, size: int, first: Bucket | None = None, passes: int = 0) -> None:
        """Publish an entry, where a first token is asked for."""
        if first is not None:
            self.wait_published(int(self._head[0]) + 1)

    def write_state(self, values: Mapping[str, torch.Tensor]) -> None:
        """Do nothing: no step reads the state."""

    def clear_blocks(self, blocks: Sequence[int], pool: str = "") -> None:
        """Do nothing."""

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


def loaded_demo(config: RuntimeConfig) -> Loaded:
    """The bundled pair."""
    speculative = SpeculativeConfig(model=DEMO / "head", num_speculative_tokens=DEPTH, strict=True)
    return load(DEMO / "target", speculative, config)


def measure_host(num_slots: int, steps: int, *, asynchronous: bool) -> dict[str, Any]:
    """us of `Runtime.step` over a step that costs nothing; in turn, also us from a step's end to the next launch."""
    config = config_of("cpu")
    loaded = loaded_demo(config)
    free = FreeExecutor(loaded.executor, asynchronous=asynchronous)
    watch = Stopwatch(free)
    with Runtime(replace(loaded, executor=free), config) as runtime:  # type: ignore[arg-type]
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
    gap = {} if asynchronous else {"gap_us": quantiles(watch.gaps_us[8:])}
    return {"step_us": quantiles(times[8:]), **gap}


def measure_launch(steps: int) -> dict[str, Any]:
    """us to launch a captured step of the bundled pair."""
    config = replace(config_of("cuda"), executor="graph", max_batch=1, dtype="bfloat16")
    loaded = loaded_demo(config)
    watch = Stopwatch(loaded.executor)
    with Runtime(loaded, config) as runtime:
        params = SamplingParams(max_tokens=CONTEXT - len(PROMPT), ignore_eos=True, temperature=1.0, seed=1)
        while len(watch.launches_us) < steps:
            runtime.submit(PROMPT, params)
            while runtime.busy:
                runtime.step()
    return {"device": torch.cuda.get_device_name(), "launch_us": quantiles(watch.launches_us)}


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
        found["gpu"] = measure_launch(8 * options.steps)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
