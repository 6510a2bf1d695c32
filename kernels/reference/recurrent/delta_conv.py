"""This module has the causal convolution before a gated delta rule: each channel by itself, over its last few inputs.

Source: Gated Delta Networks, arXiv 2412.06464, section 3.4; Qwen3-Next and Qwen3.5, transformers 5.23.
"""

import torch

from lowlat.graphs.schema import operation
from lowlat.kernels.reference.recurrent.pending import prefill_rows, ring_places, rounded_silu, slot_rows

__all__ = ["delta_conv", "prefill_delta_conv"]


def _inputs(conv_state: torch.Tensor, slot: int, start: int, kept: int) -> torch.Tensor:
    """Return the `kept` inputs before a position. Inputs before position 0 are zero and not read."""
    known = conv_state[slot, ring_places(start - kept, kept, conv_state.shape[1])]
    known[: max(kept - start, 0)] = 0
    return known


def _convolve(inputs: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Convolve inputs [taps - 1 + n, C] to rows [n, C], each row by itself."""
    taps = weight.float().unbind(1)
    for index in range(out.shape[0]):
        total = taps[0] * inputs[index].float()
        for place, tap in enumerate(taps[1:], 1):
            total = total + tap * inputs[index + place].float()
        out[index] = rounded_silu(total, out.dtype)


@operation("""
    read    x           float32  [M, W]         a GEMM's output, rounded once; the first C columns are q, k, v
    weight  weight      float    [C, taps]      the last tap is the row's own
    read    slots       int32    [B]            -1 pads
    read    dense_lens  int32    [B]            the root's position
    read    state_lens  int32    [max_B]
    read    row_live    uint8    flat [M]
    update  conv_state  compute  [R, I, C]      a ring: position p's input is at p mod I
    write   out         compute  [M, C]         dead rows zero
""")
def delta_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    slots: torch.Tensor,
    dense_lens: torch.Tensor,
    state_lens: torch.Tensor,
    row_live: torch.Tensor,
    *,
    conv_state: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Compute silu of the weighted sum of a channel's last inputs, for a step's rows; see `pending`.

    out = silu(round(sum_j w_j x_{t - taps + 1 + j})), products and sums in float32, in order of j; the sum is rounded
    to the compute dtype before silu. Inputs before position 0 are zero. I is at least taps - 1 + the most rows a slot.
    So a step overwrites no input that it reads, nor one that the step after a rewind needs.
    """
    kept, channels = weight.shape[1] - 1, weight.shape[0]
    out.zero_()
    for each in slot_rows(slots, dense_lens, state_lens, row_live, conv_state.shape[1] - kept):
        slot, rows = each.slot, each.rows
        fresh = x[rows.start : rows.stop, :channels].to(conv_state.dtype)
        inputs = torch.cat((_inputs(conv_state, slot, each.start, kept), fresh))
        conv_state[slot, ring_places(each.start, len(rows), conv_state.shape[1])] = fresh
        _convolve(inputs, weight, out[rows.start : rows.stop])


@operation("""
    read    x           float32  [c, W]         as in `delta_conv`
    weight  weight      float    [C, taps]
    read    slot        int32    [1]
    read    chunk       int32    [2]            start, live rows
    read    snapshots   int32    [1, K]         see `pending`; absent: there are none
    update  conv_state  compute  [R, I, C]      the last taps - 1 inputs are written
    write   out         compute  [c, C]         dead rows zero
""")
def prefill_delta_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    slot: torch.Tensor,
    chunk: torch.Tensor,
    snapshots: torch.Tensor | None = None,
    *,
    conv_state: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Compute `delta_conv` for a chunk of one slot; it leaves no pending rows. Inputs before position 0 are zero."""
    (start, count), kept = chunk.tolist(), weight.shape[1] - 1
    begin, left = prefill_rows(slot, chunk, snapshots)
    fresh = x[:count, : weight.shape[0]].to(conv_state.dtype)
    inputs = torch.cat((_inputs(conv_state, begin, start, kept), fresh))
    out.zero_()
    _convolve(inputs, weight, out[:count])
    for row, after in left:
        last = min(start + after, kept)
        conv_state[row, ring_places(start + after - last, last, conv_state.shape[1])] = inputs[
            after + kept - last : after + kept
        ]
