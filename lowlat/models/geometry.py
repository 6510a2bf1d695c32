"""The geometry of targets and heads: frozen facts that loading establishes and programs are emitted from.

It knows neither files nor tensors: `lowlat.checkpoint` fills these records from config.json, `lowlat.models`
reads them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lowlat.checkpoint.formats import Quantisation
from lowlat.checkpoint.kv_scales import LayerScales
from lowlat.checkpoint.quantising import Quantiser
from lowlat.errors import ConfigError
from lowlat.models.shard import Shard

__all__ = ["AttentionWidths", "CodedKV", "DraftConfig", "ExpertsConfig", "ModelConfig", "RopeConfig"]

DraftLayout = Literal["safeai", "specforge", "modelopt", "speculators", "deepspec", "z-lab"]
ComputeDtype = Literal["bfloat16", "float32"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base, and how its frequencies are scaled for contexts past the trained one.

    Source: the `rope_theta`, `rope_scaling` and `rope_parameters` entries of config.json.
    """

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # multiplies cos and sin; resolved at load (0.1 ln(factor) + 1 for YaRN)


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of the dense FFN."""

    num_experts: int
    num_experts_per_token: int
    swiglu_limit: float | None  # of the clamped SwiGLU; None: SwiGLU is plain
    swiglu_alpha: float | None
    weight_format: str  # of its matrices: a name in the table of `lowlat.kernels.formats`
    biased: bool = True  # router and experts have biases
    shares_of_all: bool = False  # shares are of the softmax over all experts; else over the chosen, and sum to 1


@dataclass(frozen=True)
class CodedKV:
    """A KV cache of e4m3 codes.

    scales  of each layer of the target, [L]: those of keys and of values, each by key-value head; bfloat16 numbers. A
            draft model's are 1
    """

    scales: tuple[LayerScales, ...]


class AttentionWidths:
    """The widths of attention, by the numbers of heads in a record of a model's geometry."""

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


@dataclass(frozen=True)
class ModelConfig(AttentionWidths):
    """A target's geometry, checked; every field is in use by `lowlat.models.decoder`."""

    family: str  # a name in the table of `lowlat.models.families`
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sinks: bool
    windows: tuple[int | None, ...]  # [L]; None: full attention
    experts: ExpertsConfig | None
    dtype: ComputeDtype
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    quantisation: Quantisation | None = None  # of linear layers in files; None: plain
    quantiser: Quantiser | None = None  # of linear layers at load; None: they stay as they are
    coded_kv: CodedKV | None = None  # None: the cache has the compute dtype
    window_limit: int | None = None  # positions up to which windows that are not implemented change nothing
    shard: Shard | None = None  # the rank whose part this is: heads and inner width are its own; None: all of it

    @property
    def max_context(self) -> int:
        """Tokens of prompt and text, at most."""
        return self.max_position if self.window_limit is None else min(self.max_position, self.window_limit)

    def check_context(self, max_context: int, source: Path | str) -> None:
        """Raise ConfigError for a context that is longer than the model's; source is the config, for the message."""
        if self.window_limit is not None and self.window_limit < min(max_context, self.max_position):
            raise ConfigError(
                f"max_context {max_context} exceeds sliding_window {self.window_limit} ({source}): this family runs "
                "with full attention, which is the same up to there; lower max_context (--max-context)"
            )
        if max_context > self.max_position:
            raise ConfigError(
                f"max_context {max_context} exceeds the model's max_position_embeddings {self.max_position} "
                f"({source}); lower max_context (--max-context)"
            )

    @property
    def cache_dtype(self) -> str:
        """How keys and values are kept: "fp8", or the compute dtype."""
        return self.dtype if self.coded_kv is None else "fp8"


@dataclass(frozen=True)
class DsparkHeads:
    """The heads that DSpark puts behind the rows of a block.

    markov_rank         of the bias that a draft's logits get by the token before it; 0: no bias
    markov_gated        whether the row's state gates that token's vector
    confidence          whether each draft gets a probability of being accepted
    confidence_markov   whether that reads the token's vector, too
    """

    markov_rank: int
    markov_gated: bool
    confidence: bool
    confidence_markov: bool


@dataclass(frozen=True)
class DraftConfig(AttentionWidths):
    """A draft model's geometry and flags (EAGLE3, P-EAGLE, DFlash, DSpark), captures turned into boundaries.

    Boundary b is the target's residual stream entering layer b, 0 to L (L: after the last layer, before the
    final norm). Source: EAGLE-3, arXiv 2503.01840; SpecForge, ModelOpt and speculators exporters.
    """

    layout: DraftLayout
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    capture_boundaries: tuple[int, ...]
    num_layers: int = 1  # the first reads embedding and feature side by side, the others the one before
    windows: tuple[int | None, ...] = (None,)  # [num_layers]; None: full attention
    final_hidden: bool = False  # the feature is the captured stream after the target's final norm; there is no fc
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    own_embedding: bool = False
    own_lm_head: bool = True
    own_draft_map: bool = True  # the checkpoint carries d2t
    mask_token: int | None = None  # of rows whose token is not known; None: EAGLE3, which has none
    block_size: int | None = None  # of DFlash and DSpark, the last known token included; None: another's
    anchor_drafts: bool = False  # the last known token's row drafts, and each row the token after its own
    dspark: DsparkHeads | None = None  # None: not DSpark
    quantisation: Quantisation | None = None  # of linear layers in files; None: plain
    quantiser: Quantiser | None = None  # of linear layers at load; None: they stay as they are
    shard: Shard | None = None  # the rank whose part this is, as of a target; None: all of it

    @property
    def method(self) -> str:
        """The method of speculation that it is for."""
        if self.block_size is not None:
            return "dflash" if self.dspark is None else "dspark"
        return "eagle3" if self.mask_token is None else "peagle"
