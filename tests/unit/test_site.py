"""The site: every page is a README or comes from code, links lead somewhere, and Sphinx builds it without a word."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from benches import docs
from stages import later, wide

assembly, pages, reference = docs("assembly"), docs("pages"), docs("reference")
SUBJECTS = {
    *(
        "start",
        "choose",
        "serve",
        "embed",
        "sessions",
        "structured",
        "gpus",
        "quantise",
        "tune",
        "troubleshoot",
        "tour",
    ),
    *("api", "benchmarks", "changelog", "exactness"),
}


@pytest.fixture(scope="module")
def site(repository: Path) -> Any:
    return assembly.Site(repository)


def test_every_page_of_the_checkout_is_on_the_site(site: Any) -> None:
    taken = {part.file for page in pages.PAGES for part in page.parts}
    left = {name for name in site.files if name.endswith(".md")} - taken
    left = {name for name in left if "/results/" not in name}  # reports of runs
    assert not left, f"docs/pages.py has no page that holds {', '.join(sorted(left))}"
    assert not assembly.unused_sections(site)
    names = [page.name for page in pages.PAGES]
    assert len(set(names)) == len(names) and set(names) >= SUBJECTS


def test_links_and_their_anchors_lead_somewhere(site: Any) -> None:
    for page in pages.PAGES:
        if page.parts:
            text = site.markdown(page)
            assert text.startswith(f"# {site.title(page)}\n"), page.name
    assert len(site.copied) > 100 and len(site.listed) > 10


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("SESSIONS.md", "sessions.md"),
        ("USING.md#structured-output", "structured.md"),
        ("USING.md#over-http", "serve.md#over-http"),
        ("models/README.md#published-models", "choose.md#published-models"),
        ("models/", "choose.md"),
        ("../README.md#start", "index.md#start"),
        ("engine/runtime.py", "source:source/lowlat/engine/runtime.py.txt"),
        ("lowering/", "source:source/lowlat/lowering/index.html"),
        ("https://example.org/x", "https://example.org/x"),
    ],
)
def test_a_link_leads_to_its_page(site: Any, link: str, expected: str) -> None:
    assert site.target(link, "lowlat/README.md") == expected


@pytest.mark.parametrize("link", ["NONE.md", "USING.md#no-such-heading", "engine/no_such.py", "#nowhere"])
def test_a_link_that_leads_nowhere_is_an_error(site: Any, link: str) -> None:
    with pytest.raises(assembly.LostLinkError, match=re.escape(link.split("#")[-1])):
        site.target(link, "lowlat/README.md")


def test_sections_and_anchors_are_those_outside_code() -> None:
    text = "# A\nx\n## `B` c, d\n```\n## no\n```\n## B c d\n"
    assert list(assembly.sections_of(text)) == ["", "`B` c, d", "B c d"]
    assert assembly.anchors_of(text) == ["a", "b-c-d", "b-c-d-1"]


def test_docstrings_become_definitions() -> None:
    lines = ["It does `x*y`.", "", "a     [B, T]  the `first`", "      of two", "b_, c  the others", "It ends *here*."]
    assert reference.reformatted(lines) == [
        *("It does \\ ``x*y``\\ .", ""),
        *("``a``", "    [B, T]  the \\ ``first``\\", "    of two", "``b_, c``", "    the others", ""),
        *("It ends \\*here\\*.", ""),
    ]
    assert reference.reformatted(["    lowlat serve"]) == ["::", "", "    lowlat serve", ""]


def test_a_flowchart_is_drawn_layer_by_layer() -> None:
    source = "flowchart TB\n  a[one, two] --> b\n  c --> b\n  b -- there & --> d[end]\n  d -- back --> b"
    chart = docs("drawing").Chart.parse(source)
    assert chart.layers() == {"a": 0, "c": 0, "b": 1, "d": 2} and chart.columns() == {
        "a": 0,
        "c": 1,
        "b": 0.5,
        "d": 0.5,
    }
    svg = ElementTree.fromstring(docs("drawing").drawn(source))
    assert ["".join(each.itertext()) for each in svg.iter() if each.tag.endswith("text")] == [
        *("there &", "back", "one, two", "b", "c", "end"),
    ]
    with pytest.raises(ValueError, match="flowchart TB"):
        docs("drawing").drawn("graph LR\n a --> b")


@pytest.mark.parametrize("how", [later("--check"), wide("html")])
def test_the_site_is_built_without_a_warning(repository: Path, tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-m", "docs", str(tmp_path), *([how] if how == "--check" else [])]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    if how == "--check":
        return
    built = {path.stem for path in tmp_path.glob("*.html")}
    assert built >= SUBJECTS - {"start"} | {"index", "commands"}
    api = (tmp_path / "api.html").read_text()
    assert 'id="lowlat.Runtime.generate"' in api and 'id="lowlat.ipc.Client"' in api
    assert (tmp_path / "source" / "lowlat" / "engine" / "runtime.py.txt").is_file()
    assert "<img" in (tmp_path / "tour.html").read_text() and list((tmp_path / "_images").glob("tour-*.svg"))
    commands = (tmp_path / "commands.html").read_text()
    assert "lowlat bench gates" in commands and "--simulated-acceptance" in commands
    hosts = {
        host
        for path in tmp_path.glob("*.html")
        for host in re.findall(r'(?:src|href)="https?://([^/"]+)', path.read_text())
    }
    assert not any("cdn" in host or "fonts" in host for host in hosts), hosts
