"""Dynamic trees for tests: a draft model of random logits, what EAGLE-2 makes of it, and the cases of kernels."""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from kernel_cases import Arrays, Bench, poisoned, unwritten
from selection_cases import Memory

from lowlat.kernels.reference import OPERATIONS
from lowlat.kernels.reference.speculation.grow import first_entry
from lowlat.kernels.toolchain.kernel import KernelCall

Calls = Callable[..., Sequence[KernelCall]]
Path = tuple[int, ...]


@cache
def logits_after(path: Path, vocabulary: int, seed: int) -> torch.Tensor:
    """A draft model's logits after a path of tokens."""
    return torch.randn(vocabulary, generator=torch.Generator().manual_seed(hash((path, seed)) % (1 << 62))) * 3


def best_paths(logits: Callable[[Path], torch.Tensor], top_k: int, depth: int, count: int) -> dict[Path, float]:
    """EAGLE-2 in plain words: expand the K likeliest leaves by their K likeliest tokens, then rank all; best first."""
    frontier: dict[Path, float] = {(): 0.0}
    known = dict[Path, float]()
    for _ in range(depth):
        children = dict[Path, float]()
        for path, score in frontier.items():
            values, tokens = torch.log_softmax(logits(path).double(), 0).topk(top_k)
            children |= {(*path, token): score + value for token, value in zip(tokens.tolist(), values.tolist())}  # noqa: B905
        known |= children
        frontier = dict(sorted(children.items(), key=lambda item: -item[1])[:top_k])
    return dict(sorted(known.items(), key=lambda item: -item[1])[:count])


def paths_of(nodes: Sequence[int], parents: Sequence[int]) -> list[Path]:
    """The tokens from the root to each node; missing nodes have none."""
    paths: list[Path] = [()]
    for node, parent in zip(nodes[1:], parents[1:], strict=True):
        if node >= 0:
            paths.append((*paths[parent], node))
    return paths[1:]


def written(kind: str, given: Arrays, **params: Any) -> Arrays:
    """All that an operation is given, with what it writes, by its reference."""
    outs = unwritten(kind, given)
    OPERATIONS[kind](**given, **outs, **params)
    return outs


def grown(logits: Callable[[Path], torch.Tensor], top_k: int, depth: int, count: int) -> Arrays:
    """Nodes and parents of one slot by the operations; a row's path is fed back, so that what follows is its own."""
    vocabulary = logits(()).shape[0]
    names, size = torch.arange(vocabulary, dtype=torch.int32), (1, first_entry(depth + 1, top_k))
    tree = {"tree_tokens": poisoned(*size), "tree_scores": poisoned(*size, dtype=torch.float32)}
    tree["tree_parents"] = poisoned(*size)
    above = {"row_scores": torch.zeros(1, 1), "row_entries": torch.full((1, 1), -1, dtype=torch.int32)}
    masks, paths = torch.zeros(1, 1, dtype=torch.int64), [()]
    for level in range(1, depth + 1):
        rows = torch.stack([logits(path) for path in paths])
        ranked = {"top_tokens": poisoned(len(paths), top_k), "top_logprobs": torch.zeros(len(paths), top_k)}
        OPERATIONS["draft_topk_logprobs"](rows, names, **ranked, k=top_k)
        if level < depth:
            feedback = torch.zeros(len(paths), depth)
            for row, path in enumerate(paths):
                feedback[row, : len(path)] = torch.tensor(path)
            given = {**ranked, **above, "row_masks": masks, "feedback": feedback, **tree}
            outs = written("grow_tree", {**given, "draft_lens": torch.tensor([9], dtype=torch.int32)}, depth=level)
            fed, tokens = outs["hidden"].int().tolist(), outs["tokens"][0].tolist()
            paths = [(*path[: level - 1], token) for path, token in zip(fed, tokens, strict=True)]
            assert outs["positions"].tolist() == [[7 + level] * top_k]
            masks, above = outs["next_masks"], {f"row_{part}": outs[f"next_{part}"] for part in ("scores", "entries")}
            lines = [[bit for bit in range(64) if mask >> bit & 1] for mask in masks[0].tolist()]
            assert [line[-1] for line in lines] == [(level - 1) * top_k + row for row in range(top_k)]
            assert all(len(line) == level for line in lines)
    outs = {"draft_nodes": poisoned(1, count + 1), "draft_parents": poisoned(1, count + 1)}
    OPERATIONS["choose_nodes"](**ranked, **above, **tree, **outs)
    return outs


def _ranked(rows: int, top_k: int) -> Arrays:
    """Lists of a level, with many equal scores, and rows that drafted nothing."""
    tokens = torch.randint(0, 500, (rows, top_k), dtype=torch.int32)
    tokens[torch.rand(rows) < 0.2] = -1
    scores = -torch.randint(0, 4, (rows, top_k)).float().sort(1).values
    return {"top_tokens": tokens, "top_logprobs": torch.where(tokens >= 0, scores, 0)}


def check_growth(bench: Bench, seed: int, make: Mapping[str, Calls]) -> None:
    """A tree of some slots, level by level, with ties and drafts that are none; and its nodes handed over."""
    source = random.Random(seed)
    torch.manual_seed(seed)
    batch, top_k, depth = 3, source.randint(2, 5), source.randint(2, 4)
    size = (batch, first_entry(depth + 1, top_k))
    tree = {"tree_tokens": poisoned(*size), "tree_parents": poisoned(*size)}
    tree["tree_scores"] = poisoned(*size, dtype=torch.float32)
    above = {"row_scores": torch.zeros(batch, 1), "row_entries": torch.full((batch, 1), -1, dtype=torch.int32)}
    above["row_masks"] = torch.zeros(batch, 1, dtype=torch.int64)

    def compare(kind: str, given: Arrays, **params: Any) -> Arrays:
        reference = partial(_called, OPERATIONS[kind], params)
        return bench.compare({**given, **unwritten(kind, given)}, reference, partial(_called, make[kind], params))

    for level in range(1, depth):
        ranked = _ranked(above["row_scores"].numel(), top_k)
        feedback = torch.randn(ranked["top_tokens"].shape[0], 16).bfloat16()
        given = {**ranked, **above, "feedback": feedback, **tree}
        outs = compare("grow_tree", {**given, "draft_lens": torch.tensor([9, 1, 7], dtype=torch.int32)}, depth=level)
        tree = {name: outs[name] for name in tree}
        above = {f"row_{part}": outs[f"next_{part}"] for part in ("scores", "entries", "masks")}
    del above["row_masks"]
    nodes = dict.fromkeys(("draft_nodes", "draft_parents"), poisoned(batch, source.randint(depth, size[1]) + 1))
    outs = compare("choose_nodes", {**_ranked(above["row_scores"].numel(), top_k), **above, **tree, **nodes})
    kept = {name: outs[name][:, :32].contiguous() for name in nodes}
    block = compare("grow_block_tree", {**_ranked(batch * (depth + 1), top_k), **nodes}, first_row=seed % 2)
    for each in (kept, {name: block[name][:, :32].contiguous() for name in nodes}):
        _check_hand_over(compare, each)


def _check_hand_over(compare: Callable[..., Arrays], nodes: Arrays) -> None:
    """Nodes of two slots, and of one that is done, into state of longer rows."""
    state = {"drafts": poisoned(4, 33), "num_drafts": poisoned(4), "tree_paths": poisoned(4, 32, 6)}
    state["tree_masks"] = poisoned(4, 33, dtype=torch.int64)
    slots = {"slots": torch.tensor([3, 0, 1], dtype=torch.int32), "draft_live": torch.tensor([1, 1, 0]).byte()}
    found = compare("hand_over_tree", {**nodes, **slots, **state})
    for index, slot in enumerate((3, 0)):
        paths = [(), *paths_of(*(nodes[name][index].tolist() for name in ("draft_nodes", "draft_parents")))]
        count = int(found["num_drafts"][slot]) + 1
        assert count == len(paths)
        for node, (path, mask) in enumerate(zip(paths, found["tree_masks"][slot].tolist(), strict=False)):
            line = [place for place in range(count) if mask >> place & 1]
            assert line[-1] == node
            assert [int(found["drafts"][slot, place]) for place in line[1:]] == list(path)
        lines = [[node for node in path if node >= 0] for path in found["tree_paths"][slot].tolist()]
        ends = [line[-1] for line in lines if line]
        parents = nodes["draft_parents"][index, :count].tolist()
        assert ends == [node for node in range(count) if node not in parents]
        assert all(parents[below] == node for line in lines for node, below in pairwise(line))


def check_scores(bench: Bench, width: int, k: int, make: Calls) -> None:
    """Tokens exactly, and logarithmic probabilities nearly, of plain, tied, dead and broken rows."""
    torch.manual_seed(width)
    logits, names = torch.randn(5, width) * 4, torch.randperm(width).int()
    logits[1] = logits[1].round() + 0.0
    logits[2, width // 3] = torch.nan
    live = torch.tensor([1, 1, 1, 1, 0], dtype=torch.uint8)
    expected = {"top_tokens": poisoned(5, k), "top_logprobs": poisoned(5, k, dtype=torch.float32)}
    OPERATIONS["draft_topk_logprobs"](logits, names, live, **expected, k=k)
    found = {name: bench.place(name, poisoned(5, k, dtype=array.dtype)) for name, array in expected.items()}
    memory = Memory(bench.device.type)
    arrays = {"logits": logits, "draft_to_target": names, "row_live": live}
    given = {name: bench.place(name, each) for name, each in arrays.items()}
    bench.run(*make(**given, **found, k=k, workspace=memory))
    assert memory.at_rest()
    assert torch.equal(found["top_tokens"].cpu(), expected["top_tokens"])
    torch.testing.assert_close(found["top_logprobs"].cpu(), expected["top_logprobs"], rtol=0, atol=2e-5)
    assert expected["top_tokens"][[2, 4]].eq(-1).all() and expected["top_tokens"][[0, 1, 3]].ge(0).all()
    assert float(found["top_logprobs"].max()) <= 0


def _called(function: Callable[..., Any], params: Mapping[str, Any], arrays: Arrays) -> Any:
    return function(**arrays, **params)
