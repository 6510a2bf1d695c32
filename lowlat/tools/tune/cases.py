"""This module sets a launch's arguments to the states in which its plans are timed.

A plan is chosen once for a bucket, but contexts and routings change while it is replayed. So its time is the geometric
mean over cases. Successive launches in a graph read other blocks of the cache, or other experts, as layers of a step
do: a launch finds no more in the L2 than in a step.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from lowlat.kernels.attention.launch_plan import AttentionPlan, AttentionWork
from lowlat.kernels.attention.tile_counts import TileCounts, count_tiles
from lowlat.kernels.formats.mxfp4 import SCALE_OFFSET
from lowlat.kernels.toolchain.kernel import Argument, Gpu, KernelCall
from lowlat.tools.tune.arguments import MOST_PLACES, ROTATED_BYTES, fill_numbers

__all__ = ["CONTEXTS", "Calls", "Case", "cases_of", "contexts_of", "tile_counts"]

CONTEXTS = (1024, 4096, 16384, 65536)  # positions
SCALES = (112 + SCALE_OFFSET, 122 + SCALE_OFFSET)  # of weights about 1
MOE_COPIES = 8
RANDOM, ALIKE, BALANCED = "random", "alike", "balanced"

Calls = tuple[KernelCall, ...]


@dataclass(frozen=True)
class Case:
    """A state of the arguments.

    name    positions of a context, or a routing
    copies  the least number of successive calls in a graph, each with its own arguments
    fill    fill(calls, copy) returns calls with their arguments; it fills numbers for the first copy of each place
    """

    name: str
    copies: int
    fill: Callable[[Calls, int], Calls]


def cases_of(kind: str, calls: Calls, num_places: int = 1) -> tuple[Case, ...]:
    """Return the cases of a launch.

    num_places  places of its weights; further copies use the weights of earlier ones. 0: no numbers are filled
    """
    made = CASES.get(kind)
    return (Case("", 1, _numbers(num_places)),) if made is None else made(calls, num_places)


def _numbers(num_places: int) -> Callable[[Calls, int], Calls]:
    def fill(calls: Calls, copy: int) -> Calls:
        if copy < num_places:
            fill_numbers(calls)
            for call in calls:
                weight = _named(call).get("weight")
                if isinstance(weight, torch.Tensor) and weight.dtype == torch.uint8:
                    weight.random_()  # codes and scales: a time depends on neither
        for call in calls:
            _part_rows(_named(call))
        return calls

    return fill


def _part_rows(named: Mapping[str, Argument]) -> None:
    """Give each row that is written to the cache its own place: two in one place would have the bits of either."""
    tensors = [named.get(name) for name in ("slots", "table", "offsets", "k_cache")]
    slots, table, offsets, cache = (each if isinstance(each, torch.Tensor) else None for each in tensors)
    if slots is None or table is None or offsets is None or cache is None:
        return
    slots.copy_(torch.arange(len(slots)))
    offsets.copy_(torch.arange(len(offsets)))
    table.copy_(torch.arange(len(table))[:, None].expand(table.shape) % cache.shape[0])


def _named(call: KernelCall) -> dict[str, Argument]:
    """Return a call's arguments by the names of its kernel's parameters."""
    return dict(zip(inspect.signature(call.kernel.function).parameters, call.arguments, strict=True))


def _tensor(named: Mapping[str, Argument], name: str) -> torch.Tensor:
    found = named[name]
    if not isinstance(found, torch.Tensor):
        raise TypeError(f"{name} is no tensor")
    return found


def _number(named: Mapping[str, Argument], name: str) -> int:
    found = named[name]
    if isinstance(found, torch.Tensor):
        raise TypeError(f"{name} is a tensor")
    return int(found)


def _changed(call: KernelCall, changes: Mapping[str, torch.Tensor]) -> KernelCall:
    """Return the call with some arguments replaced, by name."""
    arguments = tuple(changes.get(name, argument) for name, argument in _named(call).items())
    return replace(call, arguments=arguments)


def _attention(calls: Calls, num_places: int) -> tuple[Case, ...]:
    """Return a case for each context that the cache holds; if it holds none of them, for its longest context."""
    named = _named(calls[0])
    pool, kv_heads, block, head_dim = _tensor(named, "k_cache").shape
    batch, tail = _number(named, "batch"), _number(named, "tail")

    def case(context: int) -> Case:
        blocks = -(-context // block)
        moved = batch * context * kv_heads * head_dim * 2 * _tensor(named, "k_cache").element_size()
        copies = max(1, min((pool - 1) // (batch * blocks), -(-ROTATED_BYTES // moved), MOST_PLACES))

        def fill(calls: Calls, copy: int) -> Calls:
            if copy < min(1, num_places):
                fill_numbers(calls)
                _fill_codes(named)
            state = _step_state(named, context - tail, copy % copies, blocks)
            return tuple(_changed(call, state) for call in calls)

        return Case(str(context), copies, fill)

    return tuple(map(case, contexts_of(calls[0])))


def _fill_codes(named: Mapping[str, Argument]) -> None:
    """Fill caches of codes with numbers of all sizes without NaN, and scales with 1."""
    scales = named["kv_scales"]
    if isinstance(scales, torch.Tensor):
        scales.fill_(1.0)
        for name in ("k_cache", "v_cache"):
            _tensor(named, name).random_(0, 127)


def _step_state(named: Mapping[str, Argument], dense: int, copy: int, blocks: int) -> dict[str, torch.Tensor]:
    """Set up slots of one length, each with its own blocks, spread over the pool; rows are a chain."""
    table, masks, device = _tensor(named, "table"), _tensor(named, "row_masks"), _tensor(named, "q").device
    batch, rows = masks.shape
    order = torch.randperm(_tensor(named, "k_cache").shape[0] - 1, generator=torch.Generator().manual_seed(1)) + 1
    own = torch.zeros(table.shape, dtype=torch.int32)
    own[:batch, :blocks] = order[copy * batch * blocks :][: batch * blocks].view(batch, blocks)
    chain = [(1 << row + 1) - 1 for row in range(rows)]
    state = {
        "table": own,
        "slots": torch.arange(batch, dtype=torch.int32),
        "dense_lens": torch.full((batch,), dense, dtype=torch.int32),
        "row_live": torch.ones(batch * rows, dtype=torch.uint8),
        "row_masks": torch.tensor([chain] * batch, dtype=torch.int64),
    }
    return {name: tensor.to(device) for name, tensor in state.items()}


def _moe(calls: Calls, num_places: int) -> tuple[Case, ...]:
    """Return two cases: rows choose experts at random, or all choose the same; each launch has other experts.

    The router is one of the calls, so its rows determine the choice.
    """
    copies = max(num_places, MOE_COPIES)

    def case(name: str) -> Case:
        def fill(calls: Calls, copy: int) -> Calls:
            if copy < num_places:
                _fill_experts(calls)
            return tuple(_routed(call, name, copy) for call in calls)

        return Case(name, copies, fill)

    return tuple(map(case, (RANDOM, ALIKE)))


def _routed(call: KernelCall, routing: str, copy: int) -> KernelCall:
    """Return a router's call with rows of its own."""
    if call.kernel.function.__name__ != "router":
        return call
    x = _tensor(_named(call), "x")
    drawn = torch.randn(x.shape, generator=torch.Generator().manual_seed(copy)).to(x.device, x.dtype)
    return _changed(call, {"x": drawn[:1].expand_as(drawn).contiguous() if routing == ALIKE else drawn})


def _grouped(calls: Calls, num_places: int) -> tuple[Case, ...]:
    """Rows that chose at random, and such that every expert has as many: with the ids that the router of a prompt left,
    other ones in every launch."""
    named = [_named(call) for call in calls]
    experts = next(_tensor(each, "weight").shape[0] for each in named if "weight" in each)
    rows, top_k = next(_tensor(each, "ids").shape for each in named if "ids" in each)
    copies = max(num_places, MOE_COPIES)

    def case(name: str) -> Case:
        def fill(calls: Calls, copy: int) -> Calls:
            if copy < num_places:
                _fill_experts(calls)
            generator = torch.Generator().manual_seed(copy)
            drawn = torch.rand(rows, experts, generator=generator).argsort(1)[:, :top_k]
            if name == BALANCED:
                order = torch.randperm(experts, generator=generator)
                drawn = order[torch.arange(rows * top_k).view(rows, top_k) % experts]
            ids = drawn.int().contiguous()
            filled = []
            for call in calls:
                old = _named(call).get("ids")
                filled.append(_changed(call, {"ids": ids.to(old.device)}) if isinstance(old, torch.Tensor) else call)
            return tuple(filled)

        return Case(name, copies, fill)

    return tuple(map(case, (RANDOM, BALANCED)))


def _fill_experts(calls: Calls) -> None:
    """Fill numbers, codes and scales of quantised weights; none is NaN."""
    fill_numbers(calls)
    for call in calls:
        for name, each in _named(call).items():
            if isinstance(each, torch.Tensor) and not each.is_floating_point():
                if name.endswith("words") or name == "weight":
                    each.random_()
                elif name.endswith("scales"):
                    each.random_(*SCALES)


CASES: Mapping[str, Callable[[Calls, int], tuple[Case, ...]]] = MappingProxyType(
    {"attention": _attention, "experts_mlp": _moe, "experts_grouped": _grouped}
)


def contexts_of(call: KernelCall) -> list[int]:
    """Return the contexts in which a launch of attention is timed: those that fit its cache, or else its longest."""
    named = _named(call)
    pool, _, block, _ = _tensor(named, "k_cache").shape
    longest = min(_number(named, "width"), (pool - 1) // _number(named, "batch")) * block
    return [context for context in CONTEXTS if context <= longest] or [longest]


def tile_counts(key: str, call: KernelCall, plan: AttentionPlan, context: int, gpu: Gpu) -> TileCounts | None:
    """The tiles that a launch of attention walks under a plan, where every slot has a context and rows are a chain;
    None where it keeps positions before a window, how many its key does not say.

    key, call  of the launch
    gpu       the GPU that it runs on
    """
    named, facts = _named(call), {name: int(value) for name, value in (each.split("=") for each in key.split())}
    if facts["keeps"]:
        return None
    coded = bool(facts.get("coded"))
    batch, rows = _tensor(named, "row_masks").shape
    tail, window = _number(named, "tail"), facts["window"] or None
    work = AttentionWork(
        batch, rows, facts["group"], facts["kv_heads"], facts["head_dim"], window, 0, facts["split"] or 256, coded
    )
    chain = [(1 << row + 1) - 1 for row in range(rows)]
    num_blocks = plan.blocks * gpu.num_multiprocessors
    return count_tiles(work, plan, [context - tail] * batch, [chain] * batch, num_blocks=num_blocks, tail=tail)
