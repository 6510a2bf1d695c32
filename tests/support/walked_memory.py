"""Loads and stores of walked kernels: numbers in the bytes of tensors and of shared memory."""

from collections.abc import Callable
from struct import Struct
from typing import Any

from gpu_arithmetic import bits_of, number_of

__all__ = ["Place", "load", "load_number", "load_words", "store", "store_number"]

Place = Callable[[int, int], tuple[memoryview, int]]  # (address, bytes) -> the memory that has them, and where in it
WORD = Struct("<I")


def load_words(where: Place, form: str) -> Callable[[int], tuple[int, ...]]:
    """Integers, as `struct` writes them: "4I" are four words."""
    layout = Struct(f"<{form}")
    return lambda address: layout.unpack_from(*where(int(address), layout.size))


def load(where: Place, form: str) -> Callable[[int], int]:
    """One integer."""
    layout = Struct(f"<{form}")

    def one(address: int) -> int:
        number: int = layout.unpack_from(*where(int(address), layout.size))[0]
        return number

    return one


def load_number(where: Place) -> Callable[[int], Any]:
    """One float32, whatever NaN it is."""
    return lambda address: number_of(WORD.unpack_from(*where(int(address), 4))[0])


def store(where: Place, form: str) -> Callable[..., None]:
    """Integers, that must be of the form."""
    layout = Struct(f"<{form}")
    return lambda address, *values: layout.pack_into(*where(int(address), layout.size), *values)


def store_number(where: Place) -> Callable[[int, Any], None]:
    """One number, as float32."""
    return lambda address, value: WORD.pack_into(*where(int(address), 4), bits_of(value))
