"""This package has the target families, one file each: it parses config.json to geometry, and has the family's recipes.

`FAMILIES` is the only table of them, by the model_type of config.json. A program may add a family of its own there
before it loads a model. `tests/examples` has two examples.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.recipes import Recipe
from lowlat.models.families import (
    ernie4_5,
    gemma2,
    gemma3,
    gemma4,
    glm4,
    gpt_oss,
    granite,
    llama,
    mellum,
    mistral,
    mixtral,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen_vl,
    seed_oss,
    smollm3,
)
from lowlat.models.families.dense import decoder_recipes
from lowlat.models.families.names import TensorNames
from lowlat.models.geometry import ComputeDtype, ModelConfig

__all__ = ["FAMILIES", "Family", "TensorNames"]


@dataclass(frozen=True)
class Family:
    """A family: how its config.json is parsed, and how its canonical weights are made from stored tensors.

    parse          config.json to geometry
    recipes        with the tensor names of text models, which `names` translates
    names          the tensor names of its files, the usual ones first
    ties_by_files  whether the LM head is the embedding if files have no LM head; False: the config says it
    """

    parse: Callable[[Fields, Path, ComputeDtype], ModelConfig]
    recipes: Callable[[ModelConfig], list[Recipe]] = decoder_recipes
    names: tuple[TensorNames, ...] = (TensorNames(),)
    ties_by_files: bool = False

    def names_in(self, stored: Collection[str] | None) -> TensorNames:
        """The tensor names of files with these tensors; None: the usual ones."""
        return next((each for each in self.names if stored is not None and each.fit(stored)), self.names[0])


def _stems(usual: str, skipped: tuple[str, ...]) -> tuple[TensorNames, ...]:
    """The tensor names of text and of vision-language models, the usual ones first; some files have the other's."""
    stems = sorted(("model", "model.language_model", "language_model.model"), key=lambda stem: stem != usual)
    return tuple(
        TensorNames(stem, "language_model.lm_head" if stem == "language_model.model" else "lm_head", skipped)
        for stem in stems
    )


def _hybrid(stem: str = "model") -> Family:
    return Family(qwen3_5.parse, qwen3_5.recipes, _stems(stem, qwen3_5.SKIPPED), ties_by_files=True)


def _gemma3(stem: str) -> Family:
    return Family(gemma3.parse, gemma3.recipes, _stems(stem, gemma3.SKIPPED))


def _gemma4(stem: str) -> Family:
    return Family(gemma4.parse, gemma4.recipes, _stems(stem, gemma4.SKIPPED))


QWEN_VL = _stems("model.language_model", qwen_vl.SKIPPED)

FAMILIES: dict[str, Family] = {
    "llama": Family(llama.parse),
    "mistral": Family(mistral.parse),
    "ministral3": Family(mistral.parse),
    "mistral3": Family(mistral.parse, names=_stems("language_model.model", mistral.SKIPPED)),
    "mixtral": Family(mixtral.parse, mixtral.recipes),
    "qwen2": Family(qwen2.parse),
    "qwen3": Family(qwen3.parse),
    "qwen3_moe": Family(qwen3_moe.parse, qwen3_moe.recipes),
    "mellum": Family(mellum.parse, qwen3_moe.recipes, (TensorNames(skipped=mellum.SKIPPED),)),
    "qwen2_vl": Family(qwen_vl.parse, names=QWEN_VL),
    "qwen2_5_vl": Family(qwen_vl.parse, names=QWEN_VL),
    "qwen3_vl": Family(qwen_vl.parse, names=QWEN_VL),
    "qwen3_vl_moe": Family(qwen_vl.parse, qwen_vl.recipes, QWEN_VL),
    "qwen3_5": _hybrid("model.language_model"),
    "qwen3_5_text": _hybrid(),
    "qwen3_5_moe": _hybrid("model.language_model"),
    "qwen3_5_moe_text": _hybrid(),
    "qwen3_next": _hybrid(),
    "gemma2": Family(gemma2.parse, gemma2.recipes),
    "gemma3": _gemma3("language_model.model"),
    "gemma3_text": _gemma3("model"),
    "gemma4": _gemma4("model.language_model"),
    "gemma4_text": _gemma4("model"),
    "gemma4_unified": _gemma4("model.language_model"),
    "gemma4_unified_text": _gemma4("model"),
    "gpt_oss": Family(gpt_oss.parse, gpt_oss.recipes),
    "glm": Family(glm4.parse, glm4.recipes),
    "glm4": Family(glm4.parse, glm4.recipes),
    "phi3": Family(phi3.parse, phi3.recipes),
    "granite": Family(granite.parse, granite.recipes),
    "granitemoehybrid": Family(granite.parse_hybrid, granite.hybrid_recipes),
    "seed_oss": Family(seed_oss.parse),
    "smollm3": Family(smollm3.parse),
    "ernie4_5": Family(ernie4_5.parse, ernie4_5.recipes),
}
