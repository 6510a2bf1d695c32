"""The cases of the dense benchmark: a geometry, its cases, the bytes that a step must move, and what a step offers.

dense` runs the cases, `bench.torch_step` and the executors are what is run.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from lowlat.models.layer_spec import AttentionWidths
from lowlat.options.acceptance import acceptance_for

__all__ = [
    "ALL_CASES",
    "CASES",
    "LLAMA_8B",
    "SIMULATED_ACCEPT_LENGTH",
    "TINY",
    "TINY_CASES",
    "Case",
    "DenseGeometry",
    "StepFactory",
    "StepUnderTest",
    "conditions_path",
    "make_weights",
    "read_results",
    "step_bytes",
    "weight_shapes",
]

SIMULATED_ACCEPT_LENGTH = {3: 3.0}  # tokens a step at S = 3, imposed; other depths: see Case.accept_length


@dataclass(frozen=True)
class DenseGeometry(AttentionWidths):
    """A Llama-like target and its EAGLE3 head, which has the target's hidden width and heads."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    capture_boundaries: tuple[int, ...]
    rope_theta: float = 500000.0
    rms_norm_eps: float = 1e-5
    element_bytes: int = 2  # bf16


LLAMA_8B = DenseGeometry("Llama-3.1-8B", 4096, 32, 32, 8, 128, 14336, 128256, 32000, (2, 16, 29))
TINY = DenseGeometry("tiny", 64, 4, 4, 2, 16, 96, 160, 80, (1, 2, 3))


@dataclass(frozen=True)
class Case:
    """One measured step: `batch` slots, each with `context` committed tokens, S drafts verified and S drafted."""

    batch: int
    context: int
    num_speculative_tokens: int

    @property
    def name(self) -> str:
        """For instance `1 x 8K, S=3`."""
        context = f"{self.context // 1024}K" if self.context % 1024 == 0 else str(self.context)
        return f"{self.batch} x {context}, S={self.num_speculative_tokens}"

    @property
    def rows(self) -> int:
        """T, rows a slot in the target's pass."""
        return self.num_speculative_tokens + 1

    @property
    def accept_length(self) -> float | None:
        """Tokens a step that the benchmark imposes, the bonus included; None at S = 0, where nothing is simulated."""
        depth = self.num_speculative_tokens
        if depth == 0:
            return None
        return SIMULATED_ACCEPT_LENGTH.get(depth, 1 + 2 * depth / 3)

    @property
    def acceptance(self) -> float | None:
        """The probability by position that comes to that length; None at S = 0."""
        return None if self.accept_length is None else acceptance_for(self.accept_length, self.num_speculative_tokens)


PLACES = ((1, 8192), (1, 32768), (4, 16384))
CASES = tuple(Case(batch, context, depth) for depth in (0, 3) for batch, context in PLACES)
ALL_CASES = (
    *CASES,
    *(Case(batch, context, depth) for depth in (1, 5, 7) for batch, context in PLACES),
    *(Case(batch, 16384, depth) for depth in (0, 3) for batch in (2, 8)),
)
TINY_CASES = (Case(1, 40, 0), Case(2, 24, 3))


class StepUnderTest(Protocol):
    """A decode step that can be replayed. `measure_device_loop(steps) -> list[float]`, ms a step, is optional."""

    name: str
    num_launches: int

    def replay(self) -> None:
        """Launch one step on torch's current stream; do not wait for it."""

    def reset(self) -> None:
        """Put every slot's length back to the case's context."""


# geometry, case, canonical row-major weights, device -> the step, ready to be replayed
StepFactory = Callable[[DenseGeometry, Case, Mapping[str, torch.Tensor], torch.device], StepUnderTest]


def _layer_elements(geometry: DenseGeometry, inputs: int) -> int:
    """Weights of one decoder layer whose fused q, k and v product reads `inputs` columns."""
    hidden = geometry.hidden_size
    qkv = (geometry.query_size + 2 * geometry.kv_size) * inputs
    return qkv + hidden * geometry.query_size + 3 * geometry.intermediate_size * hidden


def step_bytes(geometry: DenseGeometry, case: Case) -> int:
    """Bytes that one step must read: every weight matrix it uses, once each use, and the KV cache.

        target  = L * (qkv + o + gate + up + down) + lm_head
        kv      = L * B * C * 2 * G * D
        S > 0:  fc + S * (qkv over 2H columns + o + gate + up + down + draft lm_head) + S * B * C * 2 * G * D

    in elements. A draft step cannot start before the one above it has ended, so the head's weights are read S
    times: they do not fit into the L2. Left out, below 0.1 %: embedding rows, norms, activations, the rows that the
    step itself writes.
    """
    hidden, depth = geometry.hidden_size, case.num_speculative_tokens
    cache = case.batch * case.context * 2 * geometry.kv_size
    elements = geometry.num_layers * (_layer_elements(geometry, hidden) + cache) + geometry.vocab_size * hidden
    if depth:
        elements += len(geometry.capture_boundaries) * hidden * hidden
        elements += depth * (_layer_elements(geometry, 2 * hidden) + geometry.draft_vocab_size * hidden + cache)
    return elements * geometry.element_bytes


def weight_shapes(geometry: DenseGeometry) -> dict[str, tuple[int, ...]]:
    """Shapes of a target's weights and its head's, by canonical names, without the ids of the head's tokens."""
    hidden, inner = geometry.hidden_size, geometry.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (geometry.vocab_size, hidden)}
    for layer in range(geometry.num_layers):
        name = f"layers.{layer}"
        shapes[f"{name}.attn_norm.weight"] = (hidden,)
        shapes[f"{name}.qkv.weight"] = (geometry.query_size + 2 * geometry.kv_size, hidden)
        shapes[f"{name}.o.weight"] = (hidden, geometry.query_size)
        shapes[f"{name}.ffn_norm.weight"] = (hidden,)
        shapes[f"{name}.gate_up.weight"] = (2 * inner, hidden)
        shapes[f"{name}.down.weight"] = (hidden, inner)
    shapes |= {"norm.weight": (hidden,), "lm_head.weight": (geometry.vocab_size, hidden)}
    shapes["head.fc.weight"] = (hidden, len(geometry.capture_boundaries) * hidden)
    shapes |= {f"head.{name}.weight": (hidden,) for name in ("embed_norm", "hidden_norm", "ffn_norm", "norm")}
    shapes["head.q.weight"] = (geometry.query_size, 2 * hidden)
    shapes["head.kv.weight"] = (2 * geometry.kv_size, 2 * hidden)
    shapes["head.o.weight"] = (hidden, geometry.query_size)
    shapes["head.gate_up.weight"] = (2 * inner, hidden)
    shapes["head.down.weight"] = (hidden, inner)
    shapes["head.lm_head.weight"] = (geometry.draft_vocab_size, hidden)
    return shapes


def make_weights(
    geometry: DenseGeometry, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Random weights of a target and its head, by their canonical names, row-major.

    Matrices are normal with deviation K ** -0.5, so that activations keep their size through the layers; norms are
    near 1; head.draft_to_target [Vd] int32 is an increasing choice of target ids.
    """
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes(geometry).items():
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if len(shape) == 1:
            tensor.normal_(1.0, 0.1, generator=generator)
        else:
            tensor.normal_(0.0, 1.0 if name == "embed.weight" else shape[1] ** -0.5, generator=generator)
        weights[name] = tensor
    chosen = torch.randperm(geometry.vocab_size, generator=generator, device=device)[: geometry.draft_vocab_size]
    weights["head.draft_to_target"] = chosen.sort().values.to(torch.int32)
    return weights


def conditions_path(results: Path) -> Path:
    """Where the conditions lie that all rows of a results file share."""
    return results.with_suffix(".conditions.json")


def read_results(path: Path) -> dict[str, Any]:
    """The rows of a results file, and their conditions."""
    conditions = json.loads(conditions_path(path).read_text(encoding="utf-8"))
    return {"conditions": conditions, "rows": json.loads(path.read_text(encoding="utf-8"))}
