"""Two executors in lockstep: after every fused group of the eager one, the reference runs the group's operations on
what the buffers held before it, and every buffer that is live afterwards is compared.
"""

from collections.abc import Mapping
from typing import Any

import torch

from lowlat.executors.eager import EagerExecutor
from lowlat.executors.reference import bind
from lowlat.graphs import Bucket
from lowlat.graphs.program import Op, Program
from lowlat.lowering.lower import LoweredGroup

TOLERANCES = {torch.bfloat16: 1e-2, torch.float32: 2e-5}  # norm-wise
LOGPROBS = 1e-5  # absolute
ROUNDED = 1e-3  # of float32, where a norm that a product keeps to itself is rounded to bfloat16 in between
SHARES = 1e-2  # of experts: the norm that their logits are made of is rounded to bfloat16 in between


class Lockstep:
    """Follows the steps of an eager executor, and the programs that choose first tokens; `compared` counts buffers,
    `problems` names those that differ.

    weights  canonical, as the checkpoint has them, on the executor's device
    """

    def __init__(self, executor: EagerExecutor, weights: Mapping[str, torch.Tensor]) -> None:
        self.executor, self.weights = executor, weights
        self.compared: dict[str, int] = {}
        self.problems: list[str] = []
        self._before: dict[str, torch.Tensor] = {}
        self._groups: list[LoweredGroup] = []
        self._place, self._seen = 0, 0
        self._issue = executor._issue
        executor._issue = self._followed  # type: ignore[method-assign]
        executor.set_hook(self._after)

    def _followed(self, size: Any, meanwhile: Any) -> None:
        if isinstance(size, Bucket):
            self.executor.synchronize()
            self._begin(size)
        self._issue(size, meanwhile)

    def _begin(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._groups = list(self.executor.groups(bucket))
        self._place = self._seen = 0
        self._before = {name: tensor.clone() for name, tensor in self._live().items()}

    def _live(self) -> Mapping[str, torch.Tensor]:
        return {**self.executor.state, **self.executor.scratch(self._bucket)}

    def _after(self, op: Op, arguments: Mapping[str, torch.Tensor]) -> None:
        group = self._groups[self._place]
        self._seen += 1
        if self._seen < len(group.ops):
            return
        self._place, self._seen = self._place + 1, 0
        self._compare(group)

    def _compare(self, group: LoweredGroup) -> None:
        program = self.executor.program(self._bucket)
        part = Program(program.name, group.ops, program.buffers, program.constants, program.operations)
        with torch.inference_mode():
            for _, function, values in bind(part, self._before, self.weights):
                function(**values)
        live = self._live()
        kinds = "+".join(op.kind for op in group.ops)
        for name in group.written:
            norms = (op.writes["out"] for op in group.ops if op.kind == "rms_norm")
            least = ROUNDED if any(each in group.hidden for each in norms) else 0.0
            problem = self._difference(name, self._before[name], live[name], least)
            self.compared[kinds] = self.compared.get(kinds, 0) + 1
            if problem:
                self.problems.append(f"{program.name} {kinds}: {name} {problem}")
        for op in group.ops:
            for name in op.writes.values():
                self._before[name].copy_(live[name])

    def _difference(self, name: str, want: torch.Tensor, got: torch.Tensor, least: float) -> str:
        if name == "tokens":  # a request's tokens past its length are nobody's
            columns = torch.arange(want.shape[1], device=want.device)
            known = columns < self._live()["lengths"][:, None]
            want, got = torch.where(known, want, 0), torch.where(known, got, 0)
        if not want.is_floating_point():
            wrong = int((want != got).sum())
            return f"{wrong} of {want.numel()} differ" if wrong else ""
        want, got = want.double(), got.double()
        if not torch.equal(want.isfinite(), got.isfinite()):
            return "is finite elsewhere"
        want, got = want.nan_to_num(0, 0, 0), got.nan_to_num(0, 0, 0)
        if "logprob" in name:
            worst = float((want - got).abs().max())
            return f"is off by {worst:.2e}" if worst > LOGPROBS * 10 else ""
        error = float((got - want).norm() / want.norm().clamp(min=1e-20))
        limit = max(least, TOLERANCES[self.executor.program(self._bucket).buffers[name].dtype])
        if name == "expert_weights":
            limit = SHARES
        return f"is off by {error:.2e}" if error > limit else ""
