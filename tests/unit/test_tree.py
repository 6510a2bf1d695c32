"""Speculation trees: files, limits, and every derived table against a naive recomputation."""

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowlat.errors import ConfigError
from lowlat.speculators.tree.planner import what_if
from lowlat.speculators.tree.topology import Branch, TreeTopology

CHOICES = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


def test_a_small_tree_by_hand() -> None:
    tree = TreeTopology.load(CHOICES)
    assert (tree.num_nodes, tree.depth, tree.is_chain) == (7, 3, False)
    assert tree.choices == ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
    assert tree.parents == (-1, 0, 0, 1, 1, 2, 3)
    assert tree.depths == (0, 1, 1, 2, 2, 2, 3)
    assert tree.ranks == (-1, 0, 1, 0, 1, 0, 0)
    assert tree.levels == ((Branch(0, (1, 2)),), (Branch(1, (3, 4)), Branch(2, (5,))), (Branch(3, (6,)),))
    assert tree.paths == ((0, 1, 4), (0, 2, 5), (0, 1, 3, 6))
    assert tree.leaf_mask == (False, False, False, False, True, True, True)
    assert tree.packed_masks == (0b1, 0b11, 0b101, 0b1011, 0b10011, 0b100101, 0b1001011)
    assert tree.max_rank_by_level == (1, 1, 0)
    assert tree.non_leaf_ordinal == (-1, 0, 1, 2, -1, -1, -1)
    assert tree.draft_masks == (0b001, 0b010, 0b101)


@pytest.mark.parametrize("depth", range(8))
def test_a_chain_is_numbered_in_order(depth: int) -> None:
    tree = TreeTopology.chain(depth)
    assert tree.is_chain and tree.depth == depth and tree.num_nodes == depth + 1
    assert tree.paths == (tuple(range(depth + 1)),)
    assert tree.parents == tuple(range(-1, depth))
    assert tree.packed_masks == tuple((1 << (node + 1)) - 1 for node in range(depth + 1))
    assert tree.levels == tuple((Branch(level, (level + 1,)),) for level in range(depth))
    assert tree.draft_masks == tuple((1 << (ordinal + 1)) - 1 for ordinal in range(max(0, depth - 1)))


def test_the_largest_tree_packs_into_signed_words() -> None:
    choices = [[a] for a in range(16)] + [[a, b] for a in range(16) for b in range(3)][:47]
    tree = TreeTopology.load(choices, max_decoding_tokens=64)
    assert tree.num_nodes == 64
    assert tree.packed_masks[63] < 0
    assert tree.packed_masks[63] % (1 << 64) == 1 << 63 | 1 << tree.parents[63] | 1


@st.composite
def trees(draw: st.DrawFn) -> list[list[int]]:
    known: list[tuple[int, ...]] = [()]
    for _ in range(draw(st.integers(0, 63))):
        parent = draw(st.sampled_from([path for path in known if len(path) < 7]))
        path = (*parent, draw(st.integers(0, 15)))
        if path not in known:
            known.append(path)
    return [list(path) for path in draw(st.permutations(known[1:]))]


@given(trees())
def test_every_table_agrees_with_a_naive_recomputation(choices: list[list[int]]) -> None:
    tree = TreeTopology.load(choices)
    paths: list[tuple[int, ...]] = [tuple(path) for path in choices]
    nodes: list[tuple[int, ...]] = [(), *sorted(paths, key=lambda path: (len(path), path))]
    assert tree.num_nodes == len(nodes) and tree.choices == tuple(nodes[1:])
    assert tree.depth == max(len(path) for path in nodes)
    lines = [[nodes.index(path[:k]) for k in range(len(path) + 1)] for path in nodes]
    non_leaves = [n for n, path in enumerate(nodes) if any(other[:-1] == path for other in nodes[1:])]
    assert tree.parents == tuple(line[-2] if len(line) > 1 else -1 for line in lines)
    assert tree.depths == tuple(len(path) for path in nodes)
    assert tree.ranks == tuple(path[-1] if path else -1 for path in nodes)
    assert tree.leaf_mask == tuple(n not in non_leaves for n in range(len(nodes)))
    assert [list(path) for path in tree.paths] == [lines[n] for n in range(len(nodes)) if n not in non_leaves]
    assert [mask % (1 << 64) for mask in tree.packed_masks] == [sum(1 << n for n in line) for line in lines]
    for parent, node in zip(tree.parents[1:], range(1, len(nodes)), strict=True):
        assert parent < node  # any prefix of the nodes is a tree
    assert len(tree.levels) == len(tree.max_rank_by_level) == tree.depth
    for level, branches in enumerate(tree.levels):
        assert [branch.node for branch in branches] == [n for n in non_leaves if len(nodes[n]) == level]
        drafted = [child for branch in branches for child in branch.children]
        assert drafted == [n for n, path in enumerate(nodes) if len(path) == level + 1]
        assert all(tree.parents[child] == branch.node for branch in branches for child in branch.children)
        assert tree.max_rank_by_level[level] == max(nodes[child][-1] for child in drafted)
    drafting = [n for n in non_leaves if n]
    assert [n for n in range(len(nodes)) if tree.non_leaf_ordinal[n] >= 0] == drafting
    assert [tree.non_leaf_ordinal[n] for n in drafting] == list(range(len(drafting)))
    assert list(tree.draft_masks) == [sum(1 << drafting.index(a) for a in lines[n][1:]) for n in drafting]
    assert tree.is_chain == (choices == [] or sorted(choices) == [[0] * (k + 1) for k in range(len(choices))])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tree.yaml", "choices: [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]\n"),
        ("bare.YML", "- [0]\n- [1]\n- [0, 0]\n- [0, 1]\n- [1, 0]\n- [0, 0, 0]\n"),
        ("tree.toml", "choices = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]\n"),
        ("tree.json", json.dumps({"choices": CHOICES})),
        ("bare.json", json.dumps(CHOICES)),
    ],
)
def test_all_file_forms_give_the_same_tree(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    assert TreeTopology.load(file) == TreeTopology.load(str(file)) == TreeTopology.load(CHOICES)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([[0], [0]], r"path \[0\] is given twice"),
        ([[0, 0]], r"path \[0, 0\] lacks its parent \[0\]"),
        ([[]], r"choices\[0\] is empty"),
        ([[16]], r"choices\[0\]: ranks must be from 0 to 15, got 16"),
        ([[0], [-1]], r"choices\[1\]: ranks must be from 0 to 15, got -1"),
        ([[10**5000]], "more than 63 bits"),
        ([[True]], "must hold integers, got bool"),
        (["0"], "must be a list of child ranks, got str"),
        ({"choices": []}, "must be a list of paths, got dict"),
        ([[0] * (k + 1) for k in range(8)], "8 deep; a tree is at most 7 deep"),
        ([[a, b] for a in range(16) for b in range(4)], "64 choices and the root exceed the 64 nodes"),
    ],
)
def test_bad_choices_are_refused_by_path_and_rule(choices: Sequence[Sequence[int]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TreeTopology.load(choices)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_path_len": 3}, r"4 nodes on its longest path.*limit is 3 \(max_path_len\)"),
        ({"max_decoding_tokens": 6}, r"7 nodes.*limit is 6 \(max_decoding_tokens\)"),
        ({"max_non_leaves_per_layer": 1}, r"2 nodes with children.*limit is 1 \(max_non_leaves_per_layer\)"),
    ],
)
def test_limits_name_their_knob(limits: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TreeTopology.load(CHOICES, **limits)
    assert TreeTopology.load(CHOICES, **{knob: limit + 1 for knob, limit in limits.items()}).num_nodes == 7


def test_chains_have_a_limit() -> None:
    for depth in (-1, 8):
        with pytest.raises(ConfigError, match="num_speculative_tokens must be from 0 to 7"):
            TreeTopology.chain(depth)


BOMB = "a: &a [0]\n" + "".join(f"b{k}: &b{k} [{', '.join([f'*b{k - 1}' if k else '*a'] * 9)}]\n" for k in range(30))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("tree.txt", b"[]", "must end in"),
        ("tree.yaml", BOMB.encode(), "aliases are not allowed"),
        ("tree.yaml", b"[" * 60_000, "nested deeper"),
        ("tree.yaml", b"- [0]\n" * 2000, "more than 1024 values"),
        ("tree.yaml", b"#" * 65_537, "larger than 65536 bytes"),
        ("tree.yaml", b"!!python/object/apply:os.getcwd []", "not valid YAML"),
        ("tree.yaml", b"choices: [[0]", "not valid YAML"),
        ("tree.yaml", b"\xff\xfe\xff", "not valid YAML"),
        ("tree.yaml", b"", "must be a list of paths, got NoneType"),
        ("tree.yaml", b"choices: [[2001-99-99]]", "not valid YAML"),
        ("tree.yaml", b"choice: [[0]]", "the one key 'choices', found 'choice'"),
        ("tree.json", b"[" * 60_000, "not valid JSON"),
        ("tree.json", b"[[" + b"1" * 5000 + b"]]", "not valid JSON"),
        ("tree.json", b'{"choices": [], "choices": [[0]]}', "given twice"),
        ("tree.json", b"[[NaN]]", "must hold integers, got float"),
        ("tree.json", b"{}", "found none"),
        ("tree.toml", b"choices = " + b"[" * 60_000, "not valid TOML"),
    ],
)
def test_hostile_files_are_refused_by_name(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    file = tmp_path / name
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=message) as caught:
        TreeTopology.load(file)
    assert str(file) in str(caught.value) and len(str(caught.value)) < 400


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    for name, problem in (("missing.yaml", "no such file"), ("folder.yaml", "is not a regular file")):
        with pytest.raises(ConfigError, match=problem):
            TreeTopology.load(tmp_path / name)


def expected_length(table: list[list[float]], choices: Iterable[Sequence[int]]) -> float:
    """By what acceptance means: every outcome of every level, walked."""
    return 1.0 + sum(math.prod(table[d][rank] for d, rank in enumerate(path)) for path in choices)


@given(
    table=st.lists(st.lists(st.floats(0.01, 0.3), min_size=1, max_size=3), min_size=1, max_size=3),
    budget=st.integers(1, 6),
)
def test_what_if_finds_the_best_tree(table: list[list[float]], budget: int) -> None:
    plan = what_if(table, [budget]).recommended
    tree = TreeTopology.load(
        plan.choices,
        max_path_len=plan.max_path_len,
        max_decoding_tokens=min(budget, plan.max_decoding_tokens),
        max_non_leaves_per_layer=plan.max_non_leaves_per_layer,
    )
    assert (tree.depth + 1, tree.num_nodes) == (plan.max_path_len, plan.max_decoding_tokens)
    assert plan.mean_acceptance_length == pytest.approx(expected_length(table, plan.choices))
    paths = [
        path
        for depth in range(1, len(table) + 1)
        for path in itertools.product(*(range(len(row)) for row in table[:depth]))
    ]
    size = min(budget - 1, len(paths))
    best = 1.0
    for chosen in _closed_sets(paths, size):
        best = max(best, expected_length(table, chosen))
    assert plan.mean_acceptance_length == pytest.approx(best)
    assert plan.mean_acceptance_length >= plan.chain_acceptance_length - 1e-12


def _closed_sets(paths: list[tuple[int, ...]], size: int) -> set[frozenset[tuple[int, ...]]]:
    """Every set of `size` paths that holds the parents of its members."""
    sets = {frozenset[tuple[int, ...]]()}
    for _ in range(size):
        sets = {
            chosen | {path}
            for chosen in sets
            for path in paths
            if path not in chosen and (len(path) == 1 or path[:-1] in chosen)
        }
    return sets


def test_what_if_recommends_by_time_where_it_is_known() -> None:
    table = [[0.7, 0.1], [0.6, 0.1], [0.5, 0.1]]
    answer = what_if(table, [1, 4, 16], step_times_s=[1.0, 1.1, 4.0])
    assert [plan.budget for plan in answer.plans] == [1, 4, 16]
    assert answer.recommended.budget == 4
    assert answer.recommended.choices == ((0,), (0, 0), (0, 0, 0))
    assert answer.recommended.tokens_per_s == pytest.approx((1 + 0.7 + 0.42 + 0.21) / 1.1)
    assert answer.recommended.chain_acceptance_length == answer.recommended.mean_acceptance_length
    without = what_if([[0.5]], [64, 2, 1])
    assert without.recommended.budget in (64, 2) and without.recommended.max_decoding_tokens == 2
    assert without.plans[2].choices == () and without.plans[2].tokens_per_s is None


def test_what_if_with_nothing_measured_is_the_baseline() -> None:
    plan = what_if([], [8]).recommended
    assert (plan.choices, plan.max_path_len, plan.max_decoding_tokens) == ((), 1, 1)
    assert plan.mean_acceptance_length == plan.chain_acceptance_length == 1.0
    assert what_if([[0.0, 0.4], [0.5]], [3]).recommended.choices == ((1,), (1, 0))


@pytest.mark.parametrize(
    ("table", "budgets", "times", "message"),
    [
        ([[0.7, 0.4]], [2], None, "adds up to 1.1"),
        ([[1.5]], [2], None, "must hold probabilities"),
        ([[math.nan]], [2], None, "must hold probabilities"),
        ([[0.1]] * 8, [2], None, "at most 7 deep"),
        ([[0.01] * 17], [2], None, "at most 16"),
        ([[0.5]], [], None, "at least one budget"),
        ([[0.5]], [65], None, "from 1 to 64, got 65"),
        ([[0.5]], [0], None, "from 1 to 64, got 0"),
        ([[0.5]], [2], [0.0], "positive time"),
        ([[0.5]], [2], [1.0, 1.0], "each of the 1 budgets"),
    ],
)
def test_what_if_refuses_what_is_no_acceptance(
    table: list[list[float]], budgets: list[int], times: list[float] | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        what_if(table, budgets, step_times_s=times)
