"""Measure a target's loss by the place in long texts.

    python -m lowlat.tools.train.long.losses --target NAME=DIR ... --texts held_out.json.xz --length 131072 --out FILE

Each text is one row, cut at `--length` tokens; shorter ones are left out. A row of the result is a target, a group of
texts and a range of positions: the mean loss of the tokens that stand there. The groups are those of `long.texts`,
`unseen` and `withheld`.
"""

import argparse
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowlat.tools.train.long.texts import is_unseen, named, read_texts
from lowlat.tools.train.target import LossModule
from lowlat.tools.train.teacher import Teacher

__all__ = ["losses_of", "main", "ranges_of"]

FIRST_RANGE = 1024  # positions; each range behind it is as long as all before


def ranges_of(length: int) -> list[tuple[int, int]]:
    """Ranges of positions up to `length`: 0 to 1024, and then doubling."""
    edges = [0, FIRST_RANGE]
    while edges[-1] < length:
        edges.append(2 * edges[-1])
    edges[-1] = min(edges[-1], length)
    return list(pairwise(edges))


@torch.no_grad()
def losses_of(teacher: Teacher, tokens: Sequence[int]) -> Tensor:
    """Return the loss of each token but the first, [len(tokens) - 1] fp32, on the CPU."""
    row = torch.tensor([list(tokens)], dtype=torch.long, device=teacher.device)
    losses: Tensor = LossModule(teacher.model)(row, reduction="none")
    return losses.float().cpu()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every target, and write after each what there is so far."""
    options = _options(arguments)
    rows: list[dict[str, Any]] = []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    texts = read_texts(options.texts)
    for name, directory in options.target:
        teacher = Teacher.load(directory, options.device)
        for group in ("unseen", "withheld"):
            found = []
            for title, text in texts.items():
                tokens = teacher.tokenizer(text, add_special_tokens=False)["input_ids"][: options.length]
                if is_unseen(title) == (group == "unseen") and len(tokens) == options.length:
                    found.append(losses_of(teacher, tokens))
            for begin, end in ranges_of(options.length) if found else ():
                losses = torch.stack(found)[:, max(0, begin - 1) : end - 1]
                row = {"target": name, "texts": group, "num_texts": len(found), "from": begin, "to": end}
                rows.append({**row, "loss": round(float(losses.mean()), 4)})
                print(json.dumps(rows[-1]), flush=True)
        options.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure a target's loss by the place in long texts.")
    parser.add_argument("--target", nargs="+", type=named, required=True, metavar="NAME=DIR")
    parser.add_argument("--texts", type=Path, required=True, help="JSON of name -> text, as long.texts writes")
    parser.add_argument("--length", type=int, default=131072, help="tokens of a text")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
