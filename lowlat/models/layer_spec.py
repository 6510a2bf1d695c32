"""These records describe the layers of a decoder: what mixes tokens, what follows it, and the norms around both.

A family is data: it maps a config to a tuple of `LayerSpec`s. Everything that may differ between the layers of a model
stands here; what a model has once stands in `lowlat.models.geometry`. Programs, weights, KV caches and the cuts of
tensor parallelism are made by walking the specs.

A new kind of layer is a new record in `Mixer` or `FFN`, and the places that walk specs say which records they know.
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
    """Rotary embedding: base, and how its frequencies are scaled for contexts past the trained one.

    share          of a head's pairs that turn, its first, where the kind is proportional: the others have angle 0
    factors        longrope's, which divide a head's frequencies, [D / 2], of contexts up to original_max_position
    long_factors   the same of longer contexts, for all positions: see `for_context`
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
        """Whether longer contexts have other factors than these."""
        return bool(self.long_factors)

    def for_context(self, max_context: int) -> "RopeConfig":
        """The same with the factors of a runtime's context; they are fixed then, for all of its positions."""
        if not self.long_factors:
            return self
        chosen = self.long_factors if max_context > self.original_max_position else self.factors
        return replace(self, factors=chosen, long_factors=())


class Rotation(NamedTuple):
    """The facts that fix a pair of RoPE tables: layers that agree in it share them.

    dims  dimensions of a head that turn
    """

    rope: RopeConfig
    dims: int


@dataclass(frozen=True)
class Heads:
    """The heads of a mixer, as ranks share them out.

    count    that are shared out
    groups   of which each is read by several of them
    dim      numbers that one of them gives the output projection
    key_dim  numbers of a head of the groups; 0: as many as `dim`
    options  the names by which configs have count and groups
    """

    count: int
    groups: int
    dim: int
    key_dim: int = 0
    options: tuple[str, str] = ("num_attention_heads", "num_key_value_heads")


class AttentionWidths:
    """The widths of attention, by numbers of heads."""

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

    rope      of queries and keys
    rotary_dims  dimensions of a head that turn, its first; None: all
    gated     whether what it gives is multiplied by sigmoids of a projection of its own, before the output projection
    qk_norm   whether the query and key heads are normed, each by head, before RoPE
    v_norm    whether the value heads are normed, too, without a weight; query and key heads are then normed
    keys_as_values  whether values are the keys as projected, neither normed by the keys' weight nor rotated
    kv_layer  the layer whose keys and values it reads, of the same window and heads: it has none; None: its own
    sinks     whether each head has one more score, of no value
    window    positions that a row sees, its own included; None: all before it
    softcap   scores s become c tanh(s / c); None: they stay
    scale     of scores before the softcap; None: head_dim ** -0.5
    chains_only  the name of such layers, where they run over chains of drafts alone; None: they take any rows
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
        """Its query heads, which key-value heads serve."""
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim)

    def with_heads(self, count: int, groups: int) -> "AttentionSpec":
        """The same with so many query heads and key-value heads."""
        return replace(self, num_heads=count, num_kv_heads=groups)

    @property
    def mixed_size(self) -> int:
        """Width of what the output projection reads."""
        return self.query_size

    @property
    def projected(self) -> str:
        """The heads that its first projection gives, of q, k and v, in order."""
        if self.kv_layer is not None:
            return "q"
        return "qk" if self.keys_as_values else "qkv"

    @property
    def score_scale(self) -> float:
        """The factor of scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def rotation(self) -> Rotation:
        """The facts that fix its RoPE tables."""
        return Rotation(self.rope, self.head_dim if self.rotary_dims is None else self.rotary_dims)


@dataclass(frozen=True, kw_only=True)
class DeltaSpec:
    """A gated delta net: a convolution over a few last inputs, then a state that decays and is corrected by each row.

    num_key_heads    of queries and of keys
    num_value_heads  of values, of states and of gates; consecutive ones share a key head
    key_dim, value_dim  of their heads
    conv_size        inputs that the convolution sees, the row's own included
    chains_only      as in `AttentionSpec`: its state follows one chain of tokens over a whole text
    """

    chains_only: ClassVar[str | None] = "gated delta nets"
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int = 4

    @property
    def heads(self) -> Heads:
        """Its value heads, which key heads serve."""
        options = ("linear_num_value_heads", "linear_num_key_heads")
        return Heads(self.num_value_heads, self.num_key_heads, self.value_dim, self.key_dim, options)

    def with_heads(self, count: int, groups: int) -> "DeltaSpec":
        """The same with so many value heads and key heads."""
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
    """A gated FFN of which each token takes some experts, as the router says.

    inner_size     of one expert
    swiglu_limit   of the clamped SwiGLU; None: SwiGLU is plain
    swiglu_alpha   its factor inside the sigmoid; None: SwiGLU is plain
    weight_format  of the experts' matrices: a name in the table of `lowlat.kernels.formats`
    biased         whether router and experts have biases
    shares_of_all  whether an expert's share is of the softmax over all experts; else over those chosen
    shared         whether there is one more expert, numbered after the others, that every token takes with the share
                   sigmoid of its own row of the router
    activation     of the gate, where SwiGLU is plain
    shared_ffn     the same as an FFN of its own, where its size or format is another; None: there is none
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
        """Experts whose matrices lie together, the shared one among them."""
        return self.num_experts + self.shared

    @property
    def num_taken(self) -> int:
        """Experts that a token takes of these."""
        return self.num_experts_per_token + self.shared

    def expected_distinct(self, rows: int) -> float:
        """The experts, the shared one left out, that so many rows choose, where each is as likely as another."""
        return self.num_experts * (1.0 - (1.0 - self.num_experts_per_token / self.num_experts) ** rows)

    def share_read(self, distinct: float) -> float:
        """The share of the matrices that is read where rows choose so many different experts."""
        return (distinct + self.shared) / self.num_matrices


@dataclass(frozen=True, kw_only=True)
class ParallelSpec:
    """A dense FFN and experts next to each other: norm_d(dense x) + norm_e(experts y).

    x is the FFN's normed input; y is the residual by another norm, and the router reads it by a third.
    """

    dense: DenseSpec
    experts: ExpertsSpec

    @property
    def inner_size(self) -> int:
        """Of one expert."""
        return self.experts.inner_size


Mixer: TypeAlias = AttentionSpec | DeltaSpec
FFN: TypeAlias = DenseSpec | ExpertsSpec | ParallelSpec


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer: x += mixer(norm x), then x += ffn(norm x).

    sandwich  whether what mixer and FFN give is normed, too, before it is added
    per_layer_size  width P of the token's embedding of this layer, which gates a last sum: x += norm(out(gelu(gate x) *
                    embedding)); None: there is none
    scaled    whether the residual stream is multiplied by a number of the layer at its end
    sum_scale  what mixer and FFN give is multiplied by it before it is added, after the norm of `sandwich`; None: it is
               added as it is. The weight `layers.N.sum_scale` has it
    Norm weights are what a norm multiplies by: a family whose files store w and multiply by 1 + w adds the 1 at load.
    """

    mixer: Mixer
    ffn: FFN
    sandwich: bool = False
    per_layer_size: int | None = None
    scaled: bool = False
    sum_scale: float | None = None

    @property
    def experts(self) -> ExpertsSpec | None:
        """Its experts, next to a dense FFN or alone; None: it has none."""
        return self.ffn.experts if isinstance(self.ffn, ParallelSpec) else _experts_of(self.ffn)

    @property
    def dense(self) -> DenseSpec | None:
        """Its dense FFN, next to experts or alone; None: it has none."""
        if isinstance(self.ffn, ParallelSpec):
            return self.ffn.dense
        return self.ffn if isinstance(self.ffn, DenseSpec) else None

    @property
    def inner_sizes(self) -> tuple[int, int]:
        """The inner width of its FFN, or of each of its experts; and of a dense FFN next to these, else 0."""
        if isinstance(self.ffn, ParallelSpec):
            return self.ffn.experts.inner_size, self.ffn.dense.inner_size
        shared = self.ffn.shared_ffn if isinstance(self.ffn, ExpertsSpec) else None
        return self.ffn.inner_size, 0 if shared is None else shared.inner_size


def _experts_of(ffn: FFN) -> ExpertsSpec | None:
    return ffn if isinstance(ffn, ExpertsSpec) else None
