"""This module computes the sizes of a model, a speculator and a runtime by part, from their configs alone."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lowlat.checkpoint.quantising import Quantiser, rounding_bytes
from lowlat.checkpoint.stored import ahead_bytes
from lowlat.engine.loading.geometry import make_geometry, rank_geometries
from lowlat.engine.loading.pool_size import fill_devices
from lowlat.engine.loading.programs import build_rank, make_ladder
from lowlat.engine.loading.speculation import make_topologies
from lowlat.engine.memory.plan import MemoryNeed, plan_rank
from lowlat.executors.devices import DeviceChoice, rank_devices
from lowlat.executors.make import planned_gpus
from lowlat.graphs import Bucket, BufferSpec, Paging
from lowlat.graphs.program import Program
from lowlat.kernels.formats import numbers_an_entry
from lowlat.models.activations import code_activations
from lowlat.models.rank_weights import rank_weights
from lowlat.models.target import coded, read_model_config, rounding, target_groups
from lowlat.options.model_names import display_name
from lowlat.options.runtime import RuntimeConfig
from lowlat.options.slots import fit_slots
from lowlat.options.speculative import SpeculativeConfig
from lowlat.speculators.base import weight_shapes
from lowlat.speculators.methods import plan_speculator
from lowlat.speculators.tree.dynamic import Topology
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.decode import build_step
from lowlat.step.ladder import StepLadder
from lowlat.step.state import StepGeometry

__all__ = ["Plan", "buffer_dict", "parts_of", "plan_runtime", "prefill_dict"]

WeightPlan = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
PART_OF = {  # the last name but the tensor's own: `layers.3.qkv.weight` is qkv
    **dict.fromkeys(("embed",), "embedding"),
    **dict.fromkeys(("qkv", "qk", "q", "kv", "o", "gate", "q_norm", "k_norm", "sinks"), "attention"),
    **dict.fromkeys((f"delta_{part}" for part in ("in", "ba", "conv", "a", "dt", "norm", "out")), "delta_nets"),
    **dict.fromkeys(("gate_up", "down"), "ffn"),
    **dict.fromkeys(("router", "experts", "shared", "shared_gate"), "experts"),
    **dict.fromkeys((f"per_layer_{part}" for part in ("embed", "projection", "norm", "gate", "out")), "per_layer"),
    **dict.fromkeys(("attn_norm", "ffn_norm", "norm", "embed_norm", "hidden_norm", "input_norm", "fc_norm"), "norms"),
    **dict.fromkeys((f"post_{part}_norm" for part in ("attn", "ffn", "dense", "experts", "per_layer")), "norms"),
    **dict.fromkeys(("router_norm", "pre_experts_norm", "scalar"), "norms"),
    **dict.fromkeys(("fc",), "fc"),
    **dict.fromkeys(("lm_head",), "lm_head"),
    **dict.fromkeys(("draft_to_target",), "draft_map"),
}


def parts_of(plan: WeightPlan) -> dict[str, dict[str, int]]:
    """Return parameters and bytes by part and in total, as the weights' formats count them; maps have no parameters."""
    parts: dict[str, dict[str, int]] = {}
    for name, (shape, dtype) in plan.items():
        count = 1
        for extent in shape:
            count *= extent
        numbers = numbers_an_entry(name.rpartition(".")[2])
        parameters = count * (int(dtype.is_floating_point) if numbers is None else numbers)
        for part in (_part(name), "total"):
            entry = parts.setdefault(part, {"parameters": 0, "bytes": 0})
            entry["parameters"] += parameters
            entry["bytes"] += count * dtype.itemsize
    parts["total"] = parts.pop("total")
    return parts


def _part(name: str) -> str:
    pieces = [piece for piece in name.split(".") if not piece.isdecimal() and piece not in ("layers", "draft_model")]
    return PART_OF.get(pieces[0], pieces[0])


@dataclass(frozen=True)
class Plan:
    """A runtime's shapes and programs, with weights that have only shapes, and the host memory of its load.

    ranks  the shapes of each GPU's shard of the target; one entry for a single GPU
    """

    geometry: StepGeometry
    ranks: tuple[StepGeometry, ...]
    topologies: Mapping[int, Topology]
    ladder: StepLadder
    weights: Mapping[str, torch.Tensor]
    read_ahead_bytes: int
    made_bytes: int

    def program(self, batch: int, num_speculative_tokens: int, rank: int = 0) -> Program:
        """The step's program in one bucket."""
        topology = self.topologies[num_speculative_tokens]
        return build_step(self.ranks[rank], Bucket(batch, topology.num_nodes, num_speculative_tokens), topology)

    def kv_bytes_per_token(self, program: Program) -> dict[str, int]:
        """Return the bytes of one more token in the caches of the target, and of the draft model (`head_`).

        Caches of layers with sliding windows do not grow with the text. Their bytes are separate (`window_`), for
        target and draft model together, while the token is in the window.
        """
        speculator, size = self.geometry.speculator, self.geometry.block_size
        own = [] if speculator is None else speculator.state_specs(self.geometry.state_sizes)
        caches = [spec for spec in program.buffers.values() if spec.paging is Paging.POSITIONS]
        found = {"bytes_per_token": 0, "head_bytes_per_token": 0}
        for spec in caches:  # [P, G, block, D] each
            part = (
                "window_bytes_per_token" if spec.pool else "head_bytes_per_token" if spec in own else "bytes_per_token"
            )
            found[part] = found.get(part, 0) + spec.num_bytes // (spec.shape[0] * size)
        return found

    def filled(self, options: RuntimeConfig, choice: DeviceChoice) -> "Plan":
        """The plan with a KV cache of all that its GPUs have left. Raises ConfigError for GPUs that are not here."""
        needs = [self._need(choice, rank) for rank in range(len(self.ranks))]
        devices = rank_devices(choice, len(self.ranks), options.devices)
        geometry, ranks = fill_devices(self.geometry, self.ranks, options, needs, devices)
        return replace(self, geometry=geometry, ranks=tuple(ranks))

    def memory(self, choice: DeviceChoice, rank: int = 0) -> dict[str, int]:
        """Bytes on a rank's device by part and in all, and the most that the host holds, Python and libraries left
        out."""
        need = self._need(choice, rank)
        on_host = need.total_bytes if choice.device.type == "cpu" else 0
        return {
            **need.parts(),
            "total_bytes": need.total_bytes,
            "host_load_bytes": need.host_load_bytes,
            "host_peak_bytes": need.host_load_bytes + on_host,
        }

    def _need(self, choice: DeviceChoice, rank: int) -> MemoryNeed:
        """The memory that a rank needs."""
        own_rank = build_rank(self.ranks[rank], self.ladder, self.topologies)
        every = (*own_rank.programs.values(), *own_rank.prefills.values())
        speculator, dtype = self.geometry.speculator, self.geometry.config.dtype
        own = () if speculator is None else speculator.weight_plan(dtype)
        gpus = planned_gpus(choice, [choice.device])
        plan = plan_rank(
            every,
            rank_weights(self.weights, self.ranks[rank].config),
            choice.device,
            gpus[0] if gpus else None,
            host_load_bytes=self.read_ahead_bytes + self.made_bytes + sum(self.weights[name].nbytes for name in own),
            rank=(rank, len(self.ranks)),
        )
        return plan.need


def plan_runtime(target: Path, options: RuntimeConfig, speculative: SpeculativeConfig | None) -> Plan:
    """The plan of `Runtime.load` with these options. Raises ConfigError."""
    config = read_model_config(target, dtype=options.dtype)
    if options.quantize is not None:
        config = rounding(config, Quantiser(options.quantize, options.quantize_lm_head), str(target))
    if options.kv_cache_dtype == "fp8":
        config = coded(config)
    if options.activations is not None:
        config = code_activations(config, display_name(target))
    made_bytes = rounding_bytes(weight_shapes(config, None)) if options.quantize is not None else 0
    speculative, speculator = fit_slots(speculative, options.max_batch), None
    topologies: dict[int, Topology] = {0: TreeTopology.chain(0)}
    if speculative is not None:
        speculator, topologies = (
            plan_speculator(speculative, config, target),
            make_topologies(speculative, options.max_batch),
        )
    weights = weight_shapes(config, speculator)
    geometry = make_geometry(config, speculator, topologies, options, speculative)
    ranks = tuple(rank_geometries(geometry, options, speculative))
    ladder = make_ladder(geometry, topologies, speculative)
    return Plan(geometry, ranks, topologies, ladder, weights, ahead_bytes(target_groups(config)), made_bytes)


def buffer_dict(spec: BufferSpec) -> dict[str, Any]:
    """One buffer as JSON values."""
    return {
        "name": spec.name,
        "shape": list(spec.shape),
        "dtype": str(spec.dtype).removeprefix("torch."),
        "role": spec.role.value,
        "bytes": spec.num_bytes,
    }


def prefill_dict(geometry: StepGeometry) -> dict[str, int]:
    """How much of a prompt is read at once: positions of a chunk, and chunks and positions at most."""
    most, chunk = geometry.max_prefill_chunks, geometry.prefill_chunk
    return {"chunk": chunk, "max_chunks": most, "max_positions": geometry.prefill_sizes[-1]}
