"""The kernels of a step, each a call or a run of calls to be timed, with the arguments that a step gives them.

The step is of Llama-3.1-8B's width: 4 slots at 1024 tokens with S = 3; four layers, so that what a copy reads has left
the L2 by the time it is read again. Acceptance is the real kernel's: the target's tokens are written so that slots
accept 0, 1, 2 and 3 drafts, and that is checked after the times. Some copies change state: slots are reset before each
turn, and with 20 replays none reaches its limit.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from bench.lib.case import Case
from bench.lib.model import Model
from bench.lib.step import Step
from bench.lib.weights import RandomParts
from bench.micro import Entry
from bench.micro_state import agree, buffer_bytes, copied_positions, drafts_of_slots
from lowlat.errors import LowlatError
from lowlat.executors.launcher import Launcher
from lowlat.lowering.lower import LoweredGroup
from lowlat.speculators.tree.dynamic import DynamicTree, Topology
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.tools.profile.sites import moved_bytes

__all__ = ["CASE", "NEEDED", "chain", "check_needed", "group_name", "groups_by_name", "tree"]

MODEL = Model("llama-8b", num_layers=4)
CASE = Case(4, 1024, 3)
COPIES = 8
TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0))
TREES_OWN = ("accept", "tree_masks", "draft_topk", "gather_level", "apply_commands", "finite")
DYNAMIC = DynamicTree(depth=3, top_k=4, num_nodes=10)
DYNAMICS_OWN = ("draft_topk_logprobs", "grow_tree", "choose_nodes", "hand_over_tree")
# What has to be among the entries -> the operation that does it, of a chain's step or a tree's
NEEDED = {
    "acceptance": ("", "accept"),
    "rewind of lengths": ("", "commit"),
    "packing of active slots": ("", "list_active_slots"),
    "packing of masks": ("", "tree_masks"),
    "acceptance of a tree": ("tree: ", "accept"),
    "compaction of keys and values": ("tree: ", "kv_compact"),
    "packing of a tree's masks": ("tree: ", "tree_masks"),
}
_kept: list[Step] = []  # entries know calls alone; the step owns the buffers


def check_needed(names: Iterable[str]) -> None:
    """Raise LowlatError where an entry that has to be there is not among these names, as in a step of other kernels."""
    kinds = {(_prefix(name), kind) for name in names for kind in name.removeprefix(_prefix(name)).split(" ")}
    missing = [what for what, wanted in NEEDED.items() if wanted not in kinds]
    if missing:
        raise LowlatError(f"no entry for {', '.join(missing)}: the step has no such operation")


def _prefix(name: str) -> str:
    return next((prefix for prefix in ("tree: ", "dynamic: ") if name.startswith(prefix)), "")


def chain(launcher: Launcher) -> list[Entry]:
    """Each group of a chain's step."""
    return _entries(launcher, None, "")


def tree(launcher: Launcher) -> list[Entry]:
    """The groups of a tree's step that a chain lacks or has in another size, and those of dynamic trees alone."""
    static = _entries(launcher, TreeTopology.from_choices(TREE), "tree: ", TREES_OWN)
    return static + _entries(launcher, DYNAMIC, "dynamic: ", DYNAMICS_OWN)


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


@dataclass(frozen=True)
class _Prepared:
    """A step whose groups are timed, and what their inputs are before each turn.

    drafts  that acceptance is to take of each slot
    """

    step: Step
    drafts: Sequence[int]

    @property
    def scratch(self) -> Mapping[str, torch.Tensor]:
        """The step's buffers of one bucket."""
        return self.step.executor.scratch(self.step.bucket)

    def reset(self) -> None:
        """Put slots back to the case's context, and let the target agree."""
        self.step.reset()
        agree(self.scratch, self.step.executor.state, self.drafts)

    def check(self) -> None:
        """Raise LowlatError unless the last acceptance took the drafts that the target was made to agree with."""
        torch.cuda.synchronize(self.step.executor.device)
        found, wanted = self.scratch["accepted_lens"].tolist(), [count + 1 for count in self.drafts]
        if found != wanted:
            raise LowlatError(f"acceptance took {found} tokens of the slots where {wanted} agree")


def _entries(
    launcher: Launcher, topology: Topology | None, prefix: str, own: Sequence[str] | None = None
) -> list[Entry]:
    """The entries of a step; own: of groups alone that have one of these operations."""
    shapes = MODEL.shapes(CASE, topology, simulated_acceptance=None)
    weights = RandomParts(MODEL.plan(drafts=True), MODEL.config, launcher.device)
    step = Step(shapes, CASE, weights, launcher.device, topology)
    _kept.append(step)
    torch.cuda.synchronize(launcher.device)
    prepared = _Prepared(step, drafts_of_slots(CASE.batch, CASE.num_speculative_tokens))
    found = groups_by_name(step.executor.groups(step.bucket)).items()
    wanted = ((name, same) for name, same in found if own is None or any(kind in name for kind in own))
    return [_entry(prefix + name, same, prepared) for name, same in wanted]


def _entry(name: str, groups: Sequence[LoweredGroup], prepared: _Prepared) -> Entry:
    step, lengths, first = prepared.step, [CASE.context] * CASE.batch, groups[0]
    moved = sum(moved_bytes(first, place, step.executor.state, lengths) for place in range(len(first.kernel_calls)))
    kinds = {op.kind for op in first.ops}
    accepts, rows = "accept" in kinds, step.bucket.rows
    copied = copied_positions(step.executor.state, prepared.drafts) if "kv_compact" in kinds else 0
    small = buffer_bytes(first, step.executor.program(step.bucket).buffers, CASE.batch, rows, copied)
    return Entry(
        name,
        lambda copy: groups[copy % len(groups)].kernel_calls,
        COPIES,
        moved or small,
        reset=prepared.reset if accepts else step.reset,
        check=prepared.check if accepts else None,
        conditions={
            "slots": CASE.batch, "context": CASE.context, "rows": CASE.batch * rows,
            "bytes_are": "weights, keys and values" if moved else "buffers of the operations",
            **({"accepted_drafts": list(prepared.drafts), "moved_positions": copied} if accepts else {}),
        },
    )  # fmt: skip
