"""This module has rotary embedding of a GEMM's heads, with the norm of heads before it (Qwen3) and the KV write after.

Lanes have a head's elements as in `qk_norm`, so that each pair to rotate is in one lane. If only a head's first
elements are rotated, lanes exchange them. The rotation is two products and a sum, each rounded, as in torch. So a row's
bits depend on the row alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.kv_codes import four_codes, load_scale
from lowlat.kernels.common.memory import long_at
from lowlat.kernels.common.norm_math import EVERY_LANE
from lowlat.kernels.common.norm_row import is_live, weights_label
from lowlat.kernels.elementwise.limits import MOST_HEAD
from lowlat.kernels.elementwise.norm import check_dtype, check_row_live
from lowlat.kernels.elementwise.qk_norm import (
    THREADS,
    WARPS,
    check_head_dim,
    head_functions,
    head_weights,
    load_four,
)
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Argument, Kernel, KernelCall, Workspace
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int32, int64, types, uint32

__all__ = ["LayerKV", "examples", "rotate", "rotate_layers"]

LISTED = 4  # addresses a layer: its caches, weight and scales


@dataclass(frozen=True)
class _Heads:
    """The shape that the kernel's code depends on.

    queries, keys, values  heads of each kind in a row of the GEMM's output, in this order
    dim                    elements of a head
    eps                    of the norm of queries and keys; None: they are not normalised
    rows, block_size       rows a slot, 0 for those of a chunk of prefill, and positions a KV block; 0 where keys and
                           values go to buffers
    coded                  keys and values go to caches of e4m3 codes
    layers                 whose heads stand side by side in a row, each with caches and weights of its own; 0: one
    turning                elements of a head that turn, its first; 0: all
    wide                   weights of the norm are float32
    v_norm                 values are normed without a weight
    keys_as_values         the GEMM's output has no values: they are its keys, neither normed as such nor turned
    triggers_first         the next kernel may start before this one waits
    """

    queries: int
    keys: int
    values: int
    dim: int
    eps: float | None
    rows: int
    block_size: int
    coded: bool = False
    layers: int = 0
    turning: int = 0
    wide: bool = False
    v_norm: bool = False
    keys_as_values: bool = False
    triggers_first: bool = False

    @property
    def count(self) -> int:
        return self.queries + self.keys + self.values

    @property
    def name(self) -> str:
        normed = "" if self.eps is None else f"_eps{self.eps!r}"
        cached = f"_rows{self.rows}" if self.rows else "_chunk"
        cached = f"{cached}_block{self.block_size}" if self.block_size else ""
        cached += ("_coded" if self.coded else "") + (f"_layers{self.layers}" if self.layers else "")
        cached += f"_turning{self.turning}" if self.turning else ""
        cached += ("_v_norm" if self.v_norm else "") + ("_keys_as_values" if self.keys_as_values else "")
        cached += weights_label(self.wide) + "_first" * self.triggers_first
        return f"rotate_q{self.queries}_k{self.keys}_v{self.values}_d{self.dim}{normed}{cached}"


@device_function
def _store_four(address: Any, x: Any) -> None:
    ptx.store_global_64(address, ptx.bf16_pair(x[0], x[1]), ptx.bf16_pair(x[2], x[3]))


@device_function
def _store_codes(address: Any, x: Any, scale: Any) -> None:
    ptx.store_global_u32(address, four_codes(x[0], x[1], x[2], x[3], scale))


@device_function
def _store_two(address: Any, x: Any) -> None:
    _store_four(address, x[0])
    _store_four(address + int64(256), x[1])


@device_function
def _store_two_codes(address: Any, x: Any, scale: Any) -> None:
    _store_codes(address, x[0], scale)
    _store_codes(address + int64(128), x[1], scale)


@device_function
def _turned(x: Any, cos: Any, y: Any, sin: Any) -> Any:
    """x * cos + y * sin, every operation rounded."""
    return (
        ptx.add_rn(ptx.mul_rn(x[0], cos[0]), ptx.mul_rn(y[0], sin[0])),
        ptx.add_rn(ptx.mul_rn(x[1], cos[1]), ptx.mul_rn(y[1], sin[1])),
        ptx.add_rn(ptx.mul_rn(x[2], cos[2]), ptx.mul_rn(y[2], sin[2])),
        ptx.add_rn(ptx.mul_rn(x[3], cos[3]), ptx.mul_rn(y[3], sin[3])),
    )


@device_function
def _negative(x: Any) -> Any:
    return -x[0], -x[1], -x[2], -x[3]


@device_function
def _two_turned(x: Any, cos: Any, y: Any, sin: Any) -> Any:
    return _turned(x[0], cos[0], y[0], sin[0]), _turned(x[1], cos[1], y[1], sin[1])


@device_function
def _two_negative(x: Any) -> Any:
    return _negative(x[0]), _negative(x[1])


def _make_turn_some(dim: int, turning: int) -> Any:
    """A function of a warp: turn the first `turning` elements of a head, halves of them paired.

    A head's elements come in groups of four: lane i has groups i and i + dim / 8. A group's partner may be in another
    lane, and where more than half of a head turns in either of its groups.
    """
    lanes, half, reaches_high = dim // 8, turning // 8, 2 * turning > dim

    @device_function
    def of_lane(x: Any, lane: Any) -> Any:
        return (
            cuda.shfl_sync(EVERY_LANE, x[0], lane),
            cuda.shfl_sync(EVERY_LANE, x[1], lane),
            cuda.shfl_sync(EVERY_LANE, x[2], lane),
            cuda.shfl_sync(EVERY_LANE, x[3], lane),
        )

    @device_function
    def turn_group(group: Any, own: Any, low: Any, high: Any, cos: Any, sin: Any, active: Any) -> Any:
        first, turns = group < half, group < 2 * half
        place = group if first else int32(group - half)
        other = int32(group + half) if first else place
        other = other if turns else int32(0)
        partner = of_lane(low, other if other < lanes else int32(other - lanes))
        if reaches_high:
            above = of_lane(high, other if other < lanes else int32(other - lanes))
            partner = partner if other < lanes else above
        active = active and turns
        c, s = load_four(cos + int64(place) * 16, active), load_four(sin + int64(place) * 16, active)
        turned = _turned(own, c, _negative(partner) if first else partner, s)
        return turned if turns else own

    @device_function
    def turn_some(low: Any, high: Any, cos: Any, sin: Any, position: Any, lane: Any, active: Any) -> Any:
        angle, group = position * int64(2 * turning), int32(lane)
        turned = turn_group(group, low, low, high, cos + angle, sin + angle, active)
        if reaches_high:
            high = turn_group(int32(group + lanes), high, low, high, cos + angle, sin + angle, active)
        return turned, high

    return turn_some


@device_function
def _cache_row(
    row: Any,
    live: Any,
    rows: Any,
    block_size: Any,
    block_table: Any,
    table_width: Any,
    slots: Any,
    write_lens: Any,
    offsets: Any,
) -> Any:
    """The block that takes a row's keys and values, and the place in it; those of slot 0's start for a dead row.

    rows   of a slot; 0: a chunk's
    slots  of a step, or a chunk's start
    """
    if rows > 0:
        owner = int64(uint32(row) // uint32(rows))
        place = int64(row) - owner * int64(rows)
        slot = int64(ptx.load_global_i32(slots + owner * int64(4)))
        start = int64(ptx.load_global_i32(write_lens + owner * int64(4)))
        position = start + int64(ptx.load_global_i32(offsets + place * int64(4)))
    else:
        slot, position = int64(0), int64(ptx.load_global_i32(slots)) + int64(row)
    if not live:
        slot, position = int64(0), int64(0)
    index = int64(uint32(position) // uint32(block_size))
    block = int64(ptx.load_global_i32(block_table + (slot * int64(table_width) + index) * int64(4)))
    return block, int64(uint32(position) % uint32(block_size))


@cache
def _make_rotate(heads: _Heads) -> Kernel:
    """Grid (M, heads of a row / WARPS), or (M, heads of a layer / WARPS, layers)."""
    queries, keys, count, dim = heads.queries, heads.keys, heads.count, heads.dim
    rows, block_size, layers = heads.rows, heads.block_size, heads.layers
    rotated, normed, eps, coded = queries + keys, heads.eps is not None, heads.eps or 0.0, heads.coded
    some, turn_some = heads.turning > 0, _make_turn_some(dim, heads.turning or dim)
    functions = head_functions(dim, heads.wide)
    load, load_weights, step = functions.load, functions.load_weights, functions.step
    norm, zeros, ones, is_wide = functions.norm, functions.zeros, functions.ones, functions.is_wide
    turned, negative = (_two_turned, _two_negative) if is_wide else (_turned, _negative)
    store, store_codes = (_store_two, _store_two_codes) if is_wide else (_store_four, _store_codes)
    v_norm, keys_as_values = heads.v_norm, heads.keys_as_values
    given = count - heads.values if keys_as_values else count
    half_bytes = dim // 8 * step
    norms_all = block_size > 0 and rows == 0  # of a chunk dead rows are no other ones until they are written
    triggers_first = heads.triggers_first

    def rotate(
        qkv: Any,
        positions: Any,
        cos: Any,
        sin: Any,
        q_weight: Any,
        k_weight: Any,
        row_live: Any,
        q: Any,
        k: Any,
        v: Any,
        block_table: Any,
        table_width: Any,
        slots: Any,
        write_lens: Any,
        offsets: Any,
        kv_scales: Any,
        listed: Any,
    ) -> None:
        if triggers_first:
            ptx.let_next_kernel_start()
        thread = uint32(cuda.threadIdx.x)
        lane, row = int64(thread & uint32(31)), int64(cuda.blockIdx.x)
        place = row
        if layers > 0:
            layer = int64(cuda.blockIdx.z)
            place = row * int64(layers) + layer
            k, v = long_at(listed, layer * LISTED), long_at(listed, layer * LISTED + 1)
            k_weight, kv_scales = long_at(listed, layer * LISTED + 2), long_at(listed, layer * LISTED + 3)
        head = int64(cuda.blockIdx.y) * int64(WARPS) + int64(thread >> uint32(5))
        active = lane < int64(dim // 8) and head < int64(count)
        turns = head < int64(rotated)
        low_weights = high_weights = zeros()
        if normed and turns:
            weight = (q_weight if head < int64(queries) else k_weight) + lane * int64(step)
            low_weights, high_weights = load_weights(weight, active), load_weights(weight + int64(half_bytes), active)
        ptx.wait_for_previous_kernel()
        if not triggers_first:
            ptx.let_next_kernel_start()
        source_head = head
        if keys_as_values:
            source_head = head if turns else head - int64(keys)
        source = qkv + (place * int64(given) + source_head) * int64(4 * dim) + lane * int64(16)
        low, high = load(source, active), load(source + int64(2 * dim), active)
        position = int64(ptx.load_global_i32(positions + row * int64(4)))
        live = is_live(row_live, row)
        target, group, group_count, written = q, head, int64(queries), active
        if head >= int64(rotated):
            target, group, group_count = v, head - int64(rotated), int64(count - rotated)
        elif head >= int64(queries):
            target, group, group_count = k, head - int64(queries), int64(keys)
        at = row * group_count + group
        if block_size > 0 and head >= int64(queries):
            block, inside = _cache_row(
                row, live, rows, block_size, block_table, table_width, slots, write_lens, offsets
            )
            at, written = (block * group_count + group) * int64(block_size) + inside, active and live
        if turns:
            if some:
                if normed:
                    low, high = norm(low, high, low_weights, high_weights, live or norms_all, dim, eps)
                low, high = turn_some(low, high, cos, sin, position, lane, active)
            else:
                angle = position * int64(2 * dim) + lane * int64(16)
                c, s = load(cos + angle, active), load(sin + angle, active)
                if normed:
                    low, high = norm(low, high, low_weights, high_weights, live or norms_all, dim, eps)
                low, high = turned(low, c, negative(high), s), turned(high, c, low, s)
        elif v_norm:
            low, high = norm(low, high, ones(), ones(), live or norms_all, dim, eps)
        if coded and head >= int64(queries):
            if written:
                scale = load_scale(kv_scales, head - int64(queries))  # values' heads stand after keys', as scales do
                target += at * int64(dim) + lane * int64(4)
                store_codes(target, low, scale)
                store_codes(target + int64(dim // 2), high, scale)
        elif written:
            target += at * int64(2 * dim) + lane * int64(8)
            store(target, low)
            store(target + int64(dim), high)

    return Kernel(heads.name, rotate, (types.int64,) * 17, THREADS, waits_before_trigger=not triggers_first)


def rotate(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    row_live: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    write_lens: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    chunk: torch.Tensor | None = None,
    *,
    q: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    k_cache: torch.Tensor | None = None,
    v_cache: torch.Tensor | None = None,
    eps: float | None = None,
    v_norm: bool = False,
    keys_as_values: bool = False,
    triggers_first: bool = False,
) -> list[KernelCall]:
    """`qk_norm` if eps is given, `rope`, and `kv_write` if caches are given, of the parts that are asked for.

    With chunk it is `prefill_kv_write`.

    qkv                 [M, (H + 2G) * D]   float32: queries, keys, values, as far as they are asked for; with
                                            keys_as_values, which go with eps, as v_norm, [M, (H + G) * D]
    positions           [M] or [B, T]       int32, below C
    cos, sin            [C, R]              float32: the first 2 R elements of a head turn, at most D of them
    q_weight, k_weight  [D]                 bf16 or both float32, with eps, for the parts that are there
    row_live            [M]                 uint8: with eps dead rows' queries and keys are zero (None: all are live);
                                            with the caches, which need it, dead rows write no keys and values;
                                            with chunk that is all that it means
    block_table         [max B, C / block]  int32  with the caches, as slots [B], write_lens [B], offsets [R] int32
    chunk               [2]                 int32  start, live rows: in place of slots, write_lens and offsets, with a
                                            table [1, C / block]; live row i is stored at position start + i
    q                   [M, H, D]           bf16   out
    k, v                [M, G, D]           bf16   out, in place of the caches
    kv_scales           [2, G]              float32  the caches are uint8, for codes; None: they are bf16
    k_cache, v_cache    [P, G, block, D]    bf16   updated: live rows at write_lens[slot] + offsets[row]
    triggers_first      the next launch may start before this one waits for the one before it
    One launch. Raises ShapeError for shapes that do not fit, parts that do not go together, or D or 2 R that
    is no multiple of 8, and D that `limits.NORMED_HEAD` does not take.
    """
    caches = _pair("k_cache", k_cache, v_cache)
    buffers = _pair("k", k, v)
    if caches and buffers:
        raise ShapeError("keys and values go to the caches or to k and v, not to both")
    kept = caches or buffers
    some = kept[0] if kept else q
    if some is None:
        raise ShapeError("nothing to rotate: neither q nor k and v nor caches")
    rows, dim = positions.numel(), some.shape[-1]
    queries, groups = 0 if q is None else q.shape[1], kept[0].shape[1] if kept else 0
    if (v_norm or keys_as_values) and (eps is None or not groups):
        raise ShapeError("values are normed, or taken from keys, where keys are normed")
    turning = _check_rows(qkv, cos, sin, row_live, rows, queries + (1 if keys_as_values else 2) * groups, dim)
    check_dtype(torch.int32, positions=positions, slots=slots, write_lens=write_lens, offsets=offsets, chunk=chunk)
    check_dtype(torch.bfloat16, q=q, k=k, v=v)
    check_dtype(torch.bfloat16 if kv_scales is None else torch.uint8, k_cache=k_cache, v_cache=v_cache)
    if kv_scales is not None:
        check_shape("kv_scales", kv_scales, 2, groups)
    if q is not None:
        check_shape("q", q, rows, queries, dim)
    for name, buffer in zip(("k", "v"), buffers, strict=False):
        check_shape(name, buffer, rows, groups, dim)
    *weights, wide = head_weights(
        eps, q_weight if queries else None, k_weight if groups else None, queries, groups, dim
    )
    per_slot, block_size, write = 0, 0, (0, 0, 0, 0, 0)
    if caches:
        per_slot, block_size, write = _write_arguments(  # type: ignore[assignment]
            rows, caches, row_live, block_table, slots, write_lens, offsets, chunk
        )
    coded = kv_scales is not None
    kernel = _make_rotate(
        _Heads(
            queries,
            groups,
            groups,
            dim,
            eps,
            per_slot,
            block_size,
            coded,
            turning=turning,
            wide=wide,
            v_norm=v_norm,
            keys_as_values=keys_as_values,
            triggers_first=triggers_first,
        )
    )
    targets = (0 if q is None else q, *(kept or (0, 0)))
    live = 0 if row_live is None else row_live
    scales = 0 if kv_scales is None else kv_scales
    arguments = (qkv, positions, cos, sin, *weights, live, *targets, *write, scales, 0)
    return [KernelCall(kernel, (rows, -(-(queries + 2 * groups) // WARPS), 1), arguments)]


@dataclass(frozen=True)
class LayerKV:
    """Where a layer's keys and values go, what its keys are normed by, and the scales of its codes; see `rotate`."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_weight: torch.Tensor | None = None
    kv_scales: torch.Tensor | None = None


def rotate_layers(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    row_live: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor | None = None,
    write_lens: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    chunk: torch.Tensor | None = None,
    *,
    layers: Sequence[LayerKV],
    eps: float | None = None,
    v_norm: bool = False,
    keys_as_values: bool = False,
    workspace: Workspace,
) -> list[KernelCall]:
    """`rotate` of the keys and values of several layers' caches, which stand side by side in a row; the same bits.

    qkv     [M, L * 2G * D]  float32: keys and values of the first layer, then of the next; with keys_as_values, which
                             goes with eps, as v_norm, [M, L * G * D]
    layers  L, their caches of one shape; weights with eps alone, scales of all or of none
    One launch. The layers' addresses are kept in a workspace, filled here. Raises ShapeError as `rotate` does.
    """
    first, (_, groups, _, dim) = layers[0], layers[0].k_cache.shape
    rows, coded = positions.numel(), first.kv_scales is not None
    if (v_norm or keys_as_values) and eps is None:
        raise ShapeError("v_norm and keys_as_values go with a norm of the keys, of some eps")
    given = (1 if keys_as_values else 2) * groups
    turning = _check_rows(qkv, cos, sin, row_live, rows, len(layers) * given, dim)
    check_dtype(torch.int32, positions=positions, slots=slots, write_lens=write_lens, offsets=offsets, chunk=chunk)
    listed, wide = list[int](), False
    for each in layers:
        _, weight, is_wide = head_weights(eps, None, each.k_weight, 0, groups, dim)
        if each is not first and is_wide != wide:
            raise ShapeError("all layers' norm weights are float32, or all are bf16")
        wide = is_wide
        check_dtype(torch.uint8 if coded else torch.bfloat16, k_cache=each.k_cache, v_cache=each.v_cache)
        check_shape("k_cache", each.k_cache, *first.k_cache.shape)
        check_shape("v_cache", each.v_cache, *first.k_cache.shape)
        if (each.kv_scales is not None) != coded:
            raise ShapeError("all layers' caches hold codes with scales, or none does")
        if each.kv_scales is not None:
            check_shape("kv_scales", each.kv_scales, 2, groups)
        addresses = (each.k_cache, each.v_cache, weight, each.kv_scales)
        listed += [each.data_ptr() if isinstance(each, torch.Tensor) else 0 for each in addresses]
    caches = (first.k_cache, first.v_cache)
    per_slot, block_size, write = _write_arguments(
        rows, caches, row_live, block_table, slots, write_lens, offsets, chunk
    )
    kept = workspace("rotate_layers.addresses", (len(listed),), torch.int64)
    kept.copy_(torch.tensor(listed, dtype=torch.int64))
    heads = _Heads(0, groups, groups, dim, eps, per_slot, block_size, coded, len(layers), turning, wide)
    kernel = _make_rotate(replace(heads, v_norm=v_norm, keys_as_values=keys_as_values))
    arguments = (qkv, positions, cos, sin, 0, 0, row_live, 0, 0, 0, *write, 0, kept)
    return [KernelCall(kernel, (rows, -(-2 * groups // WARPS), len(layers)), arguments)]


def _check_rows(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, row_live: torch.Tensor | None, rows: int, heads: int,
    dim: int,
) -> int:  # fmt: skip
    """The elements of a head that turn, 0 for all. Raises ShapeError unless rows have so many heads, and the tables
    their angles."""
    check_head_dim(dim)
    check_shape("qkv", qkv, rows, heads * dim)
    turning = 2 * cos.shape[1]
    if turning > dim or turning % 8 or not turning:
        raise ShapeError(f"cos has angles of {turning} elements of a head of {dim}, not of a multiple of 8 up to them")
    if turning < dim and dim > MOST_HEAD:
        raise ShapeError(f"heads of {dim} turn as a whole, not {turning} elements of them")
    check_shape("sin", sin, *cos.shape)
    check_row_live(row_live, rows)
    check_dtype(torch.float32, qkv=qkv, cos=cos, sin=sin)
    return turning if turning < dim else 0


def _pair(name: str, first: torch.Tensor | None, second: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Both, of one shape, or nothing."""
    if first is None and second is None:
        return ()
    if first is None or second is None or first.shape != second.shape:
        raise ShapeError(f"{name} and its partner must come together and have one shape")
    return first, second


def _write_arguments(
    rows: int,
    caches: tuple[torch.Tensor, ...],
    row_live: torch.Tensor | None,
    block_table: torch.Tensor | None,
    slots: torch.Tensor | None,
    write_lens: torch.Tensor | None,
    offsets: torch.Tensor | None,
    chunk: torch.Tensor | None,
) -> tuple[int, int, tuple[Argument, ...]]:
    """Rows a slot, positions a block, and the arguments of the KV write; rows of a chunk are of no slot."""
    if chunk is not None:
        if row_live is None or block_table is None or not (slots is write_lens is offsets is None):
            raise ShapeError(
                "a KV write of a chunk needs row_live and block_table, and no slots, write_lens or offsets"
            )
        check_shape("chunk", chunk, 2)
        check_shape("block_table", block_table, 1, block_table.shape[-1])
        return 0, caches[0].shape[2], (block_table, 0, chunk, 0, 0)
    if row_live is None or block_table is None or slots is None or write_lens is None or offsets is None:
        raise ShapeError("a KV write needs row_live, block_table, slots, write_lens and offsets")
    batch, per_slot = slots.shape[0], offsets.shape[0]
    if batch * per_slot != rows:
        raise ShapeError(f"{batch} slots of {per_slot} rows are not {rows} rows")
    check_shape("write_lens", write_lens, batch)
    return per_slot, caches[0].shape[2], (block_table, block_table.shape[1], slots, write_lens, offsets)


def examples() -> list[Kernel]:
    """Specialisations that stand for all, to compile without a GPU."""
    return [
        _make_rotate(_Heads(32, 8, 8, 128, None, 4, 32)),
        _make_rotate(_Heads(32, 8, 8, 128, 1e-6, 4, 32)),
        _make_rotate(_Heads(64, 8, 8, 64, None, 1, 32)),
        _make_rotate(_Heads(32, 0, 0, 128, None, 0, 0)),
        _make_rotate(_Heads(0, 8, 8, 128, None, 8, 24)),
        _make_rotate(_Heads(6, 2, 2, 40, 1e-5, 0, 0)),
        _make_rotate(_Heads(32, 8, 8, 128, 1e-6, 4, 32, True)),
        _make_rotate(_Heads(32, 8, 8, 128, None, 0, 32)),
        _make_rotate(_Heads(32, 8, 8, 128, 1e-6, 0, 32)),
        _make_rotate(_Heads(0, 8, 8, 64, None, 0, 16, True)),
        _make_rotate(_Heads(0, 8, 8, 128, 1e-6, 8, 32, layers=5)),
        _make_rotate(_Heads(0, 8, 8, 64, None, 0, 16, True, 2)),
        _make_rotate(_Heads(16, 2, 2, 256, 1e-6, 4, 32, turning=64, wide=True)),
        _make_rotate(_Heads(6, 2, 2, 40, 1e-5, 0, 0, turning=32)),
        _make_rotate(_Heads(32, 16, 16, 256, 1e-6, 1, 32, v_norm=True, triggers_first=True)),
        _make_rotate(_Heads(32, 4, 4, 512, 1e-6, 1, 32, v_norm=True, keys_as_values=True, triggers_first=True)),
        _make_rotate(_Heads(8, 2, 2, 512, 1e-6, 0, 32, True, v_norm=True, wide=True)),
        _make_rotate(_Heads(8, 0, 0, 512, 1e-6, 0, 0)),
        _make_rotate(_Heads(0, 1, 1, 512, 1e-6, 8, 32, layers=5, v_norm=True, keys_as_values=True)),
    ]
