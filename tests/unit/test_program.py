"""Programs as data: order, ownership and shapes are checked before anything runs."""

from dataclasses import replace

import pytest
import torch

from lowlat.errors import ConfigError
from lowlat.executors.reference import bind
from lowlat.graphs import Bucket, BufferSet, BufferSpec, Role
from lowlat.graphs.program import ProgramBuilder, Stage
from lowlat.kernels.reference import OPERATIONS
from lowlat.step.ladder import StepLadder

CPU = torch.device("cpu")


def product() -> ProgramBuilder:
    """A program of one product, which is valid."""
    builder = ProgramBuilder("p", OPERATIONS)
    builder.declare(BufferSpec("x", (2, 4), torch.bfloat16, Role.STATE))
    builder.scratch("y", (2, 8), torch.float32)
    builder.emit("linear", Stage.PREFILL, reads={"x": "x"}, writes={"out": "y"}, weights={"weight": "w.weight"})
    return builder


def test_scratch_must_be_written_before_it_is_read() -> None:
    builder = ProgramBuilder("p", OPERATIONS)
    builder.scratch("a", (1, 4), torch.float32)
    builder.scratch("b", (1, 4), torch.float32)
    builder.emit("cast", Stage.PREFILL, reads={"x": "a"}, writes={"out": "b"})
    with pytest.raises(ConfigError, match=r"op 0 cast: reads a before it is written"):
        builder.build()


def test_undeclared_buffers_are_named() -> None:
    builder = ProgramBuilder("p", OPERATIONS)
    builder.emit("cast", Stage.PREFILL, reads={"x": "nowhere"}, writes={})
    with pytest.raises(ConfigError, match="op 0 cast: uses undeclared buffer nowhere"):
        builder.build()


@pytest.mark.parametrize("role", [Role.COMMAND, Role.CONSTANT])
def test_a_step_may_not_write_what_the_host_owns(role: Role) -> None:
    builder = ProgramBuilder("p", OPERATIONS)
    builder.declare(BufferSpec("a", (2,), torch.int32, role))
    builder.declare(BufferSpec("b", (2,), torch.int32, Role.STATE))
    builder.emit("identity", Stage.PREFILL, reads={"x": "b"}, writes={"out": "a"})
    with pytest.raises(ConfigError, match="writes a, which it may not"):
        builder.build()


def test_one_name_means_one_buffer() -> None:
    builder = ProgramBuilder("p", OPERATIONS)
    builder.scratch("a", (2,), torch.int32)
    assert builder.scratch("a", (2,), torch.int32) == "a"
    with pytest.raises(ConfigError, match="buffer a declared as"):
        builder.scratch("a", (3,), torch.int32)


def test_buffers_keep_their_addresses_and_their_constants() -> None:
    specs = [
        BufferSpec("s", (3, 2), torch.float32, Role.STATE),
        BufferSpec("c", (2,), torch.int32, Role.CONSTANT),
        BufferSpec("s", (3, 2), torch.float32, Role.STATE),
    ]
    buffers = BufferSet(specs, CPU, {"c": torch.tensor([7, 8], dtype=torch.int32)})
    assert len(buffers) == 2
    assert buffers["c"].tolist() == [7, 8]
    assert not buffers["s"].any()
    assert buffers["s"].data_ptr() == buffers["s"].data_ptr()
    assert buffers.num_bytes() == 3 * 2 * 4 + 2 * 4
    assert buffers.num_bytes(Role.CONSTANT) == 8


def test_constants_need_fitting_content() -> None:
    spec = BufferSpec("c", (2,), torch.int32, Role.CONSTANT)
    with pytest.raises(ConfigError, match="buffer c: a constant needs its content"):
        BufferSet([spec], CPU)
    with pytest.raises(ConfigError, match=r"expected torch.int32 \[2\], found torch.int64 \[3\]"):
        BufferSet([spec], CPU, {"c": torch.zeros(3, dtype=torch.int64)})


def test_two_specs_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="buffer a: declared as"):
        BufferSet([BufferSpec("a", (1,), torch.int32, Role.STATE), BufferSpec("a", (2,), torch.int32, Role.STATE)], CPU)


def test_binding_names_the_missing_weight_and_operation() -> None:
    program = product().build()
    with pytest.raises(ConfigError, match=r"needs weight w\.weight, which is missing"):
        bind(program, {"x": torch.zeros(2, 4), "y": torch.zeros(2, 8)}, {})
    unknown = replace(program, ops=(replace(program.ops[0], kind="no_such_thing"),))
    with pytest.raises(ConfigError, match="operation no_such_thing has no reference"):
        bind(unknown, {}, {})


def test_the_ladder_takes_the_smallest_bucket_that_fits() -> None:
    ladder = StepLadder([4, 1, 2], {0: 1, 3: 4})
    assert ladder.choose(1, 0) == Bucket(1, 1, 0)
    assert ladder.choose(3, 3) == Bucket(4, 4, 3)
    assert ladder.choose(2, 3) == Bucket(2, 4, 3)
    sizes = [bucket.batch * bucket.rows for bucket in ladder.buckets]
    assert sizes == sorted(sizes, reverse=True)
    assert len(ladder.buckets) == 6


def test_the_ladder_refuses_by_name() -> None:
    ladder = StepLadder([1, 2], {0: 1, 3: 4})
    with pytest.raises(ConfigError, match=r"3 active slots exceed the largest bucket, 2 \(max_batch\)"):
        ladder.choose(3, 0)
    with pytest.raises(ConfigError, match="num_speculative_tokens 2 has no bucket"):
        ladder.choose(1, 2)
    with pytest.raises(ConfigError, match="S = 0 with one row"):
        StepLadder([1], {3: 4})
    with pytest.raises(ConfigError, match="at least 1"):
        StepLadder([0], {0: 1})


def test_a_constant_that_is_made_is_made_where_it_is_read() -> None:
    builder, made = ProgramBuilder("p", OPERATIONS), list[str]()

    def make() -> torch.Tensor:
        made.append("c")
        return torch.tensor([7, 8], dtype=torch.int32)

    builder.made_constant("c", (2,), torch.int32, make)
    builder.constant("d", torch.tensor([9], dtype=torch.int32))
    program = builder.build()
    assert list(program.constants) == ["c", "d"]
    assert len(program.constants) == 2
    assert [spec.num_bytes for spec in program.specs(Role.CONSTANT)] == [8, 4]
    assert not made
    buffers = BufferSet(program.specs(Role.CONSTANT), CPU, program.constants)
    assert (buffers["c"].tolist(), buffers["d"].tolist(), made) == ([7, 8], [9], ["c"])
