"""This module computes the shapes of a runtime's programs, for all ranks, and refuses options that do not fit."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from math import prod

from lowlat.engine.loading.pool_size import settle_pools
from lowlat.errors import ConfigError
from lowlat.kernels.reference.step.slots import MAX_PATH_NODES
from lowlat.models.geometry import ModelConfig
from lowlat.models.partial_kv import PartialKV, partial_kv
from lowlat.models.prefill_chunks import most_prefill_chunks
from lowlat.models.shard import rank_configs, rank_drafts
from lowlat.models.weight_plan import WeightPlan, weight_plan
from lowlat.options.runtime import RuntimeConfig
from lowlat.options.speculative import SpeculativeConfig
from lowlat.options.speculative_checks import WIDE_ROWS
from lowlat.speculators.base import Speculator
from lowlat.speculators.tree.dynamic import DynamicTree, Topology
from lowlat.step.checks import CheckedKinds
from lowlat.step.state import StepGeometry

__all__ = ["check_countable", "chunks_of_context", "make_geometry", "rank_geometries"]

logger = logging.getLogger("lowlat")


def make_geometry(
    config: ModelConfig,
    speculator: Speculator | None,
    topologies: Mapping[int, Topology],
    options: RuntimeConfig,
    speculative: SpeculativeConfig | None,
) -> StepGeometry:
    """Compute the shapes of all programs; the pool defaults to max_batch requests of the largest size.

    With kv_cache_gib 'free' it holds one such request here; `lowlat.engine.loading.pool_size.fill_devices` grows it.
    Raises ConfigError for a tree that asks for more tokens after one than the draft model has, and for a kv_cache_gib
    below one request of the largest size.
    """
    config = config.for_context(options.max_context)
    _check_choices(speculator, topologies)
    _check_layers(config, topologies, speculative)
    max_rows = max(topology.num_nodes for topology in topologies.values())
    num_drafted_rows = max(topology.num_drafted_rows for topology in topologies.values())
    used = speculative if speculator is not None else None
    forced_rows = _forced_rows(options, used)
    partial = None
    if used is not None and speculator is not None:
        target_bytes = _num_bytes(weight_plan(config))
        draft_bytes = _num_bytes(speculator.weight_plan(config.dtype))
        partial = partial_kv(used, options, config, max_rows, target_bytes, draft_bytes)
    path_width = max(topology.path_width for topology in topologies.values())
    if partial is not None:
        _log_partial(partial)
        if partial.lossless:
            max_rows = path_width = max(max_rows, partial.buffer + 1)
    if speculator is not None and speculator.wide_rows:
        max_rows = path_width = max(max_rows, *speculator.wide_rows)
    if forced_rows:
        max_rows, path_width = max(max_rows, *forced_rows), max(path_width, *forced_rows)
        _check_paths(options, topologies, path_width)
    geometry = StepGeometry(
        config=config,
        speculator=speculator,
        max_batch=options.max_batch,
        max_context=options.max_context,
        max_rows=max_rows,
        num_paths=max(topology.num_paths for topology in topologies.values()),
        path_width=path_width,
        block_size=options.block_size,
        num_blocks=0,
        prefill_chunk=options.prefill_chunk,
        max_prefill_chunks=chunks_of_context(config, options),
        simulated_acceptance=None if used is None else used.imposed_acceptance,
        simulated_seed=0 if used is None else used.simulated_seed,
        num_drafted_rows=num_drafted_rows,
        partial=partial,
        max_draft_length=_max_draft_length(speculator, speculative),
        forced_rows=forced_rows,
        prompt_logits=options.prompt_logits,
        prompt_logprobs=options.prompt_logprobs and not options.is_strict,
        checks=_checks(options, has_partial=partial is not None),
    )
    return settle_pools(geometry, options, lambda whole: _cut(whole, options, speculative)[0])


def _num_bytes(plan: WeightPlan) -> float:
    """The bytes of all weights of a plan."""
    return float(sum(prod(shape) * dtype.itemsize for shape, dtype in plan.values()))


def _log_partial(partial: PartialKV) -> None:
    """Log from which length SpecPV applies; warn if tokens may differ from the target's."""
    if partial.lossless:
        logger.info("SpecPV is lossless: from %d tokens on steps over a part of the KV cache propose, and steps over "
                    "all of it verify", partial.threshold)  # fmt: skip
    else:
        logger.warning("SpecPV is on, which is lossy: from %d tokens on steps attend to a part of the KV cache, and "
                       "tokens may differ from the target's", partial.threshold)  # fmt: skip


def _check_layers(
    config: ModelConfig, topologies: Mapping[int, Topology], speculative: SpeculativeConfig | None
) -> None:
    """Raise ConfigError for trees and for SpecPV if the target has layers that work with chains only."""
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
    """The rows of steps that verify forced text. Raises ConfigError together with options that exclude such steps."""
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
    """Raise ConfigError for a tree with more paths than a step can lay out at the length of forced text."""
    num_paths = max(topology.num_paths for topology in topologies.values())
    most = MAX_PATH_NODES // (num_paths * path_width)
    if options.max_batch > most:
        raise ConfigError(
            f"forced_rows {options.forced_rows} next to a tree of {num_paths} paths is for max_batch {most} at most, "
            f"got {options.max_batch}; lower one of them, take a tree of fewer leaves, or leave forced_rows out"
        )


def _checks(options: RuntimeConfig, *, has_partial: bool) -> CheckedKinds | None:
    """The checks of each step. Raises ConfigError for a fallback that SpecPV's steps do not have."""
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


def chunks_of_context(config: ModelConfig, options: RuntimeConfig) -> int:
    """The most chunks of a prompt that run at once, at most those of max_context; 1 with prompt_logits."""
    if options.prompt_logits:
        return 1
    most = most_prefill_chunks(config, options.prefill_chunk, options.max_prefill_chunks)
    return min(most, -(-options.max_context // options.prefill_chunk))


def _max_draft_length(speculator: Speculator | None, speculative: SpeculativeConfig | None) -> int | None:
    """The largest draft length if the device chooses each step's; else None. Raises ConfigError if it cannot."""
    if speculator is None or speculative is None or not speculative.adaptive_width:
        return None
    if speculator.waiting_boundaries is None:
        raise ConfigError(
            f"adaptive_width (num_speculative_tokens 'auto') is not implemented for method {speculative.method!r} "
            f"with text_drafts {speculative.text_drafts!r}; give a number of tokens, or leave text_drafts out"
        )
    return speculative.num_speculative_tokens


def rank_geometries(
    geometry: StepGeometry, options: RuntimeConfig, speculative: SpeculativeConfig | None
) -> list[StepGeometry]:
    """Compute the shapes of each rank's programs. Raises ConfigError for a target or options that forbid the cut.

    A draft model that cannot be cut is whole on every rank, unless the options ask for the cut.
    """
    ranks, problem = _cut(geometry, options, speculative)
    if problem is not None:
        logger.info("the draft model is whole on every GPU: %s", problem)
    return ranks


def _cut(
    geometry: StepGeometry, options: RuntimeConfig, speculative: SpeculativeConfig | None
) -> tuple[list[StepGeometry], ConfigError | None]:
    """Compute the shapes of each rank's programs, and why the draft model could not be cut; None: no problem.

    Raises ConfigError as `rank_geometries` does.
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
        return [replace(geometry, config=config) for config in configs], None
    try:
        parts = rank_drafts(configs, draft)
    except ConfigError as error:
        if asked is not None:
            raise
        return [replace(geometry, config=config) for config in configs], error
    return [replace(geometry, config=config, speculator=speculator.with_config(own)) for config, own in parts], None


def check_countable(geometry: StepGeometry, topologies: Mapping[int, Topology]) -> None:
    """Raise ConfigError if a step's attention tiles cannot be counted from what it publishes."""
    from lowlat.kernels.attention.launch_plan import TILE_BYTES  # imported only on machines that run kernels

    problem = None
    if any(isinstance(topology, DynamicTree) for topology in topologies.values()):
        problem = "counts chains and static trees, and dynamic_tree_max_topk makes a dynamic one"
    elif more := _verifying_more(geometry):
        problem = f"counts steps of the draft length asked for, and {more} verifies more"
    elif geometry.partial is not None:
        problem = "counts attention to all of the KV cache, and enable_specpv attends to a part of it"
    elif uncounted := {spec.head_dim for spec in geometry.config.attentions.values()} - set(TILE_BYTES):
        sizes = ", ".join(map(str, TILE_BYTES))
        problem = f"counts the tiles of heads of {sizes}, and the target has some of {min(uncounted)}"
    if problem is not None:
        raise ConfigError(f"count_tiles {problem}; leave it out")


def _verifying_more(geometry: StepGeometry) -> str:
    """The option with which a step verifies more rows than the draft length asks for; "" if there is none."""
    own = geometry.speculator
    if own is not None and (own.wide_rows or own.longer_draft_length):
        return "wide_rows" if own.wide_rows else "max_block_drafts"
    return "forced_rows" if geometry.forced_rows else ""
