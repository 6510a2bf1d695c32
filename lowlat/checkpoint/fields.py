"""This module reads typed values of a configuration's keys, and records which keys were used.

A JSON null counts as absent, as in transformers.
"""

import math
from collections.abc import Collection
from typing import Any

from lowlat.checkpoint.json_file import shown
from lowlat.errors import ConfigError

__all__ = ["Fields"]

MAX_EXACT_INTEGER = 1 << 53


class Fields:
    """One JSON object; every getter raises ConfigError naming the file, the key, what was expected and found."""

    def __init__(self, values: dict[str, Any], label: str) -> None:
        self.values = values
        self.label = label
        self._used: set[str] = set()

    def with_defaults(self, defaults: dict[str, Any]) -> "Fields":
        """Return a copy with default values for absent keys; used keys stay used."""
        return self.with_values({**defaults, **self.values})

    def with_values(self, values: dict[str, Any]) -> "Fields":
        """Return a copy with these values; used keys stay used."""
        made = Fields({**self.values, **values}, self.label)
        made._used |= self._used
        return made

    def error(self, key: str, expected: str) -> ConfigError:
        """Return the error for a key with another value than expected."""
        return ConfigError(f"{self.label}: {key} must be {expected}, found {shown(self.values.get(key))}")

    def raw(self, key: str) -> Any:
        """Return a value as it is, None when absent; the key counts as used."""
        self._used.add(key)
        return self.values.get(key)

    def _required(self, key: str, expected: str) -> ConfigError:
        return ConfigError(f"{self.label}: {key} is missing; expected {expected}")

    def optional_integer(self, key: str, low: int, high: int) -> int | None:
        """Return an integer in [low, high], or None when absent. A bool or a float is not an integer."""
        value = self.raw(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"an integer from {low} to {high}")
        return value

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """Return an integer in [low, high]; it is required unless there is a default."""
        value = self.optional_integer(key, low, high)
        if value is not None:
            return value
        if default is None:
            raise self._required(key, f"an integer from {low} to {high}")
        return default

    def optional_number(self, key: str, low: float, high: float) -> float | None:
        """Return a finite number in [low, high] as a float, or None when absent."""
        value = self.raw(key)
        if value is None:
            return None
        expected = f"a number from {low:g} to {high:g}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, expected)
        if isinstance(value, int) and abs(value) > MAX_EXACT_INTEGER:
            raise self.error(key, expected)
        number = float(value)
        if not math.isfinite(number) or not low <= number <= high:
            raise self.error(key, expected)
        return number

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """Return a finite number in [low, high]; it is required unless there is a default."""
        value = self.optional_number(key, low, high)
        if value is not None:
            return value
        if default is None:
            raise self._required(key, f"a number from {low:g} to {high:g}")
        return default

    def optional_boolean(self, key: str) -> bool | None:
        """Return true or false, or None when absent. 0 and 1 are not booleans."""
        value = self.raw(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        """Return true or false, or the default when absent."""
        value = self.optional_boolean(key)
        return default if value is None else value

    def optional_string(self, key: str) -> str | None:
        """Return a string, or None when absent."""
        value = self.raw(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def optional_object(self, key: str) -> "Fields | None":
        """Return a nested object as Fields of its own, or None when absent."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return Fields(value, f"{self.label}: {key}")

    def optional_integers(self, key: str, low: int, high: int, *, max_count: int) -> tuple[int, ...] | None:
        """Return a list of integers in [low, high], or None when absent."""
        value = self.raw(key)
        if value is None:
            return None
        expected = f"a list of at most {max_count} integers from {low} to {high}"
        if not isinstance(value, list) or len(value) > max_count:
            raise self.error(key, expected)
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int) or not low <= item <= high:
                raise self.error(key, expected)
        return tuple(value)

    def numbers(self, key: str, low: float, high: float, *, count: int, what: str) -> tuple[float, ...]:
        """Return a list of `count` finite numbers in [low, high]; `what` names in the error what each is for."""
        value, expected = self.raw(key), f"a list of {count} numbers from {low:g} to {high:g}, one a {what}"
        if not isinstance(value, list) or len(value) != count:
            found = f"{len(value)} entries" if isinstance(value, list) else shown(value)
            raise ConfigError(f"{self.label}: {key} must be {expected}; found {found}")
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int | float) or not low <= item <= high:
                raise ConfigError(f"{self.label}: {key} must be {expected}; found {shown(item)}")
        return tuple(map(float, value))

    def optional_strings(self, key: str, *, max_count: int) -> tuple[str, ...] | None:
        """Return a list of strings, or None when absent."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > max_count or not all(isinstance(v, str) for v in value):
            raise self.error(key, f"a list of at most {max_count} strings")
        return tuple(value)

    def refuse_unless(self, key: str, allowed: Collection[Any], why: str) -> None:
        """Refuse a key by name if its value is present and not allowed."""
        value = self.raw(key)
        # `in` would accept 1 for True
        if value is not None and not any(type(value) is type(item) and value == item for item in allowed):
            choices = f"; allowed: {', '.join(repr(item) for item in allowed)}" if allowed else ""
            raise ConfigError(f"{self.label}: {key} = {shown(value)} is not implemented ({why}){choices}")

    def refuse_unknown(self, harmless: Collection[str]) -> None:
        """Refuse the first key that is unused, not known to be harmless, and switched on.

        Null, false and empty values are off: they ask for nothing, but for keys where they do, which must have been
        read before. Keys with a leading underscore are the writing library's own notes.
        """
        for key, value in self.values.items():
            if key in self._used or key in harmless or key.startswith("_"):
                continue
            if value is None or value is False or value == "" or value == [] or value == {}:
                continue
            raise ConfigError(
                f"{self.label}: {shown(key)} = {shown(value)} is not a key that lowlat knows; it may change what "
                f"the model computes, so the model is refused (remove the key if it does not)"
            )
