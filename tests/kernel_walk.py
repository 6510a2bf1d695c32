"""A kernel's Python function run as it stands, one host thread a CUDA thread, over the bytes of tensors.

Unlike Numba's simulator it knows asynchronous copies, tensor cores and dynamic shared memory. Every access is checked
against the tensors that were handed over and the shared memory that was asked for; shared memory holds NaN at first.
Copies arrive as late as they may, or as early as they can.
"""

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

__all__ = ["Walker", "walkable"]

PATIENCE_S = 60.0
MASK = 0xFFFFFFFF
LONG_MASK = 0xFFFFFFFFFFFFFFFF


def _signed(value: int) -> int:
    value &= MASK
    return value - (1 << 32) if value >> 31 else value


class _Arrivals:
    """A barrier of arrivals in shared memory: phases end when all have arrived."""

    def __init__(self, count: int) -> None:
        self.count, self.arrived, self.phase = count, 0, 0

    def arrive(self) -> None:
        self.arrived += 1
        if self.arrived == self.count:
            self.arrived, self.phase = 0, self.phase + 1


class Walker:
    """What stands for `cuda` and `ptx`, and runs kernels.

    late       copies arrive when they are waited for, else when they are issued
    may_leave  blocks but the first may end without having waited for the kernel before
    """

    def __init__(self, late: bool = True, *, may_leave: bool = False) -> None:
        self.late = late
        self._may_leave = may_leave
        self._own = threading.local()
        self._ranges: list[tuple[int, Any]] = []
        self.bytes_copied = 0

    def run(self, call: Any) -> None:
        """Run all blocks of a KernelCall, one after the other; tensors are passed by address."""
        self._ranges = []
        values: list[Any] = []
        for argument in call.arguments:
            if isinstance(argument, torch.Tensor):
                flat = argument.view(torch.uint8).reshape(-1).numpy()
                self._ranges.append((argument.data_ptr(), flat))
                values.append(argument.data_ptr())
            else:
                values.append(np.float32(argument) if isinstance(argument, float) else argument)
        kernel, blocks = call.kernel, call.grid[0]
        for block in range(blocks):
            self._run_block(kernel.function, values, block, blocks, kernel.threads, kernel.shared_bytes)

    def _run_block(
        self, function: Callable[..., None], values: list[Any], block: int, blocks: int, threads: int, shared: int
    ) -> None:
        self._shared = np.full(shared, 255, np.uint8)
        self._all = threading.Barrier(threads, timeout=PATIENCE_S)
        self._warps = [threading.Barrier(32, timeout=PATIENCE_S) for _ in range(threads // 32)]
        self._named: dict[tuple[int, int], threading.Barrier] = {}
        self._arrivals: dict[int, _Arrivals] = {}
        self._changed, self._failed = threading.Condition(), False
        self._votes = [0] * threads
        self._operands: list[Any] = [None] * threads
        self._arrays: list[list[Any]] = []
        failures: list[BaseException] = []

        def one(thread: int) -> None:
            own = self._own
            own.thread, own.block, own.blocks, own.threads, own.waited = thread, block, blocks, threads, False
            own.groups, own.open, own.num_arrays = [], [], 0
            try:
                with np.errstate(all="ignore"):
                    function(*values)
                assert own.waited or (self._may_leave and block), "a thread never waited for the kernel before"
                assert not own.open and not any(own.groups), "copies under way at a kernel's end"
            except BaseException as error:
                failures.append(error)
                with self._changed:
                    self._failed = True
                    self._changed.notify_all()
                for barrier in (self._all, *self._warps, *self._named.values()):
                    barrier.abort()

        workers = [threading.Thread(target=one, args=(thread,)) for thread in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        for error in failures:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        assert not failures

    def _at(self, address: int, size: int) -> Any:
        assert address % size == 0, "a misaligned address"
        for start, flat in self._ranges:
            if start <= address and address + size <= start + flat.size:
                return flat[address - start : address - start + size]
        raise AssertionError(f"{size} bytes at {address:#x} belong to no tensor")

    def _near(self, address: int, size: int) -> Any:
        assert address % size == 0 and 0 <= address <= self._shared.size - size, f"shared address {address}"
        return self._shared[address : address + size]

    def _copy(self, size: int) -> Callable[[int, int], None]:
        def copy(place: int, source: int) -> None:
            target, origin = self._near(place, size), self._at(source, size)
            self.bytes_copied += size
            if self.late:
                target[:] = 255
                self._own.open.append((target, origin))
            else:
                target[:] = origin

        return copy

    def _commit(self) -> None:
        self._own.groups.append(self._own.open)
        self._own.open = []

    def _wait_for(self, pending: int) -> Callable[[], None]:
        def wait() -> None:
            groups = self._own.groups
            while len(groups) > pending:
                for target, origin in groups.pop(0):
                    target[:] = origin

        return wait

    def _sync_some(self, barrier: int, count: int) -> Callable[[], None]:
        def sync() -> None:
            with self._changed:
                known = self._named.setdefault((barrier, count), threading.Barrier(count, timeout=PATIENCE_S))
            known.wait()

        return sync

    def _begin(self, address: int, count: int) -> None:
        self._near(address, 8)
        self._arrivals[int(address)] = _Arrivals(int(count))

    def _arrive(self, address: int) -> None:
        with self._changed:
            self._arrivals[int(address)].arrive()
            self._changed.notify_all()

    def _is_over(self, address: int, parity: int) -> int:
        """Whether a phase is over; it waits for that, so that nobody has to ask twice."""
        with self._changed:
            barrier = self._arrivals[int(address)]

            def over() -> bool:
                return self._failed or barrier.phase % 2 != int(parity)

            assert self._changed.wait_for(over, PATIENCE_S), f"nobody comes to the barrier at {address}"
            self._changed.notify_all()
            if self._failed:
                raise threading.BrokenBarrierError
            return 1

    def _array(self, shape: int, dtype: Any) -> list[Any] | None:
        """A static array of shared memory, the same for all threads that come to it; None for dynamic memory."""
        if shape == 0:
            return None
        with self._changed:
            number = self._own.num_arrays
            self._own.num_arrays += 1
            if number == len(self._arrays):
                self._arrays.append([np.float32(np.nan) if dtype is np.float32 else -12345] * shape)
            return self._arrays[number]

    def _atomic(self, better: Callable[[Any, Any], Any]) -> Callable[[list[Any], int, Any], None]:
        def update(array: list[Any], place: int, value: Any) -> None:
            with self._changed:
                array[place] = better(array[place], value)

        return update

    def _swap(self, value: Any, read: Callable[[list[Any]], Any]) -> Any:
        """What a lane reads of all lanes' values, before any of them goes on."""
        thread = self._own.thread
        barrier, first = self._warps[thread // 32], thread // 32 * 32
        self._operands[thread] = value
        barrier.wait()
        found = read(self._operands[first : first + 32])
        barrier.wait()
        return found

    def _matrix(self, address: int) -> tuple[int, ...]:
        """ldmatrix.x4.trans: lane i has the address of row i % 8 of matrix i / 8."""
        lane = self._own.thread % 32

        def read(rows: list[int]) -> tuple[int, ...]:
            found = []
            for matrix in range(4):
                low, high = (
                    int(self._near(rows[8 * matrix + lane % 4 * 2 + which] + lane // 4 * 2, 2).view(np.uint16)[0])
                    for which in range(2)
                )
                found.append(low | high << 16)
            return tuple(found)

        found: tuple[int, ...] = self._swap(int(address), read)
        return found

    def _copy_or_zero(self, place: int, source: int, size: int) -> None:
        if size:
            self._copy(16)(place, source)
        else:
            zeros = np.zeros(16, np.uint8)
            self._own.open.append((self._near(place, 16), zeros)) if self.late else self._near(place, 16).fill(0)

    def _exchange(self, value: int) -> list[int]:
        """The values of all lanes of a warp."""
        values: list[int] = self._swap(int(value) & MASK, list)
        return values

    def _same(self, value: int) -> int:
        values = self._exchange(value)
        return sum(1 << lane for lane, each in enumerate(values) if each == int(value) & MASK)

    def _sync_warp(self) -> None:
        self._warps[self._own.thread // 32].wait()

    def _count(self, vote: int) -> int:
        self._votes[self._own.thread] = int(vote)
        self._all.wait()
        total = sum(self._votes)
        self._all.wait()
        return total

    def _mma(self, *operands: Any) -> tuple[Any, ...]:
        """The fragments of mma.m16n8k16 as the PTX manual has them."""
        lane = self._own.thread % 32
        group, quad = lane // 4, lane % 4

        def read(lanes: list[Any]) -> tuple[Any, ...]:
            found = []
            for part in range(4):
                row, column = group + 8 * (part // 2), quad * 2 + part % 2
                total = float(operands[part])
                for k in range(16):
                    a = lanes[row % 8 * 4 + k % 8 // 2][4 + row // 8 + 2 * (k // 8)]
                    b = lanes[column * 4 + k % 8 // 2][8 + k // 8]
                    total += _half(a, k % 2) * _half(b, k % 2)
                found.append(np.float32(total))
            return tuple(found)

        found: tuple[Any, ...] = self._swap(operands, read)
        return found

    def _load_tiles(self, count: int, stride: int) -> Callable[[int], tuple[int, ...]]:
        def load(address: int) -> tuple[int, ...]:
            words = (self._near(int(address) + tile * stride, 16).view(np.uint32) for tile in range(count))
            return tuple(int(word) for tile in words for word in tile)

        return load

    def _mma_tiles(self, total: int, first: int, count: int, word: int) -> Callable[..., tuple[Any, ...]]:
        def multiply(sums: tuple[Any, ...], a0: int, a1: int, a2: int, a3: int, words: tuple[int, ...]) -> Any:
            assert len(sums) == 4 * total
            results = list(sums)
            for tile in range(count):
                at, column = 4 * (first + tile), words[4 * tile + word : 4 * tile + word + 2]
                results[at : at + 4] = self._mma(*results[at : at + 4], a0, a1, a2, a3, *column)
            return tuple(results)

        return multiply

    def _store_tiles(self, total: int, first: int, count: int, offsets: Any, stride: int) -> Callable[..., None]:
        def store(address: int, sums: tuple[Any, ...]) -> None:
            assert len(sums) == 4 * total
            for tile in range(count):
                for part, offset in enumerate(offsets):
                    place = self._near(int(address) + tile * stride + offset, 4)
                    place.view(np.float32)[0] = sums[4 * (first + tile) + part]

        return store

    def cuda(self) -> Any:
        """What stands for Numba's `cuda`."""
        own = self._own

        class Index:
            def __init__(self, name: str) -> None:
                self.name = name

            @property
            def x(self) -> int:
                return int(getattr(own, self.name))

        return SimpleNamespace(
            threadIdx=Index("thread"),
            blockIdx=Index("block"),
            gridDim=Index("blocks"),
            blockDim=Index("threads"),
            syncthreads=lambda: (self._all.wait(), None)[1],
            syncthreads_count=self._count,
            syncwarp=self._sync_warp,
            shared=SimpleNamespace(array=self._array),
            local=SimpleNamespace(array=lambda shape, dtype: [None] * shape),
            atomic=SimpleNamespace(max=self._atomic(max), min=self._atomic(min)),
            popc=lambda word: (int(word) & LONG_MASK).bit_count(),
            shfl_sync=lambda lanes, value, lane: self._swap(value, lambda values: values[int(lane)]),
            shfl_xor_sync=lambda lanes, value, mask: self._swap(
                value, lambda values: values[own.thread % 32 ^ int(mask)]
            ),
            ballot_sync=lambda lanes, vote: self._swap(
                bool(vote), lambda votes: sum(1 << lane for lane, each in enumerate(votes) if each)
            ),
        )

    def _waited(self) -> None:
        self._own.waited = True

    def ptx(self) -> ModuleType:
        """What stands for the module `ptx`: the instructions that walked kernels use."""
        made = ModuleType("lowlat.kernels.ptx")
        near, at = self._near, self._at

        def load(where: Any, kind: Any, size: int) -> Any:
            return lambda address: where(int(address), size).view(kind)

        def store(where: Any, kind: Any, size: int) -> Any:
            def put(address: int, *values: Any) -> None:
                where(int(address), size).view(kind)[:] = values

            return put

        def words(where: Any) -> Any:
            return lambda address: tuple(int(word) for word in where(int(address), 16).view(np.uint32))

        functions = {
            "shared_address": lambda array: 0,
            "varying": int,
            "wait_for_previous_kernel": self._waited,
            "let_next_kernel_start": lambda: None,
            "load_relaxed_gpu_f32": lambda address: load(at, np.float32, 4)(address)[0],
            "load_acquire_gpu": lambda address: int(load(at, np.uint32, 4)(address)[0]),
            "load_shared_u32": lambda address: int(load(near, np.uint32, 4)(address)[0]),
            "load_shared_f32": lambda address: load(near, np.float32, 4)(address)[0],
            "load_shared_128": words(near),
            "load_global_128": words(at),
            "load_global_nc_128": words(at),
            "load_global_128_l2": words(at),
            "load_global_i32": lambda address: int(load(at, np.int32, 4)(address)[0]),
            "load_global_i64": lambda address: int(load(at, np.int64, 8)(address)[0]),
            "load_global_u8": lambda address: int(load(at, np.uint8, 1)(address)[0]),
            "load_global_f32": lambda address: load(at, np.float32, 4)(address)[0],
            "load_global_u16": lambda address: int(load(at, np.uint16, 2)(address)[0]),
            "store_shared_u32": store(near, np.uint32, 4),
            "store_shared_64": store(near, np.uint32, 8),
            "store_global_64": store(at, np.uint32, 8),
            "load_shared_matrix_x4_transposed": self._matrix,
            "copy_async_16_or_zero": self._copy_or_zero,
            "stay_here": lambda value: value,
            "store_shared_f32": store(near, np.float32, 4),
            "store_shared_128": store(near, np.uint32, 16),
            "store_global_128": store(at, np.uint32, 16),
            "store_global_f32": store(at, np.float32, 4),
            "store_global_u16": store(at, np.uint16, 2),
            "store_global_u32": store(at, np.uint32, 4),
            "copy_async_16": self._copy(16),
            "copy_async_16_once": self._copy(16),
            "copy_async_4": self._copy(4),
            "copies_commit": self._commit,
            "copies_wait": self._wait_for,
            "barrier_init": self._begin,
            "barrier_arrive": self._arrive,
            "barrier_is_over": self._is_over,
            "barrier_is_over_soon": self._is_over,
            "sync_threads": self._sync_some,
            "sync_warp": self._sync_warp,
            "lanes_of_same": self._same,
            "ballot": lambda vote: sum(1 << lane for lane, each in enumerate(self._exchange(vote)) if each),
            "warp_max": lambda value: max(self._exchange(value)),
            "count_bits": lambda word: (int(word) & MASK).bit_count(),
            "mma_bf16": self._mma,
            "load_shared_tiles": self._load_tiles,
            "mma_bf16_tiles": self._mma_tiles,
            "store_shared_tiles": self._store_tiles,
            "zeros": lambda count: lambda: (np.float32(0),) * count,
            "load_global_bf16": lambda address: _bf16(int(at(address, 2).view(np.uint16)[0])),
            "fma_bf16_pair": _fma_pair,
            "float_of_bits": lambda bits: np.uint32(bits & MASK).view(np.float32),
            "bits_of_float": lambda value: int(np.float32(value).view(np.uint32)),
            "bf16_bits": _bf16_bits,
            "bf16_pair": lambda low, high: _bf16_bits(low) | _bf16_bits(high) << 16,
            "exp2_approx": lambda value: np.exp2(np.float32(value)),
            "mul_rn": lambda a, b: np.float32(a) * np.float32(b),
            "add_rn": lambda a, b: np.float32(a) + np.float32(b),
            "div_rn": lambda a, b: np.float32(a) / np.float32(b),
            "fma_rn": lambda a, b, c: np.float32(float(a) * float(b) + float(c)),
        }
        for name, function in functions.items():
            setattr(made, name, function)
        return made


def _half(word: int, which: int) -> float:
    return float(np.uint32((word >> (16 * which) & 0xFFFF) << 16).view(np.float32))


def _bf16(bits: int) -> Any:
    return np.uint32(bits << 16).view(np.float32)


def _bf16_bits(value: Any) -> int:
    return int(torch.tensor(float(value)).bfloat16().view(torch.int16)) & 0xFFFF


def _fma_pair(a: int, b: int, c: int) -> int:
    halves = (_bf16_bits(np.float32(_half(a, k) * _half(b, k) + _half(c, k))) for k in range(2))
    low, high = halves
    return low | high << 16


@contextmanager
def walkable(walker: Walker, *names: str) -> Iterator[list[ModuleType]]:
    """Modules of `lowlat.kernels` imported anew, with the walker in the place of Numba and of `ptx`."""
    package = importlib.import_module("lowlat.kernels")
    known = importlib.import_module("lowlat.kernels.numba_cuda")
    fake: Any = ModuleType("lowlat.kernels.numba_cuda")
    fake.cuda, fake.types, fake.device_function = walker.cuda(), known.types, lambda function: function
    fake.uint32, fake.int32 = lambda value: int(value) & MASK, lambda value: _signed(int(value))
    fake.int64, fake.float32, fake.uint64 = int, np.float32, lambda value: int(value) & LONG_MASK
    replaced = {"lowlat.kernels.numba_cuda": fake, "lowlat.kernels.ptx": walker.ptx()}
    full = [f"lowlat.kernels.{name}" for name in names]
    kept = {name: sys.modules.get(name) for name in (*replaced, *full)}
    attributes = {name: getattr(package, name, None) for name in (*names, "ptx", "numba_cuda")}
    try:
        for name in full:
            sys.modules.pop(name, None)
        for name, module in replaced.items():
            sys.modules[name] = module
            setattr(package, name.rpartition(".")[2], module)
        yield [importlib.import_module(name) for name in full]
    finally:
        for name, old in kept.items():
            if old is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = old
        for name, value in attributes.items():
            if value is not None:
                setattr(package, name, value)
            elif hasattr(package, name):
                delattr(package, name)
