"""A geometry has the frozen facts of a target or a draft model, from which programs are emitted.

A model is its layers, see `lowlat.models.layer_spec`, and a few facts of the whole.
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

    scales  of each layer of the target, [L]: those of keys and of values, each by key-value head; bfloat16 numbers. A
            draft model's are 1
    """

    scales: tuple[LayerScales, ...]


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The common part of targets and draft models: their layers, and facts of the whole.

    layers        one record a layer, [L]
    quantisation  of linear layers in files; None: plain
    quantiser     of linear layers at load; None: they stay as they are
    shard         the rank whose part this is: heads and inner widths of the layers are its own; None: all of it
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
        """The layers that keep keys and values of their own, by number: those that read no other layer's."""
        return MappingProxyType({number: spec for number, spec in self.attentions.items() if spec.kv_layer is None})

    @property
    def per_layer_size(self) -> int | None:
        """The width of a token's embedding of each layer. Raises ConfigError where layers differ in it."""
        return _alike("the width of their own embeddings", [layer.per_layer_size for layer in self.layers])

    @cached_property
    def deltas(self) -> Mapping[int, DeltaSpec]:
        """The layers whose mixer is a gated delta net, by number: those that keep a recurrent state."""
        found = ((number, layer.mixer) for number, layer in enumerate(self.layers))
        return MappingProxyType({number: mixer for number, mixer in found if isinstance(mixer, DeltaSpec)})

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer that is attention, in order; None: it sees everything before it."""
        return tuple(spec.window for spec in self.attentions.values())

    @cached_property
    def rotations(self) -> tuple[Rotation, ...]:
        """The different RoPE tables that its layers turn by, in order of first use."""
        return tuple(dict.fromkeys(spec.rotation for spec in self.attentions.values()))

    @property
    def attention(self) -> AttentionSpec:
        """The attention that all its layers with attention have, their windows apart.

        Raises ConfigError for a model whose layers differ: what reads this is made for models whose layers are alike.
        """
        return _alike("attention", [replace(spec, window=None) for spec in self.attentions.values()])

    @property
    def ffn(self) -> FFN:
        """The FFN that all its layers have. Raises ConfigError for a model whose layers differ."""
        return _alike("FFN", [layer.ffn for layer in self.layers])

    @property
    def experts(self) -> ExpertsSpec | None:
        """The experts that all its MoE layers have; None: no layer is one. Raises ConfigError where they differ."""
        found = [layer.experts for layer in self.layers if layer.experts is not None]
        return _alike("experts", found) if found else None


def _alike(what: str, specs: Sequence[Spec]) -> Spec:
    kinds = tuple(dict.fromkeys(specs))
    if len(kinds) != 1:
        raise ConfigError(f"expected layers that are alike in {what}, found {len(kinds)} kinds: {kinds}")
    return kinds[0]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Decoder):
    """A target's geometry, checked; every field is in use by `lowlat.models.decoder`.

    family           a name in the table of `lowlat.models.families`
    embedding_scale  of the embedding's rows, in the compute dtype; None: they are taken as they are
    logit_divisor    of logits, by which the family's recipes divide the weight of the final norm
    logit_softcap    logits l become c tanh(l / c); None: they stay
    coded_kv         None: the cache has the compute dtype
    coded_rows       matrices of layers that are multiplied by e4m3 codes of a prompt's rows, see `code_activations`; by
                     name in order, so that a record's text is the same in every process
    drops_windows    layers whose window holds the whole context run without it, see `for_context`
    query_limit      positions up to which a scale of queries by position, which is not implemented, is 1
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
        """Tokens of prompt and text, at most."""
        return self.max_position if self.query_limit is None else min(self.max_position, self.query_limit)

    @property
    def usual_context(self) -> int:
        """Tokens up to which nothing that it computes depends on the context that it is loaded for."""
        windows = [window for window in self.windows if window is not None and self.drops_windows]
        lengths = [rotation.rope.original_max_position for rotation in self.rotations if rotation.rope.has_long_factors]
        return min([self.max_context, *windows, *lengths])

    def for_context(self, max_context: int) -> Self:
        """The geometry of a runtime of this context: windows that hold all of it left out, RoPE's factors chosen."""
        return replace(self, layers=tuple(self._in_context(layer, max_context) for layer in self.layers))

    def _in_context(self, layer: LayerSpec, max_context: int) -> LayerSpec:
        mixer = layer.mixer
        if not isinstance(mixer, AttentionSpec):
            return layer
        if self.drops_windows and mixer.window is not None and mixer.window >= max_context:
            mixer = replace(mixer, window=None)
        return replace(layer, mixer=replace(mixer, rope=mixer.rope.for_context(max_context)))

    def check_context(self, max_context: int, source: Path | str, *, flag: str | None = None) -> None:
        """Raise ConfigError for a context that is longer than the model's.

        source  the config, for the message
        flag    the option of the command line that it was given by, where that is not --max-context
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
        """How keys and values are kept: "fp8", or the compute dtype."""
        return self.dtype if self.coded_kv is None else "fp8"


@dataclass(frozen=True, kw_only=True)
class DraftConfig(Decoder):
    """The common part of all draft models' geometries; each method has a record of its own.

    method              the method of speculation that it is for
    layout              who writes files of this form; "target": its weights lie in the target's files; "whole": it is a
                        target by itself
    target_hidden_size  of the target
    draft_vocab_size    tokens that it drafts
    capture_boundaries  the target's residual streams that it reads. Boundary b is the stream entering layer b, 0 to L
                        (L: after the last layer, before the final norm)
    own_embedding, own_lm_head  whether the checkpoint carries them; else they are the target's
    embedding_scale     of the rows of the embedding that it reads, in the compute dtype; None: its own are taken as
                        they are, and the target's as the method says
    logit_softcap       logits l become c tanh(l / c); None: they stay
    own_draft_map       whether the checkpoint carries d2t; else draft ids are the target's
    is_cut              whether its LM head is rows of a larger one, gathered at load: own_lm_head and own_draft_map are
                        then true, and files have neither
    coverage            of a cut LM head, the share of its tokens in a text that it was not chosen by; None: unknown
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
