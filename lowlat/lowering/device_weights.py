"""This module keeps weights on the device as kernels read them: matrices packed, vectors as they are, each one once.

Lowering asks for a weight in a form, which decides how it is stored; a weight never changes its form. Library calls of
prefill unpack one matrix at a time. Experts are never unpacked if kernels run.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import replace

import torch

from lowlat.checkpoint.source import WeightSource, streamed
from lowlat.errors import ConfigError
from lowlat.kernels.formats import matrix_format
from lowlat.kernels.formats.dense import pack_matrix
from lowlat.kernels.gemm.packing import PackedMatrix, pack, runs_of
from lowlat.kernels.moe.packing import PackedExperts, pack_experts
from lowlat.lowering.weight_parts import MatrixParts

__all__ = ["DeviceWeights"]


class DeviceWeights:
    """Canonical weights on one device.

    source    canonical name -> tensor, on any device; two names of one tensor share its copy; packed experts have the
              name of their GEMM
    matrices  names that GEMMs read: these are packed, the others are copied as they are
    orders    row permutations of packed matrices, by name; a matrix without one keeps its order
    experts   names of an MoE layer's GEMMs -> the weights that hold their matrices, as in `weight_parts`
    place     copies a tensor to the memory for weights; None: torch allocates it
    Parts of quantised matrices are packed together, under the name that operations have for the matrix. Raises
    ConfigError for a weight whose dtype or format the kernels do not read.
    """

    def __init__(
        self,
        source: Mapping[str, torch.Tensor | PackedExperts],
        matrices: set[str],
        device: torch.device,
        orders: Mapping[str, torch.Tensor] | None = None,
        experts: Mapping[str, Mapping[str, str]] | None = None,
        *,
        place: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.device = device
        self._place: Callable[[torch.Tensor], torch.Tensor] = _as_it_lies if place is None else place
        self._packed: dict[str, PackedMatrix] = {}
        self._plain: dict[str, torch.Tensor] = {}
        ready = {} if isinstance(source, WeightSource) else source
        self._experts = {
            name: part.placed(self._place) for name, part in ready.items() if isinstance(part, PackedExperts)
        }
        stacks = set(experts or {})
        waiting, parts = _Waiting(experts or {}, orders or {}, device, self._place), MatrixParts(source)
        with streamed(_tensors(source), device) as stream:
            for names, tensor in stream:
                if parts.owns(names[0]):
                    self._take_part(parts, names[0], tensor.to(device), orders or {}, stacks)
                    continue
                _check_dtype(names[0], tensor)
                if waiting.take(names[0], tensor, self._experts):
                    continue
                moved = tensor.to(device)
                if matrices.isdisjoint(names):
                    self._plain.update(dict.fromkeys(names, self._place(moved.contiguous())))
                else:
                    order = next((orders[name] for name in names if name in orders), None) if orders else None
                    self._packed.update(dict.fromkeys(names, _packed(moved, order).placed(self._place)))
        waiting.check(self._experts)
        self._orders: dict[str, torch.Tensor] = {}
        self._runs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._places: list[tuple[torch.Tensor, torch.Tensor]] = []  # of each order that was asked for, once

    def _take_part(
        self,
        parts: MatrixParts,
        name: str,
        tensor: torch.Tensor,
        orders: Mapping[str, torch.Tensor],
        stacks: Container[str],
    ) -> None:
        """Collect a part of a quantised matrix; the last part packs it. Raises ConfigError for other formats.

        stacks  names of an MoE layer's GEMMs
        """
        made = parts.take(name, tensor)
        if made is None:
            return
        matrix, found = made
        owner = matrix.removesuffix(".weight")
        if owner in stacks:
            made_experts = pack_experts(found, device=self.device, order=orders.get(owner))
            self._experts[owner] = made_experts.placed(self._place)
            return
        self._packed[matrix] = pack_matrix(matrix_format(found), found, orders.get(matrix)).placed(self._place)

    def matrix(self, name: str) -> PackedMatrix:
        """A packed matrix. Raises ConfigError for a weight that is missing or was not packed."""
        if name not in self._packed:
            raise ConfigError(f"weight {name} is missing, or no GEMM reads it")
        return self._packed[name]

    def is_packed(self, name: str) -> bool:
        """Whether a weight is a packed matrix."""
        return name in self._packed

    def shape(self, name: str) -> torch.Size:
        """The shape of a matrix, of a stack of experts or of anything that is not packed.

        Raises ConfigError as `vector` does.
        """
        packed, experts = self._packed.get(name), self._experts.get(name.rpartition(".")[0])
        if experts is not None:
            return torch.Size((experts.num_experts, experts.rows, experts.columns))
        return self.vector(name).shape if packed is None else torch.Size((packed.rows, packed.columns))

    def form(self, name: str) -> object:
        """A value that is equal for weights packed in one format; None for a weight that is not packed."""
        packed, experts = self._packed.get(name), self._experts.get(name.rpartition(".")[0])
        return packed.tile_format if packed is not None else None if experts is None else experts.format

    def table(self, name: str) -> torch.Tensor | PackedMatrix:
        """An embedding: row-major, or packed if a GEMM reads it, too."""
        packed = self._packed.get(name)
        return self.vector(name) if packed is None else packed

    def vector(self, name: str) -> torch.Tensor:
        """A weight that is not packed. Raises ConfigError if it is missing."""
        if name not in self._plain:
            raise ConfigError(f"weight {name} is missing")
        return self._plain[name]

    def bias(self, name: str) -> torch.Tensor:
        """A bias in the order of its packed matrix, [N] bf16. Raises ConfigError as `matrix` and `vector` do."""
        matrix = self.matrix(f"{name.removesuffix('.bias')}.weight")
        if matrix.order is None:
            return self.vector(name)
        if name not in self._orders:
            self._orders[name] = self.vector(name).index_select(0, matrix.order.to(self.device))
        return self._orders[name]

    def experts(self, name: str) -> PackedExperts:
        """The experts of a GEMM. Raises ConfigError for one whose experts were not packed."""
        if name not in self._experts:
            raise ConfigError(f"experts {name} are missing, or no GEMM reads them")
        return self._experts[name]

    def experts_bias(self, name: str) -> torch.Tensor:
        """The biases of a GEMM's experts in the order of its packed matrices, [E, N] bf16."""
        bias = f"{name}.bias"
        order = self.experts(name).order
        if order is None:
            return self.vector(bias)
        if bias not in self._orders:
            self._orders[bias] = self.vector(bias).index_select(1, order.to(self.device))
        return self._orders[bias]

    def permutation(self, name: str) -> torch.Tensor | None:
        """The row permutation of a packed matrix, or of a GEMM's experts; None: the rows keep their order."""
        packed = self._packed.get(name) or self._experts.get(name)
        return None if packed is None else packed.order

    def places(self, name: str) -> torch.Tensor | None:
        """The packed row of each original row of a packed matrix, [N] int64 on the device; None: the same row.

        Raises ConfigError as `matrix` does.
        """
        return self._once(self._places, name, torch.argsort)

    def runs(self, name: str) -> torch.Tensor | None:
        """The original position of each run of eight packed rows, [N / 8] int32 on the device; None: the same.

        Raises ConfigError as `matrix` does, ShapeError for an order that is not made of such runs.
        """
        return self._once(self._runs, name, runs_of)

    def _once(
        self, made: list[tuple[torch.Tensor, torch.Tensor]], name: str, make: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor | None:
        """A table made from a packed matrix's permutation; matrices with the same permutation share it."""
        order = self.matrix(name).order
        if order is None:
            return None
        for known, found in made:
            if known is order or torch.equal(known, order):
                return found
        made.append((order, make(order).to(self.device)))
        return made[-1][1]

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor that a launch may point into."""
        experts = [part for each in self._experts.values() for part in each.tensors]
        tiles = [matrix.memory for matrix in self._packed.values()]
        runs = [each for _, each in (*self._runs, *self._places)]
        return [*tiles, *experts, *runs, *self._plain.values(), *self._orders.values()]

    @property
    def num_bytes(self) -> int:
        """Bytes on the device, each tensor once."""
        unique = {tensor.data_ptr(): tensor for tensor in self.tensors()}.values()
        return sum(tensor.numel() * tensor.element_size() for tensor in unique)

    def clear(self) -> None:
        """Drop every tensor."""
        self._packed.clear()
        self._experts.clear()
        self._plain.clear()
        self._orders.clear()
        self._places.clear()
        self._runs.clear()


def _as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _tensors(source: Mapping[str, torch.Tensor | PackedExperts]) -> Mapping[str, torch.Tensor]:
    """The weights that are not packed already; a source that reads files has nothing else."""
    if isinstance(source, WeightSource):
        return source
    return {name: part for name, part in source.items() if isinstance(part, torch.Tensor)}


class _Waiting:
    """Collects parts of experts' matrices, and packs the experts of a GEMM when it has all their parts."""

    def __init__(
        self,
        experts: Mapping[str, Mapping[str, str]],
        orders: Mapping[str, torch.Tensor],
        device: torch.device,
        place: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._parts, self._place = experts, place
        self._owner = {weight: (name, part) for name, parts in experts.items() for part, weight in parts.items()}
        self._orders = orders
        self._device = device
        self._found: dict[str, dict[str, torch.Tensor]] = {}

    def take(self, weight: str, tensor: torch.Tensor, packed: dict[str, PackedExperts]) -> bool:
        """Whether a weight is a part of experts; the last part of a GEMM adds its packed experts to `packed`."""
        if weight not in self._owner:
            return False
        name, part = self._owner[weight]
        if name in packed:
            return True
        found = self._found.setdefault(name, {})
        found[part] = tensor
        if len(found) == len(self._parts[name]):
            made = pack_experts(self._found.pop(name), device=self._device, order=self._orders.get(name))
            packed[name] = made.placed(self._place)
        return True

    def check(self, packed: Mapping[str, PackedExperts]) -> None:
        """Raise ConfigError for the first missing part."""
        for name, parts in self._parts.items():
            missing = [weight for part, weight in parts.items() if part not in self._found.get(name, {})]
            if name not in packed and missing:
                raise ConfigError(f"weight {missing[0]} is missing")


def _packed(weight: torch.Tensor, order: torch.Tensor | None) -> PackedMatrix:
    """See `pack`. Of a tensor without memory no rows are taken: torch imports SymPy where one is indexed."""
    return replace(pack(weight), order=order) if weight.is_meta else pack(weight, order)


def _check_dtype(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() and tensor.dtype not in (torch.bfloat16, torch.float32):
        raise ConfigError(f"weight {name} is {tensor.dtype}; the kernels read bfloat16")
    if tensor.dim() > 1 and tensor.dtype == torch.float32:
        raise ConfigError(
            f"weight {name} is float32; the kernels read bfloat16: load with dtype='bfloat16', or executor='reference'"
        )
