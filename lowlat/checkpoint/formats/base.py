"""This is the interface of a weight format, file side: the stored tensors of a matrix, and checks as it is read.

How the canonical parts are packed, decoded and counted is the kernels' side of the same format, in
`lowlat.kernels.formats`.
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
    """A stack of matrices [E, N, K] of one canonical weight, as a checkpoint has them.

    weight       canonical name, without the part
    stored       name in the checkpoint, without what a format appends
    interleaved  gate and up rows alternate; canonical are all gate rows, then all up rows
    transposed   plain matrices are stored [E, K, N]; formats that pack numbers of a row together still store rows
    """

    weight: str
    stored: str
    shape: tuple[int, int, int]
    interleaved: bool = False
    transposed: bool = False


class StoredFormat(ABC):
    """One format in files; there is one object of each.

    packed              the kernels' side, whose name is the format's, and whose parts are the canonical tensors
    method              quant_method in config.json's quantization_config; None for the format of models without one
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
        """How every canonical part of the matrices is made; dtype is the compute dtype."""

    @abstractmethod
    def check_parts(self, labels: Mapping[str, str], parts: Mapping[str, torch.Tensor]) -> None:
        """Check the parts of a weight when they have been read, and mend them in place.

        labels  part -> file and tensor, for messages
        Raises ConfigError for values that kernels do not compute exactly.
        """
