"""This module chooses a runtime's proposer, and the learner that prices its draft lengths."""

from lowlat.engine.drafting.expert_prices import ExpertPrices
from lowlat.engine.drafting.forced_steps import ForcedSteps
from lowlat.engine.drafting.longer_drafts import LongerDrafts
from lowlat.engine.drafting.proposer import Proposer, StepParts
from lowlat.engine.drafting.refreshes import Refreshes
from lowlat.engine.drafting.wide_steps import WideSteps
from lowlat.engine.loading.loaded import Loaded
from lowlat.step.variants import PROPOSED, WIDE

__all__ = ["make_learner", "make_proposer"]


def make_proposer(loaded: Loaded, parts: StepParts) -> Proposer:
    """Make a runtime's proposer, for the kinds of steps it has: refreshes, wide steps, longer drafts, forced text."""
    partial, speculator, used = loaded.geometry.partial, loaded.geometry.speculator, loaded.speculation.used
    if partial is not None:
        return Refreshes(parts, partial)
    own = Proposer(parts)
    if speculator is not None and speculator.wide_rows:
        own = WideSteps(parts, speculator.wide_rows, speculator.wide_source)
    elif speculator is not None and speculator.longer_draft_length and used is not None:
        own = LongerDrafts(parts, used.num_speculative_tokens)
    return ForcedSteps(own) if any(loaded.ladder.wide_steps(1, each) for each in (WIDE, PROPOSED)) else own


def make_learner(loaded: Loaded) -> ExpertPrices | None:
    """Make the learner that prices draft lengths from a runtime's past steps; None if no cost depends on experts."""
    if loaded.costs is None or not any(each.per_expert for each in loaded.costs.values()):
        return None
    return ExpertPrices(loaded.executor, loaded.costs, loaded.geometry.most_waiting)
