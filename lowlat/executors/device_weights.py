"""Weights as the kernels read them: matrices packed, vectors as they are, each tensor placed once.

Whoever lowers a program asks for a weight in a form; the form decides how it is stored, and a weight has one form for
its whole life. Prefill asks for a matrix back, one at a time.
"""

from collections.abc import Mapping

import torch

from lowlat.errors import ConfigError
from lowlat.kernels.packing import PackedMatrix, pack, unpack
from lowlat.weights import streamed

__all__ = ["DeviceWeights"]


class DeviceWeights:
    """Canonical weights on one device.

    source   canonical name -> tensor, on any device; two names of one tensor share its copy
    matrices names that products read: they are packed, the others are placed as they are
    orders   orders of the rows of packed matrices, by name; a matrix without one keeps its own
    Raises ConfigError for a weight whose dtype the kernels do not read.
    """

    def __init__(
        self,
        source: Mapping[str, torch.Tensor],
        matrices: set[str],
        device: torch.device,
        orders: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.device = device
        self._packed: dict[str, PackedMatrix] = {}
        self._plain: dict[str, torch.Tensor] = {}
        with streamed(source, device) as stream:
            for names, tensor in stream:
                _check_dtype(names[0], tensor)
                moved = tensor.to(device)
                if matrices.isdisjoint(names):
                    self._plain.update(dict.fromkeys(names, moved.contiguous()))
                else:
                    order = next((orders[name] for name in names if name in orders), None) if orders else None
                    self._packed.update(dict.fromkeys(names, pack(moved, order)))
        self._orders: dict[str, torch.Tensor] = {}

    def matrix(self, name: str) -> PackedMatrix:
        """A packed matrix. Raises ConfigError for a weight that is missing or was not packed."""
        if name not in self._packed:
            raise ConfigError(f"weight {name} is missing, or no product reads it")
        return self._packed[name]

    def table(self, name: str) -> torch.Tensor | PackedMatrix:
        """An embedding: row-major, or packed where a product reads it too."""
        packed = self._packed.get(name)
        return self.vector(name) if packed is None else packed

    def vector(self, name: str) -> torch.Tensor:
        """Anything that is not packed. Raises ConfigError for a weight that is missing."""
        if name not in self._plain:
            raise ConfigError(f"weight {name} is missing")
        return self._plain[name]

    def bias(self, name: str) -> torch.Tensor:
        """A bias in the order of its packed matrix, [N] bf16. Raises ConfigError as `matrix` and `vector` do."""
        matrix = self.matrix(f"{name.removesuffix('.bias')}.weight")
        if matrix.order is None:
            return self.vector(name)
        if name not in self._orders:
            self._orders[name] = self.vector(name)[matrix.order.to(self.device)].contiguous()
        return self._orders[name]

    def restored(self, name: str) -> torch.Tensor:
        """A weight as the checkpoint has it; a packed one is unpacked into new memory."""
        packed = self._packed.get(name)
        return self.vector(name) if packed is None else unpack(packed)

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor that a launch may point into."""
        return [*(matrix.tiles for matrix in self._packed.values()), *self._plain.values(), *self._orders.values()]

    @property
    def num_bytes(self) -> int:
        """Bytes on the device, each tensor once."""
        unique = {tensor.data_ptr(): tensor for tensor in self.tensors()}.values()
        return sum(tensor.numel() * tensor.element_size() for tensor in unique)

    def clear(self) -> None:
        """Drop every tensor."""
        self._packed.clear()
        self._plain.clear()
        self._orders.clear()


def _check_dtype(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() and tensor.dtype not in (torch.bfloat16, torch.float32):
        raise ConfigError(f"weight {name} is {tensor.dtype}; the kernels read bfloat16")
    if tensor.dim() > 1 and tensor.dtype == torch.float32:
        raise ConfigError(
            f"weight {name} is float32; the kernels read bfloat16: load with dtype='bfloat16', or executor='reference'"
        )
