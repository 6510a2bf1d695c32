"""An application for Ray Serve with two replicas of the bundled pair: sessions, streams, drains, load."""

import json
import os
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lowlat.errors import ConfigError

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.second,
    pytest.mark.filterwarnings("ignore"),  # of Ray, its dependencies and what they leave open
]
KEY = "k" * 20
PORT = 8123
URL = f"http://127.0.0.1:{PORT}/v1/completions"
SETTINGS = {"max_batch": "2", "max_context": "512", "name": "served"}


@pytest.fixture(scope="module")
def application() -> Iterator[Any]:
    """Ray's handle to two replicas after its HTTP proxy."""
    import ray
    from ray import serve

    from lowlat.ray import build

    os.environ["LOWLAT_API_KEY"] = KEY
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        yield serve.run(build({**SETTINGS, "num_replicas": "2", "num_gpus": "0"}), name="lowlat")
    finally:
        del os.environ["LOWLAT_API_KEY"]
        serve.shutdown()
        ray.shutdown()


def ask(text: str, session: str | None = None, **options: Any) -> str:
    """The body of an answer."""
    body = {"model": "served", "prompt": text, "max_tokens": 24, "temperature": 0.0, **options}
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    headers |= {} if session is None else {"x-session-id": session}
    request = urllib.request.Request(URL, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: str = answer.read().decode()
    return found


def text_of(stream: str) -> str:
    """The text in a stream of server-sent events."""
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]" and len(events) > 5
    return "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])


def cached(answer: str) -> int:
    """Tokens of the prompt that were cached."""
    found: int = json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_both_replicas_give_the_same_text_and_stream_it(application: Any) -> None:
    whole = json.loads(ask("The President shall"))["choices"][0]["text"]
    with ThreadPoolExecutor(8) as pool:
        streamed = list(pool.map(lambda _: text_of(ask("The President shall", stream=True)), range(8)))
    assert set(streamed) == {whole}


def test_a_session_stays_with_its_replica(application: Any) -> None:
    """Whose prefix cache then knows the prompt, whichever replica that is."""
    for number in range(4):
        prompt = f"{number}: " + "We the People of the United States, in Order to form a more perfect Union. " * 8
        first, *others = (cached(ask(prompt, f"session {number}")) for _ in range(4))
        assert first < 100 and min(others) > 100


def test_a_wrong_key_is_refused(application: Any) -> None:
    request = urllib.request.Request(URL, b"{}", {"authorization": "Bearer wrong"})
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=60)
    assert error.value.code == 401
    error.value.close()


def test_what_runs_is_finished_when_replicas_are_taken_away(application: Any) -> None:
    from ray import serve

    from lowlat.ray import build

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(ask, "Once upon a time", max_tokens=300, ignore_eos=True) for _ in range(2)]
        serve.run(build({**SETTINGS, "num_replicas": "1", "num_gpus": "0"}), name="lowlat")
        for answer in running:
            assert json.loads(answer.result())["usage"]["completion_tokens"] == 300


@pytest.mark.parametrize(("arguments", "said"), [({"modle": "x"}, "setting 'modle'"), ({"endpoint": "x"}, "own")])
def test_settings_are_checked_before_anything_starts(arguments: dict[str, str], said: str) -> None:
    from lowlat.ray import build

    with pytest.raises(ConfigError, match=said):
        build(arguments)
