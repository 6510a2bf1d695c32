"""Flowcharts of pages as SVG, so that the site loads no library for them.

It reads what the pages use of Mermaid: `flowchart TB`, nodes `name[text]`, and edges `a --> b` and `a -- text --> b`.
"""

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

__all__ = ["Chart", "drawn"]

EDGE = re.compile(r"\s+-->\s+|\s+--\s+(.+?)\s+-->\s+")
NODE = re.compile(r"(\w+)(?:\[(.+)\])?")
WIDTH, GAP, LINE, PADDING, BETWEEN = 190, 26, 17, 10, 46
WRAPPED = 26  # characters
ASIDE = 60  # how far from a node's middle an edge may end that comes from aside
STYLE = """
text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; text-anchor: middle; }
svg { background: #fff; }
.edge { font-size: 12px; fill: #59636e; paint-order: stroke; stroke: #fff; stroke-width: 4px; }
rect { fill: #f6f8fa; stroke: #8c959f; }
line { stroke: #59636e; stroke-width: 1.4; marker-end: url(#head); } path { fill: #59636e; }
"""


@dataclass
class Chart:
    """A flowchart: texts of nodes by name, and edges with their texts.

    Raises ValueError for lines that are none of a flowchart.
    """

    texts: dict[str, str] = field(default_factory=dict)
    edges: list[tuple[str, str, str]] = field(default_factory=list)

    @classmethod
    def parse(cls, source: str) -> "Chart":
        """A chart by its lines."""
        first, *lines = [line.strip() for line in source.strip().splitlines()]
        if first != "flowchart TB":
            raise ValueError(f"a drawing is a flowchart TB, not {first!r}")
        found = cls()
        for line in lines:
            names, *rest = EDGE.split(line)
            before = found._node(names)
            for text, name in zip(rest[::2], rest[1::2], strict=True):
                after = found._node(name)
                found.edges.append((before, after, text or ""))
                before = after
        return found

    def _node(self, text: str) -> str:
        found = NODE.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is no node")
        self.texts[found[1]] = found[2] or self.texts.get(found[1], found[1])
        return found[1]

    def parents(self, name: str) -> list[str]:
        """Nodes before one, without edges that lead back to an earlier layer."""
        seen: list[tuple[str, str]] = []
        for one, other, _ in self.edges:
            if (other, one) not in seen:
                seen.append((one, other))
        return [one for one, other in seen if other == name]

    def layers(self) -> dict[str, int]:
        """The layer of each node: after all of its parents."""
        found: dict[str, int] = {}

        def layer(name: str) -> int:
            if name not in found:
                found[name] = max((1 + layer(each) for each in self.parents(name)), default=0)
            return found[name]

        for name in self.texts:
            layer(name)
        return found

    def columns(self) -> dict[str, float]:
        """The place of each node from left to right: in the middle of its parents, one column from others at least."""
        layers, found = self.layers(), dict[str, float]()
        for number in range(1 + max(layers.values())):
            names = [name for name in self.texts if layers[name] == number]
            wanted = {name: self._middle(found, name, place) for place, name in enumerate(names)}
            edge = float("-inf")
            for name in sorted(names, key=wanted.__getitem__):
                found[name] = edge = max(wanted[name], edge + 1)
        return found

    def _middle(self, columns: dict[str, float], name: str, otherwise: int) -> float:
        places = [columns[each] for each in self.parents(name)]
        return sum(places) / len(places) if places else float(otherwise)


def drawn(source: str) -> str:
    """A flowchart as SVG. Raises ValueError for what is none."""
    return "\n".join(_lines(Chart.parse(source))) + "\n"


def _lines(chart: Chart) -> Iterator[str]:
    layers, columns = chart.layers(), chart.columns()
    wrapped = {name: textwrap.wrap(text, WRAPPED) for name, text in chart.texts.items()}
    heights = {name: len(lines) * LINE + 2 * PADDING for name, lines in wrapped.items()}
    numbers = sorted(set(layers.values()))
    tallest = [max(heights[name] for name in layers if layers[name] == number) for number in numbers]
    tops = [sum(tallest[:number]) + BETWEEN * number + 8 for number in range(len(tallest))]
    centre = {name: 8 + WIDTH / 2 + column * (WIDTH + GAP) for name, column in columns.items()}
    width, height = max(centre.values()) + WIDTH / 2 + 8, tops[-1] + tallest[-1] + 8
    sizes = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {sizes}>'
    yield f"<style>{STYLE}</style>"
    yield '<marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    yield '<path d="M0 0 L8 4 L0 8 z"/></marker>'
    both = {(one, other) for one, other, _ in chart.edges} & {(other, one) for one, other, _ in chart.edges}
    for one, other, text in chart.edges:
        shift = 0 if (one, other) not in both else 30 if layers[one] < layers[other] else -30
        ends = [tops[layers[one]] + heights[one], tops[layers[other]]]
        if layers[one] > layers[other]:
            ends = [tops[layers[one]], tops[layers[other]] + heights[other]]
        slant = max(-1.0, min(1.0, (centre[one] - centre[other]) / (2 * WIDTH)))
        aside = shift or slant * ASIDE
        x = [centre[one] + shift, centre[other] + aside]
        yield f'<line x1="{x[0]:g}" y1="{ends[0]:g}" x2="{x[1]:g}" y2="{ends[1]:g}"/>'
        if text:
            share = 0.35 if layers[one] < layers[other] else 0.3
            place = (x[0] + (x[1] - x[0]) * share, ends[0] + (ends[1] - ends[0]) * share)
            yield from _text(textwrap.wrap(text, WRAPPED), place[0] + 3.2 * shift, place[1], "edge")
    for name, lines in wrapped.items():
        left, top = centre[name] - WIDTH / 2, tops[layers[name]]
        yield f'<rect x="{left:g}" y="{top:g}" width="{WIDTH}" height="{heights[name]}" rx="6"/>'
        yield from _text(lines, centre[name], top + PADDING + 12, "node")
    yield "</svg>"


def _text(lines: Sequence[str], x: float, y: float, kind: str) -> Iterator[str]:
    for number, line in enumerate(lines):
        yield f'<text class="{kind}" x="{x:g}" y="{y + LINE * number:g}">{escape(line)}</text>'
