"""This module makes the reports of `lowlat inspect model` and `inspect draft-model`, as JSON values."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.hub import Download
from lowlat.checkpoint.tensors import INDEX_FILE, SINGLE_FILE, Checkpoint
from lowlat.cli.reports.sizes import Plan, buffer_dict, parts_of, plan_runtime, prefill_dict
from lowlat.cli.running import default_context
from lowlat.engine.loading.pool_size import check_free, takes_all_free
from lowlat.errors import ConfigError
from lowlat.executors.devices import DeviceChoice, choose_device
from lowlat.executors.make import settle_executor
from lowlat.graphs import Paging
from lowlat.graphs.program import Program
from lowlat.models.activations import codable_matrices
from lowlat.models.advice import read_advice
from lowlat.models.geometry import Decoder, DraftConfig, ModelConfig
from lowlat.models.hf_config import read_config
from lowlat.models.layer_spec import LayerSpec
from lowlat.models.target import read_model_config, target_groups
from lowlat.models.weight_plan import weight_plan
from lowlat.options.runtime import RuntimeConfig, options_from
from lowlat.options.speculative import SpeculativeConfig
from lowlat.speculators.eagle3.capture import IDS_KEY, OUTPUTS_KEY, default_boundaries
from lowlat.speculators.eagle3.config import parse_draft
from lowlat.speculators.eagle3.geometry import Eagle3Config
from lowlat.speculators.eagle3.speculator import Eagle3Speculator
from lowlat.speculators.methods import draft_method, plan_speculator

__all__ = ["download_report", "draft_report", "model_report"]


def model_report(
    directory: Path,
    speculative: SpeculativeConfig | None,
    options: dict[str, Any],
    *,
    buffers: bool,
    context_flag: str | None = None,
) -> dict[str, Any]:
    """A target's geometry, parts, KV and memory; with `buffers` those of one step. Raises ConfigError.

    options       of RuntimeConfig; max_context may be None for the usual one
    context_flag  the command line's option for max_context, where it has another name
    With several GPUs "memory" is that of the first one, and "GPUs" has that of each.
    """
    runtime = options_from({**options, "max_context": default_context(directory, options["max_context"])})
    read_model_config(directory).check_context(runtime.max_context, directory / "config.json", flag=context_flag)
    plan = plan_runtime(directory, runtime, speculative)
    config, speculator = plan.geometry.config, plan.geometry.speculator
    depth = 0 if speculative is None else speculative.num_speculative_tokens
    program = plan.program(runtime.max_batch, depth)
    choice = settle_executor(_planned_device(runtime), runtime.executor, [program], plan.weights)
    if takes_all_free(runtime):
        check_free(runtime, choice.device)
        plan = plan.filled(runtime, choice)
        program = plan.program(runtime.max_batch, depth)
    report: dict[str, Any] = {
        "directory": str(directory),
        "device": str(choice.device),
        "executor": choice.executor,
        "device_reason": choice.reason,
        "files": _files(directory, config),
        "geometry": _geometry(config),
        "parts": parts_of(weight_plan(config)),
        "sampling_advice": dict(read_advice(directory)),
        "default_capture_boundaries": default_boundaries(config.num_layers),
        "kv": _kv(plan, program, runtime),
        "prefill": prefill_dict(plan.geometry),
        "memory": plan.memory(choice),
    }
    if len(plan.ranks) > 1:
        report["cards"] = [plan.memory(choice, rank) for rank in range(len(plan.ranks))]
    if speculator is not None:
        report["speculator"] = speculator.report()
        own = speculator.weight_plan(config.dtype)
        if own:
            report["head_parts"] = parts_of(own)
    if buffers:
        report["bucket"] = program.name
        report["buffers"] = [buffer_dict(spec) for spec in program.buffers.values()]
    return report


def download_report(*downloads: Download | None) -> dict[str, Any] | None:
    """Return the downloads that models need, together; None if all are local."""
    wanted = [download for download in downloads if download is not None]
    if not wanted:
        return None
    totals = {"files": sum(each.files for each in wanted), "bytes": sum(each.bytes for each in wanted)}
    return {**totals, "free_bytes": wanted[0].free_bytes, "cache": wanted[0].cache}


def _planned_device(options: RuntimeConfig) -> DeviceChoice:
    """The device that a runtime here would get; one that is named need not be here, nothing is allocated for a plan."""
    try:
        return choose_device(options.device, options.executor)
    except ConfigError as error:
        name, _, index = options.device.partition(":")
        if name != "cuda" or (index and not index.isdigit()):
            raise
        if takes_all_free(options):
            raise ConfigError(f"kv_cache_gib 'free' is what a GPU has left: {error}; give a number of GiB") from error
        executor = "graph" if options.executor == "auto" else options.executor
        return DeviceChoice(torch.device("cuda", int(index or 0)), executor, f"planned alone: {error}")


def _files(directory: Path, config: ModelConfig) -> dict[str, int] | None:
    """The weights' files, their headers compared with the config; None where there are none yet.

    Raises ConfigError for what a runtime would refuse before it reads a weight.
    """
    if not any((directory / name).exists() for name in (SINGLE_FILE, INDEX_FILE)):
        return None
    checkpoint = Checkpoint.open(directory)
    target_groups(config, checkpoint)
    entries = checkpoint.entries.values()
    return {
        "count": len({entry.file for entry in entries}),
        "tensors": len(entries),
        "bytes": sum(entry.num_bytes for entry in entries),
    }


def _kv(plan: Plan, program: Program, options: RuntimeConfig) -> dict[str, Any]:
    """The caches: bytes a token, and the pool, with the tokens that it holds, cached prefixes included.

    `windows` has the pools of layers of windows, where there are any; recurrent states have bytes a slot.
    """
    caches = [spec for spec in program.buffers.values() if spec.paging is Paging.POSITIONS]
    windows = [
        {
            "window": pool.window,
            "num_blocks": pool.num_blocks,
            "bytes": sum(spec.num_bytes for spec in caches if spec.pool == pool.suffix),
        }
        for pool in plan.geometry.window_pools
    ]
    return {
        **plan.kv_bytes_per_token(program),
        "max_context": options.max_context,
        "max_batch": options.max_batch,
        "block_size": options.block_size,
        "num_blocks": plan.geometry.num_blocks,
        "capacity_tokens": plan.geometry.num_kv_tokens,
        "bytes": sum(spec.num_bytes for spec in caches),
        **{name: size for state in plan.geometry.sequence_states for name, size in state.slot_bytes().items()},
        **({"windows": windows} if windows else {}),
    }


def _geometry(config: ModelConfig | DraftConfig) -> dict[str, Any]:
    """A model's geometry: facts of the whole, and each kind of its layers once; of quantised ones the formats alone."""
    values: dict[str, Any] = _plain(asdict(replace(config, quantisation=None, quantiser=None, shard=None)))
    del values["quantisation"], values["quantiser"], values["shard"]
    values |= {"num_layers": config.num_layers, "windows": list(config.windows), "layers": _layer_kinds(config)}
    values.pop("coded_kv", None)
    values.pop("coded_rows", None)
    values |= {"activations": _activations(config)} if isinstance(config, ModelConfig) else {}
    names = set() if config.quantisation is None else set(config.quantisation.format_names)
    names |= set() if config.quantiser is None else {config.quantiser.packed.name}
    return {**values, "layer_formats": sorted(names)} if names else values


def _activations(config: ModelConfig) -> str:
    """Return how layers multiply their inputs, and for how many matrices the rows of prompts can be FP8."""
    if config.coded_rows:
        return f"{config.dtype}; of prompts fp8, for {len(config.coded_rows)} matrices"
    possible = len(codable_matrices(config))
    return config.dtype + (f"; of prompts fp8 for {possible} matrices, with activations 'fp8'" if possible else "")


def _layer_kinds(config: Decoder) -> list[dict[str, Any]]:
    """The different layers of a model, each with the numbers of those that are like it."""
    numbers: dict[LayerSpec, list[int]] = {}
    for number, layer in enumerate(config.layers):
        numbers.setdefault(layer, []).append(number)
    return [{"numbers": found, **asdict(layer)} for layer, found in numbers.items()]


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Tuples as lists, as JSON has them."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def draft_report(directory: Path, target: Path, capture_layers: tuple[int, ...] | None) -> dict[str, Any]:
    """A draft model's method, geometry, flags, layout, boundaries and their convention, draft vocabulary; by headers.

    Raises ConfigError for a draft model that does not fit its target.
    """
    target_config = read_model_config(target)
    method = draft_method(directory)
    speculative = SpeculativeConfig(
        method=method, model=directory, capture_layers=capture_layers, num_speculative_tokens=1
    )
    speculator = plan_speculator(speculative, target_config, target)
    head, notes = speculator.draft_config, tuple[str, ...]()
    if head is None:
        raise ConfigError(f"{directory}: method {method!r} has no draft model")
    if isinstance(speculator, Eagle3Speculator):
        _, _, notes = parse_draft(directory, target_config, capture_layers, speculator.kind)
    values = _geometry(head)
    boundaries = values.pop("capture_boundaries")
    flags = {name: values.pop(name) for name, value in list(values.items()) if isinstance(value, bool)}
    drafted = values["draft_vocab_size"]
    return {
        "directory": str(directory),
        "target": str(target),
        "method": head.method,
        "layout": head.layout,
        "geometry": values,
        "flags": flags,
        "capture": {
            "boundaries": boundaries,
            "target_layers": target_config.num_layers,
            **_convention(directory, head, overridden=capture_layers is not None),
        },
        "draft_vocabulary": {
            "draft_ids": drafted,
            "target_ids": head.vocab_size,
            "share": drafted / head.vocab_size,
            "map": "d2t" if head.own_draft_map else "the identity",
            "lm_head": "the draft model's own" if head.own_lm_head else "the target's",
            "embedding": "the draft model's own" if head.own_embedding else "the target's",
        },
        "parts": parts_of(speculator.weight_plan(target_config.dtype)),
        "notes": list(notes),
    }


def _convention(directory: Path, head: DraftConfig, *, overridden: bool) -> dict[str, Any]:
    """Which ids the config names, where, and what they mean (see `lowlat.speculators.eagle3.capture`)."""
    place, ids = _named_ids(read_config(directory))
    boundaries = list(head.capture_boundaries)
    if not boundaries:
        return {"ids": None, "ids_from": None, "convention": "none: it reads tokens alone"}
    if overridden:
        meaning = "boundaries, from --capture-layers"
    elif isinstance(head, Eagle3Config) and head.final_hidden:
        return {"ids": None, "ids_from": None, "convention": "no auxiliary features: the target's final hidden state"}
    elif ids is None and head.method == "dflash":
        meaning = "no ids: layers spread evenly, from the second to the fourth before the end; outputs"
    elif ids is None:
        meaning = "no ids: the default boundaries 2, N / 2, N - 3"
    elif ids == boundaries:
        meaning = "boundaries: id k is the residual stream entering layer k"
    else:
        meaning = "layers' outputs: id k is boundary k + 1"
    return {"ids": ids, "ids_from": place, "convention": meaning}


def _named_ids(config: Fields) -> tuple[str | None, list[int] | None]:
    """The ids that a draft model's config names and under which key; it has been checked that all places agree."""
    eagle = config.values.get("eagle_config")
    nested = eagle if isinstance(eagle, dict) else {}
    own = config.values.get("dflash_config")
    block = own if isinstance(own, dict) else {}
    for place, values, key in (
        (IDS_KEY, config.values, IDS_KEY),
        (OUTPUTS_KEY, config.values, OUTPUTS_KEY),
        ("aux_hidden_state_layer_ids", config.values, "aux_hidden_state_layer_ids"),
        (f"dflash_config.{OUTPUTS_KEY}", block, OUTPUTS_KEY),
        ("eagle_config.layer_ids", nested, "layer_ids"),
        (f"eagle_config.{IDS_KEY}", nested, IDS_KEY),
    ):
        if values.get(key):
            return place, list(values[key])
    return None, None
