"""One chunk of prefill by its launches on a GPU next to the reference: whole programs of small models."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lowered import Pair
from quantised_layers import quantise_target
from tiny_models import make_pair, make_target, mxfp4_target

from lowlat.executors.allocation import STATE_ROLES, pinned_names
from lowlat.executors.launcher import Launcher
from lowlat.executors.prefill_arguments import ChunkArguments
from lowlat.executors.reference import bind
from lowlat.executors.workspace import SharedWorkspace
from lowlat.graphs import BufferSet, Paging, Role
from lowlat.graphs.launch import Launch
from lowlat.graphs.program import Program
from lowlat.lowering.binding import Binding
from lowlat.lowering.lower import lower
from lowlat.models.activations import code_activations
from lowlat.step.prefill import build_prefill

NAMES = ("llama", "llama_rows", "gpt_oss", "mxfp4")
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64}
CODED_SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}


def make_named(name: str, directory: Path) -> Pair:
    """A pair, or a target alone: "mxfp4", of whose experts each row chooses four of nine, and "llama_rows"."""
    if name == "mxfp4":
        mxfp4_target(directory, gain=0.45, num_local_experts=9, num_experts_per_tok=4, **SIZES)
        return Pair(directory)
    if name == "llama_rows":
        return coded_pair(directory)
    made = make_pair(directory, name, **SIZES)
    return Pair(made.target, made.head)


def fp8_target(directory: Path, layout: str = "fp8-channel", **sizes: Any) -> Path:
    """A target in FP8, of sizes that prompts' codes are multiplied by."""
    make_target(directory, "llama", num_hidden_layers=2, **{**CODED_SIZES, **sizes})
    quantise_target(directory, layout, None)
    return directory


def coded_pair(directory: Path, *, fuse: bool = True, **sizes: Any) -> Pair:
    """Such a target alone, its prompts' rows coded, in chunks of 64."""
    made = Pair(fp8_target(directory, **sizes), fuse=fuse)
    made.target = replace(made.target, config=code_activations(made.target.config, "a test"))
    made.geometry = replace(made.geometry, prefill_chunk=64)
    return made


def _fill(buffers: Any, vocab_size: int, live: int) -> None:
    size = buffers["prefill_tokens"].shape[0]
    buffers["prefill_tokens"].copy_(torch.arange(size) * 7 % vocab_size)
    for name in buffers:
        if name.startswith("prefill_table"):
            buffers[name][0] = torch.arange(1, buffers[name].shape[1] + 1)
    buffers["prefill_chunk"].copy_(torch.tensor([0, live]))
    buffers["prefill_live"].copy_(torch.arange(size) < live)
    buffers["prefill_draft_live"].copy_((torch.arange(size) > 0) & (torch.arange(size) < live))
    buffers["prefill_positions"].copy_(torch.arange(size))
    buffers["prefill_draft_positions"].copy_((torch.arange(size) - 1).clamp(min=0))
    buffers["prefill_slot"].fill_(1)
    buffers["prefill_count"].fill_(live)


@dataclass
class Prefill:
    """A pair's prefill on a GPU, its arguments, and its buffers as the host sees them."""

    launcher: Launcher
    launches: list[Launch]
    arguments: ChunkArguments
    buffers: BufferSet
    held: list[Any]  # what the launches point into

    def run(self) -> None:
        """Issue everything on torch's current stream."""
        self.launcher.issue(self.launches)


def make_prefill(pair: Pair, program: Program, launcher: Launcher) -> Prefill:
    """Lower a prefill program over buffers of its own."""
    device = launcher.device
    specs = list(program.specs(*STATE_ROLES, Role.SCRATCH, Role.CONSTANT))
    constants = {name: content.to(device) for name, content in program.constants.items()}
    arguments = ChunkArguments([program], device)
    buffers = BufferSet(specs, device, constants, pinned=pinned_names(specs), given=arguments.host)
    weights, workspace = pair.weights_on(device), SharedWorkspace(device)
    groups = lower(Binding(program, {**buffers, **arguments.device}, weights, launcher.gpu, workspace))
    launches = launcher.load(call for group in groups for call in group.calls)
    return Prefill(launcher, launches, arguments, buffers, [weights, workspace, groups])


def chunk_differences(pair: Pair, launcher: Launcher, *, live: int | None = None) -> dict[str, torch.Tensor]:
    """The differences that a first chunk leaves in caches and features to the reference on the CPU: of each position
    the difference's norm over the typical norm of a position, by buffer.

    live   rows from the first on; None: all
    """
    program = build_prefill(pair.geometry)
    prefill = make_prefill(pair, program, launcher)
    found = prefill.buffers
    expected = BufferSet(found.specs.values(), torch.device("cpu"), program.constants)
    for buffers in (found, expected):
        _fill(buffers, pair.target.config.vocab_size, pair.geometry.prefill_chunk if live is None else live)
    prefill.arguments.send()
    prefill.run()
    with torch.inference_mode():
        for _, function, arguments in bind(program, expected, pair.source):
            function(**arguments)
    differences = {}
    for name in found:
        paging = program.buffers[name].paging
        if paging is not None:
            ours, theirs = (_positions(paging, buffers[name]) for buffers in (found, expected))
            size = theirs.norm(dim=-1)
            if not bool((size > 0).any()):
                assert live is not None, f"the reference wrote nothing to {name}"
                assert not bool(ours.any()), name
                continue
            differences[name] = (ours - theirs).norm(dim=-1) / size[size > 0].median()
    return differences


def _positions(paging: Paging, tensor: torch.Tensor) -> torch.Tensor:
    """[positions, values]: caches are [P, G, block, D], features [P, ..]."""
    plain = tensor.double().cpu()
    return plain.transpose(1, 2).flatten(0, 1).flatten(1) if paging is Paging.POSITIONS else plain.flatten(1)
