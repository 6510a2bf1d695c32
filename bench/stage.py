"""The stage of the suites: the pair that is measured, one runtime of it at a time, and a case of steps as samples.

Steps are run and summed up as `lowlat bench run` does it, by `CaseRun`; the suites add what pytest-benchmark gives:
raw samples, storage, comparison, and a failure where a figure became worse.
"""

import argparse
import gc
import subprocess
from collections.abc import Sequence
from typing import Any

import torch

from bench.lib.conditions import stamps_of
from lowlat.engine.runtime import Runtime
from lowlat.executors.devices import leave_a_core
from lowlat.tools.bench.machine import processor
from lowlat.tools.bench.measure import CaseRun, room_of
from lowlat.tools.bench.results import Row
from lowlat.tools.bench.run import measure_wall_of
from lowlat.tools.bench.scenarios import Case, Scenario
from lowlat.tools.bench.subject import Subject

__all__ = ["Stage", "describe_machine", "suite_cases"]

BLOCK_SIZE = 32
EXTRA_ROWS = 64  # a step's rows after a request's last token, at most
SMALL, BUNDLED, LARGE = 64, 512, 8192  # tokens of a prompt: on a CPU, of the bundled pair on a GPU, else
FIRST_TOKEN_PROMPTS = 4  # lengths, each an eighth of the next
CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit", "temperature.gpu")


def suite_cases(kind: str, options: argparse.Namespace) -> list[Case]:
    """The cases that the options name: steps without drafts, cycles with them, or prompts of single requests."""
    contexts = options.context or (_context(options),)
    if kind == "prompt_case":
        lengths = options.context or tuple(max(1, contexts[0] >> 3 * place) for place in range(FIRST_TOKEN_PROMPTS))
        return [Case(length, 1, depth) for depth in (0, *options.depth) for length in lengths]
    depths = (0,) if kind == "step_case" else options.depth
    return [Case(context, batch, depth) for depth in depths for context in contexts for batch in options.batch]


def _context(options: argparse.Namespace) -> int:
    if options.device == "cpu" or not torch.cuda.is_available():
        return SMALL
    return BUNDLED if options.geometry is None and options.model is None else LARGE


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Code, versions, GPU, driver and clocks."""
    info: dict[str, Any] = {"processor": processor(), "lowlat": stamps_of(device)}
    if device.type == "cuda":
        asked = f"--query-gpu={','.join(CLOCKS)}"
        command = ["nvidia-smi", asked, "--format=csv,noheader,nounits", f"--id={device.index or 0}"]
        shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        info["gpu"] = torch.cuda.get_device_name(device)
        info["clocks"] = dict(zip(CLOCKS, (part.strip() for part in shown.split(",")), strict=False))
    return info


class Stage:
    """A subject, its last runtime, and the GPU's bandwidth; steps, warm-up and repeats of a case.

    wall_gb_per_s  None without a GPU
    """

    def __init__(
        self, subject: Subject, rounds: int | None = None, warm_up: int | None = None, repeats: int = 1
    ) -> None:
        leave_a_core()
        self.subject, self.repeats = subject, repeats
        self.choice = subject.choice()
        on_gpu = self.choice.device.type == "cuda"
        self.rounds: int = rounds or (300 if on_gpu else 30)
        self.warm_up = warm_up or (16 if on_gpu else 3)
        self.wall_gb_per_s = measure_wall_of(self.choice)
        self._runtime: Runtime | None = None
        self._key: tuple[Case, ...] = ()

    def runtime(self, cases: Sequence[Case]) -> Runtime:
        """A runtime with room for any of these cases, all of one depth; kept for the same cases."""
        key = tuple(sorted(cases, key=lambda case: (case.context, case.batch)))
        if self._runtime is None or key != self._key:
            self.close()
            sizes = [case.context + room_of(case, self._scenario(case), device_loop=False) for case in key]
            needed = (case.batch * -(-(size + EXTRA_ROWS) // BLOCK_SIZE) for case, size in zip(key, sizes, strict=True))
            self._key = key
            self._runtime = self.subject.load(
                key[0].num_speculative_tokens,
                max_batch=max(case.batch for case in key),
                max_context=max(sizes),
                block_size=BLOCK_SIZE,
                kv_blocks=max(needed) + 1,
                prefix_reuse=False,
            )
        return self._runtime

    def run(self, case: Case, cases: Sequence[Case]) -> CaseRun:
        """A case whose repeats were run; `cases` share the runtime. Raises LowlatError where it fails."""
        run = CaseRun(
            self.runtime([other for other in cases if other.num_speculative_tokens == case.num_speculative_tokens]),
            case,
            self._scenario(case),
            self.subject.prompts,
            wall_gb_per_s=self.wall_gb_per_s,
        )
        for _ in range(self.repeats):
            run.repeat()
        return run

    def steps(self, case: Case, cases: Sequence[Case]) -> tuple[list[float], Row]:
        """Milliseconds of each timed step of a case, and its row."""
        run = self.run(case, cases)
        return [ms for samples in run.samples for ms in samples.step_ms], run.row()

    def _scenario(self, case: Case) -> Scenario:
        return Scenario(
            contexts=(case.context,),
            batches=(case.batch,),
            num_speculative_tokens=(case.num_speculative_tokens,),
            steps=self.rounds,
            warm_up=self.warm_up,
            repeats=self.repeats,
        )

    def close(self) -> None:
        """Close the runtime and give its memory back."""
        if self._runtime is not None:
            self._runtime.close()
        self._runtime = None
        gc.collect()
        if self.choice.device.type == "cuda":
            torch.cuda.empty_cache()
