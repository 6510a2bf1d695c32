"""A mixture of experts in prefill of few rows: the step's own products over packed matrices, once for each 64 rows.

A pair's bits so depend on its row and its expert alone, and the host does not wait for the device.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from lowlat.executors.launcher import Launcher
from lowlat.kernels.expert_packing import PackedExperts
from lowlat.kernels.experts_down import experts_down
from lowlat.kernels.experts_gate_up import experts_gate_up
from lowlat.kernels.kernel import KernelCall

__all__ = ["UnitExperts"]


class UnitExperts:
    """Makes the products of one chunk's mixtures; kernels are compiled and loaded when a product is made.

    room  float32, at least [M * R * N]: what each of a row's experts adds to it, of one layer at a time
    """

    def __init__(self, launcher: Launcher, room: torch.Tensor) -> None:
        self._launcher, self._room = launcher, room

    def gate_up(
        self, arguments: Mapping[str, object], *, experts: PackedExperts, bias: torch.Tensor
    ) -> Callable[..., None]:
        """Gate and up products and the clamped SwiGLU over the buffers in `arguments`, as the operation names them.

        bias  [E, 2I] in the matrices' own order
        """
        calls = experts_gate_up(**arguments, weight=experts, bias=bias, card=self._launcher.card)  # type: ignore[arg-type]
        return self._launches(calls)

    def down(
        self,
        activated: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        *,
        experts: PackedExperts,
        bias: torch.Tensor,
        out: torch.Tensor,
    ) -> Callable[..., None]:
        """Down products, weighed and added by rank; they must come right behind `gate_up` of the same ids.

        bias  [E, N]
        """
        count = expert_ids.numel() * experts.rows
        by_rank = self._room[:count].view(*expert_ids.shape, experts.rows)
        launch = self._launches(
            experts_down(
                activated=activated,
                expert_ids=expert_ids,
                expert_weights=expert_weights,
                weight=experts,
                bias=bias,
                out=by_rank,
                card=self._launcher.card,
            )
        )

        def run(**_: object) -> None:
            launch()
            out.zero_()
            for rank in range(by_rank.shape[1]):
                out.add_(by_rank[:, rank])

        return run

    def _launches(self, calls: Sequence[KernelCall]) -> Callable[..., None]:
        self._launcher.compile_ahead(calls)
        launches = [self._launcher.prepare(call) for call in calls]

        def run(**_: object) -> None:
            stream = self._launcher.stream()
            for launch in launches:
                launch.issue(stream)

        return run
