"""This module runs a kernel's Python function on the CPU, with a fiber for each CUDA thread, on the bytes of tensors.

Unlike Numba's simulator it supports asynchronous copies, tensor cores and dynamic shared memory. It checks each access
against the tensors and the shared memory of the launch; shared memory begins as NaN. Copies arrive as late or as early
as the hardware allows.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from operator import and_
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from fibers import Combine, Fiber, Fibers, this_fiber
from gpu_arithmetic import (
    add_rn,
    bf16_bits,
    bf16_value,
    bits_of,
    div_rn,
    e4m3_code,
    e4m3_pairs,
    f16_bits,
    fma_pair,
    fma_rn,
    larger_pair,
    mul_rn,
    number_of,
    picked_bytes,
    plain,
    rounded,
)
from walked_launch import Arrivals, Home, Launch, Matrix, Words
from walked_memory import load, load_number, load_words, store, store_number
from walked_warp import MASK, WARP, Warp

from lowlat.kernels.toolchain.digests import SOURCES
from lowlat.kernels.toolchain.digests import _imported as imported

# what others stand for where kernels are walked
STAND_INS = {
    f"lowlat.kernels.toolchain.{name}"
    for name in ("numba_cuda", "ptx", "ptx_attention", "ptx_hopper", "ptx_state", "ptx_warp")
}
LONG_MASK = 0xFFFFFFFFFFFFFFFF


def _signed(value: Any) -> int:
    """To 32 bits, as Numba's `int32` does; of a float the whole part."""
    whole = value if type(value) is int else int(value)
    if -0x80000000 <= whole <= 0x7FFFFFFF:
        return whole
    whole &= MASK
    return whole - (1 << 32) if whole >> 31 else whole


class _Thread(Fiber):
    """A thread of a block, with its copies under way.

    groups, open   committed copies, oldest first, and those since
    num_arrays     static arrays that it has come to
    waited         for the kernel before
    """

    def __init__(self, home: Home, number: int, body: Callable[[], None]) -> None:
        super().__init__(home.block * home.launch.threads + number, body)
        self.home, self.place_in_block = home, number
        self.warp, self.lane = divmod(number, WARP)
        self.groups: list[list[Any]] = []
        self.open: list[Any] = []
        self.num_arrays = 0
        self.waited = False


_this: Callable[[], _Thread] = this_fiber
this_thread: Callable[[], Any] = this_fiber  # that runs: its home, warp and lane


class Walker:
    """Replaces `cuda` and `ptx`, and runs kernels.

    late       copies arrive when a thread waits for them, else when they are issued
    may_leave  blocks but the first may end without waiting for the kernel before
    rest       the first value of each byte of shared memory; 255 gives NaN, or -1
    """

    def __init__(self, late: bool = True, *, may_leave: bool = False, rest: int = 255) -> None:
        self.late = late
        self._rest = rest
        self._may_leave = may_leave
        self._ranges: list[tuple[int, int, Any, memoryview]] = []
        self._warp = Warp(self.meet, self.place_near)
        self.bytes_copied = 0

    def run(self, *calls: Any, beside: Sequence[Sequence[Any]] = ()) -> None:
        """Run KernelCalls, all blocks side by side; tensors are passed by address.

        A dependent launch starts as soon as the one before allows it, as on a GPU. `beside`: launches of other streams.
        """
        self._ranges, previous, fibers = [], None, []
        ordered = [(place, call) for stream in (calls, *beside) for place, call in enumerate(stream)]
        for number, (place, call) in enumerate(ordered):
            previous = Launch(number, call, previous if place else None)
            body = self._body_of(call)
            shared = call.kernel.shared_bytes
            previous.homes = [Home(previous, block, shared, self._rest) for block in range(previous.grid)]
            fibers += [_Thread(home, place, body) for home in previous.homes for place in range(previous.threads)]
        self._fibers = Fibers(fibers)
        self._fibers.run()

    def _body_of(self, call: Any) -> Callable[[], None]:
        """Return the function that one thread of a launch runs."""
        values: list[Any] = []
        for kind, argument in zip(call.kernel.signature, call.arguments, strict=True):
            if isinstance(argument, torch.Tensor) and hasattr(kind, "ndim"):
                values.append(Matrix(argument))
            elif isinstance(argument, torch.Tensor):
                sizes = zip(argument.shape, argument.stride(), strict=True)
                span = 1 + sum((size - 1) * stride for size, stride in sizes) if argument.numel() else 0
                flat = argument.as_strided((span,), (1,)).view(torch.uint8).numpy()  # what is between rows, too
                start = argument.data_ptr()
                self._ranges.append((start, start + flat.size, flat, flat.data))
                values.append(start)
            else:
                values.append(np.float32(argument) if isinstance(argument, float) else argument)

        def body() -> None:
            thread = _this()
            home, launch = thread.home, thread.home.launch
            before = launch.previous
            while before is not None and not (before.lets_next_start if launch.dependent else before.ended):
                self._fibers.sleep(("progress", before.number))
            with np.errstate(all="ignore"):
                call.kernel.function(*values)
            assert thread.waited or (self._may_leave and home.block), "a thread never waited for the kernel before"
            assert not thread.open and not any(thread.groups), "copies under way at a kernel's end"
            home.num_left, launch.num_left = home.num_left - 1, launch.num_left - 1
            if not home.num_left:
                self._let_next_start()
            if launch.ended:
                self._fibers.wake(("progress", launch.number))

        return body

    def _range(self, address: int, size: int) -> tuple[int, int, Any, memoryview]:
        assert address % size == 0, "a misaligned address"
        for found in self._ranges:
            if found[0] <= address and address + size <= found[1]:
                return found
        raise AssertionError(f"{size} bytes at {address:#x} belong to no tensor")

    def place_at(self, address: int, size: int) -> tuple[memoryview, int]:
        """The memory of the tensor that has so many bytes, and where they are in it."""
        start, _, _, memory = self._range(address, size)
        return memory, address - start

    def place_near(self, address: int, size: int) -> tuple[memoryview, int]:
        """The block's shared memory, and where the bytes are in it."""
        home = _this().home
        assert address % size == 0 and 0 <= address <= home.num_bytes - size, f"shared address {address}"
        return home.memory, address

    def _at(self, address: int, size: int) -> Any:
        start, _, flat, _ = self._range(address, size)
        return flat[address - start : address - start + size]

    def _near(self, address: int, size: int) -> Any:
        self.place_near(address, size)
        return _this().home.shared[address : address + size]

    def _copy(self, size: int) -> Callable[[int, int], None]:
        def copy(place: int, source: int) -> None:
            target, origin = self._near(place, size), self._at(source, size)
            self.bytes_copied += size
            if self.late:
                target[:] = 255
                _this().open.append((target, origin))
            else:
                target[:] = origin

        return copy

    def _copy_or_zero(self, place: int, source: int, size: int) -> None:
        if size:
            self._copy(16)(place, source)
        elif self.late:
            _this().open.append((self._near(place, 16), np.zeros(16, np.uint8)))
        else:
            self._near(place, 16).fill(0)

    def _commit(self) -> None:
        thread = _this()
        thread.groups.append(thread.open)
        thread.open = []

    def _wait_for(self, pending: int) -> Callable[[], None]:
        def wait() -> None:
            groups = _this().groups
            while len(groups) > pending:
                for target, origin in groups.pop(0):
                    target[:] = origin

        return wait

    def _waited(self) -> None:
        """Until the launch before has ended, whose threads all waited for the one before it."""
        before = _this().home.launch.previous
        while before is not None and not before.ended:
            self._fibers.sleep(("progress", before.number))
        _this().waited = True

    def _let_next_start(self) -> None:
        home = _this().home
        launch, before = home.launch, home.launch.lets_next_start
        launch.early.add(home.block)
        if launch.lets_next_start and not before:
            self._fibers.wake(("progress", launch.number))

    def _sync_block(self) -> None:
        self._meet("syncthreads", _this().home.launch.threads)

    def _count(self, vote: int) -> int:
        home = _this().home
        return sum(self._fibers.all_reduce(("count", home.key), home.launch.threads, int(vote)))

    def _meet(self, name: str, count: int) -> None:
        """So many threads of a block."""
        self._fibers.meet((name, _this().home.key), count)

    def _add(self, address: int, value: int) -> int:
        word = self._at(int(address), 4).view(np.uint32)
        before = int(word[0])
        word[0] = before + int(value) & MASK
        return before

    def meet(self, place: Any, count: int, value: Any, combine: Combine | None) -> Any:
        """Wait for `count` threads at a place, and return what `combine` makes of their values."""
        return self._fibers.meet(place, count, value, combine)

    def at(self, address: int, size: int) -> Any:
        """Bytes of a tensor."""
        return self._at(address, size)

    def near(self, address: int, size: int) -> Any:
        """Bytes of the block's shared memory, of which the first 16 are checked."""
        start = self._near(address, 16 if size > 16 else size)
        self._near(address + size - start.size, start.size)
        return _this().home.shared[address : address + size]

    def cluster(self) -> list[Home]:
        """The blocks of the thread's cluster."""
        home = _this().home
        size = home.launch.cluster
        first = home.block // size * size
        return home.launch.homes[first : first + size]

    def arrive(self, address: int, other: Home | None = None) -> None:
        """At a barrier of the block, or of another of its cluster."""
        home = _this().home if other is None else other
        if home.arrivals[int(address)].arrive():
            self._fibers.wake((f"phase at {int(address)}", home.key))

    def _begin(self, address: int, count: int) -> None:
        self._near(address, 8)
        _this().home.arrivals[int(address)] = Arrivals(int(count))

    def _is_over(self, address: int, parity: int) -> int:
        """Whether a phase is over; it waits for that, so that nobody has to ask twice."""
        home = _this().home
        barrier = home.arrivals[int(address)]
        while barrier.phase % 2 == int(parity):
            self._fibers.sleep((f"phase at {int(address)}", home.key))
        return 1

    def _trap(self) -> None:
        raise AssertionError("a launch gave up waiting for another block")

    def _array(self, shape: int, dtype: Any, alignment: int = 1) -> Any:
        """A static array of shared memory, the same for all threads that come to it; None for dynamic memory.

        Of Numba's own types it has an address.
        """
        if shape == 0:
            return None
        thread = _this()
        thread.num_arrays += 1
        arrays = thread.home.arrays
        if thread.num_arrays > len(arrays):
            plain_list = [np.float32(np.nan) if dtype is np.float32 else -12345] * shape
            arrays.append(thread.home.words(shape, dtype) if hasattr(dtype, "bitwidth") else plain_list)
        return arrays[thread.num_arrays - 1]

    def _when_others_went_on(self, load: Callable[[int], Any]) -> Callable[[int], Any]:
        """A load by which a thread may wait for another."""

        def load_later(address: int) -> Any:
            self._fibers.pause()
            return load(address)

        return load_later

    def cuda(self) -> Any:
        """Make the stand-in for Numba's `cuda`."""
        warp = self._warp

        class Line:
            def __init__(self, value: Callable[[], int]) -> None:
                self.value = value

            @property
            def x(self) -> int:
                return self.value()

        class Block(Line):
            @property
            def x(self) -> int:
                return self.value() % _this().home.launch.width

            @property
            def y(self) -> int:
                return self.value() // _this().home.launch.width

        class Grid(Line):
            @property
            def y(self) -> int:
                launch = _this().home.launch
                return launch.grid // launch.width

        def atomic(better: Callable[[Any, Any], Any]) -> Callable[[list[Any], int, Any], Any]:
            def update(array: list[Any], place: int, value: Any) -> Any:
                before = array[place]
                array[place] = better(before, value)
                return before

            return update

        return SimpleNamespace(
            threadIdx=Line(lambda: _this().place_in_block),
            blockIdx=Block(lambda: _this().home.block),
            gridDim=Grid(lambda: _this().home.launch.width),
            blockDim=Line(lambda: _this().home.launch.threads),
            syncthreads=self._sync_block,
            syncthreads_count=self._count,
            syncthreads_or=lambda vote: int(self._count(vote != 0) > 0),
            syncwarp=warp.sync,
            shared=SimpleNamespace(array=self._array),
            local=SimpleNamespace(array=lambda shape, dtype: [None] * shape),
            atomic=SimpleNamespace(max=atomic(max), min=atomic(min), add=atomic(lambda old, value: old + value)),
            ffs=lambda word: (int(word) & -int(word)).bit_length(),
            shfl_up_sync=warp.shuffle_up,
            popc=lambda word: (int(word) & LONG_MASK).bit_count(),
            shfl_sync=warp.shuffle,
            shfl_xor_sync=warp.shuffle_xor,
            ballot_sync=lambda lanes, vote: warp.ballot(vote),
        )

    def ptx(self) -> ModuleType:
        """Make the stand-in for the module `ptx`: the instructions that walked kernels use."""
        made = ModuleType("lowlat.kernels.toolchain.ptx")
        near, at, warp = self.place_near, self.place_at, self._warp
        half_at, put_half, put_words = load(at, "H"), store(at, "H"), store(at, "4I")
        functions = {
            "shared_address": lambda array: array.start if isinstance(array, Words) else 0,
            "varying": int,
            "varying_long": int,
            "kept_long": int,
            "wait_for_previous_kernel": self._waited,
            "let_next_kernel_start": self._let_next_start,
            "load_relaxed_gpu_f32": self._when_others_went_on(load_number(at)),
            "load_acquire_gpu": self._when_others_went_on(load(at, "I")),
            "load_global_64": load_words(at, "2I"),
            "atomic_add_gpu": self._add,
            "load_shared_u32": load(near, "I"),
            "load_shared_f32": load_number(near),
            "load_shared_128": load_words(near, "4I"),
            "load_global_128": load_words(at, "4I"),
            "load_relaxed_gpu_128": self._when_others_went_on(load_words(at, "4I")),
            "load_global_nc_128": load_words(at, "4I"),
            "load_ahead_128": load_words(at, "4I"),
            "load_relaxed_system_words": self._when_others_went_on(load_words(at, "4I")),
            "load_relaxed_system_word": self._when_others_went_on(load_words(at, "2I")),
            "store_relaxed_system_word": store(at, "2I"),
            "store_relaxed_system_words": lambda address, a, b, epoch: put_words(address, a, epoch, b, epoch),
            "store_release_system": store(at, "q"),
            "fence_system": lambda: None,
            "load_acquire_system": self._when_others_went_on(load(at, "q")),
            "load_volatile_i32": load(at, "i"),
            "load_global_i32": load(at, "i"),
            "load_global_i64": load(at, "q"),
            "load_global_u8": load(at, "B"),
            "load_global_f32": load_number(at),
            "load_global_u16": load(at, "H"),
            "store_shared_u32": store(near, "I"),
            "store_shared_64": store(near, "2I"),
            "store_global_64": store(at, "2I"),
            "load_shared_matrix_x4_transposed": warp.matrix,
            "copy_async_16_or_zero": self._copy_or_zero,
            "stay_here": lambda value: value,
            "kept": lambda value: value,
            "store_shared_f32": store_number(near),
            "store_shared_128": store(near, "4I"),
            "store_global_128": store(at, "4I"),
            "store_global_f32": store_number(at),
            "store_global_i32": store(at, "i"),
            "store_global_i64": store(at, "q"),
            "store_global_u8": store(at, "B"),
            "store_relaxed_gpu_f32": store_number(at),
            "store_global_u16": store(at, "H"),
            "store_global_u16_if": lambda address, value, wanted: put_half(address, value) if wanted else None,
            "store_relaxed_gpu_u16": store(at, "H"),
            "store_global_u32": store(at, "I"),
            "copy_async_16": self._copy(16),
            "copy_async_16_once": self._copy(16),
            "copy_async_16_once_if": lambda place, source, wanted: self._copy(16)(place, source) if wanted else None,
            "copy_async_16_if": lambda place, source, wanted: self._copy(16)(place, source) if wanted else None,
            "copy_async_4": self._copy(4),
            "copies_commit": self._commit,
            "copies_wait": self._wait_for,
            "barrier_init": self._begin,
            "barrier_arrive": self.arrive,
            "barrier_is_over": self._is_over,
            "barrier_is_over_soon": self._is_over,
            "sync_warp": warp.sync,
            "sync_one_warp": lambda number: warp.sync(),
            "sync_two_warps": lambda number: self._meet(f"barrier {number}", 2 * WARP),
            "trap": self._trap,
            "lanes_of_same": warp.same,
            "ballot": warp.ballot,
            "warp_max": warp.largest,
            "warp_sum": warp.total,
            "count_bits": lambda word: (int(word) & MASK).bit_count(),
            "mma_bf16": warp.mma,
            "mma_f16": warp.mma_f16,
            "f16_pair": lambda low, high: f16_bits(low) | f16_bits(high) << 16,
            "max_bf16_pair": larger_pair,
            "e4m3_to_f16": e4m3_pairs,
            "e4m3_pair": lambda low, high: e4m3_code(low) | e4m3_code(high) << 8,
            "interleave_codes": lambda a, b: b & 0xFF | (a & 0xFF) << 8 | (b & 0xFF00) << 8 | (a & 0xFF00) << 16,
            "select_bits": lambda a, b, mask: (int(a) & ~int(mask) | int(b) & int(mask)) & MASK,
            "swap_middle_bytes": lambda word: word & 0xFF0000FF | (word & 0xFF00) << 8 | (word & 0xFF0000) >> 8,
            "load_shared_tiles": warp.load_tiles,
            "mma_bf16_tiles": warp.mma_tiles,
            "fma_tiles": warp.fma_tiles,
            "store_shared_tiles": warp.store_tiles,
            "zeros": lambda count: lambda: (np.float32(0),) * count,
            "load_global_bf16": lambda address: bf16_value(half_at(address)),
            "and_or": lambda a, b, c: (int(a) & int(b) | int(c)) & MASK,
            "xor_and": lambda a, b, c: (int(a) ^ int(b)) & int(c),
            "pick_bytes": picked_bytes,
            "both_low": lambda word: (int(word) & 0xFFFF) * 0x10001,
            "both_high": lambda word: (int(word) >> 16) * 0x10001,
            "mul_wide": lambda a, b: (int(a) * int(b) & MASK, int(a) * int(b) >> 32),
            "fma_bf16_pair": fma_pair,
            "float_of_bits": lambda bits: number_of(int(bits) & MASK),
            "bits_of_float": bits_of,
            "bf16_bits": bf16_bits,
            "bf16_pair": lambda low, high: bf16_bits(low) | bf16_bits(high) << 16,
            "rcp_approx": lambda value: div_rn(1, value),
            "rcp_approx_ftz": lambda value: np.float32(0) if value > 2.0**126 else div_rn(1, value),
            "exp2_approx": lambda value: plain(np.exp2(rounded(value))),
            "exp2_approx_ftz": lambda value: np.float32(0) if value < -126 else plain(np.exp2(rounded(value))),
            "mul_rn": mul_rn,
            "add_rn": add_rn,
            "div_rn": div_rn,
            "fma_rn": fma_rn,
        }
        for name, function in functions.items():
            setattr(made, name, function)
        return made


def _written_for(names: Sequence[str]) -> set[str]:
    """The modules that have code of kernels, or take some, of those that modules import, however far away."""
    found: dict[str, bool] = dict.fromkeys(STAND_INS, True)

    def has_code(name: str) -> bool:
        if name not in found:
            found[name] = False
            spec: Any = importlib.util.find_spec(name)
            if spec.submodule_search_locations is None:  # a package stays: what was added to its tables is there
                inner = [has_code(each) for each in _imports(Path(spec.origin))]
                found[name] = any(inner)
        return found[name]

    for name in names:
        has_code(name)
    return {name for name, has in found.items() if has and name not in STAND_INS}


@cache
def _imports(path: Path) -> tuple[str, ...]:
    """The modules of the package, its toolchain's others left out, that a file imports."""
    found = (Path(each).relative_to(SOURCES).with_suffix("") for each in imported(path))
    names = [f"lowlat.kernels.{'.'.join(each.parts)}".removesuffix(".__init__") for each in found]
    return tuple(name for name in names if name in STAND_INS or ".toolchain" not in name)


@contextmanager
def standing_in(known: ModuleType, made: ModuleType) -> Iterator[None]:
    """Replace modules of the toolchain for imports, while the context lasts."""
    package, _, name = known.__name__.rpartition(".")
    home = importlib.import_module(package)
    sys.modules[known.__name__] = made
    setattr(home, name, made)
    try:
        yield
    finally:
        sys.modules[known.__name__] = known
        setattr(home, name, known)


@contextmanager
def walkable(walker: Walker, *names: str) -> Iterator[list[ModuleType]]:
    """Modules by their names below `lowlat.kernels`, imported again, the walker in the place of Numba and `ptx`.

    What they take code of kernels from is imported again, too.
    """
    known = importlib.import_module("lowlat.kernels.toolchain.numba_cuda")
    fake: Any = ModuleType("lowlat.kernels.toolchain.numba_cuda")
    fake.cuda, fake.types, fake.device_function = walker.cuda(), known.types, lambda function: function
    fake.uint32, fake.int32 = partial(and_, MASK), _signed
    fake.float64 = float
    fake.int64, fake.float32, fake.uint64 = int, np.float32, partial(and_, LONG_MASK)
    replaced = {"lowlat.kernels.toolchain.numba_cuda": fake, "lowlat.kernels.toolchain.ptx": walker.ptx()}
    full = [f"lowlat.kernels.{name}" for name in names]
    again = {*full, *_written_for(full)}
    kept = {name: sys.modules.get(name) for name in (*replaced, *again)}
    homes = {name: importlib.import_module(name.rpartition(".")[0]) for name in kept}
    attributes = {name: getattr(home, name.rpartition(".")[2], None) for name, home in homes.items()}
    try:
        for name in again:
            sys.modules.pop(name, None)
            if hasattr(homes[name], last := name.rpartition(".")[2]):
                delattr(homes[name], last)  # where `from package import module` would find the one before
        for name, module in replaced.items():
            sys.modules[name] = module
            setattr(homes[name], name.rpartition(".")[2], module)
        yield [importlib.import_module(name) for name in full]
    finally:
        for name, old in kept.items():
            if old is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = old
        for name, value in attributes.items():
            last = name.rpartition(".")[2]
            if value is not None:
                setattr(homes[name], last, value)
            elif hasattr(homes[name], last):
                delattr(homes[name], last)
