"""This tour writes two layers as a Program, runs them with the reference, and lowers them to kernels. Read it first.

A layer here is a norm, a matrix product and a residual sum, so that the Program fits a screen. `lowlat.models.decoder`
writes a decoder's layers in the same way.
"""

import torch

from lowlat.executors.reference.executor import bind
from lowlat.executors.workspace import SharedWorkspace
from lowlat.graphs import BufferSet, BufferSpec, Role
from lowlat.graphs.program import Program, ProgramBuilder, Stage
from lowlat.kernels.reference import OPERATIONS
from lowlat.kernels.toolchain.kernel import H200
from lowlat.lowering.binding import Binding
from lowlat.lowering.device_weights import DeviceWeights
from lowlat.lowering.lower import lower

ROWS, WIDTH, EPS, CPU = 2, 64, 1e-5, torch.device("cpu")


def two_layers() -> Program:
    """Write x += norm(x) W for two layers: operations on named buffers, whose dtypes are the rounding points."""
    builder = ProgramBuilder("two layers", OPERATIONS)
    builder.declare(BufferSpec("x.0", (ROWS, WIDTH), torch.bfloat16, Role.STATE))  # STATE outlives a step
    builder.declare(BufferSpec("row_live", (ROWS,), torch.uint8, Role.STATE))
    for layer in range(2):
        x, out = f"x.{layer}", builder.scratch(f"x.{layer + 1}", (ROWS, WIDTH), torch.bfloat16)
        normed = builder.scratch("normed", (ROWS, WIDTH), torch.bfloat16)
        product = builder.scratch("product", (ROWS, WIDTH), torch.float32)
        own = {"weight": f"layers.{layer}.norm.weight"}
        reads = {"x": x, "row_live": "row_live"}
        builder.emit("rms_norm", Stage.VERIFY, reads=reads, writes={"out": normed}, weights=own, eps=EPS)
        own = {"weight": f"layers.{layer}.w.weight"}
        builder.emit("linear", Stage.VERIFY, reads={"x": normed}, writes={"out": product}, weights=own, row_block=8)
        builder.emit("add", Stage.VERIFY, reads={"a": x, "b": product}, writes={"out": out})
    return builder.build()  # checks every operation against its schema


def random_weights() -> dict[str, torch.Tensor]:
    """Draw the weights, by canonical name."""
    generator = torch.Generator().manual_seed(0)
    weights = {f"layers.{n}.norm.weight": torch.ones(WIDTH, dtype=torch.bfloat16) for n in range(2)}
    for layer in range(2):
        weight = torch.randn(WIDTH, WIDTH, generator=generator) * WIDTH**-0.5
        weights[f"layers.{layer}.w.weight"] = weight.bfloat16()
    return weights


def test_the_reference_runs_what_the_program_means() -> None:
    program, weights = two_layers(), random_weights()
    buffers = BufferSet(program.specs(*Role), CPU, program.constants)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    buffers["x.0"].copy_(x)
    buffers["row_live"].fill_(1)
    for _, meaning, arguments in bind(program, buffers, weights):
        meaning(**arguments)
    for layer in range(2):  # the same in plain torch, rounded at the same points
        normed = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)).bfloat16()
        x = (x.float() + normed.float() @ weights[f"layers.{layer}.w.weight"].float().T).bfloat16()
    torch.testing.assert_close(buffers["x.2"], x, rtol=1e-2, atol=1e-2)


def test_the_same_program_lowers_to_one_launch_a_layer() -> None:
    """The GEMM takes the norm as its prologue and the sum as its epilogue; unfused, each operation has a kernel."""
    program, weights = two_layers(), random_weights()
    buffers = BufferSet(program.specs(*Role), CPU, program.constants)
    packed = DeviceWeights(weights, {"layers.0.w.weight", "layers.1.w.weight"}, CPU)
    found = {}
    for fuse in (True, False):
        groups = lower(Binding(program, buffers, packed, H200, SharedWorkspace(CPU)), fuse=fuse)
        assert [op for group in groups for op in group.ops] == list(program.ops)  # each is covered once, in order
        found[fuse] = [[op.kind for op in group.ops] for group in groups]
    assert found[False] == [["rms_norm"], ["linear"], ["add"]] * 2
    assert found[True] == [["rms_norm", "linear", "add"]] * 2
