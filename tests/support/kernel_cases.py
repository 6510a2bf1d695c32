"""This module compares a kernel with its reference, with the same cases on a GPU and in Numba's simulator."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lowlat.graphs.extents import evaluate
from lowlat.graphs.schema import Access
from lowlat.kernels.reference import OPERATIONS
from lowlat.kernels.toolchain.kernel import KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda
from lowlat.speculators.tree.topology import TreeTopology

SAME_SHAPES = 10  # consecutive seeds with the same shapes, for one compilation
Arrays = dict[str, torch.Tensor]
RINGS = ("ring_records", "ring_tokens", "ring_logprob", "ring_head", "ring_checks")
HOST = ("command_ring", "command_tail", "staged_", "grammar_", *RINGS)


def simulate(*calls: KernelCall) -> None:
    """Run calls in the simulator, on the memory of CPU tensors."""
    for call in calls:
        kernel = call.kernel
        arguments: list[object] = []
        for kind, argument in zip(call.kernel.signature, call.arguments, strict=True):
            is_array = hasattr(kind, "ndim")
            if isinstance(argument, torch.Tensor):
                assert argument.is_contiguous()
                arguments.append(argument.numpy() if is_array else argument.data_ptr())
            else:
                arguments.append(argument)
        cuda.jit(kernel.function)[call.grid, kernel.threads](*arguments)


@dataclass(frozen=True)
class Bench:
    """Where kernels run: on a device, through `run`."""

    device: torch.device
    run: Callable[..., None]

    def place(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copy an array for the kernel: to pinned memory if the host shares it, else to the device."""
        if self.device.type == "cpu":
            return tensor.clone()
        return tensor.clone().pin_memory() if name.startswith(HOST) else tensor.to(self.device)

    def compare(
        self,
        arrays: Mapping[str, torch.Tensor],
        reference: Callable[[Arrays], object],
        calls: Callable[[Arrays], Sequence[KernelCall]],
    ) -> Arrays:
        """Run both on copies of the arrays, and assert that all are bitwise equal afterwards; returns them."""
        expected = {name: tensor.clone() for name, tensor in arrays.items()}
        found = {name: self.place(name, tensor) for name, tensor in arrays.items()}
        reference(expected)
        self.run(*calls(found))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for name, tensor in expected.items():
            same = torch.equal(bits(found[name].cpu()), bits(tensor))
            assert same, f"{name}: found {found[name].tolist()}, expected {tensor.tolist()}"
        return expected


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """View floats as integers, so that NaN equals itself."""
    kinds = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
    return tensor.view(kinds[tensor.dtype]) if tensor.dtype in kinds else tensor


def poisoned(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """An array of a value that nothing writes."""
    if dtype.is_floating_point:
        return torch.full(shape, torch.nan, dtype=dtype)
    return torch.full(shape, 177 if dtype is torch.uint8 else -77, dtype=dtype)


def unwritten(kind: str, given: Mapping[str, Any], **sizes: int) -> Arrays:
    """Make poisoned outputs for an operation, besides the given ones, sized by its schema and arguments.

    sizes   of symbols that no given array has
    """
    declared, made = OPERATIONS[kind].schema.arguments, {}
    held = {name: declared[name] for name, value in given.items() if name in declared and value is not None}
    known = {s: given[name].shape[place] for name, each in held.items() if not each.flat for place, s in each.bare}
    compute = [given[name].dtype for name, each in held.items() if each.dtype == "compute"]
    device = next(given[name].device for name in held)
    for name, each in declared.items():
        if each.access is Access.WRITE and name not in given:
            shape = [evaluate(extent, {**known, **sizes}) for extent in each.extents]
            dtype = compute[0] if each.dtype == "compute" else getattr(torch, each.dtype)
            made[name] = poisoned(*(size for size in shape if size is not None), dtype=dtype).to(device)
    return made


def meant(kind: str, given: Mapping[str, Any], **sizes: int) -> Arrays:
    """Return the outputs of an operation's reference."""
    found = unwritten(kind, given, **sizes)
    OPERATIONS[kind](**given, **found)
    return found


def random_topology(source: random.Random, max_nodes: int, max_depth: int) -> TreeTopology:
    """Draw a chain in half of the cases, else a random tree."""
    depth = source.randint(0, max_depth)
    if source.random() < 0.5:
        return TreeTopology.chain(min(depth, max_nodes - 1))
    paths: list[tuple[int, ...]] = [()]
    children: dict[tuple[int, ...], int] = {}
    for _ in range(source.randint(0, max_nodes - 1)):
        parent = source.choice(paths)
        if len(parent) >= max_depth:
            continue
        child = (*parent, children.get(parent, 0))
        children[parent] = child[-1] + 1
        paths.append(child)
    return TreeTopology.from_choices(sorted(paths[1:], key=lambda path: (len(path), path)))
