"""The openai-agents package: its default model over responses, and its model over chats."""

import asyncio
from typing import Any, Literal

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict, Field

from bench.client_calls.cases import KEY, MODEL, Case, expect, run

QUESTION = "Where is Bonn?"


class Place(BaseModel):
    """A place and its river."""

    model_config = ConfigDict(extra="forbid")
    country: Literal["Germany", "Italy"]
    river: str = Field(max_length=8)


@function_tool
def weather(city: Literal["Bonn", "Rome"]) -> str:
    """The weather in a city."""
    return f"Rain in {city}."


def default(url: str) -> Any:
    """The name alone: the package takes its default model of that name."""
    set_default_openai_client(AsyncOpenAI(base_url=url, api_key=KEY), use_for_tracing=False)
    return MODEL


def responses(url: str) -> Any:
    return OpenAIResponsesModel(MODEL, AsyncOpenAI(base_url=url, api_key=KEY))


def chats(url: str) -> Any:
    return OpenAIChatCompletionsModel(MODEL, AsyncOpenAI(base_url=url, api_key=KEY))


def agent_of(model: Any, max_tokens: int, **options: Any) -> Agent[Any]:
    settings = ModelSettings(max_tokens=max_tokens, tool_choice=options.pop("tool_choice", None))
    return Agent(name="Guide", instructions="Be brief.", model=model, model_settings=settings, **options)


def _text(model: Any) -> None:
    result = asyncio.run(Runner.run(agent_of(model, 8), QUESTION))
    expect(result.final_output, why="no text")
    expect(result.context_wrapper.usage.output_tokens, why="no usage")


def _stream(model: Any) -> None:
    kinds: list[str] = []

    async def ask() -> None:
        result = Runner.run_streamed(agent_of(model, 160), QUESTION)
        async for event in result.stream_events():
            if event.type == "raw_response_event":
                kinds.append(event.data.type)

    try:
        asyncio.run(ask())
    except ModelBehaviorError as error:  # the package takes no answer that max_output_tokens cut
        expect("response.incomplete" in str(error), why=str(error))
    expect("response.output_text.delta" in kinds, why=f"events {kinds}")


def _tools(model: Any, *, stream: bool = False) -> None:
    """The first turn must call; the next sends the result back and may say anything."""

    async def ask() -> Any:
        agent = agent_of(model, 160, tools=[weather], tool_choice="required")
        if not stream:
            return await Runner.run(agent, "What is the weather in Bonn?", max_turns=2)
        result = Runner.run_streamed(agent, "What is the weather in Bonn?", max_turns=2)
        async for _ in result.stream_events():
            pass
        return result

    try:
        result = asyncio.run(ask())
    except (MaxTurnsExceeded, ModelBehaviorError) as error:  # it called in both turns, or was cut in the second
        expect("turns" in str(error) or "response.incomplete" in str(error), why=str(error))
        return
    kinds = [item.type for item in result.new_items]
    expect("tool_call_output_item" in kinds, why=f"items {kinds}")


def _two_questions(model: Any) -> None:
    """The second question sends back the first one's items."""

    async def ask() -> Any:
        first = await Runner.run(agent_of(model, 8), QUESTION)
        return await Runner.run(agent_of(model, 8), [*first.to_input_list(), {"role": "user", "content": "And Rome?"}])

    expect(asyncio.run(ask()).final_output, why="no text")


def _structured(model: Any) -> None:
    result = asyncio.run(Runner.run(agent_of(model, 160, output_type=Place), QUESTION))
    expect(isinstance(result.final_output, Place), why=f"not parsed: {result.final_output!r}")


def _tools_and_type(model: Any) -> None:
    """The answer is a call or the type's JSON, as the model likes."""

    async def ask() -> Any:
        agent = agent_of(model, 160, tools=[weather], output_type=Place)
        return await Runner.run(agent, "What is the weather in Bonn?", max_turns=2)

    try:
        result = asyncio.run(ask())
    except MaxTurnsExceeded:
        return  # it called in both turns
    expect(isinstance(result.final_output, Place), why=f"not parsed: {result.final_output!r}")


def _handoff(model: Any) -> None:
    """Another agent is offered as a tool."""
    other = agent_of(model, 8, handoff_description="Knows Rome")
    other.name = "Roman"
    first = agent_of(model, 160, handoffs=[other], tool_choice="required")
    result = asyncio.run(Runner.run(first, "Where is Rome?", max_turns=3))
    expect(result.last_agent.name == "Roman" and result.final_output, why=f"the last agent is {result.last_agent.name}")


CASES: dict[str, Case] = {
    "default model": lambda url: _text(default(url)),
    "response, stream": lambda url: _stream(responses(url)),
    "response, tools and their results": lambda url: _tools(responses(url)),
    "response, tools, stream": lambda url: _tools(responses(url), stream=True),
    "response, two questions": lambda url: _two_questions(responses(url)),
    "response, output_type": lambda url: _structured(responses(url)),
    "response, tools and output_type": lambda url: _tools_and_type(responses(url)),
    "response, handoff": lambda url: _handoff(responses(url)),
    "chat": lambda url: _text(chats(url)),
    "chat, stream": lambda url: _stream(chats(url)),
    "chat, tools and their results": lambda url: _tools(chats(url)),
    "chat, tools, stream": lambda url: _tools(chats(url), stream=True),
    "chat, output_type": lambda url: _structured(chats(url)),
    "chat, tools and output_type": lambda url: _tools_and_type(chats(url)),
    "chat, handoff": lambda url: _handoff(chats(url)),
}

if __name__ == "__main__":
    set_tracing_disabled(True)
    run("openai-agents", CASES)
