"""Suffix drafts on a GPU, and the choice between them and a model's."""

import pytest
import torch
from kernel_cases import Bench
from suffix_cases import Options, check_choose_drafts, check_suffix_draft

from lowlat.executors.launcher import Launcher
from lowlat.kernels.speculation.choose_drafts import choose_drafts

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("options", [Options(), Options(3, 0.5, 0.4), Options(32, 16.0, 0.0)])
@pytest.mark.parametrize("context", [1001, 16385, 131072])
def test_against_the_reference(context: int, options: Options) -> None:
    device = torch.device("cuda", 0)
    bench = Bench(device, Launcher(device).run)
    for seed in range(4 if context > 100000 else 20):
        lengths = [1, 2, 3, 100 + seed, context - seed, context]
        check_suffix_draft(bench, seed, context=context, lengths=lengths, options=options)


@pytest.mark.parametrize("rows", [2, 5, 8])
def test_the_choice_against_the_reference(rows: int) -> None:
    device = torch.device("cuda", 0)
    bench = Bench(device, Launcher(device).run)
    check_choose_drafts(bench, rows, lambda given, fresh: choose_drafts(**given, fresh=fresh))
