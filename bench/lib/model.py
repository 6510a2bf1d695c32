"""This module has the model of a benchmark: a geometry of `lowlat/tools/bench/geometries.toml`, and its formats."""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch

from bench.lib.case import Case
from bench.lib.subjects import known_geometry
from bench.lib.weights import Plan, planned
from lowlat.checkpoint.quantising import Quantiser
from lowlat.graphs import Bucket
from lowlat.models.activations import code_activations
from lowlat.models.geometry import ModelConfig
from lowlat.models.target import coded, rounding
from lowlat.models.weight_plan import weight_plan
from lowlat.speculators.base import Speculator
from lowlat.speculators.tree.dynamic import Topology
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.speculators.vocabulary import DraftVocabulary, cut_speculator
from lowlat.step.state import StepGeometry
from lowlat.tools.bench.geometry import Geometry, random_target
from lowlat.tools.draft_model.random_models import random_speculator

__all__ = ["BLOCK_SIZE", "ROOM", "Model", "bucket_of"]

ROOM = 1024  # tokens past the case's context that replays between resets may add
BLOCK_SIZE = 32


def bucket_of(case: Case, drafted: Topology) -> Bucket:
    """Return the bucket of a case's step with these drafts."""
    return Bucket(case.batch, drafted.num_nodes, drafted.depth)


@dataclass(frozen=True)
class Model:
    """A geometry by its name in the table.

    weights, lm_head, draft  formats of the target's layers, its LM head and the draft model's matrices: "bf16", "fp8",
                             a name in `MATRIX_FORMATS`, or "int4" in the largest groups that all layers allow
    kv                       of the KV cache: "bf16" or "fp8"
    method                   that drafts, where a case does
    draft_vocab_size         of the draft model, whose LM head is the target's where it has none; None: the geometry's
    num_layers               of the target, the first ones; None: all
    activations              of prompts' rows: "bf16", or "fp8", with such weights
    """

    name: str
    weights: str = "bf16"
    lm_head: str = "bf16"
    kv: str = "bf16"
    draft: str = "bf16"
    method: str = "eagle3"
    draft_vocab_size: int | None = None
    num_layers: int | None = None
    activations: str = "bf16"

    @cached_property
    def geometry(self) -> Geometry:
        """The geometry's entry in the table. Raises ConfigError for another name."""
        found, own = known_geometry(self.name), dict[str, Any]()
        if self.draft_vocab_size is not None:
            own["draft_vocab_size"] = self.draft_vocab_size
        if self.num_layers is not None:
            own["boundaries"] = (1, self.num_layers // 2, self.num_layers - 1)
        if found.head is None or not own:
            return found
        return msgspec.structs.replace(found, head=msgspec.structs.replace(found.head, **own))

    @cached_property
    def config(self) -> ModelConfig:
        """The target's geometry."""
        plain = _plain_config(self.name)
        plain = replace(plain, layers=plain.layers[: self.num_layers])
        if self.activations == "fp8":
            rounded = rounding(plain, Quantiser("fp8"), self.name)
            plain = replace(plain, coded_rows=code_activations(rounded, self.name).coded_rows)
        return coded(plain) if self.kv == "fp8" else plain

    @cached_property
    def speculator(self) -> Speculator:
        """The speculator. Raises ConfigError where the geometry has no draft model of the method."""
        found = random_speculator(self.geometry, self.config, self.method)
        config, size = found.draft_config, self.draft_vocab_size
        if config is None or size is None or config.draft_vocab_size == size:
            return found
        return cut_speculator(found, DraftVocabulary(torch.arange(size), None, Path()))

    def plan(self, *, drafts: bool) -> Plan:
        """The weights that the model is held by; drafts: the draft model's, too."""
        plain = dict(weight_plan(self.config))
        if drafts:
            plain |= self.speculator.weight_plan(self.config.dtype)
        return planned(plain, self._format_of)

    def _format_of(self, weight: str) -> str:
        """The format of a linear layer, by its canonical name."""
        drafts, is_lm_head = weight.startswith("draft_model."), weight == "lm_head.weight"
        name = self.draft if drafts else self.lm_head if is_lm_head else self.weights
        if name != "int4":
            return name
        quantiser = rounding(_plain_config(self.name), Quantiser("int4"), self.name).quantiser
        return (quantiser or Quantiser("int4")).packed.name

    def shapes(self, case: Case, drafted: Topology | None = None, **options: Any) -> StepGeometry:
        """The shapes of a case's programs; a draft model is there where the case drafts, and acceptance imposed.

        drafted  None: a chain of the case's draft length
        options  fields in place of these
        """
        drafted = drafted or TreeTopology.chain(case.num_speculative_tokens)
        context, overhang = case.context + ROOM, max(drafted.num_nodes, drafted.num_drafted_rows)
        shapes = StepGeometry(
            config=self.config,
            speculator=self.speculator if case.num_speculative_tokens else None,
            max_batch=case.batch,
            max_context=context,
            max_rows=drafted.num_nodes,
            num_paths=drafted.num_paths,
            path_width=drafted.path_width,
            block_size=BLOCK_SIZE,
            num_blocks=case.batch * -(-(context + overhang) // BLOCK_SIZE) + 1,
            prefill_chunk=128,
            simulated_acceptance=case.acceptance,
            num_drafted_rows=drafted.num_drafted_rows,
        )
        return replace(shapes, **options)


@cache
def _plain_config(name: str) -> ModelConfig:
    with TemporaryDirectory() as directory:
        return random_target(known_geometry(name), Path(directory)).config
