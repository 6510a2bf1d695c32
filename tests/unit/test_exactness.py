"""`lowlat doctor --exactness` and `--fidelity`: a sound pair is exact, and each gate goes red by a planted defect."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stages import wide
from tiny_models import PairPaths, make_pair

from lowlat.cli.options import bundled
from lowlat.engine.runtime import Runtime
from lowlat.engine.sessions.book import SessionBook
from lowlat.kernels.reference.attention import attention
from lowlat.kernels.reference.speculation import accept, draft_lengths
from lowlat.options.speculative import SpeculativeConfig
from lowlat.sequence.kvcache import KVCache
from lowlat.sequence.prefix_index import PrefixIndex
from lowlat.text.grammar.drafted import DraftedPaths
from lowlat.tools.exactness import Difference, Exactness, Sweep, measure_exactness, requests
from lowlat.tools.exactness.requests import prefixes

DEPTH = 2
OPTIONS: dict[str, Any] = {"device": "cpu", "prefill_chunk": 32, "block_size": 16, "max_context": 128}
PROMPTS = [list(range(5, 21)), [3, 9, 4]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    return make_pair(tmp_path_factory.mktemp("pair"), "llama")


def load(target: Path, speculative: SpeculativeConfig | None, _: int | None, **options: Any) -> Runtime:
    return Runtime.load(target, speculative, **options)


def measure(pair: PairPaths, report: Callable[[Sweep], None] | None = None) -> Exactness:
    speculative = SpeculativeConfig(model=pair.head, num_speculative_tokens=DEPTH)
    return measure_exactness(pair.target, speculative, PROMPTS, max_tokens=8, load=load, report=report, **OPTIONS)


def accepts_too_much(patch: pytest.MonkeyPatch) -> None:
    """The token after accepted drafts is another than the target's."""
    take = accept._take

    def wrong(index: int, nodes: list[int], tokens: list[int], *buffers: Any) -> None:
        take(index, nodes, [*tokens[:-1], tokens[-2]] if len(tokens) > 1 else tokens, *buffers)

    patch.setattr(accept, "_take", wrong)


def mixes_slots(patch: pytest.MonkeyPatch) -> None:
    """Every slot reads the first one's keys and values."""
    attend = attention.attend_rows

    def wrong(step: Any, read: Callable[[int, int], Any], **options: Any) -> None:
        attend(step, lambda _, count: read(0, count), **options)

    patch.setattr(attention, "attend_rows", wrong)


def takes_any_chunk(patch: pytest.MonkeyPatch) -> None:
    """A chunk is found by its place in a prompt, whatever it holds."""
    digest = PrefixIndex.digest
    patch.setattr(PrefixIndex, "digest", lambda self, parent, _: digest(self, parent, ()))


def clears(runtime: Runtime) -> None:
    """All keys and values are lost, and others stand in their place."""
    for name, buffer in runtime.executor.state.items():
        if name.startswith(("k_cache", "v_cache")):
            buffer.normal_(std=2.0, generator=torch.Generator().manual_seed(1))


def clears_with_cancelled(patch: pytest.MonkeyPatch) -> None:
    """What a cancelled request leaves is cleared, and its neighbours' with it."""
    cancel = Runtime.cancel

    def wrong(runtime: Runtime, name: str) -> None:
        cancel(runtime, name)
        clears(runtime)

    patch.setattr(Runtime, "cancel", wrong)


def forgets_paused(patch: pytest.MonkeyPatch) -> None:
    """A request that was paused comes back without its keys and values."""
    resume = Runtime.resume

    def wrong(runtime: Runtime, name: str) -> None:
        clears(runtime)
        resume(runtime, name)

    patch.setattr(Runtime, "resume", wrong)


def forks_nothing(patch: pytest.MonkeyPatch) -> None:
    """A fork is the session itself, and hears what that says."""
    patch.setattr(SessionBook, "fork", lambda self, record, name: record)


def loses_files(patch: pytest.MonkeyPatch) -> None:
    """The state in a session's file is another's."""
    adopt = KVCache.adopt

    def wrong(self: KVCache, token_ids: Any, salt: str, contents: Any) -> None:
        adopt(self, token_ids, salt, {key: content.roll(64) for key, content in contents.items()})

    patch.setattr(KVCache, "adopt", wrong)


def trusts_chosen_lengths(patch: pytest.MonkeyPatch) -> None:
    """Where the draft length is chosen, the token after accepted drafts is another than the target's."""
    limits = draft_lengths.slot_limits

    def seen(*given: Any) -> Any:
        accepts_too_much(patch)
        patch.setattr(draft_lengths, "slot_limits", limits)
        return limits(*given)

    patch.setattr(draft_lengths, "slot_limits", seen)


class Seen(Exception):
    """A sweep that differs: those after it need not run."""

    def __init__(self, sweep: Sweep) -> None:
        super().__init__(sweep.name)
        self.sweep = sweep

    @classmethod
    def tell(cls, sweep: Sweep) -> None:
        """Raise where a sweep differs."""
        if sweep.different:
            raise cls(sweep)


@pytest.mark.wide
def test_a_sound_pair_is_exact(pair: PairPaths) -> None:
    told: list[Sweep] = []
    found = measure(pair, told.append)
    sweeps = {sweep.name: sweep for sweep in found.sweeps}
    assert told == found.sweeps and found.exact and found.verdict.startswith(f"exact: all {found.compared} answers")
    assert list(sweeps) == [
        *(f"draft length {length}" for length in range(DEPTH + 1)),
        *("with neighbours", "with neighbours that are cancelled", "paused between steps", "after a shared prefix"),
        *("in sessions that fork", "in sessions from files", "with chosen draft lengths"),
    ]
    assert sweeps["draft length 0"].drafted == 0 < sweeps["draft length 2"].accepted < sweeps["draft length 2"].drafted
    assert not any(sweep.skipped for sweep in found.sweeps)
    assert sweeps["with neighbours that are cancelled"].requests == 4
    for name, count in (("after a shared prefix", 16), ("in sessions that fork", 6), ("in sessions from files", 2)):
        assert sweeps[name].requests == count and sweeps[name].cached_tokens > 0 < sweeps[name].drafted
    assert found.to_dict()["exact"] is True and found.to_dict()["sweeps"][1]["first"] is None


def test_prefixes_have_every_length_modulo_a_block(pair: PairPaths) -> None:
    with Runtime.load(pair.target, **OPTIONS) as runtime:
        lengths = [len(request.prompt) for request in prefixes(runtime, range(5, 90))]
    assert {length % 16 for length in lengths} == set(range(16)) and min(lengths) > 64


@pytest.mark.second
@pytest.mark.parametrize(
    ("plant", "red"),
    [
        (accepts_too_much, "draft length 1"),
        wide(mixes_slots, "with neighbours"),
        wide(clears_with_cancelled, "with neighbours that are cancelled"),
        wide(forgets_paused, "paused between steps"),
        wide(takes_any_chunk, "after a shared prefix"),
        wide(forks_nothing, "in sessions that fork"),
        wide(loses_files, "in sessions from files"),
        wide(trusts_chosen_lengths, "with chosen draft lengths"),
    ],
)
def test_a_planted_defect_is_seen(
    plant: Callable[[pytest.MonkeyPatch], None], red: str, pair: PairPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "SETTINGS", {"sampled": requests.SETTINGS["sampled"]})
    plant(monkeypatch)
    with pytest.raises(Seen) as seen:
        measure(pair, Seen.tell)
    sweep = seen.value.sweep
    assert sweep.name == red and "not exact" in Exactness("cpu", "reference", "0" * 16, [sweep]).verdict
    assert sweep.first is not None and sweep.first.expected != sweep.first.found


@pytest.mark.second
def test_masks_that_forbid_too_much_after_drafts_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "SETTINGS", {})
    speculative = SpeculativeConfig(model=bundled("head"), num_speculative_tokens=1)

    def measured() -> Exactness:
        options: dict[str, Any] = {"device": "cpu", "max_context": 128}
        return measure_exactness(bundled("target"), speculative, ["The"], max_tokens=6, load=load, **options)

    mask = DraftedPaths.mask

    def wrong(self: DraftedPaths, row: np.ndarray[Any, Any]) -> None:
        mask(self, row)
        if len(self._path) > self._num_committed:
            row &= 0x55555555  # every other token, of those that are allowed after a draft

    monkeypatch.setattr(DraftedPaths, "mask", wrong)
    found = measured()
    assert not found.exact and found.sweeps[0].different == 0 < found.sweeps[1].different


def test_a_difference_is_named_by_its_token() -> None:
    sweep = Sweep("draft length 1", requests=1, tokens=3, drafted=2, different=1, first=Difference("r", 2, 5, None))
    assert Exactness("cpu", "reference", "0" * 16, [sweep]).verdict == (
        "not exact: 1 of 1 answers differ from plain decoding; the first, r, at token 2"
    )
    assert "nothing can be said" in Exactness("cpu", "reference", "0" * 16, [Sweep("draft length 0")]).verdict
