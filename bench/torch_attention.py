"""Decode attention by torch's own operations: every way that can be captured, checked, timed, the fastest taken.

Queries q [B, H, T, D] stand at positions L - T to L - 1 of their slot; keys and values lie in k, v [B, G, Lc, D],
Lc >= L a multiple of `CAPACITY_STEP` and all of the cache, whose last Lc - L positions hold finite rubbish. A way
gives [B * T, H * D].

To fold is to lay the H / G heads that share keys next to the T rows, [B, G, H / G * T, D]: keys are then read once
for all of them, and there are no groups left to expand.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from bench.lib.clock import Timed, round_robin
from bench.micro import capture_torch
from lowlat.errors import ConfigError

__all__ = ["CAPACITY_STEP", "WAYS", "AttentionShape", "Choice", "choose", "compile_fixed", "naive", "padded"]

CAPACITY_STEP = 256
LOWEST = -30000.0  # in place of minus infinity: no row of it turns into NaN
TOLERANCE = 2e-2  # of a way's norm-wise distance from float32
TURN = 10

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def padded(length: int) -> int:
    """Lc for L."""
    return -(-length // CAPACITY_STEP) * CAPACITY_STEP


@dataclass(frozen=True)
class AttentionShape:
    """B, H, G, D, T, L and Lc."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    rows: int
    length: int
    capacity: int

    @property
    def group(self) -> int:
        """Query heads that share keys."""
        return self.heads // self.kv_heads

    def fold(self, q: torch.Tensor) -> torch.Tensor:
        """[B, H, T, D] -> [B, G, H / G * T, D]."""
        return q.reshape(self.batch, self.kv_heads, self.group * self.rows, self.head_dim)

    def join(self, folded: torch.Tensor) -> torch.Tensor:
        """[B, G, H / G * T, D] or [B, H, T, D] -> [B * T, H * D]."""
        out = folded.reshape(self.batch, self.heads, self.rows, self.head_dim).transpose(1, 2)
        return out.reshape(self.batch * self.rows, self.heads * self.head_dim)

    def visible(self, device: torch.device, count: int) -> torch.Tensor:
        """[T, count] bool: what each row may see of the positions below `count`."""
        rows = torch.arange(self.rows, device=device)[:, None]
        return torch.arange(count, device=device)[None] <= rows + self.length - self.rows

    def bias(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """[H / G * T, Lc]: 0 where a folded row may see, else very low."""
        seen = self.visible(device, self.capacity).repeat(self.group, 1)
        return torch.where(seen, 0.0, LOWEST).to(dtype)


def naive(shape: AttentionShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The definition, in float32: [B * T, H * D]."""
    keys, values = (x[:, :, : shape.length].float() for x in (k, v))
    scores = shape.fold(q).float() @ keys.transpose(-1, -2) * shape.head_dim**-0.5
    seen = shape.visible(q.device, shape.length).repeat(shape.group, 1)
    return shape.join(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values)


def compile_fixed(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile for the shapes of the call; a function may be compiled for many, one after the other."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = 1024
    torch._dynamo.config.accumulated_recompile_limit = 1024
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
    return compiled


def _sdpa_flash(shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> Attend:
    """Flash attention on heads as they are, rows masked from the lower right."""
    bias = causal_lower_right(shape.rows, shape.length) if shape.rows > 1 else None

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = k[:, :, : shape.length], v[:, :, : shape.length]
        if q.is_cuda:  # in this operation, causal means from the lower right
            parts = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, bias is not None)
            return shape.join(parts[0])
        return shape.join(scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True))

    return attend


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Flash attention without a mask: the mean, and the logarithm of the sum of weights, float32."""
    operation = torch.ops.aten._scaled_dot_product_flash_attention
    if not q.is_cuda:
        operation = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    parts = operation(q, k, v, 0.0, False)
    return parts[0], parts[1]


def _flash_folded(shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> Attend:
    """Flash attention of folded rows over the positions that all see; the last T in a product of their own."""
    if shape.rows == 1:
        return lambda q, k, v: shape.join(_flash(shape.fold(q), k[:, :, : shape.length], v[:, :, : shape.length])[0])
    dense = shape.length - shape.rows
    hidden = ~torch.ones(shape.rows, shape.rows, dtype=torch.bool, device=device).tril().repeat(shape.group, 1)
    scale = shape.head_dim**-0.5

    def merge(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        scores = (q @ k.transpose(-1, -2)).float() * scale
        scores = scores.masked_fill(hidden, LOWEST)
        own = torch.logsumexp(scores, -1, keepdim=True)
        share = torch.sigmoid(lse.unsqueeze(-1) - own)
        tail = torch.softmax(scores, -1).to(v.dtype) @ v
        return torch.lerp(tail.float(), past.float(), share).to(q.dtype)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        folded = shape.fold(q)
        past, lse = _flash(folded, k[:, :, :dense], v[:, :, :dense])
        return shape.join(merge(folded, k[:, :, dense : shape.length], v[:, :, dense : shape.length], past, lse))

    return attend


def _masked(backend: SDPBackend) -> Callable[[AttentionShape, torch.device, torch.dtype], Attend]:
    """One backend of scaled_dot_product_attention on folded rows, with an additive mask."""

    def make(shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> Attend:
        bias = shape.bias(device, dtype).expand(shape.batch, shape.kv_heads, -1, -1)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(backend):
                return shape.join(scaled_dot_product_attention(shape.fold(q), k, v, attn_mask=bias))

        return attend

    return make


def _cudnn_grouped(shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> Attend:
    """cuDNN on heads as they are; rows of more than one are masked."""
    bias = None
    if shape.rows > 1:
        seen = shape.visible(device, shape.capacity)
        bias = torch.where(seen, 0.0, LOWEST).to(dtype)[None, None]
    count = shape.length if bias is None else shape.capacity

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            k, v = k[:, :, :count], v[:, :, :count]
            return shape.join(scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True))

    return attend


def _split_products(chunk: int) -> Callable[[AttentionShape, torch.device, torch.dtype], Attend]:
    """Batched products over chunks of the cache, then the chunks' means weighted: flash decoding by hand."""

    def make(shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> Attend:
        count, folded_rows = shape.capacity // chunk, shape.group * shape.rows
        pairs, scale = shape.batch * shape.kv_heads, shape.head_dim**-0.5
        bias = shape.bias(device, dtype).view(folded_rows, count, chunk).transpose(0, 1).contiguous()

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k, v = (x.view(pairs * count, chunk, shape.head_dim) for x in (k, v))
            queries = shape.fold(q * scale).reshape(pairs, 1, folded_rows, -1).expand(-1, count, -1, -1)
            scores = torch.bmm(queries.reshape(pairs * count, folded_rows, -1), k.transpose(1, 2))
            scores = scores.view(pairs, count, folded_rows, chunk) + bias
            logarithms = torch.logsumexp(scores.float(), -1)  # [pairs, count, rows]
            weights = torch.softmax(scores, -1, dtype=torch.float32).to(dtype)
            means = torch.bmm(weights.view(pairs * count, folded_rows, chunk), v)
            means = means.view(pairs, count, folded_rows, -1)
            shares = torch.softmax(logarithms, 1).unsqueeze(-1)
            return shape.join((means * shares).sum(1).to(dtype))

        return attend

    return make


def _compiled(make: Callable[[AttentionShape, torch.device, torch.dtype], Attend]) -> Callable[..., Attend]:
    """The same way with its small operations fused by torch.compile."""

    def make_compiled(shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> Attend:
        return compile_fixed(make(shape, device, dtype))

    return make_compiled


def _flex(shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> Attend:
    """flex_attention's decoding kernel, which splits the cache."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    offset = shape.length - shape.rows

    def sees(_batch: Any, _head: Any, row: Any, key: Any) -> Any:
        return key <= row + offset

    mask = create_block_mask(sees, None, None, shape.rows, shape.capacity, device=str(device))
    compiled = compile_fixed(flex_attention)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return shape.join(compiled(q, k, v, block_mask=mask, enable_gqa=True))

    return attend


WAYS: Mapping[str, Callable[[AttentionShape, torch.device, torch.dtype], Attend]] = {
    "flash": _sdpa_flash,
    "flash folded": _flash_folded,
    "flash folded, compiled": _compiled(_flash_folded),
    "cudnn": _cudnn_grouped,
    "cudnn folded": _masked(SDPBackend.CUDNN_ATTENTION),
    "efficient folded": _masked(SDPBackend.EFFICIENT_ATTENTION),
    "split products 256": _split_products(256),
    "split products 256, compiled": _compiled(_split_products(256)),
    "flex": _flex,
}


ON_CPU = ("flash", "flash folded", "split products 256")  # the others are of CUDA's libraries, or compiled for it


@dataclass(frozen=True)
class Choice:
    """The way taken, and what every way took: us a call, or why it could not be used."""

    name: str
    attend: Attend
    microseconds: dict[str, float | str]


def choose(
    shape: AttentionShape,
    caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    names: Sequence[str] | None = None,
    replays: int = 20,
) -> Choice:
    """Check every way against the definition, time those that hold, and take the fastest.

    caches  the layers' k and v, [B, G, Lc, D] each: a graph of one call a layer is what is timed
    names   the ways to try, by default all that the device has
    Raises ConfigError for one that the device has not, RuntimeError where none works.
    """
    k, v = caches[0]
    device, dtype = k.device, k.dtype
    known = tuple(WAYS) if device.type == "cuda" else ON_CPU
    for name in names or ():
        if name not in known:
            raise ConfigError(
                f"torch's attention {name!r} needs an NVIDIA GPU; --attention has here: {', '.join(known)}"
            )
    q = torch.randn(shape.batch, shape.rows, shape.heads, shape.head_dim, device=device, dtype=dtype).transpose(1, 2)
    tail = v.clone()  # with it, the result is what the last rows and the rubbish after them make of it
    tail[:, :, shape.length - shape.rows :] *= 1000
    checks = [(values, naive(shape, q, k, values)) for values in (v, tail)]
    found, entries = {}, []
    report: dict[str, float | str] = {}
    for name in known if names is None else names:
        if name.startswith("flash folded, c") and shape.rows == 1:
            continue  # nothing there to fuse
        try:
            attend = WAYS[name](shape, device, dtype)
            for values, expected in checks:
                distance = (attend(q, k, values).float() - expected).norm() / expected.norm()
                if not distance < TOLERANCE:
                    raise ArithmeticError(f"off by {float(distance):.3g}")
            entries.append(Timed(name, _replay_all(attend, q, caches)))
            found[name] = attend
        except Exception as error:  # a way that this GPU or this torch does not offer is no reason to stop
            report[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
    if not entries:
        raise RuntimeError(f"no attention works for {shape}: {report}")
    if len(entries) > 1:
        round_robin(entries, replays, TURN, device)
        report |= {entry.name: round(1e3 * entry.median / len(caches), 2) for entry in entries}
    best = min(entries, key=lambda entry: entry.median if entry.ms else 0.0).name
    return Choice(best, found[best], report)


def _replay_all(
    attend: Attend, q: torch.Tensor, caches: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> Callable[[], None]:
    """One call a layer, as a graph where there is a GPU."""

    def run() -> None:
        for k, v in caches:
            attend(q, k, v)

    if q.device.type == "cuda":
        return capture_torch(run, q.device)
    run()
    return run
