"""The plug-in after `--compile-only`: what tests would launch on a GPU is compiled into LOWLAT_KERNEL_CACHE instead.

    LOWLAT_KERNEL_CACHE=kernels python -O -m pytest -W ignore --assert=plain -m gpu --compile-only sm_90 tests/gpu

needs no GPU: a described one stands for it. Tests run on the CPU with nothing asserted (-O), nothing launched and few
tokens; runtimes lower what they would launch and then decode by the reference. Wherever a test ends early, as for want
of a stream, what it had asked for till then is compiled. Carried to a GPU, the directory spares its time.
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from lowlat.kernels.toolchain.kernel import H200, Gpu, Kernel, KernelCall

GPUS = {"sm_90": ("NVIDIA H200", replace(H200, peak_gb_s=4916.7))}
GIB = 2**30
MOST_TOKENS = 2  # of a request: each of a runtime's programs is lowered when it is loaded
TEST_S = 15.0  # of CPU, a test
AT_ONCE = 16 * (os.cpu_count() or 1)  # kernels between two lines of progress: all cores wait for the last


class OutOfTime(Exception):
    """A test has had its time."""


class CpuGenerator(torch.Generator):
    """A GPU's random numbers are the CPU's."""

    def __new__(cls, *_: Any, **__: Any) -> "CpuGenerator":
        return super().__new__(cls)


class Idle:
    """A stream, an event or a pool of a GPU on which nothing runs."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        """It is like every other."""

    def query(self) -> bool:
        """Nothing runs."""
        return True

    def elapsed_time(self, _: Any) -> float:
        """Some milliseconds."""
        return 1.0

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class OnTheCpu(TorchFunctionMode):
    """Tensors of a GPU are made on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0].clone()
        if function is torch.device:
            return function(*args, **(kwargs or {}))
        kwargs = {name: _moved(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return function(*(_moved(value) for value in args), **kwargs)


def _moved(value: Any) -> Any:
    is_device = isinstance(value, torch.device | str)
    return "cpu" if is_device and str(value).partition(":")[0] == "cuda" else value


class CompileOnly:
    """See the module. target: a key of CARDS."""

    def __init__(self, target: str) -> None:
        if __debug__:
            raise pytest.UsageError(
                "--compile-only needs `python -O -m pytest --assert=plain`: what is asserted would end tests"
            )
        self.name, gpu = GPUS[target]
        self.gpu = gpu
        self.kernels: dict[str, Kernel] = {}
        self.early: Counter[str] = Counter()
        self._patch, self._on_the_cpu = pytest.MonkeyPatch(), ExitStack()

    def record(self, *calls: Any) -> None:
        """Note the kernels of calls."""
        for call in calls:
            if isinstance(call, KernelCall):
                self.kernels.setdefault(call.kernel.name, call.kernel)

    def start(self) -> None:
        """Put the described GPU in a GPU's place."""
        self._pretend_gpu()
        self._pretend_launches()
        self._pretend_executors()
        self._on_the_cpu.enter_context(OnTheCpu())

    def _pretend_gpu(self) -> None:
        facts = SimpleNamespace(
            name=self.name, multi_processor_count=self.gpu.num_multiprocessors, total_memory=140 * GIB,
            shared_memory_per_block_optin=self.gpu.shared_bytes, major=self.gpu.capability[0],
            minor=self.gpu.capability[1], L2_cache_size=50 * 2**20,
        )  # fmt: skip
        answers: dict[str, Any] = {
            "is_available": True, "device_count": 2, "get_device_capability": self.gpu.capability,
            "get_device_properties": facts, "get_device_name": self.name, "mem_get_info": (139 * GIB, 140 * GIB),
            "current_stream": Idle(), "cudart": Idle(), "memory_stats": {},
        }  # fmt: skip
        answers |= dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_allocated"), 0)
        answers |= dict.fromkeys(("init", "_lazy_init", "set_device", "synchronize", "empty_cache"))
        answers |= dict.fromkeys(("set_per_process_memory_fraction", "reset_peak_memory_stats", "set_sync_debug_mode"))
        for name, answer in answers.items():
            self._patch.setattr(torch.cuda, name, lambda *_, _answer=answer, **__: _answer)
        for name in ("Stream", "ExternalStream", "Event", "MemPool"):
            self._patch.setattr(torch.cuda, name, Idle)
        for name in ("stream", "use_mem_pool", "device"):
            self._patch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())
        self._patch.setattr(torch.version, "cuda", "13.0")
        self._patch.setattr(torch, "Generator", CpuGenerator)

    def _pretend_launches(self) -> None:
        from lowlat.executors import launcher
        from lowlat.graphs.launch import KernelLaunch, LibraryLaunch
        from lowlat.kernels.tuning.choice import tuned_gpu

        own = tuned_gpu(self.name, self.gpu, None)

        def read(_: Any, *, is_shared: bool = False) -> Gpu:
            return replace(own, is_shared=is_shared)

        def made(self: Any, device: torch.device, _: Any = None, *, gpu: Any = None, is_shared: bool = False) -> None:
            self.device, self.capability, self._loaded = device, own.capability, {}
            self.gpu = read(device, is_shared=is_shared) if gpu is None else gpu

        def prepare(_: Any, call: Any) -> Any:
            self.record(call)
            return KernelLaunch("recorded", None, None, ())

        def compile_ahead(_: Any, calls: Any) -> int:
            self.record(*calls)
            return 0

        replaced = {"__init__": made, "prepare": prepare, "compile_ahead": compile_ahead, "stream": lambda _: None}
        for name, function in replaced.items():
            self._patch.setattr(launcher.Launcher, name, function)
        self._patch.setattr(launcher, "gpu_of", read)
        for kind in (KernelLaunch, LibraryLaunch):
            self._patch.setattr(kind, "issue", lambda *_: None)

    def _pretend_executors(self) -> None:
        from lowlat.engine import runtime
        from lowlat.engine.loading import loading
        from lowlat.executors import graph, kernel_executor, make
        from lowlat.executors.distributed import peers

        make_executor, submit = make.make_executor, runtime.Runtime.submit

        def recorded(choice: Any, ranks: Any, weights: Any, *args: Any, **options: Any) -> Any:
            here = replace(choice, device=torch.device("cpu"))
            if choice.has_kernels:
                devices, places = [here.device] * len(options["devices"]), options["devices"]
                self._patch.setattr(peers, "_places", lambda _: [("cpu", place.index or 0) for place in places])
                make_executor(here, ranks, weights, *args, **{**options, "devices": devices})
            slow = replace(here, executor="reference")
            return make_executor(slow, ranks, weights)

        def shortened(itself: Any, prompt: Any, params: Any = None, *args: Any, **options: Any) -> Any:
            params = params and replace(params, max_tokens=min(params.max_tokens, MOST_TOKENS), min_tokens=0)
            return submit(itself, prompt, params, *args, **options)

        def issued(_: Any, launches: Any) -> Any:
            return Idle()

        for name in ("capture", "capture_choice", "capture_loop"):
            self._patch.setattr(graph, name, issued)
        self._patch.setattr(kernel_executor, "pinned_names", lambda specs: set())
        self._patch.setattr(loading, "make_executor", recorded)
        self._patch.setattr(loading, "check_launches", lambda *_: None)
        self._patch.setattr(loading, "set_costs", lambda *_, **__: None)
        self._patch.setattr(runtime.Runtime, "submit", shortened)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        """End a test that takes long."""

        def stop(*_: Any) -> None:
            raise OutOfTime

        known = signal.signal(signal.SIGPROF, stop)
        signal.setitimer(signal.ITIMER_PROF, TEST_S)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, known)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
        """Nothing fails: what ends a test early is counted."""
        report = yield
        if call.excinfo is not None and report.outcome == "failed":
            problem = f"{item.nodeid.split('[')[0]}: {call.when}: {call.excinfo.exconly()}".replace("\n", " ")
            self.early[problem[:180]] += 1
            report.outcome = "passed" if call.when == "call" else "skipped"
            report.longrepr = None if call.when == "call" else ("", 0, f"Skipped: {problem}")
        return report

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Compile what was noted."""
        from lowlat.kernels.toolchain.compiler import compile_ahead, compile_kernel
        from lowlat.options.directories import kernel_cache_directory

        say: Callable[[str], None] = partial(print, flush=True)
        for problem, count in self.early.most_common():
            say(f"\n{count} x ended early: {problem}")
        directory, kernels = kernel_cache_directory(), list(self.kernels.values())
        start, lacked = time.monotonic(), 0
        for first in range(0, len(kernels), AT_ONCE):
            some = kernels[first : first + AT_ONCE]
            missing = compile_ahead(some, self.gpu.capability, directory)
            lacked += missing
            for kernel in some if missing else ():
                try:
                    compile_kernel(kernel, self.gpu.capability, directory)
                except Exception as error:  # the GPU's test tells
                    say(f"{kernel.name}: {error!r}"[:300])
            if missing:
                say(f"{first + len(some)} of {len(kernels)} kernels, {time.monotonic() - start:.0f} s")
        say(f"\n{len(kernels)} kernels in {directory}, {lacked} of them lacked")
