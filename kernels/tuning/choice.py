"""The table of the card that is there: the user's own before the shipped one, logged once. It measures nothing."""

import logging
import re
from dataclasses import replace
from pathlib import Path

from lowlat.errors import ConfigError
from lowlat.kernels.toolchain.kernel import Card
from lowlat.kernels.tuning.table import SHIPPED, TuningTable, read_table

__all__ = ["file_name", "find_table", "tuned_card"]

logger = logging.getLogger("lowlat")
_said: set[tuple[str, Path | None]] = set()


def file_name(card_name: str) -> str:
    """The name of the file of a card's table, as `nvidia-h200.json`."""
    return re.sub(r"[^a-z0-9]+", "-", card_name.lower()).strip("-") + ".json"


def find_table(card_name: str, card: Card, own: Path | None, shipped: Path = SHIPPED) -> TuningTable | None:
    """The table of a card by its name; None where there is none.

    own      the folder of the user's tables, whose entries take precedence
    A table of another card, or of a part of one, is left out. One that cannot be read is left out with a warning.
    """
    found = None
    for folder in (shipped, own):
        path = None if folder is None else folder / file_name(card_name)
        if path is None or not path.is_file():
            continue
        try:
            table = read_table(path)
        except ConfigError as error:
            logger.warning("%s", error)
            continue
        if table.card == card_name and table.is_of(card):
            found = table if found is None else found.merged(table)
    return found


def tuned_card(card_name: str, card: Card, own: Path | None, shipped: Path = SHIPPED) -> Card:
    """The card with its table; its commit, or the lack of a table, is logged once for each card and folder."""
    table = find_table(card_name, card, own, shipped)
    if (card_name, own) not in _said:
        _said.add((card_name, own))
        if table is None:
            logger.info("%s has no tuning table: plans are derived from its sizes; `lowlat tune` makes one", card_name)
        else:
            logger.info("tuning table of %s: %d plans, commit %s", card_name, len(table), table.commit or "unknown")
    return replace(card, tuning=table)
