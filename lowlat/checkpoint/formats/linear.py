"""This module has the layouts of quantised linear layers in files: their tensors, and how these become parts.

It has one class for each public layout. Sources: compressed-tensors' compressors, transformers' integrations, AutoAWQ's
and GPTQModel's packing, TensorRT Model Optimizer's exports.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch

from lowlat.checkpoint.recipes import Conversion, Piece
from lowlat.errors import ConfigError
from lowlat.kernels.formats import FP8, FP8_BLOCK, NVFP4, MatrixFormat
from lowlat.kernels.formats.fp8 import has_nan
from lowlat.kernels.formats.int4 import GROUPS, int4_format, unpack_nibbles

__all__ = [
    "AwqLinear", "Fp8Linear", "GptqLinear", "Nvfp4Linear", "PackedLinear", "StoredLinear", "WrittenLinear",
    "written_layout",
]  # fmt: skip

FLOATS = ("F32", "BF16", "F16")
E4M3 = ("F8_E4M3",)
SCALE_NAMES = ("weight_scale", "weight_scale_inv")  # of FP8 layers
WORDS = ("I32",)
BLOCK = 128
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each nibble of a word holds
V1_MIDDLE, MIDDLE = 7, 8  # the zero points of symmetric files
Shape = tuple[int, ...]


class StoredLinear(ABC):
    """A layout of linear layers in files.

    spare_biases  whether layers without a bias may be stored with a bias of zeros
    """

    spare_biases: ClassVar[bool] = False

    @property
    @abstractmethod
    def packed(self) -> MatrixFormat:
        """The format that its layers are loaded into."""

    def in_files(self, names: Collection[str]) -> "StoredLinear":
        """Return this layout with the tensor names that the files use; `names` are the files' tensors."""
        return self

    @abstractmethod
    def pieces(self, module: str, rows: int, columns: int) -> dict[str, Piece]:
        """Return the stored tensor of each part of a layer [N, K]."""


class WrittenLinear(StoredLinear):
    """A compressed-tensors layout that lowlat also writes."""

    @property
    @abstractmethod
    def spelling(self) -> tuple[str, dict[str, Any]]:
        """Its name in quantization_config's `format`, and the keys of a group's `weights`."""

    @abstractmethod
    def tensors(self, module: str, shape: Shape, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the stored tensors of a layer [N, K] with these parts: the inverse of `pieces`."""


@dataclass(frozen=True)
class Fp8Linear(WrittenLinear):
    """FP8: `weight` in e4m3, times scales: one for the tensor, for each row, or for each block of 128 by 128.

    scale  the scales' name; files use either, and `weight_scale_inv` is not an inverse in spite of its name
    """

    per: Literal["tensor", "channel", "block"]
    scale: str = "weight_scale"

    @property
    def packed(self) -> MatrixFormat:
        """See `StoredLinear.packed`."""
        return FP8_BLOCK if self.per == "block" else FP8

    def in_files(self, names: Collection[str]) -> "Fp8Linear":
        """See `StoredLinear.in_files`."""
        found = {name.rpartition(".")[2] for name in names}.intersection(SCALE_NAMES)
        return replace(self, scale=found.pop()) if len(found) == 1 else self

    def pieces(self, module: str, rows: int, columns: int) -> dict[str, Piece]:
        """See `StoredLinear.pieces`."""
        groups = -(-columns // BLOCK) if self.per == "block" else 1
        stored: dict[str, tuple[Shape, tuple[Shape, ...]]] = {
            "tensor": ((1,), ((), (1, 1))),
            "channel": ((rows, 1), ((rows,),)),
            "block": ((-(-rows // BLOCK), groups), ()),
        }
        shape, also = stored[self.per]
        scales = Conversion((rows, groups), FLOATS, partial(_by_row, rows, groups), also)
        codes = Conversion((rows, columns), E4M3, _e4m3)
        return {
            "fp8": Piece(f"{module}.weight", (rows, columns), codes),
            "fp8_scales": Piece(f"{module}.{self.scale}", shape, scales),
        }

    @property
    def spelling(self) -> tuple[str, dict[str, Any]]:
        """See `WrittenLinear.spelling`."""
        return "float-quantized", {"num_bits": 8, "type": "float", "strategy": self.per}

    def tensors(self, module: str, shape: Shape, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `WrittenLinear.tensors`; writes a scale for each row."""
        codes = parts["fp8"].view(torch.float8_e4m3fn)
        return {f"{module}.weight": codes, f"{module}.{self.scale}": parts["fp8_scales"]}


@dataclass(frozen=True)
class PackedLinear(WrittenLinear):
    """compressed-tensors' `pack-quantized`: words of eight inputs' codes, and of eight outputs' zero points."""

    group: int
    symmetric: bool

    @property
    def packed(self) -> MatrixFormat:
        """See `StoredLinear.packed`."""
        return int4_format(self.group, has_zeros=not self.symmetric)

    def pieces(self, module: str, rows: int, columns: int) -> dict[str, Piece]:
        """See `StoredLinear.pieces`."""
        groups = columns // self.group
        shape = Piece(f"{module}.weight_shape", (2,))
        codes = Conversion((rows, columns // 2), WORDS, partial(_words_along_inputs, (rows, columns)), beside=(shape,))
        found = {
            "int4": Piece(f"{module}.weight_packed", (rows, columns // 8), codes),
            "int4_scales": _scales(f"{module}.weight_scale", rows, groups),
        }
        if not self.symmetric:
            zeros = Conversion((rows, groups), WORDS, partial(_zeros_along_outputs, rows))
            found["int4_zeros"] = Piece(f"{module}.weight_zero_point", (-(-rows // 8), groups), zeros)
        return found

    @property
    def spelling(self) -> tuple[str, dict[str, Any]]:
        """See `WrittenLinear.spelling`."""
        return "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": self.group}

    def tensors(self, module: str, shape: Shape, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `WrittenLinear.tensors`; writes no zero points."""
        return {
            f"{module}.weight_packed": parts["int4"].view(torch.int32),
            f"{module}.weight_scale": parts["int4_scales"],
            f"{module}.weight_shape": torch.tensor(shape),
        }


@dataclass(frozen=True)
class AwqLinear(StoredLinear):
    """AutoAWQ's `gemm`: eight outputs in a word, in an order of their own, inputs as rows; with zero points."""

    group: int

    @property
    def packed(self) -> MatrixFormat:
        """See `StoredLinear.packed`."""
        return int4_format(self.group, has_zeros=True)

    def pieces(self, module: str, rows: int, columns: int) -> dict[str, Piece]:
        """See `StoredLinear.pieces`."""
        _check_outputs(module, rows)
        groups = columns // self.group
        codes = Conversion((rows, columns // 2), WORDS, _awq_codes)
        zeros = Conversion((rows, groups), WORDS, _awq_zeros)
        return {
            "int4": Piece(f"{module}.qweight", (columns, rows // 8), codes),
            "int4_scales": _scales(f"{module}.scales", rows, groups, transposed=True),
            "int4_zeros": Piece(f"{module}.qzeros", (groups, rows // 8), zeros),
        }


@dataclass(frozen=True)
class GptqLinear(StoredLinear):
    """GPTQ: eight inputs in a word, inputs as rows; zero points of eight outputs in a word.

    has_offset  zero points are stored minus one (`checkpoint_format` "gptq", but not "gptq_v2")
    symmetric   all zero points are 8; files store 7 or 8, not always as their config says, so the file decides
    """

    group: int
    has_offset: bool
    symmetric: bool
    spare_biases: ClassVar[bool] = True

    @property
    def packed(self) -> MatrixFormat:
        """See `StoredLinear.packed`."""
        return int4_format(self.group, has_zeros=True)

    def pieces(self, module: str, rows: int, columns: int) -> dict[str, Piece]:
        """See `StoredLinear.pieces`."""
        _check_outputs(module, rows)
        groups = columns // self.group
        order = Piece(f"{module}.g_idx", (columns,))
        codes = Conversion((rows, columns // 2), WORDS, partial(_gptq_codes, self.group), beside=(order,))
        zeros = Conversion((rows, groups), WORDS, partial(_gptq_zeros, self.has_offset, self.symmetric))
        return {
            "int4": Piece(f"{module}.qweight", (columns // 8, rows), codes),
            "int4_scales": _scales(f"{module}.scales", rows, groups, transposed=True),
            "int4_zeros": Piece(f"{module}.qzeros", (groups, rows // 8), zeros),
        }


@dataclass(frozen=True)
class Nvfp4Linear(StoredLinear):
    """NVFP4: two E2M1 numbers a byte, an e4m3 scale for 16 of them, and one factor for the tensor.

    codes, factor  names of the tensor of numbers and of the factor
    divides        the factor divides the scales (compressed-tensors); else it multiplies them (ModelOpt)
    """

    codes: str
    factor: str
    divides: bool

    @property
    def packed(self) -> MatrixFormat:
        """See `StoredLinear.packed`."""
        return NVFP4

    def pieces(self, module: str, rows: int, columns: int) -> dict[str, Piece]:
        """See `StoredLinear.pieces`."""
        shape, groups = (rows, columns // 2), (rows, columns // NVFP4.block)
        factor = Conversion((rows, 1), FLOATS, partial(_factor, rows, self.divides), ((),))
        return {
            "nvfp4": Piece(f"{module}.{self.codes}", shape, Conversion(shape, ("U8",), _as_it_is)),
            "nvfp4_scales": Piece(f"{module}.weight_scale", groups, Conversion(groups, E4M3, _e4m3)),
            "nvfp4_factors": Piece(f"{module}.{self.factor}", (1,), factor),
        }


def written_layout(packed: MatrixFormat) -> WrittenLinear:
    """Return the layout in which a format is written. Raises ConfigError if lowlat does not write it."""
    known: dict[str, WrittenLinear] = {FP8.name: Fp8Linear("channel")}
    known |= {int4_format(group, has_zeros=False).name: PackedLinear(group, True) for group in GROUPS}
    if packed.name not in known:
        raise ConfigError(f"checkpoints are written in {', '.join(known)}, not in {packed.name}")
    return known[packed.name]


def _check_outputs(module: str, rows: int) -> None:
    if rows % 8:
        raise ConfigError(f"{module} has {rows} outputs; words that hold eight of them need a multiple of 8")


def _scales(name: str, rows: int, groups: int, *, transposed: bool = False) -> Piece:
    """Return the piece of group scales, stored [N, K / group] or transposed."""
    make = _turned if transposed else _as_it_is
    return Piece(name, (groups, rows) if transposed else (rows, groups), Conversion((rows, groups), FLOATS, make))


def _as_it_is(_label: str, stored: torch.Tensor) -> torch.Tensor:
    return stored


def _turned(_label: str, stored: torch.Tensor) -> torch.Tensor:
    return stored.T


def _e4m3(label: str, stored: torch.Tensor) -> torch.Tensor:
    if has_nan(stored):
        raise ConfigError(f"{label}: expected e4m3 numbers, found NaN")
    return stored


def _by_row(rows: int, groups: int, _label: str, stored: torch.Tensor) -> torch.Tensor:
    """Expand the scales of a tensor, of rows or of blocks of rows, to each row."""
    if stored.numel() == 1:
        return stored.reshape(1, 1).expand(rows, groups)
    scales: torch.Tensor = stored.reshape(-1, groups)
    return scales if scales.shape[0] == rows else scales.repeat_interleave(BLOCK, 0)[:rows]


def _factor(rows: int, divides: bool, label: str, stored: torch.Tensor) -> torch.Tensor:
    value = stored.float().reshape(1, 1)
    if divides and not bool(value > 0):
        raise ConfigError(f"{label}: expected a number above 0, which divides, found {float(value)}")
    return (1 / value if divides else value).expand(rows, 1)


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """Unpack the eight numbers of each word, lowest bits first: int32 [..., n] to uint8 [..., 8 n]."""
    return unpack_nibbles(words.contiguous().view(torch.uint8))


def _pairs(numbers: torch.Tensor) -> torch.Tensor:
    """Pack two numbers a byte, the first in the low nibble: uint8 [..., n] to uint8 [..., n / 2]."""
    return numbers[..., 0::2] | (numbers[..., 1::2] << 4)


def _words_along_inputs(shape: Shape, label: str, words: torch.Tensor, told: torch.Tensor) -> torch.Tensor:
    if told.tolist() != list(shape):
        raise ConfigError(f"{label}: its weight_shape is {told.tolist()}, expected {list(shape)}")
    return words.view(torch.uint8)


def _zeros_along_outputs(rows: int, _label: str, words: torch.Tensor) -> torch.Tensor:
    return _nibbles(words.T).T[:rows]


def _awq_columns(words: torch.Tensor) -> torch.Tensor:
    """Unpack the outputs of each row of words, in order: int32 [n, N / 8] to uint8 [n, N]."""
    numbers = _nibbles(words).reshape(words.shape[0], -1, 8)
    return numbers[..., [AWQ_ORDER.index(column) for column in range(8)]].flatten(-2)


def _awq_zeros(_label: str, words: torch.Tensor) -> torch.Tensor:
    return _awq_columns(words).T


def _awq_codes(_label: str, words: torch.Tensor) -> torch.Tensor:
    return _pairs(_awq_columns(words).T)


def _gptq_codes(group: int, label: str, words: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    expected = torch.arange(order.shape[0]) // group
    if not torch.equal(order.long(), expected):
        raise ConfigError(
            f"{label}: its g_idx does not ascend by groups of {group}; activation order is not implemented"
        )
    return words.T.contiguous().view(torch.uint8)


def _gptq_zeros(has_offset: bool, symmetric: bool, _label: str, words: torch.Tensor) -> torch.Tensor:
    zeros = _nibbles(words).T
    if symmetric:
        low, high = (int(bound) for bound in torch.aminmax(zeros))
        if low == high and low in (V1_MIDDLE, MIDDLE):
            return torch.full_like(zeros, MIDDLE)
    return (zeros + 1) & 15 if has_offset else zeros
