"""This module lowers attention of a chunk of prefill: keys and values are gathered, then flash attention runs.

On GPUs of capability 9.0 lowlat's kernel computes flash attention. Elsewhere, and for a refresh, torch does, for heads
of up to 256. Heads of 512 have torch's memory-efficient attention there, which is slower.

The number of positions before a chunk is read on the device. So one captured chunk serves every start, and its time
grows with these positions. Flash attention takes keys in blocks of a fixed size, counted from the first gathered key,
the last block first. Blocks that a row does not attend to leave its sums unchanged. So a row's bits depend neither on
the chunk's size nor on the rows next to it.

A refresh has few rows after a long text. With one sequence, one thread block a head would read all of it. So the
positions before the rows are cut into parts, as sequences of their own, and the results are combined by their
log-sum-exps.
"""

from collections.abc import Sequence
from typing import Any

import torch

from lowlat.errors import ConfigError, ShapeError
from lowlat.graphs import BufferSpec
from lowlat.graphs.program import Op
from lowlat.kernels.attention.limits import REFRESHED_HEAD_DIM
from lowlat.kernels.attention.prefill.flash import has_prefill_flash, prefill_flash
from lowlat.kernels.attention.prefill.gather_kv import gather_kv
from lowlat.kernels.attention.prefill.gathered_rows import ALIGNMENT, gathered_rows, tiles_shape
from lowlat.kernels.toolchain.kernel import WorkspaceShape
from lowlat.lowering.binding import Binding, Call, LibraryCall
from lowlat.lowering.implementations import Implementation, lower_by

__all__ = [
    "FLASH_DIM",
    "PROMPT_ATTENTION",
    "attention_workspaces",
    "efficient_attention",
    "flash_attention",
    "flash_parts",
    "prefill_attention",
    "refresh_attention",
    "refresh_bytes",
]

FLASH_DIM = REFRESHED_HEAD_DIM.most or 0  # the largest head size of torch's flash attention
FROM_BOTTOM_RIGHT = 2  # torch's mask by which the last row sees the last key
PART = 4096  # positions before a refresh's rows that one block of flash attention takes for a head


def attention_workspaces(cache: BufferSpec, size: int, longest: int, window: int | None) -> list[WorkspaceShape]:
    """The workspaces of a chunk's attention: gathered keys and values [n, G, D], and their lengths [2, 2].

    n is a multiple of ALIGNMENT, so that whole tiles fit.
    cache  [P, G, block, D]; size: rows; longest: positions of the longest context
    """
    _, groups, _, dim = cache.shape
    shape = (-(-gathered_rows(size, longest, window) // ALIGNMENT) * ALIGNMENT, groups, dim)
    dtype = torch.bfloat16 if cache.dtype == torch.uint8 else cache.dtype
    gathered: list[WorkspaceShape] = [(f"prefill.{part}", shape, dtype) for part in ("keys", "values")]
    return [*gathered, ("prefill.lengths", (2, 2), torch.int32)]


def prefill_attention(binding: Binding, op: Op, arranged: torch.Tensor | None = None) -> Sequence[Call]:
    """The calls of the reference's `prefill_attention`; queries and caches are bf16.

    arranged  the workspace for the result in a prefill GEMM's row layout, instead of the operation's buffer; for
              lowlat's flash attention only
    Rows after the live ones read zeros for missing keys and values, so they are finite if q is. Raises ShapeError for
    dtypes that do not fit, ConfigError for a softcap with torch's flash attention.
    """
    if arranged is None:
        return lower_by(PROMPT_ATTENTION, binding, op)
    if not _has_flash(binding, op):
        raise ShapeError("torch's flash attention leaves its result row by row")
    return _by_flash(binding, op, arranged)


def _window(binding: Binding, op: Op) -> int | None:
    """The operation's window, if it is smaller than the longest context; else None."""
    window = op.params.get("window")
    return window if isinstance(window, int) and window < binding.max_context else None


def _has_flash(binding: Binding, op: Op) -> bool:
    return has_prefill_flash(binding.gpu, binding.program.buffers[op.reads["k_cache"]].shape[-1])


def _by_flash(binding: Binding, op: Op, arranged: torch.Tensor | None = None) -> Sequence[Call]:
    """Lower to lowlat's flash attention, with keys and values gathered in tiles."""
    window, given = _window(binding, op), binding.arguments(op)
    gather, attended = _gathered(binding, op, window, tiled=True)
    del attended["lengths"]
    own = {"chunk": given["chunk"], "first": given.get("first", 0), "arranged": arranged is not None}
    own["softcap"] = given.get("softcap")
    if arranged is not None:
        attended["out"] = arranged
    return [*gather, *prefill_flash(**attended, **own, window=window, gpu=binding.gpu)]


def _by_library(binding: Binding, op: Op) -> Sequence[Call]:
    """Lower to torch's flash attention."""
    window = _window(binding, op)
    _refuse_softcap(binding, op)
    gather, attended = _gathered(binding, op, window)
    called = {**attended, "longest": binding.max_context, "window": window}
    return [*gather, LibraryCall("flash_attention", _attend, called)]


PROMPT_ATTENTION = (Implementation("flash", _by_flash, covers=_has_flash), Implementation("library", _by_library))


def refresh_attention(binding: Binding, op: Op) -> Sequence[Call]:
    """The calls of the reference's `refresh_attention`, as `prefill_attention`'s."""
    _refuse_softcap(binding, op)
    REFRESHED_HEAD_DIM.check("head_dim", binding.program.buffers[op.reads["k_cache"]].shape[-1])
    gather, attended = _gathered(binding, op, None)
    del attended["lengths"]
    attended |= {"chunk": binding.arguments(op)["chunk"], "longest": binding.max_context}
    return [*gather, LibraryCall("flash_attention", _attend_in_parts, attended)]


def _refuse_softcap(binding: Binding, op: Op) -> None:
    """Raise ConfigError for a softcap, which torch's flash attention does not support."""
    softcap = op.params.get("softcap")
    if softcap is not None:
        raise ConfigError(
            f"{binding.program.name}: {op.kind} with softcap {softcap} has a kernel for prompts on GPUs of capability "
            "9.0 alone; use executor 'reference'"
        )


def _gathered(
    binding: Binding, op: Op, window: int | None, *, tiled: bool = False
) -> tuple[Sequence[Call], dict[str, Any]]:
    """The calls that gather keys and values, as rows or as tiles, and the arguments of attention for them."""
    given = binding.arguments(op)
    q, k_cache, v_cache = given["q"], given["k_cache"], given["v_cache"]
    held = torch.bfloat16 if given.get("kv_scales") is None else torch.uint8
    if q.dtype != torch.bfloat16 or {k_cache.dtype, v_cache.dtype} != {held}:
        raise ShapeError(
            f"queries must be bfloat16, and caches too, or codes with scales, got {q.dtype}, {k_cache.dtype}, "
            f"{v_cache.dtype}"
        )
    cache = binding.program.buffers[op.reads["k_cache"]]
    asked = attention_workspaces(cache, q.shape[0], binding.max_context, window)
    keys, values, lengths = (binding.workspace(*each) for each in asked)
    if tiled:
        keys, values = (each.view(tiles_shape(*each.shape)) for each in (keys, values))
    gather = gather_kv(
        k_cache=k_cache, v_cache=v_cache, block_table=given["block_table"], chunk=given["chunk"], keys=keys,
        values=values, lengths=lengths, size=q.shape[0], window=window, gpu=binding.gpu, first=given.get("first", 0),
        kv_scales=given.get("kv_scales"),
    )  # fmt: skip
    sinks = binding.sinks(op)
    attended = {
        "q": q, "keys": keys, "values": values, "lengths": lengths, "scale": given["scale"],
        "sinks": sinks if sinks is None or tiled else sinks.float(), "out": given["out"].view(q.shape),
    }  # fmt: skip
    return gather, attended


def refresh_bytes(size: int, heads: int, dim: int, longest: int) -> int:
    """Bytes that a refresh's attention takes: queries and results of every part, and these as float32, twice."""
    return (2 + 2 + 2 * 4) * (-(-longest // PART) + 1) * size * heads * dim


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    *,
    longest: int,
    window: int | None,
    scale: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Flash attention into `out`; a sink is one more score of each head, [H] float32, without a value."""
    attend = flash_attention if q.shape[-1] <= FLASH_DIM else efficient_attention
    attended, logarithms = attend(q, keys, values, lengths, longest=longest, window=window, scale=scale)
    if sinks is not None:
        attended = attended * torch.sigmoid(logarithms.t() - sinks)[..., None]
    out.copy_(attended)


def _attend_in_parts(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chunk: torch.Tensor,
    *,
    longest: int,
    scale: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Attention of rows to the parts of the positions before them, and to themselves; the results' sum into `out`.

    chunk  [2] int32, start and live rows, read on the device
    """
    rows, heads, dim = q.shape
    count, start = -(-longest // PART), chunk[:1]
    numbers = torch.arange(count + 1, dtype=torch.int32, device=q.device)
    firsts, ends = numbers * rows, torch.minimum(numbers * PART, start)
    before = flash_parts(
        q.repeat(count, 1, 1), keys, values, firsts, ends, sizes=(rows, PART), causal=False, scale=scale
    )
    around = torch.cat((start, start + rows))
    own = flash_parts(q, keys, values, firsts[:2], around, sizes=(rows, rows), causal=True, scale=scale)
    logarithms = torch.cat([each[1].view(heads, -1, rows) for each in (before, own)], 1)
    logarithms = torch.where(torch.isinf(logarithms), -torch.inf, logarithms)  # of a part that is empty
    total = torch.logsumexp(logarithms, 1, keepdim=True)
    shares = torch.exp(logarithms - total).permute(1, 2, 0)
    results = torch.cat([each[0].view(-1, rows, heads, dim) for each in (before, own)])
    attended = (results.float() * shares[..., None]).sum(0)
    if sinks is not None:
        attended = attended * torch.sigmoid(total[:, 0].t() - sinks)[..., None]
    out.copy_(attended)


def flash_parts(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    firsts: torch.Tensor,
    ends: torch.Tensor,
    *,
    sizes: tuple[int, int],
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of sequences: sequence k has rows [firsts[k], firsts[k + 1]) and keys [ends[k], ends[k + 1]).

    q, keys, values  as in `flash_attention`
    firsts, ends     [n + 1]  int32, read on the device
    sizes            the most rows and the most keys of a sequence
    causal           whether it is causal, with the last row at the last key; else all rows attend to all keys
    Returns what `flash_attention` does.
    """
    attended, logarithms, *_ = torch.ops.aten._flash_attention_forward(
        q, keys, values, firsts, ends, *sizes, 0.0, causal, False, scale=scale
    )
    return attended, logarithms


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
    """Causal attention of c rows, with the last row at the last key.

    q             [c, H, D]  bf16
    keys, values  [n, G, D]  bf16
    lengths       [2, 2]     int32  (0, c) and (0, keys that there are), read on the device
    longest       more than any window; the choice of torch's kernel depends on it and on the shapes alone
    Returns [c, H, D] bf16 and the log-sum-exps of the scores, [H, c] float32: 0 and inf where nothing is seen.
    """
    left = -1 if window is None else window - 1  # keys before its own that a row attends to
    attended, logarithms, *_ = torch.ops.aten._flash_attention_forward(
        q, keys, values, lengths[0], lengths[1], q.shape[0], longest, 0.0, True, False,
        scale=scale, window_size_left=left, window_size_right=0,
    )  # fmt: skip
    return attended, logarithms


def efficient_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    *,
    longest: int,
    window: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`flash_attention` of heads of any size, a key-value head at a time: torch's memory-efficient attention.

    Its queries and keys have as many heads: a key-value head is handed over as a view of several.
    """
    rows, heads, dim = q.shape
    group = heads // keys.shape[1]
    attended, logarithms = torch.empty_like(q), q.new_empty(heads, rows, dtype=torch.float32)
    for head in range(keys.shape[1]):
        own = slice(head * group, (head + 1) * group)
        k, v = (each[None, :, head, None].expand(1, -1, group, dim) for each in (keys, values))
        result, sums, *_ = torch.ops.aten._efficient_attention_forward(
            q[None, :, own], k, v, None, lengths[0], lengths[1], rows, longest, 0.0, FROM_BOTTOM_RIGHT, True,
            scale=scale, window_size=window,
        )  # fmt: skip
        attended[:, own], logarithms[own] = result[0], sums[0, :, :rows]
    return attended, logarithms
