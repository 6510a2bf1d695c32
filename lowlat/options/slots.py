"""This module limits the slots and rows of a step: beyond eight slots only chains with few rows are supported.

Other options are refused by name beyond eight slots, such as trees, which need more rows, and several GPUs.
"""

import logging
from dataclasses import replace

from lowlat.errors import ConfigError
from lowlat.options.runtime import FEW_SLOTS
from lowlat.options.speculative import MAX_SPECULATIVE_TOKENS, SpeculativeConfig

__all__ = ["MOST_STEP_ROWS", "fit_slots", "most_drafts"]

logger = logging.getLogger("lowlat")
MOST_STEP_ROWS = 128  # rows of all slots together, with more than FEW_SLOTS
REFUSED = ("tree", "dynamic_tree_max_topk", "enable_specpv")


def most_drafts(max_batch: int) -> int:
    """Return the longest chain of drafts that a step of this many slots verifies."""
    fitting = MAX_SPECULATIVE_TOKENS if max_batch <= FEW_SLOTS else MOST_STEP_ROWS // max_batch - 1
    return min(MAX_SPECULATIVE_TOKENS, fitting)


def fit_slots(speculative: SpeculativeConfig | None, max_batch: int) -> SpeculativeConfig | None:
    """Return the options of speculation for this many slots; adaptive draft lengths are limited to the step's rows.

    Raises ConfigError for what steps of more than FEW_SLOTS slots do not verify.
    """
    if speculative is None or not speculative.enabled or max_batch <= FEW_SLOTS:
        return speculative
    for name in REFUSED:
        if getattr(speculative, name):
            raise ConfigError(
                f"{name} is not implemented for max_batch {max_batch}; leave it out, or lower max_batch to {FEW_SLOTS}"
            )
    drafts, most = speculative.num_speculative_tokens, most_drafts(max_batch)
    if drafts <= most:
        return speculative
    if not speculative.adaptive_width:
        raise ConfigError(
            f"num_speculative_tokens {drafts} with max_batch {max_batch} makes steps of {max_batch * (drafts + 1)} "
            f"rows, and they have {MOST_STEP_ROWS} at most; lower num_speculative_tokens to {most}, or max_batch to "
            f"{MOST_STEP_ROWS // (drafts + 1)}"
        )
    logger.info("steps choose up to %d drafts in place of %d: max_batch %d slots have %d rows at most",
                most, drafts, max_batch, MOST_STEP_ROWS)  # fmt: skip
    return replace(speculative, num_speculative_tokens=most)
