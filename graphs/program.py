"""A Program is the decode step as data: operations in order, on named buffers whose dtypes fix the rounding points.

A Program says what a step computes, not how it runs. The reference executor calls each operation's torch reference; the
other executors lower groups of operations to kernels. The builder has a table of operations, and checks each operation
against its schema in this table; see `lowlat.kernels.reference.OPERATIONS`.
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
    """The stages of a step, in order. Any speculator may use DRAFT; DRAFT_* are the parts of a draft model's pass."""

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


RangeNames = Mapping[Stage, str]  # NVTX range names of stages; a stage that is missing uses its own name
OWN_NAMES: RangeNames = MappingProxyType({})
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Op:
    """One operation: its kind, its stage, and the buffer or weight of each argument.

    kind     the name of the operation in the program's table
    reads    argument name -> buffer it reads
    writes   argument name -> buffer it writes or updates
    weights  argument name -> canonical weight name
    params   argument name -> host constant
    updates  the written buffers that it also reads, or writes only in part; it overwrites all others whole
    """

    kind: str
    stage: Stage
    reads: Mapping[str, str]
    writes: Mapping[str, str]
    weights: Mapping[str, str]
    params: Mapping[str, Param]
    updates: tuple[str, ...] = ()

    def arguments(self, buffers: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The operation's buffers and parameters by argument name, without the weights."""
        named = (*self.reads.items(), *self.writes.items())
        return {**{name: buffers[buffer] for name, buffer in named}, **self.params}

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(self.reads.values())}) -> {', '.join(self.writes.values())}"


class _Contents(Mapping[str, torch.Tensor]):
    """The contents of constants by name; each content is made when it is read."""

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

    range_names  NVTX range names of stages; a stage that is missing uses its own name
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
        """For each buffer, the operations that use it, in order: (index, whether the operation reads its content)."""
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
        """Check every operation against its schema.

        Also checks that every buffer is declared, and that scratch is written before it is read.
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
        """Check roles and order, and that no buffer is written by one argument and used by another."""
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


@lru_cache(maxsize=4096, typed=True)  # layers and buckets repeat the same operations: each is checked once
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
    """A mapping from the arguments of an operation to buffers.

    names   buffers that have the names of their arguments
    others  buffers with other names, by argument
    """
    return {**{name: name for name in names}, **others}


@dataclass
class ProgramBuilder:
    """Collects buffers and operations in order; `build` checks and freezes them. See `Program` for `range_names`."""

    name: str
    operations: Mapping[str, Operation]
    range_names: RangeNames = field(default_factory=lambda: OWN_NAMES, kw_only=True)
    _ops: list[Op] = field(default_factory=list)
    _buffers: dict[str, BufferSpec] = field(default_factory=dict)
    _constants: dict[str, Callable[[], torch.Tensor]] = field(default_factory=dict)
    _kept: dict[str, str] = field(default_factory=dict)

    def keep(self, names: Iterable[str], prefix: str) -> None:
        """Make `scratch` declare these names as state named `prefix` + name, which other programs share."""
        self._kept.update({name: prefix + name for name in names})

    def declare(self, spec: BufferSpec) -> str:
        """Add a buffer. The same one may be declared again; a different one of the same name raises ConfigError."""
        known = self._buffers.setdefault(spec.name, spec)
        if known != spec:
            raise ConfigError(f"{self.name}: buffer {spec.name} declared as {known} and as {spec}")
        return spec.name

    def scratch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        """Declare a scratch buffer and return its name; `keep` makes it state."""
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
        """Declare a constant and return its name. `make` returns the content, and is called when it is read.

        Listing, checking or planning a program never reads it.
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
        """The arguments with the names under which `keep` declares their buffers."""
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
