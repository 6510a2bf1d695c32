"""This package has measurements that run from a checkout: `python -m bench.weights`. It is not installed."""

import sys
from pathlib import Path

# some programs use the tests' fakes
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
