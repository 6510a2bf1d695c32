"""The limits of GEMMs' kernels."""

from collections.abc import Mapping

from lowlat.kernels.common.limits import Limit, Rule, Size

__all__ = ["DEPTH", "LIMITS"]

DEPTH = Limit(multiple=8)  # K

LIMITS: Mapping[str, tuple[Rule, ...]] = {"linear": (Size("K", DEPTH, "inputs"),)}
