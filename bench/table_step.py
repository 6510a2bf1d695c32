"""Our step of a geometry of the table `lowlat/tools/bench/geometries.toml`, without drafts, with random weights.

Weights are made on the device one at a time, and rounded there where another format is asked for, so that a model that
fits a GPU once is never held twice.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bench.dense_cases import Case
from bench.lowlat_step import BLOCK_SIZE, ROOM, ExecutorStep
from lowlat.checkpoint.quantising import QuantisedWeights, Quantiser
from lowlat.checkpoint.source import WeightSource
from lowlat.errors import ConfigError
from lowlat.models.geometry import ModelConfig
from lowlat.models.target import rounding
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.state import StepGeometry
from lowlat.tools.bench.geometry import RandomWeights, random_target, read_geometries
from lowlat.tools.bench.step_bytes import program_bytes, weight_sizes

__all__ = ["TableModel", "TableStep", "table_shapes", "table_weights"]


@dataclass(frozen=True)
class TableModel:
    """A geometry by its name in the table, and the format of its linear layers: bf16, fp8 or int4."""

    geometry: str
    weights: str = "bf16"

    @property
    def quantiser(self) -> Quantiser | None:
        """The rounding of its layers; None for plain ones. Raises ConfigError for another format."""
        if self.weights not in ("bf16", "fp8", "int4"):
            raise ConfigError(f"weights {self.weights!r}; there are 'bf16', 'fp8' and 'int4'")
        return None if self.weights == "bf16" else Quantiser("fp8" if self.weights == "fp8" else "int4")

    @property
    def config(self) -> ModelConfig:
        """The target's geometry."""
        plain = _plain_config(self.geometry)
        return plain if self.quantiser is None else rounding(plain, self.quantiser, self.geometry)


@cache
def _plain_config(geometry: str) -> ModelConfig:
    with TemporaryDirectory() as directory:
        return random_target(read_geometries()[geometry], Path(directory)).config


def table_weights(model: TableModel, device: torch.device, seed: int = 0) -> WeightSource:
    """A target's random weights, made as they are streamed."""
    plain, quantiser = RandomWeights(_plain_config(model.geometry), seed, device), model.config.quantiser
    return plain if quantiser is None else QuantisedWeights(plain, quantiser)


def table_shapes(model: TableModel, case: Case) -> StepGeometry:
    """The shapes of a case's programs."""
    context = case.context + ROOM
    return StepGeometry(
        config=model.config,
        speculator=None,
        max_batch=case.batch,
        max_context=context,
        max_rows=1,
        num_paths=1,
        path_width=1,
        block_size=BLOCK_SIZE,
        num_blocks=case.batch * -(-(context + 1) // BLOCK_SIZE) + 1,
        prefill_chunk=128,
    )


class TableStep(ExecutorStep):
    """One bucket's graph of a case."""

    def __init__(self, model: TableModel, case: Case, device: torch.device) -> None:
        if case.num_speculative_tokens:
            raise ConfigError(f"a table's step drafts nothing, and S is {case.num_speculative_tokens}")
        self.model = model
        drafted = TreeTopology.chain(0)
        super().__init__(table_shapes(model, case), case, table_weights(model, device), device, drafted)

    def bytes(self, distinct_experts: float | None) -> int:
        """Bytes that a step must read, of an MoE layer those of so many experts a layer."""
        experts, lengths = self.model.config.experts, [float(self.case.context)] * self.case.batch
        share = 1.0 if experts is None else experts.share_read(distinct_experts or 0.0)
        return program_bytes(self.executor.program(self.bucket), weight_sizes(self.model.config), lengths, share)
