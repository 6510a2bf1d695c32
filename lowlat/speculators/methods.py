"""The methods of speculation by name, the one that the options ask for, and the one that a draft model is for."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from lowlat.checkpoint import hub
from lowlat.checkpoint.quantising import Quantiser, quantised
from lowlat.models.geometry import ModelConfig
from lowlat.models.hf_config import read_config
from lowlat.models.target import rounding
from lowlat.options.config import SpeculativeConfig
from lowlat.speculators.base import LoadedSpeculator, Speculator
from lowlat.speculators.dflash.speculator import DflashSpeculator
from lowlat.speculators.dspark.config import DEEPSPEC
from lowlat.speculators.dspark.speculator import DsparkSpeculator
from lowlat.speculators.eagle3.speculator import Eagle3Speculator
from lowlat.speculators.ngram.speculator import NgramSpeculator
from lowlat.speculators.peagle.config import MASK_KEYS
from lowlat.speculators.peagle.speculator import PeagleSpeculator
from lowlat.speculators.suffix.beside import TextBeside
from lowlat.speculators.suffix.speculator import SuffixSpeculator

__all__ = ["METHODS", "draft_method", "fetch_speculator", "load_speculator", "plan_speculator", "rounded_speculator"]

_CLASSES: tuple[type[Speculator], ...] = (
    DflashSpeculator,
    DsparkSpeculator,
    Eagle3Speculator,
    NgramSpeculator,
    PeagleSpeculator,
    SuffixSpeculator,
)
METHODS: Mapping[str, type[Speculator]] = MappingProxyType({each.method: each for each in _CLASSES})


def draft_method(model: str | Path) -> str:
    """The method that a draft model is for, as its config.json says; `model` is a directory or `ORG/NAME`.

    A config that names no method is taken for EAGLE3's, whose loader refuses by name what does not fit. Raises
    ConfigError for a config that cannot be read.
    """
    with hub.outline(model) as found:
        config = read_config(found.directory).values
    kind = config.get("speculators_model_type")
    if isinstance(kind, str) and kind in METHODS:
        return kind
    if isinstance(config.get("dflash_config"), dict):
        return "dflash"
    named = config.get("architectures")
    if isinstance(named, list) and DEEPSPEC in named:
        return "dspark"
    return "peagle" if any(config.get(key) is not None for key in MASK_KEYS) else "eagle3"


def plan_speculator(options: SpeculativeConfig, target: ModelConfig) -> Speculator:
    """The speculator that the options ask for, no weight read. Raises ConfigError where it does not fit the target."""
    planned = rounded_speculator(METHODS[options.method].plan(options, target), options.draft_quantize)
    return TextBeside.beside(planned, options, target)


def fetch_speculator(
    options: SpeculativeConfig, target: ModelConfig, progress: hub.Progress | None = None
) -> SpeculativeConfig:
    """The options with their draft model's directory, which is fetched where it is `ORG/NAME` of a repository.

    Raises ConfigError; where it does not fit the target, before its weights are fetched.
    """
    if options.model is None:
        return options
    with hub.outline(options.model) as found:
        found_options = replace(options, model=found.directory)
        if found.download is None:
            return found_options
        plan_speculator(found_options, target)
    return replace(options, model=hub.fetch(options.model, progress=progress))


def load_speculator(options: SpeculativeConfig, target: ModelConfig) -> LoadedSpeculator:
    """The speculator that the options ask for, with its weights. Raises ConfigError where it does not fit."""
    found = METHODS[options.method].load(options, target)
    speculator = rounded_speculator(found.speculator, options.draft_quantize)
    config, weights = speculator.draft_config, found.weights
    if config is not None and config.quantiser is not None:
        weights = quantised(weights, config.quantiser)
    return replace(found, weights=weights, speculator=TextBeside.beside(speculator, options, target))


def rounded_speculator(speculator: Speculator, kind: Literal["fp8", "int4"] | None) -> Speculator:
    """The speculator with its draft model's linear layers rounded, its LM head among them; None: as it is.

    Raises ConfigError for a draft model that is quantised already.
    """
    config = speculator.draft_config
    if kind is None or config is None:
        return speculator
    quantiser = Quantiser(kind, lm_head=True, option="draft_quantize")
    return speculator.with_config(rounding(config, quantiser, "the draft model"))
