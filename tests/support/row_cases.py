"""Random rows for what is gathered, moved, stored and laid out around the draft model."""

import random
from collections.abc import Callable

import torch
from kernel_cases import Arrays, Bench, poisoned, random_topology, unwritten

from lowlat.kernels import reference
from lowlat.kernels.attention.kv_compact import kv_compact, kv_compact_layer
from lowlat.kernels.attention.kv_write import kv_write
from lowlat.kernels.gemm.packing import pack
from lowlat.kernels.speculation import draft_block
from lowlat.kernels.speculation import draft_level as draft_level
from lowlat.kernels.speculation import draft_rows as draft_rows
from lowlat.kernels.speculation import markov as markov
from lowlat.kernels.speculation import token_rows as token_rows
from lowlat.kernels.toolchain.kernel import KernelCall

BLOCK, TABLE = 4, 9


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def check_compaction(bench: Bench, seed: int, *, layers: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """All layers' rows of a random tree move, in one launch or each layer's alone."""
    source = random.Random(seed)
    torch.manual_seed(seed)
    batch, heads, size = 3, 2, 16
    rows = 12
    topology = random_topology(source, rows, 7)
    nodes = torch.full((batch, rows), -1, dtype=torch.int32)
    counts = torch.zeros(batch, dtype=torch.int32)
    for index in range(batch):
        path = source.choice(topology.paths)
        nodes[index, : len(path)] = torch.tensor(path)
        counts[index] = source.randint(0, len(path))
    blocks = torch.randperm(batch * TABLE) + 1
    arrays: Arrays = {
        "accepted_nodes": nodes,
        "commit_lens": counts,
        "dense_lens": torch.randint(0, BLOCK * TABLE - rows, (batch,), dtype=torch.int32),
        "block_table": blocks.reshape(batch, TABLE).int(),
        "slots": torch.tensor([2, -1, 0] if seed % 2 else [1, 2, 0], dtype=torch.int32),
    }
    shape = (batch * TABLE + 1, heads, BLOCK, size)
    for layer in range(layers):
        arrays.update({f"{part}.{layer}": torch.randn(shape).to(dtype) for part in ("k", "v")})

    def common(found: Arrays) -> Arrays:
        names = ("accepted_nodes", "commit_lens", "dense_lens", "block_table", "slots")
        return {name: found[name] for name in names}

    def reference_(found: Arrays) -> None:
        for layer in range(layers):
            caches = {"k_cache": found[f"k.{layer}"], "v_cache": found[f"v.{layer}"]}
            reference.OPERATIONS["kv_compact"](**common(found), **caches)

    def calls(found: Arrays) -> list[KernelCall]:
        caches = {f"{part}_caches": [found[f"{part}.{layer}"] for layer in range(layers)] for part in ("k", "v")}
        memory: Arrays = {}

        def workspace(name: str, shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
            return memory.setdefault(name, torch.zeros(shape, dtype=kind, device=bench.device))

        made = kv_compact(**common(found), **caches, workspace=workspace)  # type: ignore[arg-type]
        KEPT.append(memory)
        return made

    def alone(found: Arrays) -> list[KernelCall]:
        each = [{f"{part}_cache": found[f"{part}.{layer}"] for part in ("k", "v")} for layer in range(layers)]
        return [call for caches in each for call in kv_compact_layer(**common(found), **caches)]

    bench.compare(arrays, reference_, calls)
    bench.compare(arrays, reference_, alone)


KEPT: list[Arrays] = []  # workspaces live as long as their calls


def check_features(bench: Bench, seed: int, *, width: int, num_sources: int) -> None:
    """Features of accepted rows."""
    torch.manual_seed(seed)
    batch, rows = 3, 5
    arrays = {f"source{number}": bf16(batch * rows, width) for number in range(num_sources)}
    arrays["accepted_nodes"] = torch.randint(-1, rows, (batch, rows), dtype=torch.int32)
    arrays["out"] = poisoned(batch * rows, num_sources * width, dtype=torch.bfloat16)
    compare_alone(bench, arrays, "gather_features", draft_rows.gather_features)
    del arrays["accepted_nodes"]
    compare_alone(bench, arrays, "join_features", draft_rows.join_features)


def compare_alone(
    bench: Bench, arrays: Arrays, kind: str, build: Callable[..., list[KernelCall]], **params: int
) -> Arrays:
    """An operation against its kernel, whose arguments all arrays are."""
    operation, arrays = reference.OPERATIONS[kind], arrays | unwritten(kind, arrays)
    return bench.compare(arrays, lambda found: operation(**found, **params), lambda found: build(**found, **params))


def check_last(bench: Bench, seed: int, *, widths: tuple[int, ...]) -> None:
    """The last committed rows of one or two tensors."""
    torch.manual_seed(seed)
    batch, rows = 4, 3
    arrays = {"commit_lens": torch.randint(0, rows + 1, (batch,), dtype=torch.int32)}
    for number, width in enumerate(widths):
        arrays[f"x{number}"] = bf16(batch * rows, width)
        arrays[f"out{number}"] = poisoned(batch, width, dtype=torch.bfloat16)

    def reference_(found: Arrays) -> None:
        for number in range(len(widths)):
            operation = reference.OPERATIONS["take_last"]
            operation(found[f"x{number}"], found["commit_lens"], out=found[f"out{number}"])

    def calls(found: Arrays) -> list[KernelCall]:
        pairs = [(found[f"x{number}"], found[f"out{number}"]) for number in range(len(widths))]
        if len(pairs) == 1:
            return draft_rows.take_last_row(pairs[0][0], found["commit_lens"], out=pairs[0][1])
        return draft_rows.take_last(pairs, found["commit_lens"])

    bench.compare(arrays, reference_, calls)


def check_boundary(bench: Bench, seed: int, *, width: int) -> None:
    """Features at block ends."""
    torch.manual_seed(seed)
    batch, rows = 3, 6
    first = torch.randint(0, BLOCK * TABLE - rows, (batch, 1), dtype=torch.int32)
    arrays = {
        "hidden": bf16(batch * rows, width),
        "positions": first + torch.arange(rows, dtype=torch.int32),
        "row_live": torch.randint(0, 2, (batch, rows), dtype=torch.uint8),
        "block_table": (torch.randperm(batch * TABLE) + 1).reshape(batch, TABLE).int(),
        "slots": torch.tensor([2, 0, -1], dtype=torch.int32),
        "block_features": poisoned(batch * TABLE + 1, width, dtype=torch.bfloat16),
    }
    arrays["row_live"][2] = 0
    compare_alone(bench, arrays, "store_boundary", draft_rows.store_boundary, block_size=BLOCK)


def check_prefill_rows(bench: Bench, seed: int, *, width: int, start: int, live: int, size: int = 14) -> None:
    """A chunk's features, of which the last may be dead, after a prompt's start or another chunk."""
    torch.manual_seed(seed)
    table = torch.full((1, (start + size) // BLOCK + 1), 1 << 20, dtype=torch.int32)  # what is not known is not read
    used = -(-(start + live) // BLOCK)
    table[0, :used] = torch.randperm(used).int() + 1
    arrays = {
        "hidden": bf16(size, width),
        "chunk": torch.tensor([start, live], dtype=torch.int32),
        "block_table": table,
        "block_features": bf16(used + 1, width),
    }
    before = arrays["block_features"].clone()
    after = compare_alone(bench, arrays, "draft_prefill_rows", draft_rows.draft_prefill_rows, block_size=BLOCK)
    kept = (after["block_features"] != before).any(1)
    assert int(kept.sum()) == live // BLOCK


def check_block(bench: Bench, seed: int, *, width: int, batch: int = 4, accepted: int = 4, drafting: int = 3) -> None:
    """The rows of a drafter that drafts all positions at once, and those of them that draft."""
    torch.manual_seed(seed)
    count = accepted + drafting - 1
    arrays = {
        "tokens": torch.randint(0, 99, (batch, accepted), dtype=torch.int32),
        "hidden": bf16(batch * accepted, width),
        "commit_lens": torch.randint(0, accepted + 1, (batch,), dtype=torch.int32),
        "dense_lens": torch.randint(3, 1000, (batch,), dtype=torch.int32),
        "mask_state": bf16(1, width)[0],
        "out": poisoned(batch * count, width, dtype=torch.bfloat16),
        **{name: poisoned(batch, count) for name in ("block_tokens", "block_positions")},
        "block_live": poisoned(batch, count, dtype=torch.uint8),
        "drafting_live": poisoned(batch, drafting, dtype=torch.uint8),
        "drafting_positions": poisoned(batch, drafting),
    }
    arrays["draft_live"] = ((arrays["commit_lens"] > 0) & (torch.rand(batch) < 0.8)).to(torch.uint8)
    after = compare_alone(bench, arrays, "block_rows", draft_block.block_rows, mask_token=7)
    live = arrays["draft_live"].bool()
    assert torch.equal(after["block_live"].sum(1)[live], (arrays["commit_lens"] + drafting - 1)[live])
    assert not after["block_live"][~live].any() and not after["out"].reshape(batch, -1)[~live].any()
    arrays = {"x": bf16(batch * count, width), "commit_lens": arrays["commit_lens"]}
    arrays["out"] = poisoned(batch * drafting, width, dtype=torch.bfloat16)
    taken = compare_alone(bench, arrays, "take_block", draft_rows.take_block)
    other = {"x": bf16(batch * count, 8), "out": poisoned(batch * drafting, 8, dtype=torch.bfloat16)}
    reference.OPERATIONS["take_block"](other["x"], arrays["commit_lens"], out=(wanted := other["out"].clone()))
    pairs = [(each["x"].to(bench.device), each["out"].to(bench.device, copy=True)) for each in (arrays, other)]
    bench.run(*draft_rows.take_blocks(pairs, arrays["commit_lens"].to(bench.device)))
    assert torch.equal(pairs[0][1].cpu(), taken["out"]) and torch.equal(pairs[1][1].cpu(), wanted)
    lens = torch.randint(0, accepted + 1, (batch,), dtype=torch.int32)
    arrays = {
        "accepted_tokens": torch.randint(0, 99, (batch, accepted), dtype=torch.int32),
        "commit_lens": lens,
        "draft_live": ((lens > 0) & (torch.rand(batch) < 0.8)).to(torch.uint8),
        "draft_lens": torch.randint(3, 1000, (batch,), dtype=torch.int32),
        **{name: poisoned(batch, count) for name in ("tokens", "positions")},
        "row_live": poisoned(batch, count, dtype=torch.uint8),
        "write_lens": poisoned(batch),
    }
    compare_alone(bench, arrays, "mask_rows", draft_block.mask_rows, mask_token=9)


def check_token_rows(bench: Bench, seed: int, *, columns: int) -> None:
    """Rows of accepted tokens, which are counted, and of one draft, which may be missing."""
    torch.manual_seed(seed)
    batch = 4
    live = torch.tensor([1, 0, 1, 1], dtype=torch.uint8)
    for rows, column, ahead in ((columns, 0, 1), (1, min(seed + 1, columns - 1), seed)):
        arrays = {
            "given": torch.randint(-1, 99, (batch, columns), dtype=torch.int32),
            "live": live,
            "lens": torch.randint(0, 1000, (batch,), dtype=torch.int32),
            **{name: poisoned(batch, rows) for name in ("tokens", "positions")},
            "row_live": poisoned(batch, rows, dtype=torch.uint8),
            "write_lens": poisoned(batch),
        }
        if rows > 1:
            arrays["counts"] = torch.randint(0, rows + 1, (batch,), dtype=torch.int32)
        found = compare_alone(bench, arrays, "token_rows", token_rows.token_rows, column=column, ahead=ahead)
        alive = found["row_live"].bool()
        assert not alive[1].any() and (found["tokens"][~alive] == -1).all()
        place = (arrays["lens"] + ahead)[:, None] + torch.arange(rows)
        assert torch.equal(found["positions"][alive].cpu(), place.int()[alive.cpu()])


def check_markov(bench: Bench, seed: int, *, vocabulary: int) -> None:
    """Check the operations after DSpark's block: parents' tokens and biased logits."""
    torch.manual_seed(seed)
    batch, block, wide, nodes, row = 3, 4, 1 + seed, 9, seed % 4
    arrays = {
        "tokens": torch.randint(0, 99, (batch, block), dtype=torch.int32),
        "draft_nodes": torch.randint(-1, 99, (batch, nodes), dtype=torch.int32),
        "nodes": torch.randperm(nodes)[:wide].int(),
        "parents": poisoned(batch, wide),
        "row_live": poisoned(batch, wide, dtype=torch.uint8),
    }
    arrays["tokens"][1] = -1
    found = compare_alone(bench, arrays, "parent_tokens", markov.parent_tokens)
    check_parent_vectors(bench, arrays, found["parents"].cpu())
    live = found["row_live"].cpu()
    del arrays["draft_nodes"]
    arrays["nodes"] *= 0
    found = compare_alone(bench, arrays, "parent_tokens", markov.parent_tokens)
    check_parent_vectors(bench, arrays, found["parents"].cpu())
    arrays = {"logits": torch.randn(batch * block, vocabulary), "bias": torch.randn(batch * wide, vocabulary)}
    arrays |= {"row_live": live, "out": poisoned(batch * wide, vocabulary, dtype=torch.float32)}
    compare_alone(bench, arrays, "bias_rows", markov.bias_rows, row=row)


def check_parent_vectors(bench: Bench, arrays: dict[str, torch.Tensor], parents: torch.Tensor) -> None:
    """With the vectors of the parents' tokens in the same launch, from either layout of their table."""
    table = bf16(99, 40)
    wanted = torch.where(parents.reshape(-1, 1) >= 0, table[parents.reshape(-1).long()], 0)
    placed = table.to(bench.device)
    for weight in (placed, pack(placed)):
        given = {name: array.to(bench.device, copy=True) for name, array in arrays.items()}
        vectors = poisoned(parents.numel(), 40, dtype=torch.bfloat16).to(bench.device)
        bench.run(*markov.parent_vectors(**given, weight=weight, vectors=vectors))
        assert torch.equal(given["parents"].cpu(), parents) and torch.equal(vectors.cpu(), wanted)
        assert torch.equal(given["row_live"].cpu() != 0, parents >= 0)


def check_level(bench: Bench, seed: int, *, width: int, batch: int = 3, above: int = 2, wide: int = 3) -> None:
    """A level's rows, and its children's tokens."""
    torch.manual_seed(seed)
    num_nodes = 2 * wide + 2
    arrays = {
        "feedback": bf16(batch * above, width),
        "draft_nodes": torch.randint(-1, 9, (batch, num_nodes), dtype=torch.int32),
        "draft_live": torch.randint(0, 2, (batch,), dtype=torch.uint8),
        "draft_lens": torch.randint(3, 1000, (batch,), dtype=torch.int32),
        "nodes": torch.randperm(num_nodes)[:wide].int(),
        "parent_rows": torch.randint(0, above, (wide,), dtype=torch.int32),
        "masks": torch.randint(-(1 << 62), 1 << 62, (wide,)),
    }
    compare_alone(bench, arrays, "gather_level", draft_level.gather_level, depth=3)
    count, ranks = num_nodes - 1, 4
    arrays = {
        "top_tokens": torch.randint(-1, 99, (batch * wide, ranks), dtype=torch.int32),
        "children": torch.randperm(num_nodes)[:count].int(),
        "child_rows": torch.randint(0, wide, (count,), dtype=torch.int32),
        "child_ranks": torch.randint(0, ranks, (count,), dtype=torch.int32),
        "draft_nodes": poisoned(batch, num_nodes),
    }
    compare_alone(bench, arrays, "assign_drafts", draft_level.assign_drafts)


def check_write(bench: Bench, seed: int, *, heads: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """A step's keys and values: dead rows, a slot that pads, places in any order."""
    torch.manual_seed(seed)
    batch, rows = 3, 4
    live = torch.randint(0, 2, (batch, rows), dtype=torch.uint8)
    live[1] = 0
    arrays = {name: torch.randn(batch * rows, heads, dim).to(dtype) for name in ("k", "v")}
    arrays |= {
        "block_table": (torch.randperm(batch * TABLE) + 1).reshape(batch, TABLE).int(),
        "slots": torch.tensor([2, -1, 0], dtype=torch.int32),
        "row_live": live,
        "write_lens": torch.randint(0, BLOCK * TABLE - rows - 2, (batch,), dtype=torch.int32),
        "offsets": torch.randperm(rows + 2)[:rows].int(),
    }
    pool = (batch * TABLE + 1, heads, BLOCK, dim)
    arrays |= {name: torch.randn(pool).to(dtype) for name in ("k_cache", "v_cache")}
    compare_alone(bench, arrays, "kv_write", kv_write)
