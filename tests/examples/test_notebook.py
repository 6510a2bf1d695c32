"""This test runs the notebook, from its first cell to its last."""

import ast
import asyncio
import inspect
import json
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).with_name("in_a_process.ipynb")


async def run_cells(cells: list[str]) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for cell in cells:
        code = compile(cell, NOTEBOOK.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        done = eval(code, names)  # noqa: S307 - the notebook is ours
        if inspect.isawaitable(done):
            await done
    return names


def test_every_cell_runs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells)  # they would go stale
    names = asyncio.run(run_cells(["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]))
    assert names["answer"].finish_reason == "length" and "closed" in repr(names["runtime"])
