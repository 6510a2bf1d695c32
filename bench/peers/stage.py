"""A subject's steps as `lowlat bench run` measures them, by `CaseRun`: one runtime at a time, cases that share it."""

import gc
from collections.abc import Sequence

import torch

from lowlat.engine.runtime import Runtime
from lowlat.executors.devices import leave_a_core
from lowlat.tools.bench.measure import CaseRun, room_of
from lowlat.tools.bench.run import measure_wall_of
from lowlat.tools.bench.scenarios import Case, Scenario
from lowlat.tools.bench.subject import Subject

__all__ = ["Stage"]

BLOCK_SIZE = 32
EXTRA_ROWS = 64  # a step's rows after a request's last token, at most


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
