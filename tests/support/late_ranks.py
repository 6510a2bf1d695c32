"""Ranks on one device of which all but the first lag: their operations wait until another rank or the host needs them.

So the host sees what the first rank publishes while the others may still stand right after that step's last exchange,
as GPUs that are stopped for a moment might. It shows whether the host writes over what they have yet to read.
"""

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from lowlat.executors.reference import ReferenceExecutor
from lowlat.executors.reference.executor import Bound
from lowlat.executors.reference.ranks import ALL_REDUCE, RankedReferenceExecutor
from lowlat.graphs import Bucket, BufferSet
from lowlat.kernels.reference.collectives.ranks import all_reduce_parts

__all__ = ["LateRanks"]

COMMANDS = "apply_commands"


class LateRanks(RankedReferenceExecutor):
    """The first rank runs at once, the others before an all-reduce, before a prefill ends, or when they are waited for.

    chance  of each operation that some of what the others owe is run after it, by `seed`; 0: none
    `most_owed` is the most operations that a rank has been after.
    """

    chance, seed = 0.0, 0

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._owed: list[deque[Callable[[], None]]] = [deque() for _ in self._peers]
        self._random = random.Random(self.seed)
        self.most_owed = 0

    def _prepare(self, key: Bucket | int) -> tuple[BufferSet, tuple[Bound, ...]]:
        known = self._prepared.get(key)
        if known is None:
            own, first = ReferenceExecutor._prepare(self, key)
            others = [peer._prepare(key)[1] for peer in self._peers]
            known = self._prepared[key] = own, tuple(self._apart(each) for each in zip(first, *others, strict=True))
        return known

    def _apart(self, ranks: tuple[Bound, ...]) -> Bound:
        """An operation of the first rank, which leaves the others theirs."""
        (op, function, arguments), *others = ranks
        run: Callable[..., None]
        if op.kind == ALL_REDUCE:
            parts: Any = [own["x"] for _, _, own in ranks]
            outs: Any = [own["out"] for _, _, own in ranks]

            def run(**_: object) -> None:
                self.catch_up()
                all_reduce_parts(parts, outs)

        else:

            def run(**given: Any) -> None:
                # what the first rank has read of the host is forwarded: others take as many commands, whenever they do
                tail = {"command_tail": given["command_tail"].clone()} if op.kind == COMMANDS else {}
                function(**given)
                for owed, (_, each, own) in zip(self._owed, others, strict=True):
                    owed.append(partial(each, **{**own, **tail}))
                self.most_owed = max(self.most_owed, *map(len, self._owed))
                if self._random.random() < self.chance:
                    for owed in self._owed:
                        for _ in range(self._random.randint(0, len(owed))):
                            owed.popleft()()

        return op, run, arguments

    def prefill(self, size: int, first: Bucket | None = None, passes: int = 0) -> None:
        """The host waits for the first token of all."""
        super().prefill(size, first, passes)
        self.catch_up()

    def wait_for_ranks(self, count: int) -> None:
        """Run what others owe until each has published as many steps."""
        for owed, peer in zip(self._owed, self._peers, strict=True):
            while int(peer.state["ring_head"]) < count:
                owed.popleft()()

    def catch_up(self) -> None:
        """Run all that others owe."""
        for owed in self._owed:
            while owed:
                owed.popleft()()

    def close(self) -> None:
        """Drop what others owe, too."""
        for owed in self._owed:
            owed.clear()
        super().close()
