"""This module emits operations of decoders and draft models over their rows: GEMMs, norms, attention, caches.

GEMMs write float32. The operation that reads a GEMM's output rounds it once, to the dtype of the buffer that it writes.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from lowlat.graphs.program import ProgramBuilder, Stage
from lowlat.kernels.reference.gemm.linear_block import ROW_BLOCK
from lowlat.models.partial_kv import PartialKV
from lowlat.models.shard import VOCABULARY_UNIT, LayerShard, Place, Shard
from lowlat.models.windows import window_suffix

__all__ = ["TORCH_DTYPES", "Emitter", "Rows", "rounded_scale", "scales_name", "table_of"]

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def scales_name(k_cache: str) -> str:
    """The constant with the scales of a quantised KV cache, [2, G] float32; `k_cache` is the buffer of its keys."""
    return k_cache.replace("k_cache", "kv_scales")


def rounded_scale(scale: float, dtype: str) -> float:
    """An embedding scale, rounded to the compute dtype."""
    return torch.tensor(scale, dtype=TORCH_DTYPES[dtype]).item()


def table_of(builder: ProgramBuilder, table: str, window: int | None) -> str:
    """The block table for layers of a window: the window's own table if it is declared, else the common one."""
    own = table if window is None else table + window_suffix(window)
    return own if own in builder else table


@dataclass(frozen=True)
class Rows:
    """The rows that operations run over, by buffer name.

    prefix     prepended to every scratch name, so that stages do not share buffers by accident
    count      M, rows in all
    live       [M] uint8; None for prefill, which processes its rows whole
    positions  [M] int32, for RoPE
    attention  buffers for attention: slots, dense_lens, row_masks; for prefill chunk
    write      buffers for the KV write: row_live, slots, write_lens, offsets, block_table; for prefill chunk; {} if the
               cache has the rows' keys and values already. Layers of a window may have another block_table
    chunk      positions of one chunk of prefill; the rows may be several chunks; None: no prefill
    partial    SpecPV's sizes, if a step's rows may attend to a part of the cache; None: they attend to all of it
    recurrent  buffers for operations over recurrent states: slots, dense_lens, row_live; for prefill slot and chunk
    refresh    whether the rows are those of SpecPV's refresh, which choose the blocks of their slot's lists
    """

    prefix: str
    count: int
    live: str | None
    positions: str
    attention: dict[str, str]
    write: dict[str, str]
    chunk: int | None = None
    partial: PartialKV | None = None
    refresh: bool = False
    recurrent: dict[str, str] = field(default_factory=dict)

    @property
    def are_prompt(self) -> bool:
        """Whether the rows are a prompt's."""
        return self.chunk is not None and not self.refresh

    @property
    def chooses(self) -> bool:
        """Whether, with SpecPV, the rows attend to all of the cache and choose blocks; other rows attend to lists."""
        return self.refresh or self.chunk is not None


@dataclass
class Emitter:
    """Appends operations over one set of rows to a program, in one compute dtype.

    coded  matrices whose GEMM reads the rows as e4m3 codes
    """

    builder: ProgramBuilder
    rows: Rows
    dtype: torch.dtype
    stage: Stage
    coded: frozenset[str] = frozenset()

    def live(self) -> dict[str, str]:
        """The row_live argument, if rows may be dead; else {}."""
        return {} if self.rows.live is None else {"row_live": self.rows.live}

    def wanted(self) -> dict[str, str]:
        """The row_live argument of operations that skip padding in prefill, too, where others process all rows."""
        return self.live() or {"row_live": self.rows.write["row_live"]}

    @property
    def _row_block(self) -> int:
        """Rows that the reference multiplies at once: eight in a step; all rows of a chunk, and at least eight.

        Torch gives a row other bits if fewer than four rows are multiplied, and chunks may be that short.
        """
        return ROW_BLOCK if self.rows.live is not None else max(ROW_BLOCK, self.rows.count)

    def scratch(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> str:
        """A scratch buffer of these rows. If one of this name has another shape, the extents are added to the name."""
        name = f"{self.rows.prefix}{name}"
        if name in self.builder and self.builder.spec(name).shape != shape:
            name += f".{'x'.join(map(str, shape[1:]))}"
        return self.builder.scratch(name, shape, dtype or self.dtype)

    def emit(self, kind: str, reads: dict[str, str], writes: dict[str, str], **options: object) -> None:
        """Append one operation in the current stage."""
        self.builder.emit(kind, self.stage, reads=reads, writes=writes, **options)  # type: ignore[arg-type]

    def embed(self, tokens: str, weight: str, width: int, name: str, *, scale: float | None = None) -> str:
        """Emit the embedding, [M, width], times a scale."""
        out, own = self.scratch(name, self.rows.count, width), {} if scale is None else {"scale": scale}
        self.emit("embed", {"tokens": tokens}, {"out": out}, weights={"weight": weight}, **own)
        return out

    def cast(self, product: str, name: str) -> str:
        """Round a GEMM's output to the compute dtype."""
        out = self.scratch(name, *self.builder.spec(product).shape)
        self.emit("cast", {"x": product}, {"out": out})
        return out

    def norm(self, x: str, weight: str, eps: float, name: str) -> str:
        """Emit an RMS norm."""
        out = self.scratch(name, *self.builder.spec(x).shape)
        self.emit("rms_norm", {"x": x, **self.live()}, {"out": out}, weights={"weight": weight}, eps=eps)
        return out

    def linear(self, x: str, weight: str, width: int, name: str, *, bias: bool = False, **params: Any) -> str:
        """Emit a GEMM, [M, width] float32.

        weight  the matrix is WEIGHT.weight, the bias WEIGHT.bias
        params  further parameters of the operation `linear`
        """
        out = self.scratch(name, self.rows.count, width, dtype=torch.float32)
        weights = {"weight": f"{weight}.weight"} | ({"bias": f"{weight}.bias"} if bias else {})
        if weights["weight"] in self.coded:
            params["activations"] = "fp8"
        self.emit("linear", {"x": x}, {"out": out}, weights=weights, row_block=self._row_block, **params)
        return out

    def narrow_linear(self, x: str, weight: str, width: int, name: str) -> str:
        """Emit a GEMM of few columns that follows the norm of its rows, [M, width] float32."""
        out = self.scratch(name, self.rows.count, width, dtype=torch.float32)
        weights = {"weight": f"{weight}.weight"}
        self.emit("narrow_linear", {"x": x}, {"out": out}, weights=weights, row_block=self._row_block)
        return out

    def summed_linear(
        self, x: str, weight: str, width: int, name: str, shard: LayerShard | None, *, unit: int = 1, bias: bool = False
    ) -> str:
        """Emit a GEMM over the rank's columns of K and the sum over all ranks; the first rank adds the bias.

        unit  columns that stay in one part, if a rank sums in parts
        """
        if shard is None:
            return self.linear(x, weight, width, name, bias=bias)
        parts = {"num_parts": shard.num_parts, "unit": unit} if shard.invariant else {}
        return self.sum_ranks(self.linear(x, weight, width, name, bias=bias and not shard.rank, **parts), name, shard)

    def output(self, x: str, weight: str, width: int, shard: LayerShard | None, *, bias: bool = False) -> str:
        """Emit the output projection of the rank's heads and the sum over all ranks: [M, width] float32."""
        unit = 1 if shard is None else shard.output_unit
        return self.summed_linear(x, weight, width, "output", shard, unit=unit, bias=bias)

    def sum_ranks(self, part: str, name: str, shard: Place | None) -> str:
        """Emit the sum of all ranks' partial sums [M, width]; with one rank, returns `part`."""
        if shard is None or shard.size == 1:
            return part
        count, width = self.builder.spec(part).shape
        out = self.scratch(f"{name}.sum", count, width, dtype=torch.float32)
        self.emit("sum_ranks", {"parts": self._gather_ranks(part, name, width, shard)}, {"out": out})
        return out

    def _gather_ranks(self, part: str, name: str, width: int, shard: Place) -> str:
        """Emit the gathering of all ranks' partial results, [R, M, width]."""
        gathered = self.scratch(f"{name}.ranks", shard.size, self.rows.count, width, dtype=torch.float32)
        self.emit("gather_ranks", {"x": part}, {"out": gathered}, rank=shard.rank)
        return gathered

    def vocabulary(
        self,
        x: str,
        weight: str,
        width: int,
        name: str,
        shard: Shard | None,
        out: str = "",
        *,
        softcap: float | None = None,
    ) -> str:
        """Emit logits of all ids, [M, width] float32; each rank computes its rows of the LM head.

        out      the buffer for the logits; "": a scratch buffer
        softcap  c: logits l become c tanh(l / c); None: they stay
        """
        own: dict[str, Any] = {} if softcap is None else {"softcap": softcap}
        if shard is None or shard.size == 1:
            if not out:
                return self.linear(x, weight, width, name, **own)
            weights = {"weight": f"{weight}.weight"}
            self.emit("linear", {"x": x}, {"out": out}, weights=weights, row_block=self._row_block, **own)
            return out
        spans = [shard.vocabulary(width, rank) for rank in range(shard.size)]
        sizes = [stop - start for start, stop in spans]
        part = self.linear(x, weight, sizes[shard.rank], f"{name}.part", **own)
        gathered = self._gather_ranks(part, name, max(sizes), shard)
        out = out or self.scratch(name, self.rows.count, width, dtype=torch.float32)
        self.emit("all_gather", {"parts": gathered}, {"out": out}, unit=VOCABULARY_UNIT)
        return out

    def add(self, a: str, b: str, name: str, out: str = "") -> str:
        """Emit a residual sum, rounded to the compute dtype. out: the buffer for it; "": a scratch buffer."""
        out = out or self.scratch(name, *self.builder.spec(a).shape)
        self.emit("add", {"a": a, "b": b}, {"out": out})
        return out

    def rotate(self, product: str, heads: dict[str, int], head_dim: int, tables: tuple[str, str]) -> dict[str, str]:
        """Split a GEMM's output into the heads named in `heads` and apply RoPE; rounded to the compute dtype."""
        outs = {part: self.scratch(part, self.rows.count, count, head_dim) for part, count in heads.items()}
        reads = {"qkv": product, "positions": self.rows.positions, "cos": tables[0], "sin": tables[1]}
        self.emit("rope", reads, outs)
        return outs

    def qk_norm(
        self,
        product: str,
        weight: str,
        heads: tuple[int, int],
        head_dim: int,
        eps: float,
        name: str = "qk_normed",
        *,
        has_keys: bool = True,
        **values: bool,
    ) -> str:
        """Emit the norm of the query and key heads of a GEMM's output, in float32.

        has_keys  whether the layer has keys to norm
        values    `v_norm` and `keys_as_values` of the operation, if they are true
        """
        width = self.builder.spec(product).shape[1] + heads[1] * head_dim * ("keys_as_values" in values)
        out = self.scratch(name, self.rows.count, width, dtype=torch.float32)
        letters = "qk" if has_keys else "q"
        self.emit(
            "qk_norm",
            {"qkv": product, **self.live()},
            {"out": out},
            weights={f"{letter}_weight": f"{weight}.{letter}_norm.weight" for letter in letters},
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=head_dim,
            eps=eps,
            **values,
        )
        return out

    def scales(self, k_cache: str) -> dict[str, str]:
        """The kv_scales argument, if the cache is quantised; else {}."""
        if self.builder.spec(k_cache).dtype != torch.uint8:
            return {}
        return {"kv_scales": scales_name(k_cache)}

    def paged(self, given: dict[str, str], window: int | None) -> dict[str, str]:
        """The given arguments with the block table for layers of this window."""
        if "block_table" not in given:
            return given
        return {**given, "block_table": table_of(self.builder, given["block_table"], window)}

    def kv_write(self, k: str, v: str, caches: tuple[str, str], window: int | None = None) -> None:
        """Emit the KV write of the live rows, unless the cache has them already.

        window  the layer's `kv_window`
        """
        if not self.rows.write:
            return
        kind = "kv_write" if self.rows.live is not None else "prefill_kv_write"
        reads = {"k": k, "v": v, **self.paged(self.rows.write, window), **self.scales(caches[0])}
        self.emit(kind, reads, {"k_cache": caches[0], "v_cache": caches[1]})

    def attention(
        self,
        q: str,
        caches: tuple[str, str],
        width: int,
        *,
        sinks: str | None = None,
        shard: LayerShard | None = None,
        kv_window: int | None = None,
        **params: object,
    ) -> str:
        """Emit attention of these rows over the cache, [M, width]; in tensor parallelism over the rank's query heads.

        kv_window  the layer's `kv_window`
        params     parameters of the operation
        """
        out = self.scratch("attention", self.rows.count, width)
        given = self.paged(self.rows.attention, kv_window)
        reads = {"q": q, "k_cache": caches[0], "v_cache": caches[1], **given, **self.live()}
        reads |= self.scales(caches[0])
        weights = {} if sinks is None else {"sinks": sinks}
        if self.rows.chunk is None:
            if shard is not None and self.builder.spec(q).shape[1] < shard.group:
                params["group"] = shard.group
            self.emit("attention", reads, {"out": out}, weights=weights, **params)
        elif self.rows.refresh and params["window"] is None:
            own = {"chunk_size": self.rows.chunk} | {name: given for name, given in params.items() if name != "window"}
            self.emit("refresh_attention", reads, {"out": out}, weights=weights, **own)
        else:
            own = {"chunk_size": self.rows.chunk, **params}
            self.emit("prefill_attention", reads, {"out": out}, weights=weights, **own)
        return out

    def choose_blocks(self, q: str, layer: int, partial: PartialKV) -> None:
        """Emit summaries of the keys that prefill wrote, and the choice of the slot's list of blocks."""
        summary, table = f"key_summary.{layer}", {"block_table": self.rows.attention["block_table"]}
        reads = {"k_cache": f"k_cache.{layer}", **table, "span": "prefill_span"}
        reads |= self.scales(f"k_cache.{layer}")
        self.emit("summarise_blocks", reads, {"key_summary": summary})
        own = {"chunk": "prefill_chunk", "slot": "prefill_slot", "shifts": "partial_shifts"}
        self.emit(
            "choose_blocks",
            {"q": q, "key_summary": summary, **table, **own},
            {"block_lists": f"block_lists.{layer}"},
            block=partial.block,
            num_queries=partial.num_queries,
            num_sinks=partial.num_sinks,
            num_retrieved=partial.num_retrieved,
        )

    def partial_attention(
        self, q: str, layer: int, width: int, partial: PartialKV, *, sinks: str | None, **params: Any
    ) -> str:
        """Emit attention of a step's rows over their slots' lists of blocks, [M, width]."""
        out = self.scratch("attention", self.rows.count, width)
        given = {name: self.rows.attention[name] for name in ("slots", "row_masks")}
        lists = {"block_lists": f"block_lists.{layer}", "dense_lens": "list_lens"}
        caches = {"k_cache": f"k_cache.{layer}", "v_cache": f"v_cache.{layer}"}
        weights = {} if sinks is None else {"sinks": sinks}
        reads = {"q": q, **caches, **lists, **given, **self.live(), **self.scales(caches["k_cache"])}
        self.emit("partial_attention", reads, {"out": out}, weights=weights, block=partial.block, **params)
        return out
