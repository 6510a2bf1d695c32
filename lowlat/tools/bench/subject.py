"""This module has the subject of a measurement: a target, its speculation, and the runtime's options."""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lowlat.engine.loading.geometry import make_geometry
from lowlat.engine.runtime import Runtime
from lowlat.errors import ConfigError
from lowlat.executors.devices import DeviceChoice, choose_device
from lowlat.executors.make import settle_executor
from lowlat.graphs import Bucket
from lowlat.models.geometry import ModelConfig
from lowlat.models.prefill_chunks import most_prefill_chunks
from lowlat.models.target import OpenedTarget, read_model_config
from lowlat.options.acceptance import acceptance_for
from lowlat.options.installed import installed_version
from lowlat.options.runtime import RuntimeConfig
from lowlat.options.speculative import SpeculativeConfig
from lowlat.speculators.methods import plan_speculator
from lowlat.speculators.mtp.geometry import MtpConfig
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.decode import build_step
from lowlat.text import TextCodec
from lowlat.tools.bench.geometry import Geometry, random_target
from lowlat.tools.bench.machine import changed_commit, driver, processor
from lowlat.tools.bench.prompts import Prompts
from lowlat.tools.bench.results import Environment
from lowlat.tools.draft_model.random_models import DRAFT_MODELS, write_draft_model, write_mtp_layer
from lowlat.tools.tune.pairs import Pair, rounded_pair, weight_shapes

__all__ = ["Subject", "open_model", "open_random"]


@dataclass(frozen=True)
class Subject:
    """A target and a draft model, from which runtimes are loaded.

    speculation  fields of SpeculativeConfig but the depth; None: no drafts
    options      fields of RuntimeConfig: device, dtype, executor, device_loop, perf_mode, max_prefill_chunks,
                 quantize, quantize_lm_head, kv_cache_dtype, activations, tensor_parallel_size
    prompts      the prompts to decode
    temperature  the temperature of sampling; 0: greedy
    """

    target: Path | OpenedTarget
    name: str
    config: ModelConfig
    speculation: Mapping[str, Any] | None
    options: Mapping[str, Any]
    prompts: Prompts
    temperature: float = 0.0

    def drafting(self, **fields: Any) -> "Subject":
        """Return the same subject with these fields of SpeculativeConfig added or replaced."""
        return replace(self, speculation={**(self.speculation or {}), **fields})

    def imposing(self, accept_length: float, depth: int) -> "Subject":
        """Return the same subject with an imposed acceptance: `accept_length` tokens a step at a draft length."""
        return self.drafting(simulated_acceptance=acceptance_for(accept_length, depth), simulated_accept_length=None)

    def speculative(self, depth: int, *, adaptive: bool = False) -> SpeculativeConfig | None:
        """Return the configuration at one draft length, or for chosen ones up to it; None at 0.

        Raises ConfigError if the subject cannot draft.
        """
        if depth == 0:
            return None
        if self.speculation is None:
            raise ConfigError(f"S = {depth} needs a draft model (--draft-model DIR), or --method suffix")
        values = dict(self.speculation)
        if values.get("simulated_accept_length") is not None:
            values["simulated_accept_length"] = min(values["simulated_accept_length"], depth + 1.0)
        values["adaptive_width"] = adaptive or bool(values.get("adaptive_width"))
        return SpeculativeConfig(**values, num_speculative_tokens=depth, strict=True)

    def load(self, depth: int, *, adaptive: bool = False, **sizes: Any) -> Runtime:
        """Load a runtime for draft lengths up to `depth`; sizes are fields of RuntimeConfig. Raises ConfigError."""
        return Runtime.load(self.target, self.speculative(depth, adaptive=adaptive), **self.options, **sizes)

    def choice(self) -> DeviceChoice:
        """Choose the device and the executor. Raises ConfigError."""
        return self._choice

    @cached_property
    def _choice(self) -> DeviceChoice:
        asked = self.options.get("executor", "auto")
        choice = choose_device(self.options.get("device", "auto"), asked)
        if not choice.has_kernels:
            return choice
        speculative = None if self.speculation is None else self.speculative(1)
        files = self.target.directory if isinstance(self.target, OpenedTarget) else self.target
        speculator = None if speculative is None else plan_speculator(speculative, self.config, files)
        options, topology = RuntimeConfig(**self.options), TreeTopology.chain(int(speculator is not None))
        pair = rounded_pair(Pair(self.name, self.config, speculator), options)
        geometry = make_geometry(pair.config, pair.speculator, {topology.depth: topology}, options, None)
        step = build_step(geometry, Bucket(1, topology.num_nodes, topology.depth), topology)
        return settle_executor(choice, asked, [step], weight_shapes(pair))

    def environment(self, commit: str = "") -> Environment:
        """Describe code, machine, model and conditions, without a load; commit: if there is no git checkout to ask.

        Raises ConfigError.
        """
        choice = self.choice()
        cuda = choice.device.type == "cuda"
        return Environment(
            lowlat=installed_version(),
            commit=commit or changed_commit(),
            python=platform.python_version(),
            torch=str(torch.__version__),
            cuda=torch.version.cuda or "",
            gpu=torch.cuda.get_device_name(choice.device) if cuda else "",
            driver=driver() if cuda else "",
            processor=processor(),
            cores=len(os.sched_getaffinity(0)),
            threads=torch.get_num_threads(),
            executor=choice.executor,
            device_loop=bool(self.options.get("device_loop", False)),
            dtype=self.config.dtype,
            model=self.name,
            speculator=self._speculator(),
            prompts=self.prompts.name,
            distinct_prompt_tokens=len(self.prompts.stream),
            temperature=self.temperature,
            simulated=self._simulated(),
            perf_mode=str(self.options.get("perf_mode", "default")),
            quantize=self._quantize(),
            kv_cache_dtype=str(self.options.get("kv_cache_dtype", "auto")),
            activations=str(self.options.get("activations") or ""),
            tensor_parallel_size=int(self.options.get("tensor_parallel_size", 1)),
            max_prefill_chunks=most_prefill_chunks(
                self.config, RuntimeConfig.prefill_chunk, self.options.get("max_prefill_chunks")
            ),
        )

    def _quantize(self) -> str:
        kind = self.options.get("quantize") or ""
        return f"{kind}, LM head too" if kind and self.options.get("quantize_lm_head") else kind

    def _speculator(self) -> str:
        if self.speculation is None:
            return ""
        own = ("method", "model", "simulated_acceptance", "simulated_accept_length")
        values = {key: value for key, value in self.speculation.items() if key not in own and value is not None}
        shown = [str(self.speculation.get("method", "eagle3"))]
        if self.speculation.get("model") is not None:
            shown.append(Path(str(self.speculation["model"])).name)
        return ", ".join([*shown, *(f"{key} {value}" for key, value in values.items())])

    def _simulated(self) -> tuple[str, ...]:
        found = ["weights: random"] if isinstance(self.target, OpenedTarget) else []
        if not self.prompts.stream:
            found.append("prompts: random tokens")
        speculation = self.speculation or {}
        if speculation.get("simulated_acceptance") is not None:
            found.append(f"acceptance: each draft with probability {speculation['simulated_acceptance']:g}, imposed")
        if speculation.get("simulated_accept_length") is not None:
            length = speculation["simulated_accept_length"]
            found.append(f"acceptance: {length:g} tokens a step imposed, by one probability for all positions")
        return tuple(found)


def open_model(
    directory: Path,
    speculation: Mapping[str, Any] | None,
    options: Mapping[str, Any],
    *,
    prompts: Path | None,
    temperature: float = 0.0,
    name: str | None = None,
) -> Subject:
    """Open a model in a directory, named after it by default; prompts come from a file, or are random tokens.

    Raises ConfigError.
    """
    config = read_model_config(directory, dtype=options.get("dtype", "auto"))
    codec = None if prompts is None else TextCodec.load(directory)
    try:
        found = _prompts(prompts, codec, config.vocab_size)
    finally:
        if codec is not None:
            codec.close()
    return Subject(directory, name or directory.resolve().name, config, speculation, options, found, temperature)


def open_random(
    name: str,
    geometry: Geometry,
    speculation: Mapping[str, Any] | None,
    options: Mapping[str, Any],
    *,
    scratch: Path,
    drafts: bool,
    whole_vocabulary: bool = False,
    prompts: Path | None = None,
    temperature: float = 0.0,
) -> Subject:
    """Open a geometry with random weights.

    scratch           a directory for the configs, and for the draft model, which is written if `drafts` is set and
                      none is named
    whole_vocabulary  the draft model drafts all of the target's ids
    Raises ConfigError.
    """
    device = choose_device(options.get("device", "auto"), options.get("executor", "auto")).device
    target = random_target(geometry, scratch / name, options.get("dtype", "auto"), device)
    values = dict(speculation or {})
    method = values.get("method", "eagle3")
    if drafts and method == MtpConfig.method:
        write_mtp_layer(target.config, target.directory)
    if drafts and method in DRAFT_MODELS and values.get("model") is None:
        shape, kind = (geometry.with_whole_vocabulary(), "-whole") if whole_vocabulary else (geometry, "")
        folder = scratch / f"{name}-draft-model{kind}"
        values["model"] = write_draft_model(shape, target.config, folder, method=method)
    found = _prompts(prompts, None, target.config.vocab_size)
    return Subject(target, name, target.config, values or None, options, found, temperature)


def _prompts(path: Path | None, codec: TextCodec | None, vocab_size: int) -> Prompts:
    return Prompts.random(vocab_size) if path is None else Prompts.read(path, codec, vocab_size)
