"""A trained hybrid with an MTP layer, 2.9 million parameters, and beginnings of texts that nobody trained on.

`bench/training/hybrid.py` of commit 5e4bb6fa made it in five minutes on one H200. Its tokenizer is
the bundled pair's, and its text a quarter of theirs, see `lowlat/demo/README.md`. `loss.json` next to it has the log.
"""

import json
from pathlib import Path

__all__ = ["TRAINED_HYBRID", "beginnings"]

TRAINED_HYBRID = Path(__file__).parents[1] / "data" / "hybrid"
PROMPTS = Path(__file__).parents[2] / "lowlat" / "demo" / "prompts.json"


def beginnings(domains: int, each: int = 1) -> list[str]:
    """The first held-out beginnings of so many domains."""
    found: dict[str, list[str]] = json.loads(PROMPTS.read_text(encoding="utf-8"))
    return [prompt for prompts in list(found.values())[:domains] for prompt in prompts[:each]]
