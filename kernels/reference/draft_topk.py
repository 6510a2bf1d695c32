"""The draft's likeliest tokens by rank, as target ids."""

import torch

__all__ = ["draft_topk"]


def draft_topk(
    logits: torch.Tensor,
    draft_to_target: torch.Tensor,
    row_live: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    k: int,
) -> None:
    """The k largest logits of each live row, ties to the lowest draft id.

    logits           [R, Vd]  float32
    draft_to_target  [Vd]     int32  target id of each draft id
    row_live         [R]      uint8; None: all
    out              [R, k]   int32  out: target ids by rank; -1 where dead, or where a logit is NaN
    Ranks past the draft vocabulary are -1.
    """
    out.fill_(-1)
    count = min(k, logits.shape[1])
    if count == 1:
        best = (logits == logits.amax(-1, keepdim=True)).to(torch.uint8).argmax(-1, keepdim=True)
    else:
        best = torch.sort(logits, dim=-1, descending=True, stable=True)[1][:, :count]
    good = ~torch.isnan(logits).any(-1)
    if row_live is not None:
        good &= row_live.reshape(-1) != 0
    out[:, :count] = torch.where(good[:, None], draft_to_target[best], -1)
