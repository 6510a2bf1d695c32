"""The compiler of kernels: what it keeps on disk, what it does when it cannot, and what it says when it fails."""

import ctypes
import errno
import fcntl
import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from numba.core.types.functions import BaseFunction

from lowlat.errors import DeviceError
from lowlat.executors.launcher import parameters_of
from lowlat.kernels.toolchain import compiler
from lowlat.kernels.toolchain.compiler import CompiledKernel, compile_ahead, compile_kernel, is_kept, link
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.locks import locked
from lowlat.kernels.toolchain.numba_cuda import (
    compile_ptx,
    cuda,
    device_function,
    float32,
    fork_compiler,
    int64,
    types,
    uint32,
)

HOPPER = (9, 0)


def make(constant: int) -> Kernel:
    """A small kernel."""

    def add(out: Any) -> None:
        out[cuda.threadIdx.x] = out[cuda.threadIdx.x] + constant

    return Kernel(f"add_{constant}", add, (types.Array(types.int32, 1, "C"),), 32)


def make_broken() -> Kernel:
    """A kernel that Numba refuses."""

    def broken(out: Any) -> None:
        out[0] = no_such_name  # type: ignore[name-defined]  # noqa: F821

    return Kernel("broken", broken, (types.Array(types.int32, 1, "C"),), 32)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were compiled in this process, by their functions' names."""
    names: list[str] = []

    def counting(function: Any, *rest: Any) -> tuple[str, str]:
        names.append(function.__name__)
        return compile_ptx(function, *rest)

    monkeypatch.setattr(compiler, "compile_ptx", counting)
    return names


def test_a_kernel_is_compiled_once(tmp_path: Path, counted: list[str]) -> None:
    first = compile_kernel(make(1), HOPPER, tmp_path / "deep" / "cache")
    assert compile_kernel(make(1), HOPPER, tmp_path / "deep" / "cache") == first
    assert counted == ["add"]
    assert first.is_cubin
    assert first.stack_bytes == 0
    assert 0 < first.registers < 32
    assert first.entry.encode() in first.code
    for other in ((make(2), HOPPER), (make(1), (8, 0))):
        assert compile_kernel(*other, tmp_path / "deep" / "cache") != first
    assert len(counted) == 3
    assert len(list((tmp_path / "deep" / "cache").iterdir())) == 3  # nothing half-written stays


def test_another_nvvm_s_code_is_taken_where_one_s_own_is_unknown(
    tmp_path: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a directory may be carried to a machine where NVVM comes with the toolkit; other versions know each other."""
    for mine, compiled in (("13.3", 1), ("13.4", 2), ("13.4", 2), ("unknown", 2), ("13.4", 2), ("13.3", 3)):
        monkeypatch.setattr(compiler, "assembler", lambda mine=mine: mine)
        assert compile_ahead([make(1)], HOPPER, tmp_path) == compiled - len(counted)
        assert compile_kernel(make(1), HOPPER, tmp_path).is_cubin
        assert len(counted) == compiled
    (path,) = tmp_path.iterdir()
    path.unlink()
    for mine, compiled in (("unknown", 4), ("unknown", 4), ("13.3", 5)):
        monkeypatch.setattr(compiler, "assembler", lambda mine=mine: mine)
        compile_kernel(make(1), HOPPER, tmp_path)
        assert len(counted) == compiled


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:40],
        lambda data: data[:-100],
        lambda data: data[:-100] + bytes(100),
        lambda data: b"null\n" + data.split(b"\n", 1)[1],
        lambda data: b"[1, 2]\n" + data.split(b"\n", 1)[1],
        lambda data: json.dumps({"entry": "add"}).encode() + b"\n" + data.split(b"\n", 1)[1],
        lambda data: os.urandom(len(data)),
    ],
)
def test_a_damaged_file_is_compiled_again(damage: Any, tmp_path: Path, counted: list[str]) -> None:
    first = compile_kernel(make(1), HOPPER, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    again = compile_kernel(make(1), HOPPER, tmp_path)
    assert len(counted) == 2
    assert (again.is_cubin, again.registers) == (True, first.registers)
    assert again.entry.encode() in again.code  # each compilation has a name of its own
    assert compile_kernel(make(1), HOPPER, tmp_path) == again
    assert len(counted) == 2


def test_a_cache_that_cannot_be_written_is_only_slower(
    tmp_path: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    for directory in (blocked, blocked / "below"):
        assert compile_kernel(make(1), HOPPER, directory).is_cubin
        assert not is_kept(make(1), HOPPER, directory)
    assert f"cannot be kept in {blocked}: File exists; every start" in caplog.text
    caplog.clear()
    assert blocked.read_text() == "no directory"

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    for _ in range(2):
        assert compile_kernel(make(1), HOPPER, tmp_path / "full").is_cubin
    assert list((tmp_path / "full").iterdir()) == []
    assert len(counted) == 4
    (said,) = caplog.messages
    assert "full: No space left on device; every start compiles them again (LOWLAT_KERNEL_CACHE)" in said

    def forbidden(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", forbidden)
    monkeypatch.setattr(compiler, "kernel_digest", lambda kernel: "known")
    assert compile_kernel(make(1), HOPPER, tmp_path / "full").is_cubin


def test_without_a_cache_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert compile_kernel(make(1), HOPPER).is_cubin
    assert list(tmp_path.iterdir()) == []


def test_what_the_driver_links_stays_ptx(tmp_path: Path) -> None:
    known = make(1)
    kernel = Kernel("add_1_ptx", known.function, known.signature, 32, linked=False)
    for _ in range(2):
        compiled = compile_kernel(kernel, HOPPER, tmp_path)
        assert not compiled.is_cubin
        assert (compiled.registers, compiled.stack_bytes, compiled.shared_bytes) == (0, 0, 0)
        assert f".entry {compiled.entry}(" in compiled.code.decode()
        assert ".target sm_90" in compiled.code.decode()


def test_instructions_of_one_capability_are_another_target(tmp_path: Path, counted: list[str]) -> None:
    """Of the same name, they are compiled and kept apart."""
    known = make(1)
    specific = Kernel("add_1", known.function, known.signature, 32, specific=True)
    assert compile_kernel(specific, HOPPER, tmp_path).is_cubin and compile_kernel(known, HOPPER, tmp_path).is_cubin
    assert len(counted) == len(list(tmp_path.iterdir())) == 2
    ptx, _ = compile_ptx(known.function, known.signature, HOPPER, None, True)
    assert ".target sm_90a\n" in ptx
    with pytest.raises(DeviceError, match="does not link"):
        compile_kernel(specific, (8, 0))


def test_many_kernels_are_compiled_by_other_processes(tmp_path: Path, counted: list[str]) -> None:
    kernels = [make(constant) for constant in range(6)]
    assert compile_ahead([*kernels, *kernels], HOPPER, tmp_path, workers=2) == 6
    assert counted == []
    assert len(list(tmp_path.iterdir())) == 6
    assert compile_ahead(kernels, HOPPER, tmp_path) == 0
    codes = {compile_kernel(kernel, HOPPER, tmp_path).code for kernel in kernels}
    assert len(codes) == 6
    assert counted == []


def forked(work: Callable[[], object]) -> int:
    """A process that does some work, and ends with 0 where that raises nothing."""
    child = fork_compiler()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def test_processes_that_need_one_kernel_compile_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, log, real = tmp_path / "cache", tmp_path / "log", compiler._compile

    def slow(kernel: Kernel, capability: tuple[int, int]) -> CompiledKernel:
        with log.open("a") as file:
            file.write(f"{kernel.name}\n")
        time.sleep(0.2)  # the others come meanwhile
        return real(kernel, capability)

    monkeypatch.setattr(compiler, "_compile", slow)
    children = [forked(lambda: compile_kernel(make(1), HOPPER, cache)) for _ in range(3)]
    many = [make(constant) for constant in range(6)]
    children += [forked(lambda: compile_ahead(many, HOPPER, cache, workers=2)) for _ in range(2)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 5
    assert sorted(log.read_text().split()) == [f"add_{constant}" for constant in range(6)]
    assert {path.suffix for path in cache.iterdir()} == {".cubin"}


def test_a_process_that_was_killed_or_hangs_holds_up_nobody(
    tmp_path: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = compiler._path(make(1), HOPPER, tmp_path)

    def hang() -> None:
        with locked(path, 0) as is_mine:
            os.write(writing, bytes([is_mine]))
            time.sleep(600)

    reading, writing = os.pipe()
    child = forked(hang)
    assert os.read(reading, 1) == b"\x01"
    monkeypatch.setattr(compiler, "PATIENCE_S", 0.05)
    assert compile_kernel(make(1), HOPPER, tmp_path).is_cubin
    path.unlink()
    monkeypatch.setattr(compiler, "PATIENCE_S", 60.0)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert compile_kernel(make(1), HOPPER, tmp_path).is_cubin
    assert len(counted) == 2
    assert list(tmp_path.iterdir()) == [path]
    for end in (reading, writing):
        os.close(end)


def test_a_file_system_without_locks_has_everybody_compile(
    tmp_path: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    assert compile_kernel(make(1), HOPPER, tmp_path) == compile_kernel(make(1), HOPPER, tmp_path)
    assert len(counted) == 1


@pytest.mark.parametrize(("count", "workers"), [(3, 2), (6, 1)])
def test_few_kernels_or_one_core_are_not_worth_a_process(
    count: int, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a process was started"))
    assert compile_ahead([make(k) for k in range(count)], HOPPER, tmp_path, workers) == count
    assert list(tmp_path.iterdir()) == []  # each is compiled when it is needed


def test_a_process_that_fails_leaves_the_telling_to_this_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kernels = [make_broken(), *(make(constant) for constant in range(5))]
    assert compile_ahead(kernels, HOPPER, tmp_path, workers=2) == 6
    assert len(list(tmp_path.iterdir())) == 5
    with pytest.raises(Exception, match="no_such_name"):
        compile_kernel(kernels[0], HOPPER, tmp_path)
    assert len(list(tmp_path.iterdir())) == 5


def test_a_process_does_not_collect_what_was_garbage_before(capfd: pytest.CaptureFixture[str]) -> None:
    """An event's end asks the device, which a forked process does not have."""

    class Event:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            if os.getpid() != parent:
                os.write(2, b"collected")

    parent = os.getpid()
    gc.disable()
    try:
        Event()
        child = fork_compiler()
        if child == 0:
            try:
                gc.collect()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    finally:
        gc.enable()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda ptx: ptx.replace("ret;", "no_such_instruction;"), "kernel spoilt does not link: .*no_such_instruction"),
        (lambda ptx: ptx.replace(".target sm_90", ".target sm_999"), "kernel spoilt does not link"),
        (lambda ptx: "", "kernel spoilt"),
    ],
)
def test_the_assembler_s_words_are_passed_on(spoil: Any, message: str) -> None:
    kernel = make(1)
    ptx, entry = compile_ptx(kernel.function, kernel.signature, HOPPER)
    assert isinstance(link(ptx, entry, HOPPER, "whole"), CompiledKernel)
    with pytest.raises(DeviceError, match=f"(?s){message}"):
        link(spoil(ptx), entry, HOPPER, "spoilt")


def test_types_that_are_known_change_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of operators that met the same numbers before, also as constants: as if Numba looked for them each time."""

    def made() -> str:
        def mixed(out: Any, count: Any, scale: Any) -> None:
            place = uint32(cuda.threadIdx.x)
            while int64(place) < count:
                word, half = uint32(place * uint32(3) + uint32(1)), place // uint32(2)
                out[place] = float32(word) * scale + (out[half] if place > 4 else -scale) / (place + 1)
                place = uint32(place + uint32(32))

        ptx, _ = compile_ptx(mixed, (types.Array(types.float32, 1, "C"), types.int64, types.float32), HOPPER)
        return re.sub(r"_ZN\w+", "", ptx)

    made()
    known = made()
    monkeypatch.setattr(types.Function, "get_call_type", BaseFunction.get_call_type)
    assert made() == known


@pytest.mark.wide
def test_what_tests_of_a_gpu_launch_is_compiled_without_one(tmp_path: Path, repository: Path) -> None:
    """By `pytest --compile-only`: nothing is asserted, launched or failed."""
    options = ("-p", "no:cacheprovider", "-W", "ignore", "--assert=plain", "-s", "--basetemp", str(tmp_path / "base"))
    chosen = ("-m", "gpu", "-k", "2-8 or 4-72", "--compile-only", "sm_90", "tests/gpu/test_embed.py")
    ran = subprocess.run(
        [sys.executable, "-O", "-m", "pytest", *options, *chosen],
        cwd=repository,
        env={**os.environ, "LOWLAT_KERNEL_CACHE": str(tmp_path / "kernels")},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    kernels = list((tmp_path / "kernels").iterdir())
    assert kernels and f"{len(kernels)} kernels in {tmp_path / 'kernels'}, {len(kernels)} of them lacked" in ran.stdout


def test_launch_bounds_and_capability_reach_the_ptx() -> None:
    kernel = make(1)
    ptx, entry = compile_ptx(kernel.function, kernel.signature, (12, 0), (96, 3))
    assert ".target sm_120" in ptx
    assert ".maxntid 96" in ptx
    assert ".minnctapersm 3" in ptx
    assert f".entry {entry}(" in ptx


def test_parameters_are_laid_out_as_launches_have_them() -> None:
    """An array is nine words, of which a launch fills each."""

    def touch(array: Any, address: Any, small: Any, natural: Any, scale: Any, big: Any) -> None:
        array[0, 0] = small

    signature = (
        types.Array(types.uint16, 2, "C"), types.int64, types.int32, types.uint32, types.float32, types.uint64,
    )  # fmt: skip
    arguments = (torch.zeros(3, 5, dtype=torch.bfloat16), torch.zeros(7), -4, 7, 0.5, 2**63)
    values = parameters_of(KernelCall(Kernel("touch", touch, signature, 32), (1, 1, 1), arguments))
    ptx, _ = compile_ptx(touch, signature, HOPPER)
    header = ptx[ptx.index(".entry") : ptx.index("{")]
    declared = [line.split()[1] for line in header.splitlines() if ".param" in line]
    sizes = [{".u64": 8, ".b64": 8, ".u32": 4, ".b32": 4, ".f32": 4}[kind] for kind in declared]
    assert [ctypes.sizeof(value) for value in values] == sizes


def test_functions_that_mean_the_same_are_one() -> None:
    """However many kernels make them; a constant of another type or sign is another one."""

    def make(constant: Any) -> Any:
        @device_function
        def add(x: Any) -> Any:
            return x + constant

        return add

    def calling(inner: Any) -> Any:
        @device_function
        def call(x: Any) -> Any:
            return inner(x)

        return call

    constants = (1, True, 1.0, 0.0, -0.0, (1,), (True,), (1, (0.0,)), (1, (-0.0,)))
    made = [make(constant) for constant in constants]
    assert len({id(each) for each in made}) == len(constants)
    assert all(make(constant) is each for constant, each in zip(constants, made, strict=True))
    assert calling(make(1)) is calling(make(1)) and calling(make(1)) is not calling(make(2))
    assert make([1]) is not make([1])  # it may change


@pytest.mark.second
def test_processes_compile_the_same_code(repository: Path) -> None:
    """Whatever order hashes and addresses give to sets, and whatever they compiled before: the sampler calls many."""
    code = """
import hashlib, sys
from lowlat.kernels.sampling import row_pairs, sample
from lowlat.kernels.toolchain.compiler import compile_kernel
kernels = [*row_pairs.examples(), *sample.examples()]
for kernel in kernels if sys.argv[1] == "forward" else kernels[::-1]:
    made = compile_kernel(kernel, (9, 0))
    print(kernel.name, made.entry, hashlib.sha256(made.code).hexdigest())
"""
    found = []
    for seed, order in (("1", "forward"), ("2", "backward")):
        done = subprocess.run(
            [sys.executable, "-c", code, order], env={**os.environ, "PYTHONHASHSEED": seed}, cwd=repository,
            capture_output=True, text=True, timeout=250, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found.append(sorted(done.stdout.splitlines()))
    assert found[0] == found[1] and len(found[0]) > 2
