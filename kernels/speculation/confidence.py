"""How drafts of each kind of confidence fared, counted: `learn_confidence` of the reference.

One block: a thread counts the drafts so far behind one of a kind, through all entries in order; so no two write the
same number. It knows no request and no model.
"""

from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.memory import divide, int_at, set_int
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.reference.speculation.depths import EXPECTED, NUM_SURE, RIGHT, TRIED, check_sure
from lowlat.kernels.reference.speculation.draft_confidence import NUM_KINDS
from lowlat.kernels.reference.speculation.width_odds import ALL_DECAY, MAX_WIDTH, ONE
from lowlat.kernels.reference.step.slots import FORCED_DRAFTS
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int32, int64, types

__all__ = ["examples", "learn_confidence"]

THREADS = 128
MAX_SLOTS = 8
SLOT, SEEN, WERE_RIGHT, FATES = 0, 1, 2, 3  # columns of what became of an entry's drafts
FIRST_KIND, FIRST_END = 32, 96  # the first threads of those that load kinds and ends


@dataclass(frozen=True)
class _Plan:
    """The extents that counting is specialised by; `ends` are the columns of kinds."""

    batch: int
    most: int
    ends: int


def learn_confidence(
    slots: torch.Tensor,
    accepted_lens: torch.Tensor,
    num_verified: torch.Tensor,
    verified_source: torch.Tensor,
    draft_kinds: torch.Tensor,
    draft_ends: torch.Tensor,
    draft_rates: torch.Tensor,
    *,
    sure_odds: torch.Tensor,
) -> list[KernelCall]:
    """Count, as the reference's `learn_confidence`, whose arguments these are.

    Time: two trips to memory, and a count for each end of each entry. Raises ShapeError.
    """
    check_sure(draft_rates, sure_odds)
    batch, ends = draft_kinds.shape
    by_entry = {"slots": slots, "accepted_lens": accepted_lens, "num_verified": num_verified}
    for name, tensor in (*by_entry.items(), ("verified_source", verified_source)):
        check_shape(name, tensor, batch)
    check_shape("draft_ends", draft_ends, ends)
    if batch > MAX_SLOTS or ends > MAX_WIDTH:
        raise ShapeError(
            f"drafts are counted of at most {MAX_SLOTS} slots and {MAX_WIDTH} ends, got {batch} and {ends}"
        )
    reads = (slots, accepted_lens, num_verified, verified_source, draft_kinds, draft_ends, draft_rates)
    return [KernelCall(_make(_Plan(batch, sure_odds.shape[1], ends)), (1, 1, 1), (*reads, sure_odds))]


@device_function
def _load_fate(index: Any, addresses: Any, fates: Any) -> None:
    """Load what became of an entry's drafts: how many tell something, and how many were right."""
    slots, accepted_lens, num_verified, verified_source = addresses
    slot, accepted = int_at(slots, index), int_at(accepted_lens, index)
    tried, source = int_at(num_verified, index), int_at(verified_source, index)
    seen = min(tried, accepted)
    if slot < 0 or accepted <= 0 or source == FORCED_DRAFTS:
        seen = int64(0)
    fates[index * FATES + SLOT] = int32(slot)
    fates[index * FATES + SEEN] = int32(seen)
    fates[index * FATES + WERE_RIGHT] = int32(accepted - 1)


@device_function
def _count(kind: Any, behind: Any, plan: Any, shared: Any, draft_rates: Any, sure_odds: Any) -> None:
    """Count the drafts so far behind one of a kind."""
    batch, most, ends = plan
    fates, kinds, places = shared
    at = (kind * most + behind) * NUM_SURE
    right, tried = int_at(sure_odds, at + RIGHT), int_at(sure_odds, at + TRIED)
    expected = int_at(sure_odds, at + EXPECTED)
    for index in range(batch):
        slot, seen = int64(fates[index * FATES + SLOT]), int64(fates[index * FATES + SEEN])
        for column in range(ends):
            position = int64(places[column]) - 1 + behind
            if position < seen and int64(kinds[index * ends + column]) == kind:
                hit = int64(ONE) if position < int64(fates[index * FATES + WERE_RIGHT]) else int64(0)
                right += hit - (right >> int64(ALL_DECAY))
                tried += int64(ONE) - (tried >> int64(ALL_DECAY))
                expected += int_at(draft_rates, slot * most + position) - (expected >> int64(ALL_DECAY))
    set_int(sure_odds, at + RIGHT, right)
    set_int(sure_odds, at + TRIED, tried)
    set_int(sure_odds, at + EXPECTED, expected)


@cache
def _make(plan: _Plan) -> Kernel:
    batch, most, ends, sizes = plan.batch, plan.most, plan.ends, astuple(plan)
    num_fates, num_kinds, num_cells = batch * FATES, batch * ends, NUM_KINDS * most

    def kernel(
        slots: Any, accepted_lens: Any, num_verified: Any, verified_source: Any, draft_kinds: Any, draft_ends: Any,
        draft_rates: Any, sure_odds: Any,
    ) -> None:  # fmt: skip
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        fates = cuda.shared.array(shape=num_fates, dtype=int32)
        kinds = cuda.shared.array(shape=num_kinds, dtype=int32)
        places = cuda.shared.array(shape=ends, dtype=int32)
        thread = int64(cuda.threadIdx.x)
        if thread < batch:
            _load_fate(thread, (slots, accepted_lens, num_verified, verified_source), fates)
        elif FIRST_KIND <= thread < FIRST_KIND + num_kinds:
            kinds[thread - FIRST_KIND] = int32(int_at(draft_kinds, thread - FIRST_KIND))
        elif FIRST_END <= thread < FIRST_END + ends:
            places[thread - FIRST_END] = int32(int_at(draft_ends, thread - FIRST_END))
        cuda.syncthreads()
        if thread < num_cells:
            kind, behind = divide(thread, most)
            _count(kind, behind, sizes, (fates, kinds, places), draft_rates, sure_odds)

    return Kernel("learn_confidence_" + "_".join(map(str, astuple(plan))), kernel, (types.int64,) * 8, THREADS)


def examples() -> list[Kernel]:
    """Specialisations that CI compiles."""
    return [_make(_Plan(4, 7, 3)), _make(_Plan(1, 5, 2))]
