"""Fixtures that tests of kernels share."""

import os
import shutil

import pytest
from compiled_examples import Compiled  # first: it imports Numba with any NumPy, as tests then may

from lowlat.kernels.toolchain.digests import source_digest

COMPILING_S = 1800  # whoever comes first compiles for all, and the others wait; on a busy machine for long


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that asks for compiled examples may be the one that compiles them."""
    for item in items:
        if "compiled" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(COMPILING_S))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The host's processor, and a GPU."""
    return str(request.param)


@pytest.fixture(scope="session")
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """The examples of all kernels, compiled for all capabilities; pytest's cache keeps them for the same sources."""
    base = tmp_path_factory.getbasetemp()
    run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    cache = getattr(request.config, "cache", None)
    kept = run if cache is None else cache.mkdir("kernels")
    for older in kept.iterdir() if cache else ():
        if older.name != source_digest():
            shutil.rmtree(older, ignore_errors=True)
    chosen = str(request.config.getoption("markexpr"))
    later = [stage for stage in ("second", "wide") if stage in chosen]
    names = str(request.config.getoption("--kernels"))
    return Compiled(kept / source_digest(), run, ("first", *later) if later else (), names)
