"""One case of `bench.tails`: requests one after the other, and the times at which steps come. It knows no file."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import pairwise
from typing import Any

import torch

from bench.clock import LEAD, time_replays
from bench.tails_result import Case, Tails
from lowlat.engine.runtime import Runtime
from lowlat.errors import LowlatError
from lowlat.ipc import Client
from lowlat.options.request import SamplingParams

__all__ = [
    "Arrivals",
    "Steps",
    "busy_host",
    "max_context",
    "measure",
    "own_times",
    "steps_in_process",
    "steps_of",
    "steps_through_socket",
]

LEFT_OUT = 3  # arrivals behind a first token: the join's, and those that stand behind it
WARM_UP = 1  # requests that are not timed
SPARE = 16  # positions of a context beside prompt and window
OWN_RUN = 64  # steps that are queued one behind the other
LOOK_EVERY = 64  # arrivals, for the limit of time
SPINNING_THREADS = 2

Steps = Generator[int, None, None]  # a request under way: the steps of each arrival, the first token's first


def max_context(context: int, window: int) -> int:
    """The context that a runtime needs for a prompt and a window behind it."""
    return context + window + SPARE


class Arrivals:
    """Takes the times of one case's arrivals, request by request.

    steps    timed steps that are wanted
    limit_s  seconds after which a request is given up; None: never
    """

    def __init__(self, case: Case, steps: int, limit_s: float | None) -> None:
        self._case, self._wanted, self._limit_s = case, steps, limit_s
        self._times_us: list[float] = []
        self._num_steps = self._num_requests = self._num_left_out = 0
        self._started = time.monotonic()

    @property
    def enough(self) -> bool:
        """Whether all steps were timed, or the time is over; one request is timed in any case."""
        return self._num_steps >= self._wanted or (self._late and self._num_requests > 0)

    @property
    def _late(self) -> bool:
        return self._limit_s is not None and time.monotonic() - self._started > self._limit_s

    def take(self, request: Steps) -> None:
        """Time one request's arrivals."""
        marks, steps = [], []
        with closing(request):
            for count in request:
                marks.append(time.perf_counter_ns())
                steps.append(count)
                if len(marks) % LOOK_EVERY == 0 and self._late:
                    break
        timed = marks[LEFT_OUT:]
        self._times_us += [(after - before) / 1e3 for before, after in pairwise(timed)]
        self._num_steps += sum(steps[LEFT_OUT + 1 :])
        self._num_left_out += sum(steps[1 : LEFT_OUT + 1])
        self._num_requests += 1

    def row(self) -> Tails:
        """The figures. Raises LowlatError where requests were too short for any."""
        if not self._times_us:
            raise LowlatError(f"no request of {self._case.name} had more than {LEFT_OUT + 1} steps (--window)")
        return Tails.of(
            self._case,
            self._times_us,
            self._num_steps,
            num_requests=self._num_requests,
            num_left_out=self._num_left_out,
            seconds=time.monotonic() - self._started,
            limit_s=self._limit_s,
        )


def measure(case: Case, request: Callable[[], Steps], steps: int, limit_s: float | None) -> Tails:
    """One request after the other, after one to warm up, until so many steps were timed or the time is over."""
    for _ in range(WARM_UP):
        for _ in request():
            pass
    arrivals = Arrivals(case, steps, limit_s)
    while not arrivals.enough:
        arrivals.take(request())
    return arrivals.row()


def steps_of(token_ids: Sequence[int], num_accepted: int) -> int:
    """The steps that brought so many tokens: each brings one that was not drafted."""
    return max(1, len(token_ids) - num_accepted) if token_ids else 0


def steps_in_process(runtime: Runtime, prompt: Sequence[int], window: int) -> Steps:
    """Run a request by `Runtime.step`; the steps that each call brought, the first token's first."""
    name = runtime.submit(prompt, SamplingParams(max_tokens=window, ignore_eos=True))
    ended = False
    try:
        while not ended:
            outputs = runtime.step()
            ended = any(output.finish_reason for output in outputs)
            count = sum(bool(output.token_ids) for output in outputs)
            if count:
                yield count
    finally:
        if not ended:
            runtime.cancel(name)
        while runtime.busy:
            runtime.step()


def steps_through_socket(client: Client, prompt: Sequence[int], window: int) -> Steps:
    """Run a request by a server; the steps that each message brought, the first token's first."""
    with client.generate(prompt, max_tokens=window, ignore_eos=True) as chunks:
        for chunk in chunks:
            if chunk.token_ids:
                yield steps_of(chunk.token_ids, sum(chunk.accepted))


def own_times(case: Case, runtime: Runtime, prompt: Sequence[int], window: int) -> Tails:
    """The device's own time of the steps of a window, queued one behind the other, by its own clock.

    The runtime cannot be used afterwards: its executor has run without it.
    """
    executor: Any = runtime.executor
    cuda = executor.device.type == "cuda"
    started, times_us = time.monotonic(), list[float]()
    runtime.submit(prompt, SamplingParams(max_tokens=window, ignore_eos=True))
    depth = runtime.num_speculative_tokens
    while not runtime.scheduler.num_active:
        runtime.step(depth)
    bucket = runtime.scheduler.choose_bucket(depth)
    executor.synchronize()
    lengths = executor.state["lengths"]
    first = int(lengths[0])
    with torch.cuda.stream(executor.stream) if cuda else torch.inference_mode():
        while (count := min(OWN_RUN, (first + window - int(lengths[0])) // (depth + 1) - LEAD)) > 0:
            times_us += [1e3 * ms for ms in time_replays(lambda: executor.step(bucket), count, executor.device)]
            executor.synchronize()
    return Tails.of(
        case,
        times_us,
        len(times_us),
        num_requests=1,
        num_left_out=0,
        seconds=time.monotonic() - started,
        limit_s=None,
    )


@contextmanager
def busy_host(case: Case, num_processes: int) -> Iterator[None]:
    """Keep the host busy as the case says: other processes, or threads of this one, that spin."""
    over = threading.Event()

    def spin() -> None:
        while not over.is_set():
            sum(range(200))

    count = SPINNING_THREADS if case.host == "threads" else 0
    threads = [threading.Thread(target=spin, daemon=True) for _ in range(count)]
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(num_processes if case.host == "busy" else 0)]
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
