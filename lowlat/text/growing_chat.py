"""This module finds the tokens of a chat that nothing later can change, while its last message is being written.

The template writes the chat with a mark at the message's end: what comes before the mark is certain as text is, and
the message's further text follows it. At the end it writes the whole chat, which must begin with what was certain.
"""

import secrets
from collections.abc import Callable, Sequence

from lowlat.errors import RequestError
from lowlat.text.growing import LONG, Cuts, GrowingText

__all__ = ["GrowingChat"]


class GrowingChat:
    """The token ids of a chat, of whose last message the content comes in pieces.

    cuts    where texts of the tokenizer may be cut
    write   the text of the chat with this content of its last message. Raises RequestError
    encode  token ids of a part of that text. Raises RequestError
    check   refuses a text that is too long by its length alone. Raises RequestError
    Where a template does not write the end of a message once, all of it is held back until it has ended.
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
        self._given = ""  # the chat's text as far as it is known
        self._text: GrowingText | None = None
        self._is_odd = False

    def append(self, piece: Sequence[int] | str) -> list[int]:
        """Take more of the message; the token ids that are certain now. Raises RequestError for token ids."""
        if not isinstance(piece, str):
            raise RequestError("a message of a chat is text, and its pieces are: token ids go with a plain prompt")
        self._content += piece
        if len(self._content) > LONG:
            self._check(self._content)
        if self._text is None:
            if self._is_odd or not self._content.strip():  # a template may leave spaces at the front out
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
        """The token ids after those that are certain, if the message ends here; it may go on all the same.

        Raises RequestError for a template that writes a message's beginning by its end.
        """
        whole = self._write(self._content)
        if self._text is None:
            return self._encode(whole)
        num_certain = len(self._given) - self._text.num_held
        if not whole.startswith(self._given[:num_certain]):
            raise RequestError("the chat template writes this message otherwise when it is whole; send it at once")
        return self._text.rest_as(whole[num_certain:])

    def _before_end(self) -> str | None:
        """The chat's text up to the end of what there is of the message; None where that has no place."""
        mark = f"qz{secrets.token_hex(8)}"
        parts = self._write(self._content + mark).split(mark)
        return parts[0] if len(parts) == 2 else None
