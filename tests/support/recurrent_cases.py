"""A gated delta net's layer on kernels or references: texts that grow by drafted rows, of which some are rejected."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional

from lowlat.kernels.recurrent.delta_step import HeadSizes
from lowlat.kernels.reference import OPERATIONS
from lowlat.kernels.toolchain.kernel import KernelCall

EPS = 1e-6
CHUNK = 32  # positions at whose multiples prompts are parted, and snapshots are due
SLOTS, SNAPSHOTS, TAPS = 3, 2, 4
MODULES = (
    "delta_math",
    "delta_tile_math",
    "delta_step",
    "delta_rule",
    "delta_conv",
    "delta_norm",
    "delta_tiles",
    "delta_prefill",
    "state_lens",
)
Run = Callable[..., None]
Build = Callable[..., list[KernelCall]]


def by_reference(kind: str, **arguments: Any) -> None:
    """An operation by its meaning."""
    OPERATIONS[kind](**arguments)


def builders(modules: Mapping[str, ModuleType]) -> dict[str, Build]:
    """The kernels' builders by operation, of modules by name."""
    return {
        "delta_conv": modules["delta_conv"].delta_conv,
        "prefill_delta_conv": modules["delta_conv"].prefill_delta_conv,
        "delta_rule": modules["delta_rule"].delta_rule,
        "gated_delta": modules["delta_rule"].gated_delta,
        "prefill_delta_rule": modules["delta_prefill"].prefill_delta_rule,
        "delta_norm": modules["delta_norm"].delta_norm,
        "advance_states": modules["state_lens"].advance_states,
        "prefill_advance_states": modules["state_lens"].prefill_advance_states,
    }


def by_kernels(modules: Mapping[str, ModuleType], run: Callable[..., None], device: torch.device) -> Run:
    """Operations by their kernels, which `run` launches; workspaces begin poisoned."""
    made = builders(modules)

    def launch(kind: str, **arguments: Any) -> None:
        if kind == "prefill_delta_rule":
            arguments["workspace"] = lambda name, shape, dtype: torch.full(shape, torch.nan, dtype=dtype, device=device)
        run(*made[kind](**arguments))

    return launch


class Layer:
    """A layer's weights and states for slots of at most `most` rows, which begin poisoned; slot 1 is nobody's.

    run    an operation by name
    fused  steps are one launch
    """

    def __init__(
        self, heads: HeadSizes, most: int, run: Run, *, fused: bool = False, early: bool = False, device: str = "cpu"
    ) -> None:
        source = torch.Generator().manual_seed(5)
        self.heads, self.run, self.fused, self.device = heads, run, fused, device
        self.early = {"early": True} if early else {}
        self.values = heads.value_heads * heads.value_dim
        self.width = heads.channels + self.values

        def drawn_weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=source)

        self.taps = (drawn_weight(heads.channels, TAPS) / 2).bfloat16().to(device)
        self.a_log, self.dt_bias = (
            drawn_weight(heads.value_heads).to(device),
            drawn_weight(heads.value_heads).to(device),
        )
        self.norm_weight = (drawn_weight(heads.value_dim) / 4 + 1).bfloat16().to(device)
        poisoned: dict[str, Any] = {"fill_value": float("nan"), "device": device}
        self.conv = torch.full((SLOTS + SNAPSHOTS, TAPS - 1 + most, heads.channels), **poisoned, dtype=torch.bfloat16)
        self.states = {
            "state": torch.full((SLOTS + SNAPSHOTS, heads.value_heads, heads.value_dim, heads.key_dim), **poisoned),
            "pending_k": torch.full((SLOTS, 2 * most, heads.key_heads, heads.key_dim), **poisoned),
            "pending_d": torch.full((SLOTS, 2 * most, heads.value_heads, heads.value_dim), **poisoned),
            "pending_g": torch.full((SLOTS, 2 * most, heads.value_heads), **poisoned),
        }
        self.state_lens = torch.full((SLOTS,), -7, dtype=torch.int32, device=device)

    def drawn(self, count: int) -> torch.Tensor:
        """The inputs of a text's positions: x with z, then b and a."""
        return torch.randn(count, self.width + 2 * self.heads.value_heads)

    def prefill(
        self,
        slot: int,
        start: int,
        inputs: torch.Tensor,
        padding: int = 0,
        begin: int = -1,
        kept: Sequence[tuple[int, int]] = (),
    ) -> torch.Tensor:
        """A chunk's outputs; with padding it is told which snapshot it begins with, and of those it leaves."""
        x, ba = self._split(functional.pad(inputs, (0, 0, 0, padding), value=float("nan")))
        own = {"slot": self._ints([slot]), "chunk": self._ints([start, len(inputs)])}
        pairs = [number for pair in (*kept, *[(-1, 0)] * (2 - len(kept))) for number in pair]
        given = own | ({"snapshots": self._ints([begin, *pairs])[None]} if padding else {})
        mixed, made, out = self._rows(len(x), self.heads.channels), *(self._rows(len(x), self.values) for _ in range(2))
        self.run("prefill_delta_conv", x=x, weight=self.taps, **given, conv_state=self.conv, out=mixed)
        weights = {"a_log": self.a_log, "dt_bias": self.dt_bias}
        states = {"state": self.states["state"], "chunk_size": CHUNK}
        self.run("prefill_delta_rule", mixed=mixed, ba=ba, **weights, **given, **states, out=made)
        self.run("delta_norm", x=made, gates=x.nan_to_num(), weight=self.norm_weight, out=out, eps=EPS)
        self.run("prefill_advance_states", **own, state_lens=self.state_lens)
        assert not mixed[len(inputs) :].any() and not made[len(inputs) :].any()
        return out[: len(inputs)].cpu()

    def step(self, slots: dict[int, tuple[int, torch.Tensor]], rows: int, pads: int = 0) -> dict[int, torch.Tensor]:
        """A step's outputs by slot, of its position and its rows' inputs; dead rows of the `rows` a slot are NaN."""
        batch = len(slots) + pads
        inputs = torch.full((batch, rows, self.width + 2 * self.heads.value_heads), float("nan"))
        live = torch.zeros(batch, rows, dtype=torch.uint8)
        for index, (_, given) in enumerate(slots.values()):
            inputs[index, : len(given)], live[index, : len(given)] = given, 1
        row_live = live.to(self.device)
        own = {
            "slots": self._ints([*slots, *[-1] * pads]),
            "dense_lens": self._ints([*(start for start, _ in slots.values()), *[0] * pads]),
            "row_live": row_live,
        }
        x, ba = self._split(inputs.flatten(0, 1))
        mixed, made, out = self._rows(len(x), self.heads.channels), *(self._rows(len(x), self.values) for _ in range(2))
        common = {**own, "state_lens": self.state_lens}
        rule = {**common, **self.states, "ba": ba, "a_log": self.a_log, "dt_bias": self.dt_bias}
        if self.fused:
            norm = {"norm_weight": self.norm_weight, "eps": EPS}
            self.run("gated_delta", x=x, weight=self.taps, conv_state=self.conv, **rule, **norm, out=out, **self.early)
        else:
            self.run("delta_conv", x=x, weight=self.taps, **common, conv_state=self.conv, out=mixed)
            self.run("delta_rule", mixed=mixed, **rule, out=made)
            self.run("delta_norm", x=made, gates=x, weight=self.norm_weight, row_live=row_live, out=out, eps=EPS)
            assert not mixed[~row_live.flatten().bool()].any() and not made[~row_live.flatten().bool()].any()
        self.run("advance_states", **common)
        outs = out.view(batch, rows, -1).cpu()
        assert not outs[~live.bool()].any()
        return {slot: outs[index, : len(given)] for index, (slot, (_, given)) in enumerate(slots.items())}

    def check_untouched(self) -> None:
        """Nothing was written for a slot that nobody has."""
        for each in (self.conv, *self.states.values()):
            assert bool(each[1].isnan().all())
        assert int(self.state_lens[1]) == -7

    def _split(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        placed = inputs.to(self.device)
        return placed[:, : self.width].contiguous(), placed[:, self.width :].contiguous()

    def _ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _rows(self, count: int, width: int) -> torch.Tensor:
        return torch.full((count, width), float("nan"), dtype=torch.bfloat16, device=self.device)


def grown(layer: Layer, texts: Mapping[int, torch.Tensor], prompts: Mapping[int, int], width: int) -> dict[int, Any]:
    """The outputs of texts that are read up to their prompts and then grow by steps of up to `width` rows, of which
    some are rejected; a text that ends leaves the step."""
    chance, outputs, done = random.Random(2), {}, dict(prompts)
    torch.manual_seed(3)
    for slot, text in texts.items():
        outputs[slot] = [layer.prefill(slot, 0, text[: done[slot]], padding=slot)]
    while done:
        rows = chance.randint(1, width)
        given, accepted = {}, {}
        for slot, start in done.items():
            count = chance.randint(1, rows)
            accepted[slot] = chance.randint(1, count)
            own = texts[slot][start : start + count].clone()
            own[accepted[slot] :] = layer.drawn(max(len(own) - accepted[slot], 0))
            given[slot] = (start, own)
        for slot, out in layer.step(given, rows, pads=chance.randint(0, 1)).items():
            taken = min(accepted[slot], len(out))
            outputs[slot].append(out[:taken])
            done[slot] += taken
        done = {slot: count for slot, count in done.items() if count < len(texts[slot])}
    return {slot: torch.cat(each) for slot, each in outputs.items()}


def by_single_steps(layer: Layer, slot: int, text: torch.Tensor, prompt: int) -> torch.Tensor:
    """The outputs of a text that is read up to its prompt and then grows by a row a step."""
    first = layer.prefill(slot, 0, text[:prompt])
    rest = [layer.step({slot: (place, text[place : place + 1])}, 1)[slot] for place in range(prompt, len(text))]
    return torch.cat((first, *rest))


# Of a product of a prompt's kernel one factor is the sum of two bf16, which is 2**-17 of it off at most; sums are
# float32. A head's error is a few of these, as no row makes the error of the rows before it larger.
STATE_ERROR = 2.0**-15
OUTPUT_ERROR = 2.0**-9 + STATE_ERROR  # they are rounded to bf16


@dataclass
class Prompt:
    """What `prefill_delta_rule` reads of a prompt: mixed [n, C] bf16, ba [n, 2 Hv], and a layer's weights [Hv]."""

    heads: HeadSizes
    mixed: torch.Tensor
    ba: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor

    @classmethod
    def drawn(cls, heads: HeadSizes, count: int, device: str = "cpu") -> "Prompt":
        """Random numbers; betas that are near the middle of two bf16 are 0.5, as float32 alone decides of others."""
        mixed, ba = torch.randn(count, heads.channels).bfloat16(), torch.randn(count, 2 * heads.value_heads)
        beta = ba[:, : heads.value_heads].bfloat16().double().sigmoid()
        place = torch.frac(torch.ldexp(beta, 8 - torch.frexp(beta).exponent))
        ba[:, : heads.value_heads][(place - 0.5).abs() < 1e-3] = 0
        weights = torch.randn(heads.value_heads) - 2, torch.randn(heads.value_heads)
        return cls(heads, *(x.to(device) for x in (mixed, ba, *weights)))

    def by_rows(self, state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [n, Hv, Dv] and the state after them [Hv, Dv, Dk] in float64, a row after another."""
        heads, rows = self.heads, len(self.mixed)
        keys = heads.key_heads * heads.key_dim
        q, k, v = self.mixed.double().split((keys, keys, heads.value_heads * heads.value_dim), 1)
        q, k = (x.view(rows, heads.key_heads, -1) for x in (q, k))
        q, k = (x * (x.square().sum(2, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        q, k = (x.repeat_interleave(heads.group, 1) for x in (q * heads.key_dim**-0.5, k))
        b, a = self.ba.bfloat16().double().chunk(2, 1)
        beta, v = b.sigmoid().bfloat16().double(), v.view(rows, heads.value_heads, -1)
        decay = torch.exp(-self.a_log.double().exp() * functional.softplus(a + self.dt_bias.double(), threshold=100))
        if state is None:
            state = torch.zeros(heads.value_heads, heads.value_dim, heads.key_dim, device=self.mixed.device)
        state, outputs = state.double(), []
        for row in range(rows):
            state = state * decay[row, :, None, None]
            d = beta[row, :, None] * (v[row] - torch.einsum("hvk,hk->hv", state, k[row]))
            state = state + d[:, :, None] * k[row, :, None]
            outputs.append(torch.einsum("hvk,hk->hv", state, q[row]))
        return torch.stack(outputs), state

    def run(
        self, run: Run, state: torch.Tensor, slot: int, start: int, count: int, *, first: int = 0, padding: int = 0,
        begin: int = -1, kept: Sequence[tuple[int, int]] = (), **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        """The outputs [count, Hv, Dv] of a chunk: rows from `first` on are those from position `start` on; padding rows
        are NaN."""
        given = (x[first : first + count] for x in (self.mixed, self.ba))
        mixed, ba = (functional.pad(x, (0, 0, 0, padding), value=float("nan")) for x in given)

        def ints(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=mixed.device)

        told = {"slot": ints(slot), "chunk": ints(start, count)}
        if kept or begin >= 0:
            told["snapshots"] = ints(begin, *(number for pair in kept for number in pair))[None]
        values = self.heads.value_heads * self.heads.value_dim
        out = torch.full((count + padding, values), float("nan"), dtype=torch.bfloat16, device=mixed.device)
        weights = {"a_log": self.a_log, "dt_bias": self.dt_bias}
        run("prefill_delta_rule", mixed=mixed, ba=ba, **weights, **told, state=state, out=out, **options)
        assert not out[count:].any()
        return out[:count].view(count, self.heads.value_heads, -1)


def largest_error(found: torch.Tensor, wanted: torch.Tensor, heads_at: int) -> float:
    """The largest error of a head, of its norm."""
    one, other = (x.double().movedim(heads_at, 0).flatten(1) for x in (found, wanted))
    return float(((one - other).norm(dim=1) / other.norm(dim=1)).max())


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal but for a few roundings of bf16 on the way."""
    one, other = found.double(), wanted.double()
    assert bool(one.isfinite().all())
    assert float((one - other).norm()) <= 1e-2 * float(other.norm())
    assert float((one - other).abs().max()) <= 0.03 * float(other.abs().max())
