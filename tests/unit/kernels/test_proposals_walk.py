"""What opens a wide step, and drafts from named texts: the references against plain words, the kernels walked."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kernel_cases import Bench
from kernel_walk import Walker, walkable
from proposal_cases import SIZES, check_opening, check_texts, expected, text_arguments
from suffix_cases import Options, check_suffix_draft

from lowlat.errors import ShapeError
from lowlat.kernels.reference.speculation.proposals import draft_from_texts
from lowlat.kernels.reference.speculation.suffix_draft import SHARE
from lowlat.kernels.toolchain.kernel import KernelCall

CPU = torch.device("cpu")


def test_named_texts_against_plain_words() -> None:
    source, drafting = random.Random(1), 0
    for _ in range(120):
        lengths = [source.randint(1, 40) for _ in range(3)]
        given: dict[str, Any] = text_arguments(source, 9, 48, 40, lengths)
        before = {name: value.clone() for name, value in given.items()}
        draft_from_texts(**given, **SIZES)
        for index in range(5):
            slot, live = int(before["slots"][index]), bool(before["draft_live"][index])
            own = int(before["match_lens"][index])
            text = before["tokens"][slot, : int(before["draft_lens"][index])].tolist()
            named = before["draft_texts"][slot, : int(before["draft_text_lens"][slot])].tolist()
            match, drafts = expected(text, named, own, 8, SIZES) if slot >= 0 and live else (own, [])
            assert int(given["match_lens"][index]) == match
            if not drafts:
                assert torch.equal(given["draft_nodes"][index], before["draft_nodes"][index])
                continue
            pads = [-1] * (8 - len(drafts))
            assert given["draft_nodes"][index].tolist() == [-1, *drafts, *pads]
            assert given["draft_shares"][index].tolist() == [0, *[SHARE] * len(drafts), *[0] * len(pads)]
            drafting += 1
    assert drafting > 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_texts": torch.zeros(3, 8, dtype=torch.int32)}, "where Bmax = 5"),
        ({"draft_texts": torch.zeros(5, 1, dtype=torch.int32)}, "draft_texts must have rows of 2 to"),
        ({"max_depth": 33}, "max_depth must be from 1 to 32, got 33"),
        (
            {name: torch.zeros(5, 33, dtype=torch.int32) for name in ("draft_nodes", "draft_shares")},
            "up to 31 drafts, got 32",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    given = text_arguments(random.Random(1), 9, 48, 40, [3, 4, 5])
    with pytest.raises(ShapeError, match=message):
        draft_from_texts(**{**given, **SIZES, **changes})


def test_kernels_walked_by_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    drafting = 0
    for seed, (size, lengths) in enumerate(((700, [1, 2, 30]), (513, [64, 65]), (40, [40] * 3), (9, [5]))):
        walker = Walker()
        with walkable(walker, "common.memory", "speculation.suffix_draft", "speculation.proposals") as modules:
            for module in modules[-2:]:
                monkeypatch.setattr(module, "THREADS", 64)

            def run(*calls: KernelCall, walker: Walker = walker) -> None:
                for call in calls:
                    walker.run(call)

            def opening(*given: Any, module: Any = modules[-1], **options: Any) -> Sequence[KernelCall]:
                found: Sequence[KernelCall] = module.open_proposals(*given, **options)
                return found

            def search(*given: Any, module: Any = modules[-1], **options: Any) -> Sequence[KernelCall]:
                found: Sequence[KernelCall] = module.draft_from_texts(*given, **options)
                return found

            def suffix(*given: Any, module: Any = modules[-2], **options: Any) -> Sequence[KernelCall]:
                found: Sequence[KernelCall] = module.suffix_draft(*given, **options)
                return found

            bench = Bench(CPU, run)
            drafting += check_texts(bench, seed + 1, context=70, size=size, lengths=lengths, calls=search)
            if not seed:
                check_opening(bench, opening)
            options = Options(32, 4.0, 0.1)
            check_suffix_draft(
                bench, seed, context=71, lengths=[40, 70], options=options, calls=suffix, rows=16 << seed % 2
            )
    assert drafting > 3
