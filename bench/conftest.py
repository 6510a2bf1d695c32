"""Fixtures of the suites in this folder: their options, the pair and its runtimes, the machine in their results.

    python -m pytest bench/test_step.py --geometry llama-8b --benchmark-save=step --benchmark-save-data
    python -m pytest bench/test_step.py --benchmark-compare --benchmark-compare-fail=median:3%

Run them from the root of a checkout.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.lib.subjects import open_subject
from bench.stage import Stage, describe_machine, suite_cases
from lowlat.tools.bench.scenarios import Case


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lowlat", "lowlat's latency suites")
    group.addoption("--geometry", help="random weights of a named shape, in place of the bundled pair")
    group.addoption("--model", type=Path, help="a target's directory, in place of the bundled pair")
    group.addoption("--draft-model", type=Path, help="its draft model's")
    group.addoption("--device", default="auto", help="cuda, cuda:N or cpu")
    group.addoption("--context", type=_numbers, help="N,N: tokens of a prompt; 8192, or as the bundled pair can take")
    group.addoption("--batch", type=_numbers, default=(1, 4), help="N,N: requests")
    group.addoption("--depth", type=_numbers, default=(3,), help="N,N: draft tokens of a cycle")
    group.addoption("--accept-length", type=float, help="tokens a cycle that are imposed, for random weights")
    group.addoption("--rounds", type=int, help="timed steps; 300 on a GPU, 30 without one")
    group.addoption("--serving-out", type=Path, help="write what test_ipc.py measured here, as JSON")


def _numbers(text: str) -> Sequence[int]:
    return tuple(int(part) for part in text.split(","))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give `step_case`, `cycle_case` and `prompt_case` the cases that the options name."""
    for kind in ("step_case", "cycle_case", "prompt_case"):
        if kind in metafunc.fixturenames:
            names = [case.name for case in suite_cases(kind, metafunc.config.option)]
            metafunc.parametrize(kind, names, indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each suite the time that loading a large geometry takes."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(3600))


def _case(request: pytest.FixtureRequest) -> Case:
    kind = str(request.fixturename)
    return next(case for case in suite_cases(kind, request.config.option) if case.name == request.param)


step_case = pytest.fixture(_case, name="step_case")
cycle_case = pytest.fixture(_case, name="cycle_case")
prompt_case = pytest.fixture(_case, name="prompt_case")


@pytest.fixture(scope="session")
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """The pair that is measured, with at most one runtime of it at a time."""
    options = request.config.option
    with open_subject(
        {"device": options.device},
        geometry=options.geometry,
        model=options.model,
        draft_model=options.draft_model,
        accept_length=options.accept_length,
    ) as subject:
        stage = Stage(subject, options.rounds)
        yield stage
        stage.close()


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Add the code, the GPU, its driver and its clocks to what pytest-benchmark says of the machine."""
    asked = config.option.device
    machine_info.update(
        describe_machine(torch.device(("cuda" if torch.cuda.is_available() else "cpu") if asked == "auto" else asked))
    )
