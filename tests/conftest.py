"""Setup and fixtures of all tests: no network, one thread, markers, turns between workers, the tree's files."""

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

# before anything imports the libraries that read them
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# One thread: the models are tiny, and next to a busy process a product on two threads of two cores waits for the
# scheduler at every barrier (measured: 16 ms in place of 2 us).
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from hypothesis import HealthCheck, settings
from stages import LONGEST, is_fast

# What workers, and the processes that tests start, import is compiled once: two seconds a process where it is not kept.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

REPOSITORY = Path(__file__).resolve().parent.parent

# `python -m pytest` puts the checkout first on sys.path, `pytest` does not: make both the second, or a bare
# `import kernels` would find the folder here in place of Hugging Face's package.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != REPOSITORY]

# Deadlines and checks of how examples come would fail a sound test on a busy machine or by an unlucky draw; the blob
# reproduces a failure elsewhere. Every run draws the same examples but those of the wide stage, which search.
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
KEPT = pytest.StashKey[bool]()  # whether the test before left them to the next


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option of `compile_only`, and that of tests of compiled kernels."""
    parser.addoption("--compile-only", metavar="TARGET", help="compile what tests of a GPU launch, as for sm_90")
    parser.addoption("--kernels", metavar="REGEX", default="", help="compile kernels with such names alone")


def pytest_configure(config: pytest.Config) -> None:
    """Put a described GPU in a GPU's place where kernels are only to be compiled."""
    target = config.getoption("--compile-only")
    if target:
        from compile_only import CompileOnly

        plugin = CompileOnly(target)
        plugin.start()
        config.pluginmanager.register(plugin)
    if "wide" in str(config.getoption("markexpr")):
        settings.load_profile("wide")
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # xdist's order is by the number of tests, which tells little of times


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that are not of the fast stage are not imported for it.

    Nor are tests of a GPU where there is none, unless a path names them, for every worker would import them.
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
    """Let one worker have all tests with OpenAI's package, whose import takes seconds; else a file at a time."""
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
    """Mark tests of the fast stage, before any are left out by their markers."""
    if is_fast(_name_of(item.path)):
        item.add_marker("fast")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave later stages out unless they or one of their tests are named; skip what cannot run here, and say why."""
    selected = str(config.getoption("markexpr"))
    later = {stage for stage in ("second", "wide") if stage not in selected}
    if not any("::" in argument for argument in config.args):
        left = [item for item in items if _stage_of(item) in later]
        items[:] = [item for item in items if _stage_of(item) not in later]
        config.hook.pytest_deselected(items=left)
    import torch  # here: the process that only hands tests out needs none

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
    items.sort(key=lambda item: _turn(item.path, item.path in alone))  # of one file they stay as they are


def _stage_of(item: pytest.Item) -> str:
    """The last stage that an item is marked for: a case of wide runs may be one of a test of the second stage."""
    return next((stage for stage in ("wide", "second") if item.get_closest_marker(stage) is not None), "first")


def _turn(file: Path, alone: bool) -> int:
    """The place of a test's file: a worker takes a file at a time, so those that take longest begin, and those whose
    times matter come when others have little left to do.
    """
    name = _name_of(file)
    return LONGEST.index(name) if name in LONGEST else len(LONGEST) + alone


def _name_of(file: Path) -> str:
    return file.as_posix().removeprefix(f"{REPOSITORY.as_posix()}/tests/")


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of the garbage collector's sight: it is nearly all, and stays.

    It looks at the rest a tenth as often as usual, for a tenth less time of the whole; tests that count what is left
    collect themselves.
    """
    _keep()
    gc.set_threshold(20_000, 20, 50)


def _keep() -> None:
    """Leave what lives now out of the garbage collector's sight, so that each of its turns is short.

    Done after every file of tests, when its fixtures are gone: what is left is modules and caches, which stay.
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
    """Seed what draws from torch's own generator by the test's name: a test that passes once passes each time."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(zlib.crc32(item.nodeid.encode()))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Run next to other workers' tests, and when nobody is or wants to be alone; a test marked `alone` runs by itself.

    Its times say something only where nobody computes next to it: it waits until no other worker runs a test, and holds
    them up until it and those like it that follow are through. What a test waits here is no part of its own time.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        try:
            return (yield)
        finally:
            if nextitem is None or nextitem.path != item.path:
                _keep()
    folder, turn = Path(item.config.getoption("basetemp")).parent, item.config.stash.setdefault(TURN, ExitStack())
    if not item.config.stash.get(KEPT, False):
        with _locked(folder / "gate", fcntl.LOCK_EX):  # nobody else begins
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
    """Programs, which nothing changes, are built once for their geometry: they are most of a small model's load."""
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
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def tree_files(repository: Path) -> list[Path]:
    """Every file that git does not ignore, relative to the root; links are listed, not followed."""
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
    """SIGINT raises KeyboardInterrupt, also in a process that was started to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks end no request by their time, which tells nothing of what they allow: see `test_grammar_compiler`."""
    from lowlat.text.grammar import matching

    monkeypatch.setattr(matching, "MAX_MASK_S", math.inf)
