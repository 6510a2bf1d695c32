"""Gated delta nets: rewinding leaves their bits, prefill and steps are one recurrence, and both are the formula."""

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch.nn import functional

from lowlat.errors import DeviceError
from lowlat.kernels.reference import OPERATIONS
from lowlat.kernels.reference.recurrent.delta_rule import sum_by_halves

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, TAPS, SLOTS = 2, 6, 12, 20, 4, 3
CHANNELS = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM


@dataclass
class Net:
    """A layer's weights and states for slots of at most `width` rows, which begin poisoned."""

    dtype: torch.dtype
    width: int
    heads: slice = field(default_factory=lambda: slice(0, HEADS))

    def __post_init__(self) -> None:
        torch.manual_seed(5)
        taps, a_log, dt_bias = torch.randn(CHANNELS, TAPS), torch.randn(HEADS), torch.randn(HEADS)
        self.key_heads = slice(self.heads.start // 3, -(-self.heads.stop // 3))
        self.kept = torch.cat(
            [
                *(base + torch.arange(KEY_DIM * KEY_HEADS).view(KEY_HEADS, -1)[self.key_heads].reshape(-1) for base in
                  (0, KEY_DIM * KEY_HEADS)),
                2 * KEY_DIM * KEY_HEADS + torch.arange(HEADS * VALUE_DIM).view(HEADS, -1)[self.heads].reshape(-1),
            ]
        )  # fmt: skip
        self.taps, self.a_log, self.dt_bias = taps[self.kept], a_log[self.heads], dt_bias[self.heads]
        count, keys = self.a_log.shape[0], len(range(KEY_HEADS)[self.key_heads])
        poisoned = float("nan")
        self.conv = torch.full((SLOTS, TAPS - 1 + self.width, len(self.kept)), poisoned, dtype=self.dtype)
        self.states = {
            "state": torch.full((SLOTS, count, VALUE_DIM, KEY_DIM), poisoned),
            "pending_k": torch.full((SLOTS, 2 * self.width, keys, KEY_DIM), poisoned),
            "pending_d": torch.full((SLOTS, 2 * self.width, count, VALUE_DIM), poisoned),
            "pending_g": torch.full((SLOTS, 2 * self.width, count), poisoned),
        }
        self.state_lens = torch.full((SLOTS,), -7, dtype=torch.int32)

    def prefill(
        self, slot: int, start: int, inputs: torch.Tensor, padding: int = 0, snapshots: tuple[int, ...] = (-1, -1, 0)
    ) -> torch.Tensor:
        """A chunk's outputs [rows, Hv * Dv]; rows of `inputs` are x and ba."""
        x, ba = self._split(functional.pad(inputs, (0, 0, 0, padding), value=float("nan")))
        own = {"slot": torch.tensor([slot]).int(), "chunk": torch.tensor([start, len(inputs)]).int()}
        mixed, out = torch.empty(len(x), len(self.kept), dtype=self.dtype), torch.empty(len(x), 0)
        out = torch.full((len(x), self.a_log.shape[0] * VALUE_DIM), float("nan"), dtype=self.dtype)
        told = {**own, "snapshots": torch.tensor([snapshots]).int()}
        OPERATIONS["prefill_delta_conv"](x, self.taps, **told, conv_state=self.conv, out=mixed)
        weights = (self.a_log, self.dt_bias)
        OPERATIONS["prefill_delta_rule"](mixed, ba, *weights, **told, state=self.states["state"], out=out)
        OPERATIONS["prefill_advance_states"](**own, state_lens=self.state_lens)
        assert not out[len(inputs) :].any()
        return out[: len(inputs)]

    def step(self, slots: dict[int, tuple[int, torch.Tensor]], rows: int, pads: int = 0) -> dict[int, torch.Tensor]:
        """A step's outputs by slot, of its position and its rows' inputs; dead rows of the `rows` a slot are NaN."""
        batch = len(slots) + pads
        inputs = torch.full((batch, rows, CHANNELS + 2 * HEADS), float("nan"))
        live = torch.zeros(batch, rows, dtype=torch.uint8)
        for index, (_, given) in enumerate(slots.values()):
            inputs[index, : len(given)], live[index, : len(given)] = given, 1
        own = {
            "slots": torch.tensor([*slots, *[-1] * pads]).int(),
            "dense_lens": torch.tensor([*(start for start, _ in slots.values()), *[0] * pads]).int(),
            "row_live": live,
        }
        x, ba = self._split(inputs.flatten(0, 1))
        mixed = torch.empty(len(x), len(self.kept), dtype=self.dtype)
        out = torch.empty(len(x), self.a_log.shape[0] * VALUE_DIM, dtype=self.dtype)
        lens = {"state_lens": self.state_lens}
        OPERATIONS["delta_conv"](x, self.taps, **own, **lens, conv_state=self.conv, out=mixed)
        OPERATIONS["delta_rule"](mixed, ba, self.a_log, self.dt_bias, **own, **lens, **self.states, out=out)
        OPERATIONS["advance_states"](**own, **lens)
        outs = out.view(batch, rows, -1)
        return {slot: outs[index, : len(given)] for index, (slot, (_, given)) in enumerate(slots.items())}

    def _split(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ba = inputs[:, CHANNELS:].view(-1, 2, HEADS)[:, :, self.heads]
        return inputs[:, self.kept], ba.reshape(inputs.shape[0], -1)


def drawn(count: int) -> torch.Tensor:
    """The inputs of a text's positions."""
    return torch.randn(count, CHANNELS + 2 * HEADS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drafted_rows_have_the_bits_of_single_steps(dtype: torch.dtype) -> None:
    """Texts grow by rows of which some are rejected, next to neighbours; then once more, by a row a step."""
    net, alone = Net(dtype, 8), Net(dtype, 8)
    texts = {slot: drawn(60) for slot in (0, 2)}
    done, chance = {0: 5, 2: 3}, random.Random(2)
    outputs: dict[int, list[torch.Tensor]] = {0: [], 2: []}
    for slot, text in texts.items():
        outputs[slot].append(net.prefill(slot, 0, text[: done[slot]], padding=slot))
    while done:
        width = chance.randint(1, 8)
        given, accepted = {}, {}
        for slot in done:
            count = chance.randint(1, width)
            accepted[slot] = chance.randint(1, count)
            own = texts[slot][done[slot] : done[slot] + count].clone()
            own[accepted[slot] :] = drawn(max(len(own) - accepted[slot], 0))
            given[slot] = (done[slot], own)
        for slot, out in net.step(given, width, pads=chance.randint(0, 2)).items():
            taken = min(accepted[slot], 60 - done[slot])
            outputs[slot].append(out[:taken])
            done[slot] += taken
        done = {slot: count for slot, count in done.items() if count < 60}
    for slot, text in texts.items():
        wanted = [alone.prefill(slot, 0, text[:1])]
        wanted += [alone.step({slot: (place, text[place : place + 1])}, 1)[slot] for place in range(1, 60)]
        assert torch.equal(torch.cat(outputs[slot]), torch.cat(wanted))


def test_chunks_are_the_steps_of_their_rows() -> None:
    """A prompt's chunks, at a poisoned and at a used slot, and the steps after them."""
    net, text = Net(torch.bfloat16, 2), drawn(41)
    whole = net.prefill(1, 0, text)
    again = torch.cat((net.prefill(1, 0, text[:16]), net.prefill(1, 16, text[16:32], padding=7)))
    rest = [net.step({1: (place, text[place : place + 1])}, 2)[1] for place in range(32, 41)]
    assert torch.equal(torch.cat((again, *rest)), whole)


def test_a_part_of_the_heads_has_its_bits() -> None:
    text = drawn(9)
    whole = Net(torch.bfloat16, 1).prefill(0, 0, text).view(9, HEADS, -1)
    for part in (slice(0, 3), slice(3, 6), slice(4, 5)):
        own = Net(torch.bfloat16, 1, part).prefill(0, 0, text).view(9, part.stop - part.start, -1)
        assert torch.equal(own, whole[:, part])


def test_it_is_the_formula() -> None:
    net, text = Net(torch.float32, 1), drawn(11)
    found = net.prefill(0, 0, text).view(11, HEADS, VALUE_DIM)
    x = functional.pad(text[:, :CHANNELS].double(), (0, 0, TAPS - 1, 0))
    taps, state = net.taps.double(), torch.zeros(HEADS, KEY_DIM, VALUE_DIM).double()
    for place in range(11):
        mixed = functional.silu((x[place : place + TAPS] * taps.T).sum(0))
        q, k, v = mixed.split((KEY_HEADS * KEY_DIM, KEY_HEADS * KEY_DIM, HEADS * VALUE_DIM))
        q, k = (functional.normalize(each.view(KEY_HEADS, -1), dim=1).repeat_interleave(3, 0) for each in (q, k))
        b, a = text[place, CHANNELS:].double().chunk(2)
        state = state * torch.exp(-net.a_log.double().exp() * functional.softplus(a + net.dt_bias))[:, None, None]
        d = b.sigmoid()[:, None] * (v.view(HEADS, -1) - torch.einsum("hkv,hk->hv", state, k))
        state = state + k[:, :, None] * d[:, None]
        wanted = torch.einsum("hkv,hk->hv", state, q) / KEY_DIM**0.5
        torch.testing.assert_close(found[place].double(), wanted, rtol=1e-4, atol=1e-5)


def test_more_pending_rows_than_are_kept_are_refused() -> None:
    net, text = Net(torch.float32, 2), drawn(9)
    net.prefill(0, 0, text[:4])
    with pytest.raises(DeviceError, match="slot 0 goes on at position 7, its recurrent states are of 4 tokens"):
        net.step({0: (7, text[7:8])}, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates(dtype: torch.dtype) -> None:
    """The gated norm and the output gate of some rows, dead ones zero, as they are in plain torch of the dtype."""
    live = torch.tensor([1, 0, 1], dtype=torch.uint8)
    x, gates = torch.randn(3, HEADS * VALUE_DIM).to(dtype), torch.randn(3, 7 + HEADS * VALUE_DIM)
    weight, out = torch.randn(VALUE_DIM).to(dtype), torch.full_like(x, float("nan"))
    OPERATIONS["delta_norm"](x, gates, weight, live, out=out, eps=1e-6)
    heads, z = x.view(3, HEADS, -1).float(), gates[:, 7:].to(dtype).float().view(3, HEADS, -1)
    normed = weight * (heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-6)).to(dtype)
    wanted = (normed * functional.silu(z)).to(dtype).view(3, -1) * live[:, None]
    torch.testing.assert_close(out, wanted)
    gate = torch.randn_like(gates[:, 7:])
    OPERATIONS["output_gate"](x, gate, live, out=out)
    torch.testing.assert_close(out, x * torch.sigmoid(gate.to(dtype)) * live[:, None])
    a, b, logit = torch.randn(3, 5), torch.randn(3, 5), torch.randn(3, 1)
    total = torch.full_like(a, float("nan"))
    OPERATIONS["add_gated"](a, b, logit, live, out=total)
    torch.testing.assert_close(total, (a + b * logit.sigmoid()) * live[:, None])


def test_sums_by_halves() -> None:
    x = torch.randn(5, 13, 2)
    torch.testing.assert_close(sum_by_halves(x, 1), x.sum(1))


@pytest.mark.parametrize("after", [1, 2, 9, 30])
def test_a_text_that_begins_with_a_snapshot_has_the_bits_of_one_that_does_not(after: int) -> None:
    net, alone, text = Net(torch.bfloat16, 4), Net(torch.bfloat16, 4), drawn(40)
    wanted = torch.cat([alone.prefill(0, 0, text[:36]), alone.step({0: (36, text[36:])}, 4)[0]])
    net.prefill(0, 0, text[:30], snapshots=(-1, 2, after, -1, 0))
    found = [net.prefill(1, after, text[after : after + 1], snapshots=(2, -1, 0, -1, 0))]
    found += [net.prefill(1, after + 1, text[after + 1 : 36]), net.step({1: (36, text[36:])}, 4)[1]]
    assert torch.equal(torch.cat(found), wanted[after:])
