"""A door for all tests of a module, and OpenAI's client to it."""

from collections.abc import Iterator

import openai
import pytest
from door import KEY, Doored, doored


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doored]:
    """A door to an engine that says a word a token."""
    with doored(tmp_path_factory.mktemp("door")) as found:
        yield found


@pytest.fixture
def client(door: Doored) -> Iterator[openai.OpenAI]:
    """OpenAI's client to that door; it does not try again."""
    with openai.OpenAI(base_url=door.url, api_key=KEY, max_retries=0) as made:
        yield made
