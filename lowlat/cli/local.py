"""A model loaded in this process to chat with, the counterpart of a server's in `lowlat.cli.connecting`."""

from collections.abc import Mapping
from typing import Any

from lowlat.cli.generation import Asked
from lowlat.engine.runtime import Runtime
from lowlat.options.model_names import display_name

__all__ = ["LocalModel"]


class LocalModel:
    """A runtime that answers.

    advice  the sampling where a request leaves it open, next to lowlat's own defaults; None: these alone
    """

    def __init__(self, runtime: Runtime, advice: Mapping[str, int | float] | None = None) -> None:
        self._runtime = runtime
        self.advice = {} if advice is None else dict(advice)
        self.name = display_name(runtime.directory)
        self.place = str(runtime.device_choice.device)
        self.has_tokenizer = runtime.codec is not None
        self.has_chat_template = runtime.codec is not None and runtime.codec.has_chat_template

    def ask(self, prompt: str | list[dict[str, Any]], sampling: Mapping[str, Any]) -> Asked:
        """Ask for a text's continuation, or a conversation's next message. Raises RequestError."""
        options: Any = {**self.advice, **sampling}
        stream = self._runtime.stream(prompt, **options)
        return Asked(stream, has_text=self.has_tokenizer, max_context=self._runtime.config.max_context)
