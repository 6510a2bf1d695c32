"""This module leaves a chat's last message open, so that the answer continues it.

The template renders the message with a tag at its end, and the text after the tag is left out, as transformers'
`apply_chat_template` does.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from lowlat.errors import RequestError

__all__ = ["ContinuedMessage", "check_ending"]


def check_ending(continue_final_message: object, add_generation_prompt: object) -> bool:
    """Whether the generation prompt follows the messages.

    add_generation_prompt  None: it does, unless the last message is continued
    Raises RequestError for values that are no bools, and if both are true.
    """
    if not isinstance(continue_final_message, bool):
        raise RequestError(f"continue_final_message must be true or false, got {continue_final_message!r:.80}")
    if add_generation_prompt is None:
        return not continue_final_message
    if not isinstance(add_generation_prompt, bool):
        raise RequestError(f"add_generation_prompt must be true or false, got {add_generation_prompt!r:.80}")
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "continue_final_message: add_generation_prompt is true, too; an answer continues the last message, or "
            "begins one of its own"
        )
    return add_generation_prompt


class ContinuedMessage:
    """The last message of a chat, which is the assistant's; the answer continues its text.

    Raises RequestError for a message of another role, with calls, or without text.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        last: Mapping[str, Any] = messages[-1] if messages else {}
        if last.get("role") != "assistant":
            raise RequestError(
                "continue_final_message: the last message must be the assistant's, got the role "
                f"{last.get('role')!r:.80}"
            )
        if last.get("tool_calls") or not isinstance(last.get("content"), str):
            raise RequestError(
                "continue_final_message: the last message must have text as its content, and no tool_calls"
            )
        self._content: str = last["content"]
        self._tag = f"qz{secrets.token_hex(8)}"

    def tagged(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Append a tag and a space to the last message; the space shows whether the template trims messages."""
        return [*messages[:-1], {**messages[-1], "content": f"{self._content}{self._tag} "}]

    def cut(self, text: str) -> str:
        """Cut the chat at the tag; if the template trims messages, the white space at this one's end is removed, too.

        Raises RequestError if the template does not render the message exactly once.
        """
        if (times := text.count(self._tag)) != 1:
            raise RequestError(
                f"continue_final_message: the chat template writes the last message's text {times} times, not once"
            )
        before, _, after = text.partition(self._tag)
        space = self._content[len(self._content.rstrip()) :]
        return before if after.startswith(" ") or not space else before.removesuffix(space)
