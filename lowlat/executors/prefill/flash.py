"""Attention of a chunk of prefill on a card: keys and values gathered side by side, then torch's flash attention.

How much a chunk sees is read on the device, so one captured chunk serves every start, in time that grows with what it
sees. Flash attention takes keys in blocks of a fixed size, counted from the first that was gathered, the last block
first; blocks that a row does not see change nothing of its sums. So a row's bits depend neither on the chunk's size nor
on the rows beside it. It knows no model.
"""

from collections.abc import Callable

import torch

from lowlat.errors import ShapeError
from lowlat.executors.prefill.kernels import Launches
from lowlat.executors.prefill.room import AttentionRoom
from lowlat.kernels.attention.gather_kv import gather_kv
from lowlat.kernels.attention.gathered_rows import gathered_rows

__all__ = ["FlashAttention", "flash_attention"]


class FlashAttention:
    """Makes the attentions of a chunk, of launches that are loaded later.

    longest  positions of the longest context
    room     uint8, at least `size.num_bytes`: keys and values of one layer at a time
    """

    def __init__(self, launches: Launches, longest: int, size: AttentionRoom, room: torch.Tensor) -> None:
        self._launches, self._longest = launches, longest
        self._keys, self._values, self._lengths = size.cut(room)

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        chunk: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor,
        scale: float,
        window: int | None = None,
    ) -> Callable[..., None]:
        """What the reference `prefill_attention` means, over these buffers; shapes as there.

        q and the caches are bf16. Rows past the live ones see zeros in place of what was not written: they are finite
        wherever q is. Raises ShapeError for shapes or dtypes that do not fit.
        """
        if {q.dtype, k_cache.dtype, v_cache.dtype} != {torch.bfloat16}:
            raise ShapeError(f"queries and caches must be bfloat16, got {q.dtype}, {k_cache.dtype}, {v_cache.dtype}")
        if window is not None and window >= self._longest:
            window = None
        size, num_rows = q.shape[0], gathered_rows(q.shape[0], self._longest, window)
        keys, values = (self._rows(part, num_rows, k_cache) for part in (self._keys, self._values))
        calls = gather_kv(
            k_cache=k_cache, v_cache=v_cache, block_table=block_table, chunk=chunk, keys=keys, values=values,
            lengths=self._lengths, size=size, window=window, card=self._launches.card,
        )  # fmt: skip
        gather, result = self._launches.add(calls), out.view(q.shape)
        shares = None if sinks is None else sinks.float()

        def run(**_: object) -> None:
            gather()
            attended, logarithms = flash_attention(
                q, keys, values, self._lengths, longest=self._longest, window=window, scale=scale
            )
            if shares is not None:
                attended = attended * torch.sigmoid(logarithms.t() - shares)[..., None]
            result.copy_(attended)

        return run

    def _rows(self, part: torch.Tensor, num_rows: int, cache: torch.Tensor) -> torch.Tensor:
        """Room for so many rows of a cache, [n, G, D]."""
        _, groups, _, dim = cache.shape
        return part.view(cache.dtype)[: num_rows * groups * dim].view(num_rows, groups, dim)


def flash_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    *,
    longest: int,
    window: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of c rows, the last of which stands at the last of the keys.

    q             [c, H, D]  bf16
    keys, values  [n, G, D]  bf16
    lengths       [2, 2]     int32  (0, c) and (0, keys that there are), read on the device
    longest       more than any window; of it alone and the shapes does it depend which kernel runs
    Returns [c, H, D] bf16 and the logarithms of the sums of weights, [H, c] float32: 0 and inf where nothing is seen.
    """
    left = -1 if window is None else window - 1  # keys that a row sees before its own
    attended, logarithms, *_ = torch.ops.aten._flash_attention_forward(
        q, keys, values, lengths[0], lengths[1], q.shape[0], longest, 0.0, True, False,
        scale=scale, window_size_left=left, window_size_right=0,
    )  # fmt: skip
    return attended, logarithms
