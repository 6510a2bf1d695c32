"""Our step of a gpt-oss with random weights that are made on the device, experts in their packed form from the start.

63 GB are neither carried nor loaded: codes are random bits, all of which are numbers, and scales keep activations at
their size. No two experts are alike, so the L2 helps no more than it does with real ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from bench.gpt_oss_cases import IMPOSED, OssCase, OssModel, draft_config, expert_bytes, model_config
from bench.lowlat_step import BLOCK_SIZE, ROOM, ExecutorStep
from lowlat.kernels.formats.mxfp4 import MXFP4, SCALE_OFFSET
from lowlat.kernels.gemm.packing import gate_up_permutation
from lowlat.kernels.moe.packing import PackedExperts, allocate_experts
from lowlat.models.target import coded
from lowlat.models.weight_plan import weight_plan
from lowlat.options.acceptance import acceptance_for
from lowlat.speculators.eagle3.speculator import Eagle3Speculator
from lowlat.speculators.eagle3.weights import draft_weight_plan
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.checks import CheckedKinds
from lowlat.step.state import StepGeometry
from lowlat.tools.profile.times import CallSite

__all__ = ["OssStep", "Weights", "make_step", "make_weights", "shapes_of", "with_experts"]

SCALES = (119, 121)  # 2 ** -8 and 2 ** -7: uniform codes have deviation 2.9, and 2880 columns want 1 / 54
Weights = dict[str, torch.Tensor | PackedExperts]


def make_weights(
    model: OssModel, device: torch.device, *, alike: bool, draft_vocab_size: int, seed: int = 0
) -> Weights:
    """Random weights of a target and its head, by canonical names, matrices row-major, experts packed.

    alike  routers ignore their rows: a layer's bias alone chooses, another choice in each layer
    """
    generator = torch.Generator(device).manual_seed(seed)
    config = model_config(model, ROOM)
    head = draft_config(model, draft_vocab_size, ROOM)
    weights: Weights = {}
    for name, (shape, dtype) in {**weight_plan(config), **draft_weight_plan(head)}.items():
        if name.endswith(("blocks", "scales")):
            continue
        if dtype == torch.int32:
            chosen = torch.randperm(model.vocab_size, generator=generator, device=device)[: shape[0]]
            weights[name] = chosen.sort().values.to(torch.int32)
            continue
        tensor = torch.empty(shape, dtype=dtype, device=device)
        weights[name] = tensor.normal_(*_spread(name, shape, alike), generator=generator)
    for layer in range(model.num_layers):
        weights.update(_layer_experts(model, layer, device, generator))
    return weights


def _spread(name: str, shape: tuple[int, ...], alike: bool) -> tuple[float, float]:
    """Mean and deviation of a weight, so that activations keep their size and routers spread their rows."""
    if "router" in name:
        if alike:
            return 0.0, float(name.endswith("bias"))
        return 0.0, 0.0 if name.endswith("bias") else shape[-1] ** -0.5
    if "norm" in name:
        return 1.0, 0.1
    if name.endswith("bias"):
        return 0.0, 0.02
    if name.endswith(("sinks", "embed.weight")):
        return 0.0, 1.0
    return 0.0, shape[-1] ** -0.5


def _layer_experts(
    model: OssModel, layer: int, device: torch.device, generator: torch.Generator
) -> Iterator[tuple[str, PackedExperts]]:
    hidden, inner = model.hidden_size, model.intermediate_size
    shapes = {"gate_up": (2 * inner, hidden, gate_up_permutation(inner)), "down": (hidden, inner, None)}
    for part, (rows, columns, order) in shapes.items():
        packed = allocate_experts(
            MXFP4, num_experts=model.num_experts, rows=rows, columns=columns, order=order, device=device
        )
        packed.words.random_(-(1 << 31), 1 << 31, generator=generator)
        if packed.scales is not None:
            packed.scales.random_(*(scale + SCALE_OFFSET for scale in SCALES), generator=generator)
        yield f"layers.{layer}.experts.{part}", packed


def shapes_of(
    model: OssModel, case: OssCase, drafted: TreeTopology, *, room: int = ROOM, simulated: float | None = IMPOSED
) -> StepGeometry:
    """The shapes of a case's programs; a head is loaded only where the case drafts, and acceptance imposed."""
    step, context = case.step, case.step.context + room
    depth = step.num_speculative_tokens
    drafts = depth > 0
    return StepGeometry(
        config=model_config(model, context),
        speculator=Eagle3Speculator(draft_config(model, case.draft_vocab_size, context)) if drafts else None,
        max_batch=step.batch,
        max_context=context,
        max_rows=drafted.num_nodes,
        num_paths=len(drafted.paths),
        path_width=max(len(path) for path in drafted.paths),
        block_size=BLOCK_SIZE,
        num_blocks=step.batch * -(-(context + drafted.num_nodes) // BLOCK_SIZE) + 1,
        prefill_chunk=128,
        simulated_acceptance=None
        if simulated is None or not drafts
        else acceptance_for(min(simulated, depth + 1.0), depth),
    )


class OssStep(ExecutorStep):
    """One bucket's graph of a case; `checked`: with the checks of a step, see `lowlat.step.checks`."""

    def __init__(
        self,
        model: OssModel,
        case: OssCase,
        weights: Weights,
        device: torch.device,
        *,
        simulated: float | None = IMPOSED,
        has_codes: bool = False,
        checked: bool = False,
    ) -> None:
        drafted = TreeTopology.chain(case.step.num_speculative_tokens)
        self.model = model
        shapes = shapes_of(model, case, drafted, simulated=simulated)
        if has_codes:  # in its KV caches
            shapes = replace(shapes, config=coded(shapes.config))
        if checked:
            every = CheckedKinds(masks=True, spans=True, lengths=True, falls_back=False)
            shapes = replace(shapes, checks=every)
        super().__init__(shapes, case.step, weights, device, drafted)


def with_experts(sites: Sequence[CallSite], model: OssModel, distinct_experts: Sequence[int]) -> list[CallSite]:
    """The sites of a step, with the bytes of the experts that their layers chose."""
    counts = iter(distinct_experts)
    return [
        replace(site, moved_bytes=next(counts) * expert_bytes(model)) if site.kernel.startswith("experts_mlp") else site
        for site in sites
    ]


def make_step(model: OssModel, case: OssCase, weights: Weights, device: torch.device) -> OssStep:
    """The step of a case, ready to be replayed."""
    return OssStep(model, case, weights, device)
