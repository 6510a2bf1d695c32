"""This module emits operations of decoders and draft models over their rows: GEMMs, norms, attention, caches.

GEMMs give float32; an operation that reads one rounds it once, to the dtype of the buffer it writes.
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
    """The constant that has the scales of a cache of codes, [2, G] float32, by the name of its keys."""
    return k_cache.replace("k_cache", "kv_scales")


def rounded_scale(scale: float, dtype: str) -> float:
    """A factor of embeddings as the compute dtype has it."""
    return torch.tensor(scale, dtype=TORCH_DTYPES[dtype]).item()


def table_of(builder: ProgramBuilder, table: str, window: int | None) -> str:
    """The table of blocks of layers of a window: their own where the state has one, else that of all layers."""
    own = table if window is None else table + window_suffix(window)
    return own if own in builder else table


@dataclass(frozen=True)
class Rows:
    """The rows that operations run over, by buffer name.

    prefix     prepended to every scratch name, so that stages do not share buffers by accident
    count      M, rows in all
    live       [M] uint8, or None for a chunk of prefill, which is processed whole
    positions  [M] int32, for RoPE
    attention  buffers of the attention's rows: slots, dense_lens, row_masks; or chunk, for prefill
    write      buffers of the KV write: row_live, slots, write_lens, offsets, block_table; or chunk, for prefill; none
               of rows whose keys and values are in the cache. Layers of a window may have another block_table
    chunk      positions of a chunk of prefill, of which there may be several; None: no prefill
    partial    SpecPV's sizes, where a step's rows may attend to a part of the cache; None: they attend to all of it
    recurrent  buffers of the rows of operations over recurrent states: slots, dense_lens, row_live; or slot and chunk,
               for prefill
    refresh    the rows are a refresh's, which choose the blocks of their slot's lists
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
        """Whether they are a prompt's, and no others'."""
        return self.chunk is not None and not self.refresh

    @property
    def chooses(self) -> bool:
        """Whether the rows attend to all of the cache and choose blocks, where other rows attend to lists."""
        return self.refresh or self.chunk is not None


@dataclass
class Emitter:
    """Appends operations over one set of rows to a program, in one compute dtype.

    coded  matrices that are multiplied by codes of the rows
    """

    builder: ProgramBuilder
    rows: Rows
    dtype: torch.dtype
    stage: Stage
    coded: frozenset[str] = frozenset()

    def live(self) -> dict[str, str]:
        """The row_live argument, where rows may be dead."""
        return {} if self.rows.live is None else {"row_live": self.rows.live}

    def wanted(self) -> dict[str, str]:
        """The row_live argument of operations that may skip rows nobody reads, also where other operations take all."""
        return self.live() or {"row_live": self.rows.write["row_live"]}

    @property
    def _row_block(self) -> int:
        """Rows of the reference's GEMMs: a step's by eights; a chunk's at once, and at least as many.

        Torch gives a row other bits where fewer than four are multiplied: chunks may be so short, and run together.
        """
        return ROW_BLOCK if self.rows.live is not None else max(ROW_BLOCK, self.rows.count)

    def scratch(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> str:
        """A scratch buffer of these rows; layers of other widths have another of the same name, with its extents."""
        name = f"{self.rows.prefix}{name}"
        if name in self.builder and self.builder.spec(name).shape != shape:
            name += f".{'x'.join(map(str, shape[1:]))}"
        return self.builder.scratch(name, shape, dtype or self.dtype)

    def emit(self, kind: str, reads: dict[str, str], writes: dict[str, str], **options: object) -> None:
        """Append one operation in the current stage."""
        self.builder.emit(kind, self.stage, reads=reads, writes=writes, **options)  # type: ignore[arg-type]

    def embed(self, tokens: str, weight: str, width: int, name: str, *, scale: float | None = None) -> str:
        """Embedding rows, [M, width], times a scale."""
        out, own = self.scratch(name, self.rows.count, width), {} if scale is None else {"scale": scale}
        self.emit("embed", {"tokens": tokens}, {"out": out}, weights={"weight": weight}, **own)
        return out

    def cast(self, product: str, name: str) -> str:
        """A GEMM's output, rounded to the compute dtype."""
        out = self.scratch(name, *self.builder.spec(product).shape)
        self.emit("cast", {"x": product}, {"out": out})
        return out

    def norm(self, x: str, weight: str, eps: float, name: str) -> str:
        """RMS norm, the width kept."""
        out = self.scratch(name, *self.builder.spec(x).shape)
        self.emit("rms_norm", {"x": x, **self.live()}, {"out": out}, weights={"weight": weight}, eps=eps)
        return out

    def linear(self, x: str, weight: str, width: int, name: str, *, bias: bool = False, **params: Any) -> str:
        """A GEMM's output in float32, [M, width]; the bias is the weight's sibling. params: of `linear`."""
        out = self.scratch(name, self.rows.count, width, dtype=torch.float32)
        weights = {"weight": f"{weight}.weight"} | ({"bias": f"{weight}.bias"} if bias else {})
        if weights["weight"] in self.coded:
            params["activations"] = "fp8"
        self.emit("linear", {"x": x}, {"out": out}, weights=weights, row_block=self._row_block, **params)
        return out

    def narrow_linear(self, x: str, weight: str, width: int, name: str) -> str:
        """The output in float32, [M, width], of a GEMM of few columns, which follows the norm of its rows."""
        out = self.scratch(name, self.rows.count, width, dtype=torch.float32)
        weights = {"weight": f"{weight}.weight"}
        self.emit("narrow_linear", {"x": x}, {"out": out}, weights=weights, row_block=self._row_block)
        return out

    def summed_linear(
        self, x: str, weight: str, width: int, name: str, shard: LayerShard | None, *, unit: int = 1, bias: bool = False
    ) -> str:
        """A GEMM over the columns of K that a rank has, summed over all ranks; the first rank adds the bias.

        unit  columns that stay together where a rank sums in parts
        """
        if shard is None:
            return self.linear(x, weight, width, name, bias=bias)
        parts = {"num_parts": shard.num_parts, "unit": unit} if shard.invariant else {}
        return self.sum_ranks(self.linear(x, weight, width, name, bias=bias and not shard.rank, **parts), name, shard)

    def output(self, x: str, weight: str, width: int, shard: LayerShard | None, *, bias: bool = False) -> str:
        """The output projection of a rank's heads, summed over all ranks: [M, width] float32."""
        unit = 1 if shard is None else shard.output_unit
        return self.summed_linear(x, weight, width, "output", shard, unit=unit, bias=bias)

    def sum_ranks(self, part: str, name: str, shard: Place | None) -> str:
        """The sum of all ranks' parts [M, width]; the part itself where there is one."""
        if shard is None or shard.size == 1:
            return part
        count, width = self.builder.spec(part).shape
        out = self.scratch(f"{name}.sum", count, width, dtype=torch.float32)
        self.emit("sum_ranks", {"parts": self._gather_ranks(part, name, width, shard)}, {"out": out})
        return out

    def _gather_ranks(self, part: str, name: str, width: int, shard: Place) -> str:
        """The parts of all ranks, [R, M, width]."""
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
        """Logits of all ids [M, width] in float32, of an LM head of which each rank has some rows.

        out      a buffer that they are written to; "": one of their own
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
        """A residual sum, rounded to the compute dtype; out: a buffer that it is written to, "": one of their own."""
        out = out or self.scratch(name, *self.builder.spec(a).shape)
        self.emit("add", {"a": a, "b": b}, {"out": out})
        return out

    def rotate(self, product: str, heads: dict[str, int], head_dim: int, tables: tuple[str, str]) -> dict[str, str]:
        """Split a GEMM's output into q, k, v (those named in `heads`) and rotate; rounded to the compute dtype."""
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
        """Norm of the query and key heads of a GEMM's output, in float32.

        has_keys  whether the layer norms keys: False where it has none
        values    `v_norm` and `keys_as_values`, see the operation, where they are true
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
        """The argument of the scales of a cache that holds codes; they are declared where caches are."""
        if self.builder.spec(k_cache).dtype != torch.uint8:
            return {}
        return {"kv_scales": scales_name(k_cache)}

    def paged(self, given: dict[str, str], window: int | None) -> dict[str, str]:
        """The arguments of rows, with the table of layers of this window."""
        if "block_table" not in given:
            return given
        return {**given, "block_table": table_of(self.builder, given["block_table"], window)}

    def kv_write(self, k: str, v: str, caches: tuple[str, str], window: int | None = None) -> None:
        """Store keys and values of the live rows, unless they are in the cache.

        window  of the layer, if all that its rows ever see lies in it
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
        """Attention of these rows over the cache, [M, width]; with the query heads of a rank, where it has a part.

        kv_window  as of `kv_write`
        params     of the operation
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
        """Summaries of the keys that prefill wrote, and the blocks of its slot's list: all, if it is not partial."""
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
        """Attention of a step's rows over their slots' lists of blocks, [M, width]."""
        out = self.scratch("attention", self.rows.count, width)
        given = {name: self.rows.attention[name] for name in ("slots", "row_masks")}
        lists = {"block_lists": f"block_lists.{layer}", "dense_lens": "list_lens"}
        caches = {"k_cache": f"k_cache.{layer}", "v_cache": f"v_cache.{layer}"}
        weights = {} if sinks is None else {"sinks": sinks}
        reads = {"q": q, **caches, **lists, **given, **self.live(), **self.scales(caches["k_cache"])}
        self.emit("partial_attention", reads, {"out": out}, weights=weights, block=partial.block, **params)
        return out
