"""The ranking kernel against the reference, exactly: ranks, ties, dead and broken rows, the tree's children."""

import pytest
import torch
from selection_cases import Memory, best_pairs

from lowlat.executors.launcher import Launcher
from lowlat.kernels.reference.speculation import draft_topk as reference
from lowlat.kernels.reference.speculation.draft_rows import assign_drafts
from lowlat.kernels.sampling.select import INFINITY
from lowlat.kernels.speculation.draft_topk import draft_topk

WIDTHS = (5, 97, 4096, 4100, 32000, 201088, 262208)


@pytest.mark.parametrize("k", [1, 2, 10, 64])
@pytest.mark.parametrize("width", WIDTHS)
def test_ranks_and_children(launcher: Launcher, width: int, k: int) -> None:
    k = min(k, width)
    batch, rows = 2, 3
    logits = torch.randn(batch * rows, width)
    logits[1] = logits[1].round() + 0.0
    logits[2] = torch.where(torch.rand(width) < 0.5, 0.0, -0.0)
    logits[3, width // 3] = torch.nan
    logits[4] = -torch.inf
    logits[4, width - 1] = torch.inf
    live = torch.tensor([1, 1, 1, 1, 1, 0], dtype=torch.uint8).reshape(batch, rows)
    names = torch.randperm(width).int()
    tree = (
        torch.tensor([1, 2, 4, 6], dtype=torch.int32),
        torch.tensor([0, 1, 1, 2], dtype=torch.int32),
        torch.tensor([0, k - 1, k // 2, 0], dtype=torch.int32),
    )
    expected, nodes = torch.full((6, k), -77, dtype=torch.int32), torch.full((batch, 8), -77, dtype=torch.int32)
    out, out_nodes = expected.cuda(), nodes.cuda()
    reference.draft_topk(logits, names, live, out=expected, k=k)
    assign_drafts(expected, *tree, draft_nodes=nodes)
    memory, pairs = Memory("cuda"), best_pairs(logits, INFINITY, 132).cuda() if k == 1 else None
    children, child_rows, child_ranks = (array.cuda() for array in tree)
    for best in (pairs, None):
        out.fill_(-77)
        calls = draft_topk(
            logits.cuda(),
            names.cuda(),
            live.cuda(),
            out=out,
            k=k,
            workspace=memory,
            best=best,
            children=children,
            child_rows=child_rows,
            child_ranks=child_ranks,
            draft_nodes=out_nodes,
        )
        launcher.run(*calls)
    assert torch.equal(out.cpu(), expected)
    assert torch.equal(out_nodes.cpu(), nodes)
    assert memory.at_rest()
    whole = torch.full((2, k), -77, dtype=torch.int32, device="cuda")
    first = None if pairs is None else pairs[:2]
    launcher.run(*draft_topk(logits[:2].cuda(), names.cuda(), out=whole, k=k, workspace=memory, best=first))
    assert torch.equal(whole.cpu(), expected[:2])
