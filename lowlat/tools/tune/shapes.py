"""This module collects launches whose plan depends on the GPU, by lowering programs.

A launch is timed with the calls that its plan brings along: those of its group, as a GEMM whose segments are added up
by another kernel. Where a group has several such launches, each is timed with the calls after it alone, unless they
have one plan together. So is a prefill GEMM, which norms or attention may stand before.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from lowlat.graphs.program import Op, Program, Stage
from lowlat.kernels.toolchain.kernel import Gpu, KernelCall
from lowlat.kernels.tuning.table import Entry, Plan, TuningTable
from lowlat.lowering.lower import LoweredGroup
from lowlat.tools.tune.pairs import PairPrograms

__all__ = ["KINDS", "Shape", "calls_by_plan", "collect", "stage_tag"]

# commands of `lowlat tune` -> kinds of launches
KINDS: Mapping[str, tuple[str, ...]] = {
    "gemm": ("decode_gemm", "prefill_gemm"),
    "experts": ("experts", "experts_mlp", "experts_grouped"),
    "attention": ("attention",),
}
TOGETHER = {"experts_grouped"}  # kinds of which several launches of a group have one plan
BEHIND = {"prefill_gemm"}  # kinds that take what stands before them in their group as it is: a norm's rows, attention's
PREFILL_USE = 0.01  # of a launch of prefill, of which a request has one for hundreds of steps
PARTS = {"gate_up": "FFN_GATE_UP", "down": "FFN_DOWN"}
KERNELS = {
    "attention": "ATTENTION",
    "partial_attention": "ATTENTION",
    "prefill_attention": "ATTENTION",
    "router": "ROUTER",
}


@dataclass
class Shape:
    """A launch whose plan depends on the GPU.

    kind, key   its place in tables
    candidates  plans that it may have, the derived one first
    source      the pair and the program in which it was met first
    stages      where it was met, as `EAGLE3_FC`
    uses        launches of it where every program runs once, with all of its layers; those of prefill count less
    """

    kind: str
    key: str
    candidates: tuple[Plan, ...]
    source: tuple[PairPrograms, Program]
    stages: list[str] = field(default_factory=list)
    uses: float = 0.0

    @property
    def place(self) -> tuple[str, str]:
        """Kind and key."""
        return self.kind, self.key


def stage_tag(group: LoweredGroup, pair: PairPrograms, number: int = 0) -> str:
    """The place of a group in a step: `BASE_QKV`, `EAGLE3_FFN_DOWN`, `EAGLE3_LM_HEAD_SMALLVOC`, `PREFILL_O`.

    number  of its launches; a group of several GEMMs has a launch of each, in order
    """
    experts = (op for op in group.ops if "experts" in op.kind)
    gemms = [op for op in group.ops if op.kind == "linear"]
    others = gemms or [op for op in group.ops if op.kind in KERNELS]
    op = next(experts, None) or (others[min(number, len(others) - 1)] if others else None)
    part = group.name.upper() if op is None else _part(op)
    drafts = op is not None and op.weights.get("weight", "").startswith("draft_model.")
    if group.stage is Stage.PREFILL:
        return f"EAGLE3_PREFILL_{part}" if drafts else f"PREFILL_{part}"
    if group.stage is Stage.VERIFY:
        return f"BASE_{part}"
    speculator = pair.pair.speculator
    draft = None if speculator is None else speculator.draft_config
    if part == "LM_HEAD" and draft is not None and draft.draft_vocab_size < pair.pair.config.vocab_size:
        part = "LM_HEAD_SMALLVOC"
    return f"EAGLE3_{part}"


def _part(op: Op) -> str:
    if "experts" in op.kind:
        return "EXPERTS"
    if op.kind in KERNELS:
        return KERNELS[op.kind]
    name = op.weights["weight"].removesuffix(".weight").rpartition(".")[2]
    return PARTS.get(name, name.upper())


def _planned(group: LoweredGroup) -> Iterator[KernelCall]:
    return (call for call in group.kernel_calls if call.planned is not None)


def collect(pairs: Iterable[PairPrograms], gpu: Gpu, kinds: Sequence[str]) -> list[Shape]:
    """The launches of these kinds in all programs of the pairs, each once, with plans as derived for the GPU."""
    found: dict[tuple[str, str], Shape] = {}
    plain = replace(gpu, tuning=None)
    for pair in pairs:
        for program in pair.programs:
            for group in pair.groups(program, plain):
                for number, call in enumerate(_planned(group)):
                    planned = call.planned
                    if planned is None or planned.kind not in kinds:
                        continue
                    place = planned.kind, planned.key
                    shape = found.setdefault(place, Shape(*place, planned.candidates, (pair, program)))
                    shape.uses += _uses(group, pair)
                    tag = stage_tag(group, pair, number)
                    if tag not in shape.stages:
                        shape.stages.append(tag)
    return list(found.values())


def _uses(group: LoweredGroup, pair: PairPrograms) -> float:
    """The launches that one of a group of few layers stands for."""
    if group.stage is Stage.PREFILL:
        return PREFILL_USE * pair.layer_share
    return pair.layer_share if group.stage is Stage.VERIFY else 1.0


def calls_by_plan(
    shapes: Iterable[Shape], gpu: Gpu, num_candidates: int
) -> dict[tuple[str, str], list[tuple[KernelCall, ...]]]:
    """For each launch, by kind and key, its calls under each of its first plans; arguments have no memory."""
    by_source: dict[tuple[int, int], list[Shape]] = {}
    for shape in shapes:
        by_source.setdefault((id(shape.source[0]), id(shape.source[1])), []).append(shape)
    found: dict[tuple[str, str], list[tuple[KernelCall, ...]]] = {shape.place: [] for shape in shapes}
    for together in by_source.values():
        pair, program = together[0].source
        for number in range(min(num_candidates, max(len(shape.candidates) for shape in together))):
            wanted = [shape for shape in together if number < len(shape.candidates)]
            table = _forced(gpu, wanted, number)
            calls = _calls(pair.groups(program, replace(gpu, tuning=table)))
            for shape in wanted:
                found[shape.place].append(calls[shape.place])
    return found


def _forced(gpu: Gpu, shapes: Sequence[Shape], number: int) -> TuningTable:
    """A table that makes launches have their candidate of one number."""
    entries: dict[str, dict[str, Entry]] = {}
    for shape in shapes:
        entries.setdefault(shape.kind, {})[shape.key] = Entry(shape.candidates[number].knobs)
    return TuningTable("", gpu.capability, gpu.num_multiprocessors, gpu.shared_bytes, entries=entries)


def _calls(groups: Iterable[LoweredGroup]) -> dict[tuple[str, str], tuple[KernelCall, ...]]:
    found: dict[tuple[str, str], tuple[KernelCall, ...]] = {}
    for group in groups:
        cut = list(_planned(group))
        kinds = {call.planned.kind for call in cut if call.planned is not None}
        places = [(call.planned.kind, call.planned.key) for call in cut if call.planned is not None]
        for call, place in zip(cut, places, strict=True):
            alone = len(set(places)) > 1 or (len(places) > 1 and not kinds <= TOGETHER) or kinds <= BEHIND
            found.setdefault(place, _behind(group, call) if alone else group.kernel_calls)
    return found


def _behind(group: LoweredGroup, call: KernelCall) -> tuple[KernelCall, ...]:
    """A launch and those after it, up to the next that a GPU cuts."""
    place = next(place for place, each in enumerate(group.kernel_calls) if each is call)
    later = group.kernel_calls[place + 1 :]
    return (call, *takewhile(lambda each: each.planned is None, later))
