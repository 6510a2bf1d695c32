"""Stand-ins for a GPU in attention of prefill on a CPU: the gathering kernel, and torch's flash attention."""

from collections.abc import Iterable
from typing import Any

import torch
from gather_cases import wanted_rows

from lowlat.kernels.toolchain.kernel import Gpu, KernelCall
from lowlat.lowering.binding import Call, LibraryCall


def gather(call: KernelCall) -> None:
    """A call of `gather_kv`, by what it means."""
    names = ("k_cache", "v_cache", "block_table", "chunk", "keys", "values", "lengths", "size", "window", "kv_scales")
    *arguments, tiles = call.arguments
    assert tiles == 0
    given: dict[str, Any] = dict(zip(names, arguments, strict=True))
    first = call.kernel.name.removesuffix("_coded").partition("_from")[2]
    scales = given["kv_scales"] if isinstance(given["kv_scales"], torch.Tensor) else None
    wanted_rows(**{**given, "window": given["window"] or None, "kv_scales": scales}, first=int(first or 0))


class GatherLauncher:
    """In place of a launcher, for calls of `gather_kv` and of the library."""

    gpu = Gpu(108, 163 * 1024, (8, 0))

    def load(self, calls: Iterable[Call]) -> list[Call]:
        """The calls themselves."""
        return list(calls)

    def issue(self, launches: Iterable[Call]) -> None:
        """Do what the calls mean."""
        for call in launches:
            if isinstance(call, LibraryCall):
                call.function(**call.arguments)
            else:
                assert call.kernel.name.startswith("gather_kv")
                gather(call)


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
    """The meaning of `prefill_attention.flash_parts`, a sequence after the other."""
    attended, logarithms = torch.zeros_like(q), torch.full((q.shape[1], len(q)), torch.inf)
    shared = q.shape[1] // keys.shape[1]
    for row, last_row, key, last in zip(
        *(bounds.tolist() for bounds in (firsts[:-1], firsts[1:], ends[:-1], ends[1:])), strict=True
    ):
        assert last_row - row <= sizes[0] and 0 <= last - key <= sizes[1] and last <= len(keys)
        if key == last:
            continue
        k, v = (part[key:last].float().repeat_interleave(shared, 1) for part in (keys, values))
        scores = torch.einsum("chd,nhd->hcn", q[row:last_row].float(), k) * scale
        if causal:
            scores = scores + torch.full(scores.shape[1:], -torch.inf).triu(last - key - last_row + row + 1)
        logarithms[:, row:last_row] = torch.logsumexp(scores, -1)
        attended[row:last_row] = torch.einsum("hcn,nhd->chd", scores.softmax(-1), v).to(q.dtype)
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
    """The meaning of `prefill_attention.flash_attention`: it sees no row after the lengths.

    A row that sees nothing is zero, and the logarithm of its sum inf.
    """
    assert window is None or window < longest
    (begin, rows), (first, last) = lengths.tolist()
    assert begin == 0 and rows == len(q) and 0 <= first <= last <= len(keys)
    shared = q.shape[1] // keys.shape[1]
    k, v = (part[first:last].float().repeat_interleave(shared, 1) for part in (keys, values))
    at, mine = torch.arange(last - first), torch.arange(rows)[:, None] + (last - first - rows)
    seen = (at <= mine) & (at > mine - (window or len(at) + rows))
    scores = torch.einsum("chd,nhd->hcn", q.float(), k) * scale
    scores = scores.masked_fill(~seen, -torch.inf)
    logarithms = torch.logsumexp(scores, -1)
    blind = ~seen.any(-1)
    weights = torch.exp(scores - logarithms[..., None]).masked_fill(blind[:, None], 0)
    attended = torch.einsum("hcn,nhd->chd", weights, v)
    return attended.to(q.dtype), logarithms.masked_fill(blind, torch.inf)
