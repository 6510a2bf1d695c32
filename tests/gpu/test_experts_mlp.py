"""A mixture of experts in one launch: what it chooses, both products by those of two launches bit for bit, the sum, and
many behind each other without a wait."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from expert_cases import ALPHA, LIMIT, Experts, awaited, make_experts, make_logits, summed, want_choice

from lowlat.executors.launcher import Launcher
from lowlat.kernels.experts_choice import Choice
from lowlat.kernels.experts_down import experts_down
from lowlat.kernels.experts_gate_up import experts_gate_up
from lowlat.kernels.experts_mlp import experts_mlp
from lowlat.kernels.kernel import KernelCall
from lowlat.kernels.router import router

pytestmark = pytest.mark.gpu

ROWS = (1, 3, 8, 17, 70)


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    """One launcher for all tests."""
    return Launcher(torch.device("cuda", 0))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """NaN equals NaN there."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


@dataclass
class Mixture:
    """Experts of both products, the first one's biases in its packed order."""

    up: Experts
    down: Experts
    bias: torch.Tensor

    def results(self, rows: int, ranks: int) -> dict[str, torch.Tensor]:
        """What a mixture of so many rows reads of the residual stream, and where it writes, by the names it takes."""
        inner, hidden = self.down.packed.columns, self.down.packed.rows
        return {
            "expert_ids": torch.full((rows, ranks), 77, dtype=torch.int32, device="cuda"),
            "expert_weights": torch.full((rows, ranks), torch.nan, device="cuda"),
            "activated": awaited(rows, ranks, inner, dtype=torch.bfloat16, device="cuda"),
            "partials": awaited(rows, ranks, hidden, dtype=torch.float32, device="cuda"),
            "residual": torch.randn(rows, hidden, device="cuda").bfloat16(),
            "total": torch.full((rows, hidden), torch.nan, device="cuda").bfloat16(),
        }

    def calls(
        self, launcher: Launcher, x: torch.Tensor, choice: Choice, results: Any, *, early: bool = False
    ) -> list[KernelCall]:
        """All in one launch."""
        return experts_mlp(
            x=x, choice=choice, gate_up=self.up.packed, gate_up_bias=self.bias, down=self.down.packed,
            down_bias=self.down.bias, limit=LIMIT, alpha=ALPHA, early=early, card=launcher.card, **results,
        )  # fmt: skip

    def apart(
        self, launcher: Launcher, x: torch.Tensor, results: Any, activated: torch.Tensor, partials: torch.Tensor
    ) -> list[KernelCall]:
        """Each product in a launch of its own, of the experts in `results`."""
        first = experts_gate_up(
            x=x, expert_ids=results["expert_ids"], weight=self.up.packed, bias=self.bias, out=activated, limit=LIMIT,
            alpha=ALPHA, card=launcher.card,
        )  # fmt: skip
        second = experts_down(
            activated=activated, weight=self.down.packed, bias=self.down.bias, out=partials, card=launcher.card,
            expert_ids=results["expert_ids"], expert_weights=results["expert_weights"],
        )  # fmt: skip
        return [*first, *second]


def make_mixture(count: int, hidden: int, inner: int, *, quantised: bool) -> Mixture:
    """Random experts of both products."""
    up = make_experts(count, 2 * inner, hidden, quantised=quantised, gated=True, device="cuda")
    down = make_experts(count, hidden, inner, quantised=quantised, gated=False, device="cuda")
    assert up.order is not None
    return Mixture(up, down, up.bias[:, up.order.cuda()].contiguous())


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize(
    ("count", "ranks", "hidden", "inner"), [(4, 4, 96, 160), (128, 4, 160, 64), (32, 4, 2880, 2880), (8, 2, 2080, 320)]
)
def test_it_has_the_bits_of_two_launches(
    launcher: Launcher, quantised: bool, count: int, ranks: int, hidden: int, inner: int
) -> None:
    """All ways to choose, at every number of rows, dead ones and such that choose by NaN among them."""
    mixture, ahead = make_mixture(count, hidden, inner, quantised=quantised), []
    for rows in ROWS:
        x, results = torch.zeros(rows, hidden, device="cuda").bfloat16(), mixture.results(rows, ranks)
        ahead += mixture.calls(launcher, x, Choice(torch.zeros(rows, count, device="cuda")), results)
        ahead += mixture.apart(launcher, x, results, results["activated"], results["partials"])
    launcher.compile_ahead(ahead)
    for rows in ROWS:
        for kind in ("random", "shared", "ties", "odd", "dead", "none"):
            logits, live = make_logits("random" if kind in ("dead", "none") else kind, rows, count), None
            if kind in ("dead", "none"):
                live = ((torch.arange(rows) % 3 == 1) & (kind == "dead")).to(torch.uint8).view(1, rows)
            x, results = torch.randn(rows, hidden, device="cuda").bfloat16(), mixture.results(rows, ranks)
            choice = Choice(logits.cuda(), None if live is None else live.cuda())
            launcher.run(*mixture.calls(launcher, x, choice, results))
            wanted, about = want_choice(logits, live, ranks)
            assert torch.equal(results["expert_ids"].cpu(), wanted), (rows, kind)
            torch.testing.assert_close(results["expert_weights"].cpu(), about, rtol=1e-5, atol=1e-7, equal_nan=True)
            activated = torch.full_like(results["activated"], torch.nan)
            partials = torch.full_like(results["partials"], torch.nan)
            launcher.run(*mixture.apart(launcher, x, results, activated, partials))
            assert torch.equal(bits(results["activated"]), bits(activated)), (rows, kind)
            assert torch.equal(bits(results["partials"]), bits(partials)), (rows, kind)
            assert torch.equal(bits(results["total"]), bits(summed(results["residual"], results["partials"]))), (
                rows,
                kind,
            )
            assert kind == "odd" or results["total"].isfinite().all()


@pytest.mark.parametrize("kind", ["random", "shared", "ties", "odd"])
@pytest.mark.parametrize(("count", "ranks"), [(5, 2), (256, 8), (70, 5)])
def test_what_logits_choose_is_the_reference_s(launcher: Launcher, kind: str, count: int, ranks: int) -> None:
    """Ids and shares, with flags and without, and a row's the same in any company."""
    mixture = make_mixture(count, 96, 32, quantised=True)
    for rows in (1, 5, 33):
        logits, x = make_logits(kind, rows, count), torch.randn(rows, 96, device="cuda").bfloat16()
        flags = (torch.arange(rows) % 3 != 1).to(torch.uint8).view(1, rows)
        for live in (None, flags):
            results = mixture.results(rows, ranks)
            choice = Choice(logits.cuda(), None if live is None else live.cuda())
            launcher.run(*mixture.calls(launcher, x, choice, results))
            wanted, about = want_choice(logits, live, ranks)
            assert torch.equal(results["expert_ids"].cpu(), wanted)
            torch.testing.assert_close(results["expert_weights"].cpu(), about, rtol=1e-5, atol=1e-7, equal_nan=True)
        alone = mixture.results(1, ranks)
        alone["residual"] = results["residual"][-1:].clone()
        flag = torch.ones(1, 1, dtype=torch.uint8, device="cuda")
        flag[0, 0] = flags[0, -1]
        launcher.run(*mixture.calls(launcher, x[-1:], Choice(logits[-1:].cuda(), flag), alone))
        for name, value in alone.items():
            assert torch.equal(bits(value), bits(results[name][-1:])), name


@pytest.mark.parametrize("sizes", [(1,), (4,), (12,), (1, 8, 3, 70)])
def test_many_behind_each_other(launcher: Launcher, sizes: tuple[int, ...]) -> None:
    """Layers without a wait between them, which leave logits, rows and what is awaited in the same places, and choose
    while the router still runs; of one bucket, or of several that take turns. The sum of each is the next residual."""
    layers, width, count, most = 240, 576, 32, max(sizes)
    mixture = make_mixture(count, width, width, quantised=True)
    x = torch.randn(layers, most, width, device="cuda").bfloat16()
    weight = (torch.randn(layers, count, width, device="cuda") / 8).bfloat16()
    zeros, ones = torch.zeros(count, device="cuda").bfloat16(), torch.ones(width, device="cuda").bfloat16()
    live = torch.ones(1, most, dtype=torch.uint8, device="cuda")
    live[0, 1::3] = 0
    start, found = torch.randn(most, width, device="cuda").bfloat16(), []
    for apart in (True, False):
        normed = torch.full((most, width), torch.nan, device="cuda").bfloat16()
        logits = torch.full((2, most, count), torch.nan, device="cuda")
        shared, outs, launches = mixture.results(most, 4), [start], []
        chosen = []
        for layer in range(layers):
            rows = sizes[layer % len(sizes)]
            flags, results = live[:, :rows].contiguous(), mixture.results(rows, 4)
            results |= {name: shared[name][:rows] for name in ("activated", "partials")}
            total = start.clone()
            results |= {"residual": outs[-1][:rows], "total": total[:rows]}
            own, following = logits[layer % 2, :rows], logits[(layer + 1) % 2, : sizes[(layer + 1) % len(sizes)]]
            calls = router(
                x[layer, :rows], ones, weight[layer], zeros, flags, normed=normed[:rows], logits=own, eps=1e-5,
                awaited=(results["activated"], results["partials"], following), card=launcher.card,
            )  # fmt: skip
            calls += mixture.calls(launcher, normed[:rows], Choice(own, flags), results, early=layer > 0)
            launches += [launcher.prepare(call) for call in calls]
            outs.append(total)
            chosen.append(results["expert_ids"])
        torch.cuda.synchronize()
        for launch in launches:
            launch.issue(launcher.stream())
            if apart:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        found.append((torch.stack(outs), chosen))
    assert found[0][0].isfinite().all() and len(torch.unique(torch.cat([each.flatten() for each in found[0][1]]))) > 8
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found[0][1], found[1][1], strict=True))
