"""This module has the limits of attention's kernels, and the sizes of splits, which follow from fixed sizes."""

from collections.abc import Mapping

from lowlat.kernels.common.limits import Asked, Excess, Limit, OnlyParam, Rule, Size

__all__ = [
    "BLOCK_SIZE",
    "FEW_SLOTS",
    "HEAD_DIM",
    "INVARIANT_HEADS",
    "KV_HEADS",
    "LIMITS",
    "LISTED_HEAD_DIM",
    "MAX_ROWS",
    "MAX_SLOTS",
    "MAX_SPLITS",
    "QUERY_ROWS",
    "REFRESHED_HEAD_DIM",
    "ROWS",
    "ROWS_A_SLOT",
    "SLOTS",
    "choose_split",
    "finely_split",
    "most_positions",
    "query_rows",
    "shortly_split",
]

HEAD_DIM = Limit((64, 128, 256, 512))
LISTED_HEAD_DIM = Limit((64, 128))  # of blocks that are chosen, and of their attention
REFRESHED_HEAD_DIM = Limit(multiple=8, most=256)  # of torch's flash attention
BLOCK_SIZE = Limit((16, 32, 64, 128, 256))
KV_HEADS = Limit(most=1024)
MAX_SLOTS, FEW_SLOTS, MAX_ROWS = 32, 16, 512
SLOTS, ROWS_A_SLOT, ROWS = Limit(most=MAX_SLOTS), Limit(most=64), Limit(most=MAX_ROWS)
QUERY_ROWS = Limit(most=16 * 256)  # of a slot that share a key-value head
MAX_SPLITS = 1024  # of a slot's positions

FEW_ITEMS, MANY_ITEMS, WIDE_HEAD = 132, 512, 256
INVARIANT_HEADS = 8  # with which splits are chosen where ranks have parts of the heads, and must have the same splits


def query_rows(rows: int, heads: int, kv_heads: int) -> int:
    """Return the number of a slot's query rows that share a key-value head."""
    return rows * heads // kv_heads


def choose_split(max_batch: int, max_context: int, kv_heads: int, head_dim: int = 0) -> int:
    """Choose the positions of a split, from sizes that are fixed while a model is loaded, since it decides bits.

    Short splits distribute a short context over all SMs. Long ones halve the sums that are stored and combined
    (Llama-8B's heads on an H200: 1 slot at 1K 5.8 us with 128, 6.8 with 256; 1 at 8K 14.7 with 256, 16.9 with 512; 4 at
    16K 83 and 76; four heads of Qwen3-30B-A3B at 32K 23.8 and 21.8). An SM has only one block of wide heads, so there
    may be twice as many of these as SMs.
    """
    if max_context <= finely_split(max_batch, kv_heads) * (2 if head_dim >= WIDE_HEAD else 1):
        return 128
    return 512 if max_context > shortly_split(max_batch, kv_heads) else 256


def finely_split(max_batch: int, kv_heads: int) -> int:
    """Return the longest context with the shortest splits; 0: there is none."""
    return FEW_ITEMS // (max_batch * kv_heads) * 128


def shortly_split(max_batch: int, kv_heads: int) -> int:
    """Return the longest context with splits of at most 256 positions; 0: there is none."""
    return MANY_ITEMS // (max_batch * kv_heads) * 256


def most_positions(max_batch: int, max_context: int, kv_heads: int) -> int:
    """Return the most positions of a slot, with the rest of its last block and a step's rows, without a window."""
    return MAX_SPLITS * choose_split(max_batch, max_context, kv_heads)


def _grouped(asked: Asked) -> Excess | None:
    heads, kv_heads, rows = asked.sizes["H"], asked.sizes["G"], asked.sizes["R"]
    if heads % kv_heads:
        return Excess("num_attention_heads", f"a multiple of {kv_heads} key-value heads", heads)
    shared = query_rows(rows, heads, kv_heads)
    return None if QUERY_ROWS.takes(shared) else Excess("query rows of one key-value head", str(QUERY_ROWS), shared)


_STEP: tuple[Rule, ...] = (
    Size("D", HEAD_DIM, "head_dim"),
    Size("G", KV_HEADS, "num_key_value_heads"),
    Size("B", SLOTS, "slots (max_batch)"),
    Size("R", ROWS_A_SLOT, "rows a slot"),
    Size("B * R", ROWS, "rows of all slots"),
    _grouped,
)
LIMITS: Mapping[str, tuple[Rule, ...]] = {
    "attention": (Size("block", BLOCK_SIZE, "block_size"), *_STEP),
    "choose_blocks": (Size("D", LISTED_HEAD_DIM, "head_dim"),),
    "partial_attention": _STEP,
    "refresh_attention": (Size("D", REFRESHED_HEAD_DIM, "head_dim"), OnlyParam("softcap")),
}
