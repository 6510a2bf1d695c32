"""Measurements, run from a checkout: `python -m bench.weights`. Nothing of it is installed."""

import sys
from pathlib import Path

# some programs share the tests' stand-ins
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
