"""The draft model's input: accepted rows, a block's and levels', against the reference; see `rowwise_cases`."""

from typing import Any

import torch
from kernel_cases import unwritten
from rowwise_cases import BF16, EPS, Lab, check, flags, poison, same_bits, weights
from selection_cases import best_pairs

from lowlat.kernels.gemm.packing import pack
from lowlat.kernels.reference import OPERATIONS
from lowlat.kernels.sampling.select import INFINITY
from lowlat.kernels.speculation import draft_block
from lowlat.kernels.speculation import draft_input as draft_input
from lowlat.kernels.toolchain.kernel import KernelCall


def check_draft_input(
    lab: Lab, batch: int, rows: int, width: int, *, packed: bool, block: int = 12, dtype: torch.dtype = BF16
) -> None:
    """Embedding and norms of a head's rows, with the kept block ends."""
    count, vocabulary, blocks = batch * rows, 20, 6
    table, hidden = torch.randn(vocabulary, width).to(BF16), torch.randn(count, width).to(BF16)
    live = (torch.arange(rows)[None] < torch.randint(1, rows + 1, (batch, 1))).to(torch.uint8)
    live[-1] = 1
    tokens = torch.where(live != 0, torch.randint(0, vocabulary, (batch, rows)), -1).int()
    options: dict[str, Any] = {
        "hidden": hidden,
        "row_live": live,
        "embed_weight": weights(width, dtype),
        "hidden_weight": weights(width, dtype),
        "eps": EPS,
    }
    outs = {"out": poison(count, 2 * width), "normed_hidden": poison(count, width)}
    embedded = poison(count, width)
    OPERATIONS["embed"](tokens, table, out=embedded)
    lab.both("concat_norms", draft_input.concat_norms, outs, embedded=embedded, **options)
    expected = {key: tensor.clone() for key, tensor in outs.items()}
    OPERATIONS["concat_norms"](embedded, **options, **expected)
    starts = torch.randint(0, (blocks - 1) * block, (batch, 1))
    starts[-1] = 2 * block - rows  # the last row ends a block
    stored = {
        "positions": torch.where(live != 0, starts + torch.arange(rows), 0).int(),
        "block_table": (torch.randperm((batch + 1) * blocks) + 1).reshape(batch + 1, blocks).int(),
        "slots": torch.randperm(batch + 1)[:batch].int(),
    }
    kept = expected["block_features"] = poison((batch + 1) * blocks + 1, width)
    outs["block_features"] = kept.clone()
    OPERATIONS["store_boundary"](hidden, row_live=live, **stored, block_features=kept, block_size=block)
    assert not bool(kept.isnan().all())
    layout = pack(lab.place(table)) if packed else table
    found = lab.launch(
        draft_input.draft_input, outs, tokens=tokens, weight=layout, **options, **stored, block_size=block
    )
    check("draft_input", found, expected)
    del outs["block_features"]
    found = lab.launch(draft_input.draft_input, outs, tokens=tokens, weight=layout, **options)
    check("draft_input without boundaries", found, expected)


def check_block_input(
    lab: Lab, accepted: int, drafting: int, width: int, *, packed: bool, kept: bool = True, batch: int = 3
) -> None:
    """A block's rows: what the operations make one by one, features at block ends with them; a slot is dead."""
    count, pages = accepted + drafting - 1, 4
    live = (torch.arange(batch) != 1).to(torch.uint8)
    reads = {
        "tokens": torch.randint(0, 20, (batch, accepted)).int(),
        "hidden": torch.randn(batch * accepted, width).to(BF16),
        "commit_lens": torch.randint(1, accepted + 1, (batch,)).int(),
        "draft_live": live,
        "dense_lens": torch.randint(0, pages * 4 - count, (batch,)).int(),
        "mask_state": torch.randn(width).to(BF16),
    }
    rows = torch.arange(accepted)
    stored: dict[str, Any] = {
        "positions": (reads["dense_lens"][:, None] + rows).int(),
        "row_live": ((rows < reads["commit_lens"][:, None]) & (live[:, None] != 0)).to(torch.uint8),
        "block_table": torch.randperm(batch * pages).reshape(batch, pages).int(),
        "slots": torch.randperm(batch).int(),
        "block_size": 4,
    }
    features = poison(batch * pages, width)
    table, norms = torch.randn(20, width).to(BF16), {"embed_weight": weights(width), "hidden_weight": weights(width)}
    block = unwritten("block_rows", reads, R=count, S=drafting)
    halves = {"out": poison(batch * count, 2 * width), "normed_hidden": poison(batch * count, width)}
    want = {**block, "block_hidden": block["out"], **halves, "block_features": features.clone()}
    outs = {name: tensor.clone() for name, tensor in want.items()}
    if kept:
        OPERATIONS["store_boundary"](reads["hidden"], block_features=want["block_features"], **stored)
    OPERATIONS["block_rows"](**reads, **block, mask_token=7)
    OPERATIONS["embed"](block["block_tokens"], table, out=(embedded := poison(batch * count, width)))
    live = block["block_live"]
    OPERATIONS["concat_norms"](embedded, block["out"], row_live=live, **norms, **halves, eps=EPS)

    def build(block_features: torch.Tensor, boundary: dict[str, Any], **given: Any) -> list[KernelCall]:
        found = draft_block.BlockBoundary(block_features=block_features, **boundary) if kept else None
        return draft_block.block_input(**given, boundary=found, eps=EPS)

    boundary = {name: lab.place(each) for name, each in stored.items()}
    layout = pack(lab.place(table)) if packed else table
    found = lab.launch(build, outs, boundary=boundary, **reads, **norms, weight=layout, mask_token=7)
    check("block_input", found, want)
    for name in ("block_hidden", "block_features"):
        assert same_bits(found[name].nan_to_num(7), want[name].nan_to_num(7)), name
    alone = lab.launch(
        draft_input.concat_norms, halves, embedded=embedded, hidden=block["out"], row_live=live, **norms, eps=EPS
    )
    assert all(same_bits(found[name], alone[name]) for name in halves)


def check_chain_level(
    lab: Lab, batch: int, width: int, *, packed: bool, masked: bool, dtype: torch.dtype = BF16
) -> None:
    """A chain's deeper level, with the drafts that it takes; of a broken row, a dead one, and a slot that is dead."""
    vocabulary, num_nodes, depth = 40, 5, 3
    table, logits = torch.randn(vocabulary, width).to(BF16), torch.randn(batch, 30)
    names = torch.randperm(vocabulary)[:30].int()
    if batch > 1:
        logits[0, 7] = torch.nan
    live = (torch.arange(batch) != 1).to(torch.uint8).reshape(batch, 1) if masked else None
    one, zero = torch.tensor([3], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    reads = {
        "feedback": torch.randn(batch, width).to(BF16),
        "draft_live": (torch.arange(batch) != 2).to(torch.uint8),
        "draft_lens": torch.randint(3, 1000, (batch,)).int(),
        "nodes": one,
        "parent_rows": zero,
        "masks": torch.randint(1, 1 << 62, (1,)),
    }
    drafted, nodes = poison(batch, 1, dtype=torch.int32), poison(batch, num_nodes, dtype=torch.int32)
    level = unwritten("gather_level", {**reads, "draft_nodes": nodes})
    want = {**level, "drafted": drafted, "draft_nodes": nodes}
    want |= {"out": poison(batch, 2 * width), "normed_hidden": poison(batch, width)}
    outs = {key: tensor.clone() for key, tensor in want.items()}
    OPERATIONS["draft_topk"](logits, names, live, out=drafted, k=1)
    OPERATIONS["assign_drafts"](drafted, one, zero, zero, draft_nodes=nodes)
    OPERATIONS["gather_level"](**reads, draft_nodes=nodes, **level, depth=depth)
    OPERATIONS["embed"](level["tokens"], table, out=(embedded := poison(batch, width)))
    norms: dict[str, Any] = {"embed_weight": weights(width, dtype), "hidden_weight": weights(width, dtype)}
    norms["eps"] = EPS
    halves = {name: want[name] for name in ("out", "normed_hidden")}
    OPERATIONS["concat_norms"](embedded, level["hidden"], row_live=level["row_live"], **norms, **halves)
    assert (int(drafted[0]) == -1) == (batch > 1) and (batch < 3 or int(drafted[2]) >= 0 > int(level["tokens"][2]))

    def build(best: Any, names: Any, live: Any, drafted: torch.Tensor, **given: Any) -> list[KernelCall]:
        drafts = draft_input.ChainDrafts(best, live, names, drafted.reshape(-1))
        return draft_input.draft_level_input(**given, drafts=drafts)

    layout = pack(lab.place(table)) if packed else table
    best = best_pairs(logits, INFINITY)
    found = lab.launch(build, outs, **reads, best=best, names=names, live=live, weight=layout, **norms, depth=depth)
    check("draft_level_input of a chain", found, want)
    assert same_bits(found["hidden"], want["hidden"])


def check_level_input(lab: Lab, batch: int, wide: int, above: int, width: int, *, packed: bool) -> None:
    """A deeper level of the tree: failed drafts, dead slots, masks of many bits."""
    depth, vocabulary, num_nodes = 2, 20, 2 * wide + 2
    table, embed_weight, hidden_weight = torch.randn(vocabulary, width).to(BF16), weights(width), weights(width)
    reads = {
        "feedback": torch.randn(batch * above, width).to(BF16),
        "draft_nodes": torch.randint(-1, vocabulary, (batch, num_nodes)).int(),
        "draft_live": flags(batch),
        "draft_lens": torch.randint(3, 1000, (batch,)).int(),
        "nodes": torch.randperm(num_nodes - 1)[:wide].int() + 1,
        "parent_rows": torch.randint(0, above, (wide,)).int(),
        "masks": torch.randint(1, 1 << 62, (wide,)),
    }
    level = unwritten("gather_level", reads)
    halves = {"out": poison(batch * wide, 2 * width), "normed_hidden": poison(batch * wide, width)}
    outs = {key: tensor.clone() for key, tensor in (level | halves).items()}
    OPERATIONS["gather_level"](**reads, **level, depth=depth)
    embedded = poison(batch * wide, width)
    OPERATIONS["embed"](level["tokens"], table, out=embedded)
    norms: dict[str, Any] = {"embed_weight": embed_weight, "hidden_weight": hidden_weight, "eps": EPS}
    OPERATIONS["concat_norms"](embedded, level["hidden"], row_live=level["row_live"], **norms, **halves)
    layout = pack(lab.place(table)) if packed else table
    found = lab.launch(draft_input.draft_level_input, outs, **reads, weight=layout, **norms, depth=depth)
    check("draft_level_input", found, level | halves)
    assert same_bits(found["hidden"], level["hidden"])
