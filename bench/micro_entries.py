"""The kernels of a step for `bench/test_kernels.py`, with the arguments that a step of Llama-3.1-8B's width gives them.

The step is of 4 slots at 1024 tokens with S = 3; four layers, so that what a copy reads has left the L2 by the time it
is read again. Acceptance is simulated. Some copies change state: with 20 replays no slot reaches its limit.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from bench.dense_cases import LLAMA_8B, Case, make_weights
from bench.lowlat_step import GraphStep
from bench.micro import Entry
from lowlat.executors.launcher import Launcher
from lowlat.lowering.lower import LoweredGroup
from lowlat.speculators.tree.dynamic import DynamicTree, Topology
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.tools.profile.sites import moved_bytes

__all__ = ["chain", "group_name", "groups_by_name", "reset", "tree"]

GEOMETRY = replace(LLAMA_8B, num_layers=4, capture_boundaries=(1, 2, 3))
CASE = Case(4, 1024, 3)
COPIES = 8
TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0))
TREES_OWN = ("accept", "tree_masks", "draft_topk", "gather_level", "apply_commands", "finite")
DYNAMIC = DynamicTree(depth=3, top_k=4, num_nodes=10)
DYNAMICS_OWN = ("draft_topk_logprobs", "grow_tree", "choose_nodes", "hand_over_tree")
_kept: list[GraphStep] = []  # entries know calls alone; the step owns the buffers


def chain(launcher: Launcher) -> list[Entry]:
    """Each group of a chain's step."""
    return _entries(launcher, None, "")


def tree(launcher: Launcher) -> list[Entry]:
    """The groups of a tree's step that a chain lacks or has in another size, and those of dynamic trees alone."""
    kinds = ((TreeTopology.from_choices(TREE), "tree: ", TREES_OWN), (DYNAMIC, "dynamic: ", DYNAMICS_OWN))
    return [
        entry
        for topology, prefix, own in kinds
        for entry in _entries(launcher, topology, prefix)
        if any(kind in entry.name for kind in own)
    ]


def reset() -> None:
    """Put the slots of all steps back to the case's context, which some kernels advance."""
    for step in _kept:
        step.reset()


def group_name(group: LoweredGroup) -> str:
    """A group's operations, each once, and the weights that they read, whichever layer's they are."""
    kinds = " + ".join(dict.fromkeys(op.kind for op in group.ops))
    weights = dict.fromkeys(_without_layer(name) for op in group.ops for name in op.weights.values())
    matrices = [name for name in weights if "norm" not in name]
    return f"{kinds} ({', '.join(matrices)})" if matrices else kinds


def _without_layer(weight: str) -> str:
    parts = weight.removesuffix(".weight").split(".")
    return ".".join(part for part in parts if part != "layers" and not part.isdigit())


def groups_by_name(groups: Iterable[LoweredGroup]) -> dict[str, list[LoweredGroup]]:
    """Groups by name; one name's have the same operations and kernels, in all layers, and differ in what they read.

    Where other kernels run the same operations, a number follows the name.
    """
    found: dict[str, dict[tuple[str, ...], list[LoweredGroup]]] = {}
    for group in groups:
        kernels = tuple(call.kernel.name for call in group.kernel_calls)
        if kernels:
            found.setdefault(group_name(group), {}).setdefault(kernels, []).append(group)
    return {
        name + (f" #{number}" if number > 1 else ""): same
        for name, kinds in found.items()
        for number, same in enumerate(kinds.values(), start=1)
    }


def _entries(launcher: Launcher, topology: Topology | None, prefix: str) -> list[Entry]:
    step = GraphStep(GEOMETRY, CASE, make_weights(GEOMETRY, launcher.device), launcher.device, topology)
    _kept.append(step)
    torch.cuda.synchronize(launcher.device)
    found = groups_by_name(step.executor.groups(step.bucket)).items()
    return [_entry(prefix + name, same, step.executor.state) for name, same in found]


def _entry(name: str, groups: Sequence[LoweredGroup], state: Mapping[str, torch.Tensor]) -> Entry:
    lengths = [CASE.context] * CASE.batch
    first = groups[0]
    moved = sum(moved_bytes(first, place, state, lengths) for place in range(len(first.kernel_calls)))
    return Entry(name, lambda copy: groups[copy % len(groups)].kernel_calls, COPIES, moved)
