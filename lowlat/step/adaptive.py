"""This module emits steps whose draft length the device chooses: an opening that chooses, and a body for each length.

A body drafts first, then verifies these drafts, accepts, commits and publishes. So one choice a step is enough: it is
the length of the drafts and of the rows. The draft model runs over the positions committed since it last ran; their
features wait in state. A body of length zero runs it only when too many positions wait. The opening lists the active
slots for all bodies, and lays out each slot's only row for the bodies of length zero. A first token's step drafts
nothing.
"""

import torch

from lowlat.graphs import Bucket
from lowlat.graphs.program import Program, Stage, named
from lowlat.speculators.base import WaitedRows
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.decode import StepBuilder
from lowlat.step.state import StepGeometry, waiting_boundaries
from lowlat.step.variants import EXTENDED, is_choice

__all__ = ["build_adaptive"]

SLOTS = ("slots",)
ROWS = (
    *("row_tokens", "row_positions", "row_live", "row_masks", "paths"),
    *("dense_lens", "num_verified", "verified_depth", "verified_source"),
)
RECORD = ("length_probabilities", "length_runs", "length_expected")


def build_adaptive(geometry: StepGeometry, bucket: Bucket) -> Program:
    """The Program of an opening, of a body, or of a first token's step, where the device chooses draft lengths."""
    if is_choice(bucket):
        return _Opening(geometry, bucket, TreeTopology.chain(0)).build()
    return _Body(geometry, bucket, TreeTopology.chain(bucket.num_speculative_tokens)).build()


def _opened(batch: int) -> str:
    """The prefix of the state buffers that a bucket's opening passes to its bodies."""
    return f"opened.{batch}."


class _Opening(StepBuilder):
    """Applies the host's commands, chooses the draft length, and lays out the rows of a step without drafts."""

    def build(self) -> Program:
        """Emit all operations, and check and freeze the program."""
        self.rows = 1
        self.builder.keep((*SLOTS, *ROWS), _opened(self.batch))
        self._apply_commands()
        self._list_slots()
        self.checks.slots()
        self.builder.emit(
            "choose_draft_length",
            Stage.ACTIVE_SLOTS,
            reads=named(
                *("active", "lengths", "extended", "slot_ints"),
                *("length_bounds", "draft_length_costs", "length_expected"),
            ),
            writes=named("length_last", "length_waited", "draft_length_choice"),
            row=self.batch - 1,
            most_waiting=self.geometry.most_waiting,
        )
        self._gather_rows(self.bucket.num_speculative_tokens)
        return self.builder.build()


class _Body(StepBuilder):
    """A step of one draft length."""

    @property
    def extends(self) -> bool:
        """Whether the draft model runs over the waiting positions without drafting."""
        return self.bucket.variant == EXTENDED

    def build(self) -> Program:
        """Emit all stages, and check and freeze the program."""
        depth = self.bucket.num_speculative_tokens
        if self.is_first_token:
            self._active_slots()
            self._gather_rows()
        else:
            self.builder.keep(SLOTS if depth else (*SLOTS, *ROWS), _opened(self.batch))
            self._ints("slots", self.batch)
            self._draft_waiting()
            if depth:
                self._gather_rows()
            else:
                self._rows()
        boundaries = self._target()
        self._accept()
        self._commit()
        self._publish()
        self._keep_features(boundaries)
        if self.is_first_token:
            self._join()
        else:
            self._learn()
        return self.builder.build()

    def _draft_waiting(self) -> None:
        """Emit the draft model's pass over the waiting positions, and this step's drafts."""
        geometry, speculator, depth = self.geometry, self.geometry.speculator, self.bucket.num_speculative_tokens
        if speculator is None or not (depth or self.extends):
            return
        scope = self._scope([], self._waited(geometry.num_waiting if self.extends else geometry.max_rows))
        extended = speculator.emit_extend(scope)
        if depth:
            self._hand_over(scope, speculator.emit_draft(scope, extended))

    def _waited(self, count: int) -> WaitedRows:
        batch, geometry = self.batch, self.geometry
        self.builder.constant("waited.offsets", torch.arange(count, dtype=torch.int32))
        outs = {
            "waiting_tokens": self._ints("waited.tokens", batch, count),
            "counts": self._ints("waited.counts", batch),
            "firsts": self._ints("waited.firsts", batch),
            "draft_live": self._ints("waited.live", batch, dtype=torch.uint8),
            "draft_lens": self._ints("waited.lens", batch),
        }
        reads = named("slots", "lengths", "tokens", "extended")
        self.builder.emit("waiting_rows", Stage.DRAFT_FC, reads=reads, writes=outs)
        names = {
            "accepted_tokens": outs["waiting_tokens"],
            "commit_lens": outs["counts"],
            "dense_lens": outs["firsts"],
            "draft_live": "waited.live",
            "draft_lens": "waited.lens",
        }
        features = None
        if waiting_boundaries(geometry):
            kept = self.builder.spec("waiting_features").shape
            features = self.builder.scratch("waited.features", (batch * count, kept[2]), geometry.dtype)
            reads = named("waiting_features", "slots", firsts=outs["firsts"], counts=outs["counts"])
            self.builder.emit("take_features", Stage.DRAFT_FC, reads=reads, writes=named(out=features))
        return WaitedRows(count, features, names)

    def _keep_features(self, boundaries: list[str]) -> None:
        """Emit the copy of the committed tokens' features to state, where they wait for the draft model."""
        captured, prefilled = waiting_boundaries(self.geometry), self.is_first_token
        if not captured:
            return
        names = [f"prefilled_source.{each}" if prefilled else boundaries[each] for each in captured]
        sources = {f"source{number}": name for number, name in enumerate(names)}
        reads = named("accepted_nodes", "commit_lens", "dense_lens", "slots", **sources)
        self.builder.emit("keep_features", Stage.PUBLISH, reads=reads, writes=named("waiting_features"))

    def _learn(self) -> None:
        """Emit the counting of accepted and rejected drafts, from which later steps choose their lengths."""
        self.builder.emit(
            "learn_draft_lengths",
            Stage.PUBLISH,
            reads=named("slots", "accepted_lens", "num_verified", "verified_source", "dense_lens"),
            writes=named("extended", *RECORD),
            extends=bool(self.bucket.num_speculative_tokens) or self.extends,
        )

    def _join(self) -> None:
        """Emit the reset of a slot's acceptance record, for a new request."""
        reads, writes = named("slots", "lengths", "draft_live"), named("extended", *RECORD, "length_waited")
        self.builder.emit("join_lengths", Stage.COMMIT, reads=reads, writes=writes)
