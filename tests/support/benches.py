"""Modules of bench/ and docs/, which lie next to the packages and are run from the checkout with `python -m`."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

for folder in ("bench", "docs"):
    if folder not in sys.modules:
        package = ModuleType(folder)
        package.__path__ = [str(ROOT / folder)]
        sys.modules[folder] = package  # so that `from bench.weights import ...` is found after an import of this module


def bench(name: str) -> Any:
    """A module of bench/ by its name there."""
    return importlib.import_module(f"bench.{name}")


def docs(name: str) -> Any:
    """A module of docs/ by its name there."""
    return importlib.import_module(f"docs.{name}")
