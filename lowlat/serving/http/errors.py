"""This module makes errors in OpenAI's shape, also from lowlat's own errors."""

import math
import re
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from lowlat.errors import Busy, CapacityError, ConfigError, LowlatError, RequestError, ServerGone, StreamError

__all__ = ["ApiError", "answer_error", "api_error", "invalid", "missing", "name_fields", "of_prompt"]

INVALID = "invalid_request_error"
_NAMED = re.compile(r"([a-z][a-z_]*)((?:\[[^]]*\]|\.[a-z_]+)*)(?:: | must )")  # an option, and a path within it
_FIELDS = "lowlat.fields"  # key in a request's state

GONE_RETRY_S = "1"  # a restart takes longer, but clients wait longer at each retry
_CONTEXT = re.compile(r" exceed (\d+) \(max_context\)")
_EMPTY = "the prompt is empty"
_OF_DOCUMENT = "tool_calls.document: "  # the option comes from json_schema
_TOOLS = ".tools"
_OWN_NAMES = {"template_options": "chat_template_kwargs", "tool_calls": "tools"}  # names in this API


class ApiError(Exception):
    """An answer that is an error.

    status   of HTTP
    kind     `type` in the body
    param    the parameter that is wrong, by its path: "messages[0].content"
    code     a stable name
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        self.headers = headers or {}

    def response(self) -> Response:
        """The answer itself."""
        return JSONResponse(self.body, self.status, self.headers)


def invalid(param: str, message: str) -> ApiError:
    """The refusal of a parameter's value."""
    return ApiError(400, message, param=param, code="invalid_value")


def missing(param: str) -> ApiError:
    """Return the error for a body that lacks a field."""
    return ApiError(400, f"Missing required parameter: {param}", param=param, code="missing_required_parameter")


def name_fields(request: Request, fields: Mapping[str, str]) -> None:
    """Note what a request's body calls the options that an error may name: {"json_schema": "response_format"}.

    "prompt" is among them. An option that is not has the same name in the body.
    """
    setattr(request.state, _FIELDS, fields)


def api_error(error: Exception, scope: Scope) -> ApiError:
    """Convert any error to the answer to a request, or to the last event of its stream.

    Errors other than ApiError and LowlatError do not show their texts.
    """
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, LowlatError):
        return ApiError(500, "the gateway failed on this request", kind="server_error", code="internal")
    text = str(error)
    if isinstance(error, CapacityError):
        headers = {}
        if isinstance(error, Busy) and error.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
            headers["retry-after-ms"] = str(max(1, round(error.retry_after_s * 1000)))
        return ApiError(429, text, kind="rate_limit_error", code="rate_limit_exceeded", headers=headers)
    if isinstance(error, (RequestError, ConfigError)):
        fields: Mapping[str, str] = scope.get("state", {}).get(_FIELDS, {})
        if too_long := _CONTEXT.search(text):
            message = f"This model's maximum context length is {too_long[1]} tokens: {text}"
            return ApiError(400, message, param=fields.get("prompt"), code="context_length_exceeded")
        text, param = _named(text, fields)
        return ApiError(400, text, param=param, code="invalid_value")
    if isinstance(error, ServerGone):
        return ApiError(
            503, text, kind="server_error", code=error.code or "gone", headers={"retry-after": GONE_RETRY_S}
        )
    code = error.code if isinstance(error, StreamError) else "internal"
    return ApiError(500, text, kind="server_error", code=code)


def of_prompt(error: LowlatError, scope: Scope, place: int) -> ApiError:
    """Name one of several prompts in an error, by its number, if the error is about this prompt alone."""
    told = api_error(error, scope)
    body, name = told.body["error"], f"prompt[{place}]"
    if isinstance(error, (CapacityError, ServerGone)) or body["param"] not in (None, "prompt"):
        return told
    message = f"{name}: {body['message'].removeprefix('prompt: ')}"
    return ApiError(told.status, message, kind=body["type"], param=name, code=body["code"], headers=told.headers)


async def answer_error(request: Request, error: Exception) -> Response:
    """The handler of all errors."""
    return api_error(error, request.scope).response()


def _named(text: str, fields: Mapping[str, str]) -> tuple[str, str | None]:
    """An error's text with the body's own name of the option that it begins with, and the field that it is about."""
    if text.startswith(_EMPTY):
        return text, fields.get("prompt")
    if text.startswith(_OF_DOCUMENT):
        text = f"json_schema: {text[len(_OF_DOCUMENT) :]}"
    found = _NAMED.match(text)
    if found is None:
        return text, None
    name, within = found.groups()
    if name == "messages":  # messages of an input are made of its items
        name, within = fields.get("prompt", name), within if fields.get("prompt") == name else ""
        return f"{name}{within}{text[found.end(2) :]}", f"{name}{within}"
    if name == "template_options" and within.startswith(_TOOLS):  # of a chat's template, which is shown them
        name, within = "tools", within.removeprefix(_TOOLS)
    name = fields.get(name) or _OWN_NAMES.get(name, name)
    return f"{name}{within}{text[found.end(2) :]}", name
