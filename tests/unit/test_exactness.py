"""`lowlat doctor --exactness`: a sound pair is exact in every sweep, and each sweep goes red by a planted defect."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import PairPaths, make_pair

from lowlat.engine.runtime import Runtime
from lowlat.kernels.reference.attention import attention
from lowlat.kernels.reference.speculation import accept
from lowlat.options.config import SpeculativeConfig
from lowlat.sequence.prefix_index import PrefixIndex
from lowlat.tools.exactness import Difference, Exactness, Sweep, measure_exactness

DEPTH = 2
OPTIONS = {"device": "cpu", "prefill_chunk": 32, "block_size": 16, "max_context": 128}
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


def test_a_sound_pair_is_exact(pair: PairPaths) -> None:
    told: list[Sweep] = []
    found = measure(pair, told.append)
    sweeps = {sweep.name: sweep for sweep in found.sweeps}
    assert told == found.sweeps and found.exact and found.verdict.startswith(f"exact: all {found.compared} answers")
    assert list(sweeps)[: DEPTH + 1] == [f"draft length {length}" for length in range(DEPTH + 1)]
    assert sweeps["draft length 0"].drafted == 0 < sweeps["draft length 2"].accepted < sweeps["draft length 2"].drafted
    assert sweeps["after a shared prefix"].requests == 16 and sweeps["after a shared prefix"].cached_tokens > 0
    assert sweeps["with chosen draft lengths"].skipped is None
    assert found.to_dict()["exact"] is True and found.to_dict()["sweeps"][1]["first"] is None


@pytest.mark.parametrize(
    ("plant", "red"),
    [
        (accepts_too_much, "draft length 1"),
        (mixes_slots, "with neighbours"),
        (takes_any_chunk, "after a shared prefix"),
    ],
)
def test_a_planted_defect_is_seen(
    plant: Callable[[pytest.MonkeyPatch], None], red: str, pair: PairPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    found = measure(pair)
    sweep = next(sweep for sweep in found.sweeps if sweep.different)
    assert sweep.name == red and not found.exact and "not exact" in found.verdict
    assert sweep.first is not None and sweep.first.expected != sweep.first.found


def test_a_difference_is_named_by_its_token() -> None:
    sweep = Sweep("draft length 1", requests=1, tokens=3, drafted=2, different=1, first=Difference("r", 2, 5, None))
    assert Exactness("cpu", "reference", "0" * 16, [sweep]).verdict == (
        "not exact: 1 of 1 answers differ from plain decoding; the first, r, at token 2"
    )
    assert "nothing can be said" in Exactness("cpu", "reference", "0" * 16, [Sweep("draft length 0")]).verdict
