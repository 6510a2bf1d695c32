"""A topology is a speculation tree's nodes, levels, paths and packed masks, made from a table of choices.

It is static: a node's parent is fixed, and only its token differs between steps. `lowlat.step.decode` makes the step's
arrays from it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowlat.errors import ConfigError
from lowlat.speculators.tree.choices import MAX_DEPTH, MAX_NODES, read_choices

__all__ = ["Branch", "TreeTopology"]


@dataclass(frozen=True)
class Branch:
    """A non-leaf node and its children, by rank."""

    node: int
    children: tuple[int, ...]


@dataclass(frozen=True)
class TreeTopology:
    """A tree of T nodes, S deep; node 0, the root, is the last committed token.

    Nodes are in order of (depth, path). So parents precede children, any first k nodes form a tree, and the nodes of a
    chain are 0 to S. Masks are words whose bit i stands for node i; they are negative if bit 63 is set, as in int64.

    choices            [T - 1]   for node i + 1, the path of child ranks to it
    num_nodes                    T, root included: the rows that a slot verifies
    depth                        S
    parents            [T]       -1 for the root
    depths             [T]       0 for the root
    ranks              [T]       the node's rank among the draft's choices after its parent; -1 for the root
    levels             [S]       for level d, the non-leaf nodes of depth d, whose children are drafted there
    paths              [P][..]   nodes from the root to each leaf, in order of leaves; S + 1 at most
    leaf_mask          [T]       whether the node is a leaf
    packed_masks       [T]       bits of a node's ancestors and of itself
    max_rank_by_level  [S]       the largest rank drafted at a level; the level needs max + 1 likeliest tokens
    non_leaf_ordinal   [T]       numbers of drafted non-leaf nodes (depth >= 1), in order of nodes; -1 for others
    draft_masks        [..]      for each ordinal, the bits of its drafted ancestors' ordinals and of its own
    is_chain                     whether every level has one node, of the draft's likeliest token
    """

    choices: tuple[tuple[int, ...], ...]
    num_nodes: int
    depth: int
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    ranks: tuple[int, ...]
    levels: tuple[tuple[Branch, ...], ...]
    paths: tuple[tuple[int, ...], ...]
    leaf_mask: tuple[bool, ...]
    packed_masks: tuple[int, ...]
    max_rank_by_level: tuple[int, ...]
    non_leaf_ordinal: tuple[int, ...]
    draft_masks: tuple[int, ...]
    is_chain: bool

    @property
    def num_paths(self) -> int:
        """Leaves."""
        return len(self.paths)

    @property
    def path_width(self) -> int:
        """Nodes of the longest path, root included."""
        return self.depth + 1

    @property
    def num_choices(self) -> int:
        """The likeliest tokens after one that drafting takes, at most."""
        return 1 + max(self.max_rank_by_level, default=0)

    @property
    def num_drafted_rows(self) -> int:
        """The rows of all levels but the root's that a draft model runs over."""
        return len(self.draft_masks)

    @property
    def limits(self) -> dict[str, int]:
        """The smallest limits, by the names of options, within which the tree lies."""
        return {
            "num_speculative_tokens": self.depth,
            "max_path_len": self.depth + 1,
            "max_decoding_tokens": self.num_nodes,
            "max_non_leaves_per_layer": max((len(level) for level in self.levels), default=0),
        }

    @classmethod
    def chain(cls, num_speculative_tokens: int) -> "TreeTopology":
        """The chain of S drafts; the root alone for S = 0. Raises ConfigError past the deepest tree."""
        if not 0 <= num_speculative_tokens <= MAX_DEPTH:
            raise ConfigError(f"num_speculative_tokens must be from 0 to {MAX_DEPTH}, got {num_speculative_tokens}")
        return cls.line(num_speculative_tokens + 1)

    @classmethod
    def line(cls, rows: int) -> "TreeTopology":
        """The chain of so many nodes, up to MAX_NODES: longer than any draft model drafts, of proposals."""
        if not 1 <= rows <= MAX_NODES:
            raise ConfigError(f"a chain has from 1 to {MAX_NODES} nodes, got {rows}")
        return _build(tuple((0,) * depth for depth in range(1, rows)), tuple(range(rows - 1)))

    @classmethod
    def load(
        cls,
        source: str | Path | Sequence[Sequence[int]],
        *,
        max_path_len: int | None = None,
        max_decoding_tokens: int | None = None,
        max_non_leaves_per_layer: int | None = None,
    ) -> "TreeTopology":
        """The tree of a choices table (see `lowlat.speculators.tree.choices`), within limits; None: no limit.

        max_path_len               nodes of a path at most, root included
        max_decoding_tokens        nodes at most, root included
        max_non_leaves_per_layer   nodes with children at each depth, at most
        Raises ConfigError naming the file, the path and the rule or the limit and its knob.
        """
        tree = cls.from_choices(source)
        name = str(source) if isinstance(source, (str, Path)) else "tree"
        for knob, limit, what in (
            ("max_path_len", max_path_len, "nodes on its longest path, root included"),
            ("max_decoding_tokens", max_decoding_tokens, "nodes, root included"),
            ("max_non_leaves_per_layer", max_non_leaves_per_layer, "nodes with children at one depth"),
        ):
            found = tree.limits[knob]
            if limit is not None and found > limit:
                raise ConfigError(f"{name}: the tree has {found} {what}; the limit is {limit} ({knob})")
        return tree

    @classmethod
    def from_choices(cls, source: str | Path | Sequence[Sequence[int]]) -> "TreeTopology":
        """The tree of a choices table, within the engine's limits. Raises ConfigError as `load` does."""
        name = str(source) if isinstance(source, (str, Path)) else "tree"
        choices = tuple(sorted(read_choices(source), key=lambda path: (len(path), path)))
        nodes: dict[tuple[int, ...], int] = {(): 0}
        for path in choices:
            if path in nodes:
                raise ConfigError(f"{name}: path {list(path)} is given twice")
            if path[:-1] not in nodes:
                raise ConfigError(f"{name}: path {list(path)} lacks its parent {list(path[:-1])}")
            nodes[path] = len(nodes)
        return _build(choices, tuple(nodes[path[:-1]] for path in choices))


def _build(choices: tuple[tuple[int, ...], ...], parents_of_drafts: tuple[int, ...]) -> TreeTopology:
    parents = (-1, *parents_of_drafts)
    depths = (0, *(len(path) for path in choices))
    ranks = (-1, *(path[-1] for path in choices))
    num_nodes, depth = len(parents), max(depths)
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        children[parent].append(node)
    leaf_mask = tuple(not below for below in children)
    levels = tuple(
        tuple(
            Branch(node, tuple(children[node])) for node in range(num_nodes) if depths[node] == level and children[node]
        )
        for level in range(depth)
    )
    lines = _lines_from_root(parents)
    drafted = [node for node in range(1, num_nodes) if children[node]]
    ordinals = {node: ordinal for ordinal, node in enumerate(drafted)}
    return TreeTopology(
        choices=choices,
        num_nodes=num_nodes,
        depth=depth,
        parents=parents,
        depths=depths,
        ranks=ranks,
        levels=levels,
        paths=tuple(lines[node] for node in range(num_nodes) if leaf_mask[node]),
        leaf_mask=leaf_mask,
        packed_masks=tuple(_word(line) for line in lines),
        max_rank_by_level=tuple(max(ranks[child] for branch in level for child in branch.children) for level in levels),
        non_leaf_ordinal=tuple(ordinals.get(node, -1) for node in range(num_nodes)),
        draft_masks=tuple(_word(ordinals[above] for above in lines[node][1:]) for node in drafted),
        is_chain=num_nodes == depth + 1 and not any(ranks[1:]),
    )


def _lines_from_root(parents: tuple[int, ...]) -> list[tuple[int, ...]]:
    lines: list[tuple[int, ...]] = [(0,)]
    for node, parent in enumerate(parents[1:], start=1):
        lines.append((*lines[parent], node))
    return lines


def _word(bits: Iterable[int]) -> int:
    word = sum(1 << bit for bit in bits)
    return word - (1 << MAX_NODES) if word >> (MAX_NODES - 1) else word
