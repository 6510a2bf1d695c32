"""This module has the geometry of a multi-token prediction layer.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2; Qwen3-Next.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lowlat.errors import ConfigError
from lowlat.models.geometry import ModelConfig
from lowlat.models.layer_spec import FFN, AttentionSpec, LayerSpec
from lowlat.speculators.eagle3.geometry import Eagle3Config

__all__ = ["MtpConfig", "mtp_config"]


@dataclass(frozen=True, kw_only=True)
class MtpConfig(Eagle3Config):
    """A draft model of one layer, like the target's layers of full attention; its input is fc of two inputs.

    The feature is the target's state after its final norm. For deeper drafts it is the layer's own normed output.
    Embedding and LM head are the target's.
    family         the target's, which decides how the layer's weights are made from stored tensors
    fused_experts  whether files store its experts in one tensor; else one by one
    """

    method: ClassVar[str] = "mtp"
    family: str
    fused_experts: bool = True


def mtp_config(target: ModelConfig, ffn: FFN | None = None, capture_layers: Sequence[int] | None = None) -> MtpConfig:
    """Make the geometry of a target's MTP layer, without quantisation.

    ffn             of the layer; None: that of the target's last layer
    capture_layers  the boundary whose stream is normed for the feature; None: the last one
    Raises ConfigError for a target without full attention, and unless there is exactly one boundary of the target.
    """
    boundaries = (target.num_layers,) if capture_layers is None else tuple(capture_layers)
    if len(boundaries) != 1 or not 0 <= boundaries[0] <= target.num_layers:
        raise ConfigError(
            f"capture_layers must be one boundary from 0 to the target's {target.num_layers} layers for method 'mtp', "
            f"got {list(boundaries)}"
        )
    found = (each for each in target.layers if isinstance(each.mixer, AttentionSpec) and each.mixer.window is None)
    like = next(found, None)
    if like is None:
        raise ConfigError("the target has no layer of full attention, which its MTP layer would be like")
    return MtpConfig(
        layout="target",
        family=target.family,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        max_position=target.max_position,
        rms_norm_eps=target.rms_norm_eps,
        layers=(LayerSpec(mixer=like.mixer, ffn=target.layers[-1].ffn if ffn is None else ffn),),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=target.vocab_size,
        capture_boundaries=boundaries,
        own_lm_head=False,
        own_draft_map=False,
        final_hidden=True,
        norm_output=True,
    )
