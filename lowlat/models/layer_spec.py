"""These records describe the layers of a decoder: the mixer (attention or another), the FFN, and the norms around both.

A family is data: it maps a config to a tuple of `LayerSpec`s. A property that may differ between layers stands here; a
property of the whole model stands in `lowlat.models.geometry`. Programs, weights, KV caches and tensor-parallel shards
are made by walking the specs.

A new kind of layer is a new record in `Mixer` or `FFN`. Code that walks specs refuses records that it does not know.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, TypeAlias

__all__ = [
    "FFN",
    "Activation",
    "AttentionSpec",
    "AttentionWidths",
    "DeltaSpec",
    "DenseSpec",
    "ExpertsSpec",
    "Heads",
    "LayerSpec",
    "Mixer",
    "ParallelSpec",
    "RopeConfig",
    "Rotation",
]

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base, and how its frequencies are scaled for contexts longer than the trained one.

    share          of kind "proportional": the share of a head's pairs that RoPE rotates, its first; others have angle 0
    factors        of kind "longrope": divisors of a head's frequencies, [D / 2], for contexts up to
                   original_max_position
    long_factors   the same for longer contexts, at all positions: see `for_context`
    Source: the `rope_theta`, `rope_scaling` and `rope_parameters` entries of config.json.
    """

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn", "proportional", "longrope"] = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # multiplies cos and sin; resolved at load (0.1 ln(factor) + 1 for YaRN)
    share: float = 1.0
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @property
    def has_long_factors(self) -> bool:
        """Whether longer contexts have other factors."""
        return bool(self.long_factors)

    def for_context(self, max_context: int) -> "RopeConfig":
        """The same with the factors for a runtime's context, which then hold for all of its positions."""
        if not self.long_factors:
            return self
        chosen = self.long_factors if max_context > self.original_max_position else self.factors
        return replace(self, factors=chosen, long_factors=())


class Rotation(NamedTuple):
    """The settings of a pair of RoPE tables; layers with equal settings share the tables.

    dims  dimensions of a head that RoPE rotates
    """

    rope: RopeConfig
    dims: int


@dataclass(frozen=True)
class Heads:
    """The heads of a mixer, which tensor parallelism divides among ranks.

    count    heads (query heads of attention)
    groups   heads that several of these share (key-value heads of attention)
    dim      size of one of the `count` heads in the output projection's input
    key_dim  size of one of the `groups` heads; 0: the same as `dim`
    options  the names of count and groups in configs
    """

    count: int
    groups: int
    dim: int
    key_dim: int = 0
    options: tuple[str, str] = ("num_attention_heads", "num_key_value_heads")


class AttentionWidths:
    """The widths of attention, from its numbers of heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def query_size(self) -> int:
        """Width of the queries, H * D."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys (or the values), G * D."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(AttentionWidths):
    """Softmax attention over a KV cache.

    rope            RoPE of queries and keys
    rotary_dims     the first dimensions of a head, which RoPE rotates; None: all
    gated           whether its output is multiplied by the sigmoid of a projection, before the output projection
    qk_norm         whether each query and key head is normed before RoPE
    v_norm          whether each value head is normed, too, without a weight; qk_norm is then true
    keys_as_values  whether values are the projected keys, without the keys' norm weight and RoPE
    kv_layer        the layer whose keys and values it reads, of the same window and heads; None: it has its own
    sinks           whether each head has a sink: one more score in the softmax, without a value
    window          positions that a row attends to, its own included; None: all before it
    softcap         scores s become c tanh(s / c); None: they stay
    scale           of scores before the softcap; None: head_dim ** -0.5
    chains_only     the name of layers that run only over chains of drafts, for messages; None: they take trees, too
    """

    chains_only: ClassVar[str | None] = None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    v_norm: bool = False
    keys_as_values: bool = False
    kv_layer: int | None = None
    sinks: bool = False
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    rotary_dims: int | None = None
    gated: bool = False

    @property
    def heads(self) -> Heads:
        """The query heads, and the key-value heads that they share."""
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim)

    def with_heads(self, count: int, groups: int) -> "AttentionSpec":
        """The same with other numbers of query heads and key-value heads."""
        return replace(self, num_heads=count, num_kv_heads=groups)

    @property
    def mixed_size(self) -> int:
        """Width of what the output projection reads."""
        return self.query_size

    @property
    def projected(self) -> str:
        """The heads of its first projection, in order, by the letters q, k and v."""
        if self.kv_layer is not None:
            return "q"
        return "qk" if self.keys_as_values else "qkv"

    @property
    def score_scale(self) -> float:
        """The factor of scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def rotation(self) -> Rotation:
        """The settings of its RoPE tables."""
        return Rotation(self.rope, self.head_dim if self.rotary_dims is None else self.rotary_dims)


@dataclass(frozen=True, kw_only=True)
class DeltaSpec:
    """A gated delta net: a convolution over the last inputs, then a state that decays and that each row corrects.

    num_key_heads    heads of queries and of keys
    num_value_heads  heads of values, of states and of gates; consecutive ones share a key head
    key_dim, value_dim  sizes of a key head and a value head
    conv_size        inputs that the convolution reads, the row's own included
    chains_only      as in `AttentionSpec`: its state follows one chain of tokens
    """

    chains_only: ClassVar[str | None] = "gated delta nets"
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int = 4

    @property
    def heads(self) -> Heads:
        """The value heads, and the key heads that they share."""
        options = ("linear_num_value_heads", "linear_num_key_heads")
        return Heads(self.num_value_heads, self.num_key_heads, self.value_dim, self.key_dim, options)

    def with_heads(self, count: int, groups: int) -> "DeltaSpec":
        """The same with other numbers of value heads and key heads."""
        return replace(self, num_value_heads=count, num_key_heads=groups)

    @property
    def mixed_size(self) -> int:
        """Width of what the output projection reads."""
        return self.value_size

    @property
    def value_size(self) -> int:
        """Width of the values, of the gates and of the output."""
        return self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: those of queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.value_size


@dataclass(frozen=True, kw_only=True)
class DenseSpec:
    """A gated FFN: down(activation(gate) * up).

    bias  whether its projections have biases
    """

    inner_size: int
    activation: Activation = "silu"
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """An MoE FFN: a router chooses some experts, which are gated FFNs, for each token.

    inner_size     inner size of one expert
    swiglu_limit   the limit of the clamped SwiGLU; None: SwiGLU is plain
    swiglu_alpha   the factor in the clamped SwiGLU's sigmoid; None: SwiGLU is plain
    weight_format  of the experts' matrices: a name in the table of `lowlat.kernels.formats`
    biased         whether router and experts have biases
    shares_of_all  whether routing weights are a softmax over all experts; else over the chosen ones
    shared         whether there is a shared expert, numbered after the others, which every token takes; its routing
                   weight is the sigmoid of its own row of the router
    activation     of the gate, if SwiGLU is plain
    shared_ffn     a shared expert with a size or format of its own; None: there is none
    """

    inner_size: int
    num_experts: int
    num_experts_per_token: int
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    weight_format: str = "bf16"
    biased: bool = False
    shares_of_all: bool = False
    shared: bool = False
    activation: Activation = "silu"
    shared_ffn: DenseSpec | None = None

    @property
    def num_matrices(self) -> int:
        """Experts in the stacked matrices, the shared one of `shared` included."""
        return self.num_experts + self.shared

    @property
    def num_taken(self) -> int:
        """Experts that a token takes out of `num_matrices`."""
        return self.num_experts_per_token + self.shared

    def expected_distinct(self, rows: int) -> float:
        """The expected number of different experts that `rows` rows choose, if all are equally likely, shared ones not
        counted."""
        return self.num_experts * (1.0 - (1.0 - self.num_experts_per_token / self.num_experts) ** rows)

    def share_read(self, distinct: float) -> float:
        """The share of the matrices that is read if rows choose `distinct` different experts."""
        return (distinct + self.shared) / self.num_matrices


@dataclass(frozen=True, kw_only=True)
class ParallelSpec:
    """A dense FFN parallel to experts: norm_d(dense x) + norm_e(experts y).

    x is the FFN's normed input. y is the residual stream after another norm; the router reads it after a third one.
    """

    dense: DenseSpec
    experts: ExpertsSpec

    @property
    def inner_size(self) -> int:
        """The inner size of one expert."""
        return self.experts.inner_size


Mixer: TypeAlias = AttentionSpec | DeltaSpec
FFN: TypeAlias = DenseSpec | ExpertsSpec | ParallelSpec


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer: x += mixer(norm x), then x += ffn(norm x).

    sandwich        whether the outputs of mixer and FFN are normed, too, before they are added
    per_layer_size  width P of a token's embedding for this layer, for a third sum: x += norm(out(gelu(gate x) *
                    embedding)); None: there is none
    scaled          whether the residual stream is multiplied by a scalar of the layer at its end
    sum_scale       factor of the outputs of mixer and FFN before they are added, after the norm of `sandwich`; None:
                    there is none. The weight `layers.N.sum_scale` holds it
    A norm multiplies by its weight: a family whose files store w and multiply by 1 + w adds the 1 at load.
    """

    mixer: Mixer
    ffn: FFN
    sandwich: bool = False
    per_layer_size: int | None = None
    scaled: bool = False
    sum_scale: float | None = None

    @property
    def experts(self) -> ExpertsSpec | None:
        """The layer's experts, alone or parallel to a dense FFN; None: it has none."""
        return self.ffn.experts if isinstance(self.ffn, ParallelSpec) else _experts_of(self.ffn)

    @property
    def dense(self) -> DenseSpec | None:
        """The layer's dense FFN, alone or parallel to experts; None: it has none."""
        if isinstance(self.ffn, ParallelSpec):
            return self.ffn.dense
        return self.ffn if isinstance(self.ffn, DenseSpec) else None

    @property
    def inner_sizes(self) -> tuple[int, int]:
        """The inner size of its FFN or of one expert, and of a parallel or shared dense FFN (0: there is none)."""
        if isinstance(self.ffn, ParallelSpec):
            return self.ffn.experts.inner_size, self.ffn.dense.inner_size
        shared = self.ffn.shared_ffn if isinstance(self.ffn, ExpertsSpec) else None
        return self.ffn.inner_size, 0 if shared is None else shared.inner_size


def _experts_of(ffn: FFN) -> ExpertsSpec | None:
    return ffn if isinstance(ffn, ExpertsSpec) else None
