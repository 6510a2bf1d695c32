"""The instructor package: models filled in by tools, JSON, schemas and responses, at once and in parts."""

from typing import Any, Literal

import instructor
import openai
from instructor.core.exceptions import IncompleteOutputException, InstructorRetryException
from pydantic import BaseModel, ConfigDict, Field

from bench.client_calls.cases import KEY, MODEL, Case, expect, run

MESSAGES: Any = [{"role": "user", "content": "Where is Bonn?"}]


class Place(BaseModel):
    """A place and its river."""

    model_config = ConfigDict(extra="forbid")
    country: Literal["Germany", "Italy"]
    river: str = Field(max_length=8)


def _create(url: str, mode: instructor.Mode, **options: Any) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key=KEY), mode=mode)
    asked: Any = options or {"max_tokens": 160}
    answer = client.create(model=MODEL, messages=MESSAGES, response_model=Place, max_retries=0, **asked)
    expect(isinstance(answer, Place), why=f"not parsed: {answer!r}")


def json_mode(url: str) -> None:
    """Nothing binds the answer to the schema, so that it may not fit it, or not end."""
    try:
        _create(url, instructor.Mode.JSON)
    except (IncompleteOutputException, InstructorRetryException) as error:
        expect(error.last_completion, why=str(error))


def partial(url: str) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key=KEY), mode=instructor.Mode.TOOLS)
    parts = list(client.create_partial(model=MODEL, messages=MESSAGES, response_model=Place, max_tokens=160))
    expect(parts[-1].country, why=f"not parsed: {parts[-1]!r}")


def asked_again(url: str) -> None:
    """An answer that does not fit is sent back with what is wrong."""
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key=KEY), mode=instructor.Mode.TOOLS)

    class Never(BaseModel):
        country: Literal["Germany", "Italy"]

        def model_post_init(self, context: Any) -> None:
            raise ValueError("another country")

    try:
        client.create(model=MODEL, messages=MESSAGES, response_model=Never, max_retries=1, max_tokens=160)
    except Exception as error:
        expect("another country" in str(error), why=f"{type(error).__name__}: {error}")


CASES: dict[str, Case] = {
    "chat, TOOLS": lambda url: _create(url, instructor.Mode.TOOLS),
    "chat, TOOLS_STRICT": lambda url: _create(url, instructor.Mode.TOOLS_STRICT),
    "chat, JSON": json_mode,
    "chat, JSON_SCHEMA": lambda url: _create(url, instructor.Mode.JSON_SCHEMA),
    "chat, parts by stream": partial,
    "chat, asked again": asked_again,
    "response, RESPONSES_TOOLS": lambda url: _create(url, instructor.Mode.RESPONSES_TOOLS, max_output_tokens=160),
}

if __name__ == "__main__":
    run("instructor", CASES)
