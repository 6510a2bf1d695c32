"""The pydantic-ai package: agents over chats and over responses, with tools, structured answers and streams."""

import asyncio
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

from bench.client_calls.cases import KEY, MODEL, Case, expect, run

QUESTION = "Where is Bonn?"


class Place(BaseModel):
    """A place and its river."""

    model_config = ConfigDict(extra="forbid")
    country: Literal["Germany", "Italy"]
    river: str = Field(max_length=8)


def model_of(kind: type[OpenAIChatModel] | type[OpenAIResponsesModel], url: str) -> Any:
    return kind(MODEL, provider=OpenAIProvider(base_url=url, api_key=KEY))


def _text(model: Any) -> None:
    result = Agent(model, instructions="Be brief.").run_sync(QUESTION, model_settings={"max_tokens": 8})
    expect(result.output, why="no text")
    expect(result.usage.output_tokens, why="no usage")


def _stream(model: Any) -> None:
    async def ask() -> str:
        async with Agent(model).run_stream(QUESTION, model_settings={"max_tokens": 8}) as result:
            return "".join([part async for part in result.stream_text(delta=True)])

    expect(asyncio.run(ask()), why="no text")


def _tools(model: Any) -> None:
    """The model may call or not; with an output tool it must call one of them."""
    agent = Agent(model, output_type=ToolOutput(Place))
    called: list[str] = []

    @agent.tool_plain
    def weather(city: Literal["Bonn", "Rome"]) -> str:
        """The weather in a city."""
        called.append(city)
        return f"Rain in {city}."

    try:
        result = agent.run_sync(
            "What is the weather in Bonn?",
            model_settings={"max_tokens": 160},
            usage_limits=UsageLimits(request_limit=3),
        )
    except UsageLimitExceeded:
        expect(called, why="nothing was called in 3 requests")  # the model calls the tool again and again
        return
    expect(isinstance(result.output, Place), why=f"not parsed: {result.output!r}")


def _structured(model: Any, kind: Any) -> None:
    agent = Agent(model, output_type=kind, retries=0)
    try:
        result = agent.run_sync(QUESTION, model_settings={"max_tokens": 160})
    except UnexpectedModelBehavior as error:
        if kind is not Prompted:  # then nothing binds the answer to the schema
            raise
        expect("retries" in str(error) or "output" in str(error), why=str(error))
        return
    expect(isinstance(result.output, Place), why=f"not parsed: {result.output!r}")


Prompted: Any = PromptedOutput(Place)

CASES: dict[str, Case] = {
    "chat": lambda url: _text(model_of(OpenAIChatModel, url)),
    "chat, stream": lambda url: _stream(model_of(OpenAIChatModel, url)),
    "chat, tools and their results": lambda url: _tools(model_of(OpenAIChatModel, url)),
    "chat, ToolOutput": lambda url: _structured(model_of(OpenAIChatModel, url), ToolOutput(Place)),
    "chat, NativeOutput": lambda url: _structured(model_of(OpenAIChatModel, url), NativeOutput(Place)),
    "chat, PromptedOutput": lambda url: _structured(model_of(OpenAIChatModel, url), Prompted),
    "response": lambda url: _text(model_of(OpenAIResponsesModel, url)),
    "response, stream": lambda url: _stream(model_of(OpenAIResponsesModel, url)),
    "response, tools and their results": lambda url: _tools(model_of(OpenAIResponsesModel, url)),
    "response, NativeOutput": lambda url: _structured(model_of(OpenAIResponsesModel, url), NativeOutput(Place)),
}

if __name__ == "__main__":
    run("pydantic-ai-slim", CASES)
