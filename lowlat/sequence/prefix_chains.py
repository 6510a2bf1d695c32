"""This module makes the digests of a prompt's chunks once, by which the index of prefixes finds them."""

from collections import OrderedDict
from collections.abc import Sequence

from lowlat.sequence.prefix_index import PrefixIndex

__all__ = ["PrefixChain", "PrefixChains"]

MAX_CHAINS = 16


class PrefixChain:
    """The digests of a prompt's chunks, made as they are asked for."""

    def __init__(self, index: PrefixIndex, prompt: Sequence[int], root: bytes, prefill_chunk: int) -> None:
        self.prompt, self.root = prompt, root
        self._index, self._chunk = index, prefill_chunk
        self._digests: list[bytes] = []

    def digest(self, k: int) -> bytes:
        """The chained digest of chunk k."""
        digests, size = self._digests, self._chunk
        for number in range(len(digests), k + 1):
            tokens = self.prompt[number * size : (number + 1) * size]
            digests.append(self._index.digest(digests[-1] if digests else self.root, tokens))
        return digests[k]


class PrefixChains:
    """The chains of the prompts that were asked for last: one that waits is asked for again and again."""

    def __init__(self, index: PrefixIndex, prefill_chunk: int) -> None:
        self._index, self._chunk = index, prefill_chunk
        self._kept: OrderedDict[int, PrefixChain] = OrderedDict()

    def of(self, prompt: Sequence[int], root: bytes) -> PrefixChain:
        """The chain of a prompt under the root of its salt; one that is a list may change, and is digested again."""
        if not isinstance(prompt, tuple):
            return PrefixChain(self._index, prompt, root, self._chunk)
        chain = self._kept.get(id(prompt))
        if chain is None or chain.prompt is not prompt or chain.root != root:
            chain = self._kept[id(prompt)] = PrefixChain(self._index, prompt, root, self._chunk)
        self._kept.move_to_end(id(prompt))
        if len(self._kept) > MAX_CHAINS:
            self._kept.popitem(last=False)
        return chain
