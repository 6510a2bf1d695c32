"""This module chooses the draft length if the options name none, by gates' results for such targets.

In a target with experts each row of a step may read other experts. So a fixed number of drafts may cost more than it
gains, where a chosen number gains. `default_lengths.json` has the gates' decision: a number, or auto.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

from lowlat.models.geometry import ModelConfig
from lowlat.options.default_length import DefaultLength
from lowlat.options.slots import most_drafts
from lowlat.options.speculative import SpeculativeConfig
from lowlat.speculators.base import Speculator

__all__ = ["default_lengths", "with_default_length", "with_plain_length"]

FILE = Path(__file__).with_name("default_lengths.json")
# options that decide what is verified, or how much of it is accepted
OWN_LENGTHS = (
    *("tree", "dynamic_tree_max_topk", "enable_specpv", "wide_rows", "max_block_drafts"),
    *("max_path_len", "max_decoding_tokens", "simulated_acceptance", "simulated_accept_length"),
)


@cache
def default_lengths() -> dict[str, int | str]:
    """Read the default draft lengths by kind of target: numbers, or "auto"."""
    found: dict[str, int | str] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def with_default_length(
    options: SpeculativeConfig, target: ModelConfig, speculator: Speculator, max_batch: int, *, may_choose: bool
) -> SpeculativeConfig:
    """Set the default draft length of the target's kind, if the options name none and lengths can be chosen.

    max_batch   the number of slots, which bounds the drafts that a step verifies
    may_choose  whether the runtime's other options allow steps to choose their length
    """
    asked = not isinstance(options.num_speculative_tokens, DefaultLength) or any(
        getattr(options, name) != getattr(type(options), name) for name in OWN_LENGTHS
    )
    has_experts = any(layer.experts is not None for layer in target.layers)
    if asked or options.adaptive_width or not has_experts or speculator.waiting_boundaries is None:
        return options
    length, most = default_lengths()["experts"], min(most_drafts(max_batch), speculator.most_drafts)
    if isinstance(length, int):
        length = min(length, most)
        return options if options.num_speculative_tokens == length else replace(options, num_speculative_tokens=length)
    return replace(options, num_speculative_tokens=most, adaptive_width=True) if may_choose else options


def with_plain_length(options: SpeculativeConfig | None) -> SpeculativeConfig | None:
    """Replace a default draft length, once it is settled, by a plain number, which encoders need."""
    if options is None or not isinstance(options.num_speculative_tokens, DefaultLength):
        return options
    return replace(options, num_speculative_tokens=int(options.num_speculative_tokens))
