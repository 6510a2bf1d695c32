"""The executor that a runtime really gets: kernels where they cover the model, torch where they do not."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lowlat.errors import ConfigError
from lowlat.executors import Executor
from lowlat.executors.devices import DeviceChoice
from lowlat.executors.distributed.watchdog import WATCHDOG
from lowlat.executors.reference import ReferenceExecutor
from lowlat.executors.reference.ranks import RankedReferenceExecutor
from lowlat.graphs import Bucket
from lowlat.graphs.program import Program
from lowlat.kernels.formats import FORMATS
from lowlat.models.geometry import Decoder, DraftConfig, ModelConfig
from lowlat.models.layer_spec import AttentionSpec, DeltaSpec, DenseSpec, ExpertsSpec, LayerSpec
from lowlat.models.shard import PARTS, STEP
from lowlat.options.config import RuntimeConfig
from lowlat.step.state import StepGeometry

__all__ = [
    "Rank",
    "check_partial",
    "check_positions",
    "make_executor",
    "refuse_parts",
    "refuse_ranks",
    "settle_executor",
    "uncovered",
]

# what the kernels refuse by ShapeError; repeated here, where a machine without a GPU loads no kernel
HEAD_SIZES, LISTED_HEAD_SIZES = (64, 128, 256), (64, 128)
BLOCK_SIZES = (16, 32, 64, 128, 256)
WIDTHS_OF, MAX_WIDTH = 8, 65536
MAX_VOCABULARY = 262144
DELTA_SIZES, DELTA_TAPS = (32, 64, 128), 4
MAX_EXPERTS, MAX_CHOSEN, MAX_ROUTED_WIDTH = 512, 10, 6144


def uncovered(config: ModelConfig, head: DraftConfig | None, block_size: int = 32) -> str | None:
    """Why the kernels cannot run a model with KV blocks of that size; None where they can."""
    if block_size not in BLOCK_SIZES:
        return f"the kernels take KV blocks of {BLOCK_SIZES} positions and block_size is {block_size}"
    if config.dtype != "bfloat16":
        return f"the kernels compute in bfloat16 and dtype is {config.dtype}"
    if config.embedding_scale is not None:
        return (
            f"the kernels take embeddings without a scale and the target's embedding_scale is {config.embedding_scale}"
        )
    if config.logit_softcap is not None:
        return f"the kernels take logits without a softcap and the target's logit_softcap is {config.logit_softcap}"
    for owner, part in (("target", config), ("draft model", head)):
        problem = None if part is None else _uncovered_part(part)
        if problem is not None:
            return f"the kernels take {problem[0]} and the {owner}'s {problem[1]}"
    for name, width in ({} if head is None else head.further_widths).items():
        if width % WIDTHS_OF:
            return f"the kernels take multiples of {WIDTHS_OF} as widths and the draft model's {name} is {width}"
    return None


def _uncovered_part(part: Decoder) -> tuple[str, str] | None:
    """The first requirement of the kernels that a target or draft model misses."""
    for layer in dict.fromkeys(part.layers):
        problem = _uncovered_layer(part, layer)
        if problem is not None:
            return problem
    if part.vocab_size > MAX_VOCABULARY:
        return f"vocabularies of at most {MAX_VOCABULARY}", f"has {part.vocab_size}"
    return None


def _uncovered_layer(part: Decoder, layer: LayerSpec) -> tuple[str, str] | None:
    """The first requirement of the kernels that a layer misses."""
    mixer, ffn = layer.mixer, layer.ffn
    problem = _uncovered_delta(part, mixer) if isinstance(mixer, DeltaSpec) else _uncovered_attention(mixer)
    if problem is None and isinstance(ffn, ExpertsSpec):
        problem = _uncovered_experts(part, ffn)
    if problem is not None:
        return problem
    if isinstance(ffn, DenseSpec) and ffn.activation != "silu":
        return "the activation silu", f"is {ffn.activation}"
    for name, size in (("hidden size", part.hidden_size), ("FFN's width", ffn.inner_size)):
        if size % WIDTHS_OF or size > MAX_WIDTH:
            return f"multiples of {WIDTHS_OF} up to {MAX_WIDTH} as widths", f"{name} is {size}"
    return None


def _uncovered_attention(attention: AttentionSpec) -> tuple[str, str] | None:
    """The first requirement of the kernels that attention misses."""
    if attention.rotary_dims is not None and attention.rotary_dims % WIDTHS_OF:
        return f"RoPE of multiples of {WIDTHS_OF} dimensions", f"turns {attention.rotary_dims}"
    if attention.head_dim not in HEAD_SIZES:
        return "heads of 64, 128 or 256 dimensions", f"have {attention.head_dim}"
    if attention.softcap is not None:
        return "attention without a softcap", f"softcap is {attention.softcap}"
    return None


def _uncovered_delta(config: Decoder, delta: DeltaSpec) -> tuple[str, str] | None:
    """The first requirement of the kernels that a gated delta net misses."""
    if delta.conv_size != DELTA_TAPS:
        return f"delta nets with convolutions of {DELTA_TAPS} inputs", f"have {delta.conv_size}"
    for name, size in (("keys", delta.key_dim), ("values", delta.value_dim)):
        if size not in DELTA_SIZES:
            return "delta nets with heads of 32, 64 or 128 dimensions", f"{name} have {size}"
    if config.hidden_size > MAX_ROUTED_WIDTH:
        return f"a hidden size of at most {MAX_ROUTED_WIDTH} before delta nets", f"is {config.hidden_size}"
    return None


def _uncovered_experts(config: Decoder, experts: ExpertsSpec) -> tuple[str, str] | None:
    """The first requirement of the kernels that a mixture of experts misses."""
    if experts.num_experts > MAX_EXPERTS:
        return f"at most {MAX_EXPERTS} experts", f"layers have {experts.num_experts}"
    if experts.num_experts_per_token > MAX_CHOSEN:
        return f"at most {MAX_CHOSEN} experts a token", f"tokens choose {experts.num_experts_per_token}"
    if config.hidden_size > MAX_ROUTED_WIDTH:
        return f"a hidden size of at most {MAX_ROUTED_WIDTH} where experts are chosen", f"is {config.hidden_size}"
    if experts.shared_ffn is not None and experts.shared_ffn.inner_size % WIDTHS_OF:
        return f"multiples of {WIDTHS_OF} as widths", f"shared expert's width is {experts.shared_ffn.inner_size}"
    weight_format = FORMATS[experts.weight_format]
    for name, size in (("hidden size", config.hidden_size), ("FFN's width", experts.inner_size)):
        if size % weight_format.block:
            return f"multiples of {weight_format.block} as widths of {weight_format.name.upper()}", f"{name} is {size}"
    return None


def check_positions(geometry: StepGeometry, *, invariant: bool = False) -> None:
    """Raise ConfigError for a context that the kernels' attention does not reach, in a layer without a window.

    invariant  splits of positions do not depend on the number of ranks
    """
    from lowlat.kernels.attention.attention import INVARIANT_HEADS, most_positions

    windowless = [spec.num_kv_heads for spec in geometry.config.attentions.values() if spec.window is None]
    speculator = geometry.speculator
    if speculator is not None and speculator.draft_config is not None and speculator.attends_everything:
        windowless += [spec.num_kv_heads for spec in speculator.draft_config.attentions.values()]
    for kv_heads in dict.fromkeys(windowless):
        heads = INVARIANT_HEADS if invariant else kv_heads
        limit = most_positions(geometry.max_batch, geometry.max_context, heads) - geometry.overhang
        most = limit // geometry.block_size * geometry.block_size - geometry.overhang
        if geometry.max_context > most:
            raise ConfigError(
                f"max_context {geometry.max_context} is above {most}, the most that the kernels' attention reaches "
                f"without a window; lower max_context, or use executor 'reference'"
            )


def check_partial(geometry: StepGeometry) -> None:
    """Raise ConfigError where the kernels do not summarise the keys of a target whose steps are partial."""
    if geometry.partial is None:
        return
    for spec in geometry.config.attentions.values():
        if spec.window is None and spec.head_dim not in LISTED_HEAD_SIZES:
            raise ConfigError(
                f"enable_specpv is not implemented on a GPU for heads of {spec.head_dim} dimensions, only of "
                f"{' and '.join(map(str, LISTED_HEAD_SIZES))}; leave it out, or use executor 'reference'"
            )


def refuse_parts(choice: DeviceChoice, *parts: ModelConfig | DraftConfig | None) -> None:
    """Raise ConfigError where kernels would sum in parts that are not made of their whole steps.

    parts  geometries of a rank's part of a target, and of its draft model, if it is cut
    """
    for owner, part in zip(("target", "draft model"), parts, strict=False):
        shard = None if part is None else part.shard
        if shard is None or not shard.invariant or not choice.has_kernels:
            continue
        for layer in shard.layers:
            if layer.unit % STEP:
                raise ConfigError(
                    f"tp_invariant sums {PARTS} parts of whole steps of {STEP} columns with executor "
                    f"{choice.executor!r}, and the {owner}'s intermediate_size {layer.inner_size} is no multiple of "
                    f"{STEP} and of what its format holds together ({layer.unit}), or has fewer steps; use executor "
                    "'reference', or leave tp_invariant out"
                )


def refuse_ranks(options: RuntimeConfig, choice: DeviceChoice) -> None:
    """Raise ConfigError where kernels would run one of several parts of a target one by one."""
    if choice.executor == "eager" and options.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size {options.tensor_parallel_size} runs with executor 'graph', or with 'reference' on "
            f"one device, not with 'eager'"
        )


def settle_executor(
    choice: DeviceChoice, asked: str, config: ModelConfig, head: DraftConfig | None, block_size: int = 32
) -> DeviceChoice:
    """The choice for this model: with `asked` "auto", torch's operations where the kernels do not cover it.

    Raises ConfigError where kernels were asked for by name and do not cover it.
    """
    problem = uncovered(config, head, block_size) if choice.has_kernels else None
    if problem is None:
        return choice
    if asked != "auto":
        raise ConfigError(f"executor {asked!r} cannot run this model: {problem}; use 'reference' or 'auto'")
    reason = f"{choice.reason}; torch's operations run on it, slowly: {problem}"
    return replace(choice, executor="reference", reason=reason, loud=True)


@dataclass(frozen=True)
class Rank:
    """One rank's work: its part of the target's geometry, the step's programs and those of prefill."""

    config: ModelConfig
    programs: Mapping[Bucket, Program]
    prefills: Mapping[int, Program]


def make_executor(
    choice: DeviceChoice,
    programs: Mapping[Bucket, Program],
    prefills: Mapping[int, Program],
    weights: Mapping[str, torch.Tensor],
    captured: Callable[[int, int], None] | None = None,
    *,
    ranks: Sequence[Rank] = (),
    devices: Sequence[torch.device] = (),
    device_loop: bool = False,
    fuse: bool = True,
    hooks: bool = True,
    watchdog: tuple[float, float] = WATCHDOG,
) -> Executor:
    """Allocate, compile and capture. `captured` is called with buckets captured and buckets in all.

    ranks      where there are several: all, in order; programs and prefills are the first one's, weights whole
    devices    where there are several ranks: each rank's own
    fuse       False: every operation has launches of its own, on a device
    hooks      False: the reference executor takes none
    watchdog   its factor and min_s, see `lowlat.executors.distributed.watchdog`: for work on a device
    Raises ConfigError for a device loop where steps are not captured.
    """
    if device_loop and choice.executor != "graph":
        raise ConfigError(
            f"device_loop needs executor 'graph', and this runtime has {choice.executor!r}: {choice.reason}"
        )
    if choice.executor == "reference" and len(ranks) > 1:
        parts = [(rank.programs, rank.prefills) for rank in ranks]
        return RankedReferenceExecutor(parts, weights, [rank.config for rank in ranks], choice.device, hooks=hooks)
    if choice.executor == "reference":
        return ReferenceExecutor(programs, prefills, weights, choice.device, hooks=hooks)
    if choice.executor == "eager":
        from lowlat.executors.eager import EagerExecutor

        return EagerExecutor(programs, prefills, weights, choice.device, fuse=fuse, watchdog=watchdog)
    from lowlat.executors.graph import GraphExecutor

    if len(ranks) > 1:
        return _make_parallel(ranks, devices, weights, captured, looping=device_loop, fuse=fuse, watchdog=watchdog)

    def progress(_: Bucket, done: int, total: int) -> None:
        if captured is not None:
            captured(done, total)

    return GraphExecutor(
        programs, prefills, weights, choice.device, looping=device_loop, progress=progress, fuse=fuse,
        watchdog=watchdog,
    )  # fmt: skip


def _make_parallel(
    ranks: Sequence[Rank],
    devices: Sequence[torch.device],
    weights: Mapping[str, torch.Tensor],
    captured: Callable[[int, int], None] | None,
    **options: Any,
) -> Executor:
    """A graph executor for each rank; the weights' files are read once."""
    from lowlat.executors.distributed.parallel import ParallelExecutor, exchanged_rows
    from lowlat.executors.distributed.parts import place_parts
    from lowlat.executors.distributed.peers import PeerMemory
    from lowlat.executors.distributed.place import RankPlace
    from lowlat.executors.graph import GraphExecutor

    first = ranks[0]
    peers = PeerMemory(devices, exchanged_rows([*first.programs.values(), *first.prefills.values()]))
    parts = place_parts(weights, [rank.config for rank in ranks], devices)

    def make(number: int, leader: GraphExecutor | None) -> GraphExecutor:
        def progress(_: Bucket, done: int, total: int) -> None:
            if captured is not None:
                captured(number * total + done, len(ranks) * total)

        rank, place = ranks[number], RankPlace(number, peers, leader)
        return GraphExecutor(
            rank.programs, rank.prefills, parts[number], devices[number], progress=progress, place=place, **options
        )

    return ParallelExecutor(make, peers)
