"""This module words errors as OpenAI's clients expect them, and makes lowlat's own into such."""

import math
import re
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lowlat.errors import Busy, CapacityError, ConfigError, LowlatError, RequestError, ServerGone, StreamError

__all__ = ["ApiError", "answer_error", "api_error", "invalid"]

INVALID = "invalid_request_error"
_PARAM = re.compile(r"([a-z][a-z_]*)(?:\[.*?\])?(?:: | must )")

GONE_RETRY_S = "1"  # a server that is started again takes longer, but clients wait longer at each try
_CONTEXT = re.compile(r" exceed (\d+) \(max_context\)")
_EMPTY = "the prompt is empty"
_PROMPTS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}

_OWN_NAMES = {
    "template_options": "chat_template_kwargs",
    "json_schema": "response_format",
    "tool_calls": "tools",
}  # of this interface, for what the server calls otherwise


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


def api_error(error: LowlatError) -> ApiError:
    """An error of lowlat as an answer."""
    text = str(error)
    if isinstance(error, CapacityError):
        headers = {}
        if isinstance(error, Busy) and error.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
            headers["retry-after-ms"] = str(max(1, round(error.retry_after_s * 1000)))
        return ApiError(429, text, kind="rate_limit_error", code="rate_limit_exceeded", headers=headers)
    if isinstance(error, (RequestError, ConfigError)):
        if too_long := _CONTEXT.search(text):
            message = f"This model's maximum context length is {too_long[1]} tokens: {text}"
            return ApiError(400, message, code="context_length_exceeded")
        named = _PARAM.match(text)
        param = None if named is None else _OWN_NAMES.get(named[1], named[1])
        return ApiError(400, text, param=param, code="invalid_value")
    if isinstance(error, ServerGone):
        return ApiError(
            503, text, kind="server_error", code=error.code or "gone", headers={"retry-after": GONE_RETRY_S}
        )
    code = error.code if isinstance(error, StreamError) else "internal"
    return ApiError(500, text, kind="server_error", code=code)


async def answer_error(request: Request, error: Exception) -> Response:
    """The handler of all errors: those that are neither ApiError nor LowlatError tell nothing of themselves."""
    if isinstance(error, LowlatError):
        error = api_error(error)
    if isinstance(error, ApiError):
        told = error.body["error"]
        if told["code"] == "context_length_exceeded" or told["message"].startswith(_EMPTY):
            told["param"] = _PROMPTS.get(request.url.path)
        return error.response()
    return ApiError(500, "the gateway failed on this request", kind="server_error", code="internal").response()
