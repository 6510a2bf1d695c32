"""From calls to launches and graphs without a GPU: parameters as Numba has them, what a capture may hold, memory."""

import ctypes
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch

from lowlat.errors import ConfigError, DeviceError, ShapeError
from lowlat.executors.launcher import parameters_of
from lowlat.graphs import BufferSet, BufferSpec, Role, aligned_bytes
from lowlat.graphs.audit import audit
from lowlat.graphs.capture import Choice, capture, capture_choice
from lowlat.graphs.launch import KernelLaunch
from lowlat.graphs.loop import capture_loop
from lowlat.graphs.schema import operation
from lowlat.ipc.endpoint import default_endpoint
from lowlat.kernels.toolchain import launches as operations
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import types
from lowlat.options.directories import cache_directory, kernel_cache_directory

SIGNATURE = (types.Array(types.uint16, 2, "C"), types.int64, types.int32, types.uint32, types.float32, types.uint64)
CPU = torch.device("cpu")


def touch(array: Any, address: Any, small: Any, natural: Any, scale: Any, big: Any) -> None:
    """The parameters' kernel: it only has to have them all."""
    array[0, 0] = small


def call_of(*arguments: Any, signature: tuple[Any, ...] = SIGNATURE) -> KernelCall:
    return KernelCall(Kernel("touch", touch, signature, 32), (1, 1, 1), arguments)


@operation(
    """
    read   x, y       float    [N]
    write  out        float    [N]
    """
)
def _add(x: torch.Tensor, y: torch.Tensor | None = None, *, out: torch.Tensor, scale: float = 1.0) -> None:
    """An operation with arguments that may be absent."""


@operation(
    """
    read   x          float    [N]
    read   other{F}   float    [N]
    write  out        float    [N]
    """
)
def _sum(x: torch.Tensor, *, out: torch.Tensor, **others: torch.Tensor) -> None:
    """An operation with any number of arguments."""


@operations.launches(_add)
def _launch_add(given: operations.Given) -> list[KernelCall]:
    return list(given.arrays), given.params, given.symbols  # type: ignore[return-value]


@operations.launches(_sum)
def _launch_sum(given: operations.Given) -> list[KernelCall]:
    return list(given.arrays), given.params, given.symbols  # type: ignore[return-value]


def test_arguments_of_launches_are_bound_as_the_reference_s_signature_has_them() -> None:
    """By name and by place, in the order of the schema; those that are too many, missing or unknown raise TypeError
    with the words of a call of the reference."""
    x, add, total = torch.zeros(4), cast(Any, _launch_add), cast(Any, _launch_sum)
    for found in (add(x, x, out=x), add(out=x, y=x, x=x), add(x, out=x, y=x, scale=1.0)):
        assert found == (["x", "y", "out"], {"scale": 1.0}, {"N": 4})
    assert add(x, out=x, scale=2.5) == add(scale=2.5, out=x, y=None, x=x) == (["x", "out"], {"scale": 2.5}, {"N": 4})
    for found in (total(out=x, other0=x, x=x, other1=x), total(x, other0=x, other1=x, out=x)):
        assert found == (["x", "other0", "other1", "out"], {}, {"F": 2, "N": 4})
    with pytest.raises(ShapeError, match="_sum: has no argument another"):
        total(x, other0=x, out=x, another=x)
    with pytest.raises(ShapeError, match="_add: argument y must be"):
        add(x, torch.zeros(5), out=x)
    for reference, launch, args, given in (
        (_add, add, (), {"out": x}),
        (_add, add, (x,), {}),
        (_add, add, (x, x, x), {"out": x}),
        (_add, add, (x,), {"x": x, "out": x}),
        (_add, add, (), {"x": x, "out": x, "z": x}),
        (_sum, total, (), {"other0": x}),
        (_sum, total, (x, x), {"out": x, "other0": x}),
    ):
        with pytest.raises(TypeError) as expected:
            inspect.signature(reference).bind(*args, **given)
        with pytest.raises(TypeError, match=f"^{re.escape(str(expected.value))}$"):
            launch(*args, **given)


def test_parameters_are_an_array_s_nine_words_and_numbers() -> None:
    """As Numba has them, which a test of the compiler looks at."""
    matrix, other = torch.zeros(3, 5, dtype=torch.bfloat16), torch.zeros(7)
    values = parameters_of(call_of(matrix, other, -4, 7, 0.5, 2**63))
    assert [ctypes.sizeof(value) for value in values] == [*[8] * 9, 8, 4, 4, 4, 8]
    array = [value.value for value in values[:9]]
    assert array == [0, 0, 15, 2, matrix.data_ptr(), 3, 5, 10, 2]
    assert [value.value for value in values[9:]] == [other.data_ptr(), -4, 7, 0.5, 2**63]


def test_the_driver_s_bindings_take_the_parameters() -> None:
    from cuda.core.cu13._kernel_arg_handler import ParamHolder

    values = parameters_of(call_of(torch.zeros(3, 5, dtype=torch.bfloat16), torch.zeros(7), -4, 7, 0.5, 2**63))
    holder = ParamHolder(values)
    pointers = (ctypes.c_void_p * len(values)).from_address(holder.ptr)
    for pointer, value in zip(pointers, values, strict=True):
        assert type(value).from_address(pointer).value == value.value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (torch.zeros(5, 3, dtype=torch.bfloat16).t(), 0),
            r"kernel touch: a tensor of shape \[3, 5\] is not contiguous",
        ),
        ((torch.zeros(3, 5, dtype=torch.bfloat16), torch.zeros(4, 4)[:, 1]), r"shape \[4\] is not contiguous"),
        ((torch.zeros(3, 5), 0), r"kernel touch: .* does not take a tensor of torch.float32 and shape \[3, 5\]"),
        ((torch.zeros(15, dtype=torch.bfloat16), 0), r"does not take a tensor of torch.bfloat16 and shape \[15\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        parameters_of(call_of(*arguments, 0, 0, 0.0, 0))


def test_a_call_has_an_argument_for_each_parameter() -> None:
    with pytest.raises(ValueError, match="touch takes 6 arguments, got 1"):
        call_of(torch.zeros(1, 1, dtype=torch.bfloat16))


def test_where_compiled_kernels_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWLAT_KERNEL_CACHE", "/own")
    assert kernel_cache_directory() == Path("/own")
    monkeypatch.delenv("LOWLAT_KERNEL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert kernel_cache_directory() == Path("/cache/lowlat/kernels")
    monkeypatch.setenv("HOME", "/home/someone")
    for nothing in ("relative", ""):  # a relative path is to be ignored, here as for sockets and fetched models
        monkeypatch.setenv("XDG_CACHE_HOME", nothing)
        assert kernel_cache_directory() == cache_directory() / "kernels"
        assert cache_directory() == Path("/home/someone/.cache/lowlat")
        assert default_endpoint({}) == f"ipc://{cache_directory()}/run/default.sock"


class KernelNode:
    """A node as cuda.core names it."""


class MemcpyNode:
    """Another one."""


class WhileNode:
    """Another one."""


class SwitchNode:
    """Another one."""


LOOPING, SWITCHING = 77, 78  # handles of conditions: of a loop, which runs at least once, and of a choice


class FakeBuilder:
    """A graph builder that collects nodes; `stray` are captured besides, `stray_of_bodies` in bodies of a choice."""

    stray_of_bodies: tuple[Any, ...] = ()
    order_closed: ClassVar[list["FakeBuilder"]] = []

    def __init__(self, stray: tuple[Any, ...] = ()) -> None:
        self.found: list[Any] = list(stray)
        self.uploads: list[Any] = []
        self.replays: list[Any] = []
        self.closed, self.body_stray = False, stray
        self.graph_definition = SimpleNamespace(nodes=lambda: self.found)

    def create_graph_builder(self) -> "FakeBuilder":
        return self

    def begin_building(self, mode: str) -> "FakeBuilder":
        assert mode == "relaxed"
        return self

    def end_building(self) -> None: ...

    def create_condition(self, default_value: int) -> Any:
        return SimpleNamespace(handle=(SWITCHING, LOOPING)[default_value])

    def while_loop(self, condition: Any) -> "FakeBuilder":
        assert condition.handle == LOOPING
        self.found.append(WhileNode())
        return FakeBuilder()

    def switch(self, condition: Any, count: int) -> "list[FakeBuilder]":
        assert condition.handle == SWITCHING
        self.found.append(SwitchNode())
        return [FakeBuilder(self.stray_of_bodies) for _ in range(count)]

    def complete(self) -> "FakeBuilder":
        return self

    def upload(self, stream: Any) -> None:
        self.uploads.append(stream)

    def launch(self, stream: Any) -> None:
        self.replays.append(stream)

    def close(self) -> None:
        self.closed = True
        self.order_closed.append(self)


@pytest.fixture
def issued(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """List the launches: cuda.core's `launch` records a node in the builder."""
    import cuda.core

    seen: list[tuple[Any, ...]] = []

    def launch(target: Any, config: Any, kernel: Any, *arguments: Any) -> None:
        target.found.append(KernelNode())
        seen.append((config, kernel, *arguments))

    monkeypatch.setattr(cuda.core, "launch", launch)
    return seen


def launches(count: int) -> list[KernelLaunch]:
    return [KernelLaunch(f"kernel{k}", f"loaded{k}", f"config{k}", (k, k + 1)) for k in range(count)]


def test_a_capture_holds_its_launches_in_order(issued: list[tuple[Any, ...]]) -> None:
    stream = FakeBuilder()
    graph = capture(stream, launches(3))
    assert issued == [(f"config{k}", f"loaded{k}", k, k + 1) for k in range(3)]
    assert graph.num_kernels == 3
    assert stream.uploads == [stream]
    graph.launch("stream")
    assert stream.replays == ["stream"]
    graph.close()
    assert stream.closed


def test_a_capture_with_anything_else_is_refused(issued: list[tuple[Any, ...]]) -> None:
    with pytest.raises(DeviceError, match=r"must hold 2 kernels, it holds 3 nodes, others: \['MemcpyNode'\]"):
        capture(FakeBuilder((MemcpyNode(),)), launches(2))
    with pytest.raises(DeviceError, match="must hold 2 kernels, it holds 3 nodes"):
        capture(FakeBuilder((KernelNode(),)), launches(2))


@pytest.mark.parametrize(
    ("kinds", "expected", "fits"),
    [
        (["KernelNode"] * 3, 3, True),
        ([], 0, True),
        (["KernelNode"] * 3, 2, False),
        (["KernelNode"] * 2, 3, False),
        (["KernelNode", "MemsetNode"], 2, False),
        (["HostNode"], 1, False),
    ],
)
def test_the_audit_counts_kernels_and_names_the_rest(kinds: list[str], expected: int, fits: bool) -> None:
    if fits:
        audit(kinds, expected)
    else:
        with pytest.raises(DeviceError, match=f"must hold {expected} kernels"):
            audit(kinds, expected)


def test_a_loop_is_one_node_around_its_body(issued: list[tuple[Any, ...]]) -> None:
    handles: list[int] = []

    def body(handle: int) -> list[KernelLaunch]:
        handles.append(handle)
        return launches(2)

    graph = capture_loop(FakeBuilder(), body)
    assert handles == [LOOPING]
    assert graph.num_kernels == 2
    with pytest.raises(DeviceError, match="must be one conditional node"):
        capture_loop(FakeBuilder((KernelNode(),)), body)


@pytest.mark.parametrize("loops", [False, True])
def test_a_choice_is_its_opening_and_one_node_around_its_bodies(
    loops: bool, issued: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    handles: list[tuple[int, ...]] = []

    def part(count: int) -> Any:
        def issue(*own: int) -> list[KernelLaunch]:
            handles.append(own)
            return launches(count)

        return issue

    choice, record = Choice(part(2), [part(3), part(1), part(4)]), capture_loop if loops else capture_choice
    assert record(FakeBuilder(), choice).num_kernels == 10
    bodies = [(LOOPING if loops else 0,)] * 3
    assert handles == [(SWITCHING,), *bodies], "bodies decide about the loop, not about the choice"
    assert [first for _, _, first, _ in issued] == [0, 1, 0, 1, 2, 0, 0, 1, 2, 3]
    with pytest.raises(DeviceError, match="must be one conditional node" if loops else "must hold one conditional"):
        record(FakeBuilder((SwitchNode(),)), choice)
    monkeypatch.setattr(FakeBuilder, "stray_of_bodies", (MemcpyNode(),))
    with pytest.raises(DeviceError, match=r"must hold 3 kernels, it holds 4 nodes, others: \['MemcpyNode'\]"):
        record(FakeBuilder(), choice)


@pytest.mark.parametrize("failing", ["loop", "body"])
def test_what_fails_within_conditional_nodes_ends_the_innermost_capture_first(
    failing: str, issued: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: int) -> list[KernelLaunch]:
        raise ValueError("a wrong argument")

    def works(*_: int) -> list[KernelLaunch]:
        return launches(1)

    monkeypatch.setattr(FakeBuilder, "order_closed", [])
    choice = Choice(fails if failing == "loop" else works, [works, fails if failing == "body" else works])
    outer = FakeBuilder()
    with pytest.raises(DeviceError, match="a wrong argument"):
        capture_loop(outer, choice)
    depth = {"loop": 1, "body": 2}[failing]  # captures that were open
    assert len(FakeBuilder.order_closed) == depth + 1
    assert FakeBuilder.order_closed[-1] is outer


def test_a_graph_that_cannot_be_launched_is_a_device_s_failure(
    issued: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = FakeBuilder()
    graph = capture(stream, launches(1))

    def fail(_: Any) -> None:
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(stream, "launch", fail)
    with pytest.raises(DeviceError, match="cannot be launched: CUDA_ERROR_ILLEGAL_ADDRESS"):
        graph.launch(stream)


SPECS = [
    BufferSpec("a", (3, 5), torch.bfloat16, Role.SCRATCH),
    BufferSpec("b", (1,), torch.int64, Role.SCRATCH),
    BufferSpec("state", (4,), torch.int32, Role.STATE),
    BufferSpec("c", (70,), torch.float32, Role.SCRATCH),
]


def test_scratch_lies_in_the_arena_and_everything_else_elsewhere() -> None:
    assert [aligned_bytes(spec) for spec in SPECS] == [256, 256, 256, 512]
    arena = torch.full((1024,), 255, dtype=torch.uint8)
    buffers = BufferSet(SPECS, CPU, arena=arena)
    places = {name: buffers[name].data_ptr() - arena.data_ptr() for name in ("a", "b", "c")}
    assert places == {"a": 0, "b": 256, "c": 512}
    assert not 0 <= buffers["state"].data_ptr() - arena.data_ptr() < 1024
    for spec in SPECS:
        assert (tuple(buffers[spec.name].shape), buffers[spec.name].dtype) == (spec.shape, spec.dtype)
    buffers["a"].zero_()
    assert arena[:30].eq(0).all()
    assert arena[30:].eq(255).all()
    other = BufferSet(SPECS, CPU, arena=arena)  # the next bucket's
    assert other["c"].data_ptr() == buffers["c"].data_ptr()
    assert other["state"].data_ptr() != buffers["state"].data_ptr()


def test_an_arena_that_is_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match="buffer c: the arena of 1023 bytes is too small"):
        BufferSet(SPECS, CPU, arena=torch.zeros(1023, dtype=torch.uint8))


def test_what_the_host_shares_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros, pinned = torch.zeros, []

    def recorded(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        pinned.append((*shape, pin_memory, "device" in options))
        return zeros(*shape, **options)

    monkeypatch.setattr(torch, "zeros", recorded)
    buffers = BufferSet(SPECS, CPU, pinned={"state"}, arena=zeros(1024, dtype=torch.uint8))
    assert pinned == [((4,), True, False)]
    assert buffers["state"].tolist() == [0, 0, 0, 0]
