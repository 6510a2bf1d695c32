"""These tests run integer kernels in Numba's simulator, which must be chosen before Numba is imported.

`tests/unit/kernels/test_simulated.py` runs them in a process of its own.
"""

import os

collect_ignore_glob = [] if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1" else ["test_*.py"]
