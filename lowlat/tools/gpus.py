"""This module describes GPUs, so that a machine without one can plan and compile kernels for them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from lowlat.errors import ConfigError
from lowlat.kernels.toolchain.kernel import Gpu
from lowlat.kernels.tuning.choice import tuned_gpu
from lowlat.kernels.tuning.table import SHIPPED, read_table

__all__ = ["DescribedGpu", "describe_gpu", "described_gpus"]


@dataclass(frozen=True)
class DescribedGpu:
    """A GPU by its driver's name, with its sizes, and its tuning table if one is shipped."""

    name: str
    facts: Gpu


# vendors' data sheets: SMs, shared memory of a block, capability, GB/s. GPUs with tuning tables are read from these.
_UNTUNED = {
    "NVIDIA A100-SXM4-80GB": Gpu(108, 163 * 1024, (8, 0), 2039.0),
    "NVIDIA B200": Gpu(148, 227 * 1024, (10, 0), 8000.0),
    "NVIDIA GeForce RTX 5090": Gpu(170, 99 * 1024, (12, 0), 1792.0),
}
SHORT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "h200": "NVIDIA H200",
        "h100": "NVIDIA H100 80GB HBM3",
        "a100": "NVIDIA A100-SXM4-80GB",
        "b200": "NVIDIA B200",
        "rtx5090": "NVIDIA GeForce RTX 5090",
    }
)


def described_gpus() -> dict[str, Gpu]:
    """Return all described GPUs by their drivers' names, without tuning tables."""
    tables = (read_table(path) for path in sorted(SHIPPED.glob("*.json")))
    tuned = {each.gpu: Gpu(each.num_multiprocessors, each.shared_bytes, each.capability, each.peak_gb_s)
             for each in tables}  # fmt: skip
    return {**tuned, **_UNTUNED}


def describe_gpu(name: str, own: Path | None = None) -> DescribedGpu:
    """Return a GPU by its driver's name or a short one, such as "h200", with its tuning table.

    own  the folder of the user's tables on the machine on which the kernels will run
    Raises ConfigError for a GPU that is not described.
    """
    known = described_gpus()
    full = SHORT_NAMES.get(name.lower().replace("-", "").replace(" ", ""), name)
    if full not in known:
        choices = ", ".join((*SHORT_NAMES, *(each for each in known if each not in SHORT_NAMES.values())))
        raise ConfigError(f"GPU {name!r:.80} is not described; there are {choices}")
    return DescribedGpu(full, tuned_gpu(full, known[full], own))
