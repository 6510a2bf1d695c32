"""This module finds the tokens of a chat that no later text can change, while its last message is being written.

The template renders the chat with a mark at the message's end. The text before the mark is certain, as far as a growing
text is, and the message's further text follows it. At the end the template renders the whole chat, which must begin
with the certain text.
"""

import secrets
from collections.abc import Callable, Sequence

from lowlat.errors import RequestError
from lowlat.text.growing import LONG, Cuts, GrowingText

__all__ = ["GrowingChat"]


class GrowingChat:
    """Encodes a chat whose last message comes in pieces.

    cuts    where texts of the tokenizer may be cut
    write   renders the chat with this content of its last message. Raises RequestError
    encode  encodes a part of that text. Raises RequestError
    check   raises RequestError for a text that is too long by its length alone
    If the template does not render the message's end exactly once, the whole message is held back until it has ended.
    """

    def __init__(
        self,
        cuts: Callable[[], Cuts],
        write: Callable[[str], str],
        encode: Callable[[str], list[int]],
        check: Callable[[str], None],
    ) -> None:
        self._cuts, self._write, self._encode, self._check = cuts, write, encode, check
        self._content = ""
        self._given = ""  # the rendered chat up to the message's end so far
        self._text: GrowingText | None = None
        self._is_odd = False

    def append(self, piece: Sequence[int] | str) -> list[int]:
        """Take more of the message; returns the token ids that became certain. Raises RequestError for token ids."""
        if not isinstance(piece, str):
            raise RequestError("a message of a chat is text, and its pieces are: token ids go with a plain prompt")
        self._content += piece
        if len(self._content) > LONG:
            self._check(self._content)
        if self._text is None:
            if self._is_odd or not self._content.strip():  # a template may drop leading spaces
                return []
            before = self._before_end()
            if before is None:
                self._is_odd = True
                return []
            self._text = GrowingText(self._cuts(), lambda text, _: self._encode(text), is_start=False)
            piece = before
        self._given += piece
        return self._text.append(piece)

    def rest(self) -> list[int]:
        """Return the token ids after the certain ones, as if the message ended here; more may still be appended.

        Raises RequestError if the template renders the message's beginning differently depending on its end.
        """
        whole = self._write(self._content)
        if self._text is None:
            return self._encode(whole)
        num_certain = len(self._given) - self._text.num_held
        if not whole.startswith(self._given[:num_certain]):
            raise RequestError("the chat template writes this message otherwise when it is whole; send it at once")
        return self._text.rest_as(whole[num_certain:])

    def _before_end(self) -> str | None:
        """Render the chat up to the end of the message so far; None if the mark is not rendered exactly once."""
        mark = f"qz{secrets.token_hex(8)}"
        parts = self._write(self._content + mark).split(mark)
        return parts[0] if len(parts) == 2 else None
