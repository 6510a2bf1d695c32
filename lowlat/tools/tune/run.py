"""This module runs `lowlat tune`: it collects launches, times plans within a budget, and writes the table."""

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lowlat.errors import ConfigError
from lowlat.kernels.attention.launch_plan import AttentionPlan
from lowlat.kernels.attention.tile_counts import TileCounts
from lowlat.kernels.toolchain.kernel import H200, Gpu
from lowlat.kernels.tuning.choice import file_name, find_table
from lowlat.kernels.tuning.table import TuningTable, read_table
from lowlat.options.directories import tuning_directory
from lowlat.tools.precompile import compile_all
from lowlat.tools.tune.cases import contexts_of, tile_counts
from lowlat.tools.tune.estimates import Estimates
from lowlat.tools.tune.pairs import Pair, Sizes, every_part
from lowlat.tools.tune.results import table_of, write_table
from lowlat.tools.tune.shapes import KINDS, Shape, calls_by_plan, collect
from lowlat.tools.tune.sweep import Swept, sweep
from lowlat.tools.tune.times import times_of

if TYPE_CHECKING:
    import torch

__all__ = [
    "Compiled",
    "Tuned",
    "Walked",
    "by_use",
    "compile_plans_of",
    "counted",
    "kinds_of",
    "known_plans",
    "lacking",
    "listed",
    "tune",
]

WALL_BYTES, WALL_REPLAYS = 1 << 30, 10

Update = Callable[[int, int | None], None]
Bar = Callable[[str], AbstractContextManager[Update | None]]


@dataclass(frozen=True)
class Tuned:
    """A run's result.

    gpu_name  of the GPU
    swept      launches whose plans were timed
    left       launches that the budget did not allow
    left_s     seconds that these are thought to take
    table      as it was written, other entries of the file included
    path       of the file
    seconds    that it took
    """

    gpu_name: str
    swept: tuple[Swept, ...]
    left: tuple[Shape, ...]
    left_s: float
    table: TuningTable
    path: Path
    seconds: float


def kinds_of(command: str) -> tuple[str, ...]:
    """The kinds of launches that a command tunes."""
    return KINDS[command] if command in KINDS else tuple(kind for kinds in KINDS.values() for kind in kinds)


def listed(pairs: Sequence[Pair], command: str, sizes: Sequence[Sizes], gpu: Gpu = H200) -> list[Shape]:
    """The launches of runtimes of these sizes that a command would time for a GPU, with their plans; nothing runs."""
    kinds, rest = kinds_of(command), KINDS["attention"]
    whole = [part for pair in pairs for each in sizes for part in every_part(pair, gpu, each.with_prompts(pair.config))]
    found = collect(whole, gpu, [k for k in kinds if k not in rest])
    if set(rest) <= set(kinds):
        each_size = [
            (pair, each)
            for pair in {pair.attending: pair for pair in pairs}.values()
            for heads in pair.split_heads
            for runtime in sizes
            for each in runtime.of_attention(pair.tensor_parallel_size, heads)
        ]
        parts = [part for pair, each in each_size for part in every_part(pair, gpu, each, prompts=False)]
        found += collect(parts, gpu, rest)
    return found


def known_plans(gpu_name: str, gpu: Gpu, out: Path | None) -> TuningTable | None:
    """The table whose launches are not missing: the file's, or without one what runtimes on the GPU take, the shipped
    table's and the user's own; None where there is none. Raises ConfigError for a file that is no table."""
    if out is not None:
        return read_table(out) if out.exists() else None
    return find_table(gpu_name, gpu, tuning_directory())


def by_use(shapes: Sequence[Shape]) -> list[Shape]:
    """Launches in the order in which they are tuned: those that steps have most of first."""
    return sorted(shapes, key=lambda shape: -shape.uses)


def lacking(shapes: Sequence[Shape], known: TuningTable | None) -> list[Shape]:
    """The launches that have no entry in a table: all where there is none."""
    return [shape for shape in shapes if known is None or known.find(*shape.place) is None]


@dataclass(frozen=True)
class Walked:
    """The tiles that a launch of attention walks where all slots have a context, and rows are a chain.

    row_tiles  of the plan: what else it may choose does not change them
    """

    key: str
    context: int
    row_tiles: int
    counts: TileCounts

    def to_dict(self) -> dict[str, int | str]:
        """The fields, the counts among them."""
        return {"shape": self.key, "context": self.context, "row_tiles": self.row_tiles, **asdict(self.counts)}


def counted(shapes: Sequence[Shape], gpu: Gpu = H200) -> list[Walked]:
    """The tiles of launches of attention in each context in which they would be timed, by tiles of rows."""
    found = []
    calls = calls_by_plan([shape for shape in shapes if shape.kind == "attention"], gpu, 1)
    for shape in shapes:
        plans = {plan.row_tiles: plan for plan in shape.candidates if isinstance(plan, AttentionPlan)}
        for (call, *_), (row_tiles, plan) in itertools.product(calls.get(shape.place, ()), plans.items()):
            for context in contexts_of(call):
                counts = tile_counts(shape.key, call, plan, context, gpu)
                found += [] if counts is None else [Walked(shape.key, context, row_tiles, counts)]
    return found


@dataclass(frozen=True)
class Compiled:
    """Kernels that were compiled ahead of a run.

    launches   whose plans they are
    kernels    of all plans
    compiled   of these, kernels that the cache lacked
    """

    launches: int
    kernels: int
    compiled: int


def compile_plans_of(
    pairs: Sequence[Pair],
    command: str,
    sizes: Sequence[Sizes],
    gpu: Gpu,
    directory: Path,
    *,
    num_candidates: int,
    known: TuningTable | None,
    bar: Bar,
) -> Compiled:
    """Compile the kernels that a run of `tune` with these arguments would, for a GPU that need not be there.

    directory  of the kernels' cache, as that run will have it
    known      a table whose launches are left out; None: none are
    Raises DeviceError for a kernel that does not compile.
    """
    shapes = lacking(listed(pairs, command, sizes, gpu), known)
    calls = calls_by_plan(shapes, gpu, num_candidates)
    kernels = {call.kernel.name: call.kernel for variants in calls.values() for each in variants for call in each}
    with bar("compiling") as update:
        return Compiled(len(shapes), len(kernels), compile_all(kernels, gpu, directory, progress=update or _quietly))


def tune(
    pairs: Sequence[Pair],
    command: str,
    sizes: Sequence[Sizes],
    device: "torch.device",
    *,
    num_candidates: int,
    budget_s: float,
    only_missing: bool,
    out: Path | None,
    times: Path | None = None,
    commit: str,
    bar: Bar,
) -> Tuned:
    """Sweep the plans of launches on a CUDA device, those used most first, and write the table of its GPU.

    num_candidates  plans of a launch at most, the derived one included
    budget_s        seconds in all; a launch that is thought to take longer than what is left of them is not begun
    only_missing    launches that have an entry in `known_plans` are left out
    out             the file; None: in the user's own tables. Entries that are in it stay, or are replaced. It is
                    written after every launch, so that a run that is broken off goes on with `only_missing`.
    times           a file for the times of all plans, not of the fastest alone; None: they are not written
    Raises ConfigError for a file of another GPU.
    """
    import torch

    from lowlat.tools.bench.machine import changed_commit, driver
    from lowlat.tools.profile.wall import measure_wall
    from lowlat.tools.tune.bench import GpuBench

    start, bench, name = time.monotonic(), GpuBench(device), torch.cuda.get_device_name(device)
    path = tuning_directory() / file_name(name) if out is None else out
    known = read_table(path) if path.exists() else None
    if known is not None and (known.gpu != name or not known.is_of(bench.gpu)):
        raise ConfigError(f"{path} is a table of {known.gpu}, not of {name}; name another file with --out")
    shapes = listed(pairs, command, sizes, bench.gpu)
    if only_missing:
        shapes = lacking(shapes, known_plans(name, bench.gpu, out))
    commit, read_gb_s = commit or changed_commit(), measure_wall(device, WALL_BYTES, WALL_REPLAYS).gb_per_s
    estimates, kept = Estimates(num_candidates), list[Swept]()

    def keep(swept: Swept) -> None:
        kept.append(swept)
        table = table_of([swept], name, bench.gpu, driver=driver(), commit=commit, read_gb_s=read_gb_s)
        write_table(table, path)
        if times is not None:
            times_of(kept, name, bench.gpu, driver=driver(), commit=commit).write(times)

    with bar("tuning") as update:
        swept = sweep(
            by_use(shapes), lambda some: calls_by_plan(some, bench.gpu, num_candidates), bench, estimates,
            until=start + budget_s, keep=keep, progress=update or _quietly,
        )  # fmt: skip
    table = table_of([], name, bench.gpu, driver=driver(), commit=commit, read_gb_s=read_gb_s)
    table = read_table(path) if swept else write_table(table, path)
    done = {each.shape.place for each in swept}
    left = tuple(shape for shape in shapes if shape.place not in done)
    left_s = sum(map(estimates.seconds, left))
    return Tuned(name, tuple(swept), left, left_s, table, path, time.monotonic() - start)


def _quietly(done: int, total: int | None) -> None:
    """Show nothing."""
