"""The reference executor: every operation by its torch meaning, one after the other, on any device.

It is the executable specification, the default where there is no GPU, and what the others are compared with.
On a CPU, bf16 weights are expanded to float32 once: every product accumulates in float32, and a row's bits do not
depend on its company (measured: MKL's float32 product gives a row the same bits at every place of a block of 8).
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from lowlat.errors import ConfigError
from lowlat.executors import OpHook
from lowlat.graphs import Bucket, BufferSet, Role
from lowlat.kernels.reference import OPERATIONS
from lowlat.program import Op, Program

__all__ = ["ReferenceExecutor", "bind"]

STATE_ROLES = (Role.STATE, Role.COMMAND, Role.PUBLICATION)
Bound = tuple[Op, Callable[..., None], dict[str, object]]


def bind(
    program: Program, buffers: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]
) -> tuple[Bound, ...]:
    """Resolve every operation's arguments once. Raises ConfigError for a missing weight or operation."""
    bound = []
    for op in program.ops:
        function = OPERATIONS.get(op.kind)
        if function is None:
            raise ConfigError(f"{program.name}: operation {op.kind} has no reference")
        arguments: dict[str, object] = {name: buffers[buffer] for name, buffer in op.reads.items()}
        arguments.update((name, buffers[buffer]) for name, buffer in op.writes.items())
        for name, weight in op.weights.items():
            if weight not in weights:
                raise ConfigError(f"{program.name}: operation {op.kind} needs weight {weight}, which is missing")
            arguments[name] = weights[weight]
        arguments.update(op.params)
        bound.append((op, function, arguments))
    return tuple(bound)


class _View(dict[str, torch.Tensor]):
    """State and one program's own buffers, by name."""


class ReferenceExecutor:
    """Runs programs operation by operation; see `lowlat.executors.Executor`.

    programs  the step's programs by bucket
    prefill   the prefill program
    weights   canonical weights; on a CPU they are expanded to float32, integers excepted
    """

    name = "reference"
    asynchronous = False

    def __init__(
        self,
        programs: Mapping[Bucket, Program],
        prefill: Program,
        weights: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        self.device = device
        self._programs = dict(programs)
        self._weights = _place(weights, device)
        every = (*programs.values(), prefill)
        self.state = BufferSet((spec for program in every for spec in program.specs(*STATE_ROLES)), device)
        self._constants: dict[tuple[str, tuple[int, ...]], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._scratch: dict[Bucket, BufferSet] = {}
        self._bound: dict[Bucket, tuple[Bound, ...]] = {}
        self._hook: OpHook | None = None
        for bucket, program in programs.items():
            self._scratch[bucket], self._bound[bucket] = self._allocate(program)
        _, self._prefill = self._allocate(prefill)

    def _allocate(self, program: Program) -> tuple[BufferSet, tuple[Bound, ...]]:
        constants = {name: self._shared(name, content) for name, content in program.constants.items()}
        own = BufferSet(program.specs(Role.SCRATCH, Role.CONSTANT), self.device, constants)
        view = _View(self.state)
        view.update(own)
        return own, bind(program, view, self._weights)

    def _shared(self, name: str, content: torch.Tensor) -> torch.Tensor:
        """One copy of equal constants: RoPE's tables are the same in every bucket."""
        known = self._constants.setdefault((name, tuple(content.shape)), [])
        for source, placed in known:
            if source is content or torch.equal(source, content):
                return placed
        placed = content.to(self.device).contiguous()
        known.append((content, placed))
        return placed

    @torch.inference_mode()
    def step(self, bucket: Bucket) -> None:
        """Run one step; the publication is in the ring when this returns."""
        self._run(self._bound[bucket])

    def wait_published(self, count: int) -> None:
        """A step is published when it returns."""

    @torch.inference_mode()
    def prefill(self) -> None:
        """Run the prefill program over the chunk that the host has written."""
        self._run(self._prefill)

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
    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """Zero KV blocks, the features at their ends included."""
        index = torch.tensor(list(blocks), dtype=torch.long, device=self.device)
        for name, tensor in self.state.items():
            if "_cache" in name or name == "block_features":
                tensor[index] = 0

    def synchronize(self) -> None:
        """Wait for the device, where there is one."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def scratch(self, bucket: Bucket) -> BufferSet:
        """The scratch buffers and constants of a bucket."""
        return self._scratch[bucket]

    def program(self, bucket: Bucket) -> Program:
        """The program of a bucket."""
        return self._programs[bucket]

    def set_hook(self, hook: OpHook | None) -> None:
        """Call `hook(op, arguments)` after every operation."""
        self._hook = hook

    def close(self) -> None:
        """Drop every reference to buffers and weights."""
        self._bound.clear()
        self._scratch.clear()
        self._constants.clear()
        self._prefill = ()
        self._weights = {}


def _place(weights: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Weights on the device; on a CPU floating ones as float32. A tensor that has two names is kept once."""
    placed: dict[int, torch.Tensor] = {}
    result = {}
    for name, tensor in weights.items():
        if id(tensor) not in placed:
            expand = device.type == "cpu" and tensor.is_floating_point()
            placed[id(tensor)] = (tensor.float() if expand else tensor).to(device)
        result[name] = placed[id(tensor)]
    return result
