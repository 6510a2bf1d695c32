"""This module fills the masks of the rows that a step verifies, for requests that have grammars.

When a step begins, the device writes its rows to host memory. The host fills their masks while the target runs, and
each slot's draw waits for its masks. A step may be launched before the host has read the previous one. If it verifies
drafts, it then waits until the host has read the previous step's tokens and written the tokens that the grammar forces
next. Masks and rows can be overwritten safely. The next step writes rows after all draws of this one, and a draw waits
for masks, for which the host has read the rows. The host writes the next masks after it has read this step's tokens,
which come after its draws. No loop on the device runs while a grammar is active.

Several GPUs read the same pinned memory, each at its own pace, and must read the same values. So the host writes the
next step's masks, forced tokens and the words that announce them only when every rank has published all steps that the
host has seen (`Executor.wait_for_ranks`). A rank publishes after its draws, so no rank still reads for those steps, and
none reads for the next one before the words allow it. When a request leaves a slot early, the host raises only the
slot's words, wherever the ranks are in a step. Masks and tokens do not change, so all ranks read the same.
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
    num_mask_steps       slots' steps whose masks were filled, first tokens included
    num_mask_rows        filled masks
    mask_s, max_mask_s   seconds spent filling masks: the sum, and the largest of one slot's step
    rows_wait_s          seconds that the host waited for launched steps to write their rows
    num_forced_drafts    forced tokens that were sent to be verified
    num_forced_accepted  of those, tokens committed; limits of a step or of the request drop some
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
    """Keeps the decoding requests that have a grammar, by slot; true if there are any. `stats` has the figures."""

    def __init__(self, mailbox: Mailbox, executor: Executor, vocab_size: int) -> None:
        self._mailbox, self._executor, self._vocab_size = mailbox, executor, vocab_size
        self._words = mailbox.grammars
        self._grammars: dict[int, tuple[Request, GrammarState]] = {}
        self._complaints: dict[int, str] = {}  # by slot: the grammar's error about committed tokens
        self._forced: dict[int, Sequence[int]] = {}  # by slot: the forced tokens last sent
        self.stats = GrammarStats()
        self._most_forced = min(mailbox.max_draft_tokens, MAX_FORCED)

    def __bool__(self) -> bool:
        return bool(self._grammars)

    def report(self) -> dict[str, Any]:
        """A block `structured_output` of figures, as JSON; {} before the first request with a grammar."""
        return {"structured_output": asdict(self.stats)} if self.stats.num_requests else {}

    def join(self, request: Request) -> str | None:
        """Fill the first token's mask if the request has a grammar; returns the problem if it cannot be filled."""
        if request.grammar is None:
            return None
        self._executor.wait_for_ranks(self._mailbox.num_seen)
        self._grammars[request.slot] = request, request.grammar
        self.stats.num_requests += 1
        self._force(request.slot, (), len(request.prompt))
        return self._fill(request.slot, (request.prompt[-1],), (-1,))

    def enter(self, request: Request) -> None:
        """Let a request that has begun go on in its new slot; if it has a grammar, send its forced tokens.

        Raises RequestError if the grammar fails.
        """
        if (grammar := request.grammar) is not None:
            self._grammars[request.slot] = request, grammar
            self._words.want_masks(request.slot)
            forced = grammar.forced(self._most_forced) if self._most_forced else ()
            self._force(request.slot, forced, len(request.committed))

    def leave(self, slot: int) -> None:
        """Remove a request that has left its slot; launched steps stop waiting for its grammar."""
        if self._grammars.pop(slot, None) is not None:
            self._complaints.pop(slot, None)
            self._words.release(slot)

    def release(self) -> None:
        """Stop all steps from waiting, since the runtime is closed."""
        for slot in list(self._grammars):
            self.leave(slot)

    def advance(self, publications: Iterable[SlotPublication]) -> None:
        """Advance the grammars of requests that go on by their tokens, send forced tokens, and let next steps begin.

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
        """Set the finish reason that a grammar causes; returns the publication, and the grammar's error or None.

        If no token may follow because the grammar is complete, the request ends by a stop, not by an error.
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
        """Say why the grammar left no token to draw; None if it left some, so the logits were at fault."""
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
        """Fill the masks that the running step still lacks; returns the requests whose masks cannot be filled.

        num_rows  the step's rows a slot
        It waits for the device to write the rows. Raises DeviceError when the device has failed.
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
        """The tokens of a slot's rows, -1 for dead ones, and the parent of each row, -1 for the root."""
        if num_rows == 1:
            return (request.committed[-1],), (-1,)
        length = len(request.committed)
        start = time.perf_counter()
        self._executor.wait_until(lambda: self._words.rows_told(slot, length) or self._mailbox.has_unseen)
        self.stats.rows_wait_s += time.perf_counter() - start
        if not self._words.rows_told(slot, length):  # the step has dropped the slot, whose next step has no drafts
            return (request.committed[-1],), (-1,)
        tokens, paths = self._words.rows(slot, num_rows)
        above = ((path & MASK_BITS & ~(1 << row)).bit_length() - 1 for row, path in enumerate(paths))
        return tuple(tokens), tuple(above)

    def _fill(self, slot: int, tokens: tuple[int, ...], parents: tuple[int, ...]) -> str | None:
        """Fill the masks of a slot's rows, and let its draw go on; returns the problem if they cannot be filled."""
        request, grammar = self._grammars[slot]
        masks = self._words.masks(slot)
        live = [row for row, token in enumerate(tokens) if token >= 0]
        problem, start = None, time.perf_counter()
        try:
            if live[-1] == len(live) - 1:
                grammar.fill(tokens[: len(live)], parents[: len(live)], masks[: len(live)])
            else:  # a tree with dead rows between live ones: the dead ones lie beyond the request's end
                place = {row: index for index, row in enumerate(live)} | {-1: -1}
                filled = np.zeros((len(live), masks.shape[1]), dtype=masks.dtype)
                grammar.fill([tokens[row] for row in live], [place[parents[row]] for row in live], filled)
                masks[live] = filled
        except LowlatError as error:
            problem = str(error)
        self.stats.filled(len(live), time.perf_counter() - start)
        self._words.send_masks(slot, len(request.committed))
        return problem
