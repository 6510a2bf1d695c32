"""This module sets up all tests: no network, one thread, stages and markers, turns between workers, fixtures."""

import fcntl
import gc
import math
import os
import re
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

# set before anything imports the libraries that read them
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# One thread: the models are tiny. If another process is busy, a matrix product on two threads of two cores waits for
# the scheduler at each barrier (measured: 16 ms in place of 2 us).
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from hypothesis import HealthCheck, settings
from stages import LONGEST, is_fast

# Keep byte code: without it, each worker and each process that a test starts compiles its imports, for two seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

REPOSITORY = Path(__file__).resolve().parent.parent

# `python -m pytest` puts the checkout first on sys.path, `pytest` does not. Remove it for both: otherwise a bare
# `import kernels` would find the folder here in place of Hugging Face's package.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != REPOSITORY]

# Hypothesis: no deadlines or health checks of its generation, which would fail a sound test on a busy machine or by an
# unlucky draw. The printed blob reproduces a failure elsewhere. All runs draw the same examples, except in the wide
# stage, which searches for new ones.
for profile, max_examples in (("lowlat", 30), ("wide", 300)):
    settings.register_profile(
        profile,
        deadline=None,
        max_examples=max_examples,
        print_blob=True,
        derandomize=profile == "lowlat",
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
settings.load_profile("lowlat")


TURN = pytest.StashKey[ExitStack]()  # the locks of the test that runs
KEPT = pytest.StashKey[bool]()  # whether the test before kept its locks for the next


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `compile_only` and of tests of compiled kernels."""
    parser.addoption("--compile-only", metavar="TARGET", help="compile what tests of a GPU launch, as for sm_90")
    parser.addoption("--kernels", metavar="REGEX", default="", help="compile kernels with such names alone")


def pytest_configure(config: pytest.Config) -> None:
    """Replace the GPU by its description if kernels are only compiled; choose the profile; keep the order of tests."""
    target = config.getoption("--compile-only")
    if target:
        from compile_only import CompileOnly

        plugin = CompileOnly(target)
        plugin.start()
        config.pluginmanager.register(plugin)
    if "wide" in str(config.getoption("markexpr")):
        settings.load_profile("wide")
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # xdist orders by numbers of tests, which say little about times


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore files that are not of the fast stage, if only that stage runs.

    Without a GPU, ignore tests of a GPU unless a path names them: otherwise each worker would import them.
    """
    if config.getoption("markexpr") == "fast" and collection_path.suffix == ".py":
        return None if collection_path.name == "conftest.py" or is_fast(_name_of(collection_path)) else True
    folder = REPOSITORY / "tests" / "gpu"
    named = (Path(argument.partition("::")[0]).resolve() for argument in config.args)
    if collection_path != folder or config.getoption("--compile-only") or any(path == folder for path in named):
        return None
    import torch

    return None if torch.cuda.is_available() else True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all tests with OpenAI's package, whose import takes seconds, to one worker; others go file by file."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]  # which has no types
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "openai" if _uses_openai(file) else file

    return Scheduling(config, log)


@cache
def _uses_openai(file: str) -> bool:
    """Whether a test's file, by its path below the checkout, imports OpenAI's package."""
    return re.search(r"^ *(import|from) openai\b", (REPOSITORY / file).read_text(), re.MULTILINE) is not None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark tests of the fast stage, before pytest deselects tests by markers."""
    if is_fast(_name_of(item.path)):
        item.add_marker("fast")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect later stages unless the command names them or a test; skip tests that cannot run here, with a reason."""
    selected = str(config.getoption("markexpr"))
    later = {stage for stage in ("second", "wide") if stage not in selected}
    if not any("::" in argument for argument in config.args):
        left = [item for item in items if _stage_of(item) in later]
        items[:] = [item for item in items if _stage_of(item) not in later]
        config.hook.pytest_deselected(items=left)
    import torch  # here: xdist's controller, which only hands out tests, does not need it

    reasons = {}
    if not torch.cuda.is_available():
        reasons["gpu"] = "needs a CUDA device"
    for marker in ("network", "soak"):
        if marker not in selected:
            reasons[marker] = f"runs only when chosen: -m {marker}"
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
    alone = {item.path for item in items if _is_alone(item)}
    items.sort(key=lambda item: _turn(item.path, item.path in alone))  # tests of a file keep their order


def _stage_of(item: pytest.Item) -> str:
    """Return the last stage that an item is marked for: a test of the second stage may have cases of the wide one."""
    return next((stage for stage in ("wide", "second") if item.get_closest_marker(stage) is not None), "first")


def _turn(file: Path, alone: bool) -> int:
    """Return the place of a test's file in the order. A worker takes a file at a time, so the longest files come first.

    Files with `alone` tests come last, when other workers have little left to do.
    """
    name = _name_of(file)
    return LONGEST.index(name) if name in LONGEST else len(LONGEST) + alone


def _name_of(file: Path) -> str:
    return file.as_posix().removeprefix(f"{REPOSITORY.as_posix()}/tests/")


def pytest_collection_finish() -> None:
    """Hide all imported and collected objects from the garbage collector: they are most objects, and stay.

    It then runs a tenth as often as usual, which saves a tenth of the whole time. Tests that count objects call
    `gc.collect` themselves.
    """
    _keep()
    gc.set_threshold(20_000, 20, 50)


def _keep() -> None:
    """Hide all objects that live now from the garbage collector, so that each of its runs is short.

    This runs after each file of tests, when its fixtures are gone: what is left is modules and caches, which stay.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, how)
        yield


def _is_alone(item: pytest.Item | None) -> bool:
    return item is not None and item.get_closest_marker("alone") is not None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed torch's global generator by the test's name: a test that passes once passes each time."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(zlib.crc32(item.nodeid.encode()))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Run a test beside other workers' tests, but a test marked `alone` by itself: its times need an idle machine.

    Such a test waits until no other worker runs a test. The other workers then wait until it, and `alone` tests that
    follow directly, have ended. The wait is not counted in a test's own time.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        try:
            return (yield)
        finally:
            if nextitem is None or nextitem.path != item.path:
                _keep()
    folder, turn = Path(item.config.getoption("basetemp")).parent, item.config.stash.setdefault(TURN, ExitStack())
    if not item.config.stash.get(KEPT, False):
        with _locked(folder / "gate", fcntl.LOCK_EX):  # no other worker begins a test
            turn.enter_context(_locked(folder / "running", fcntl.LOCK_EX if _is_alone(item) else fcntl.LOCK_SH))
    try:
        return (yield)
    finally:
        kept = item.config.stash[KEPT] = _is_alone(item) and _is_alone(nextitem)
        if not kept:
            turn.close()
        if nextitem is None or nextitem.path != item.path:
            _keep()


@pytest.fixture(scope="session", autouse=True)
def steps_built_once() -> Iterator[None]:
    """Build each Program once for its geometry: they are immutable, and most of the load time of a small model."""
    programs = sys.modules.get("lowlat.engine.loading.programs")  # imported by the modules that load one
    if programs is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for name in ("build_step", "build_adaptive", "build_prefills"):
            patch.setattr(programs, name, lru_cache(maxsize=512)(getattr(programs, name)))
        yield


@pytest.fixture(scope="session")
def repository() -> Path:
    """Return the root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def tree_files(repository: Path) -> list[Path]:
    """Return each file that git does not ignore, relative to the root; links are listed, not followed."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=repository,
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:
        pytest.skip(f"needs a git checkout: {listed.stderr.strip()}")
    names = sorted({name for name in listed.stdout.split("\0") if name})
    return [Path(name) for name in names if os.path.lexists(repository / name)]


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Have SIGINT raise KeyboardInterrupt, also in a process that was started to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the time limit of grammar masks, so that a slow machine ends no request: see `test_grammar_compiler`."""
    from lowlat.text.grammar import matching

    monkeypatch.setattr(matching, "MAX_MASK_S", math.inf)
