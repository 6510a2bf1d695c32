"""The row-wise kernels against the reference: the same cases for a GPU and for Numba's simulator.

Inputs are random, outputs poisoned. The reference runs on the CPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from kernel_cases import unwritten

from lowlat.kernels.elementwise import elementwise, embed, norm, norm_add, per_layer
from lowlat.kernels.gemm.packing import pack
from lowlat.kernels.gemm.prefill.activation_layout import arrange, arranged_shape
from lowlat.kernels.moe import router
from lowlat.kernels.reference import OPERATIONS
from lowlat.kernels.speculation import draft_block, markov
from lowlat.kernels.speculation import draft_input as draft_input
from lowlat.kernels.speculation import local_conv as local_conv
from lowlat.kernels.toolchain.kernel import KernelCall

BF16 = torch.bfloat16
EPS = 1e-5
Arrays = dict[str, torch.Tensor]


def poison(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Return an array that nothing has written."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else 77, dtype=dtype)


def flags(rows: int) -> torch.Tensor:
    """row_live: some live, some dead."""
    return (torch.arange(rows) % 3 != 1).to(torch.uint8)


def weights(width: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A norm's weight; of float32 one that bf16 does not hold."""
    return (torch.rand(width) + 0.5).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two bf16 tensors agree in every bit."""
    return torch.equal(a.cpu().view(torch.int16), b.cpu().view(torch.int16))


def check(name: str, found: Arrays, expected: Arrays) -> None:
    """Integers exactly; bf16 by the norm of the difference, and no element far off; NaN where NaN is expected."""
    for key, got in found.items():
        label, want, got = f"{name}: {key}", expected[key], got.cpu()
        if not got.is_floating_point():
            assert torch.equal(got, want), f"{label} is {got.tolist()}, not {want.tolist()}"
            continue
        mine, theirs = got.double(), want.double()
        assert torch.equal(mine.isnan(), theirs.isnan()), f"{label} has NaN in other places"
        mine, theirs = mine.nan_to_num(), theirs.nan_to_num()
        far = (mine - theirs).abs() > 0.01 * theirs.abs() + 1e-3
        error = float((mine - theirs).norm())
        assert not bool(far.any()), f"{label}: {int(far.sum())} elements far off"
        assert error <= 4e-3 * float(theirs.norm()) + 1e-9, f"{label}: off by {error}"


def total_of_squares(x: torch.Tensor, offsets: tuple[int, ...] = (16, 8, 4, 2, 1)) -> torch.Tensor:
    """The sum of squares of bf16 rows [M, N] in the order that `norm_math` promises, or with another butterfly."""
    rows, width = x.shape
    padded = torch.nn.functional.pad(x, (0, -width % 4096)).float().view(rows, -1, 512, 8)
    totals = torch.zeros(rows, 512)
    for chunk in padded.unbind(1):
        for value in chunk.unbind(-1):
            totals = (value.double().square() + totals.double()).float()
    lanes = totals.view(rows, 16, 32)
    for offset in offsets:
        lanes = lanes + lanes[:, :, torch.arange(32) ^ offset]
    total = lanes[:, 0, 0]
    for warp in range(1, 16):
        total = total + lanes[:, warp, 0]
    return total


def canonical_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of bf16 rows [M, N] with every step rounded as `norm_math` promises, in torch on the CPU."""
    mean = total_of_squares(x) / torch.tensor(float(x.shape[1]))
    root = (mean + torch.tensor(eps)).double().sqrt().float()  # torch's own of float32 may be an ulp off
    inverse = torch.ones(x.shape[0]) / root
    return (x.float() * inverse[:, None] * weight.float()).to(BF16)


@dataclass(frozen=True)
class Lab:
    """Where kernels run: on a device, through `run`."""

    device: torch.device
    run: Callable[..., None]

    def place(self, value: Any) -> Any:
        """A copy on the device, where it is a tensor."""
        return value.to(self.device, copy=True) if isinstance(value, torch.Tensor) else value

    def launch(self, builder: Callable[..., list[KernelCall]], outs: Arrays, **options: Any) -> Arrays:
        """Run a builder on copies of all arguments; returns what it made of `outs`."""
        found = {key: self.place(tensor) for key, tensor in outs.items()}
        placed = {key: self.place(value) for key, value in options.items()}
        self.run(*builder(**placed, **found))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return found

    def both(self, name: str, builder: Callable[..., list[KernelCall]], outs: Arrays, **options: Any) -> Arrays:
        """A builder against the operation of the same arguments."""
        expected = {key: tensor.clone() for key, tensor in outs.items()}
        OPERATIONS[name](**options, **expected)
        found = self.launch(builder, outs, **options)
        check(name, found, expected)
        return found


def check_elementwise(lab: Lab, rows: int, width: int) -> None:
    """identity, cast, add, silu_mul, add_gated; the first three bit for bit."""
    check_identity(lab, rows * width)
    x, a = torch.randn(rows, width) * 30, (torch.randn(rows, width) * 30).to(BF16)
    found = lab.both("cast", elementwise.cast, {"out": poison(rows, width)}, x=x)
    assert same_bits(found["out"], x.to(BF16))
    found = lab.both("add", elementwise.add, {"out": poison(rows, width)}, a=a, b=x)
    assert same_bits(found["out"], (a.float() + x).to(BF16))
    lab.both("add", elementwise.add, {"out": poison(rows, width)}, a=a, b=a * 3)
    for count, first in ((8, 20), (40, 0)):
        taken = {"out": poison(rows, count, dtype=torch.float32)}
        lab.both("take_columns", elementwise.take_columns, taken, x=torch.randn(rows, 40), first=first)
    gate_up = torch.randn(rows, 2 * width) * 5
    for live in (None, flags(rows)):
        for name in ("silu", "gelu_tanh"):
            outs = {"out": poison(rows, width)}
            lab.both("silu_mul", elementwise.silu_mul, outs, gate_up=gate_up, row_live=live, activation=name)
        gated = {"x": a, "gate": x / 10, "row_live": live}
        lab.both("output_gate", elementwise.output_gate, {"out": poison(rows, width)}, **gated)
        gated = {"a": torch.randn(rows, width) * 30, "b": torch.randn(rows, width), "gate": torch.randn(rows, 1) * 5}
        outs = {"out": poison(rows, width, dtype=torch.float32)}
        lab.both("add_gated", elementwise.add_gated, outs, row_live=live, **gated)


def check_norm_add(
    lab: Lab,
    rows: int,
    width: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype = BF16,
    scalar: float | None = None,
    *,
    arranges: bool = False,
) -> None:
    """Compare a fused norm, sum, scale and norm with the operations one by one, bit for bit: with
    and without what may be absent.

    arranges  also as it is left for a prefill GEMM
    """
    x, residual = (torch.randn(rows, width) * 3).to(dtype), torch.randn(rows, width).to(BF16)
    own, following = weights(width, weight_dtype), weights(width, weight_dtype)
    number = None if scalar is None else torch.tensor([scalar]).to(weight_dtype)

    def one_by_one(live: torch.Tensor | None, norms: bool) -> Arrays:
        added, given = x, dict[str, Any]()
        if norms:
            added = lab.launch(elementwise.cast, {"out": poison(rows, width)}, x=x)["out"]
            room, given = {"out": poison(rows, width)}, {"weight": own, "row_live": live, "eps": EPS}
            added = lab.launch(norm.rms_norm, room, x=added, **given)["out"]
        total = lab.launch(elementwise.add, {"out": poison(rows, width)}, a=residual, b=added)["out"]
        if number is not None:
            total = lab.both("scale", elementwise.scale, {"out": poison(rows, width)}, x=total.cpu(), scalar=number)[
                "out"
            ]
        given = {"weight": following, "row_live": live, "eps": 2 * EPS}
        out = lab.launch(norm.rms_norm, {"out": poison(rows, width)}, x=total, **given)["out"]
        return {"total": total, "out": out}

    for live in (None, flags(rows)):
        for norms in (True, False):
            want = one_by_one(live, norms)
            given: dict[str, Any] = {"x": x, "residual": residual, "row_live": live, "scalar": number}
            given |= {"weight": own if norms else None, "eps": EPS if norms else None}
            outs = {"total": poison(rows, width)}
            alone = lab.launch(norm_add.norm_add, outs, **given)
            assert same_bits(alone["total"], want["total"])
            given |= {"next_weight": following, "next_eps": 2 * EPS}
            found = lab.launch(norm_add.norm_add, outs | {"out": poison(rows, width)}, **given)
            assert same_bits(found["total"], want["total"]) and same_bits(found["out"], want["out"])
            if not arranges:
                continue
            found = lab.launch(norm_add.norm_add, outs | {"out": poison(rows, width)}, **given, triggers_first=True)
            assert same_bits(found["total"], want["total"]) and same_bits(found["out"], want["out"])
            room = {"out": poison(*arranged_shape(rows, width))}
            arranged = lab.launch(arrange, room, x=want["out"])["out"]
            found = lab.launch(norm_add.norm_add, outs | room, **given, arranged=True)
            assert same_bits(found["total"], want["total"]) and same_bits(found["out"], arranged)


def check_norm_add_twice(lab: Lab, rows: int, width: int, dtype: torch.dtype, weight_dtype: torch.dtype = BF16) -> None:
    """Compare two sums, of which the first is normed, with one launch for each sum, bit for bit."""
    x, residual, stream = (torch.randn(rows, width) * 3 for _ in range(3))
    given: dict[str, Any] = {"x": x.to(dtype), "residual": residual.to(BF16), "eps": EPS}
    own, between, following = (weights(width, weight_dtype) for _ in range(3))
    after: dict[str, Any] = {"scalar": torch.tensor([0.7]), "next_weight": following, "next_eps": 2 * EPS}
    for live in (None, flags(rows)):
        room = {"total": poison(rows, width), "out": poison(rows, width)}
        norms = {"weight": own, "next_weight": between, "next_eps": 3 * EPS, "row_live": live}
        first = lab.launch(norm_add.norm_add, room, **given, **norms)
        added = {"x": first["out"], "weight": None, "residual": stream.to(BF16), "row_live": live}
        want = lab.launch(norm_add.norm_add, room, **added, **after)
        twice = {"weight": own, "sum_weight": between, "sum_eps": 3 * EPS, "stream": stream.to(BF16), "row_live": live}
        for early in (False, True):
            found = lab.launch(norm_add.norm_add, room, **given, **twice, **after, triggers_first=early)
            assert same_bits(found["total"], want["total"]) and same_bits(found["out"], want["out"])


def check_per_layer(lab: Lab, rows: int, layers: int, size: int, dtype: torch.dtype = BF16) -> None:
    """The inputs of all layers, and the gate of one."""
    width = layers * size
    projected, embedded = torch.randn(rows, width) * 20, torch.randn(rows, width).to(BF16)
    for live in (None, flags(rows)):
        given: dict[str, Any] = {
            "projected": projected,
            "embedded": embedded,
            "weight": weights(size, dtype),
            "row_live": live,
        }
        outs = {"out": poison(rows, width)}
        lab.both("per_layer_inputs", per_layer.per_layer_inputs, outs, **given, scale=0.0625, eps=EPS)
        given = {"gate": torch.randn(rows, size) * 3, "inputs": embedded, "row_live": live, "layer": layers - 1}
        lab.both("per_layer_gate", per_layer.per_layer_gate, {"out": poison(rows, size)}, **given)


def check_markov_heads(lab: Lab, wide: int, width: int, rank: int) -> None:
    """The gate of DSpark's bias."""
    batch, block, row = 3, 4, 2
    known, live = torch.randn(batch * wide, rank).to(BF16), flags(batch * wide).reshape(batch, wide)
    reads = {"token_gate": torch.randn(batch * wide, rank) * 3, "state_gate": torch.randn(batch * block, rank) * 3}
    outs = {"out": poison(batch * wide, rank)}
    lab.both("markov_gate", markov.markov_gate, outs, x=known, row_live=live, row=row, **reads)


def check_identity(lab: Lab, count: int) -> None:
    """Every dtype, sizes that 16 bytes do not divide, addresses that are not multiples of it, and no element at all."""
    for size, dtype in ((count, BF16), (count + 1, torch.uint8), (3, torch.int64), (count, torch.float32), (0, BF16)):
        x = torch.randint(0, 200, (size,)).to(dtype)
        assert torch.equal(lab.launch(elementwise.identity, {"out": poison(size, dtype=dtype)}, x=x)["out"].cpu(), x)
    inside, around = torch.randint(0, 99, (count,)).int(), poison(count + 3, dtype=torch.int32)

    def shifted(*, x: torch.Tensor, out: torch.Tensor) -> list[KernelCall]:
        return elementwise.identity(x, out=out[1:-2])

    found = lab.launch(shifted, {"out": around}, x=inside)["out"].cpu()
    assert torch.equal(found, torch.cat((around[:1], inside, around[-2:])))


def check_norms(lab: Lab, rows: int, width: int, dtype: torch.dtype = BF16) -> None:
    """rms_norm in its promised order, whatever the scale of a row and the dtype of the weight."""
    x, weight = (torch.randn(rows, width) * torch.logspace(-3, 3, rows)[:, None]).to(BF16), weights(width, dtype)
    live, normed = flags(rows), canonical_norm(x, weight, EPS)
    outs = {"out": poison(rows, width)}
    found = lab.both("rms_norm", norm.rms_norm, outs, x=x, weight=weight, row_live=live, eps=EPS)["out"]
    assert same_bits(found, torch.where(live[:, None] != 0, normed, 0))
    assert same_bits(lab.launch(norm.rms_norm, outs, x=x, weight=weight, eps=EPS)["out"], normed)


def check_permutation(lab: Lab, width: int) -> None:
    """The promised order shows where eps takes nearly all of the mean away: an ulp of the sum then moves every bit."""
    count = torch.tensor(float(width))
    x = torch.randn(1, width).to(BF16)
    while torch.equal(total_of_squares(x) / count, total_of_squares(x, (1, 2, 4, 8, 16)) / count):
        x = torch.randn(1, width).to(BF16)
    mean = total_of_squares(x) / count
    eps = -float(mean * torch.tensor(1 - 2.0**-20))
    weight, outs = weights(width), {"out": poison(1, width)}
    found = lab.launch(norm.rms_norm, outs, x=x, weight=weight, eps=eps)["out"]
    assert same_bits(found, canonical_norm(x, weight, eps))


def check_split_norms(lab: Lab, rows: int, parts: int, width: int, dtype: torch.dtype = BF16) -> None:
    """More parts than one launch takes, too."""
    named = {f"weight{part}": weights(width, dtype) for part in range(parts)}
    x, outs = torch.randn(rows, parts * width).to(BF16), {"out": poison(rows, parts * width)}
    lab.both("split_norms", norm.split_norms, outs, x=x, row_live=flags(rows), eps=EPS, **named)


def check_add_norm(lab: Lab, rows: int, width: int, dtype: torch.dtype, weight_dtype: torch.dtype = BF16) -> None:
    """A residual sum bit for bit, and its norm."""
    a, b = torch.randn(rows, width).to(BF16), torch.randn(rows, width).to(dtype)
    weight, live = weights(width, weight_dtype), flags(rows)
    outs = {"total": poison(rows, width), "out": poison(rows, width)}
    expected = {key: tensor.clone() for key, tensor in outs.items()}
    OPERATIONS["add"](a, b, out=expected["total"])
    OPERATIONS["rms_norm"](expected["total"], weight, live, out=expected["out"], eps=EPS)
    found = lab.launch(norm.add_norm, outs, a=a, b=b, weight=weight, row_live=live, eps=EPS)
    check("add_norm", found, expected)
    assert same_bits(found["total"], expected["total"])
    normed = canonical_norm(expected["total"], weight, EPS)
    assert same_bits(found["out"], torch.where(live[:, None] != 0, normed, 0))


def canonical_logits(normed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Logits [M, E] float32 of bf16 rows [M, N], every sum rounded in the order that `router_logits` promises."""
    pad = (0, -normed.shape[1] % 1024)
    rows, columns = (torch.nn.functional.pad(each, pad).double() for each in (normed, weight))
    totals = torch.zeros(normed.shape[0], weight.shape[0], 4, 32)
    for x, w in zip(rows.split(1024, 1), columns.split(1024, 1), strict=True):
        mine, theirs = x.view(-1, 1, 4, 32, 8), w.view(1, -1, 4, 32, 8)
        for column in range(8):
            totals = (mine[..., column] * theirs[..., column] + totals.double()).float()
    for offset in (16, 8, 4, 2, 1):
        totals = totals + totals[..., torch.arange(32) ^ offset]
    total = totals[:, :, 0, 0]
    for quarter in range(1, 4):
        total = total + totals[:, :, quarter, 0]
    return total + bias.float()


def route(lab: Lab, options: dict[str, Any]) -> Arrays:
    """The router's two results."""
    rows, experts = options["x"].shape[0], options["weight"].shape[0]
    outs = {"normed": poison(*options["x"].shape), "logits": poison(rows, experts, dtype=torch.float32)}
    return lab.launch(normed_logits, outs, **options)


def check_router_alone(lab: Lab, rows: int, width: int, experts: int) -> None:
    """The logits of rows that are normed already are those of the norm and the router together, bit for bit."""
    options = router_inputs(rows, width, experts)
    together, logits = route(lab, options), {"logits": poison(rows, experts, dtype=torch.float32)}
    given = {"x": together["normed"].cpu(), "weight": options["weight"], "bias": options["bias"]}
    assert torch.equal(lab.launch(router.router_logits, logits, **given)["logits"], together["logits"])


def normed_logits(
    *, norm_weight: torch.Tensor, row_live: torch.Tensor | None, normed: torch.Tensor, **more: Any
) -> list[KernelCall]:
    """Logits with the norm before them."""
    return router.router_logits(norm=router.RouterNorm(norm_weight, EPS, normed, row_live), **more)


def router_inputs(rows: int, width: int, experts: int, dtype: torch.dtype = BF16) -> Arrays:
    """Random rows, some dead, and a router two of whose experts are alike where it has as many."""
    weight, bias = (torch.randn(experts, width) / width**0.5 * 3).to(BF16), torch.randn(experts).to(BF16)
    weight[-1], bias[-1] = weight[experts // 2], bias[experts // 2]
    x = (torch.randn(rows, width) * torch.logspace(-2, 2, rows)[:, None]).to(BF16)
    norm_weight = weights(width, dtype)
    return {"x": x, "norm_weight": norm_weight, "weight": weight, "bias": bias, "row_live": flags(rows)}


def check_router(lab: Lab, rows: int, width: int, experts: int, dtype: torch.dtype = BF16) -> None:
    """The norm and the logits bit for bit, and the logits close to the exact ones; of a dead row they are the bias."""
    options = router_inputs(rows, width, experts, dtype)
    normed, live = canonical_norm(options["x"], options["norm_weight"], EPS), options["row_live"]
    alive = torch.where(live[:, None] != 0, normed, 0)
    for flags_or_none, want in ((live, alive), (None, normed)):
        found = {key: tensor.cpu() for key, tensor in route(lab, {**options, "row_live": flags_or_none}).items()}
        assert same_bits(found["normed"], want)
        logits = found["logits"]
        assert torch.equal(logits, canonical_logits(want, options["weight"], options["bias"]))
        assert torch.equal(logits[:, -1], logits[:, experts // 2])
        exact = want.double() @ options["weight"].double().t() + options["bias"].double()
        assert float((logits.double() - exact).norm()) <= 1e-5 * float(exact.norm())


def check_router_extremes(lab: Lab, width: int) -> None:
    """NaN stays in its row; what is infinite in the bias is so in the logits."""
    options = router_inputs(4, width, 9)
    options["row_live"] = torch.ones(4, dtype=torch.uint8)
    options["weight"][:] = 0
    options["bias"][:] = torch.tensor([-1.0, 0.0, torch.inf, 2.0, 0.0, -torch.inf, 0.0, -3.0, 0.0])
    options["x"][1, 3] = torch.nan
    logits = route(lab, options)["logits"].cpu()
    assert torch.equal(logits[[0, 2, 3]], options["bias"].float().expand(3, -1))
    assert bool(logits[1].isnan().all())


def check_router_fills(lab: Lab, rows: int, width: int, experts: int, chunks: int) -> None:
    """Three buffers of so many times 16 bytes a row are all ones, and nothing next to; the results are as without."""
    options = router_inputs(rows, width, experts)
    outs = {"normed": poison(rows, width), "logits": poison(rows, experts, dtype=torch.float32)}
    outs |= {"halves": poison(rows + 2, 8 * chunks), "words": poison(rows + 2, 4 * chunks, dtype=torch.float32)}
    outs["others"] = poison(rows + 2, 4, dtype=torch.float32)

    def filling(*, halves: torch.Tensor, words: torch.Tensor, others: torch.Tensor, **more: Any) -> list[KernelCall]:
        return normed_logits(awaited=(halves[1:-1], words[1:-1], others[1:-1]), **more)

    found = {key: tensor.cpu() for key, tensor in lab.launch(filling, outs, **options).items()}
    plain = route(lab, options)
    assert same_bits(found["normed"], plain["normed"])
    assert torch.equal(found["logits"], plain["logits"].cpu())
    for name, kind in (("halves", torch.int16), ("words", torch.int32), ("others", torch.int32)):
        filled, before = found[name].view(kind), outs[name].view(kind)
        assert bool((filled[1:-1] == -1).all())
        assert torch.equal(filled[[0, -1]], before[[0, -1]])


def check_embeddings(
    lab: Lab, rows: int, width: int, vocabulary: int, dtype: torch.dtype = BF16, scale: float | None = None
) -> None:
    """Both layouts, dead rows, the norm after; rows as they are, or times a scale."""
    table, tokens = torch.randn(vocabulary, width).to(BF16), torch.randint(-1, vocabulary, (1, rows)).int()
    tokens[0, 0], tokens[0, -1] = vocabulary - 1, -1
    weight, live = weights(width, dtype), flags(rows)
    expected = {"out": poison(rows, width), "normed": poison(rows, width)}
    outs = {key: tensor.clone() for key, tensor in expected.items()}
    OPERATIONS["embed"](tokens, table, out=expected["out"], scale=scale)
    OPERATIONS["rms_norm"](expected["out"], weight, live, out=expected["normed"], eps=EPS)
    normed = torch.where(live[:, None] != 0, canonical_norm(expected["out"], weight, EPS), 0)
    on_device: torch.Tensor = lab.place(table)
    for layout in (on_device, pack(on_device)):
        found = lab.launch(
            embed.embed_norm, outs, tokens=tokens, weight=layout, norm_weight=weight, row_live=live, eps=EPS,
            scale=scale,
        )  # fmt: skip
        check("embed_norm", found, expected)
        assert same_bits(found["out"], expected["out"])
        assert same_bits(found["normed"], normed)
        alone = lab.launch(embed.embed, {"out": outs["out"]}, tokens=tokens, weight=layout, scale=scale)
        assert same_bits(alone["out"], expected["out"])
    check_masks(lab, 3, rows, table, weight)


def check_masks(lab: Lab, batch: int, count: int, table: torch.Tensor, weight: torch.Tensor) -> None:
    """A block of masks after the last known token, embedded and normed: what the operations make one by one."""
    width, accepted = table.shape[1], 3
    reads = {
        "accepted_tokens": torch.randint(0, table.shape[0], (batch, accepted)).int(),
        "commit_lens": torch.tensor([accepted, 1, 0])[:batch].int(),
        "draft_live": torch.tensor([1, 1, 0])[:batch].to(torch.uint8),
        "draft_lens": torch.randint(3, 1000, (batch,)).int(),
    }
    want = unwritten("mask_rows", reads, R=count)
    want |= {"out": poison(batch * count, width), "normed": poison(batch * count, width)}
    outs = {name: tensor.clone() for name, tensor in want.items()}
    made = {name: want[name] for name in ("tokens", "positions", "row_live", "write_lens")}
    OPERATIONS["mask_rows"](**reads, **made, mask_token=5)
    OPERATIONS["embed"](want["tokens"], table, out=want["out"])
    live = want["row_live"].reshape(-1, 1) != 0
    want["normed"] = torch.where(live, canonical_norm(want["out"], weight, EPS), 0)
    on_device: torch.Tensor = lab.place(table)
    for layout in (on_device, pack(on_device)):
        given = {"weight": layout, "norm_weight": weight, "mask_token": 5, "eps": EPS}
        found = lab.launch(draft_block.mask_input, outs, **reads, **given)
        check("mask_input", found, want)
        assert same_bits(found["out"], want["out"]) and same_bits(found["normed"], want["normed"])


def check_local_conv(lab: Lab, rows: int, width: int, group: int, taps: int) -> None:
    """Both sides of a sublayer, of blocks in which some are dead, to the bit of the reference."""
    batch = 3
    live = torch.ones(batch, rows, dtype=torch.uint8)
    live[1] = 0
    options = {
        "coefficients": torch.randn(batch * rows, 2 * taps * (width // group)),
        "row_live": live,
        "weight": torch.randn(2, taps, width).to(BF16),
        "group": group,
    }
    for side, dtype in ((0, BF16), (1, torch.float32)):
        x = (torch.randn(batch * rows, width) * 9).to(dtype)
        outs = {"out": poison(batch * rows, width, dtype=dtype)}
        found = lab.both("local_conv", local_conv.local_conv, outs, x=x, side=side, **options)
        expected = torch.empty(batch * rows, width, dtype=dtype)
        OPERATIONS["local_conv"](x=x, side=side, out=expected, **options)
        assert same_bits(found["out"].cpu(), expected) and not found["out"].cpu().view(batch, rows, -1)[1].any()


def check_walk(lab: Lab, rows: int, ranks: int, rank: int, first_row: int) -> None:
    """The chains of the reference, that of a slot that is dead, and one that a row without candidates ends."""
    batch, vocabulary, nodes = 4, 67, 20
    candidates = torch.stack([torch.randperm(vocabulary)[:ranks] for _ in range(batch * rows)]).int()
    tokens = torch.randint(0, vocabulary, (batch, rows)).int()
    tokens[1] = -1
    candidates.view(batch, rows, ranks)[1] = -1
    candidates.view(batch, rows, ranks)[2, first_row + 1] = -1
    reads = {
        "candidates": candidates,
        "scores": -8 * torch.rand(batch * rows, ranks),
        "hidden": torch.randn(batch * rows, rank),
        "tokens": tokens,
        "predecessors": torch.randn(vocabulary, rank).to(BF16),
        "successors": torch.randn(vocabulary, rank).to(BF16),
        "first_row": first_row,
    }
    expected = torch.full((batch, nodes), 7, dtype=torch.int32)
    outs = {"draft_nodes": expected.clone()}
    OPERATIONS["walk_candidates"](**reads, draft_nodes=expected)
    found = lab.launch(local_conv.walk_candidates, outs, **reads)["draft_nodes"].cpu()
    assert torch.equal(found, expected)
    drafted = expected[:, 1 : rows - first_row + 1]
    assert (drafted[1] == -1).all() and drafted[2, 0] >= 0 and (drafted[2, 1:] == -1).all() and (drafted[0] >= 0).all()
