"""The limits of kernels over logits."""

from collections.abc import Mapping

from lowlat.kernels.common.limits import Limit, Rule, Size

__all__ = ["LIMITS", "VOCABULARY"]

VOCABULARY = Limit(most=5 << 16)  # logits of a row, whose 80 blocks must be resident together

_ROW: tuple[Rule, ...] = (Size("V", VOCABULARY, "vocab_size"),)
LIMITS: Mapping[str, tuple[Rule, ...]] = dict.fromkeys(("finite", "logprobs", "sample"), _ROW)
