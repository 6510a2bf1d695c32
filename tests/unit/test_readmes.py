"""The READMEs: short, with links that lead somewhere, figures of the committed results, and examples that run."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benches import bench
from page_examples import run_example

from lowlat.models.partial_kv import LOSSY_FROM

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MAX_LINES = 100
SPECPV_PAIRS = ("agreement_bundled", "agreement_chat", "agreement_long")


@pytest.fixture(scope="module")
def pages(repository: Path, tree_files: list[Path]) -> dict[str, str]:
    """Every page of Markdown by its path."""
    names = [name for name in tree_files if name.suffix == ".md" and not (repository / name).is_symlink()]
    return {name.as_posix(): (repository / name).read_text() for name in names}


@pytest.fixture(scope="module")
def measured(pages: dict[str, str]) -> str:
    """Return the text of bench's pages about measurements."""
    names = sorted(name for name in pages if name == "bench/README.md" or name.startswith("bench/notes/"))
    return "\n".join(pages[name] for name in names)


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


@pytest.mark.parametrize("size", [2, 4])
def test_the_table_of_several_gpus_is_its_files_own(repository: Path, measured: str, size: int) -> None:
    rows = json.loads((repository / "bench" / "results" / f"h200x{size}" / "parallel.json").read_text())
    assert all("error" not in row and row["weights"] == "random" for row in rows)
    assert set(table_rows(bench("parallel").table(rows, size))) <= set(table_rows(measured))
    assert all(row["commit"] in measured for row in rows)


def test_what_is_said_of_grammars_is_in_their_files(repository: Path, measured: str) -> None:
    folder, page = repository / "bench" / "results" / "cpu", " ".join(measured.split())
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


def test_figures_beside_the_table_are_those_of_bench(repository: Path, pages: dict[str, str], measured: str) -> None:
    """Every figure of the short table stands in the long ones, next to the same file."""
    short = pages["bench/README.md"].split("| rows |")[1].split("\n\n")[0]
    measured = measured.replace(short, "")
    rows = [row.split("|")[1:-1] for row in table_rows(short) if "](" in row]
    assert len(rows) == 10
    for _, figures, source in rows:
        file = LINK.findall(source)[0]
        assert json.loads((repository / "bench" / file).read_text())
        assert file in measured
        for figure in re.findall(r"\d[\d.]*", figures):
            assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d])", measured), figure


def test_the_tables_of_exactness_are_their_files_own(repository: Path, pages: dict[str, str]) -> None:
    files = sorted((repository / "bench" / "results").glob("*/exactness.json"))
    assert files
    for file in files:
        reports = json.loads(file.read_text())
        assert all(report["holds"] for report in reports)
        assert set(bench("exactness").table(reports)) <= set(table_rows(pages["lowlat/EXACTNESS.md"]))


def test_a_report_of_one_question_leaves_the_others_cells_empty(repository: Path, pages: dict[str, str]) -> None:
    """The chat pair's report has fidelity alone; the page gives its intervals."""
    reports = json.loads((repository / "bench" / "results" / "cpu" / "fidelity_chat.json").read_text())
    (row,) = list(bench("exactness").table(reports))[2:]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert len(cells) == 6 and cells[2:4] == ["", ""]
    for cell in cells[4:]:
        ratio, interval = cell.split(", ")[1].split(" x ")
        assert re.search(rf"{ratio} x [^.]*{re.escape(interval)}", pages["lowlat/EXACTNESS.md"]), cell


def messages_of(tree: ast.AST) -> Iterator[str]:
    """Texts in code; what is put into one is a zero."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_messages_in_troubleshooting_are_those_of_the_code(
    repository: Path, tree_files: list[Path], pages: dict[str, str]
) -> None:
    """The longest run of a message's words between what is put in stands in one text of the code."""
    put_in = r"\.\.\.|\b[NM]\b|'\w+'|the target|tensor_parallel_size|masks|request|one request|it needs"
    folders = ("lowlat", "graphs", "kernels", "ipc")
    names = [name for name in tree_files if name.suffix == ".py" and name.parts[0] in folders]
    trees = (ast.parse((repository / name).read_text(encoding="utf-8")) for name in names)
    texts = "\n".join(text for tree in trees for text in messages_of(tree))
    symptoms = [row.split(" | ")[0] for row in table_rows(pages["lowlat/TROUBLESHOOTING.md"])]
    messages = [found for symptom in symptoms for found in re.findall(r"^\| `([^`]{25,})`", symptom)]
    assert len(messages) > 20
    runs = [max(re.split(put_in, message), key=len).strip() for message in messages]
    assert not [run for run in runs if run not in texts]


def test_ratios_of_peers_are_their_files_own(pages: dict[str, str]) -> None:
    result = bench("peers.results").read_peers(bench("picture").FOLDER.parent / "cpu" / "peers.json")
    page = " ".join(pages["bench/README.md"].split())
    assert result.pairs == 4 and 7 < min(result.load) < max(result.load) < 9
    for comparison in result.comparisons:
        if comparison.figure != "ms_per_token":
            found = comparison.ratio
            assert f"{found.median:.2f} times" in page and f"{found.lower:.2f} to {found.upper:.2f}" in page


def test_the_picture_is_the_scripts_own_and_its_rows_are_committed(repository: Path, pages: dict[str, str]) -> None:
    picture = bench("picture")
    assert picture.OUT.read_text() == picture.picture(picture.bars())
    assert f"]({picture.OUT.relative_to(repository)})" in pages["README.md"]
    shown = picture.bars()
    assert len(shown) == 8 and all(0 < bar.floor < bar.lowlat < bar.vllm for bar in shown)
    assert (hybrid := next(bar for bar in shown if "Qwen3.6" in bar.name)).vllm == 4.604
    assert f"{hybrid.lowlat:.3f}" in pages["bench/notes/hybrids.md"]


def test_figures_of_the_first_screen_are_their_pages_own(repository: Path, pages: dict[str, str]) -> None:
    """Both engines' times on two GPUs are the result file's, and stand in the page that the sentence links to."""
    rows = json.loads((repository / "bench" / "results" / "h200x2" / "parallel.json").read_text())
    wanted = {("llama-8b", 8192, 0, 2), ("gpt-oss-120b", 4096, 0, 2)}
    names = ("model", "context", "num_speculative_tokens", "tensor_parallel_size")
    steps = [row for row in rows if tuple(row.get(name) for name in names) in wanted and row["batch"] == 1]
    sentence = " ".join(pages["README.md"].split("On two\n")[1].split("([several GPUs]")[0].split())
    figures = re.findall(r"\d\.\d\d", sentence.replace("0.24", ""))
    ours, theirs = ([f"{row[name]:.2f}" for row in steps] for name in ("ms_p50", "vllm_two_cards_ms"))
    assert figures == ours + theirs and len(figures) == 4
    assert all(figure in pages["bench/notes/several-gpus.md"] for figure in figures)


@pytest.mark.second
def test_the_examples_in_a_process_run(repository: Path, pages: dict[str, str]) -> None:
    example = "\n".join(BLOCK.findall(pages["lowlat/USING.md"].split("## In a process")[1].split("\n## ")[0]))
    assert set(BLOCK.findall(pages["README.md"])) <= set(BLOCK.findall(pages["lowlat/USING.md"]))
    said = run_example(example, repository)
    assert "'eagle_speculation'" in said and len(said) > 200


@pytest.mark.second
def test_the_five_calls_of_sessions_run(repository: Path, pages: dict[str, str]) -> None:
    example = "\n".join(BLOCK.findall(pages["lowlat/SESSIONS.md"]))
    lines = run_example(example, repository).splitlines()
    assert [line.endswith("tokens were there") and int(line.split()[0]) >= 32 for line in lines[:2]] == [True, True]
    assert int(lines[-1].split()[-1]) >= 32


@pytest.fixture(scope="module")
def specpv(repository: Path) -> dict[str, Any]:
    """Return the H200 measurements of lossy SpecPV: rows of times, and an agreement result for each pair."""
    folder = repository / "bench" / "results" / "h200"
    return {name: json.loads((folder / f"specpv_{name}.json").read_text()) for name in ("lossy", *SPECPV_PAIRS)}


def test_what_is_advised_of_specpv_is_in_its_files(specpv: dict[str, Any], pages: dict[str, str]) -> None:
    """A gain is SpecPV's speed at its best draft length over full attention's at its best."""
    page = pages["lowlat/speculators/SPECPV.md"]
    best: dict[tuple[str, int, int], dict[str, float]] = {}
    for row in specpv["lossy"]:
        speeds = best.setdefault((row["model"], row["batch"], row["context"]), {"full": 0.0, "partial": 0.0})
        speeds[row["attention"]] = max(speeds[row["attention"]], row["tokens_per_s"])
    gains = {case: speeds["partial"] / speeds["full"] for case, speeds in best.items()}
    assert all((gain > 1) == (case[0] == "llama-8b" and case[2] >= LOSSY_FROM) for case, gain in gains.items())
    for model, shape in (("gpt-oss-120b", "gpt-oss-120b"), ("llama-8b", "Llama-3.1-8B")):
        for batch, requests in ((1, "one request"), (4, "four")):
            cells = (f"{gains[model, batch, context]:.2f}" for context in (16384, 32768, 65536))
            assert f"| {shape}'s shape, {requests} | {' | '.join(cells)} |" in page
    for listed, blocks in ((288, "8"), (1184, "64"), (4256, "256, the default"), (16544, "1024")):
        found = ([row for row in specpv[name]["rows"] if row["listed_positions"] == listed] for name in SPECPV_PAIRS)
        shares = ([f"{row['same_choice']:.2f}" for row in rows if row["partial_steps"]] for rows in found)
        ranges = (" to ".join(dict.fromkeys((min(each), max(each)))) if each else "" for each in shares)
        assert f"| {listed} | {blocks} | {' | '.join(ranges)} |".replace("|  |", "| |").replace("|  |", "| |") in page
