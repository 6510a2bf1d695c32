"""An agent calls functions until the model answers in words, or its turns are used up."""

from collections.abc import Callable, Mapping
from typing import Any

import lowlat

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "temperature",
            "description": "The temperature of a room, in degrees.",
            "parameters": {
                "type": "object",
                "properties": {"room": {"enum": ["hall", "cellar"]}},
                "required": ["room"],
            },
        },
    }
]


def temperature(room: str) -> dict[str, Any]:
    return {"room": room, "degrees": {"hall": 21, "cellar": 12}[room]}


def run_agent(
    runtime: lowlat.Runtime, question: str, functions: Mapping[str, Callable[..., Any]], turns: int = 2
) -> list[dict[str, Any]]:
    """Run an agent; returns the whole conversation. The last turn allows no call, so that it ends in words."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for turn in range(turns):
        # "required" forces a call, since a random model makes none by itself; use "auto" with a real model
        choice = "required" if turn < turns - 1 else "none"
        answer = runtime.chat(messages, tools=TOOLS, tool_choice=choice, max_tokens=200, seed=turn)
        messages.append(answer.message)
        if not answer.tool_calls:
            break
        messages += [call.result(functions[call.name](**call.values())) for call in answer.tool_calls[:1]]
    return messages


def test_the_agent_calls_and_then_answers(runtime: lowlat.Runtime) -> None:
    asked, called, result, answered = run_agent(runtime, "How warm is it?", {"temperature": temperature})
    assert asked["role"] == "user" and called["tool_calls"][0]["function"]["name"] == "temperature"
    assert result["role"] == "tool" and "degrees" in result["content"]
    assert answered["role"] == "assistant" and "tool_calls" not in answered
