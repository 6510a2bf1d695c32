"""Documents of a real model that speculates, through every gateway: those that it has in process, without drafts."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from cli_calls import lowlat
from gateway import RunningGateway, gateway_at
from jsonschema import validate
from served_model import load_bundled, served_model

from lowlat import Runtime, SamplingParams
from lowlat.ipc import AsyncClient, Client

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["circle", 'sq"are']}, "note": {"type": "string", "maxLength": 6}},
    "required": ["kind", "note"],
    "additionalProperties": False,
}
ASKED: list[dict[str, Any]] = [
    {"json_schema": SCHEMA, "temperature": 1.0, "seed": 3},
    {"choice": ["yes", "yes, sir", "no"], "temperature": 2.0, "seed": 5},
    {"regex": "^[a-z]{2,5}(-[0-9]{2}){2}$", "temperature": 0.0},
    {"grammar": 'root ::= "(" root ")" | [xyz]{1,4} "!?"', "temperature": 1.0, "seed": 6, "stop": ["!"]},
]
PROMPT = [11, 12, 13]
GRAMMARS = {"json_schema": "json", "choice": "choice", "regex": "regex", "grammar": "grammar"}  # as vLLM calls them


def alone(runtime: Runtime, prompt: Any, options: dict[str, Any]) -> str:
    """The document of a request in process, without drafts."""
    runtime.submit(prompt, SamplingParams(max_tokens=40, max_draft_tokens=0, **options))
    outputs = [output for _ in iter(lambda: runtime.busy, False) for output in runtime.step()]
    assert outputs[-1].finish_reason == "stop"
    return "".join(output.text or "" for output in outputs)


def completion(gateway: RunningGateway, options: dict[str, Any], *, stream: bool) -> str:
    """The text of a completion over HTTP."""
    bound = {GRAMMARS[name]: value for name, value in options.items() if name in GRAMMARS}
    others = {name: value for name, value in options.items() if name not in GRAMMARS}
    _, models, _ = gateway.ask("/v1/models")
    body = {"model": models["data"][0]["id"], "prompt": PROMPT, "max_tokens": 40, "stream": stream, **others}
    status, answer, _ = gateway.ask("/v1/completions", {**body, "structured_outputs": bound})
    assert status == 200, answer
    if not stream:
        answers = [answer]
    else:
        answers = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for each in answers for choice in each["choices"])


async def over_asyncio(endpoint: str) -> list[str]:
    """All of them at once, through one client."""

    async def ask(client: AsyncClient, options: dict[str, Any]) -> str:
        return "".join([chunk.text async for chunk in client.generate(PROMPT, max_tokens=40, **options)])

    async with AsyncClient(endpoint) as client:
        return list(await asyncio.gather(*(ask(client, options) for options in ASKED)))


@pytest.mark.wide
def test_documents_are_the_same_through_every_gateway(tmp_path: Path) -> None:
    """Speculation is on, requests are next to each other, and each text is that of plain decoding."""
    tmp_path.chmod(0o700)
    runtime = load_bundled(max_context=128)
    expected = [alone(runtime, PROMPT, options) for options in ASKED]
    typed = alone(runtime, "Shall it?", ASKED[0])
    validate(json.loads(expected[0]), SCHEMA)
    with served_model(tmp_path, runtime) as (server, _):
        with Client(server.endpoint) as client:
            texts = ["".join(chunk.text for chunk in client.generate(PROMPT, max_tokens=40, **each)) for each in ASKED]
        assert texts == expected and asyncio.run(over_asyncio(server.endpoint)) == expected
        with gateway_at(server.endpoint) as address:
            for stream in (False, True):
                assert [completion(RunningGateway(address), each, stream=stream) for each in ASKED] == expected
        figures = runtime.summary()["structured_output"]
        assert figures["num_requests"] == 5 * len(ASKED) + 1 and figures["num_accepted_tokens"] > 20
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    sampling = ("--temperature", 1.0, "--seed", 3, "--max-tokens", 40)
    said = lowlat("generate", "--device", "cpu", "--json-schema", file, *sampling, "--prompt", "Shall it?")
    assert said.exit_code == 0 and said.stdout.strip() == typed
