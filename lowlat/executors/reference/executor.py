"""The reference executor runs every operation by its torch meaning, one after the other, on any device.

It is the executable specification, the default where there is no GPU, and what the others are compared with.
On a CPU, bf16 weights are expanded to float32 once: every GEMM accumulates in float32, and a row's bits do not
depend on its company (measured: MKL's float32 GEMM gives a row the same bits at every place of a block of 8). Decode
reads a large model's weights as bf16, in panels of their own, with the same bits.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

import torch

from lowlat.checkpoint.source import streamed
from lowlat.errors import ConfigError
from lowlat.executors import LaunchCounts, OpHook, chosen_body
from lowlat.executors.allocation import STATE_ROLES, SharedConstants, clear_blocks, first_rows, release_cached_memory
from lowlat.executors.block_moves import BlockMover, ContentMover
from lowlat.executors.residence.base import Residence
from lowlat.graphs import Bucket, BufferSet, Role
from lowlat.graphs.program import Op, Program, Stage
from lowlat.graphs.scratch import place_scratch
from lowlat.kernels.formats import dequantised, matrix_format, matrix_parts
from lowlat.kernels.reference import OPERATIONS
from lowlat.kernels.reference.gemm.linear import ROW_BLOCK, packed_linear
from lowlat.kernels.reference.gemm.packed import PackedWeight, pack
from lowlat.lowering.weight_parts import MatrixParts
from lowlat.step.variants import PASS, is_choice

__all__ = ["Bound", "ReferenceExecutor", "bind", "meaning_of"]

FEWEST_BYTES = 64 << 20  # of decode's weights on a CPU: fewer lie in its caches, where packing gains little
MOST_BYTES = 4 << 30  # of the packed copies of them
Bound = tuple[Op, Callable[..., None], dict[str, object]]


def bind(
    program: Program, buffers: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]
) -> tuple[Bound, ...]:
    """Resolve every operation's arguments once. Raises ConfigError for a missing weight or operation.

    A quantised matrix, given by its parts, is expanded to float32 for each operation that reads it.
    """
    check_meanings(program, weights)
    bound = []
    for op in program.ops:
        arguments = op.arguments(buffers)
        for name, weight in op.weights.items():
            arguments[name] = weights[weight] if weight in weights else dequantised(weight, weights)
        bound.append((op, meaning_of(program, op), arguments))
    return tuple(bound)


def check_meanings(program: Program, weights: Mapping[str, torch.Tensor]) -> None:
    """Raise ConfigError for a missing weight or operation."""
    for op in program.ops:
        meaning_of(program, op)
        for weight in op.weights.values():
            if weight not in weights and not matrix_parts(weight, weights):
                raise ConfigError(f"{program.name}: operation {op.kind} needs weight {weight}, which is missing")


def meaning_of(program: Program, op: Op) -> Callable[..., None]:
    """An operation's reference. Raises ConfigError for one that has none."""
    found = OPERATIONS.get(op.kind)
    if found is None:
        raise ConfigError(f"{program.name}: operation {op.kind} has no reference")
    return found.function


class ReferenceExecutor:
    """Runs programs operation by operation; see `lowlat.executors.Executor`.

    programs  the step's programs by bucket
    prefills  the prefill programs by the positions that they take, ascending; see `build_prefills`
    weights   canonical weights; expanded to float32 on a CPU, integers excepted; quantised matrices are expanded on
              every device
    hooks     False: hooks are refused
    given     buffers of the state that are another's; None: all are its own
    residence where weights and paged state lie, so that they can leave the device; None: they stay there
    """

    name = "reference"
    asynchronous = False

    def __init__(
        self,
        programs: Mapping[Bucket, Program],
        prefills: Mapping[int, Program],
        weights: Mapping[str, torch.Tensor],
        device: torch.device,
        *,
        hooks: bool = True,
        given: BufferSet | None = None,
        residence: Residence | None = None,
    ) -> None:
        self.device, self.residence = device, residence
        self._takes_hooks = hooks
        self._programs = dict(programs)
        self._weights = _place(weights, device)
        if residence is not None:
            kept = {id(weight): residence.keep(weight) for weight in self._weights.values()}
            self._weights = {name: kept[id(weight)] for name, weight in self._weights.items()}
        every = (*programs.values(), *list(prefills.values())[-1:])
        specs = (spec for program in every for spec in program.specs(*STATE_ROLES))
        paged = None if residence is None else residence.zeros
        self.state = BufferSet(specs, device, given=given, paged=paged)
        self._constants = SharedConstants(device)
        self._packs = _packs(programs.values(), self._weights)
        self._prefills = dict(prefills)
        self._prepared: dict[Bucket | int, tuple[BufferSet, tuple[Bound, ...]]] = {}
        self._hook: OpHook | None = None
        every = (*programs.values(), *prefills.values())
        for program in every:
            check_meanings(program, self._weights)
        self.counts = LaunchCounts(library_calls=sum(len(program.ops) for program in every))

    @torch.inference_mode(False)  # a hook may change what it is shown
    def _prepare(self, key: Bucket | int) -> tuple[BufferSet, tuple[Bound, ...]]:
        """A program's own buffers and its operations, made at its first use: few of the buckets are ever used."""
        known = self._prepared.get(key)
        if known is None:
            program = self._prefills[key] if isinstance(key, int) else self._programs[key]
            specs, places = program.specs(Role.SCRATCH, Role.CONSTANT), place_scratch(program)
            arena = torch.zeros(places.num_bytes, dtype=torch.uint8, device=self.device)
            constants = self._constants.place(program.constants)
            own = BufferSet(specs, self.device, constants, arena=arena, offsets=places.offsets)
            view = {**self.state, **own, **first_rows(program, self.state)}
            known = self._prepared[key] = own, self._packed(bind(program, view, self._weights))
        return known

    def _packed(self, bound: tuple[Bound, ...]) -> tuple[Bound, ...]:
        """The same operations with decode's GEMMs packed."""
        operations = list(bound)
        for index, (op, _, arguments) in enumerate(bound):
            if _is_decode_gemm(op) and (packed := self._packs.get(op.weights["weight"])) is not None:
                operations[index] = (op, packed_linear, {**arguments, "weight": packed})
        return tuple(operations)

    @torch.inference_mode()
    def step(self, bucket: Bucket, meanwhile: Callable[[], None] | None = None) -> None:
        """Run one step; the publication is in the ring when this returns. `meanwhile`: see `Executor`."""
        if is_choice(bucket):
            bucket = chosen_body(bucket, self.state, lambda part: self._run(self._prepare(part)[1]))
        bound = self._prepare(bucket)[1]
        if meanwhile is not None:
            listing = (place for place, (op, _, _) in enumerate(bound) if op.stage is Stage.ACTIVE_SLOTS)
            count = 1 + max(listing, default=-1)
            self._run(bound[:count])
            meanwhile()
            bound = bound[count:]
        self._run(bound)

    def wait_until(self, seen: Callable[[], bool]) -> None:
        """Return at once: a step has written all that it tells the host before it calls `meanwhile`."""

    def wait_published(self, count: int) -> None:
        """Return at once: a step is published when `step` returns."""

    def wait_for_ranks(self, count: int) -> None:
        """Return at once: all ranks of a device are one executor."""

    @torch.inference_mode()
    def prefill(self, size: int, first: Bucket | None = None, passes: int = 0) -> None:
        """Run the prefill program of so many positions, passes, and the one that chooses the first token after it."""
        self._run(self._prepare(size)[1])
        for _ in range(passes):
            self._run(self._prepare(PASS)[1])
        if first is not None:
            self._run(self._prepare(first)[1])

    def _run(self, bound: tuple[Bound, ...]) -> None:
        hook = self._hook
        if hook is None:
            for _, function, arguments in bound:
                function(**arguments)
            return
        for op, function, arguments in bound:
            function(**arguments)
            hook(op, {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)})

    @torch.inference_mode()
    def write_state(self, values: Mapping[str, torch.Tensor]) -> None:
        """Write buffers of the state by name."""
        for name, value in values.items():
            self.state[name].copy_(value)

    def peek(self, buffers: Sequence[torch.Tensor]) -> Callable[[], Sequence[torch.Tensor] | None]:
        """See `Executor.peek`: what was started is done."""
        copies = [each.cpu().clone() for each in buffers]
        return lambda: copies

    @cached_property
    def movers(self) -> tuple[BlockMover, ...]:
        """The copies of blocks between each rank's state and host memory."""
        stream = torch.cuda.current_stream() if self.device.type == "cuda" else None
        return (BlockMover(self.state, self.device, stream),)

    @property
    def mover(self) -> ContentMover:
        """The copies of blocks of all ranks."""
        return self.movers[0]

    @torch.inference_mode()
    def clear_blocks(self, blocks: Sequence[int], pool: str = "") -> None:
        """Zero KV blocks of a pool, the features at their ends included."""
        self.counts.copies += self.device.type == "cuda"
        clear_blocks(self.state, blocks, self.device, pool)

    def synchronize(self) -> None:
        """Wait for the device, where there is one."""
        if self.device.type == "cuda":
            self.counts.synchronisations += 1
            torch.cuda.synchronize(self.device)

    def scratch(self, bucket: Bucket) -> BufferSet:
        """The scratch buffers and constants of a bucket."""
        return self._prepare(bucket)[0]

    def program(self, bucket: Bucket) -> Program:
        """The program of a bucket."""
        return self._programs[bucket]

    def set_hook(self, hook: OpHook | None) -> None:
        """Call `hook(op, arguments)` after every operation. Raises ConfigError where hooks are refused."""
        if hook is not None and not self._takes_hooks:
            raise ConfigError("hooks between operations are for debugging, which perf_mode 'strict' refuses")
        self._hook = hook

    def close(self) -> None:
        """Drop every reference to programs, buffers and weights."""
        self._hook = None
        self._programs.clear()
        self._prepared.clear()
        self._constants.clear()
        self._prefills.clear()
        self._packs.clear()
        self._weights.clear()
        self.state.clear()
        if self.residence is not None:
            self.residence.close()
        release_cached_memory(self.device)


def _is_decode_gemm(op: Op) -> bool:
    """Whether a GEMM has a step's rows, as they are: prefill's blocks are larger, or its rows may be codes."""
    is_small = op.params.get("row_block", ROW_BLOCK) == ROW_BLOCK
    return op.kind == "linear" and is_small and op.params.get("activations") is None


def _packs(programs: Iterable[Program], weights: Mapping[str, torch.Tensor]) -> dict[str, PackedWeight]:
    """Decode's weights packed, where that is worth it and as far as MOST_BYTES go."""
    names = {op.weights["weight"] for program in programs for op in program.ops if _is_decode_gemm(op)} & set(weights)
    packs: dict[str, PackedWeight] = {}
    if sum(weights[name].nbytes for name in names) < FEWEST_BYTES:
        return packs
    left = MOST_BYTES
    for name in sorted(names):
        packed = pack(weights[name]) if weights[name].nbytes // 2 <= left else None
        if packed is not None:
            packs[name] = packed
            left -= packed.nbytes
    return packs


def _place(weights: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Weights on the device; on a CPU floating ones as float32, and quantised matrices on any device.

    A tensor that has two names is kept once.
    """
    result: dict[str, torch.Tensor] = {}
    waiting = MatrixParts(weights)
    with streamed(weights, device) as stream:
        for names, tensor in stream:
            if waiting.owns(names[0]):
                matrix = waiting.take(names[0], tensor)
                if matrix is not None:
                    result[matrix[0]] = matrix_format(matrix[1]).dequantise(matrix[1], torch.float32).to(device)
                continue
            expand = device.type == "cpu" and tensor.is_floating_point()
            placed = (tensor.float() if expand else tensor).to(device)
            result.update(dict.fromkeys(names, placed))
    return result
