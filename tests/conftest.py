"""What every test shares: no network, two threads, what markers need, and the list of the tree's files."""

import os
import subprocess
import sys
from pathlib import Path

# before anything imports the libraries that read them
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from hypothesis import settings

REPOSITORY = Path(__file__).resolve().parent.parent

# `python -m pytest` puts the checkout first on sys.path, `pytest` does not: make both the second, or a bare
# `import kernels` would find the folder here in place of Hugging Face's package.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != REPOSITORY]

# One thread: the models are tiny, and beside a busy process a product on two threads of two cores waits for the
# scheduler at every barrier (measured: 16 ms in place of 2 us).
torch.set_num_threads(1)
# A deadline would fail a sound test on a busy machine; the blob reproduces a failure elsewhere.
settings.register_profile("lowlat", deadline=None, print_blob=True)
settings.load_profile("lowlat")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine or this invocation cannot run, and say why."""
    selected = str(config.getoption("markexpr"))
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
