"""This module emits the checks of a step's lengths, KV blocks and masks that a runtime asks for.

`lowlat.step.decode` calls them between its operations. Without the option a Program has no check.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lowlat.graphs import Bucket, BufferSpec, Role
from lowlat.graphs.program import ProgramBuilder, Stage, named
from lowlat.kernels.reference.step.checks import WIDTH
from lowlat.step.variants import FIRST_TOKEN, WIDE

if TYPE_CHECKING:
    from lowlat.step.state import StepGeometry

__all__ = ["CheckEmitter", "CheckedKinds", "check_specs"]

DROPPED = ("slots", "active", "num_drafts", "slot_ints")  # buffers that every failed check changes
ROWS = ("row_tokens", "row_positions", "row_live", "row_masks", "dense_lens", "num_verified")


@dataclass(frozen=True)
class CheckedKinds:
    """The checks of a runtime's steps.

    falls_back  whether a request whose check fails goes on without drafts until another check fails; else it ends
    """

    masks: bool
    spans: bool
    lengths: bool
    falls_back: bool


def check_specs(max_batch: int, num_entries: int) -> list[BufferSpec]:
    """The buffers of the checks: lengths after the last step, failures of this step, and failures by ring entry."""
    failures = (max_batch + 1, WIDTH)
    return [
        BufferSpec("checked_lengths", (max_batch,), torch.int32, Role.STATE, by_slot=True),
        BufferSpec("check_failures", failures, torch.int64, Role.STATE),
        BufferSpec("ring_checks", (num_entries, *failures), torch.int64, Role.PUBLICATION),
    ]


class CheckEmitter:
    """Appends the checks of `geometry.checks` to a step's Program; None: it appends none."""

    def __init__(self, builder: ProgramBuilder, geometry: "StepGeometry", bucket: Bucket) -> None:
        self._builder, self._geometry, self._bucket = builder, geometry, bucket
        self._kinds = kinds = geometry.checks
        # a first token's row comes from prefill: the step could not be repeated without drafts
        self._is_first_token = bucket.variant == FIRST_TOKEN
        self._falls_back = kinds is not None and kinds.falls_back and not self._is_first_token

    def slots(self) -> None:
        """Check the listed slots, before any operation uses their lengths and tables."""
        kinds, geometry, bucket = self._kinds, self._geometry, self._bucket
        if kinds is None:
            return
        self._emit(
            "check_slots",
            Stage.ACTIVE_SLOTS,
            reads=("lengths", "block_table", "staged_table"),
            writes=(*DROPPED, "checked_lengths", "check_failures"),
            checks_lengths=kinds.lengths,
            checks_spans=kinds.spans,
            falls_back=self._falls_back,
            joins=self._is_first_token,
            rewinds=bucket.variant == WIDE,
            max_context=geometry.max_context,
            max_rows=geometry.max_rows,
            overhang=geometry.overhang,
            block_size=geometry.block_size,
            num_blocks=geometry.num_blocks,
        )

    def rows(self) -> None:
        """Check the rows to verify, before the target runs over them."""
        kinds = self._kinds
        if kinds is None:
            return
        self._emit(
            "check_rows",
            Stage.ACTIVE_SLOTS,
            reads=("lengths", "paths"),
            writes=(*DROPPED, *ROWS, "check_failures"),
            checks_lengths=kinds.lengths,
            checks_spans=kinds.spans,
            checks_masks=kinds.masks,
            falls_back=self._falls_back,
            max_context=self._geometry.max_context,
        )

    def accepted(self) -> None:
        """Check the accepted rows, before they are committed."""
        if self._kinds is None or not self._kinds.lengths:
            return
        self._emit(
            "check_accepted",
            Stage.ACCEPT,
            reads=("accepted_nodes", "row_live", "row_masks", "num_verified"),
            writes=(*DROPPED, "accepted_lens", "check_failures"),
            falls_back=self._falls_back,
        )

    def committed(self) -> None:
        """Check the committed lengths, and publish all failures to the host."""
        if self._kinds is None:
            return
        self._emit(
            "check_commit",
            Stage.COMMIT,
            reads=("commit_lens", "accepted_lens", "lengths", "ring_head"),
            writes=(
                *("slots", "active", "draft_live", "draft_lens"),
                *("checked_lengths", "check_failures", "ring_checks"),
            ),
            checks_lengths=self._kinds.lengths,
        )

    def _emit(
        self, kind: str, stage: Stage, reads: tuple[str, ...], writes: tuple[str, ...], **params: int | bool
    ) -> None:
        self._builder.emit(kind, stage, reads=named(*reads), writes=named(*writes), weights=None, **params)
