"""This module packs the logprobs of a prompt's tokens, for the engine, the wire and callers.

A prompt of 131,072 tokens with 20 likeliest ones at each is 22 MB in this form. Objects are made only for positions
that a caller reads. The wire carries the packed form in parts of limited size.
"""

import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, overload

from lowlat.ipc.messages import PromptPart

__all__ = ["PromptLogprob", "PromptLogprobs"]

PART_VALUES = 1 << 16  # numbers in a part, of 4 bytes each; texts are not counted
WIDTH = 4  # bytes of a number
Packed = tuple[bytes, bytes, bytes, bytes, bytes]


class PromptLogprob(NamedTuple):
    """A token of a prompt, with its logarithmic probability after the tokens before it, from the raw logits.

    rank   its place among all tokens, likeliest first, from 1 on; equal ones are ordered by id
    top    the likeliest tokens, (token id, logprob), likeliest first; the token itself may be among them
    texts  bytes of the token, then of each of `top`; None without a tokenizer
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
    texts: tuple[bytes, ...] | None = None


class PromptLogprobs(Sequence[PromptLogprob | None]):
    """A PromptLogprob for each token of a prompt; None for the first, which has no token before it.

    num_top  likeliest tokens at each position
    packed   of n positions: token ids, n little-endian int32; logprobs, n little-endian float32; ranks, n int32, 0 for
             the first position; ids of the likeliest, n * num_top int32, -1 where the vocabulary has no more; theirs
    texts    bytes by token id, of all tokens that occur; None without a tokenizer
    """

    __slots__ = ("num_top", "packed", "texts")

    def __init__(self, num_top: int, packed: Packed, texts: Mapping[int, bytes] | None = None) -> None:
        self.num_top = num_top
        self.packed = packed
        self.texts = texts

    @classmethod
    def first(cls, token_id: int, num_top: int) -> "PromptLogprobs":
        """The first token's, of which nothing is known but its id."""
        nothing = bytes(WIDTH)
        unused = _packed([-1] * num_top)
        return cls(num_top, (_packed([token_id]), nothing, nothing, unused, nothing * num_top))

    @classmethod
    def joined(cls, parts: Sequence["PromptLogprobs"], texts: Mapping[int, bytes] | None) -> "PromptLogprobs":
        """Join the logprobs of consecutive positions; `parts` has at least one element."""
        token_ids, logprobs, ranks, top_ids, top_logprobs = zip(*(each.packed for each in parts), strict=True)
        packed = (b"".join(token_ids), b"".join(logprobs), b"".join(ranks), b"".join(top_ids), b"".join(top_logprobs))
        return cls(parts[0].num_top, packed, texts)

    def tokens(self) -> frozenset[int]:
        """Return all tokens that occur, the likeliest ones included."""
        return frozenset(_ints(self.packed[0])) | (frozenset(_ints(self.packed[3])) - {-1})

    def __len__(self) -> int:
        return len(self.packed[0]) // WIDTH

    @overload
    def __getitem__(self, place: int) -> PromptLogprob | None: ...
    @overload
    def __getitem__(self, place: slice) -> list[PromptLogprob | None]: ...
    def __getitem__(self, place: int | slice) -> "PromptLogprob | list[PromptLogprob | None] | None":
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        token_ids, logprobs, ranks, top_ids, top_logprobs = self._own(place, 1)
        (rank,) = _ints(ranks)
        if not rank:
            return None
        (token,), (logprob,), ids, values = _ints(token_ids), _floats(logprobs), _ints(top_ids), _floats(top_logprobs)
        top = tuple((each, value) for each, value in zip(ids, values, strict=True) if each >= 0)
        texts = None
        if self.texts is not None:
            texts = tuple(self.texts.get(each, b"") for each in (token, *(each for each, _ in top)))
        return PromptLogprob(token, logprob, rank, top, texts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PromptLogprobs):
            return NotImplemented
        return (self.num_top, self.packed, self.texts) == (other.num_top, other.packed, other.texts)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"PromptLogprobs({len(self)} tokens, {self.num_top} likeliest each)"

    def prompt(self) -> tuple[int, ...]:
        """Return the prompt's token ids."""
        return tuple(_ints(self.packed[0]))

    def prompt_texts(self) -> list[bytes]:
        """Return the bytes of each token of the prompt; [] without a tokenizer."""
        return [] if self.texts is None else [self.texts.get(token, b"") for token in self.prompt()]

    def parts(self) -> Iterator[PromptPart]:
        """Yield the parts for the wire, in order; a part has only texts of tokens that no earlier part had."""
        total, told = len(self), set[int]()
        size = max(1, PART_VALUES // (3 + 2 * self.num_top))
        for start in range(0, total, size):
            count = min(size, total - start)
            own = self._own(start, count)
            part = PromptPart(start, total, self.num_top, *own)
            if self.texts is not None:
                new = sorted(PromptLogprobs(self.num_top, own).tokens() - told)
                told.update(new)
                texts = [self.texts.get(token, b"") for token in new]
                part.text_ids, part.text_lengths = _packed(new), _packed(map(len, texts))
                part.texts = b"".join(texts)
            yield part

    @classmethod
    def of_parts(cls, parts: Sequence[PromptPart]) -> "PromptLogprobs":
        """Join and check all parts of a prompt. Raises ValueError for parts that do not fit each other."""
        texts: dict[int, bytes] | None = None
        found, start = [], 0
        for part in parts:
            count, rest = divmod(len(part.token_ids), WIDTH)
            sizes = (len(part.logprobs), len(part.ranks), len(part.top_ids), len(part.top_logprobs))
            own, top = count * WIDTH, count * WIDTH * part.num_top
            if rest or sizes != (own, own, top, top) or (part.start, part.num_top) != (start, parts[0].num_top):
                raise ValueError(f"the part of a prompt's logprobs from position {part.start} on does not fit")
            start += count
            packed = (part.token_ids, part.logprobs, part.ranks, part.top_ids, part.top_logprobs)
            found.append(cls(part.num_top, packed))
            if part.texts is not None:
                texts = {} if texts is None else texts
                texts.update(_texts(part.text_ids, part.text_lengths, part.texts))
        return cls.joined(found, texts)

    def _own(self, place: int, count: int) -> Packed:
        """Return the packed numbers of `count` positions from `place` on."""
        one = slice(place * WIDTH, (place + count) * WIDTH)
        top = slice(one.start * self.num_top, one.stop * self.num_top)
        token_ids, logprobs, ranks, top_ids, top_logprobs = self.packed
        return token_ids[one], logprobs[one], ranks[one], top_ids[top], top_logprobs[top]


def _texts(ids: bytes, lengths: bytes, texts: bytes) -> Iterator[tuple[int, bytes]]:
    tokens, bounds = _ints(ids), list(accumulate(_ints(lengths), initial=0))
    if len(tokens) != len(bounds) - 1 or bounds[-1] != len(texts):
        raise ValueError(f"{len(texts)} bytes of texts of tokens do not fit their {len(tokens)} ids")
    return ((token, texts[begin:end]) for token, (begin, end) in zip(tokens, pairwise(bounds), strict=True))


def _packed(values: Iterable[int]) -> bytes:
    packed = array("i", values)
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


def _ints(packed: bytes) -> "array[int]":
    values = array("i", packed)
    if sys.byteorder != "little":
        values.byteswap()
    return values


def _floats(packed: bytes) -> "array[float]":
    values = array("f", packed)
    if sys.byteorder != "little":
        values.byteswap()
    return values
