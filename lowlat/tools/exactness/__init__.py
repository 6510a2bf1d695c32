"""This package checks on a user's own pair that answers equal plain decoding, and how close numbers are to FP32.

`measure_exactness` compares answers token for token, `measure_fidelity` distributions with those of transformers.
"""

from lowlat.tools.exactness.fidelity import Fidelity, Rows, check_positions, measure_fidelity
from lowlat.tools.exactness.measure import measure_exactness
from lowlat.tools.exactness.report import Difference, Exactness, Sweep

__all__ = [
    "Difference", "Exactness", "Fidelity", "Rows", "Sweep", "check_positions", "measure_exactness", "measure_fidelity",
]  # fmt: skip
