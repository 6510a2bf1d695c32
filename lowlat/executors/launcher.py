"""A launcher makes launches from kernel calls on one device: it compiles and loads kernels, and lays out parameters."""

import ctypes
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from lowlat.errors import DeviceError, ShapeError
from lowlat.graphs.launch import KernelLaunch, Launch, LibraryLaunch
from lowlat.kernels.toolchain.compiler import compile_ahead, compile_kernel
from lowlat.kernels.toolchain.kernel import HOPPER, Argument, Gpu, Kernel, KernelCall
from lowlat.kernels.tuning.choice import tuned_gpu
from lowlat.lowering.binding import Call, LibraryCall
from lowlat.options.directories import kernel_cache_directory, tuning_directory, uses_tuning_tables

__all__ = ["Launcher", "check_compilers", "gpu_of"]

LIBRARIES = {"nvrtc": "nvidia-cuda-nvrtc", "nvvm": "nvidia-nvvm", "nvJitLink": "nvidia-nvjitlink"}  # and their packages
_SCALARS: dict[str, Any] = {
    "int32": ctypes.c_int32,
    "uint32": ctypes.c_uint32,
    "int64": ctypes.c_int64,
    "uint64": ctypes.c_uint64,
    "float32": ctypes.c_float,
}


def check_compilers() -> None:
    """Raise DeviceError if a library for compiling is missing; the error names it and its package."""
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    for library, package in LIBRARIES.items():
        try:
            load_nvidia_dynamic_lib(library)
        except DynamicLibNotFoundError as error:
            raise DeviceError(
                f"kernels cannot be compiled: {library} was not found; pip install '{package}>=13,<14' in the "
                "environment that runs lowlat, or name a directory of CUDA 13 that has it in LD_LIBRARY_PATH"
            ) from error


def gpu_of(device: torch.device, *, is_shared: bool = False) -> Gpu:
    """The properties of a CUDA device that plans of kernels depend on, with its tuning table if tables are used.

    is_shared  see `Gpu`
    """
    from cuda.core import Device

    facts: Any = torch.cuda.get_device_properties(device)
    memory = Device(device.index or 0).properties
    gpu = Gpu(
        facts.multi_processor_count,
        facts.shared_memory_per_block_optin,
        torch.cuda.get_device_capability(device),
        # bits at twice the clock, kHz
        memory.memory_clock_rate * memory.global_memory_bus_width / 4e6,
        is_shared=is_shared,
    )
    return tuned_gpu(str(facts.name), gpu, tuning_directory()) if uses_tuning_tables() else gpu


class Launcher:
    """Prepares launches for one CUDA device; every kernel is compiled and loaded once.

    gpu        its properties, as `gpu_of` reads them; None: they are read here
    is_shared  see `Gpu`; for properties that are read here
    """

    def __init__(
        self,
        device: torch.device,
        cache_directory: Path | None = None,
        *,
        gpu: Gpu | None = None,
        is_shared: bool = False,
    ) -> None:
        from cuda.core import Device

        self.device = device
        self.capability: tuple[int, int] = torch.cuda.get_device_capability(device)
        self._cache = kernel_cache_directory() if cache_directory is None else cache_directory
        self._core = Device(device.index or 0)
        self.gpu = gpu_of(device, is_shared=is_shared) if gpu is None else gpu
        torch.cuda.init()
        torch.cuda.current_stream(device)
        self._core.set_current()
        self._loaded: dict[str, tuple[Kernel, Any]] = {}

    def prepare(self, call: Call) -> Launch:
        """Compile and load the call's kernel, and make the launch. Raises DeviceError or ShapeError."""
        from cuda.core import LaunchConfig

        if isinstance(call, LibraryCall):
            return LibraryLaunch(call.name, call.function, call.arguments)
        kernel = call.kernel
        blocks, *others = call.grid
        config = LaunchConfig(
            grid=(blocks // kernel.cluster, *others),  # in clusters, if the kernel has any
            cluster=kernel.cluster if kernel.cluster > 1 else None,
            block=kernel.threads,
            shmem_size=kernel.shared_bytes_on(self.gpu),
            programmatic_stream_serialization=call.dependent and self.capability >= HOPPER,
        )
        return KernelLaunch(kernel.name, self._load(kernel), config, parameters_of(call))

    def compile_ahead(self, calls: Iterable[Call]) -> int:
        """Compile the kernels that the cache lacks, on all cores; returns their number."""
        kernels = (call.kernel for call in calls if isinstance(call, KernelCall))
        return compile_ahead(kernels, self.capability, self._cache)

    def stream(self) -> Any:
        """The cuda.core stream around torch's current one."""
        from cuda.core import Stream

        return Stream.from_handle(torch.cuda.current_stream(self.device).cuda_stream)

    def load(self, calls: Iterable[Call]) -> list[Launch]:
        """Compile the kernels that the cache lacks, and load all kernels of the calls, in order."""
        made = list(calls)
        self.compile_ahead(made)
        return [self.prepare(call) for call in made]

    def issue(self, launches: Iterable[Launch]) -> None:
        """Issue launches on torch's current stream, in order."""
        stream = self.stream()
        for launch in launches:
            launch.issue(stream)

    def run(self, *calls: Call) -> None:
        """Prepare and issue calls at once."""
        self.issue(map(self.prepare, calls))

    def clear(self) -> None:
        """Unload every kernel; prepared launches may then not be issued."""
        self._loaded.clear()

    def _load(self, kernel: Kernel) -> Any:
        from cuda.core import ObjectCode

        first, known = self._loaded.get(kernel.name, (kernel, None))
        if (first.threads, first.shared_bytes, first.signature) != (
            kernel.threads, kernel.shared_bytes, kernel.signature,
        ):  # fmt: skip
            raise DeviceError(f"two kernels have the name {kernel.name}: the second would run as the first")
        if known is None:
            compiled = compile_kernel(kernel, self.capability, self._cache)
            make = ObjectCode.from_cubin if compiled.is_cubin else ObjectCode.from_ptx
            known = make(compiled.code, name=kernel.name).get_kernel(compiled.entry)
            asked = kernel.shared_bytes_on(self.gpu)
            if asked > 48 * 1024:
                self._allow_shared_memory(known, kernel.name, asked)
            self._loaded[kernel.name] = kernel, known
        return known

    def _allow_shared_memory(self, loaded: Any, name: str, num_bytes: int) -> None:
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(
            attribute, num_bytes, driver.CUkernel(int(loaded.handle)), self._core.device_id
        )
        if status != driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(
                f"kernel {name} needs {num_bytes} bytes of shared memory a block, which "
                f"{self.device} refuses: {status.name}"
            )


def parameters_of(call: KernelCall) -> tuple[Any, ...]:
    """The kernel's parameters: an array is (0, 0, elements, itemsize, address, extents, strides), as Numba has it."""
    values: list[Any] = []
    for kind, argument in zip(call.kernel.signature, call.arguments, strict=True):
        values.extend(_parameter(call.kernel.name, kind, argument))
    return tuple(values)


def _parameter(name: str, kind: Any, argument: Argument) -> list[Any]:
    integer = ctypes.c_int64
    if not isinstance(argument, torch.Tensor):
        return [_SCALARS[kind.name](argument)]
    if not argument.is_contiguous():
        raise ShapeError(f"kernel {name}: a tensor of shape {list(argument.shape)} is not contiguous")
    if not hasattr(kind, "ndim"):
        return [integer(argument.data_ptr())]
    size = argument.element_size()
    if kind.ndim != argument.dim() or kind.dtype.bitwidth != 8 * size:
        raise ShapeError(
            f"kernel {name}: {kind} does not take a tensor of {argument.dtype} and shape {list(argument.shape)}"
        )
    strides = [stride * size for stride in argument.stride()]
    return [
        integer(0),
        integer(0),
        integer(argument.numel()),
        integer(size),
        integer(argument.data_ptr()),
        *(integer(extent) for extent in argument.shape),
        *(integer(stride) for stride in strides),
    ]
