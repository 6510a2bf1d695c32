"""The small kernels of a step for `bench.micro`, with the arguments that a step of Llama-3.1-8B's width gives them.

    python -m bench.micro --entries bench.micro_entries:chain --entries bench.micro_entries:tree --replays 20

The step is of 4 slots at 1024 tokens with S = 3; four layers, since the kernels timed here see one layer at a time.
Acceptance is simulated. Some copies change state: with 20 replays no slot reaches its limit.
"""

from dataclasses import replace

import torch

from bench.dense_cases import LLAMA_8B, Case, make_weights
from bench.lowlat_step import GraphStep
from bench.micro import Entry
from lowlat.executors.launcher import Launcher
from lowlat.executors.lowering.lower import LoweredGroup
from lowlat.speculators.tree.topology import TreeTopology

__all__ = ["chain", "tree"]

GEOMETRY = replace(LLAMA_8B, num_layers=4, capture_boundaries=(1, 2, 3))
LARGE = ("linear", "attention")  # those are bound by the memory: the dense benchmark times them
COPIES = 8
TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0))
_kept: list[GraphStep] = []  # entries know calls alone; the step owns the buffers


def chain(launcher: Launcher) -> list[Entry]:
    """Each small group of a chain's step."""
    return _entries(launcher, None, "")


def tree(launcher: Launcher) -> list[Entry]:
    """Those groups of a tree's step that a chain has not, or has of another size."""
    kinds = ("accept", "tree_masks", "draft_topk", "gather_level", "apply_commands", "finite")
    topology = TreeTopology.from_choices(TREE)
    return [entry for entry in _entries(launcher, topology, "tree: ") if any(kind in entry.name for kind in kinds)]


def _entries(launcher: Launcher, topology: TreeTopology | None, prefix: str) -> list[Entry]:
    weights = make_weights(GEOMETRY, launcher.device)
    step = GraphStep(GEOMETRY, Case(4, 1024, 3), weights, launcher.device, topology)
    _kept.append(step)
    groups: dict[str, LoweredGroup] = {}
    for group in step.executor.groups(step.bucket):
        if not any(op.kind in LARGE for op in group.ops):
            groups.setdefault(" + ".join(dict.fromkeys(op.kind for op in group.ops)), group)
    torch.cuda.synchronize(launcher.device)
    return [
        Entry(prefix + name, lambda _, calls=group.calls: calls, COPIES)  # type: ignore[misc]
        for name, group in groups.items()
    ]
