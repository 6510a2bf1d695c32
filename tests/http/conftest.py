"""A gateway for all tests of a module, and OpenAI's client to it."""

from collections.abc import Iterator

import openai
import pytest
from gateway import KEY, RunningGateway, running_gateway


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    """A gateway to an engine that says a word a token."""
    with running_gateway(tmp_path_factory.mktemp("gateway")) as found:
        yield found


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[openai.OpenAI]:
    """OpenAI's client to that gateway; it does not try again."""
    with openai.OpenAI(base_url=gateway.url, api_key=KEY, max_retries=0) as made:
        yield made
