"""The examples in process run with this small random chat model; load yours by `lowlat.Runtime.load(MODEL)`."""

from collections.abc import Iterator

import pytest
from tiny_chat import make_chat_model

import lowlat


@pytest.fixture(scope="package")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lowlat.Runtime]:
    model = make_chat_model(tmp_path_factory.mktemp("model"))
    with lowlat.Runtime.load(model, max_batch=4, max_context=1024, device="cpu") as loaded:
        yield loaded
