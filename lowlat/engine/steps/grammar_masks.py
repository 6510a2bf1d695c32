"""This module fills the masks of the rows that a step verifies, for requests that have grammars.

The device tells the rows when a step begins, the host fills their masks while the target runs, and the draw of each
slot waits for its own. A step may be launched before the host has read the one ahead of it. If it verifies drafts, it
then waits until the host has read that one's tokens and said what the grammar forces after them. A slot's masks and
rows are safe to overwrite: the next step writes rows after all draws of this one, which needed masks and so had their
rows read; and the host writes the next masks after it has read this step's tokens, which come after its draws. No loop
on the device runs while a grammar is active.

Several GPUs read the same pinned memory, each at its own pace, and must read the same. So the host writes the next
step's masks, forced tokens and the words that announce them only when every rank has published all steps that the host
has seen (`Executor.wait_for_ranks`): a rank publishes after its draws, so no rank still reads for those steps, and none
reads for the next before the words say so. For a slot that is given up only its words are raised, wherever ranks are in
a step: masks and tokens stay, so that all ranks read the same.

"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lowlat.engine.mailbox.mailbox import Mailbox
from lowlat.engine.mailbox.publications import SlotPublication
from lowlat.engine.requests.request import Request
from lowlat.errors import LowlatError
from lowlat.executors import Executor
from lowlat.kernels.reference.step.slots import MAX_FORCED
from lowlat.text.grammar.state import GrammarState

__all__ = ["GrammarMasks", "GrammarStats"]

MASK_BITS = (1 << 64) - 1
Failures = list[tuple[Request, str]]


@dataclass
class GrammarStats:
    """Figures of the requests that have a grammar, since the load.

    num_requests         requests that began to decode
    num_mask_steps       steps of slots whose masks were filled, first tokens among them
    num_mask_rows        masks filled
    mask_s, max_mask_s   seconds of filling masks, in all and at most for one slot's step
    rows_wait_s          seconds in which the host waited for a launched step to tell its rows
    num_forced_drafts    tokens handed over to be verified because nothing else may follow
    num_forced_accepted  of those, tokens committed; some are dropped by limits of a step or of the request
    num_draft_tokens     draft tokens verified under a grammar, forced ones among them
    num_accepted_tokens  of those, accepted
    """

    num_requests: int = 0
    num_mask_steps: int = 0
    num_mask_rows: int = 0
    mask_s: float = 0.0
    max_mask_s: float = 0.0
    rows_wait_s: float = 0.0
    num_forced_drafts: int = 0
    num_forced_accepted: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def filled(self, num_rows: int, seconds: float) -> None:
        """Add one slot's masks of a step."""
        self.num_mask_steps += 1
        self.num_mask_rows += num_rows
        self.mask_s += seconds
        self.max_mask_s = max(self.max_mask_s, seconds)


class GrammarMasks:
    """The requests with a grammar that decode, by slot. It is true where there are any. `stats` are its figures."""

    def __init__(self, mailbox: Mailbox, executor: Executor, vocab_size: int) -> None:
        self._mailbox, self._executor, self._vocab_size = mailbox, executor, vocab_size
        self._words = mailbox.grammars
        self._grammars: dict[int, tuple[Request, GrammarState]] = {}
        self._complaints: dict[int, str] = {}  # of grammars about committed tokens
        self._forced: dict[int, Sequence[int]] = {}  # as the mailbox has them
        self.stats = GrammarStats()
        self._most_forced = min(mailbox.max_draft_tokens, MAX_FORCED)

    def __bool__(self) -> bool:
        return bool(self._grammars)

    def report(self) -> dict[str, Any]:
        """Its figures as JSON, the block `structured_output`: absent before there was any request with a grammar."""
        return {"structured_output": asdict(self.stats)} if self.stats.num_requests else {}

    def join(self, request: Request) -> str | None:
        """Fill the mask of a first token, where the request has a grammar; returns why it cannot be filled, if so."""
        if request.grammar is None:
            return None
        self._executor.wait_for_ranks(self._mailbox.num_seen)
        self._grammars[request.slot] = request, request.grammar
        self.stats.num_requests += 1
        self._force(request.slot, (), len(request.prompt))
        return self._fill(request.slot, (request.prompt[-1],), (-1,))

    def enter(self, request: Request) -> None:
        """A request that has begun goes on in the slot that it has now, with what its grammar forces, if it has one.

        Raises RequestError where the grammar fails.
        """
        if (grammar := request.grammar) is not None:
            self._grammars[request.slot] = request, grammar
            self._words.want_masks(request.slot)
            forced = grammar.forced(self._most_forced) if self._most_forced else ()
            self._force(request.slot, forced, len(request.committed))

    def leave(self, slot: int) -> None:
        """A request has left its slot: steps under way wait for its grammar no more."""
        if self._grammars.pop(slot, None) is not None:
            self._complaints.pop(slot, None)
            self._words.release(slot)

    def release(self) -> None:
        """Let no step wait any more: the runtime is closed."""
        for slot in list(self._grammars):
            self.leave(slot)

    def advance(self, publications: Iterable[SlotPublication]) -> None:
        """Advance grammars by the tokens of requests that go on, and let their next steps begin, with forced tokens.

        Raises DeviceError when a device has failed.
        """
        self._executor.wait_for_ranks(self._mailbox.num_seen)
        for publication in publications:
            slot = publication.slot
            if slot not in self._grammars:
                continue
            verified = self._forced.get(slot, ())
            if publication.finish_reason is None:
                forced: Sequence[int] = ()
                try:
                    grammar = self._grammars[slot][1]
                    grammar.advance(publication.token_ids)
                    forced = grammar.forced(self._most_forced) if self._most_forced else ()
                except LowlatError as error:
                    self._complaints[slot] = str(error)
                self._force(slot, forced, publication.length)
            self._count(publication, verified)

    def _count(self, publication: SlotPublication, forced: Sequence[int]) -> None:
        agreed = [mine == token for mine, token in zip(publication.token_ids, forced, strict=False)]
        verified = min(len(forced), publication.verified)
        self.stats.num_forced_accepted += min(sum(agreed), verified)
        self.stats.num_draft_tokens += publication.verified
        self.stats.num_accepted_tokens += publication.accepted

    def _force(self, slot: int, tokens: Sequence[int], length: int) -> None:
        self._words.force_drafts(slot, tokens, length)
        self.stats.num_forced_drafts += len(tokens)
        self._forced[slot] = tokens

    def with_grammar_end(self, publication: SlotPublication) -> tuple[SlotPublication, str | None]:
        """A publication with the end that its grammar gives it, and the grammar's error, if there is one.

        Where no token may follow a complete grammar, the request ends by a stop, not by an error.
        """
        slot = publication.slot
        if slot in self._complaints:
            return publication._replace(finish_reason="error"), self._complaints[slot]
        if slot not in self._grammars or publication.finish_reason != "error":
            return publication, None
        request, grammar = self._grammars[slot]
        try:
            grammar.advance(publication.token_ids)
            if grammar.terminated:
                return publication._replace(finish_reason="stop"), None
            return publication, self._dead_end(request, grammar, publication)
        except LowlatError as error:
            return publication, str(error)

    def _dead_end(self, request: Request, grammar: GrammarState, publication: SlotPublication) -> str | None:
        """Why no token could be drawn; None where some could: then it was the logits."""
        mask = np.zeros((1, -(-self._vocab_size // 32)), dtype=np.int32)
        grammar.fill((request.committed[-1],), (-1,), mask)
        may_follow = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self._vocab_size]
        position, num_tokens = publication.length, publication.length - len(request.prompt)
        if not may_follow.any():
            return f"the grammar allows no token at position {position}"
        may_follow[list(request.stop_ids)] = 0
        if num_tokens < request.params.min_tokens and not may_follow.any():
            return (
                f"the grammar allows nothing but the end at position {position}, after {num_tokens} tokens, and "
                f"min_tokens {request.params.min_tokens} forbids it"
            )
        return None

    def fill(self, num_rows: int) -> Failures:
        """Fill what the step that runs still lacks, of so many rows a slot; returns requests whose masks cannot be.

        It waits for the device to tell the rows. Raises DeviceError when the device has failed.
        """
        failures: Failures = []
        for slot, (request, _) in self._grammars.items():
            length = len(request.committed)
            if self._words.masks_wanted(slot, length):
                tokens, parents = self._rows(slot, request, num_rows)
                problem = self._fill(slot, tokens, parents)
                if problem is not None:
                    failures.append((request, problem))
        return failures

    def _rows(self, slot: int, request: Request, num_rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens of a slot's rows, -1 where dead, and the row above each."""
        if num_rows == 1:
            return (request.committed[-1],), (-1,)
        length = len(request.committed)
        start = time.perf_counter()
        self._executor.wait_until(lambda: self._words.rows_told(slot, length) or self._mailbox.has_unseen)
        self.stats.rows_wait_s += time.perf_counter() - start
        if not self._words.rows_told(slot, length):  # the step has dropped the slot: its next one verifies no draft
            return (request.committed[-1],), (-1,)
        tokens, paths = self._words.rows(slot, num_rows)
        above = ((path & MASK_BITS & ~(1 << row)).bit_length() - 1 for row, path in enumerate(paths))
        return tuple(tokens), tuple(above)

    def _fill(self, slot: int, tokens: tuple[int, ...], parents: tuple[int, ...]) -> str | None:
        """Fill the masks of a slot's rows and let its draw go on; returns why that cannot be, if so."""
        request, grammar = self._grammars[slot]
        masks = self._words.masks(slot)
        live = [row for row, token in enumerate(tokens) if token >= 0]
        problem, start = None, time.perf_counter()
        try:
            if live[-1] == len(live) - 1:
                grammar.fill(tokens[: len(live)], parents[: len(live)], masks[: len(live)])
            else:  # a tree whose deepest rows would pass the request's end
                place = {row: index for index, row in enumerate(live)} | {-1: -1}
                filled = np.zeros((len(live), masks.shape[1]), dtype=masks.dtype)
                grammar.fill([tokens[row] for row in live], [place[parents[row]] for row in live], filled)
                masks[live] = filled
        except LowlatError as error:
            problem = str(error)
        self.stats.filled(len(live), time.perf_counter() - start)
        self._words.send_masks(slot, len(request.committed))
        return problem
