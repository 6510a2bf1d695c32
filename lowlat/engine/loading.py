"""From options to a ready executor: checkpoint, tokenizer, speculator, ladder, programs, buffers.

Quick things are read first: configs, headers of weights, the tokenizer. A target's weights go from its files to
their final place one at a time, while the executor is made. A speculator is loaded whole before: one that is damaged
must be known in time to go on without it. Nothing half-loaded stays.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import NoneType
from typing import Any

import torch

from lowlat.checkpoint.quantising import Quantiser
from lowlat.checkpoint.source import JoinedWeights
from lowlat.engine.expert_prices import ExpertPrices
from lowlat.engine.forced_steps import ForcedSteps
from lowlat.engine.host_space import HostSpace
from lowlat.engine.learner import Learner
from lowlat.engine.longer_drafts import LongerDrafts
from lowlat.engine.memory.held import HeldMemory, held_memory
from lowlat.engine.memory.plan import (
    DeviceNeed,
    MemoryNeed,
    available_bytes,
    check_fits,
    memory_need,
    on_one_device,
)
from lowlat.engine.memory.refreshes import Refreshes
from lowlat.engine.perf import check_device, check_launches
from lowlat.engine.proposer import Proposer, StepParts
from lowlat.engine.scheduler import Scheduler
from lowlat.engine.wide_steps import WideSteps
from lowlat.errors import ConfigError, LowlatError
from lowlat.executors import Executor
from lowlat.executors.devices import DeviceChoice, choose_device, rank_devices
from lowlat.executors.make import (
    Rank,
    check_positions,
    make_executor,
    planned_gpu,
    refuse_codes,
    refuse_parts,
    refuse_ranks,
    settle_executor,
)
from lowlat.graphs import Bucket
from lowlat.graphs.program import Program
from lowlat.kernels.reference.step.slots import MAX_PATH_NODES
from lowlat.kernels.toolchain.kernel import H200, Gpu
from lowlat.models.activations import code_activations
from lowlat.models.geometry import ModelConfig
from lowlat.models.partial_kv import partial_kv
from lowlat.models.rank_weights import rank_weights
from lowlat.models.shard import rank_configs, rank_drafts
from lowlat.models.target import OpenedTarget, code_kv, fetch_target, open_target, quantise_target
from lowlat.models.weight_plan import weight_plan
from lowlat.options.model_names import display_name
from lowlat.options.runtime import FEW_SLOTS, RuntimeConfig
from lowlat.options.slots import fit_slots
from lowlat.options.speculative import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from lowlat.options.speculative_checks import WIDE_ROWS
from lowlat.sequence.kvcache import KVCache
from lowlat.sequence.pool_book import PoolBook
from lowlat.sequence.snapshot_book import SnapshotBook
from lowlat.sequence.tiers.tiers import CacheTiers
from lowlat.sequence.window_book import WindowBook
from lowlat.speculators.base import LoadedSpeculator, Speculator
from lowlat.speculators.default_length import with_default_length, with_plain_length
from lowlat.speculators.methods import fetch_speculator, load_speculator, settled
from lowlat.speculators.tree.dynamic import DEFAULT_DRAFT_TOKENS, DynamicTree, Topology
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.adaptive import build_adaptive
from lowlat.step.checks import CheckedKinds
from lowlat.step.decode import build_step
from lowlat.step.draft_length_costs import Costs
from lowlat.step.draft_length_times import set_costs
from lowlat.step.ladder import StepLadder
from lowlat.step.prefill import build_prefills
from lowlat.step.state import StepGeometry
from lowlat.step.variants import PROPOSED, WIDE
from lowlat.text import TextCodec

__all__ = [
    "Loaded",
    "bucket_batches",
    "build_program",
    "build_rank",
    "load",
    "make_geometry",
    "make_ladder",
    "make_scheduler",
    "make_topologies",
    "rank_geometries",
]

logger = logging.getLogger("lowlat")
Progress = Callable[[int, int], None]
Reserve = Callable[[Sequence[DeviceNeed]], None]
MAX_SNAPSHOTS = 32  # a slot: more are seldom found again


@dataclass(frozen=True)
class Loaded:
    """Everything that a Runtime drives; `speculation_error` says why speculation that was asked for is not in use.

    codec        the tokenizer; None where the directory has none
    speculative  the options of the speculator, their method settled; None: there is none
    rank_config  the geometry of the first rank's part; the target's own where there is one rank
    memory       of each device
    costs        by which the device chooses draft lengths; None: it chooses none
    """

    target: OpenedTarget
    codec: TextCodec | None
    speculator: LoadedSpeculator | None
    speculative: SpeculativeConfig | None
    geometry: StepGeometry
    ladder: StepLadder
    topologies: dict[int, Topology]
    executor: Executor
    choice: DeviceChoice
    speculation_error: str | None
    rank_config: ModelConfig
    memory: tuple[HeldMemory, ...]
    costs: Costs | None = None

    @property
    def gpu(self) -> Gpu:
        """The properties by which launches are cut; an H200's where no kernel runs."""
        return _gpu_of(self.executor)

    def make_learner(self) -> Learner | None:
        """Make what learns from steps how to choose the next ones; None: nothing does."""
        if self.costs is None or not any(each.per_expert for each in self.costs.values()):
            return None
        return ExpertPrices(self.executor, self.costs, self.geometry.most_waiting)

    @property
    def takes_grammars(self) -> bool:
        """Whether steps draw under masks of the host; those of lossless SpecPV, which are verified later, do not."""
        partial = self.geometry.partial
        return "grammar_masks" in self.executor.state and not (partial is not None and partial.lossless)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The model's own end tokens: those of its configs, then its tokenizer's."""
        ends = self.target.config.eos_token_ids
        own = None if self.codec is None else self.codec.eos_token_id
        if own is None or own in ends or own >= self.target.config.vocab_size:
            return ends
        return (*ends, own)

    @property
    def speculation_limits(self) -> dict[str, Any]:
        """The sizes of speculation, by option; empty where there is none."""
        used = self.speculative
        if used is None:
            return {}
        draft = None if self.geometry.speculator is None else self.geometry.speculator.draft_config
        boundaries = None if draft is None else draft.capture_boundaries
        limits = self.topologies[max(self.ladder.rows_of)].limits
        return {"method": used.method, **limits, "capture_layers": boundaries}

    def make_proposer(self, parts: StepParts) -> Proposer:
        """The source of proposals of this runtime's wide steps, or of none; and of longer blocks of drafts."""
        partial, speculator = self.geometry.partial, self.geometry.speculator
        if partial is not None:
            return Refreshes(parts, partial)
        own = Proposer(parts)
        if speculator is not None and speculator.wide_rows:
            own = WideSteps(parts, speculator.wide_rows, speculator.wide_source)
        elif speculator is not None and speculator.longer_draft_length and self.speculative is not None:
            own = LongerDrafts(parts, self.speculative.num_speculative_tokens)
        return ForcedSteps(own) if any(self.ladder.wide_steps(1, each) for each in (WIDE, PROPOSED)) else own

    def close(self) -> None:
        """End the tokenizer's process, and release the executor's buffers and weights."""
        if self.codec is not None:
            self.codec.close()
        self.executor.close()


def load(
    model: str | Path | OpenedTarget,
    speculative: SpeculativeConfig | None,
    options: RuntimeConfig,
    progress: Progress | None = None,
    captured: Progress | None = None,
    downloaded: Progress | None = None,
    reserve: Reserve | None = None,
) -> Loaded:
    """Load a target and, where asked for, its speculator; allocate everything, compile and capture what runs on a GPU.

    model      a directory; or a target whose weights come from elsewhere, opened in the dtype that it is to have
    progress   called with bytes read and bytes in all; captured with buckets captured and buckets in all; downloaded
               with bytes fetched and bytes in all, for each model that is a repository's name
    reserve    called before any memory is taken, with what is needed of each device; it may wait until others have made
               way

    Raises ConfigError; for a draft model that cannot be used only if `speculative.strict` or perf_mode is strict,
    otherwise it is one warning and the baseline.
    """
    _check_call(model, speculative, progress, captured, downloaded, reserve)
    choice = choose_device(f"cuda:{options.devices[0]}" if options.devices else options.device, options.executor)
    _say(choice)
    target = model
    if not isinstance(target, OpenedTarget):
        fetched = fetch_target(target, dtype=options.dtype, progress=downloaded)
        target = open_target(fetched, dtype=options.dtype, progress=progress)
    if options.kv_cache_dtype == "fp8":
        target = code_kv(target)
    elif options.kv_cache_dtype == "bf16" and target.config.dtype != "bfloat16":
        raise ConfigError(f"kv_cache_dtype 'bf16' is of models that run in bfloat16, and this one runs in "
                          f"{target.config.dtype}: take 'auto', or dtype 'bfloat16'")  # fmt: skip
    if options.quantize is not None:
        target = quantise_target(target, Quantiser(options.quantize, options.quantize_lm_head))
    if options.activations is not None:
        target = replace(target, config=code_activations(target.config, display_name(target.directory)))
    target.config.check_context(options.max_context, target.directory / "config.json")
    _say_factors(target.config, options.max_context)
    target = replace(target, config=target.config.for_context(options.max_context))
    codec = TextCodec.load(target.directory)
    speculative, loaded, topologies, error = _load_speculation(
        target, fit_slots(speculative, options.max_batch), options.max_batch, downloaded, must_fit=options.is_strict,
        may_choose=not options.forced_rows,
    )  # fmt: skip
    speculative = with_plain_length(speculative)
    speculator = None if loaded is None else loaded.speculator
    _say_where_drafts_fail(speculator, options.max_context)
    geometry = make_geometry(target.config, speculator, topologies, options, speculative)
    ladder = make_ladder(geometry, topologies, speculative)
    geometries = rank_geometries(geometry, options, speculative)
    ranks = [build_rank(each, ladder, topologies) for each in geometries]
    programs, prefills = ranks[0].programs, ranks[0].prefills
    own: Mapping[str, torch.Tensor] = {} if loaded is None else loaded.weights
    weights = JoinedWeights(target.weights, own)
    settled = settle_executor(choice, options.executor, (*programs.values(), *prefills.values()), weights.shapes())
    if settled is not choice:
        _say(settled)
    choice = settled
    refuse_ranks(options, choice)
    refuse_codes(choice, ranks, geometry.prefill_chunk)
    check_device(options, choice)
    if choice.has_kernels:
        check_positions(geometry, invariant=options.tp_invariant)
    if options.count_tiles:
        from lowlat.engine.tile_counter import check_countable  # which loads the kernels

        check_countable(geometry, topologies)
    own_speculator = geometries[0].speculator
    refuse_parts(choice, geometries[0].config, None if own_speculator is None else own_speculator.draft_config)
    devices = rank_devices(choice, len(ranks), options.devices)
    needs = _check_memory(ranks, weights, choice, devices, reserve, fuse=options.fuse)
    used = None if loaded is None else speculative
    watchdog = options.watchdog_factor, options.watchdog_min_s
    executor = make_executor(
        choice, programs, prefills, weights, captured, ranks=ranks, devices=devices, device_loop=options.device_loop,
        fuse=options.fuse, hooks=not options.is_strict, watchdog=watchdog, can_sleep=options.can_sleep,
    )  # fmt: skip
    try:
        check_launches(options, executor.counts, used)
        costs = None
        if geometry.max_draft_length is not None:
            costs = set_costs(
                executor, ladder, geometries[0], programs, weights.shapes(), fuse=options.fuse,
                read_gb_s=_gpu_of(executor).read_gb_s,
            )  # fmt: skip
    except LowlatError:
        executor.close()
        raise
    rank_config, memory = ranks[0].config, held_memory(needs, devices)
    return Loaded(
        target,
        codec,
        loaded,
        used,
        geometry,
        ladder,
        topologies,
        executor,
        choice,
        error,
        rank_config,
        memory,
        costs,
    )


def _gpu_of(executor: Executor) -> Gpu:
    launcher = getattr(executor, "launcher", None)
    return H200 if launcher is None else launcher.gpu


def _check_call(model: object, speculative: object, *told: object) -> None:
    """Refuse arguments of `Runtime.load` that are of another type than it takes. Raises ConfigError naming them."""
    if not isinstance(model, (str, Path, OpenedTarget)) or not str(model):
        raise ConfigError(f"model must be a directory or ORG/NAME of a repository, got {model!r:.80}")
    if not isinstance(speculative, (SpeculativeConfig, NoneType)):
        raise ConfigError(f"speculative must be a SpeculativeConfig or None, got {type(speculative).__name__}")
    for name, function in zip(("progress", "captured", "downloaded", "reserve"), told, strict=True):
        if function is not None and not callable(function):
            raise ConfigError(f"{name} must be a function or None, got {type(function).__name__}")


def make_ladder(
    geometry: StepGeometry, topologies: Mapping[int, Topology], speculative: SpeculativeConfig | None
) -> StepLadder:
    """The buckets of a runtime."""
    longer = 0 if geometry.speculator is None else geometry.speculator.longer_draft_length
    rows_of = {depth: topology.num_nodes for depth, topology in topologies.items() if depth != longer or not depth}
    adaptive, speculator, partial = geometry.max_draft_length is not None, geometry.speculator, geometry.partial
    length = 0 if speculative is None or speculator is None else speculative.num_speculative_tokens
    must_fit = partial is not None and partial.lossless
    wide = (partial.buffer + 1,) if partial is not None and must_fit else geometry.forced_rows
    return StepLadder(
        bucket_batches(geometry.max_batch), rows_of, adaptive=adaptive, wide=(wide, length), must_fit=must_fit,
        proposed=() if speculator is None else speculator.wide_rows, longer=longer,
    )  # fmt: skip


def make_scheduler(
    ladder: StepLadder,
    geometry: StepGeometry,
    options: RuntimeConfig,
    tiers: CacheTiers | None = None,
    space: HostSpace | None = None,
) -> Scheduler:
    """The scheduler of a runtime, with its KV blocks, the tiers below them, and space for requests without a slot.

    Raises ConfigError for sizes that do not fit each other.
    """
    sizes = geometry.num_blocks, geometry.block_size, geometry.prefill_chunk
    books: list[PoolBook] = [WindowBook(pool, geometry.prefill_chunk) for pool in geometry.window_pools]
    if _snapshot_bytes(geometry):
        interval = -(-options.state_interval // geometry.prefill_chunk) * geometry.prefill_chunk
        books.append(SnapshotBook(geometry.max_batch, geometry.num_snapshots, geometry.prefill_chunk, interval))
    kvcache = KVCache(*sizes, reuse=options.prefix_reuse, share_decoded=options.share_decoded, books=books, tiers=tiers)
    return Scheduler(
        ladder, kvcache, options.max_batch, options.max_queue, geometry.prefill_chunk,
        max_prefill_chunks=geometry.max_prefill_chunks, max_stall_ms=options.max_stall_ms,
        num_overprovision=geometry.overhang, space=space,
    )  # fmt: skip


def build_rank(geometry: StepGeometry, ladder: StepLadder, topologies: Mapping[int, Topology]) -> Rank:
    """The programs of a rank."""
    programs = {bucket: build_program(geometry, bucket, topologies) for bucket in ladder.programs}
    return Rank(geometry.config, programs, build_prefills(geometry))


def _check_memory(
    ranks: Sequence[Rank],
    weights: JoinedWeights,
    choice: DeviceChoice,
    devices: Sequence[torch.device],
    reserve: Reserve | None = None,
    *,
    fuse: bool = True,
) -> list[MemoryNeed]:
    """The need of each rank. Raises ConfigError where the ranks of a device together do not fit there, naming it."""
    shapes = weights.shapes()
    needs = [
        memory_need(
            (*rank.programs.values(), *rank.prefills.values()),
            rank_weights(shapes, rank.config),
            choice.device,
            has_kernels=choice.has_kernels,
            host_load_bytes=weights.arena_bytes + weights.made_bytes,
            gpu=planned_gpu(choice, devices, number),
            rank=(number, len(ranks)),
            fuse=fuse,
        )
        for number, rank in enumerate(ranks)
    ]
    together = {
        device: on_one_device([need for need, own in zip(needs, devices, strict=True) if own == device])
        for device in dict.fromkeys(devices)
    }
    if reserve is not None:
        reserve([DeviceNeed(str(own), need.total_bytes, available_bytes(own)) for own, need in together.items()])
    for device, need in together.items():
        check_fits(need, device)
    return needs


def build_program(geometry: StepGeometry, bucket: Bucket, topologies: Mapping[int, Topology]) -> Program:
    """The program of one bucket."""
    if geometry.max_draft_length is not None:
        return build_adaptive(geometry, bucket)
    return build_step(geometry, bucket, topologies[bucket.num_speculative_tokens])


def _say(choice: DeviceChoice) -> None:
    """Log where the runtime runs, as a warning where that is not what a user would expect."""
    level = logging.WARNING if choice.loud else logging.INFO
    logger.log(level, "running on %s: %s", choice.device, choice.reason)


def _load_speculation(
    target: OpenedTarget,
    speculative: SpeculativeConfig | None,
    max_batch: int,
    downloaded: Progress | None,
    *,
    must_fit: bool,
    may_choose: bool,
) -> tuple[SpeculativeConfig | None, LoadedSpeculator | None, dict[int, Topology], str | None]:
    """The options with their method settled, the speculator, what it drafts by draft length, and why there is none."""
    baseline: dict[int, Topology] = {0: TreeTopology.chain(0)}
    if speculative is None or not speculative.enabled:
        return speculative, None, baseline, None
    topologies = make_topologies(speculative, max_batch)
    try:
        speculative = settled(speculative, target.directory)
        loaded = load_speculator(fetch_speculator(speculative, target.config, downloaded), target.config, target)
    except ConfigError as error:
        if speculative.strict or must_fit:
            raise
        logger.warning("speculation is off, decoding goes on without it: %s", error)
        return speculative, None, baseline, str(error)
    for note in loaded.notes:
        logger.info("draft model %s: %s", loaded.directory, note)
    chosen = with_default_length(speculative, target.config, loaded.speculator, max_batch, may_choose=may_choose)
    if chosen is not speculative:
        speculative, topologies = chosen, make_topologies(chosen, max_batch)
    return speculative, loaded, topologies, None


def _say_factors(config: ModelConfig, max_context: int) -> None:
    """Warn that RoPE's long factors hold in short texts, too, where the context is longer than the trained one."""
    for rotation in config.rotations:
        trained = rotation.rope.original_max_position
        if rotation.rope.has_long_factors and max_context > trained:
            logger.warning(
                "max_context %d is above the trained context of %d tokens (original_max_position_embeddings): RoPE's "
                "long factors hold for all texts, shorter ones too, as other servers have it; --max-context %d has the "
                "short factors", max_context, trained, trained,
            )  # fmt: skip
            return


def _say_where_drafts_fail(speculator: Speculator | None, max_context: int) -> None:
    """Warn of a draft model that attends to more positions than it has: tokens stay right, and drafts are wrong."""
    draft = None if speculator is None else speculator.draft_config
    if (
        draft is not None
        and speculator is not None
        and speculator.attends_everything
        and max_context > draft.max_position
    ):
        logger.warning(
            "the draft model has %d positions (max_position_embeddings) and max_context is %d: beyond them few of its "
            "drafts are accepted; draft_window (--draft-window), say 512, keeps an EAGLE3 or P-EAGLE draft model's "
            "attention to so many of the last positions", draft.max_position, max_context,
        )  # fmt: skip


def make_topologies(speculative: SpeculativeConfig, max_batch: int = 1) -> dict[int, Topology]:
    """The topology for each depth S: chains of every depth, and of a longer block; or the baseline and the tree.

    Of more than FEW_SLOTS slots, which have more buckets, chains are no longer than what was asked for. Raises
    ConfigError.
    """
    depth, top_k = speculative.num_speculative_tokens, speculative.dynamic_tree_max_topk
    if top_k is not None:
        drafts = speculative.max_total_draft_tokens or DEFAULT_DRAFT_TOKENS
        return {0: TreeTopology.chain(0), depth: DynamicTree(depth, top_k, drafts + 1)}
    if speculative.tree is None:
        is_limited, longer = speculative.adaptive_width or max_batch > FEW_SLOTS, speculative.max_block_drafts
        most = speculative.num_speculative_tokens if is_limited else MAX_SPECULATIVE_TOKENS
        return {s: TreeTopology.line(s + 1) for s in (*range(most + 1), *([longer] if longer else []))}
    tree = TreeTopology.load(
        speculative.tree,
        max_path_len=speculative.max_path_len,
        max_decoding_tokens=speculative.max_decoding_tokens,
        max_non_leaves_per_layer=speculative.max_non_leaves_per_layer,
    )
    if tree.depth != speculative.num_speculative_tokens:
        raise ConfigError(
            f"the tree is {tree.depth} deep but num_speculative_tokens is {speculative.num_speculative_tokens}; "
            "set it to the tree's depth"
        )
    return {0: TreeTopology.chain(0), tree.depth: tree}


def make_geometry(
    config: ModelConfig,
    speculator: Speculator | None,
    topologies: Mapping[int, Topology],
    options: RuntimeConfig,
    speculative: SpeculativeConfig | None,
) -> StepGeometry:
    """The shapes of all programs; the pool defaults to max_batch requests of the largest size.

    Raises ConfigError for a tree that asks for more tokens after one than the draft model has.
    """
    config = config.for_context(options.max_context)
    _check_choices(speculator, topologies)
    _check_layers(config, topologies, speculative)
    max_rows = max(topology.num_nodes for topology in topologies.values())
    num_drafted_rows = max(topology.num_drafted_rows for topology in topologies.values())
    simulated = speculative if speculator is not None else None
    forced_rows = _forced_rows(options, simulated)
    plans = [weight_plan(config), {} if speculator is None else speculator.weight_plan(config.dtype)]
    own = [float(sum(prod(shape) * dtype.itemsize for shape, dtype in plan.values())) for plan in plans]
    partial = None if simulated is None else partial_kv(simulated, options, config, max_rows, *own)
    path_width = max(topology.path_width for topology in topologies.values())
    if partial is not None and partial.lossless:
        max_rows = path_width = max(max_rows, partial.buffer + 1)
        logger.info("SpecPV is lossless: from %d tokens on steps over a part of the KV cache propose, and steps over "
                    "all of it verify", partial.threshold)  # fmt: skip
    elif partial is not None:
        logger.warning("SpecPV is on, which is lossy: from %d tokens on steps attend to a part of the KV cache, and "
                       "tokens may differ from the target's", partial.threshold)  # fmt: skip
    if speculator is not None and speculator.wide_rows:
        max_rows = path_width = max(max_rows, *speculator.wide_rows)
    if forced_rows:
        max_rows, path_width = max(max_rows, *forced_rows), max(path_width, *forced_rows)
        _check_paths(options, topologies, path_width)
    worst = -(-(options.max_context + max(max_rows, num_drafted_rows)) // options.block_size)
    num_blocks = options.kv_blocks if options.kv_blocks is not None else options.max_batch * worst + 1
    geometry = StepGeometry(
        config=config,
        speculator=speculator,
        max_batch=options.max_batch,
        max_context=options.max_context,
        max_rows=max_rows,
        num_paths=max(topology.num_paths for topology in topologies.values()),
        path_width=path_width,
        block_size=options.block_size,
        num_blocks=num_blocks,
        prefill_chunk=options.prefill_chunk,
        max_prefill_chunks=_chunks_at_once(options),
        simulated_acceptance=None if simulated is None else simulated.imposed_acceptance,
        simulated_seed=0 if simulated is None else simulated.simulated_seed,
        num_drafted_rows=num_drafted_rows,
        partial=partial,
        max_draft_length=_max_draft_length(speculator, speculative),
        forced_rows=forced_rows,
        prompt_logits=options.prompt_logits,
        prompt_logprobs=options.prompt_logprobs and not options.is_strict,
        checks=_checks(options, has_partial=partial is not None),
    )
    per_chunk, num_requests = options.prefill_chunk // options.block_size, max(options.max_batch, num_blocks // worst)
    pools = [pool.default_blocks(worst, per_chunk, num_requests) for pool in geometry.window_pools]
    return replace(geometry, window_blocks=tuple(pools), num_snapshots=_num_snapshots(geometry, options))


def _snapshot_bytes(geometry: StepGeometry) -> int:
    """Bytes of a snapshot of all states that need one for a prompt to go on; 0: none does."""
    return sum(state.snapshot_bytes for state in geometry.sequence_states)


def _num_snapshots(geometry: StepGeometry, options: RuntimeConfig) -> int:
    """Snapshots that the memory for them holds, no more than MAX_SNAPSHOTS a slot."""
    size = _snapshot_bytes(geometry)
    if not size or not options.prefix_reuse:
        return 0
    return min(int(options.state_cache_gib * (1 << 30)) // size, MAX_SNAPSHOTS * options.max_batch)


def _check_layers(
    config: ModelConfig, topologies: Mapping[int, Topology], speculative: SpeculativeConfig | None
) -> None:
    """Raise ConfigError for trees, and for steps over a part of a text, where a target's layers take chains alone."""
    layers = next((layer.mixer.chains_only for layer in config.layers if layer.mixer.chains_only), None)
    if layers is None:
        return
    if speculative is not None and speculative.enable_specpv:
        raise ConfigError(
            f"enable_specpv is not implemented for targets with {layers}, whose states hold all of a text; leave it out"
        )
    if any(not topology.is_chain for topology in topologies.values()):
        raise ConfigError(
            f"trees of drafts are not implemented for targets with {layers}, whose states follow one chain; leave out "
            "tree and dynamic_tree_max_topk"
        )


def _forced_rows(options: RuntimeConfig, used: SpeculativeConfig | None) -> tuple[int, ...]:
    """The rows of steps that verify what grammars force. Raises ConfigError next to options that have none."""
    if not options.forced_rows:
        return ()
    refused = {} if used is None else {
        "enable_specpv": used.enable_specpv,
        "adaptive_width (num_speculative_tokens 'auto')": used.adaptive_width,
        "simulated_acceptance and simulated_accept_length": used.imposed_acceptance is not None,
    }  # fmt: skip
    for name, is_given in refused.items():
        if is_given:
            raise ConfigError(f"forced_rows {options.forced_rows} is not implemented for {name}; leave one of them out")
    return tuple(rows for rows in WIDE_ROWS if rows <= options.forced_rows)


def _check_paths(options: RuntimeConfig, topologies: Mapping[int, Topology], path_width: int) -> None:
    """Raise ConfigError for a tree of so many paths that a step cannot lay them out as long as forced text is."""
    num_paths = max(topology.num_paths for topology in topologies.values())
    most = MAX_PATH_NODES // (num_paths * path_width)
    if options.max_batch > most:
        raise ConfigError(
            f"forced_rows {options.forced_rows} next to a tree of {num_paths} paths is for max_batch {most} at most, "
            f"got {options.max_batch}; lower one of them, take a tree of fewer leaves, or leave forced_rows out"
        )


def _checks(options: RuntimeConfig, *, has_partial: bool) -> CheckedKinds | None:
    """The checks of each step. Raises ConfigError for a fallback that steps over a part of the cache do not have."""
    kinds, falls_back = options.checked_kinds, options.on_failed_check == "single"
    if falls_back and has_partial:
        raise ConfigError("on_failed_check 'single' is not implemented for enable_specpv; take 'end'")
    return CheckedKinds("masks" in kinds, "spans" in kinds, "lengths" in kinds, falls_back) if kinds else None


def _check_choices(speculator: Speculator | None, topologies: Mapping[int, Topology]) -> None:
    draft = None if speculator is None else speculator.draft_config
    most = max(topology.num_choices for topology in topologies.values())
    if draft is not None and most > draft.draft_vocab_size:
        raise ConfigError(
            f"the tree asks for the {most} likeliest tokens after one (tree, or dynamic_tree_max_topk), and the draft "
            f"model has {draft.draft_vocab_size} tokens (draft_vocab_size); make the tree narrower"
        )


def rank_geometries(
    geometry: StepGeometry, options: RuntimeConfig, speculative: SpeculativeConfig | None
) -> list[StepGeometry]:
    """The shapes of each rank's programs. Raises ConfigError for a target, or options, that do not allow them.

    A draft model that cannot be cut is whole on every rank, unless it was asked for.
    """
    size = options.tensor_parallel_size
    if geometry.partial is not None and size > 1:
        raise ConfigError(f"enable_specpv is not implemented for tensor_parallel_size {size}; leave one of them out")
    configs = rank_configs(geometry.config, size, invariant=options.tp_invariant)
    speculator, asked = geometry.speculator, None if speculative is None else speculative.draft_tensor_parallel_size
    draft = None if speculator is None else speculator.draft_config
    if asked not in (None, 1, size):
        raise ConfigError(f"draft_tensor_parallel_size must be 1 or tensor_parallel_size {size}, got {asked}")
    if configs[0].shard is None or draft is None or speculator is None or asked == 1:
        return [replace(geometry, config=config) for config in configs]
    try:
        parts = rank_drafts(configs, draft)
    except ConfigError as error:
        if asked is not None:
            raise
        logger.info("the draft model is whole on every GPU: %s", error)
        return [replace(geometry, config=config) for config in configs]
    return [replace(geometry, config=config, speculator=speculator.with_config(own)) for config, own in parts]


def _chunks_at_once(options: RuntimeConfig) -> int:
    """Chunks of a prompt that run at once, no more than it can have; one where all positions leave their logits."""
    if options.prompt_logits:
        return 1
    return min(options.max_prefill_chunks, -(-options.max_context // options.prefill_chunk))


def _max_draft_length(speculator: Speculator | None, speculative: SpeculativeConfig | None) -> int | None:
    """The greatest draft length, where the device chooses each step's. Raises ConfigError where it cannot."""
    if speculator is None or speculative is None or not speculative.adaptive_width:
        return None
    if speculator.waiting_boundaries is None:
        raise ConfigError(
            f"adaptive_width (num_speculative_tokens 'auto') is not implemented for method {speculative.method!r} "
            f"with text_drafts {speculative.text_drafts!r}; give a number of tokens, or leave text_drafts out"
        )
    return speculative.num_speculative_tokens


def bucket_batches(max_batch: int) -> list[int]:
    """Powers of two up to the largest, which is always there."""
    return sorted({1 << power for power in range(max_batch.bit_length()) if 1 << power < max_batch} | {max_batch})
