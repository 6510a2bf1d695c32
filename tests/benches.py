"""Modules of bench/, which lies next to the packages and is run from the checkout with `python -m`."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

if "bench" not in sys.modules:
    package = ModuleType("bench")
    package.__path__ = [str(ROOT / "bench")]
    sys.modules["bench"] = package  # so that `from bench.weights import ...` is found after an import of this module


def bench(name: str) -> Any:
    """A module of bench/ by its name there."""
    return importlib.import_module(f"bench.{name}")
