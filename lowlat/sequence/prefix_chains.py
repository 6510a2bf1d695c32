"""This module computes the digests of a prompt's chunks, and keeps them: the prefix index finds chunks by digest."""

from collections import OrderedDict
from collections.abc import Sequence

from lowlat.sequence.prefix_index import PrefixIndex

__all__ = ["PrefixChain", "PrefixChains"]

MAX_CHAINS = 16


class PrefixChain:
    """The digests of a prompt's chunks, computed on first use."""

    def __init__(self, index: PrefixIndex, prompt: Sequence[int], root: bytes, prefill_chunk: int) -> None:
        self.prompt, self.root = prompt, root
        self._index, self._chunk = index, prefill_chunk
        self._digests: list[bytes] = []

    def digest(self, k: int) -> bytes:
        """Return the chained digest of chunk k."""
        digests, size = self._digests, self._chunk
        for number in range(len(digests), k + 1):
            tokens = self.prompt[number * size : (number + 1) * size]
            digests.append(self._index.digest(digests[-1] if digests else self.root, tokens))
        return digests[k]


class PrefixChains:
    """A cache of the last prompts' chains: the scheduler asks for a waiting prompt again and again."""

    def __init__(self, index: PrefixIndex, prefill_chunk: int) -> None:
        self._index, self._chunk = index, prefill_chunk
        self._kept: OrderedDict[int, PrefixChain] = OrderedDict()

    def of(self, prompt: Sequence[int], root: bytes) -> PrefixChain:
        """Return the chain of a prompt under the root of its salt; a list may change, so its chain is not cached."""
        if not isinstance(prompt, tuple):
            return PrefixChain(self._index, prompt, root, self._chunk)
        chain = self._kept.get(id(prompt))
        if chain is None or chain.prompt is not prompt or chain.root != root:
            chain = self._kept[id(prompt)] = PrefixChain(self._index, prompt, root, self._chunk)
        self._kept.move_to_end(id(prompt))
        if len(self._kept) > MAX_CHAINS:
            self._kept.popitem(last=False)
        return chain
