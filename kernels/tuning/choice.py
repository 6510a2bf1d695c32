"""This module finds the table of the present GPU, the user's own before the shipped one, and logs it once."""

import logging
import re
from dataclasses import replace
from pathlib import Path

from lowlat.errors import ConfigError
from lowlat.kernels.toolchain.kernel import Gpu
from lowlat.kernels.tuning.table import SHIPPED, TuningTable, read_table

__all__ = ["file_name", "find_table", "tuned_gpu"]

logger = logging.getLogger("lowlat")
_said: set[tuple[str, Path | None]] = set()


def file_name(gpu_name: str) -> str:
    """Return the file name of a GPU's table, such as `nvidia-h200.json`."""
    return re.sub(r"[^a-z0-9]+", "-", gpu_name.lower()).strip("-") + ".json"


def find_table(gpu_name: str, gpu: Gpu, own: Path | None, shipped: Path = SHIPPED) -> TuningTable | None:
    """Find the table of a GPU by its name; None if there is none.

    own      the folder of the user's tables, whose entries take precedence
    A table of another GPU, or of a part of one, is ignored. A table that cannot be read is ignored with a warning.
    """
    found = None
    for folder in (shipped, own):
        path = None if folder is None else folder / file_name(gpu_name)
        if path is None:
            continue
        try:
            table = read_table(path) if path.is_file() else None
        except ConfigError as error:
            logger.warning("%s", error)
            continue
        except PermissionError as error:  # a folder that this user may not enter
            logger.warning("%s: no tuning table: %s; LOWLAT_TUNING names another folder", path, error.strerror)
            continue
        if table is None:
            continue
        if table.gpu == gpu_name and table.is_of(gpu):
            found = table if found is None else found.merged(table)
    return found


def tuned_gpu(gpu_name: str, gpu: Gpu, own: Path | None, shipped: Path = SHIPPED) -> Gpu:
    """Return the GPU with its table; log the table's commit, or its absence, once for each GPU and folder."""
    table = find_table(gpu_name, gpu, own, shipped)
    if (gpu_name, own) not in _said:
        _said.add((gpu_name, own))
        if table is None:
            logger.info("%s has no tuning table: plans are derived from its sizes; `lowlat tune` makes one", gpu_name)
        else:
            logger.info("tuning table of %s: %d plans, commit %s", gpu_name, len(table), table.commit or "unknown")
    return replace(gpu, tuning=table)
