"""A speculator drafts tokens for a target. This module has its interface: its state, and its operations in programs.

A speculator drafts, and the target's step decides. Acceptance, commit and publication belong to the step and are the
same for all speculators. The host knows only this interface. `lowlat.speculators.methods` has the methods by name.
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
    """The extents of a speculator's state, which may be by slot, by position or by KV block.

    dtype       the target's compute dtype
    kv_dtype    the dtype of KV caches: the compute dtype, or uint8 for e4m3 codes
    num_blocks  KV blocks of the first pool, the null block included
    block_size  positions of a block
    windows     blocks of the pool of each window that has one, by window
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
    """A program under construction, as a speculator reads it and appends to it.

    config      the target's geometry
    boundaries  the target's residual streams entering layers 0 to L - 1 and leaving the last: buffer names, [M, N]
    tables      cos and sin of RoPE, [C, D / 2] float32, for the target's RoPE settings and the speculator's
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

    size   positions of the program
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
    topology        the chain or tree of drafts that the next step verifies
    waited          the waiting rows, in a step that begins with drafting; None: the rows are this step's accepted ones
    is_first_token  whether the only row comes from prefill; `boundaries` then has only the last one
    """

    bucket: Bucket
    topology: Topology
    waited: "WaitedRows | None" = None
    is_first_token: bool = False

    @property
    def tree(self) -> TreeTopology:
        """The static topology. Raises ValueError for a dynamic tree."""
        if isinstance(self.topology, DynamicTree):
            raise ValueError(f"a dynamic tree has no choices before its drafts are made: {self.topology}")
        return self.topology

    @property
    def rows(self) -> int:
        """Rows of a slot over which the speculator runs, at most."""
        return self.bucket.rows if self.waited is None else self.waited.count

    @property
    def offsets(self) -> str:
        """The constant with the numbers of these rows, 0 and on."""
        return "node_offsets" if self.waited is None else "waited.offsets"

    def buffer(self, name: str) -> str:
        """The buffer that holds `name`, one of the buffers above, for the rows over which the speculator runs."""
        return name if self.waited is None else self.waited.names.get(name, name)

    def reads(self, *names: str) -> dict[str, str]:
        """The arguments `names` of an operation, with the buffers of these names, see `buffer`."""
        return {name: self.buffer(name) for name in names}

    def draft_nodes(self) -> str:
        """The buffer that drafting fills: [B, T] int32 by node; node 0 is unused, missing drafts at the end are -1."""
        return self.builder.scratch("draft_nodes", (self.bucket.batch, self.topology.num_nodes), torch.int32)

    def growth(self) -> Growth:
        """The emitter that grows the next step's dynamic tree, into `draft_nodes` and `draft_parents`."""
        if not isinstance(self.topology, DynamicTree):
            raise ValueError(f"a tree of {self.topology.num_nodes} nodes is static: it is not grown")
        batch, nodes = self.bucket.batch, self.draft_nodes()
        parents = self.builder.scratch("draft_parents", (batch, self.topology.num_nodes), torch.int32)
        return Growth(self.builder, self.topology, batch, nodes, parents)


@dataclass(frozen=True)
class WaitedRows:
    """Committed rows over which the speculator has not run yet: up to `count` a slot, oldest first.

    features  the buffer of their features, [B * count, F * Ht]; None for a speculator that reads none
    names     the buffers that replace the step's buffers, by the names of the latter
    """

    count: int
    features: str | None
    names: Mapping[str, str]


class Speculator(ABC):
    """A method of drafting for one target: geometry and programs, without the content of weights.

    method  its name in `SpeculativeConfig`
    """

    method: ClassVar[str]

    @classmethod
    @abstractmethod
    def plan(cls, options: SpeculativeConfig, target: ModelConfig, directory: Path | None = None) -> Self:
        """Make the speculator from options, without reading weights.

        directory  the target's, for a method whose weights are in the target's files; None: the target has no files,
                   and the target's geometry implies the speculator's
        Raises ConfigError if it cannot draft for the target.
        """

    @classmethod
    @abstractmethod
    def load(cls, options: SpeculativeConfig, target: ModelConfig, directory: Path | None = None) -> "LoadedSpeculator":
        """Make the speculator from options with its weights, from its own files or the target's.

        Raises ConfigError if it does not fit the target.
        """

    @classmethod
    def is_in(cls, directory: Path) -> bool:
        """Whether a target's own files have its weights; method "auto" then chooses it. Raises ConfigError."""
        return False

    @property
    def draft_config(self) -> DraftConfig | None:
        """The geometry of its draft model; None: it has none."""
        return None

    def with_config(self, config: DraftConfig) -> "Speculator":
        """The same with another geometry of its draft model, such as a quantised one or a rank's shard.

        A speculator without a draft model returns itself.
        """
        return self

    @property
    def rotations(self) -> tuple[Rotation, ...]:
        """The RoPE settings of its own attention; (): it has no attention."""
        return () if self.draft_config is None else self.draft_config.rotations

    @property
    def draft_sources(self) -> tuple[str, str]:
        """The names of its drafts' sources in statistics: its own, and text next to it ("": none)."""
        return self.method, ""

    @property
    def wide_rows(self) -> tuple[int, ...]:
        """The rows a slot, root included, of wide steps for which it makes proposals, ascending; (): none."""
        return ()

    @property
    def wide_source(self) -> int:
        """The source, by its number in `verified_source`, whose acceptance decides whether a wide step follows."""
        return FROM_METHOD

    @property
    def most_drafts(self) -> int:
        """The longest chain that it can draft."""
        return MAX_SPECULATIVE_TOKENS

    @property
    def longer_draft_length(self) -> int:
        """A draft length above the options', used while steps accept their drafts; 0: none."""
        return 0

    @property
    def num_text_tokens(self) -> int:
        """The most tokens of the texts that a request may name for drafting, next to its own; 0: it may name none."""
        return 0

    @property
    def range_names(self) -> RangeNames:
        """NVTX range names of the stages of its steps; a stage that is missing uses its own name."""
        return OWN_NAMES

    @property
    def attends_everything(self) -> bool:
        """Whether its own attention has no window; its trained context then limits the runtime's, as the target's."""
        return False

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """The `kv_window` of each of its layers: positions that rows may ever attend to; None: all before the row."""
        return ()

    @property
    def waiting_boundaries(self) -> tuple[int, ...] | None:
        """The boundaries that it needs to run over accepted rows in a later step; (): none; None: it cannot wait.

        If it can wait, a step may begin with drafting, and the device may choose the draft length.
        """
        return None

    @property
    def runs_over_rows(self) -> bool:
        """Whether it runs over accepted rows, which wait for it if steps begin with drafting."""
        return bool(self.waiting_boundaries)

    def state_specs(self, sizes: StateSizes) -> list[BufferSpec]:
        """The buffers of role STATE that it keeps between steps."""
        return []

    def weight_plan(self, dtype: str) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Canonical name -> (shape, dtype) of its own weights in a compute dtype, as `load` returns them."""
        return {}

    @property
    def shared_weights(self) -> Mapping[str, str]:
        """Names of weights without storage of their own, each with the name of the weight that it is."""
        return {}

    def report(self) -> dict[str, Any]:
        """The method and its settings as JSON values, for reports and logs."""
        return {"method": self.method}

    def emit_prefill(self, scope: PrefillScope) -> None:
        """Append its operations over the positions of a prompt, after the target's layers.

        They keep in its state the part of the last live row that it needs to draft after the first token.
        """
        return

    def emit_extend(self, scope: StepScope) -> tuple[str, ...]:
        """Append its operations over the accepted rows; returns the buffers from which `emit_draft` drafts.

        It is called in every bucket, also for S = 0, so that drafting can begin again at any step. In a first token's
        step the accepted row is that token.
        """
        return ()

    def emit_proposals(self, scope: StepScope) -> str:
        """Append the proposals of a wide step, before it verifies; returns `scope.draft_nodes()`.

        It may read `tokens`, `slots`, `draft_live` and `draft_lens`. The topology is the chain of the step's rows.
        """
        raise ValueError(f"method {self.method!r} proposes nothing for wide steps")

    @abstractmethod
    def emit_draft(self, scope: StepScope, extended: tuple[str, ...]) -> str:
        """Append drafting: a level at a time, a block at once, or from text; returns `scope.draft_nodes()`.

        extended  the buffers that `emit_extend` returned
        """


def weight_shapes(config: ModelConfig, speculator: Speculator | None) -> dict[str, torch.Tensor]:
    """The canonical weights of a target and a speculator as tensors without memory; a shared weight is one tensor."""
    plan = dict(weight_plan(config)) | dict({} if speculator is None else speculator.weight_plan(config.dtype))
    found = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in plan.items()}
    if config.tie_embeddings and not matrix_parts("lm_head.weight", found):
        found["lm_head.weight"] = found["embed.weight"]
    shared = {} if speculator is None else speculator.shared_weights
    return found | {name: found[other] for name, other in shared.items()}


def draft_model_of(options: SpeculativeConfig) -> str:
    """The draft model that the options name. Raises ConfigError if they name none."""
    if options.model is None:
        raise ConfigError(f"method {options.method!r} needs a model: the directory of a draft model")
    return str(options.model)


@dataclass(frozen=True)
class LoadedSpeculator:
    """A speculator and the content of its weights.

    weights    by canonical name, on the CPU
    directory  of its files; None for a speculator without a checkpoint
    notes      messages for the user
    """

    speculator: Speculator
    weights: Mapping[str, torch.Tensor]
    directory: Path | None = None
    notes: tuple[str, ...] = ()
