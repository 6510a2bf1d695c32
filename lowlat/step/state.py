"""This module declares the state that outlives a step: one address and the largest strides for all buckets.

It lists the buffers. The operations in `lowlat.kernels.reference` that read and write a buffer document its meaning.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import torch

from lowlat.errors import ConfigError
from lowlat.graphs import BufferSpec, Paging, Role
from lowlat.graphs.program import OWN_NAMES, ProgramBuilder, RangeNames
from lowlat.kernels.reference.speculation.length_probabilities import NUM_RUNS
from lowlat.kernels.reference.step.publish import RECORD_WIDTH
from lowlat.kernels.reference.step.slot_record import MAX_BIASES, MAX_LOGPROBS, MAX_STOPS, NUM_FLOATS, NUM_INTS
from lowlat.kernels.reference.step.slots import COMMAND_WIDTH
from lowlat.models.geometry import ModelConfig
from lowlat.models.layer_spec import Rotation
from lowlat.models.layers import TORCH_DTYPES, scales_name
from lowlat.models.partial_kv import PartialKV
from lowlat.models.rope import RopeTables
from lowlat.models.walk import Tables
from lowlat.sequence.paged_kv import PagedKV, kv_dtype
from lowlat.sequence.recurrent import RecurrentState
from lowlat.sequence.sparse_lists import SparseLists
from lowlat.sequence.state import SequenceState
from lowlat.sequence.window_pool import WindowPool, kept_windows
from lowlat.speculators.base import Speculator, StateSizes
from lowlat.step.checks import CheckedKinds, check_specs
from lowlat.step.chunks import chunk_counts

__all__ = [
    "PASS_ROWS",
    "RING_ENTRIES",
    "StepGeometry",
    "declare_state",
    "declare_tables",
    "state_specs",
    "waiting_boundaries",
]

RING_ENTRIES, COMMANDS_A_SLOT = 64, 8  # entries of steps in the ring; commands to a slot between two steps
EMPTY: Mapping[str, int] = MappingProxyType({})
MAX_WAITING, MAX_PASS_ROWS = 64, 64  # positions of a slot that wait for the draft model; rows of all slots in a pass
SHORT_STEP = 64  # positions: programs for a part of a chunk have multiples of it
PASS_ROWS = 64  # positions of a prompt whose logits are computed at once, at most: as many as a step's rows


@dataclass(frozen=True)
class StepGeometry:
    """Everything that fixes the shapes of a runtime's programs, apart from the bucket.

    speculator          the method of drafting; None: no speculation
    max_rows            T of the largest bucket
    num_paths           root-to-leaf paths of the topology with the most paths
    path_width          nodes of the longest path, root included
    num_blocks          KV blocks, the null block included
    window_blocks       the same for the pool of each window that has one, ascending; (): num_blocks in each
    num_snapshots       snapshots of recurrent states
    prefill_chunk       positions of a chunk of prefill
    max_prefill_chunks  the most chunks of a prompt that run at once
    num_drafted_rows    rows that a draft model may write after a slot's last token
    max_draft_length    the largest draft length, if the device chooses each step's; None: the bucket fixes it
    forced_rows         rows T of wide steps that verify forced text of grammars, ascending
    partial             SpecPV's sizes; None: rows attend to the whole KV cache
    prompt_logprobs     whether requests may ask for the logprobs of their prompts: prefill then leaves the residual
                        stream of its positions, see `lowlat.step.prompt_logprobs`
    prompt_logits       whether prefill leaves the logits of all its positions; it then runs one whole chunk at a time
    checks              the checks of every step; None: there are none
    """

    config: ModelConfig
    speculator: Speculator | None
    max_batch: int
    max_context: int
    max_rows: int
    num_paths: int
    path_width: int
    block_size: int
    num_blocks: int
    prefill_chunk: int
    max_prefill_chunks: int = 1
    simulated_acceptance: float | None = None
    simulated_seed: int = 0
    max_draft_length: int | None = None
    num_drafted_rows: int = 0
    forced_rows: tuple[int, ...] = ()
    partial: PartialKV | None = None
    prompt_logits: bool = False
    prompt_logprobs: bool = False
    checks: CheckedKinds | None = None
    window_blocks: tuple[int, ...] = ()
    num_snapshots: int = 0

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """The windows of the target's and the draft model's layers that have a pool of blocks, ascending."""
        drafting = () if self.speculator is None else self.speculator.kv_windows
        return kept_windows((*self.config.windows, *drafting), self.max_context)

    @cached_property
    def window_pools(self) -> tuple[WindowPool, ...]:
        """The pools of these windows."""
        blocks = self.window_blocks or (self.num_blocks,) * len(self.windows)
        behind = self.overhang + (0 if self.max_draft_length is None else self.num_waiting)
        if self.partial is not None:  # a refresh, or a verification, begins this many positions earlier
            behind += self.partial.buffer + self.partial.num_queries
        sizes = (self.block_size, self.prefill_sizes[-1], behind, self.overhang)
        return tuple(WindowPool(window, count, *sizes) for window, count in zip(self.windows, blocks, strict=True))

    @property
    def overhang(self) -> int:
        """Positions after a slot's last token whose keys and values a step may write."""
        return max(self.max_rows, self.num_drafted_rows)

    @property
    def num_waiting(self) -> int:
        """The most committed positions of a slot that may wait for the draft model: one pass takes them all."""
        return max(self.max_rows, min(MAX_WAITING, MAX_PASS_ROWS // self.max_batch))

    @property
    def num_text_tokens(self) -> int:
        """The most tokens of the texts that a request may name for drafting; 0: it may name none."""
        return 0 if self.speculator is None else self.speculator.num_text_tokens

    @property
    def most_waiting(self) -> int:
        """`num_waiting` where steps choose their draft length and rows wait for the draft model; else 0."""
        waits = self.max_draft_length is not None and self.speculator is not None and self.speculator.runs_over_rows
        return self.num_waiting if waits else 0

    @property
    def range_names(self) -> RangeNames:
        """NVTX range names of the stages, which depend on the speculator."""
        return OWN_NAMES if self.speculator is None else self.speculator.range_names

    @property
    def state_sizes(self) -> StateSizes:
        """The extents of a speculator's state."""
        return StateSizes(
            self.dtype, kv_dtype(self.config), self.max_batch, self.max_context, self.num_blocks, self.block_size,
            self._blocks_by_window,
        )  # fmt: skip

    @property
    def _blocks_by_window(self) -> dict[int, int]:
        return {pool.window: pool.num_blocks for pool in self.window_pools}

    @cached_property
    def sequence_states(self) -> tuple[SequenceState, ...]:
        """The state that the target's layers keep for a slot between steps."""
        states: list[SequenceState] = [PagedKV(self.config, self.num_blocks, self.block_size, self._blocks_by_window)]
        if self.config.deltas:
            states.append(RecurrentState(self.config, self.max_batch, self.max_rows, self.num_snapshots))
        if self.partial is not None:
            sizes = (self.num_blocks, self.block_size, self.max_batch, self.table_width)
            states.append(SparseLists(self.config, self.partial, *sizes))
        return tuple(states)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of a snapshot of all states that a prefix hit must restore; 0: no state needs one."""
        return sum(state.snapshot_bytes for state in self.sequence_states)

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return TORCH_DTYPES[self.config.dtype]

    @property
    def table_width(self) -> int:
        """Blocks of one slot's table: the context and a step's overhang."""
        return -(-(self.max_context + self.overhang) // self.block_size)

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose keys and values the first pool can hold."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def num_positions(self) -> int:
        """Positions of the RoPE tables: the context, and a padded last chunk or a step's rows after it."""
        return self.max_context + max(self.prefill_sizes[-1], self.max_rows)

    @cached_property
    def prefill_sizes(self) -> tuple[int, ...]:
        """The numbers of positions that have a program of prefill, ascending.

        They are 1, 2, 3, 4, 6, 8, 12, ... chunks up to `max_prefill_chunks`, and for short prompts and last chunks a
        half, a quarter and so on of a chunk, in multiples of SHORT_STEP. With `prompt_logits` there is one: a chunk.
        """
        if self.prompt_logits:
            return (self.prefill_chunk,)
        part = self.prefill_chunk
        sizes = {part * count for count in chunk_counts(self.max_prefill_chunks)}
        while part % (2 * SHORT_STEP) == 0:
            part //= 2
            sizes.add(part)
        return tuple(sorted(sizes))

    def prefill_size(self, num_positions: int) -> int:
        """The smallest of `prefill_sizes` for this many positions. Raises ConfigError if all are too small."""
        for size in self.prefill_sizes:
            if num_positions <= size:
                return size
        raise ConfigError(
            f"{num_positions} positions to prefill at once; max_prefill_chunks {self.max_prefill_chunks} allow "
            f"{self.prefill_sizes[-1]}"
        )

    @property
    def pass_rows(self) -> int:
        """Positions of a prompt whose logits a pass computes."""
        return min(PASS_ROWS, self.prefill_sizes[-1])

    @property
    def refresh_size(self) -> int:
        """Positions that SpecPV's refresh runs over. Raises ConfigError without SpecPV."""
        if self.partial is None:
            raise ConfigError("nothing is refreshed without enable_specpv")
        return self.partial.num_queries if self.partial.lossless else self.prefill_size(self.partial.buffer)

    @cached_property
    def tables(self) -> Mapping[Rotation, tuple[str, RopeTables]]:
        """The RoPE tables of all layers with their names; all programs share them.

        A target's tables are "target", then "target.1" and so on if its layers have different ones. A speculator's own
        tables are "draft", "draft.1" and so on.
        """
        found: dict[Rotation, tuple[str, RopeTables]] = {}
        drafts = () if self.speculator is None else self.speculator.rotations
        for owner, rotations in (("target", self.config.rotations), ("draft", drafts)):
            for number, rotation in enumerate(rotations):
                if rotation not in found:
                    name = f"{owner}.{number}" if number else owner
                    found[rotation] = name, RopeTables(*rotation, self.num_positions)
        return found


def state_specs(geometry: StepGeometry) -> list[BufferSpec]:
    """All buffers of role STATE, COMMAND and PUBLICATION."""
    state = [*_slot_state(geometry), *_host_buffers(geometry), *_kept_state(geometry)]
    state += [] if geometry.checks is None else check_specs(geometry.max_batch, RING_ENTRIES)
    most = geometry.max_draft_length
    return state if most is None else [*state, *_draft_length_state(geometry, most)]


def _slot_state(geometry: StepGeometry) -> list[BufferSpec]:
    batch, rows, vocab = geometry.max_batch, geometry.max_rows, geometry.config.vocab_size
    specs: list[tuple[str, tuple[int, ...], torch.dtype]] = [
        ("slot_ints", (batch, NUM_INTS), torch.int64),
        ("slot_floats", (batch, NUM_FLOATS), torch.float32),
        ("tokens", (batch, geometry.max_context), torch.int32),
        ("lengths", (batch,), torch.int32),
        ("active", (batch,), torch.int32),
        ("block_table", (batch, geometry.table_width), torch.int32),
        ("stop_ids", (batch, MAX_STOPS), torch.int32),
        ("bias_ids", (batch, MAX_BIASES), torch.int32),
        ("bias_values", (batch, MAX_BIASES), torch.float32),
        ("prompt_seen", (batch, vocab), torch.uint8),
        ("output_counts", (batch, vocab), torch.int32),
        ("drafts", (batch, rows), torch.int32),
        ("num_drafts", (batch,), torch.int32),
        ("draft_sources", (batch,), torch.int32),
        ("tree_masks", (batch, rows), torch.int64),
        ("tree_paths", (batch, geometry.num_paths, geometry.path_width), torch.int32),
    ]
    others: list[tuple[str, tuple[int, ...], torch.dtype]] = [
        ("command_head", (1,), torch.int64),
        ("prefilled_slot", (1,), torch.int32),  # this and the next: of the last prefilled prompt, for its first token
        ("prefilled_residual", (1, geometry.config.hidden_size), geometry.dtype),
    ]
    if geometry.prompt_logprobs:
        others.append(("prompt_residual", (geometry.prefill_sizes[-1], geometry.config.hidden_size), geometry.dtype))
        others.append(("prompt_cursor", (1,), torch.int32))
    if geometry.prompt_logits:
        others.append(("prompt_logits", (geometry.prefill_chunk, vocab), torch.float32))
    return [
        *(BufferSpec(name, shape, dtype, Role.STATE, by_slot=True) for name, shape, dtype in specs),
        *(BufferSpec(name, shape, dtype, Role.STATE) for name, shape, dtype in others),
    ]


def waiting_boundaries(geometry: StepGeometry) -> tuple[int, ...]:
    """The target's boundaries whose rows wait for the draft model; () if steps do not choose their draft length."""
    speculator = geometry.speculator
    if geometry.max_draft_length is None or speculator is None:
        return ()
    return speculator.waiting_boundaries or ()


def _draft_length_state(geometry: StepGeometry, most: int) -> list[BufferSpec]:
    """The buffers for the choice of draft lengths, and the features that wait for the draft model."""
    batch, hidden = geometry.max_batch, geometry.config.hidden_size
    boundaries = waiting_boundaries(geometry)
    specs: list[tuple[str, tuple[int, ...], torch.dtype]] = [
        ("draft_length_costs", (batch, 2, most + 2), torch.int32),  # row b: of the bucket of b + 1 slots
        ("length_last", (1,), torch.int32),
        ("length_waited", (1,), torch.int32),
        ("draft_length_choice", (1,), torch.int32),
    ]
    by_slot: list[tuple[str, tuple[int, ...], torch.dtype]] = [
        ("extended", (batch,), torch.int32),
        ("length_probabilities", (batch + 1, NUM_RUNS, most, 2), torch.int32),  # the last row: over all slots
        ("length_runs", (batch,), torch.int32),
        ("length_expected", (batch, most + 1), torch.int32),
    ]
    if boundaries:
        features = (batch, geometry.num_waiting, len(boundaries) * hidden)
        by_slot.append(("waiting_features", features, geometry.dtype))
    floats: list[tuple[str, tuple[int, ...]]] = [
        (f"prefilled_source.{boundary}", (1, hidden)) for boundary in dict.fromkeys(boundaries)
    ]
    return [
        *(BufferSpec(name, shape, dtype, Role.STATE, by_slot=True) for name, shape, dtype in by_slot),
        *(BufferSpec(name, shape, dtype, Role.STATE) for name, shape, dtype in specs),
        *(BufferSpec(name, shape, geometry.dtype, Role.STATE) for name, shape in floats),
        BufferSpec("length_bounds", (2,), torch.int32, Role.COMMAND),
    ]


def _host_buffers(geometry: StepGeometry) -> list[BufferSpec]:
    batch, rows, context = geometry.max_batch, geometry.max_rows, geometry.max_context
    commands: list[tuple[str, tuple[int, ...], torch.dtype]] = [
        ("command_ring", (max(RING_ENTRIES, COMMANDS_A_SLOT * batch), COMMAND_WIDTH), torch.int64),
        ("command_tail", (1,), torch.int64),
        ("staged_ints", (batch, NUM_INTS), torch.int64),
        ("staged_floats", (batch, NUM_FLOATS), torch.float32),
        ("staged_tokens", (batch, context), torch.int32),
        ("staged_table", (batch, geometry.table_width), torch.int32),
        ("staged_stop_ids", (batch, MAX_STOPS), torch.int32),
        ("staged_bias_ids", (batch, MAX_BIASES), torch.int32),
        ("staged_bias_values", (batch, MAX_BIASES), torch.float32),
        ("grammar_masks", (batch, rows, -(-geometry.config.vocab_size // 32)), torch.int32),
        ("grammar_ready", (batch,), torch.int64),
        ("grammar_forced", (batch, rows), torch.int32),
        ("grammar_decided", (batch,), torch.int64),
        ("prefill_tokens", (geometry.prefill_sizes[-1],), torch.int32),
        ("prefill_chunk", (2,), torch.int32),
        ("prefill_live", (geometry.prefill_sizes[-1],), torch.uint8),
        ("prefill_draft_live", (geometry.prefill_sizes[-1],), torch.uint8),
        ("prefill_table", (1, geometry.table_width), torch.int32),
        ("prefill_positions", (geometry.prefill_sizes[-1],), torch.int32),
        ("prefill_draft_positions", (geometry.prefill_sizes[-1],), torch.int32),
        ("prefill_slot", (1,), torch.int32),
        ("prefill_count", (1,), torch.int32),
    ]
    positions = geometry.prefill_sizes[-1]
    if geometry.num_text_tokens:
        commands += [("draft_texts", (batch, geometry.num_text_tokens), torch.int32)]
        commands += [("draft_text_lens", (batch,), torch.int32)]
    if geometry.prompt_logprobs:
        commands += [("prompt_targets", (positions,), torch.int32), ("prompt_ints", (1, NUM_INTS), torch.int64)]
    publications: list[tuple[str, tuple[int, ...], torch.dtype]] = [
        ("ring_records", (RING_ENTRIES, batch, RECORD_WIDTH), torch.int32),
        ("ring_tokens", (RING_ENTRIES, batch, rows), torch.int32),
        ("ring_logprob_values", (RING_ENTRIES, batch, rows, MAX_LOGPROBS + 1), torch.float32),
        ("ring_logprob_ids", (RING_ENTRIES, batch, rows, MAX_LOGPROBS + 1), torch.int32),
        ("ring_head", (1,), torch.int64),
        ("grammar_tokens", (batch, rows), torch.int32),
        ("grammar_paths", (batch, rows), torch.int64),
        ("grammar_lengths", (batch,), torch.int64),
    ]
    if geometry.prompt_logprobs:
        publications += [
            ("prompt_logprob_values", (positions, MAX_LOGPROBS + 1), torch.float32),
            ("prompt_logprob_ids", (positions, MAX_LOGPROBS + 1), torch.int32),
            ("prompt_ranks", (positions,), torch.int32),
        ]
    return [
        *(BufferSpec(name, shape, dtype, Role.COMMAND) for name, shape, dtype in commands),
        *(BufferSpec(name, shape, dtype, Role.PUBLICATION) for name, shape, dtype in publications),
    ]


def _kept_state(geometry: StepGeometry) -> list[BufferSpec]:
    specs = [spec for state in geometry.sequence_states for spec in state.specs()]
    for pool in geometry.window_pools:
        rows = {"block_table": (geometry.max_batch, Role.STATE), "prefill_table": (1, Role.COMMAND)}
        for name, (count, role) in rows.items():
            shape = count, geometry.table_width
            specs.append(BufferSpec(name + pool.suffix, shape, torch.int32, role, by_slot=role is Role.STATE))
    if geometry.speculator is not None:
        specs += geometry.speculator.state_specs(geometry.state_sizes)
    return specs


def declare_state(builder: ProgramBuilder, geometry: StepGeometry, fewer: Mapping[str, int] = EMPTY) -> None:
    """Declare the state in a program, and the scales of quantised KV caches as constants, [2, G] float32 each.

    fewer  numbers of rows by buffer, for buffers of which the program uses fewer rows than there are
    """
    coded, layers = geometry.config.coded_kv, [f"k_cache.{layer}" for layer in geometry.config.caching]
    for spec in state_specs(geometry):
        rows = fewer.get(spec.name)
        builder.declare(spec if rows is None else replace(spec, shape=(rows, *spec.shape[1:])))
        if coded is not None and spec.paging is Paging.POSITIONS and "k_cache" in spec.name:
            own = coded.scales[layers.index(spec.name)] if spec.name in layers else None
            scales = torch.ones(2, spec.shape[1]) if own is None else torch.tensor(own, dtype=torch.float32)
            builder.constant(scales_name(spec.name), scales)


def declare_tables(builder: ProgramBuilder, geometry: StepGeometry) -> Tables:
    """Declare the RoPE tables of the target and the speculator as constants, [C, D / 2] float32 each."""
    return {
        rotation: (
            builder.made_constant(f"{name}.cos", tables.shape, torch.float32, tables.cos),
            builder.made_constant(f"{name}.sin", tables.shape, torch.float32, tables.sin),
        )
        for rotation, (name, tables) in geometry.tables.items()
    }
