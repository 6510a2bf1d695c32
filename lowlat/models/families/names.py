"""This module translates tensor names: recipes use the names of text models, and files may have others."""

from collections.abc import Collection
from dataclasses import dataclass

__all__ = ["TensorNames"]

STEM, LM_HEAD = "model", "lm_head"


@dataclass(frozen=True)
class TensorNames:
    """The tensor names of one kind of files.

    stem     the prefix of the decoder's names
    lm_head  the name of the LM head's module
    skipped  name prefixes of tensors that are no part of the target
    """

    stem: str = STEM
    lm_head: str = LM_HEAD
    skipped: tuple[str, ...] = ()

    @property
    def are_plain(self) -> bool:
        """Whether they are the names of text models."""
        return self.stem == STEM and self.lm_head == LM_HEAD

    def stored(self, name: str) -> str:
        """The name of a tensor in these files, by its name in text models."""
        for plain, own in ((STEM, self.stem), (LM_HEAD, self.lm_head)):
            if name.startswith(f"{plain}."):
                return own + name.removeprefix(plain)
        return name

    def fit(self, names: Collection[str]) -> bool:
        """Whether files with these tensor names are of this kind."""
        return f"{self.stem}.embed_tokens.weight" in names
