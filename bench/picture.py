"""This program draws README's picture: ms a decode step of lowlat and vLLM on one H200, from committed results.

python -m bench.picture
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["OUT", "Bar", "bars", "main", "picture"]

FOLDER = Path(__file__).parent / "results" / "h200"
SOURCE, OUT = FOLDER / "vllm.json", FOLDER / "steps.svg"
WIDTH, LEFT, RIGHT, TOP = 760, 262, 52, 40
ROW, BAR, GAP = 46, 15, 3
STYLE = """
text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
.case, .axis { font-size: 12px; fill: #59636e; }
.own { fill: #1f6feb; } .other { fill: #afb8c1; } .floor { stroke: #1f2328; stroke-width: 2; }
.own-ms { font-weight: 600; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; } .case, .axis { fill: #9198a1; } .own { fill: #4493f8; } .other { fill: #59636e; }
  .floor { stroke: #f0f6fc; }
}
"""


class Bar(NamedTuple):
    """One case: both engines' times of a step and the time that its bytes alone take, ms."""

    name: str
    case: str
    lowlat: float
    vllm: float
    floor: float


def bars(source: Path = SOURCE) -> list[Bar]:
    """The cases that are drawn; lowlat's time is of the same day, or of the result file that the row names."""
    found = []
    for row in json.loads(source.read_text(encoding="utf-8"))["rows"]:
        if row.get("drawn", True):
            ms, over = (row["lowlat_ms"], row["over_floor"]) if "lowlat_ms" in row else _measured(**row["lowlat"])
            found.append(Bar(row["name"], row["case"], ms, row["vllm_ms"], ms / over))
    return found


def _measured(file: str, **wanted: Any) -> tuple[float, float]:
    """The median of a step in a result file, and how often its floor that is."""
    rows = json.loads((FOLDER / file).read_text(encoding="utf-8"))
    (row,) = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return row["ms_p50"], row["over_floor"]


def picture(shown: Sequence[Bar]) -> str:
    """The cases as SVG, which follows the reader's light or dark colours."""
    return "\n".join(_lines(shown)) + "\n"


def _lines(shown: Sequence[Bar]) -> Iterator[str]:
    height = TOP + ROW * len(shown) + 26
    scale = (WIDTH - LEFT - RIGHT) / max(max(bar.lowlat, bar.vllm) for bar in shown)
    says = "; ".join(f"{bar.name}, {bar.case}: lowlat {bar.lowlat:.2f}, vLLM {bar.vllm:.2f}" for bar in shown)
    sizes = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {sizes} role="img">'
    yield f"<title>Milliseconds a decode step on one H200. {escape(says)}</title>"
    yield f"<style>{STYLE}</style>"
    yield '<text x="0" y="16" font-weight="600">ms a decode step, one H200</text>'
    yield f'<rect class="own" x="{LEFT}" y="6" width="12" height="12"/><text x="{LEFT + 18}" y="16">lowlat</text>'
    yield f'<rect class="other" x="{LEFT + 82}" y="6" width="12" height="12"/>'
    yield f'<text x="{LEFT + 100}" y="16">vLLM 0.26</text>'
    yield f'<line class="floor" x1="{LEFT + 190}" x2="{LEFT + 190}" y1="4" y2="20"/>'
    yield f'<text x="{LEFT + 198}" y="16">what the bytes alone take</text>'
    for number, bar in enumerate(shown):
        y = TOP + ROW * number
        yield f'<text x="0" y="{y + 12}">{escape(bar.name)}</text>'
        yield f'<text class="case" x="0" y="{y + 29}">{escape(bar.case)}</text>'
        for kind, ms, top in (("own", bar.lowlat, y), ("other", bar.vllm, y + BAR + GAP)):
            yield f'<rect class="{kind}" x="{LEFT}" y="{top}" width="{ms * scale:.1f}" height="{BAR}" rx="2"/>'
            yield f'<text class="{kind}-ms" x="{LEFT + ms * scale + 6:.1f}" y="{top + 12}">{ms:.2f}</text>'
        x = f"{LEFT + bar.floor * scale:.1f}"
        yield f'<line class="floor" x1="{x}" x2="{x}" y1="{y - 2}" y2="{y + BAR + 2}"/>'
    says = "batch x context, S draft tokens; random weights; less is better"
    yield f'<text class="axis" x="0" y="{height - 6}">{says}</text>'
    yield "</svg>"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the picture."""
    parser = argparse.ArgumentParser(prog="python -m bench.picture", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.parse_args(arguments).out.write_text(picture(bars()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
