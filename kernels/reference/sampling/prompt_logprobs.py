"""This module has the operations of a prompt's logprobs, which passes compute for a fixed number of rows at a time.

Prefill leaves the residual stream of its positions. A pass takes the next rows of it, from a cursor on the device. The
LM head and `logprobs` follow. Their results are stored by position, and the cursor advances. The pass that reaches the
last position resets the cursor, so the host launches all passes without writing anything between them.
"""

import torch

from lowlat.graphs.schema import operation
from lowlat.kernels.reference.shapes import check_shape, live_rows
from lowlat.kernels.reference.step.slot_record import MAX_LOGPROBS

__all__ = ["keep_prompt_logprobs", "take_prompt_rows", "token_ranks"]


@operation("""
    read    residual       compute  [P, N]  of the positions that prefill ran
    read    targets        int32    [P]     the token after each position; -1 where there is none
    read    count          int32    [1]     positions that prefill ran
    read    cursor         int32    [1]     the first position to take
    write   out            compute  [R, N]  zero where dead
    write   row_live       uint8    [R]
    write   target_tokens  int32    [1, R]  -1 where dead
""")
def take_prompt_rows(
    residual: torch.Tensor,
    targets: torch.Tensor,
    count: torch.Tensor,
    cursor: torch.Tensor,
    *,
    out: torch.Tensor,
    row_live: torch.Tensor,
    target_tokens: torch.Tensor,
) -> None:
    """Take the rows from the cursor on; a row is live if a token follows its position."""
    positions, rows = residual.shape[0], out.shape[0]
    place = cursor.long() + torch.arange(rows, device=out.device)
    inside = place < count.long().clamp(max=positions)
    place = place.clamp(max=positions - 1)
    tokens = torch.where(inside, targets[place], -1).clamp(min=-1)
    live = tokens >= 0
    out.copy_(torch.where(live[:, None], residual[place], 0))
    row_live.copy_(live)
    target_tokens.copy_(tokens[None])


@operation("""
    read    logits         float32  [B * T, V]   before any processing
    read    row_live       uint8    flat [B * T]
    read    target_tokens  int32    [B, T]       -1 where there is none
    write   ranks          int32    [B, T]       from 1 on; 0 where there is no token
""")
def token_ranks(
    logits: torch.Tensor, row_live: torch.Tensor, target_tokens: torch.Tensor, *, ranks: torch.Tensor
) -> None:
    """Compute the rank of each row's token in the vocabulary: likeliest first, of equal logits the lowest id first.

    The rank in a row that is not finite has no meaning. Raises ShapeError on the host for shapes that do not fit.
    """
    batch, rows = target_tokens.shape
    check_shape("logits", logits, batch * rows, logits.shape[1])
    tokens = target_tokens.reshape(-1).long()
    live = torch.tensor(live_rows(row_live, batch * rows), device=tokens.device) & (tokens >= 0)
    own = logits.gather(1, tokens.clamp(min=0)[:, None])
    index = torch.arange(logits.shape[1], device=logits.device)
    before = (logits > own) | ((logits == own) & (index < tokens[:, None]))
    ranks.copy_(torch.where(live, before.sum(1) + 1, 0).reshape(batch, rows))


@operation(f"""
    read    logprob_values         float32  [1, R, {MAX_LOGPROBS + 1}]
    read    logprob_ids            int32    [1, R, {MAX_LOGPROBS + 1}]
    read    ranks                  int32    [1, R]
    read    count                  int32    [1]                         positions that prefill ran
    update  cursor                 int32    [1]                         0 after the last of these positions
    update  prompt_logprob_values  float32  [P, {MAX_LOGPROBS + 1}]     the rows from the cursor on
    update  prompt_logprob_ids     int32    [P, {MAX_LOGPROBS + 1}]
    update  prompt_ranks           int32    [P]
""")
def keep_prompt_logprobs(
    logprob_values: torch.Tensor,
    logprob_ids: torch.Tensor,
    ranks: torch.Tensor,
    count: torch.Tensor,
    *,
    cursor: torch.Tensor,
    prompt_logprob_values: torch.Tensor,
    prompt_logprob_ids: torch.Tensor,
    prompt_ranks: torch.Tensor,
) -> None:
    """Store a pass's results by position, and advance the cursor by its rows."""
    first, rows = int(cursor), ranks.shape[1]
    fitting = max(0, min(rows, prompt_ranks.shape[0] - first))
    prompt_logprob_values[first : first + fitting] = logprob_values[0, :fitting]
    prompt_logprob_ids[first : first + fitting] = logprob_ids[0, :fitting]
    prompt_ranks[first : first + fitting] = ranks[0, :fitting]
    cursor.fill_(first + rows if first + rows < int(count) else 0)
