"""What stands for a card in attention of prefill on a CPU: the gathering kernel, and torch's flash attention."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from gather_cases import wanted_rows

from lowlat.kernels.toolchain.kernel import H200, KernelCall

__all__ = ["GatherLauncher", "flash_attention", "gather"]


def gather(*arguments: Any) -> None:
    """A call of `gather_kv`, by what it means."""
    names = ("k_cache", "v_cache", "block_table", "chunk", "keys", "values", "lengths", "size", "window")
    given = dict(zip(names, arguments, strict=True))
    wanted_rows(**{**given, "window": given["window"] or None})


class GatherLauncher:
    """In place of a launcher, for calls of `gather_kv` alone."""

    card = H200

    def compile_ahead(self, calls: Iterable[KernelCall]) -> int:
        """None is lacking."""
        assert all(call.kernel.name.startswith("gather_kv") for call in calls)
        return 0

    def stream(self) -> None:
        """There is none."""

    def prepare(self, call: KernelCall) -> Any:
        """A launch."""
        issue: Callable[[None], None] = lambda stream: gather(*call.arguments)  # noqa: E731
        return SimpleNamespace(issue=issue)


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
    """What `lowlat.executors.prefill.flash.flash_attention` says of torch's: it sees no row behind the lengths.

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
