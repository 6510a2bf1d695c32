"""Models that prefill is measured on: their random weights, and the shapes of their programs, without a head."""

from collections.abc import Mapping

import torch

from bench.dense_cases import LLAMA_8B, TINY, Case, DenseGeometry
from bench.dense_cases import make_weights as make_dense_weights
from bench.gpt_oss_cases import MODELS, OssCase, OssModel
from bench.gpt_oss_step import Weights, make_weights, shapes_of
from bench.lowlat_step import step_geometry
from bench.table_step import TableModel, table_shapes, table_weights
from lowlat.kernels.moe.packing import PackedExperts
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.state import StepGeometry

__all__ = ["BY_NAME", "Model", "small_model", "target_shapes", "target_weights"]

Model = OssModel | DenseGeometry | TableModel
LLAMA, QWEN3_MOE = "llama-8b", "qwen3-30b-a3b"
HYBRIDS = ("qwen3.6-35b-a3b", "qwen3.5-27b")
BY_NAME: dict[str, Model] = {**MODELS, LLAMA: LLAMA_8B, QWEN3_MOE: TableModel(QWEN3_MOE)}
BY_NAME |= {name: TableModel(name) for name in HYBRIDS}
BY_NAME |= {
    f"{name}-{weights}": TableModel(name, weights) for name in (LLAMA, QWEN3_MOE) for weights in ("fp8", "int4")
}


def small_model(name: str) -> Model:
    """A tiny dense model with the format of weights that a model of BY_NAME has, where it was rounded to one."""
    model = BY_NAME[name]
    return TableModel("tiny", model.weights) if isinstance(model, TableModel) and model.quantiser else TINY


def target_weights(model: Model, device: torch.device) -> Mapping[str, torch.Tensor | PackedExperts]:
    """A target's random weights."""
    if isinstance(model, TableModel):
        return table_weights(model, device)
    weights: Weights = {}
    if isinstance(model, OssModel):
        weights.update(make_weights(model, device, alike=False, draft_vocab_size=64))
    else:
        weights.update(make_dense_weights(model, device))
    return {name: weight for name, weight in weights.items() if not name.startswith("head.")}


def target_shapes(model: Model, context: int) -> StepGeometry:
    """The shapes of one slot's programs at a context of so many positions."""
    chain, case = TreeTopology.chain(0), Case(1, context, 0)
    if isinstance(model, TableModel):
        return table_shapes(model, case)
    if isinstance(model, OssModel):
        return shapes_of(model, OssCase("", case), chain)
    return step_geometry(model, case, chain)
