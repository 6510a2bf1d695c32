"""A gateway for all tests of a module, and OpenAI's client to it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator

import pytest

if "openai" not in sys.modules:
    # OpenAI's package takes 5 s to import: it is executed at its first use, and workers that only collect spend none
    spec = importlib.util.find_spec("openai")
    assert spec is not None and spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    sys.modules["openai"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["openai"])

import openai
from gateway import RunningGateway, running_gateway


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    """A gateway to an engine that says a word a token."""
    with running_gateway(tmp_path_factory.mktemp("gateway")) as found:
        yield found


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[openai.OpenAI]:
    """OpenAI's client to that gateway; it does not try again."""
    with gateway.openai() as made:
        yield made
