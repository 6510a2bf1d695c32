"""Random rows for what is gathered, moved and laid out around the head."""

import random

import torch
from kernel_cases import Arrays, Bench, poisoned, random_topology

from lowlat.kernels import reference
from lowlat.kernels.attention.kv_compact import kv_compact
from lowlat.kernels.rows import draft_rows as draft_rows
from lowlat.kernels.toolchain.kernel import KernelCall

__all__ = ["check_boundary", "check_compaction", "check_features", "check_last"]

BLOCK, TABLE = 4, 9


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def check_compaction(bench: Bench, seed: int, *, layers: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """All layers' rows of a random tree move."""
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

    bench.compare(arrays, reference_, calls)


KEPT: list[Arrays] = []  # workspaces live as long as their calls


def check_features(bench: Bench, seed: int, *, width: int, num_sources: int) -> None:
    """Features of accepted rows."""
    torch.manual_seed(seed)
    batch, rows = 3, 5
    arrays = {f"source{number}": bf16(batch * rows, width) for number in range(num_sources)}
    arrays["accepted_nodes"] = torch.randint(-1, rows, (batch, rows), dtype=torch.int32)
    arrays["out"] = poisoned(batch * rows, num_sources * width, dtype=torch.bfloat16)
    operation = reference.OPERATIONS["gather_features"]
    bench.compare(arrays, lambda found: operation(**found), lambda found: draft_rows.gather_features(**found))


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
    operation = reference.OPERATIONS["store_boundary"]
    bench.compare(
        arrays,
        lambda found: operation(**found, block_size=BLOCK),
        lambda found: draft_rows.store_boundary(**found, block_size=BLOCK),
    )
