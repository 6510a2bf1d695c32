"""One case of one engine, in a process that nothing else was loaded into: `COMMAND JOB OUT`, two files.

Engines start processes of their own, which import their parent's main module again, so there is none: `COMMAND` is a
line of Python. And the checkout leaves `sys.path` before an engine is imported, because its folder kernels/ would stand
in for Hugging Face's package.
"""

import resource
import sys
from pathlib import Path

import msgspec

from bench.peers.engine import Job, Measured
from bench.peers.engines import ENGINES
from bench.peers.results import PeerRow
from lowlat.executors.devices import leave_a_core
from lowlat.tools.bench.results import Memory, Spread, write_struct

__all__ = ["COMMAND", "main", "row_of"]

COMMAND = (sys.executable, "-c", "from bench.peers.worker import main; main()")

ROOT = Path(__file__).resolve().parents[2]


class GpuMemory:
    """The use of a GPU by all processes, at the start and when it is marked."""

    def __init__(self, device: str) -> None:
        self._device = device if device.startswith("cuda") else None
        self._before = self._used()
        self.grown: int | None = None

    def mark(self) -> None:
        """Take what the use grew by since the start."""
        if self._device is not None:
            self.grown = self._used() - self._before

    def _used(self) -> int:
        if self._device is None:
            return 0
        import torch

        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


def row_of(job: Job, version: str, measured: Measured, device_bytes: int | None) -> PeerRow:
    """The row of a case's samples."""
    repeats = measured.repeats
    steps = [ms for samples in repeats for ms in samples.step_ms]
    first = [ms for samples in repeats for ms in samples.first_ms]
    tokens, active = (sum(sum(getattr(samples, name)) for samples in repeats) for name in ("tokens", "active"))
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    peak = 1024 * max(resource.getrusage(kind).ru_maxrss for kind in kinds)
    return PeerRow(
        engine=job.engine,
        version=version,
        case=job.case,
        settings=measured.settings,
        num_steps=len(steps) * measured.steps_a_sample,
        steps_a_sample=measured.steps_a_sample,
        ms_per_step=Spread.of(steps),
        ms_per_token=Spread.of([ms for samples in repeats for ms in samples.token_ms]),
        first_token_ms=Spread.of(first) if first else None,
        tokens_per_s=round(1e3 * tokens / sum(steps), 3),
        accept_length=round(tokens / active, 5) if job.depth else None,
        memory=Memory(device_bytes=device_bytes, host_peak_bytes=peak),
    )


def main() -> None:
    """Measure the job in a file, and write its row into another."""
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
    leave_a_core()
    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Job)
    engine = ENGINES[job.engine]
    memory = GpuMemory(job.device)
    measured = engine.measure(job, memory.mark)
    write_struct(Path(sys.argv[2]), row_of(job, engine.available().version, measured, memory.grown))
