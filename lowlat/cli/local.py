"""This module loads a model in this process for a chat; `lowlat.cli.connecting` has the same for a server's model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowlat.cli.generation import Asked
from lowlat.engine.runtime import Runtime
from lowlat.engine.sessions.session import Session
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
        self.place = f"on {runtime.device_choice.device}"
        self.has_tokenizer = runtime.codec is not None
        self._session: Session | None = None
        self._path: Path | None = None
        self.has_chat_template = runtime.codec is not None and runtime.codec.has_chat_template

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return the earlier messages in the session's file."""
        return [] if self._session is None else list(self._session.data.get("messages", ()))

    def open_session(self, path: Path) -> None:
        """Continue the session in a file, or begin one for it. Raises SessionError."""
        self._path = path
        self._session = self._runtime.load_session(path) if path.exists() else self._runtime.session("chat")

    def keep(self, messages: list[dict[str, Any]]) -> None:
        """Write the session's file, if there is one and the chat has a message. Raises SessionError."""
        if self._session is not None and self._path is not None and self._session.token_ids:
            self._session.data["messages"] = messages
            self._session.save(self._path)

    def ask(self, prompt: str | list[dict[str, Any]], sampling: Mapping[str, Any]) -> Asked:
        """Ask for a text's continuation, or a conversation's next message. Raises RequestError."""
        options: Any = {**self.advice, **sampling}
        stream = self._runtime.stream(prompt, session=self._session, **options)
        return Asked(stream, has_text=self.has_tokenizer, max_context=self._runtime.config.max_context)
