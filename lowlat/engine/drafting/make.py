"""This module chooses what proposes a runtime's drafts, and what learns from its steps."""

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
    """The source of proposals of a runtime's wide steps, or of none; and of longer blocks of drafts."""
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
    """The learner that prices draft lengths by the steps that a runtime has run; None where nothing is learnt."""
    if loaded.costs is None or not any(each.per_expert for each in loaded.costs.values()):
        return None
    return ExpertPrices(loaded.executor, loaded.costs, loaded.geometry.most_waiting)
