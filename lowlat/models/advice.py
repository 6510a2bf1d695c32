"""This module reads the sampling parameters that a model's authors recommend, from generation_config.json.

They are defaults of the server and the command line, but never of SamplingParams that a program gives. A program can
use them explicitly: `SamplingParams(**read_advice(runtime.directory), max_tokens=64)`.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.json_file import read_object, shown
from lowlat.errors import RequestError
from lowlat.options.request import ADVISED_OPTIONS, SamplingParams

__all__ = ["advice_line", "read_advice", "sampling_defaults"]

logger = logging.getLogger("lowlat")
GENERATION_FILE = "generation_config.json"


def read_advice(directory: Path) -> Mapping[str, int | float]:
    """Read the recommended fields of a model's sampling; {} if there are none.

    `do_sample` false means greedy; true means a temperature of 1 if none is named. Default values are left out. A value
    that SamplingParams does not take is left out with a warning. Raises ConfigError for a file that is no JSON object.
    """
    path = directory / GENERATION_FILE
    if not path.exists():
        return MappingProxyType({})
    file = Fields(read_object(path), str(path))
    samples = file.optional_boolean("do_sample")
    advice: dict[str, Any] = {}
    for name in ADVISED_OPTIONS:
        value = file.raw(name)
        if value is None or (name == "top_k" and value == -1):  # -1: all tokens, as 0
            continue
        try:
            SamplingParams(**{name: value})  # refuses what is out of range
        except RequestError as error:
            logger.warning("%s: the advice %s = %s is left out: %s", path, name, shown(value), error)
            continue
        if name == "temperature" or value != getattr(SamplingParams, name):
            advice[name] = value
    if samples is False:  # greedy: top-k, top-p and the like have no effect, but penalties have
        kept = {name: advice[name] for name in ("repetition_penalty",) if name in advice}
        return MappingProxyType({"temperature": 0.0, **kept})
    if samples:
        advice.setdefault("temperature", 1.0)
    return MappingProxyType(advice)


def sampling_defaults(directory: Path, choice: str | None, *, strict: bool = False) -> Mapping[str, int | float]:
    """The sampling fields that requests get by default, over lowlat's own defaults.

    choice  the option sampling_defaults: "model" (also None) or "lowlat"
    strict  whether perf_mode is strict, so that requests are greedy
    """
    return MappingProxyType({}) if strict or choice == "lowlat" else read_advice(directory)


def advice_line(advice: Mapping[str, int | float]) -> str:
    """Format recommended fields in one line: "temperature 0.7, top_p 0.8"."""
    return ", ".join(f"{name} {value:g}" for name, value in advice.items())
