"""The cases of the gpt-oss benchmark: geometries, cases, the bytes that a step must move, and what bounds a speed-up.

An MoE layer's bytes depend on how many distinct experts a layer's rows chose: they are counted, not
assumed (`bench.gpt_oss_step`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.dense_cases import Case
from lowlat.kernels.formats import MXFP4
from lowlat.models.geometry import ModelConfig
from lowlat.models.layer_spec import AttentionSpec, DenseSpec, ExpertsSpec, LayerSpec, RopeConfig
from lowlat.speculators.eagle3.geometry import Eagle3Config

__all__ = [
    "ACCEPT_LENGTHS",
    "CASES",
    "FULL_VOCABULARY",
    "MODELS",
    "MORE_CASES",
    "SMALL",
    "SMALL_CASES",
    "OssCase",
    "bound_speedup",
    "draft_config",
    "expected_experts",
    "expert_bytes",
    "model_config",
    "step_bytes",
]

ACCEPT_LENGTHS = (2.3, 2.7, 3.0)  # tokens a step, bonus included: what published heads reach at three drafts, and above
DRAFT_VOCABULARY = 32000
FULL_VOCABULARY = 201088  # the target's: such a head may draft every id
IMPOSED = 3.0  # the accept length that runs: a step's time does not depend on it


@dataclass(frozen=True)
class OssModel:
    """A size of gpt-oss, and its head."""

    name: str
    num_layers: int
    num_experts: int
    hidden_size: int = 2880
    intermediate_size: int = 2880
    num_experts_per_token: int = 4
    num_heads: int = 64
    num_kv_heads: int = 8
    head_dim: int = 64
    vocab_size: int = FULL_VOCABULARY
    window: int = 128
    head_intermediate_size: int = 17280


MODELS = {
    "120b": OssModel("gpt-oss-120b", 36, 128),
    "20b": OssModel("gpt-oss-20b", 24, 32),
}
SMALL = OssModel("small", 4, 8, 128, 64, 2, 8, 2, 64, 512, 32, 192)  # widths of whole tiles: random codes have no pads


@dataclass(frozen=True)
class OssCase:
    """One measured step of a model; `alike`: all rows of a layer choose the same experts."""

    model: str
    step: Case
    alike: bool = False
    draft_vocab_size: int = DRAFT_VOCABULARY

    @property
    def name(self) -> str:
        """For instance `120b, 1 x 32K, S=3, experts alike`, or `.., full head`."""
        known = {DRAFT_VOCABULARY: "", FULL_VOCABULARY: ", full head"}
        vocabulary = known.get(self.draft_vocab_size, f", draft vocabulary {self.draft_vocab_size}")
        drafting = vocabulary if self.step.num_speculative_tokens else ""
        return f"{self.model}, {self.step.name}{', experts alike' if self.alike else ''}{drafting}"


CASES = (
    OssCase("120b", Case(1, 4096, 0)),
    OssCase("120b", Case(1, 32768, 0)),
    OssCase("120b", Case(1, 32768, 3)),
    OssCase("120b", Case(1, 32768, 3), alike=True),
    OssCase("120b", Case(4, 16384, 0)),
    OssCase("120b", Case(4, 16384, 3)),
    OssCase("20b", Case(1, 32768, 0)),
)
MORE_CASES = (OssCase("120b", Case(1, 32768, 3), draft_vocab_size=FULL_VOCABULARY),)  # run where asked for by name
SMALL_CASES = (
    OssCase("small", Case(1, 320, 0)),
    OssCase("small", Case(2, 192, 3), draft_vocab_size=160),
    OssCase("small", Case(2, 192, 3), alike=True, draft_vocab_size=160),
)


def model_config(model: OssModel, max_position: int) -> ModelConfig:
    """The target's geometry, as a checkpoint's config.json would give it."""
    rope = RopeConfig(
        theta=150000.0, kind="yarn", factor=32.0, original_max_position=4096, truncate=False,
        attention_factor=1.3465735902799727,
    )  # fmt: skip
    mixer = AttentionSpec(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rope=rope,
        qkv_bias=True,
        output_bias=True,
        sinks=True,
    )
    experts = ExpertsSpec(
        inner_size=model.intermediate_size,
        num_experts=model.num_experts,
        num_experts_per_token=model.num_experts_per_token,
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
        weight_format=MXFP4.name,
        biased=True,
    )
    windows = (None if layer % 2 else model.window for layer in range(model.num_layers))
    return ModelConfig(
        family="gpt_oss",
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        max_position=max_position,
        rms_norm_eps=1e-5,
        layers=tuple(LayerSpec(mixer=replace(mixer, window=window), ffn=experts) for window in windows),
        tie_embeddings=False,
        dtype="bfloat16",
    )


def draft_config(model: OssModel, draft_vocab_size: int, max_position: int) -> Eagle3Config:
    """A Llama-like EAGLE3 head with the target's width and heads."""
    layers = model.num_layers
    mixer = AttentionSpec(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rope=RopeConfig(theta=150000.0),
    )
    return Eagle3Config(
        layout="specforge",
        hidden_size=model.hidden_size,
        target_hidden_size=model.hidden_size,
        layers=(LayerSpec(mixer=mixer, ffn=DenseSpec(inner_size=model.head_intermediate_size)),),
        vocab_size=model.vocab_size,
        draft_vocab_size=draft_vocab_size,
        max_position=max_position,
        rms_norm_eps=1e-5,
        capture_boundaries=(1, layers // 2, layers - 1),
    )


def expert_bytes(model: OssModel) -> int:
    """Bytes of one expert of one layer: in MXFP4 17 for 32 weights."""
    hidden, inner = model.hidden_size, model.intermediate_size
    return MXFP4.num_bytes(2 * inner, hidden) + MXFP4.num_bytes(hidden, inner)


def step_bytes(model: OssModel, case: OssCase, distinct_experts: float, kv_itemsize: int = 2) -> int:
    """Bytes that one step must read: every weight that it uses, once each use, and the KV cache.

        a layer = qkv + o + router + distinct * expert + B * min(C, window) * 2 * G * D
        S > 0:  fc + S * (qkv over 2N columns + o + gate + up + down + draft lm_head) + S * B * C * 2 * G * D

    distinct_experts  of a layer, mean
    kv_itemsize       bytes of a number of the KV cache
    Left out, below 0.1 %: embedding rows, norms, biases, activations, what the step itself writes.
    """
    step, hidden = case.step, model.hidden_size
    queries, kv = model.num_heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    attention = (queries + kv) * hidden + hidden * queries
    elements = model.num_layers * (attention + model.num_experts * hidden) + model.vocab_size * hidden
    windows = model_config(model, step.context).windows
    cached = step.batch * kv * sum(min(step.context, window or step.context) for window in windows)
    depth = step.num_speculative_tokens
    if depth:
        layer = (queries + kv) * 2 * hidden + hidden * queries + 3 * model.head_intermediate_size * hidden
        elements += 3 * hidden * hidden
        elements += depth * (layer + case.draft_vocab_size * hidden)
        cached += depth * step.batch * step.context * kv
    return 2 * elements + kv_itemsize * cached + round(model.num_layers * distinct_experts * expert_bytes(model))


def expected_experts(model: OssModel, rows: int) -> float:
    """Distinct experts of a layer where every row draws its own at random."""
    return model.num_experts * (1 - (1 - model.num_experts_per_token / model.num_experts) ** rows)


def bound_speedup(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """The most that speculation can gain, by accept length: that length times the floor at S = 0 over the row's floor.

    None at S = 0, and where S = 0 was not measured for the same model, batch and context.
    """
    if not row["num_speculative_tokens"]:
        return None
    names = ("model", "batch", "context")
    for other in rows:
        same = all(other[name] == row[name] for name in names)
        if same and not other["num_speculative_tokens"] and other.get("floor_ms"):
            return {str(length): round(length * other["floor_ms"] / row["floor_ms"], 4) for length in ACCEPT_LENGTHS}
    return None
