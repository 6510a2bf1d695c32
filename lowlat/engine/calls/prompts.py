"""This module turns a caller's prompt and options into token ids and parameters, in the caller's own thread."""

import json
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lowlat.engine.requests.checks import check_call, encode_prompt, encode_texts
from lowlat.errors import RequestError
from lowlat.ipc.limits import Limits
from lowlat.ipc.prompts import Prompt, chat_messages
from lowlat.options.declaration import check_number, shown
from lowlat.options.keywords import CALL_OPTIONS, CallOptions, NamedSession
from lowlat.options.request import GRAMMAR_OPTIONS, SamplingParams
from lowlat.options.tools import bound_calls, checked_tools, document_of, shown_tools
from lowlat.text.templates.messages import encode_messages

if TYPE_CHECKING:
    from lowlat.engine.runtime import Runtime

__all__ = ["Prepared", "as_chat", "check_timeout", "is_chat", "is_quick", "prepare"]

QUICK_CHARACTERS = 4096  # a text up to this has its token ids in about a millisecond
MAX_TIMEOUT_S = 1e9
OF_CHATS = ("tool_choice", "template_options")


@dataclass(frozen=True)
class Prepared:
    """A request that can be submitted.

    grammar  its compiled grammar, held here so that it stays compiled
    session  the session that it belongs to, or its name
    """

    prompt: Sequence[int]
    params: SamplingParams
    cache_salt: str
    grammar: object
    session: NamedSession | str | None = None


def is_chat(prompt: object) -> bool:
    """Whether a prompt is the messages of a chat."""
    return isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], Mapping)


def as_chat(messages: Prompt) -> Prompt:
    """Return a chat's messages; a text becomes one user message. Raises RequestError for any other prompt."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not is_chat(messages):
        raise RequestError(f"a chat takes messages or a text, got {shown(messages)}; generate takes token ids")
    return messages


def is_quick(prompt: Prompt, params: SamplingParams | None, options: CallOptions) -> bool:
    """Whether `prepare` is fast enough to run in an event loop."""
    if is_chat(prompt) or any(name in options for name in (*GRAMMAR_OPTIONS, "draft_texts")):
        return False
    slow = params is not None and any(getattr(params, name, None) for name in ("grammar_option", "draft_texts"))
    try:
        return len(prompt) <= QUICK_CHARACTERS and not slow
    except TypeError:  # an iterator of ids, or no prompt at all
        return False


def prepare(runtime: "Runtime", prompt: Prompt, params: SamplingParams | None, options: CallOptions) -> Prepared:
    """Check a call, encode its prompt and compile its grammar. Raises RequestError."""
    given: dict[str, Any] = dict(options)
    how = {name: given.pop(name) for name in CALL_OPTIONS & given.keys()}
    allow_special, cache_salt = how.get("allow_special", False), how.get("cache_salt", "")
    check_timeout(how.get("timeout_s"))
    check_call(SamplingParams() if params is None else params, None, allow_special, cache_salt)
    max_context = runtime.config.max_context
    if is_chat(prompt):
        ids, settled = _chat(runtime, prompt, params, given, how, allow_special)
    else:
        for name in OF_CHATS:
            if how.get(name) is not None:
                raise RequestError(f"{name} is for chat messages; this prompt has no template")
        settled = _with(params, given)
        text: Any = prompt
        fit = params is None and "max_tokens" not in given
        ids = encode_prompt(
            runtime.codec, text, allow_special, max_context, max(1, settled.min_tokens) if fit else settled.max_tokens
        )
        settled = _fitted(runtime, ids, settled) if fit else settled
    runtime.checks.check_texts(settled)  # before they are encoded
    settled = encode_texts(runtime.codec, settled)
    checked = runtime.checks.check(ids, settled)
    return Prepared(checked, settled, cache_salt, runtime.grammars.compile(settled), how.get("session"))


def check_timeout(timeout_s: Any) -> None:
    """Raise RequestError for an invalid timeout; None is valid."""
    if timeout_s is not None:
        check_number("timeout_s", timeout_s, 0.0, MAX_TIMEOUT_S, RequestError, above=True)


def _fitted(runtime: "Runtime", ids: Any, settled: SamplingParams) -> SamplingParams:
    """Reduce max_tokens to the positions that the prompt leaves in the context, if those are fewer."""
    if not isinstance(ids, Sized):
        return settled
    available = min(runtime.checks.max_context, runtime.checks.max_total_tokens) - len(ids)
    if available >= settled.max_tokens:
        return settled
    return replace(settled, max_tokens=max(1, settled.min_tokens, available))


def _with(params: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
    """Replace fields of the parameters by options. Raises RequestError for an unknown option."""
    if params is None or not options:
        return SamplingParams.from_options(options) if params is None else params
    SamplingParams.from_options({name: options[name] for name in options if name not in params.__dataclass_fields__})
    return replace(params, **options)


def _chat(
    runtime: "Runtime",
    prompt: Any,
    params: SamplingParams | None,
    given: dict[str, Any],
    how: Mapping[str, Any],
    allow_special: bool,
) -> tuple[Sequence[int], SamplingParams]:
    """Encode a chat, and settle its parameters.

    By default its answer is parsed, and may be as long as the context allows. Raises RequestError.
    """
    codec = runtime.codec
    if codec is None:
        raise RequestError("a chat needs tokenizer.json in the model directory; give token ids")
    messages = chat_messages(prompt)
    template = how.get("template_options") or {}
    if not isinstance(template, Mapping):
        raise RequestError(f"template_options must be a mapping, got {type(template).__name__}")
    offered = given.pop("tools", None if params is None else params.tools)
    tools, required, parallel = _chosen(offered, how.get("tool_choice", "auto"))
    if tools:
        template = {**template, "tools": shown_tools(tools)}
        given["tools"] = tools
        given.update(_bound(tools, required, parallel, params, given))
    asked = given.get("parse", "none" if params is None else params.parse)
    if "parse" not in given and asked == "none":
        given["parse"] = "tools" if tools else "reasoning"
    fit = params is None and "max_tokens" not in given
    most = 1 if fit else given.get("max_tokens", 0 if params is None else params.max_tokens)
    settled = _with(params, {**given, "max_tokens": max(1, given.get("min_tokens", 0))} if fit else given)
    max_context = runtime.config.max_context
    ids = encode_messages(
        codec, messages, template, allow_special=allow_special, max_context=max_context, max_tokens=most
    )
    if fit:
        available = max(1, max_context - len(ids))
        settled = replace(settled, max_tokens=min(available, max(Limits.default_max_tokens, settled.min_tokens)))
    return ids, settled


def _chosen(offered: Any, choice: Any) -> tuple[list[dict[str, Any]], bool, bool]:
    """Return the callable tools, whether a call is required, and whether several are allowed. Raises RequestError."""
    if isinstance(offered, str):
        try:
            offered = json.loads(offered)
        except ValueError as error:
            raise RequestError(f"tools: {error!s:.200}") from error
    tools = checked_tools(offered or [])
    if not isinstance(choice, str):
        raise RequestError(f"tool_choice must be 'auto', 'required', 'none' or a function's name, got {shown(choice)}")
    if choice in ("auto", "none"):
        return (tools if choice == "auto" else []), False, True
    named = tools if choice == "required" else [tool for tool in tools if tool["function"]["name"] == choice]
    if not named:
        why = f"{choice!r:.80} is none of the tools" if tools else "there are no tools to choose from"
        raise RequestError(f"tool_choice: {why}")
    return named, True, choice == "required"


def _bound(
    tools: Sequence[Mapping[str, Any]],
    required: bool,
    parallel: bool,
    params: SamplingParams | None,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """Make the options that constrain an answer to calls of these tools, or to the requested format of its text."""
    names = [name for name in GRAMMAR_OPTIONS if name != "tool_calls"]
    own = {name: getattr(params, name) for name in names} if params is not None else {}
    formats = {name: value for name, value in {**own, **given}.items() if name in names}
    bound = {name: value for name, value in formats.items() if value not in (None, False, ())}
    if isinstance(bound.get("json_schema"), str):
        bound["json_schema"] = json.loads(bound["json_schema"])
    document = None if required else document_of(bound)
    calls = bound_calls(tools, required=required, parallel=parallel, document=document)
    if calls is None:
        return {}
    free = {"json_schema": None, "json_object": False, "regex": None, "grammar": None, "choice": ()}
    return {**{name: free[name] for name in formats}, "tool_calls": calls}
