"""Every example of a kernel, compiled once for its sources, with its PTX; tests, workers and later runs share them.

Most of a compilation is Numba's, which ends with code that is the same for every capability: so a function is taken
that far once, and from there for each capability; what comes of it differs in the names of symbols alone. Kernels are
shared out between processes by the module that made them, and each process compiles its own for every capability.
"""

import fcntl
import os
import pkgutil
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kernel_inventory import GPUS, first_examples, modules, takes_gpu, variants

import lowlat.kernels
from lowlat.kernels.toolchain import compiler
from lowlat.kernels.toolchain.compiler import CompiledKernel, compile_kernel
from lowlat.kernels.toolchain.kernel import H200, Kernel
from lowlat.kernels.toolchain.numba_cuda import compile_ptx, cuda, fork_compiler

Capability = tuple[int, int]
numba_compiler = cuda.compiler
OLDEST = (8, 0)
# A few that compile soon, for the usual GPU; the second stage has the others, and is run before each merge.
PLAIN_STEP = ("elementwise.norm", "sampling.argmax", "attention.kv_write")


# The folders of kernels, whose examples are a test's: known without importing any.
FOLDERS = tuple(
    entry.name
    for entry in pkgutil.iter_modules(lowlat.kernels.__path__)
    if entry.ispkg and entry.name not in ("reference", "toolchain", "tuning", "formats")
)
CAPABILITIES = (H200.capability, *(capability for capability in GPUS if capability != H200.capability))


@cache
def daily(capability: Capability) -> Sequence[tuple[str, Kernel]]:
    """List the daily examples, each with its module: each kind of kernel for the usual GPU, and a few for the other
    capabilities, for which the rest is compiled where a run is wide.
    """
    kinds = list(first_examples(GPUS[capability]))
    if capability == H200.capability:
        return kinds
    return [each for each in kinds if each[0] in PLAIN_STEP]


@cache
def widely(capability: Capability) -> Sequence[tuple[str, Kernel]]:
    """List the examples that wide runs add: every variant in one size for the usual GPU, and for the oldest
    capability where plans depend on the GPU; else each kind for each capability.
    """
    gpu, known = GPUS[capability], modules()
    found = list(variants(gpu) if gpu is H200 else first_examples(gpu))
    if capability == OLDEST:
        found += [each for each in variants(gpu) if takes_gpu(known[each[0]])]
    names = {kernel.name for _, kernel in daily(capability)}
    named = {kernel.name: (module, kernel) for module, kernel in found}
    return [each for name, each in named.items() if name not in names]


@contextmanager
def lowered_once() -> Iterator[None]:
    """Numba's own part of a compilation is done once for a function, whatever the capability."""
    known: dict[Any, Any] = {}

    def lowered(function: Callable[..., None], signature: Any, **options: Any) -> Any:
        key = (function, signature, *(repr(options[name]) for name in sorted(options) if name != "cc"))
        if key not in known:
            known[key] = lower(function, signature, **options)
        return known[key]

    lower = numba_compiler._compile_pyfunc_with_fixup
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numba_compiler, "_compile_pyfunc_with_fixup", lowered)
        yield


@cache
def stage_of(capability: Capability, kernel: Kernel) -> str:
    """The stage in which an example is compiled: "first", "second" or "wide"."""
    module = next((module for module, known in daily(capability) if known.name == kernel.name), None)
    if module is None:
        return "wide"
    return "first" if capability == H200.capability and module in PLAIN_STEP else "second"


def _examples(stages: Collection[str]) -> Iterator[tuple[Capability, str, Kernel]]:
    """The examples of some stages, each with its capability and module."""
    for capability in CAPABILITIES:
        if stages != ("first",) or capability == H200.capability:
            for module, kernel in (*daily(capability), *(widely(capability) if "wide" in stages else ())):
                if stage_of(capability, kernel) in stages:
                    yield capability, module, kernel


def examples_of(*modules: ModuleType, wide: bool = False) -> list[Kernel]:
    """The kernels that these modules make for the usual GPU, of those that are compiled daily, or at all."""
    names = {module.__name__.removeprefix("lowlat.kernels.") for module in modules}
    made = (*daily(H200.capability), *(widely(H200.capability) if wide else ()))
    return [kernel for name, kernel in made if name in names]


class Compiled:
    """Examples, compiled at first use in as many processes as there are cores: a stage's, or those of all stages of the
    run, of which each then compiles none again, since most of their functions are the same.

    directory   what was compiled from these sources, by this run or an earlier one
    run         of this run, and shared by its workers: whoever comes first compiles for all
    together    stages that are compiled at the first use of any
    names       an expression that finds something in the names of kernels that are looked at
    """

    def __init__(self, directory: Path, run: Path, together: Collection[str] = (), names: str = "") -> None:
        self._directory, self._run, self._together = directory, run, tuple(together)
        self._names = re.compile(names)
        self._made: dict[tuple[Capability, str], tuple[CompiledKernel, str]] = {}

    def of(self, capability: Capability, kernel: Kernel) -> tuple[CompiledKernel, str]:
        """A kernel and its PTX."""
        key = (capability, kernel.name)
        if key not in self._made:
            stage = stage_of(capability, kernel)
            self._compile(self._together if stage in self._together else (stage,))
        return self._made[key]

    def each(self, stage: str, *modules: ModuleType) -> Iterator[tuple[Kernel, CompiledKernel, str]]:
        """The usual GPU's kernels of a stage that these modules make, each with its code and PTX."""
        for kernel in examples_of(*modules, wide=stage == "wide"):
            if stage_of(H200.capability, kernel) == stage and self.takes(kernel):
                yield kernel, *self.of(H200.capability, kernel)

    def takes(self, kernel: Kernel) -> bool:
        """Whether a kernel is to be looked at in this run."""
        return self._names.search(kernel.name) is not None

    def _compile(self, stages: tuple[str, ...]) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._run / "compiling").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self._claim(f"all-{'-'.join(stages)}"):
                self._compile_all(stages)
        for capability, _, kernel in _examples(stages):
            if self.takes(kernel):
                self._made[capability, kernel.name] = self._of(capability, kernel)

    def _compile_all(self, stages: tuple[str, ...]) -> None:
        modules: dict[str, list[tuple[Capability, Kernel]]] = {}
        for capability, module, kernel in _examples(stages):
            if self.takes(kernel):
                modules.setdefault(module, []).append((capability, kernel))
        # those with most functions first: a long one at the end would have one process wait for another
        longest_first = sorted(modules.items(), key=lambda item: -len({kernel.function for _, kernel in item[1]}))
        children = []
        for _ in os.sched_getaffinity(0):
            child = fork_compiler()
            if child == 0:
                status = 1
                try:
                    with lowered_once():
                        for module, kernels in longest_first:
                            if self._claim(f"{module}-{'-'.join(stages)}"):
                                for capability, kernel in kernels:
                                    self._of(capability, kernel)
                    status = 0
                finally:
                    os._exit(status)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)  # one that failed leaves its kernels to `_of`, which then tells why

    def _claim(self, name: str) -> bool:
        try:
            os.close(os.open(self._run / f"{name}.claimed", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _of(self, capability: Capability, kernel: Kernel) -> tuple[CompiledKernel, str]:
        path = self._directory / f"{kernel.name}-{capability[0]}{capability[1]}.ptx"

        def recorded(function: Any, *rest: Any) -> tuple[str, str]:
            ptx, entry = compile_ptx(function, *rest)
            path.write_text(ptx)
            return ptx, entry

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiler, "compile_ptx", recorded)
            return compile_kernel(kernel, capability, self._directory), path.read_text()  # the PTX is written first
