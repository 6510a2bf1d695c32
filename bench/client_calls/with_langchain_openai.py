"""The langchain-openai package: ChatOpenAI over chats and over responses, and OpenAI over completions."""

from typing import Any, Literal

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from bench.client_calls.cases import KEY, MODEL, Case, expect, run

MESSAGES: list[BaseMessage] = [SystemMessage("Be brief."), HumanMessage("Where is Bonn?")]


class Place(BaseModel):
    """A place and its river."""

    model_config = ConfigDict(extra="forbid")
    country: Literal["Germany", "Italy"]
    river: str = Field(max_length=8)


@tool
def weather(city: Literal["Bonn", "Rome"]) -> str:
    """The weather in a city."""
    return f"Rain in {city}."


def chat_model(url: str, max_tokens: int = 8, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=url, api_key=SecretStr(KEY), model=MODEL, max_tokens=max_tokens, **options)


def _invoke(model: Any) -> None:
    answer = model.invoke(MESSAGES)
    expect(answer.text, why="no content")
    expect(answer.usage_metadata and answer.usage_metadata["output_tokens"], why="no usage")


def _stream(model: Any) -> None:
    chunks = list(model.stream(MESSAGES))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    expect(whole.text, why="no content")
    expect(whole.usage_metadata and whole.usage_metadata["output_tokens"], why="no usage")


def _tools(model: Any) -> None:
    messages: list[Any] = [HumanMessage("What is the weather in Bonn?")]
    first: AIMessage = model.bind_tools([weather], tool_choice="any").invoke(messages)
    expect(first.tool_calls, why=f"no call in {first!r}")
    messages.append(first)
    messages += [ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in first.tool_calls]
    second = model.bind_tools([weather]).invoke(messages)
    expect(second.text or second.tool_calls, why="no second answer")


def _structured(model: Any, method: str) -> None:
    answer = model.with_structured_output(Place, method=method).invoke(
        "Where is Bonn? Answer as JSON with country and river."
    )
    expect(isinstance(answer, Place), why=f"not parsed: {answer!r}")


def json_mode(url: str) -> None:
    answer = chat_model(url, 160).bind(response_format={"type": "json_object"}).invoke("Where is Bonn? Answer as JSON.")
    expect(answer.text.lstrip().startswith("{"), why=f"no JSON: {answer.text!r}")


def asyncio_client(url: str) -> None:
    import asyncio

    async def ask() -> str:
        return "".join([str(chunk.text) async for chunk in chat_model(url).astream(MESSAGES)])

    expect(asyncio.run(ask()), why="no content")


def completion_model(url: str) -> OpenAI:
    return OpenAI(base_url=url, api_key=SecretStr(KEY), model=MODEL, max_tokens=8)


def completion(url: str) -> None:
    result = completion_model(url).generate(["Bonn is", "Rome is"])
    expect(len(result.generations) == 2, why="not both prompts")
    expect((result.llm_output or {}).get("token_usage"), why="no usage")


def completion_stream(url: str) -> None:
    expect("".join(completion_model(url).stream("Bonn is")), why="no text")


CASES: dict[str, Case] = {
    "chat": lambda url: _invoke(chat_model(url)),
    "chat, stream": lambda url: _stream(chat_model(url, stream_usage=True)),
    "chat, tools and their results": lambda url: _tools(chat_model(url, 160)),
    "chat, structured by json_schema": lambda url: _structured(chat_model(url, 160), "json_schema"),
    "chat, structured by function_calling": lambda url: _structured(chat_model(url, 160), "function_calling"),
    "chat, json_object": json_mode,
    "chat, asyncio": asyncio_client,
    "completion": completion,
    "completion, stream": completion_stream,
    "response": lambda url: _invoke(chat_model(url, use_responses_api=True)),
    "response, stream": lambda url: _stream(chat_model(url, use_responses_api=True)),
    "response, tools and their results": lambda url: _tools(chat_model(url, 160, use_responses_api=True)),
    "response, structured by json_schema": lambda url: _structured(
        chat_model(url, 160, use_responses_api=True), "json_schema"
    ),
}

if __name__ == "__main__":
    run("langchain-openai", CASES)
