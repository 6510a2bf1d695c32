"""This module emits the decode step of one bucket: verify, accept, commit, draft, masks, publish.

After a prompt's last chunk the same step runs with two differences (variant FIRST_TOKEN): prefill has already run the
target's layers over the slot's only row, and the step publishes before it drafts. So the first token is sampled as all
others, and the first decode step already verifies drafts.

The speculator emits the drafting. Verification, acceptance and commit are the same for all speculators.
Source of the order and of the rows' meaning: EAGLE-3, arXiv 2503.01840.
"""

from dataclasses import replace

import torch

from lowlat.graphs import Bucket
from lowlat.graphs.program import Program, ProgramBuilder, Stage, named
from lowlat.kernels.reference import OPERATIONS
from lowlat.kernels.reference.step.slot_record import MAX_LOGPROBS
from lowlat.models.decoder import emit_decoder, emit_lm_head
from lowlat.models.layers import Rows, table_of
from lowlat.speculators.base import StepScope, WaitedRows
from lowlat.speculators.tree.dynamic import DynamicTree, Topology
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.checks import CheckEmitter
from lowlat.step.state import StepGeometry, declare_state, declare_tables
from lowlat.step.variants import FIRST_TOKEN, PROPOSED, WIDE

__all__ = ["StepBuilder", "build_step"]

JOIN_STATE = ("slot_ints", "slot_floats", "tokens", "block_table", "stop_ids", "bias_ids", "bias_values")
STAGED = ("ints", "floats", "tokens", "table", "stop_ids", "bias_ids", "bias_values")


def build_step(geometry: StepGeometry, bucket: Bucket, topology: Topology) -> Program:
    """The Program of one step in a bucket; `topology` is the chain or tree that it drafts, with the bucket's rows."""
    return StepBuilder(geometry, bucket, topology).build()


class StepBuilder:
    """Emits one step's stages in order. Shapes: B slots, T rows a slot, M = B * T."""

    def __init__(self, geometry: StepGeometry, bucket: Bucket, topology: Topology) -> None:
        self.geometry = geometry
        self.bucket = bucket
        self.topology = topology
        self.batch, self.rows = bucket.batch, bucket.rows
        self.is_first_token, is_wide = bucket.variant == FIRST_TOKEN, bucket.variant == WIDE
        self.partial = None if is_wide else geometry.partial
        self.is_proposed = bucket.variant == PROPOSED
        # their drafts are for a step of other rows, or the host needs their result to choose the next step
        self.publishes_early = self.is_first_token or is_wide or self.is_proposed
        self.builder = ProgramBuilder(f"step[{bucket}]", OPERATIONS, range_names=geometry.range_names)
        declare_state(self.builder, geometry)
        self.tables = declare_tables(self.builder, geometry)
        self.checks = CheckEmitter(self.builder, geometry, bucket)

    def build(self) -> Program:
        """Emit all stages, and check and freeze the program."""
        self._active_slots()
        if self.is_proposed:
            self._propose()
        self._gather_rows()
        boundaries = self._target()
        self._accept()
        self._commit()
        if self.publishes_early:
            self._publish()
        self._draft(boundaries)
        if not self.publishes_early:
            self._publish()
        return self.builder.build()

    def _ints(self, name: str, *shape: int, dtype: torch.dtype = torch.int32) -> str:
        return self.builder.scratch(name, shape, dtype)

    def _active_slots(self) -> None:
        """Apply the host's commands, and list the active slots."""
        stage = Stage.ACTIVE_SLOTS
        self._ints("slots", self.batch)
        if self.is_first_token:
            self.builder.emit("identity", stage, reads=named(x="prefilled_slot"), writes=named(out="slots"))
        self._apply_commands()
        if not self.is_first_token:
            self._list_slots()
        self.checks.slots()

    def _apply_commands(self) -> None:
        staged = {f"staged_{name}": f"staged_{name}" for name in STAGED}
        updated = (*JOIN_STATE, "command_head", "lengths", "active", "num_drafts", "prompt_seen", "output_counts")
        self.builder.emit(
            "apply_commands",
            Stage.ACTIVE_SLOTS,
            reads=named("command_ring", "command_tail", **staged),
            writes=named(*updated),
        )

    def _list_slots(self) -> None:
        slots = self._ints("slots", self.batch)
        self.builder.emit("list_active_slots", Stage.ACTIVE_SLOTS, reads=named("active"), writes=named(slots=slots))

    def _propose(self) -> None:
        """Emit the speculator's proposals for each slot, which this step verifies."""
        speculator, batch = self.geometry.speculator, self.batch
        if speculator is None:
            return
        outs = {
            "draft_live": self._ints("draft_live", batch, dtype=torch.uint8),
            "draft_lens": self._ints("draft_lens", batch),
        }
        self.builder.emit(
            "open_proposals",
            Stage.ACTIVE_SLOTS,
            reads=named("slots", "lengths"),
            writes=named("draft_sources", **outs),
            source=speculator.wide_source,
        )
        scope = replace(self._scope([]), topology=TreeTopology.line(self.rows))
        self._hand_over(scope, speculator.emit_proposals(scope))

    def _rows(self) -> dict[str, str]:
        """Declare the buffers of the rows to verify; by argument of `gather_rows`."""
        batch, rows = self.batch, self.rows
        return {
            "row_tokens": self._ints("row_tokens", batch, rows),
            "row_positions": self._ints("row_positions", batch, rows),
            "row_live": self._ints("row_live", batch, rows, dtype=torch.uint8),
            "row_masks": self._ints("row_masks", batch, rows, dtype=torch.int64),
            "paths": self._ints("paths", batch, self.geometry.num_paths, self.geometry.path_width),
            "dense_lens": self._ints("dense_lens", batch),
            "num_verified": self._ints("num_verified", batch),
            "verified_depth": self._ints("verified_depth", batch),
            "verified_source": self._ints("verified_source", batch),
        }

    def _gather_rows(self, most_drafts: int = 0) -> None:
        """Lay out the rows to verify: each slot's last token and its drafts.

        most_drafts  in an opening the largest draft length: if the step drafts, its body publishes other rows, and
                     `publish_rows` publishes nothing here; else 0
        """
        stage, emit = Stage.ACTIVE_SLOTS, self.builder.emit
        reads = named(
            *("slots", "lengths", "tokens", "drafts", "num_drafts", "tree_masks", "tree_paths", "slot_ints"),
            *("grammar_forced", "grammar_decided", "draft_sources"),
        )
        emit("gather_rows", stage, reads=reads, writes=self._rows())
        reads = named("slots", "lengths", "slot_ints", "row_tokens", "row_masks")
        if most_drafts:
            reads |= named("draft_length_choice")
        writes = named("grammar_tokens", "grammar_paths", "grammar_lengths")
        emit("publish_rows", stage, reads=reads, writes=writes, most_drafts=most_drafts)
        self.checks.rows()
        if self.partial is not None and not self.is_first_token:
            reads = named("dense_lens", "slots", shifts="partial_shifts")
            emit("list_lens", stage, reads=reads, writes=named(out=self._ints("list_lens", self.batch)))

    def _target(self) -> list[str]:
        """Emit the target's forward to its logits.

        Returns the residual streams at its boundaries, as buffer names; for a first token only the last, from prefill.
        """
        offsets = self.builder.constant("node_offsets", torch.arange(self.rows, dtype=torch.int32))
        rows = Rows(
            prefix="",
            count=self.batch * self.rows,
            live="row_live",
            positions="row_positions",
            attention=named("slots", "block_table", "dense_lens", "row_masks"),
            write=named("slots", "block_table", "row_live", write_lens="dense_lens", offsets=offsets),
            partial=self.partial,
            recurrent=named("slots", "dense_lens", "row_live"),
        )
        stage, config = Stage.VERIFY, self.geometry.config
        if self.is_first_token:
            emit_lm_head(self.builder, config, rows, "prefilled_residual", stage)
            return ["prefilled_residual"]
        boundaries = emit_decoder(self.builder, config, rows, "row_tokens", self.tables, stage)
        for state in self.geometry.sequence_states:
            state.emit_end(self.builder, rows, stage)
        emit_lm_head(self.builder, config, rows, boundaries[-1], stage)
        return boundaries

    def _accept(self) -> None:
        stage, batch, rows, emit = Stage.ACCEPT, self.batch, self.rows, self.builder.emit
        logits = named("row_live", logits="target.logits")
        emit("finite", stage, reads=logits, writes=named(finite=self._ints("finite", batch, rows, dtype=torch.uint8)))
        state = named(
            *("slots", "lengths", "slot_ints", "slot_floats", "prompt_seen", "output_counts"),
            *("bias_ids", "bias_values", "stop_ids", "row_tokens", "row_masks", "grammar_masks", "grammar_ready"),
        )
        targets = named(target_tokens=self._ints("target_tokens", batch, rows))
        emit("sample", stage, reads={**logits, **state}, writes=targets)
        shape = (batch, rows, MAX_LOGPROBS + 1)
        writes = named(
            logprob_values=self.builder.scratch("logprob_values", shape, torch.float32),
            logprob_ids=self._ints("logprob_ids", *shape),
        )
        emit("logprobs", stage, reads={**logits, **targets, **named("slots", "slot_ints")}, writes=writes)
        reads = {**targets, **named("paths", "slots", draft_tokens="row_tokens")}
        writes = named(
            accepted_tokens=self._ints("accepted_tokens", batch, rows),
            accepted_nodes=self._ints("accepted_nodes", batch, rows),
            accepted_lens=self._ints("accepted_lens", batch),
            best_path=self._ints("best_path", batch),
        )
        probability = self.geometry.simulated_acceptance
        if probability is None:
            emit("accept", stage, reads=reads, writes=writes)
        else:
            reads |= named("lengths")
            seed = self.geometry.simulated_seed
            emit("accept_simulated", stage, reads=reads, writes=writes, probability=probability, seed=seed)
        self.checks.accepted()

    def _commit(self) -> None:
        stage, batch, emit = Stage.COMMIT, self.batch, self.builder.emit
        reads = named(
            *("accepted_tokens", "accepted_nodes", "accepted_lens"),
            *("finite", "slots", "lengths", "slot_ints", "stop_ids"),
        )
        writes = named(commit_lens=self._ints("commit_lens", batch), finish=self._ints("finish", batch))
        emit("truncate", stage, reads=reads, writes=writes)
        if not self.is_first_token and (not self.topology.is_chain or self.geometry.num_paths > 1):
            self._compact(stage)
        writes = named(
            *("tokens", "lengths", "active", "output_counts", "num_drafts"),
            draft_live=self._ints("draft_live", batch, dtype=torch.uint8),
            draft_lens=self._ints("draft_lens", batch),
        )
        emit("commit", stage, reads=named("accepted_tokens", "commit_lens", "finish", "slots"), writes=writes)
        self.checks.committed()

    def _compact(self, stage: Stage) -> None:
        of_table: dict[str, list[int]] = {}
        for layer, spec in self.geometry.config.caching.items():
            of_table.setdefault(table_of(self.builder, "block_table", spec.window), []).append(layer)
        for table, layers in of_table.items():  # layers of one table follow each other: they become one launch
            for layer in layers:
                reads = named("accepted_nodes", "commit_lens", "dense_lens", "slots", block_table=table)
                caches = named(k_cache=f"k_cache.{layer}", v_cache=f"v_cache.{layer}")
                self.builder.emit("kv_compact", stage, reads=reads, writes=caches)

    def _draft(self, boundaries: list[str]) -> None:
        """Emit the speculator's pass over the accepted rows and, if the bucket drafts, the next step's drafts."""
        speculator = self.geometry.speculator
        if speculator is None:
            return
        scope = self._scope(boundaries)
        extended = speculator.emit_extend(scope)
        if self.bucket.num_speculative_tokens:
            self._hand_over(scope, speculator.emit_draft(scope, extended))

    def _scope(self, boundaries: list[str], waited: WaitedRows | None = None) -> StepScope:
        return StepScope(
            builder=self.builder,
            config=self.geometry.config,
            boundaries=boundaries,
            tables=self.tables,
            block_size=self.geometry.block_size,
            bucket=self.bucket,
            topology=self.topology,
            waited=waited,
            is_first_token=self.is_first_token,
        )

    def _hand_over(self, scope: StepScope, draft_nodes: str) -> None:
        """Store the drafts with their masks and paths in state, for the step that verifies them."""
        topology, constant = scope.topology, self.builder.constant
        written = named("drafts", "num_drafts", "tree_masks", "tree_paths")
        if isinstance(topology, DynamicTree):
            reads = named("draft_nodes", "draft_parents", "draft_live", "slots")
            self.builder.emit("hand_over_tree", Stage.TREE_MASKS, reads=reads, writes=written)
            return
        width = topology.depth + 1
        paths = [[*path, *[-1] * (width - len(path))] for path in topology.paths]
        reads = {
            "draft_nodes": draft_nodes,
            **scope.reads("draft_live", "slots"),
            "topology_masks": constant("topology.masks", torch.tensor(topology.packed_masks, dtype=torch.int64)),
            "topology_paths": constant("topology.paths", torch.tensor(paths, dtype=torch.int32)),
        }
        self.builder.emit("tree_masks", Stage.TREE_MASKS, reads=reads, writes=written)

    def _publish(self) -> None:
        reads = named(
            *("slots", "commit_lens", "accepted_lens", "accepted_tokens", "accepted_nodes", "finish"),
            *("num_verified", "verified_depth", "verified_source", "lengths", "logprob_values", "logprob_ids"),
        )
        writes = named("ring_records", "ring_tokens", "ring_logprob_values", "ring_logprob_ids", "ring_head")
        self.builder.emit("publish", Stage.PUBLISH, reads=reads, writes=writes)
