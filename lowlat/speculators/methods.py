"""This module makes the speculator that the options ask for, by the method's name or by a draft model's files."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from lowlat.checkpoint import hub
from lowlat.checkpoint.quantising import Quantiser, quantised
from lowlat.errors import ConfigError
from lowlat.models.geometry import ModelConfig
from lowlat.models.hf_config import read_config
from lowlat.models.target import OpenedTarget, rounding
from lowlat.options.method_options import AUTO_METHOD
from lowlat.options.speculative import SpeculativeConfig
from lowlat.speculators.base import LoadedSpeculator, Speculator
from lowlat.speculators.dflash.config import TYPES
from lowlat.speculators.dflash.speculator import DflashSpeculator
from lowlat.speculators.draft_model.config import is_whole
from lowlat.speculators.draft_model.speculator import DraftModelSpeculator
from lowlat.speculators.dspark.config import DEEPSPEC
from lowlat.speculators.dspark.speculator import DsparkSpeculator
from lowlat.speculators.eagle3.speculator import Eagle3Speculator
from lowlat.speculators.mtp.speculator import MtpSpeculator
from lowlat.speculators.ngram.speculator import NgramSpeculator
from lowlat.speculators.peagle.config import MASK_KEYS
from lowlat.speculators.peagle.speculator import PeagleSpeculator
from lowlat.speculators.suffix.beside import TextBeside
from lowlat.speculators.suffix.speculator import SuffixSpeculator
from lowlat.speculators.vocabulary import cut_loaded, cut_speculator, read_vocabulary

__all__ = [
    "METHODS",
    "draft_method",
    "fetch_speculator",
    "load_speculator",
    "plan_speculator",
    "rounded_speculator",
    "settled",
]

_CLASSES: tuple[type[Speculator], ...] = (
    DflashSpeculator,
    DraftModelSpeculator,
    DsparkSpeculator,
    Eagle3Speculator,
    MtpSpeculator,
    NgramSpeculator,
    PeagleSpeculator,
    SuffixSpeculator,
)
METHODS: Mapping[str, type[Speculator]] = MappingProxyType({each.method: each for each in _CLASSES})


def draft_method(model: str | Path) -> str:
    """The method of a draft model, by its config.json; `model` is a directory or `ORG/NAME`.

    Files with the tensors of a model that lowlat runs are a whole model. A config that names no method is assumed to be
    EAGLE3's, whose loader refuses by name what does not fit. Raises ConfigError for a config that cannot be read.
    """
    with hub.outline(model) as found:
        config = read_config(found.directory).values
        whole = is_whole(found.directory)
    kind = config.get("speculators_model_type")
    if isinstance(kind, str) and TYPES.get(kind, kind) in METHODS:
        return TYPES.get(kind, kind)
    if isinstance(config.get("dflash_config"), dict):
        return "dflash"
    named = config.get("architectures")
    if isinstance(named, list) and any(name in DEEPSPEC for name in named):
        return "dspark"
    if whole:
        return DraftModelSpeculator.method
    return "peagle" if any(config.get(key) is not None for key in MASK_KEYS) else "eagle3"


def settled(options: SpeculativeConfig, directory: Path | None) -> SpeculativeConfig:
    """Replace the method "auto" in options: by the draft model's method or, without one, the target's own files.

    directory  the target's
    Raises ConfigError if neither gives a method.
    """
    if options.method != AUTO_METHOD:
        return options
    if options.model is not None:
        return replace(options, method=draft_method(options.model))
    found = next((each for each in _CLASSES if directory is not None and each.is_in(directory)), None)
    if found is None:
        raise ConfigError(
            f"method 'auto' finds nothing to draft with: the target's files ({directory}) have no MTP layer (mtp.*), "
            "and no draft model is given (model)"
        )
    return replace(options, method=found.method)


def plan_speculator(options: SpeculativeConfig, target: ModelConfig, directory: Path | None = None) -> Speculator:
    """The speculator that the options ask for, without reading weights.

    directory  the target's; None: it has no files
    Raises ConfigError if the speculator does not fit the target.
    """
    options = settled(options, directory)
    planned = METHODS[options.method].plan(options, target, directory)
    planned = cut_speculator(planned, read_vocabulary(options, target, directory))
    planned = rounded_speculator(planned, options.draft_quantize)
    return TextBeside.beside(planned, options, target)


def fetch_speculator(
    options: SpeculativeConfig, target: ModelConfig, progress: hub.Progress | None = None
) -> SpeculativeConfig:
    """Download the draft model if it is `ORG/NAME` of a repository; returns the options with its directory.

    Raises ConfigError; if the draft model does not fit the target, before its weights are downloaded.
    """
    if options.model is None:
        return options
    with hub.outline(options.model) as found:
        found_options = replace(options, model=found.directory)
        if found.download is None:
            return found_options
        plan_speculator(replace(found_options, draft_vocab=None, draft_vocab_size=None), target)
    return replace(options, model=hub.fetch(options.model, progress=progress))


def load_speculator(
    options: SpeculativeConfig, target: ModelConfig, source: OpenedTarget | None = None
) -> LoadedSpeculator:
    """The speculator that the options ask for, with its weights.

    source  the target, for a speculator that uses the target's files or weights; None: it uses none
    Raises ConfigError if it does not fit.
    """
    directory = None if source is None else source.directory
    options = settled(options, directory)
    found = METHODS[options.method].load(options, target, directory)
    found = cut_loaded(found, read_vocabulary(options, target, directory), target, source)
    speculator = rounded_speculator(found.speculator, options.draft_quantize)
    config, weights = speculator.draft_config, found.weights
    if config is not None and config.quantiser is not None:
        weights = quantised(weights, config.quantiser)
    return replace(found, weights=weights, speculator=TextBeside.beside(speculator, options, target))


def rounded_speculator(speculator: Speculator, kind: Literal["fp8", "int4"] | None) -> Speculator:
    """The speculator with its draft model's linear layers and LM head quantised at load.

    kind  None: it is returned unchanged
    Raises ConfigError for a draft model that is quantised already.
    """
    config = speculator.draft_config
    if kind is None or config is None:
        return speculator
    quantiser = Quantiser(kind, lm_head=True, option="draft_quantize")
    return speculator.with_config(rounding(config, quantiser, "the draft model"))
