"""This module lowers programs to kernel calls on CPU tensors; it compiles, launches and captures nothing."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowlat.engine.loading.geometry import make_geometry
from lowlat.engine.loading.speculation import make_topologies
from lowlat.executors import kernel_executor
from lowlat.executors.allocation import STATE_ROLES
from lowlat.executors.workspace import SharedWorkspace
from lowlat.graphs import Bucket, BufferSet, Role
from lowlat.graphs.program import Program
from lowlat.kernels.toolchain.kernel import H200, Gpu, KernelCall
from lowlat.lowering.binding import Binding, sum_in_parts
from lowlat.lowering.device_weights import DeviceWeights
from lowlat.lowering.lower import LoweredGroup, lower, weight_layouts
from lowlat.lowering.memory import lowered_needs
from lowlat.lowering.weight_parts import expert_parts, packed_weights
from lowlat.models.target import LoadedTarget, coded, load_target, open_target
from lowlat.options.runtime import RuntimeConfig
from lowlat.options.speculative import SpeculativeConfig
from lowlat.speculators.base import LoadedSpeculator
from lowlat.speculators.methods import draft_method, load_speculator
from lowlat.speculators.tree.dynamic import Topology
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.decode import build_step
from lowlat.step.prefill import build_prefill
from lowlat.step.variants import first_token_bucket

CPU = torch.device("cpu")


@dataclass
class Lowered:
    """A lowered program, with its memory and its fused groups."""

    program: Program
    buffers: Mapping[str, torch.Tensor]
    weights: DeviceWeights
    workspace: SharedWorkspace
    groups: tuple[LoweredGroup, ...]

    @property
    def calls(self) -> list[KernelCall]:
        """All launches of our kernels, in order."""
        return [call for group in self.groups for call in group.kernel_calls]

    def owned(self) -> list[torch.Tensor]:
        """All memory into which a call may point."""
        return [*self.buffers.values(), *self.workspace.tensors(), *self.weights.tensors()]


class Pair:
    """A target, and its draft model if there is one, read from files, with the programs of any bucket."""

    def __init__(
        self,
        target: Path,
        head: Path | None = None,
        *,
        dtype: str = "bfloat16",
        fuse: bool = True,
        codes: bool = False,
        **speculation: Any,
    ) -> None:
        self.fuse = fuse
        self.target: LoadedTarget = load_target(target, dtype=dtype)
        if codes:
            self.target = replace(self.target, config=coded(self.target.config))
        self.speculator: LoadedSpeculator | None = None
        self.config: SpeculativeConfig | None = None
        self.topologies: dict[int, Topology] = {0: TreeTopology.chain(0)}
        if head is not None or "method" in speculation:
            if head is not None:
                speculation = {"method": draft_method(head), **speculation}
            self.config = SpeculativeConfig(model=head, **{"num_speculative_tokens": 7, **speculation})
            self.speculator = load_speculator(self.config, self.target.config, open_target(target, dtype=dtype))
            self.topologies = make_topologies(self.config)

    @cached_property
    def geometry(self) -> Any:
        """The geometry of all programs."""
        options = RuntimeConfig(max_batch=8, max_context=256, block_size=16, prefill_chunk=32)
        speculator = None if self.speculator is None else self.speculator.speculator
        return make_geometry(self.target.config, speculator, self.topologies, options, self.config)

    def program(self, depth: int, batch: int) -> Program:
        """Build the program of a bucket; batch 0: the one that chooses a prompt's first token."""
        topology = self.topologies[depth]
        bucket = Bucket(batch, topology.num_nodes, depth) if batch else first_token_bucket(depth)
        return build_step(self.geometry, bucket, topology)

    @cached_property
    def source(self) -> dict[str, torch.Tensor]:
        """Canonical weights."""
        return {**self.target.weights, **({} if self.speculator is None else self.speculator.weights)}

    @cached_property
    def weights(self) -> DeviceWeights:
        """The weights of all programs, packed."""
        return self.weights_on(CPU)

    def weights_on(self, device: torch.device) -> DeviceWeights:
        """Return the weights of all programs, packed, on a device."""
        programs = [*(self.program(depth, 1) for depth in self.topologies), build_prefill(self.geometry)]
        layouts = weight_layouts(programs, fuse=self.fuse)
        return DeviceWeights(
            self.source, packed_weights(programs), device, layouts, expert_parts(programs, self.source)
        )

    def lower(self, depth: int, batch: int, gpu: Gpu = H200) -> Lowered:
        """Lower a bucket's program; each buffer has memory of its own."""
        return self.lower_program(self.program(depth, batch), gpu)

    def lower_program(self, program: Program, gpu: Gpu = H200) -> Lowered:
        """Lower any program of the pair; each buffer has memory of its own."""
        specs = list(program.specs(*STATE_ROLES, Role.SCRATCH, Role.CONSTANT))
        buffers = BufferSet(specs, CPU, program.constants)
        workspace = SharedWorkspace(CPU)
        binding = Binding(program, buffers, self.weights, gpu, workspace, is_invariant=sum_in_parts([program]))
        workspace.reserve(lowered_needs([binding], fuse=self.fuse).workspaces)
        groups = lower(binding, fuse=self.fuse)
        return Lowered(program, buffers, self.weights, workspace, groups)


class _IdleStream:
    """A stream that is always idle; a class, since libraries that are imported meanwhile use it in annotations."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, pretended: Gpu) -> None:
    """Allow executors with kernels on a machine without a GPU: their launcher compiles and launches nothing."""

    def launcher(*_: object, gpu: Gpu | None, is_shared: bool) -> SimpleNamespace:
        own = replace(pretended, is_shared=is_shared) if gpu is None else gpu
        return SimpleNamespace(gpu=own, compile_ahead=lambda calls: len(list(calls)), clear=lambda: None)

    monkeypatch.setattr(kernel_executor, "Launcher", launcher)
    monkeypatch.setattr(kernel_executor, "pinned_names", lambda specs: set())
    monkeypatch.setattr(torch.cuda, "Stream", _IdleStream)
    for name in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda each: nullcontext())
