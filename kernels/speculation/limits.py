"""The limits of kernels that draft."""

from collections.abc import Mapping

from lowlat.kernels.common.limits import Limit, Rule, Size
from lowlat.kernels.sampling.limits import VOCABULARY

__all__ = [
    "GATHERED",
    "GROUPS",
    "LIMITS",
    "MAX_GATHERED",
    "MAX_RANKS",
    "MAX_SCORED_RANKS",
    "MAX_SOURCES",
    "RANKS",
    "SCORED_RANKS",
    "SOURCES",
    "VECTORS",
]

MAX_RANKS, MAX_SCORED_RANKS, MAX_SOURCES, MAX_GATHERED = 64, 32, 5, 8
RANKS = Limit(most=MAX_RANKS)  # drafts of a row
SCORED_RANKS = Limit(most=MAX_SCORED_RANKS)  # of which each has its probability
SOURCES = Limit(most=MAX_SOURCES)  # boundaries of which a step's end keeps the hidden states
GATHERED = Limit(most=MAX_GATHERED)  # boundaries of which a draft model reads the hidden states
VECTORS = Limit(multiple=8)  # numbers of a token's vector
GROUPS = Limit(multiple=8)  # columns that share a coefficient of a convolution

_VOCABULARY, _FEATURES = Size("Vd", VOCABULARY, "draft_vocab_size"), Size("F", GATHERED, "capture boundaries")
LIMITS: Mapping[str, tuple[Rule, ...]] = {
    "draft_topk": (_VOCABULARY, Size("k", RANKS, "drafts of a row")),
    "draft_topk_logprobs": (_VOCABULARY, Size("k", SCORED_RANKS, "drafts of a row")),
    "gather_features": (_FEATURES,),
    "join_features": (_FEATURES,),
    "keep_features": (_FEATURES,),
    "walk_candidates": (
        Size("k", SCORED_RANKS, "selector_top_k"),
        Size("r", VECTORS, "selector_rank"),
    ),
    "markov_gate": (Size("r", VECTORS, "markov_rank"),),
}
