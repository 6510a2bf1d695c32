"""A speculator drafts tokens for a target; its interface says what it keeps, and what it adds to the programs.

A speculator proposes and the target's step decides. Acceptance, commit and publication belong to the step and are the
same for all of them; so is the host, which knows this interface and no implementation. The methods that can be asked
for by name stand in `lowlat.speculators.methods`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from lowlat.errors import ConfigError
from lowlat.graphs import Bucket, BufferSpec
from lowlat.graphs.program import OWN_NAMES, ProgramBuilder, RangeNames
from lowlat.kernels.formats import matrix_parts
from lowlat.kernels.reference.step.slots import FROM_METHOD
from lowlat.models.geometry import DraftConfig, ModelConfig
from lowlat.models.layer_spec import Rotation
from lowlat.models.layers import TORCH_DTYPES
from lowlat.models.walk import Tables
from lowlat.models.weight_plan import weight_plan
from lowlat.options.speculative import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from lowlat.speculators.tree.dynamic import DynamicTree, Topology
from lowlat.speculators.tree.growth import Growth
from lowlat.speculators.tree.topology import TreeTopology

__all__ = [
    "LoadedSpeculator",
    "PrefillScope",
    "Scope",
    "Speculator",
    "StateSizes",
    "StepScope",
    "WaitedRows",
    "draft_model_of",
    "weight_shapes",
]


@dataclass(frozen=True)
class StateSizes:
    """The extents of the state that a speculator may keep: by slot, by position or by KV block.

    dtype       the target's compute dtype
    kv_dtype    that of KV caches: the same, or uint8 for codes
    num_blocks  KV blocks of the pool, the null block included
    block_size  positions of a block
    windows     blocks of the pool of each window that has one
    """

    dtype: torch.dtype
    kv_dtype: torch.dtype
    max_batch: int
    max_context: int
    num_blocks: int
    block_size: int
    windows: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Scope:
    """The part of a program that a speculator reads and appends to.

    config      the target's geometry
    boundaries  the target's residual stream entering layers 0 to L - 1 and leaving the last: buffer names, [M, N]
    tables      cos and sin of RoPE, [C, D / 2] float32, of the target's rotations and of the speculator's own
    block_size  positions of a KV block
    """

    builder: ProgramBuilder
    config: ModelConfig
    boundaries: Sequence[str]
    tables: Tables
    block_size: int

    @property
    def dtype(self) -> torch.dtype:
        """The target's compute dtype."""
        return TORCH_DTYPES[self.config.dtype]


@dataclass(frozen=True)
class PrefillScope(Scope):
    """A program of prefill. The host writes `prefill_*` before it runs: tokens, table, chunk, live rows, their number.

    size   positions that the program takes
    chunk  positions of one chunk
    """

    size: int
    chunk: int


@dataclass(frozen=True)
class StepScope(Scope):
    """A decode step after its commit, for one bucket.

    Buffers that the step has written by then: `slots`, `accepted_tokens`, `accepted_nodes`, `commit_lens`, `dense_lens`
    (the root's position), `draft_live` (slots that go on) and `draft_lens` (their committed tokens); state: `tokens`,
    `lengths`, `block_table`. The constant `node_offsets` [T] holds 0 to T - 1.
    topology  what the next step is to verify
    waited    the rows that wait for the speculator, where drafting opens a step; None: they are this step's accepted
    is_first_token  the one row came out of prefill, and of the boundaries the last alone is there
    """

    bucket: Bucket
    topology: Topology
    waited: "WaitedRows | None" = None
    is_first_token: bool = False

    @property
    def tree(self) -> TreeTopology:
        """The topology, static."""
        if isinstance(self.topology, DynamicTree):
            raise ValueError(f"a dynamic tree has no choices before its drafts are made: {self.topology}")
        return self.topology

    @property
    def rows(self) -> int:
        """Rows of a slot that the speculator may have to run over."""
        return self.bucket.rows if self.waited is None else self.waited.count

    @property
    def offsets(self) -> str:
        """The constant that counts these rows."""
        return "node_offsets" if self.waited is None else "waited.offsets"

    def buffer(self, name: str) -> str:
        """The buffer of a step that holds `name`, one of those above, of the rows that the speculator runs over."""
        return name if self.waited is None else self.waited.names.get(name, name)

    def reads(self, *names: str) -> dict[str, str]:
        """Arguments of an operation by name, with these buffers."""
        return {name: self.buffer(name) for name in names}

    def draft_nodes(self) -> str:
        """The buffer that drafting fills: [B, T] int32 by node, node 0 unused, -1 from the first missing draft on."""
        return self.builder.scratch("draft_nodes", (self.bucket.batch, self.topology.num_nodes), torch.int32)

    def growth(self) -> Growth:
        """The part that grows the next step's dynamic tree, into `draft_nodes` and `draft_parents`."""
        if not isinstance(self.topology, DynamicTree):
            raise ValueError(f"a tree of {self.topology.num_nodes} nodes is static: it is not grown")
        batch, nodes = self.bucket.batch, self.draft_nodes()
        parents = self.builder.scratch("draft_parents", (batch, self.topology.num_nodes), torch.int32)
        return Growth(self.builder, self.topology, batch, nodes, parents)


@dataclass(frozen=True)
class WaitedRows:
    """Rows committed by earlier steps that the speculator has not run over: up to `count` a slot, oldest first.

    features  the buffer of their features, [B * count, F * Ht]; None for a speculator that reads none
    names     the buffers that stand in for a step's own, by the names of these
    """

    count: int
    features: str | None
    names: Mapping[str, str]


class Speculator(ABC):
    """A way of drafting for one target: geometry and programs, without the content of weights.

    method  its name in `SpeculativeConfig`
    """

    method: ClassVar[str]

    @classmethod
    @abstractmethod
    def plan(cls, options: SpeculativeConfig, target: ModelConfig, directory: Path | None = None) -> Self:
        """The speculator of these options, without reading a weight.

        directory  the target's, of a method whose weights lie in the target's files; None: the target has no files, and
                   the speculator's geometry is what the target's implies
        Raises ConfigError where it cannot draft.
        """

    @classmethod
    @abstractmethod
    def load(cls, options: SpeculativeConfig, target: ModelConfig, directory: Path | None = None) -> "LoadedSpeculator":
        """The speculator of these options with its weights, of its own files or of the target's, checked against the
        target. Raises ConfigError."""

    @classmethod
    def is_in(cls, directory: Path) -> bool:
        """Whether a target's own files have what it drafts with: method "auto" then takes it. Raises ConfigError."""
        return False

    @property
    def draft_config(self) -> DraftConfig | None:
        """The geometry of its draft model; None where it has none."""
        return None

    def with_config(self, config: DraftConfig) -> "Speculator":
        """The same with another geometry of its draft model, rounded at load or a rank's; itself without one."""
        return self

    @property
    def rotations(self) -> tuple[Rotation, ...]:
        """The facts that fix the RoPE tables of its own attention; () where it has no attention."""
        return () if self.draft_config is None else self.draft_config.rotations

    @property
    def draft_sources(self) -> tuple[str, str]:
        """The names, in statistics, of the sources of its drafts: of its own, and of text next to it."""
        return self.method, ""

    @property
    def wide_rows(self) -> tuple[int, ...]:
        """The rows a slot, root included, of wide steps whose proposals it makes, ascending; (): it makes none."""
        return ()

    @property
    def wide_source(self) -> int:
        """The source, by its number in `verified_source`, whose drafts say by being right that a wide step pays."""
        return FROM_METHOD

    @property
    def most_drafts(self) -> int:
        """The longest chain of drafts that it makes."""
        return MAX_SPECULATIVE_TOKENS

    @property
    def longer_draft_length(self) -> int:
        """A draft length above the options', of steps while the drafts of the last ones were accepted; 0: none."""
        return 0

    @property
    def num_text_tokens(self) -> int:
        """Tokens of texts that a request may name to draft from, next to its own; 0: none may be named."""
        return 0

    @property
    def range_names(self) -> RangeNames:
        """The names that profiles give the stages of its steps, where that is not the stages' own names."""
        return OWN_NAMES

    @property
    def attends_everything(self) -> bool:
        """Whether its own attention has no window: it then bounds the context, as the target's does."""
        return False

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """The window of each of its layers in which all lies that rows ever see; None: they see what is before it."""
        return ()

    @property
    def waiting_boundaries(self) -> tuple[int, ...] | None:
        """The boundaries that it needs to run over accepted rows in a later step; () for none; None: it cannot wait.

        Where it can, drafting may open a step, of a width that is chosen again each time.
        """
        return None

    @property
    def runs_over_rows(self) -> bool:
        """Whether it runs over accepted rows, which wait for it where drafting opens a step."""
        return bool(self.waiting_boundaries)

    def state_specs(self, sizes: StateSizes) -> list[BufferSpec]:
        """The buffers of role STATE that it keeps between steps."""
        return []

    def weight_plan(self, dtype: str) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Canonical name -> (shape, dtype) of its own weights in a compute dtype, as `load` gives them."""
        return {}

    @property
    def shared_weights(self) -> Mapping[str, str]:
        """Canonical names of weights that have no storage of their own, each with the name of the one that it is."""
        return {}

    def report(self) -> dict[str, Any]:
        """The method and its settings, as JSON values, for reports and logs."""
        return {"method": self.method}

    def emit_prefill(self, scope: PrefillScope) -> None:
        """Append what it does for the positions of a prompt, after the target's layers.

        It keeps in state of its own the part of the last live row from which it drafts after the first token.
        """
        return

    def emit_extend(self, scope: StepScope) -> tuple[str, ...]:
        """Append what it does with the accepted rows, whether or not the bucket drafts; returns buffers to draft from.

        It runs in every bucket, those of S = 0 too: drafting can then begin again at any step. Of a first token
        the accepted row is that token.
        """
        return ()

    def emit_proposals(self, scope: StepScope) -> str:
        """Append what a wide step is to verify, before it verifies; returns `scope.draft_nodes()`.

        `tokens`, `slots`, `draft_live` and `draft_lens` are there; the topology is the chain of the step's rows.
        """
        raise ValueError(f"method {self.method!r} proposes nothing for wide steps")

    @abstractmethod
    def emit_draft(self, scope: StepScope, extended: tuple[str, ...]) -> str:
        """Append drafting: a level at a time, a block at once, or from text alone; returns `scope.draft_nodes()`."""


def weight_shapes(config: ModelConfig, speculator: Speculator | None) -> dict[str, torch.Tensor]:
    """The canonical weights of a target and a speculator without content; names of one weight have the same tensor."""
    plan = dict(weight_plan(config)) | dict({} if speculator is None else speculator.weight_plan(config.dtype))
    found = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in plan.items()}
    if config.tie_embeddings and not matrix_parts("lm_head.weight", found):
        found["lm_head.weight"] = found["embed.weight"]
    shared = {} if speculator is None else speculator.shared_weights
    return found | {name: found[other] for name, other in shared.items()}


def draft_model_of(options: SpeculativeConfig) -> str:
    """The draft model that the options name. Raises ConfigError where they name none."""
    if options.model is None:
        raise ConfigError(f"method {options.method!r} needs a model: the directory of a draft model")
    return str(options.model)


@dataclass(frozen=True)
class LoadedSpeculator:
    """A speculator and the content of its weights.

    weights    by canonical name, on the CPU
    directory  where they were read; None for a speculator without a checkpoint
    notes      what its user should know
    """

    speculator: Speculator
    weights: Mapping[str, torch.Tensor]
    directory: Path | None = None
    notes: tuple[str, ...] = ()
