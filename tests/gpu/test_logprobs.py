"""The logprobs kernel: ids exactly, values near float64, defaults, and a row's bits in any company."""

import pytest
import torch
from selection_cases import Memory

from lowlat.executors.launcher import Launcher
from lowlat.kernels.reference.sampling import logprobs as reference
from lowlat.kernels.reference.step.slot_record import MAX_LOGPROBS, NUM_INTS, NUM_LOGPROBS
from lowlat.kernels.sampling.logprobs.tokens import logprobs

WIDTH = MAX_LOGPROBS + 1
VOCABULARIES = (7, 97, 4096, 8203, 128256, 201088, 262208)


class Case:
    """Arguments on the CPU; run by the reference there or by the kernel on the GPU."""

    def __init__(self, logits: torch.Tensor, live: list[list[int]], slots: list[int], wanted: list[int]) -> None:
        self.logits, batch, rows = logits, len(live), len(live[0])
        self.live, self.slots = torch.tensor(live, dtype=torch.uint8), torch.tensor(slots, dtype=torch.int32)
        self.targets = torch.arange(batch * rows, dtype=torch.int32).reshape(batch, rows) % logits.shape[1]
        self.ints = torch.zeros(len(wanted), NUM_INTS, dtype=torch.int64)
        self.ints[:, NUM_LOGPROBS] = torch.tensor(wanted)
        self.values = torch.full((batch, rows, WIDTH), torch.nan)
        self.ids = torch.full((batch, rows, WIDTH), -77, dtype=torch.int32)

    @property
    def arguments(self) -> dict[str, torch.Tensor]:
        named = {"logits": self.logits, "row_live": self.live, "target_tokens": self.targets}
        return {**named, "slots": self.slots, "slot_ints": self.ints}

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = self.values.clone(), self.ids.clone()
        reference.logprobs(**self.arguments, logprob_values=values, logprob_ids=ids)
        return values, ids

    def kernel(self, launcher: Launcher) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids, memory = self.values.cuda(), self.ids.cuda(), Memory("cuda")
        arguments = {name: array.cuda() for name, array in self.arguments.items()}
        for _ in range(2):
            launcher.run(*logprobs(**arguments, logprob_values=values, logprob_ids=ids, workspace=memory))
        assert memory.at_rest()
        return values.cpu(), ids.cpu()


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_ids_and_values(launcher: Launcher, vocabulary: int) -> None:
    logits = torch.randn(8, vocabulary) * 4
    logits[1] = logits[1].round()
    logits[4, vocabulary - 1], logits[5, 0] = -torch.inf, torch.nan
    logits[6] = 0.0
    case = Case(logits, [[1, 1], [1, 0], [1, 1], [1, 1]], [2, 0, 3, 3], [0, -1, 20, 5])
    values, ids = case.kernel(launcher)
    expected_values, expected_ids = case.reference()
    assert torch.equal(ids, expected_ids)
    assert bool(values.isfinite().all())
    assert float((values - expected_values).norm() / expected_values.norm()) < 1e-5
    nothing = Case(logits, [[1, 1]] * 4, [1, -1, 1, 1], [0, -1, 20, 5])
    values, ids = nothing.kernel(launcher)
    assert bool((values == 0).all())
    assert bool((ids == -1).all())


@pytest.mark.parametrize("vocabulary", [97, 128256])
def test_a_row_has_the_same_bits_in_any_company(launcher: Launcher, vocabulary: int) -> None:
    row = torch.randn(vocabulary) * 5
    alone = Case(row[None].clone(), [[1]], [0], [20, -1, 3]).kernel(launcher)
    for batch, rows, place in ((1, 3, 0), (3, 2, 0), (2, 4, 0)):
        logits = torch.randn(batch * rows, vocabulary) * 20
        logits[place] = row
        case = Case(logits, [[1] * rows] * batch, [2, 1, 0][:batch], [3, -1, 20])
        values, ids = case.kernel(launcher)
        assert torch.equal(values.reshape(-1, WIDTH)[place], alone[0][0, 0])
        assert torch.equal(ids.reshape(-1, WIDTH)[place], alone[1][0, 0])
