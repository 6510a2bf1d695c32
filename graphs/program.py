"""A Program is the decode step as data: operations in order, on named buffers whose dtypes fix the rounding points.

A Program says what a step means, not how it is run. Executors lower it: the reference runs each operation by its torch
meaning, the others lower runs of operations to kernels. Every operation is checked against its schema, which stands in
the table of operations that the builder was given; see `lowlat.kernels.reference.OPERATIONS`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

import torch

from lowlat.errors import ConfigError
from lowlat.graphs import BufferSpec, Role
from lowlat.graphs.schema import Operation, OperationSchema
from lowlat.graphs.schema_check import ArrayType, check_operation

__all__ = ["OWN_NAMES", "Op", "Program", "ProgramBuilder", "RangeNames", "Stage", "named"]

Param = int | float | bool | str | None


class Stage(StrEnum):
    """The stages of a step, in order. DRAFT is any speculator's, DRAFT_* the parts of a draft model's pass."""

    PREFILL = "PREFILL"
    ACTIVE_SLOTS = "ACTIVE_SLOTS"
    VERIFY = "VERIFY"
    ACCEPT = "ACCEPT"
    COMMIT = "COMMIT"
    DRAFT = "DRAFT"
    DRAFT_FC = "DRAFT_FC"
    DRAFT_ATTENTION_FMHA = "DRAFT_ATTENTION_FMHA"
    DRAFT_FFN = "DRAFT_FFN"
    DRAFT_LM_HEAD = "DRAFT_LM_HEAD"
    TREE_MASKS = "TREE_MASKS"
    PUBLISH = "PUBLISH"


RangeNames = Mapping[Stage, str]  # of the NVTX ranges of stages, where they are not the stages' own names
OWN_NAMES: RangeNames = MappingProxyType({})
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Op:
    """One operation: its kind, its stage, and which buffers and weights its arguments are.

    kind     the name of the operation in the program's table
    reads    argument name -> buffer it reads
    writes   argument name -> buffer it writes or updates
    weights  argument name -> canonical weight name
    params   argument name -> host constant
    updates  of the buffers that it writes those that it also reads, or writes in part; it overwrites the others whole
    """

    kind: str
    stage: Stage
    reads: Mapping[str, str]
    writes: Mapping[str, str]
    weights: Mapping[str, str]
    params: Mapping[str, Param]
    updates: tuple[str, ...] = ()

    def arguments(self, buffers: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Its buffers and parameters by argument name, weights left out; its schema keeps them apart."""
        named = (*self.reads.items(), *self.writes.items())
        return {**{name: buffers[buffer] for name, buffer in named}, **self.params}

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(self.reads.values())}) -> {', '.join(self.writes.values())}"


class _Contents(Mapping[str, torch.Tensor]):
    """The contents of constants by name, each made when it is read."""

    def __init__(self, makers: Mapping[str, Callable[[], torch.Tensor]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


@dataclass(frozen=True)
class Program:
    """A named, ordered list of operations, the buffers they use, the contents of constants, the table of operations.

    range_names  what profiles call its stages, where that is not the stage's own name
    """

    name: str
    ops: tuple[Op, ...]
    buffers: Mapping[str, BufferSpec]
    constants: Mapping[str, torch.Tensor]
    operations: Mapping[str, Operation]
    range_names: RangeNames = field(default_factory=lambda: OWN_NAMES)

    def range_name(self, stage: Stage) -> str:
        """The name of a stage's NVTX range."""
        return self.range_names.get(stage, str(stage))

    @cached_property
    def uses(self) -> Mapping[str, Sequence[tuple[int, bool]]]:
        """The operations that use each buffer, in order: their places, and whether they read what it holds."""
        found: dict[str, list[tuple[int, bool]]] = {}
        for place, op in enumerate(self.ops):
            read = {*op.reads.values(), *op.updates}
            for name in dict.fromkeys((*op.reads.values(), *op.writes.values())):
                found.setdefault(name, []).append((place, name in read))
        return found

    def specs(self, *roles: Role) -> Iterator[BufferSpec]:
        """The buffers with one of the roles."""
        return (spec for spec in self.buffers.values() if spec.role in roles)

    def validate(self) -> None:
        """Check every operation against its schema, that every buffer is declared, and that scratch is written first.

        Raises ConfigError naming the operation, the argument or the buffer, and what was expected and found.
        """
        types = {name: (spec.shape, spec.dtype) for name, spec in self.buffers.items()}
        written: set[str] = set()
        for index, op in enumerate(self.ops):
            try:
                _check_arguments(op, types, self.operations)
                self._check_buffers(op, written)
            except ConfigError as error:
                raise ConfigError(f"{self.name}: op {index} {op.kind}: {error}") from None
            written.update(op.writes.values())

    def _check_buffers(self, op: Op, written: set[str]) -> None:
        """Roles, order, and that no buffer is written through one argument and used through another."""
        reads, writes = set(op.reads.values()), set(op.writes.values())
        buffers = self.buffers
        for name in reads - written:
            if buffers[name].role is Role.SCRATCH:
                raise ConfigError(f"reads {name} before it is written")
        for name in writes:
            role = buffers[name].role
            if role is Role.CONSTANT or role is Role.COMMAND:
                raise ConfigError(f"writes {name}, which it may not: its role is {role}")
        if len(writes) < len(op.writes) or not reads.isdisjoint(writes):
            raise ConfigError("writes a buffer that is also another of its arguments: " + str(op))


def _check_arguments(op: Op, types: Mapping[str, ArrayType], operations: Mapping[str, Operation]) -> None:
    """Check an operation against its schema."""
    try:
        read = tuple([(argument, types[name]) for argument, name in op.reads.items()])
        written = tuple([(argument, types[name]) for argument, name in op.writes.items()])
    except KeyError as error:
        raise ConfigError(f"uses undeclared buffer {error.args[0]}") from None
    known = operations.get(op.kind)
    if known is None:
        raise ConfigError("no such operation in the table of operations (lowlat.kernels.reference.OPERATIONS)")
    _check_fitting(known.schema, read, written, tuple(op.weights), tuple(op.params), *op.params.values())


@lru_cache(maxsize=4096, typed=True)  # layers and buckets are alike: what fitted once is not checked again
def _check_fitting(
    schema: OperationSchema,
    reads: tuple[tuple[str, ArrayType], ...],
    writes: tuple[tuple[str, ArrayType], ...],
    weights: tuple[str, ...],
    params: tuple[str, ...],
    *values: Param,
) -> None:
    check_operation(schema, dict(reads), dict(writes), dict.fromkeys(weights), dict(zip(params, values, strict=True)))


def named(*names: str, **others: str) -> dict[str, str]:
    """Buffers by the arguments of an operation that they are for.

    names   of buffers that are called as their arguments
    others  the other buffers, by argument
    """
    return {**{name: name for name in names}, **others}


@dataclass
class ProgramBuilder:
    """Collects buffers and operations in order; `build` checks and freezes them. `range_names`: see `Program`."""

    name: str
    operations: Mapping[str, Operation]
    range_names: RangeNames = field(default_factory=lambda: OWN_NAMES, kw_only=True)
    _ops: list[Op] = field(default_factory=list)
    _buffers: dict[str, BufferSpec] = field(default_factory=dict)
    _constants: dict[str, Callable[[], torch.Tensor]] = field(default_factory=dict)
    _kept: dict[str, str] = field(default_factory=dict)

    def keep(self, names: Iterable[str], prefix: str) -> None:
        """Let `scratch` declare these names as state, called `prefix` + name, since other programs share it."""
        self._kept.update({name: prefix + name for name in names})

    def declare(self, spec: BufferSpec) -> str:
        """Add a buffer; declaring the same one again is harmless, another of its name raises ConfigError."""
        known = self._buffers.setdefault(spec.name, spec)
        if known != spec:
            raise ConfigError(f"{self.name}: buffer {spec.name} declared as {known} and as {spec}")
        return spec.name

    def scratch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        """Declare a scratch buffer and return its name; see `keep`."""
        if name in self._kept:
            self.declare(BufferSpec(self._kept[name], shape, dtype, Role.STATE))
            return name
        return self.declare(BufferSpec(name, shape, dtype, Role.SCRATCH))

    def constant(self, name: str, content: torch.Tensor) -> str:
        """Declare a constant with its content and return its name."""
        return self.made_constant(name, tuple(content.shape), content.dtype, lambda: content)

    def made_constant(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, make: Callable[[], torch.Tensor]
    ) -> str:
        """Declare a constant whose content `make` gives when it is read, and return its name.

        A program that is listed, checked or planned never reads it.
        """
        self._constants[name] = make
        return self.declare(BufferSpec(name, shape, dtype, Role.CONSTANT))

    def __contains__(self, name: object) -> bool:
        """Whether a buffer of this name is declared."""
        return name in self._buffers or name in self._kept

    def spec(self, name: str) -> BufferSpec:
        """The declaration of a buffer."""
        return self._buffers[self._kept.get(name, name)]

    def emit(
        self,
        kind: str,
        stage: Stage,
        *,
        reads: Mapping[str, str],
        writes: Mapping[str, str],
        weights: Mapping[str, str] | None = None,
        **params: Param,
    ) -> None:
        """Append one operation."""
        reads, writes = self._stored(reads), self._stored(writes)
        known = self.operations.get(kind)
        updated = known.schema.updated if known is not None else ()
        self._ops.append(
            Op(
                kind,
                stage,
                MappingProxyType(reads),
                MappingProxyType(writes),
                MappingProxyType(dict(weights)) if weights else NOTHING,
                MappingProxyType(params) if params else NOTHING,
                tuple([name for argument, name in writes.items() if argument in updated]) if updated else (),
            )
        )

    def _stored(self, arguments: Mapping[str, str]) -> dict[str, str]:
        """Arguments by the names under which their buffers are declared, see `keep`."""
        if not self._kept:
            return dict(arguments)
        return {argument: self._kept.get(name, name) for argument, name in arguments.items()}

    def build(self) -> Program:
        """Check and freeze the program. Raises ConfigError, see `Program.validate`."""
        program = Program(
            self.name,
            tuple(self._ops),
            MappingProxyType(self._buffers),
            _Contents(self._constants),
            self.operations,
            self.range_names,
        )
        program.validate()
        return program
