"""Logprobs against a plain softmax in float64: which rows, which ids, what is left unused."""

import pytest
import torch
from kernel_cases import meant

from lowlat.kernels.reference.step.slot_record import MAX_LOGPROBS, NUM_INTS, NUM_LOGPROBS

WIDTH = MAX_LOGPROBS + 1


def run(
    logits: torch.Tensor, live: list[int], targets: list[list[int]], slots: list[int], wanted: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    ints = torch.zeros(len(wanted), NUM_INTS, dtype=torch.int64)
    ints[:, NUM_LOGPROBS] = torch.tensor(wanted)
    given = {"row_live": torch.tensor(live, dtype=torch.uint8), "target_tokens": torch.tensor(targets).int()}
    given |= {"slots": torch.tensor(slots).int(), "slot_ints": ints}
    found = meant("logprobs", {"logits": logits, **{name: array.to(logits.device) for name, array in given.items()}})
    return found["logprob_values"].cpu(), found["logprob_ids"].cpu()


@pytest.mark.parametrize("vocabulary", [7, 64, 1003])
def test_values_ids_and_unused_columns(vocabulary: int, device: str) -> None:
    logits = (torch.randint(-4, 5, (6, vocabulary)) * 0.5).to(device)
    live = [1, 1, 0, 1, 1, 1]
    targets = [[3, 0], [-1, 5], [2, 6]]
    values, ids = run(logits, live, targets, [2, 0, -1], [20, -1, 0])
    for index, wanted in ((0, 0), (1, 20)):
        count = min(wanted, vocabulary)
        for node in range(2):
            row = logits[index * 2 + node].double().cpu()
            if not live[index * 2 + node]:
                assert bool((ids[index, node] == -1).all())
                assert bool((values[index, node] == 0).all())
                continue
            order = sorted(range(vocabulary), key=lambda token: (-float(row[token]), token))[:count]
            assert ids[index, node].tolist() == [targets[index][node], *order, *[-1] * (20 - count)]
            expected = torch.log_softmax(row, 0)[ids[index, node, : count + 1].long()]
            torch.testing.assert_close(values[index, node, : count + 1].double(), expected, rtol=1e-5, atol=1e-5)
            assert bool((values[index, node, count + 1 :] == 0).all())
    assert bool((ids[2] == -1).all())


@pytest.mark.parametrize("vocabulary", [13, 64, 1003])
def test_a_row_has_the_same_bits_in_any_company(vocabulary: int, device: str) -> None:
    row = torch.randn(vocabulary, device=device) * 5
    values, ids = run(row[None].clone(), [1], [[4]], [0], [5])
    for batch, rows in ((1, 3), (4, 2), (3, 5)):
        for place in range(batch * rows):
            logits = torch.randn(batch * rows, vocabulary, device=device) * 20
            live = torch.randint(0, 2, (batch * rows,)).tolist()
            logits[place], live[place] = row, 1
            targets = [[4] * rows for _ in range(batch)]
            got = run(logits, live, targets, list(range(batch)), [5] * batch)
            assert torch.equal(got[0].reshape(-1, WIDTH)[place], values[0, 0])
            assert torch.equal(got[1].reshape(-1, WIDTH)[place], ids[0, 0])


def test_extreme_and_broken_rows() -> None:
    logits = torch.zeros(4, 9)
    logits[0, 3], logits[1, 2], logits[2, 0], logits[3, 1] = 1e30, -1e30, float("nan"), float("-inf")
    values, ids = run(logits, [1, 1, 1, 1], [[3, 0, 0, 0]], [0], [2])
    assert values[0, 0, :3].tolist() == [0.0, 0.0, float(torch.log_softmax(logits[0], 0)[0])]
    assert ids[0, 0, :3].tolist() == [3, 3, 0]
    assert ids[0, 1, :3].tolist() == [0, 0, 1]
    assert bool((ids[0, 2:] == -1).all())
