"""The READMEs: short, with links that lead somewhere, figures of the committed results, and examples that run."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from benches import bench

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MAX_LINES = 220


@pytest.fixture(scope="module")
def pages(repository: Path, tree_files: list[Path]) -> dict[str, str]:
    """Every page of Markdown by its path."""
    names = [name for name in tree_files if name.suffix == ".md" and not (repository / name).is_symlink()]
    return {name.as_posix(): (repository / name).read_text() for name in names}


def table_rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def test_the_readme_has_two_screens(pages: dict[str, str]) -> None:
    assert len(pages["README.md"].splitlines()) <= MAX_LINES
    assert {"README.md", "lowlat/README.md", "ipc/README.md", "kernels/README.md", "bench/README.md"} <= set(pages)


def test_links_lead_somewhere(repository: Path, pages: dict[str, str]) -> None:
    lost = [
        f"{name}: {link}"
        for name, text in pages.items()
        for link in LINK.findall(text)
        if "://" not in link and not (repository / name).parent.joinpath(link).exists()
    ]
    assert not lost, "\n".join(lost)


def test_functions_that_links_name_are_in_their_files(repository: Path, pages: dict[str, str]) -> None:
    """`[`name`](file.py)` says that the file defines the name."""
    found = re.findall(r"\[`([\w.]+)`\]\(([^)]+\.py)\)", pages["lowlat/README.md"])
    assert len(found) > 20
    for name, file in found:
        text = (repository / "lowlat" / file).read_text()
        assert re.search(rf"\b(def|class) {name.split('.')[-1]}\b|^{name}\b", text, re.MULTILINE), (name, file)


@pytest.mark.parametrize("page", ["README.md", "bench/README.md"])
def test_the_table_of_a_step_is_the_reports_own(repository: Path, pages: dict[str, str], page: str) -> None:
    report = (repository / "bench" / "results" / "h200" / "dense.md").read_text()
    assert set(table_rows(report)) <= set(table_rows(pages[page]))
    assert report.strip().splitlines()[-1] in pages[page].splitlines()


@pytest.mark.parametrize("size", [2, 4])
def test_the_table_of_several_cards_is_its_files_own(repository: Path, pages: dict[str, str], size: int) -> None:
    rows = json.loads((repository / "bench" / "results" / f"h200x{size}" / "parallel.json").read_text())
    assert all("error" not in row and row["weights"] == "random" for row in rows)
    assert set(table_rows(bench("parallel").table(rows, size))) <= set(table_rows(pages["bench/README.md"]))
    assert all(row["commit"] in pages["bench/README.md"] for row in rows)


def test_what_is_said_of_grammars_is_in_their_files(repository: Path, pages: dict[str, str]) -> None:
    folder, page = repository / "bench" / "results" / "cpu", " ".join(pages["bench/README.md"].split())
    suite = json.loads((folder / "schema_suite.json").read_text())
    totals = suite["totals"]
    assert totals["wrong"] == 0 and not suite["faults"] and suite["conditions"]["suite"][:7] in page
    assert f"None of the {totals['served']} is wrong: {totals['walks_ended']} documents" in page
    assert f"{totals['valid_allowed']} of {totals['valid_allowed'] + totals['valid_left_out']} valid ones" in page
    drafts = json.loads((folder / "draft_masks.json").read_text())
    for row in drafts["rows"]:
        assert row["identical"]
        if row["schema"] == "all":
            gains = (row["plain_tokens_per_step"], row["masked_gain"], row["mended_gain"])
            assert "| {:.2f} | {:+.1%} | {:+.1%} |".format(*gains) in page


def test_figures_beside_the_table_are_those_of_bench(repository: Path, pages: dict[str, str]) -> None:
    """Every figure of the short table stands in the long ones, beside the same file."""
    short = pages["README.md"].split("| rows |")[1].split("\n\n")[0]
    rows = [row.split("|")[1:-1] for row in table_rows(short) if "](" in row]
    assert len(rows) == 9
    for _, figures, source in rows:
        file = LINK.findall(source)[0]
        assert json.loads((repository / file).read_text())
        assert file.removeprefix("bench/") in pages["bench/README.md"]
        for figure in re.findall(r"\d[\d.]*", figures):
            assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d])", pages["bench/README.md"]), figure


def test_the_example_in_a_process_runs(repository: Path, pages: dict[str, str]) -> None:
    (example,) = BLOCK.findall(pages["README.md"].split("## In a process")[1].split("\n## ")[0])
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=repository, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "'eagle_speculation'" in done.stdout and len(done.stdout) > 200
