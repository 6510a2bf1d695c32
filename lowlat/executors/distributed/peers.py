"""This module enables access between GPUs, and allocates the memory of all-reduces on each.

Ranks may share a GPU, as in tests, or have no GPU at all.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lowlat.errors import ConfigError, DeviceError
from lowlat.kernels.collectives.all_reduce import Channel, channel_shapes
from lowlat.kernels.collectives.peers.rows import PeerRows, area_shape
from lowlat.kernels.collectives.peers.words import HOST_GAVE_UP, awaited_code
from lowlat.kernels.collectives.shares import RowShares, share_words
from lowlat.kernels.step.forward_commands import AREA_SHAPE, COUNTER_SHAPE, NUM_WORDS, CommandChannel

__all__ = ["PeerMemory", "connect", "peer_problem", "planned_bytes"]

MAX_CHANNEL_ROWS = 256  # of one launch; more rows take several launches, so that areas stay small
MAX_SUMMED_ROWS = 64  # of one launch that computes rows and sums them over ranks
NUM_KINDS = 2  # kinds of kernels that do so: GEMMs and MoE layers
HOW_TO_SEE = "`nvidia-smi topo -m` shows how the GPUs are joined, `nvidia-smi topo -p2p r` whether they may"


def peer_problem(devices: Sequence[torch.device]) -> str | None:
    """Say in a sentence why ranks on these devices cannot write to each other's memory; None if they can."""
    gpus = _gpus(devices)
    if not gpus:
        return None
    from cuda.bindings import driver

    _checked("cuInit", driver.cuInit(0))
    count = _checked("cuDeviceGetCount", driver.cuDeviceGetCount())
    for gpu in gpus:
        if gpu >= count:
            return f"there is no cuda:{gpu}: {count} GPUs are visible (devices, CUDA_VISIBLE_DEVICES)"
    for gpu, other in ((gpu, other) for gpu in gpus for other in gpus if gpu != other):
        if not _checked("cuDeviceCanAccessPeer", driver.cuDeviceCanAccessPeer(_device(gpu), _device(other))):
            return f"cuda:{gpu} cannot reach the memory of cuda:{other}; {HOW_TO_SEE}"
    return None


def connect(devices: Sequence[torch.device]) -> None:
    """Let every one of these GPUs write to all others. Raises ConfigError, which names two GPUs that cannot."""
    problem = peer_problem(devices)
    if problem is not None:
        raise ConfigError(f"tensor_parallel_size {len(devices)} needs GPUs that reach each other: {problem}")
    from cuda.bindings import driver

    gpus = _gpus(devices)
    for gpu, other in ((gpu, other) for gpu in gpus for other in gpus if gpu != other):
        peer = _checked("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(_device(other)))
        with _current(gpu):
            (status,) = driver.cuCtxEnablePeerAccess(peer, 0)
        if status not in (driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED):
            raise DeviceError(f"cuda:{gpu} is refused access to cuda:{other}: {status.name}; {HOW_TO_SEE}")


def planned_bytes(size: int, rows: Mapping[int, int], summed: Mapping[int, int]) -> int:
    """The most bytes that all-reduces among `size` ranks need on each device.

    rows    the most rows that are exchanged, by width
    summed  the most of them that are summed, by width
    """
    words = sum(math.prod(channel_shapes(size, min(most, MAX_CHANNEL_ROWS), width)[0]) for width, most in rows.items())
    for width, most in summed.items():
        words += NUM_KINDS * math.prod(area_shape(size, min(most, MAX_SUMMED_ROWS), width))
        words += share_words(size, most, width)
    return words * torch.int64.itemsize


class PeerMemory:
    """Holds all memory through which ranks exchange, by rank; addresses never change.

    devices    of each rank; ranks that share one take turns there (`shares_gpus`)
    rows       the most rows of an all-reduce by their width
    stop_flag  [1] int64 in pinned memory: the host sets it to end loops, and rank 0 forwards it
    A channel is allocated on all devices at its first use, before any step runs. Raises ConfigError as `connect` does.
    """

    def __init__(self, devices: Sequence[torch.device], rows: Mapping[int, int]) -> None:
        self.devices = list(devices)
        self._rows = rows
        connect(devices)
        self.shares_gpus = len(set(_places(devices))) < len(devices)
        on_gpus = bool(_gpus(devices))
        self.abort, self.stop_flag = (torch.zeros(1, dtype=torch.int64, pin_memory=on_gpus) for _ in range(2))
        areas = tuple(_zeros(AREA_SHAPE, torch.int64, device) for device in devices)
        self._commands = [
            CommandChannel(
                rank,
                areas,
                _zeros(COUNTER_SHAPE, torch.int32, device),
                _zeros((NUM_WORDS,), torch.int64, device),
                self.abort,
            )
            for rank, device in enumerate(devices)
        ]
        self._made: dict[tuple[int, bool], list[Channel]] = {}
        self._summed: dict[tuple[int, str], list[PeerRows]] = {}
        self._shares: dict[int, list[RowShares]] = {}

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.devices)

    def channel(self, rank: int, width: int, whole: bool = False) -> Channel:
        """A rank's channel for rows of a width. Raises ConfigError for a width that is not among the announced rows."""
        key = width, whole
        if key not in self._made:
            self._made[key] = self._make(width, whole)
        return self._made[key][rank]

    def rows(self, rank: int, width: int, kind: str) -> PeerRows:
        """A rank's memory for rows of a width that one kind of kernel sums. Raises ConfigError as `channel` does."""
        key = width, kind
        if key not in self._summed:
            shape = area_shape(self.size, min(self._most(width), MAX_SUMMED_ROWS), width)
            areas = tuple(_zeros(shape, torch.int64, device) for device in self.devices)
            self._summed[key] = [PeerRows(each, areas, self.abort) for each in range(self.size)]
        return self._summed[key][rank]

    def shares(self, rank: int, width: int) -> RowShares:
        """A rank's memory for many rows of a width; each rank sums a share of them. Raises as `channel` does."""
        if width not in self._shares:
            rows = self._most(width)
            words = share_words(self.size, rows, width)
            areas = tuple(_zeros((words,), torch.int64, device) for device in self.devices)
            self._shares[width] = [RowShares(each, areas, rows, width, self.abort) for each in range(self.size)]
        return self._shares[width][rank]

    def _most(self, width: int) -> int:
        """The most rows of a width."""
        if width not in self._rows:
            raise ConfigError(f"ranks exchange rows of {sorted(self._rows)} numbers, not of {width}")
        return self._rows[width]

    def commands(self, rank: int) -> CommandChannel:
        """A rank's channel for commands that rank 0 forwards."""
        return self._commands[rank]

    def _make(self, width: int, whole: bool) -> list[Channel]:
        rows = min(self._most(width), MAX_CHANNEL_ROWS)
        area, counters = channel_shapes(self.size, rows, width, whole)
        areas = tuple(_zeros(area, torch.int64, device) for device in self.devices)
        counts = [_zeros(counters, torch.int32, device) for device in self.devices]
        return [
            Channel(rank, areas, counts[rank], self.abort, whole, not self.shares_gpus) for rank in range(self.size)
        ]

    def tensors(self) -> list[torch.Tensor]:
        """All tensors that a launch of any rank may point to, other ranks' memory included."""
        channels = [channel for made in self._made.values() for channel in made]
        areas = [area for made in self._made.values() for area in made[0].areas]
        areas += [area for summed in self._summed.values() for area in summed[0].areas]
        areas += [area for shares in self._shares.values() for area in shares[0].areas]
        counters = [*(each.counters for each in channels), *(each.counters for each in self._commands)]
        forwarded = [each.forwarded for each in self._commands]
        return [self.abort, self.stop_flag, *areas, *self._commands[0].areas, *counters, *forwarded]

    def num_bytes(self, rank: int) -> int:
        """Bytes on one rank's device."""
        held = [tensor for made in self._made.values() for tensor in (made[rank].areas[rank], made[rank].counters)]
        held += [summed[rank].areas[rank] for summed in self._summed.values()]
        held += [shares[rank].areas[rank] for shares in self._shares.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def give_up(self) -> None:
        """End all ranks' waits for each other within some milliseconds; the awaited values are NaN from then on."""
        if not int(self.abort[0]):
            self.abort[0] = HOST_GAVE_UP

    def problem(self) -> str | None:
        """Say why ranks have given up waiting for each other; None while none has."""
        code = int(self.abort[0])
        if not code:
            return None
        if code == HOST_GAVE_UP:
            return "the host ended the ranks' waits for each other"
        rank, awaited = awaited_code(code)
        return f"rank {rank} ({self.devices[rank]}) waited in vain for rank {awaited} ({self.devices[awaited]})"

    def reset(self) -> None:
        """Zero all exchange memory after launches outside of steps; nothing may be under way."""
        for tensor in self.tensors():
            tensor.zero_()
        for device in {device for device in self.devices if device.type == "cuda"}:
            torch.cuda.synchronize(device)

    def clear(self) -> None:
        """Drop all memory; nothing may run that points into it."""
        self._made.clear()
        self._summed.clear()
        self._shares.clear()
        self._commands.clear()


def _places(devices: Sequence[torch.device]) -> list[tuple[str, int]]:
    return [(device.type, device.index or 0) for device in devices]


def _gpus(devices: Sequence[torch.device]) -> list[int]:
    """The numbers of the GPUs among devices, each once, ascending."""
    return sorted({index for kind, index in _places(devices) if kind == "cuda"})


def _checked(name: str, answer: tuple[Any, ...]) -> Any:
    """The value that a function of the driver returns. Raises DeviceError for its errors."""
    status, *values = answer
    if status.value:
        raise DeviceError(f"{name} fails: {status.name}")
    return values[0] if values else None


def _device(gpu: int) -> Any:
    from cuda.bindings import driver

    return _checked("cuDeviceGet", driver.cuDeviceGet(gpu))


@contextmanager
def _current(gpu: int) -> Iterator[None]:
    """Make a GPU's primary context, which torch uses too, current in this thread."""
    from cuda.bindings import driver

    _checked("cuCtxPushCurrent", driver.cuCtxPushCurrent(_checked("", driver.cuDevicePrimaryCtxRetain(_device(gpu)))))
    try:
        yield
    finally:
        driver.cuCtxPopCurrent()


class _Allocation:
    """Memory from the driver itself: peers may be unable to access torch's own memory (expandable segments)."""

    def __init__(self, num_bytes: int, gpu: int) -> None:
        from cuda.bindings import driver

        self._gpu = gpu
        with _current(gpu):
            status, address = driver.cuMemAlloc(num_bytes)
            if status.value:
                raise ConfigError(
                    f"cuda:{gpu} has no {num_bytes} bytes for what ranks exchange ({status.name}); lower max_batch, "
                    f"max_context, kv_cache_gib or kv_blocks"
                )
            _checked("cuMemsetD8", driver.cuMemsetD8(address, 0, num_bytes))
            _checked("cuCtxSynchronize", driver.cuCtxSynchronize())
        self._address = address
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (int(address), False),
            "version": 3,
        }

    def __del__(self) -> None:
        from cuda.bindings import driver

        if hasattr(self, "_address"):
            with _current(self._gpu):
                driver.cuMemFree(self._address)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return torch.zeros(shape, dtype=dtype, device=device)
    held = torch.as_tensor(_Allocation(dtype.itemsize * math.prod(shape), device.index or 0), device=device)
    return held.view(dtype).view(shape)
