"""A geometry describes a target or a draft model: its layers, and a few fields of the whole model.

Programs are emitted from it. `lowlat.models.layer_spec` has the records of layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal, Self, TypeVar

from lowlat.checkpoint.formats import Quantisation
from lowlat.checkpoint.kv_scales import LayerScales
from lowlat.checkpoint.quantising import Quantiser
from lowlat.errors import ConfigError
from lowlat.models.layer_spec import FFN, AttentionSpec, DeltaSpec, ExpertsSpec, LayerSpec, Rotation
from lowlat.models.shard import Shard

__all__ = ["CodedKV", "Decoder", "DraftConfig", "ModelConfig"]

DraftLayout = Literal["safeai", "specforge", "modelopt", "speculators", "deepspec", "z-lab", "target", "whole"]
ComputeDtype = Literal["bfloat16", "float32"]
Spec = TypeVar("Spec")


@dataclass(frozen=True)
class CodedKV:
    """A KV cache of e4m3 codes.

    scales  for each layer of the target, [L]: of keys and of values, each by key-value head; bfloat16 numbers. A draft
            model's scales are 1
    """

    scales: tuple[LayerScales, ...]


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The common fields of targets and draft models.

    layers        one record a layer, [L]
    quantisation  how files store quantised linear layers; None: they are not quantised
    quantiser     how linear layers are quantised at load; None: they are not
    shard         the rank whose shard this is; heads and inner sizes of the layers are then the shard's; None: no shard
    """

    hidden_size: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    layers: tuple[LayerSpec, ...]
    quantisation: Quantisation | None = None
    quantiser: Quantiser | None = None
    shard: Shard | None = None

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    @cached_property
    def attentions(self) -> Mapping[int, AttentionSpec]:
        """The layers whose mixer is attention, by number."""
        found = ((number, layer.mixer) for number, layer in enumerate(self.layers))
        return MappingProxyType({number: mixer for number, mixer in found if isinstance(mixer, AttentionSpec)})

    @cached_property
    def caching(self) -> Mapping[int, AttentionSpec]:
        """The layers with a KV cache of their own, by number; others read another layer's."""
        return MappingProxyType({number: spec for number, spec in self.attentions.items() if spec.kv_layer is None})

    @property
    def per_layer_size(self) -> int | None:
        """The width of a token's per-layer embedding. Raises ConfigError if layers differ in it."""
        return _alike("the width of their own embeddings", [layer.per_layer_size for layer in self.layers])

    @cached_property
    def deltas(self) -> Mapping[int, DeltaSpec]:
        """The layers whose mixer is a gated delta net, by number; they keep a recurrent state."""
        found = ((number, layer.mixer) for number, layer in enumerate(self.layers))
        return MappingProxyType({number: mixer for number, mixer in found if isinstance(mixer, DeltaSpec)})

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The windows of the layers with attention, in order; None: a row attends to all positions before it."""
        return tuple(spec.window for spec in self.attentions.values())

    @cached_property
    def rotations(self) -> tuple[Rotation, ...]:
        """The different RoPE settings of its layers, in order of first use."""
        return tuple(dict.fromkeys(spec.rotation for spec in self.attentions.values()))

    @property
    def attention(self) -> AttentionSpec:
        """The attention of all layers with attention, without their windows.

        Raises ConfigError if layers differ otherwise.
        """
        return _alike("attention", [replace(spec, window=None) for spec in self.attentions.values()])

    @property
    def ffn(self) -> FFN:
        """The FFN of all layers. Raises ConfigError if layers differ."""
        return _alike("FFN", [layer.ffn for layer in self.layers])

    @property
    def experts(self) -> ExpertsSpec | None:
        """The experts of all MoE layers; None: it has no MoE layer. Raises ConfigError if layers differ."""
        found = [layer.experts for layer in self.layers if layer.experts is not None]
        return _alike("experts", found) if found else None


def _alike(what: str, specs: Sequence[Spec]) -> Spec:
    kinds = tuple(dict.fromkeys(specs))
    if len(kinds) != 1:
        raise ConfigError(f"expected layers that are alike in {what}, found {len(kinds)} kinds: {kinds}")
    return kinds[0]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Decoder):
    """A target's geometry, checked.

    family           a name in the table of `lowlat.models.families`
    embedding_scale  factor of the embedding's rows, in the compute dtype; None: there is none
    logit_divisor    divisor of logits; the family's recipes divide the final norm's weight by it
    logit_softcap    logits l become c tanh(l / c); None: they stay
    coded_kv         the scales of an e4m3 KV cache; None: the cache has the compute dtype
    coded_rows       matrices of layers whose GEMMs read a prompt's rows as e4m3 codes, see `code_activations`; sorted
                     by name, so that the record's text is the same in every process
    drops_windows    whether layers whose window holds the whole context run without it, see `for_context`
    query_limit      positions up to which Llama 4's scale of queries by position, which is not implemented, is 1
    """

    family: str
    tie_embeddings: bool
    dtype: ComputeDtype
    embedding_scale: float | None = None
    logit_divisor: float = 1.0
    logit_softcap: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    coded_kv: CodedKV | None = None
    coded_rows: tuple[str, ...] = ()
    drops_windows: bool = False
    query_limit: int | None = None

    @property
    def max_context(self) -> int:
        """The most tokens of prompt and output."""
        return self.max_position if self.query_limit is None else min(self.max_position, self.query_limit)

    @property
    def usual_context(self) -> int:
        """The largest context up to which results do not depend on the runtime's `max_context`."""
        windows = [window for window in self.windows if window is not None and self.drops_windows]
        lengths = [rotation.rope.original_max_position for rotation in self.rotations if rotation.rope.has_long_factors]
        return min([self.max_context, *windows, *lengths])

    def for_context(self, max_context: int) -> Self:
        """The geometry for a runtime's context: windows that hold all of it are dropped, RoPE's factors are chosen."""
        return replace(self, layers=tuple(self._in_context(layer, max_context) for layer in self.layers))

    def _in_context(self, layer: LayerSpec, max_context: int) -> LayerSpec:
        mixer = layer.mixer
        if not isinstance(mixer, AttentionSpec):
            return layer
        if self.drops_windows and mixer.window is not None and mixer.window >= max_context:
            mixer = replace(mixer, window=None)
        return replace(layer, mixer=replace(mixer, rope=mixer.rope.for_context(max_context)))

    def check_context(self, max_context: int, source: Path | str, *, flag: str | None = None) -> None:
        """Raise ConfigError if a context is longer than the model's.

        source  the config, for the message
        flag    the command-line option that gave the context, for the message; None: --max-context
        """
        given, knob = flag or "max_context", flag or "max_context (--max-context)"
        if self.query_limit is not None and self.query_limit < min(max_context, self.max_position):
            raise ConfigError(
                f"{given} {max_context} exceeds original_max_position_embeddings {self.query_limit} ({source}): "
                f"beyond it llama_4_scaling_beta scales queries by position, which is not implemented; lower {knob}"
            )
        if max_context > self.max_position:
            raise ConfigError(
                f"{given} {max_context} exceeds the model's max_position_embeddings {self.max_position} "
                f"({source}); lower {knob}"
            )

    @property
    def cache_dtype(self) -> str:
        """The dtype of cached keys and values: "fp8", or the compute dtype."""
        return self.dtype if self.coded_kv is None else "fp8"


@dataclass(frozen=True, kw_only=True)
class DraftConfig(Decoder):
    """The common fields of all draft models' geometries; each method has a record of its own.

    method              the method of speculation
    layout              the project whose files have this form; "target": the weights are in the target's files;
                        "whole": the draft model is a complete model
    target_hidden_size  the target's hidden size
    draft_vocab_size    tokens that it can draft
    capture_boundaries  the target's residual streams that it reads. Boundary b is the stream entering layer b, 0 to L
                        (L: after the last layer, before the final norm)
    own_embedding, own_lm_head  whether the checkpoint has them; else the target's are used
    embedding_scale     factor of the rows of its embedding, in the compute dtype; None: no factor for its own
                        embedding, and for the target's the one that the method defines
    logit_softcap       logits l become c tanh(l / c); None: they stay
    own_draft_map       whether the checkpoint has d2t; else draft ids are the target's ids
    is_cut              whether its LM head consists of rows of a larger one, gathered at load. own_lm_head and
                        own_draft_map are then true, though the files have neither
    coverage            for a cut LM head, the share of a held-out text's tokens that it can draft; None: unknown
    """

    method: ClassVar[str]
    layout: DraftLayout
    target_hidden_size: int
    draft_vocab_size: int
    capture_boundaries: tuple[int, ...]
    own_embedding: bool = False
    own_lm_head: bool = True
    own_draft_map: bool = True
    embedding_scale: float | None = None
    logit_softcap: float | None = None
    is_cut: bool = False
    coverage: float | None = None
