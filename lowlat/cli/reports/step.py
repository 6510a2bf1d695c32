"""This module reports a planned step for `lowlat inspect step`: operations, fusions, launches, bytes and buffers.

Bytes are those that any executor must move: each weight that an operation reads, in the checkpoint's format, with the
expected number of chosen experts; keys and values before the step's rows; and keys and values written. Activations are
scratch buffers between groups of operations. The floor is the time of weights, keys and values at the bandwidth of
streaming reads.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any

from lowlat.cli.reports.sizes import buffer_dict, prefill_dict
from lowlat.graphs import Paging, Role
from lowlat.graphs.program import Op, Program
from lowlat.kernels.toolchain.kernel import KernelCall
from lowlat.lowering.lower import FUSIONS, LoweredGroup
from lowlat.models.geometry import ModelConfig
from lowlat.step.weight_reads import weight_bytes
from lowlat.tools.bench.step_bytes import cache_bytes, weight_sizes
from lowlat.tools.planned_step import LoweredProgram, PlannedStep

__all__ = ["step_report"]

MOST_REPEATED = 64  # groups of a layer, at most
LEAST_ALIKE = 4  # groups of one kind in a row that are folded; fewer are a layer's own
PREFILL_ATTENTION = ("prefill_attention", "refresh_attention")


@dataclass(frozen=True)
class Moved:
    """Bytes that a group of operations moves."""

    weights: float = 0.0
    kv_read: float = 0.0
    kv_written: float = 0.0
    activations: float = 0.0

    @classmethod
    def sum(cls, parts: Iterable["Moved"]) -> "Moved":
        """The bytes of all."""
        every = list(parts)
        return cls(*(sum(getattr(each, item.name) for each in every) for item in fields(cls)))

    def to_dict(self, gb_per_s: float) -> dict[str, Any]:
        """Whole bytes, and the floor in microseconds."""
        named = {f"{item.name}_bytes": round(getattr(self, item.name)) for item in fields(self)}
        return {**named, "floor_us": round((self.weights + self.kv_read + self.kv_written) / gb_per_s / 1e3, 2)}


@dataclass(frozen=True)
class _Counted:
    """A lowered group with the bytes that it moves."""

    group: LoweredGroup
    moved: Moved

    @property
    def likeness(self) -> tuple[Any, ...]:
        """The key that repeated groups share; a layer's groups have it with or without a norm before the first one."""
        return self.group.stage, self.group.name, len(self.group.calls), self.moved.kv_read


def step_report(
    planned: PlannedStep, *, lengths: Sequence[int], model: str, draft_model: str | None, full: bool = False
) -> dict[str, Any]:
    """The report of a planned step.

    lengths             tokens of each active slot before the step
    model, draft_model  their names
    full                with every group of operations and every buffer
    """
    config, speculator, gpu = planned.geometry.config, planned.speculator, planned.gpu
    sizes = weight_sizes(config, speculator, planned.rank)
    rate = gpu.facts.read_gb_s
    step = [each for part in planned.step for each in _counted(planned, part, sizes, lengths)]
    prefill = _counted(planned, planned.prefill, sizes, lengths[:1])
    programs = [part.program for part in planned.step]
    bucket = planned.bucket
    report: dict[str, Any] = {
        "model": model,
        "draft_model": draft_model,
        "method": None if speculator is None else speculator.draft_sources[0],
        "text_drafts": None if speculator is None else speculator.draft_sources[1] or None,
        "gpu": {
            "name": gpu.name,
            "capability": list(gpu.facts.capability),
            "multiprocessors": gpu.facts.num_multiprocessors,
            "read_gb_per_s": round(rate, 1),
            "tuned": gpu.facts.tuning is not None,
            "count": planned.num_gpus,
        },
        "bucket": {
            "name": str(bucket),
            "batch": bucket.batch,
            "rows": bucket.rows,
            "num_speculative_tokens": bucket.num_speculative_tokens,
        },
        "context": lengths[0],
        "kernels_do_not_cover": planned.problem,
        "step": _program_report(step, rate, full=full),
        "prefill": {
            "positions": planned.positions,
            **prefill_dict(planned.geometry),
            **_program_report(prefill, rate, full=full),
        },
        "buffers": _buffer_report([*programs, planned.prefill.program]),
    }
    if full:
        report["step"]["buffers"] = _listed(programs)
        report["prefill"]["buffers"] = _listed([planned.prefill.program])
    return report


def _counted(
    planned: PlannedStep, lowered: LoweredProgram, sizes: Mapping[str, int], lengths: Sequence[int]
) -> list[_Counted]:
    program, partial = lowered.program, planned.geometry.partial
    found = []
    for group in lowered.groups:
        share = _experts_share(planned.geometry.config, program, group.ops)
        found.append(
            _Counted(
                group,
                Moved(
                    sum(weight_bytes(op, sizes, share) for op in group.ops),
                    sum(cache_bytes(program, op, lengths, partial) + _prompt_bytes(program, op, lengths[0])
                        for op in group.ops),
                    sum(_written_bytes(program, op) for op in group.ops),
                    _activation_bytes(program, group),
                ),
            )
        )  # fmt: skip
    return found


def _experts_share(config: ModelConfig, program: Program, ops: Sequence[Op]) -> float:
    """Return the share of a layer's experts that rows are expected to choose, if all are equally likely."""
    if config.experts is None:
        return 1.0
    rows = next((program.buffers[op.reads["expert_ids"]].shape[0] for op in ops if "expert_ids" in op.reads), 1)
    return config.experts.share_read(config.experts.expected_distinct(rows))


def _prompt_bytes(program: Program, op: Op, length: int) -> int:
    """Return the bytes of keys and values that prefill's attention reads at a prompt's end: each position once."""
    if op.kind not in PREFILL_ATTENTION:
        return 0
    window = op.params.get("window")
    size = program.buffers[op.reads["q"]].shape[0]
    positions = length if not isinstance(window, int) else min(length, window + size)
    caches = (program.buffers[op.reads[name]] for name in ("k_cache", "v_cache"))
    return sum(positions * spec.shape[1] * spec.shape[3] * spec.dtype.itemsize for spec in caches)


def _written_bytes(program: Program, op: Op) -> int:
    """Bytes of new keys and values, as the cache stores them."""
    total = 0
    for value, cache in (("k", "k_cache"), ("v", "v_cache")):
        if value in op.reads and cache in op.writes:
            total += prod(program.buffers[op.reads[value]].shape) * program.buffers[op.writes[cache]].dtype.itemsize
    return total


def _activation_bytes(program: Program, group: LoweredGroup) -> int:
    """Return the bytes of scratch that a group reads from other groups and writes for them."""
    read, written = dict[str, None](), dict[str, None]()
    for op in group.ops:
        read |= dict.fromkeys(name for name in op.reads.values() if name not in written)
        written |= dict.fromkeys(name for name in op.writes.values() if name not in group.hidden)
    specs = (program.buffers[name] for name in (*read, *written))
    return sum(spec.num_bytes for spec in specs if spec.role is Role.SCRATCH)


def _program_report(groups: Sequence[_Counted], rate: float, *, full: bool) -> dict[str, Any]:
    report: dict[str, Any] = {
        "operations": sum(len(each.group.ops) for each in groups),
        "launches": sum(len(each.group.calls) for each in groups),
        **Moved.sum(each.moved for each in groups).to_dict(rate),
        "stages": _stages(groups, rate),
        "fusions": _fusions(groups),
    }
    if full:
        report["groups"] = [_group(each, rate) for each in groups]
    return report


def _stages(groups: Sequence[_Counted], rate: float) -> list[dict[str, Any]]:
    """Return the groups by stage, in order; repeated ones, of a layer or a draft level, are folded."""
    rows: dict[tuple[Any, ...], list[list[_Counted]]] = {}
    for block in _blocks(groups):
        likeness = block[0].group.stage, tuple((each.group.name, len(each.group.calls)) for each in block)
        rows.setdefault(likeness, []).append(block)
    return [
        {
            "stage": str(stage),
            "times": len(blocks),
            "kernels": [{"name": name, "launches": count} for name, count in names],
            "operations": sum(len(each.group.ops) for block in blocks for each in block),
            "launches": len(blocks) * sum(count for _, count in names),
            **Moved.sum(each.moved for block in blocks for each in block).to_dict(rate),
        }
        for (stage, names), blocks in rows.items()
    ]


def _blocks(groups: Sequence[_Counted]) -> Iterable[list[_Counted]]:
    """Split the groups of one stage into blocks: repeated blocks, and the groups between them."""
    start, plain = 0, list[_Counted]()
    while start < len(groups):
        size, count = _repetition(groups, start)
        if plain and (count > 1 or plain[-1].group.stage is not groups[start].group.stage):
            yield plain
            plain = []
        if count > 1:
            yield from (list(groups[start + k * size : start + (k + 1) * size]) for k in range(count))
            start += count * size
            continue
        plain.append(groups[start])
        start += 1
    if plain:
        yield plain


def _repetition(groups: Sequence[_Counted], start: int) -> tuple[int, int]:
    """Return the size and the number of repetitions of the block from `start` on that covers most groups."""
    like = [each.likeness for each in groups[start:]]
    best = (1, 1)
    for size in range(1, min(MOST_REPEATED, len(like) // 2) + 1):
        if like[size - 1][0] is not like[0][0]:
            break  # a block lies in one stage
        count = 1
        while like[count * size : (count + 1) * size] == like[:size]:
            count += 1
        if count >= (2 if size > 1 else LEAST_ALIKE) and count * size > best[0] * best[1]:
            best = (size, count)
    return best


def _fusions(groups: Sequence[_Counted]) -> list[dict[str, Any]]:
    """Return the fusions that apply, the most frequent first, with their operations and the launches saved."""
    saves = {fusion.name: fusion.saves for fusion in FUSIONS}
    fused = [each.group for each in groups if len(each.group.ops) > 1]
    times = Counter(group.name for group in fused)
    kinds: dict[str, list[str]] = {}
    for group in fused:
        known = [op.kind for op in group.ops]
        kinds[group.name] = max(known, kinds.get(group.name, known), key=len)
    return [
        {"name": name, "operations": kinds[name], "times": count, "launches_saved": count * saves[name]}
        for name, count in times.most_common()
    ]


def _group(counted: _Counted, rate: float) -> dict[str, Any]:
    group = counted.group
    return {
        "stage": str(group.stage),
        "name": group.name,
        "operations": [str(op) for op in group.ops],
        "launches": [
            {
                "kernel": call.kernel.name,
                "grid": list(call.grid),
                "block": call.kernel.threads,
                "shared_bytes": call.kernel.shared_bytes,
                "tuned": call.planned is not None and call.planned.is_tuned,
            }
            if isinstance(call, KernelCall)
            else {"library": call.name}
            for call in group.calls
        ],
        **counted.moved.to_dict(rate),
    }


def _buffer_report(programs: Sequence[Program]) -> dict[str, dict[str, int]]:
    """Return the buffers of step and prefill pass by role, each once, and separately the KV pools."""
    found: dict[str, dict[str, int]] = {}
    for spec in {spec.name: spec for program in programs for spec in program.buffers.values()}.values():
        entry = found.setdefault("kv" if spec.paging is Paging.POSITIONS else spec.role.value, {"count": 0, "bytes": 0})
        entry["count"] += 1
        entry["bytes"] += spec.num_bytes
    return found


def _listed(programs: Sequence[Program]) -> list[dict[str, Any]]:
    specs = {spec.name: spec for program in programs for spec in program.buffers.values()}
    return [buffer_dict(spec) for spec in specs.values()]
