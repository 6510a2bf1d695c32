"""This is the interface of a weight format in files: the stored tensors of a matrix, and checks of their values.

`lowlat.kernels.formats` has the kernels' side of the same format, which packs, decodes and counts the canonical parts.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.recipes import Recipe
from lowlat.kernels.formats import WeightFormat

__all__ = ["Matrices", "StoredFormat"]


@dataclass(frozen=True)
class Matrices:
    """A stack of matrices [E, N, K] of one canonical weight, as a checkpoint stores them.

    weight       canonical name, without the name of the part
    stored       name in the checkpoint, without the suffix of a format
    interleaved  gate and up rows alternate; the canonical weight has all gate rows, then all up rows
    transposed   plain matrices are stored [E, K, N]; formats that pack numbers of a row together still store rows
    """

    weight: str
    stored: str
    shape: tuple[int, int, int]
    interleaved: bool = False
    transposed: bool = False


class StoredFormat(ABC):
    """A format in files; each has one object.

    packed              the kernels' side, with the format's name; its parts are the canonical tensors
    method              quant_method in config.json's quantization_config; None: the format of models without one
    transformers_config transformers' class of options that reads such files, for comparisons; None: it needs none
    """

    packed: ClassVar[WeightFormat]
    method: ClassVar[str | None] = None
    transformers_config: ClassVar[str | None] = None

    @property
    def name(self) -> str:
        """The format's name in the tables."""
        return self.packed.name

    def check_quantization(self, fields: Fields) -> None:
        """Read the other keys of quantization_config. Raises ConfigError for values that are not implemented."""
        fields.refuse_unknown(())

    @abstractmethod
    def recipes(self, matrices: Matrices, dtype: torch.dtype) -> list[Recipe]:
        """Return the recipes of the matrices' canonical parts; dtype is the compute dtype."""

    @abstractmethod
    def check_parts(self, labels: Mapping[str, str], parts: Mapping[str, torch.Tensor]) -> None:
        """Check the parts of a weight after they were read, and correct them in place.

        labels  part -> file and tensor, for messages
        Raises ConfigError for values that kernels do not compute exactly.
        """
