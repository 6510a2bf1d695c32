"""How files call the tensors of a target. Recipes are written by the names that text models have."""

from collections.abc import Collection
from dataclasses import dataclass

__all__ = ["TensorNames"]

STEM, LM_HEAD = "model", "lm_head"


@dataclass(frozen=True)
class TensorNames:
    """The names of one kind of files.

    stem     the beginning of the decoder's names
    lm_head  the name of the LM head's module
    skipped  beginnings of the names of tensors that are no part of the target
    """

    stem: str = STEM
    lm_head: str = LM_HEAD
    skipped: tuple[str, ...] = ()

    @property
    def are_plain(self) -> bool:
        """Whether they are those of text models."""
        return self.stem == STEM and self.lm_head == LM_HEAD

    def stored(self, name: str) -> str:
        """The name in these files of a tensor, by its name in a text model's."""
        for plain, own in ((STEM, self.stem), (LM_HEAD, self.lm_head)):
            if name.startswith(f"{plain}."):
                return own + name.removeprefix(plain)
        return name

    def fit(self, names: Collection[str]) -> bool:
        """Whether files with tensors of these names are of this kind."""
        return f"{self.stem}.embed_tokens.weight" in names
