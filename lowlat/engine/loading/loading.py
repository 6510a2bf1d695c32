"""This module makes a ready executor from options: checkpoint, tokenizer, speculator, programs, buffers.

Small files are read first: configs, headers of weights, the tokenizer. A speculator is loaded whole before the target's
weights: if it is damaged, the load can go on without it. The target's weights are streamed from their files to their
final place one at a time, while the executor is made. If loading fails, everything is freed.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType

import torch

from lowlat.checkpoint.source import JoinedWeights
from lowlat.engine.loading.geometry import check_countable, make_geometry, rank_geometries
from lowlat.engine.loading.loaded import Loaded, gpu_of
from lowlat.engine.loading.pool_size import check_free, fill_devices, kv_bytes, takes_all_free
from lowlat.engine.loading.programs import build_rank, make_ladder
from lowlat.engine.loading.speculation import load_speculation
from lowlat.engine.loading.strict import check_device, check_launches
from lowlat.engine.loading.target import load_target
from lowlat.engine.memory.held import held_memory
from lowlat.engine.memory.plan import DeviceNeed, check_ranks, plan_ranks
from lowlat.errors import ConfigError, LowlatError
from lowlat.executors.devices import DeviceChoice, choose_device, rank_devices
from lowlat.executors.make import (
    Rank,
    check_positions,
    make_executor,
    refuse_codes,
    refuse_parts,
    refuse_ranks,
    settle_executor,
)
from lowlat.models.target import OpenedTarget
from lowlat.options.runtime import RuntimeConfig
from lowlat.options.speculative import SpeculativeConfig
from lowlat.step.draft_length_times import set_costs
from lowlat.step.state import StepGeometry
from lowlat.text import TextCodec

__all__ = ["load"]

logger = logging.getLogger("lowlat")
Progress = Callable[[int, int], None]
Reserve = Callable[[Sequence[DeviceNeed]], None]


def load(
    model: str | Path | OpenedTarget,
    speculative: SpeculativeConfig | None,
    options: RuntimeConfig,
    progress: Progress | None = None,
    captured: Progress | None = None,
    downloaded: Progress | None = None,
    reserve: Reserve | None = None,
) -> Loaded:
    """Load a target and, with `speculative`, its speculator; allocate all memory; on a GPU compile and capture.

    model      a directory; or an `OpenedTarget` in the wanted dtype
    progress   called with bytes read and bytes in all; captured with buckets captured and buckets in all; downloaded
               with bytes fetched and bytes in all, for each model that is a repository's name
    reserve    called before any memory is taken, with what is needed of each device; it may wait until others have made
               way

    Raises ConfigError; for a draft model that cannot be used only if `speculative.strict` or perf_mode is strict,
    otherwise it is one warning and the baseline.
    """
    _check_call(model, speculative, progress, captured, downloaded, reserve)
    choice = choose_device(f"cuda:{options.devices[0]}" if options.devices else options.device, options.executor)
    _log_choice(choice)
    check_free(options, choice.device, shares=reserve is not None)
    target = load_target(model, options, progress, downloaded)
    codec = TextCodec.load(target.directory)
    speculation = load_speculation(target, speculative, options, downloaded)
    asked, topologies = speculation.asked, speculation.topologies
    geometry = make_geometry(target.config, speculation.speculator, topologies, options, asked)
    ladder = make_ladder(geometry, topologies, asked)
    geometries = rank_geometries(geometry, options, asked)
    ranks = [build_rank(each, ladder, topologies) for each in geometries]
    weights = JoinedWeights(target.weights, speculation.weights)
    choice = _settled_choice(choice, options, ranks[0], weights.shapes())
    _refuse_unfit(choice, options, geometries, ranks)
    if options.count_tiles:
        check_countable(geometry, topologies)
    devices = rank_devices(choice, len(ranks), options.devices)
    plans = plan_ranks(ranks, weights, choice, devices, fuse=options.fuse)
    if takes_all_free(options):
        needs = [plan.need for plan in plans]
        geometry, geometries = fill_devices(geometry, geometries, options, needs, devices)
        ranks = [build_rank(each, ladder, topologies) for each in geometries]
        plans = plan_ranks(ranks, weights, choice, devices, fuse=options.fuse)
    check_ranks(plans, devices, reserve)
    _log_sizes(geometry, geometries)
    executor = make_executor(
        choice, ranks, weights, captured, devices=devices, device_loop=options.device_loop, fuse=options.fuse,
        hooks=not options.is_strict, watchdog=(options.watchdog_factor, options.watchdog_min_s),
        can_sleep=options.can_sleep, planned=[plan.workspaces for plan in plans if plan.workspaces is not None],
    )  # fmt: skip
    try:
        check_launches(options, executor.counts, geometry.config, speculation.used)
        costs = None
        if geometry.max_draft_length is not None:
            costs = set_costs(
                executor, ladder, geometries[0], ranks[0].programs, weights.shapes(), fuse=options.fuse,
                read_gb_s=gpu_of(executor).read_gb_s,
            )  # fmt: skip
    except LowlatError:
        executor.close()
        raise
    return Loaded(
        target=target,
        codec=codec,
        speculation=speculation,
        geometry=geometry,
        ladder=ladder,
        executor=executor,
        choice=choice,
        rank_config=ranks[0].config,
        memory=held_memory([plan.need for plan in plans], devices),
        costs=costs,
    )


def _settled_choice(
    choice: DeviceChoice, options: RuntimeConfig, rank: Rank, weights: Mapping[str, torch.Tensor]
) -> DeviceChoice:
    """The executor for these programs, see `settle_executor`; a change is logged."""
    programs = (*rank.programs.values(), *rank.prefills.values())
    settled = settle_executor(choice, options.executor, programs, weights)
    if settled is not choice:
        _log_choice(settled)
    return settled


def _refuse_unfit(
    choice: DeviceChoice, options: RuntimeConfig, geometries: Sequence[StepGeometry], ranks: Sequence[Rank]
) -> None:
    """Raise ConfigError for options and shapes that the chosen executor does not support."""
    first = geometries[0]
    refuse_ranks(options, choice)
    refuse_codes(choice, ranks, first.prefill_chunk)
    check_device(options, choice)
    if choice.has_kernels:
        check_positions(first, invariant=options.tp_invariant)
    refuse_parts(choice, first.config, None if first.speculator is None else first.speculator.draft_config)


def _log_sizes(geometry: StepGeometry, ranks: Sequence[StepGeometry]) -> None:
    """Log the tokens and requests that the KV cache can hold, its size on a rank's device, and the most positions of a
    prompt that are prefilled at once."""
    tokens, size = geometry.num_kv_tokens, max(map(kv_bytes, ranks)) / 2**30
    count = (geometry.num_blocks - 1) // geometry.table_width
    logger.info("the KV cache holds %d tokens, %d requests of max_context %d, in %.2f GiB%s", tokens, count,
                geometry.max_context, size, " of each GPU" if len(ranks) > 1 else "")  # fmt: skip
    logger.info("prompts are read %d positions at once at most, %d chunks of %d", geometry.prefill_sizes[-1],
                geometry.max_prefill_chunks, geometry.prefill_chunk)  # fmt: skip


def _check_call(model: object, speculative: object, *told: object) -> None:
    """Refuse arguments of `Runtime.load` of a wrong type. Raises ConfigError naming them."""
    if not isinstance(model, (str, Path, OpenedTarget)) or not str(model):
        raise ConfigError(f"model must be a directory or ORG/NAME of a repository, got {model!r:.80}")
    if not isinstance(speculative, (SpeculativeConfig, NoneType)):
        raise ConfigError(f"speculative must be a SpeculativeConfig or None, got {type(speculative).__name__}")
    for name, function in zip(("progress", "captured", "downloaded", "reserve"), told, strict=True):
        if function is not None and not callable(function):
            raise ConfigError(f"{name} must be a function or None, got {type(function).__name__}")


def _log_choice(choice: DeviceChoice) -> None:
    """Log the runtime's device and executor, as a warning if a user would not expect them."""
    level = logging.WARNING if choice.loud else logging.INFO
    logger.log(level, "running on %s: %s", choice.device, choice.reason)
