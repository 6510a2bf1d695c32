"""Rotation of queries and keys and the write to caches against the reference; see `rowwise_cases`."""

from typing import Any

import torch
from kv_write_cases import Chunk
from rowwise_cases import Arrays, Lab, check, flags, poison, same_bits, weights

from lowlat.kernels.attention import kv_write
from lowlat.kernels.elementwise import qk_norm, rotate
from lowlat.kernels.reference import OPERATIONS
from lowlat.kernels.speculation import draft_input as draft_input
from lowlat.kernels.toolchain.kernel import KernelCall


def check_rotate(
    lab: Lab,
    heads: tuple[int, int, int],
    eps: float | None,
    *,
    batch: int = 2,
    rows: int = 2,
    block: int = 12,
    turning: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    **values: bool,
) -> None:
    """Queries, KV heads and their size; buffers, then caches. The norm and the rotation alone have the bits of both.

    turning  elements of a head that turn; 0: all
    dtype    of the norm's weights
    values   v_norm and keys_as_values, with eps
    """
    queries, groups, dim = heads
    count, contexts, live = batch * rows, 64, flags(batch * rows).view(batch, rows)
    live[-1] = 1
    if batch > 2:
        live[1] = 0  # a slot that pads
    given = queries + (1 if values.get("keys_as_values") else 2) * groups
    qkv, angles = torch.randn(count, given * dim), torch.rand(contexts, (turning or dim) // 2) * 6
    options: dict[str, Any] = {
        "positions": torch.where(live != 0, torch.randint(0, contexts, (batch, rows)), 0).int(),
        "cos": angles.cos(),
        "sin": angles.sin(),
    }
    norms = {"q_weight": weights(dim, dtype), "k_weight": weights(dim, dtype), "row_live": live}
    outs = {"q": poison(count, queries, dim)} if queries else {}
    if groups:
        outs |= {"k": poison(count, groups, dim), "v": poison(count, groups, dim)}
    expected = {key: tensor.clone() for key, tensor in outs.items()}
    product = qkv
    if eps is not None:
        sizes: dict[str, Any] = {"num_heads": queries, "num_kv_heads": groups, "head_dim": dim, "eps": eps}
        wide = {"out": poison(count, (queries + 2 * groups) * dim, dtype=torch.float32)}
        product = lab.both("qk_norm", qk_norm.qk_norm, wide, qkv=qkv, **norms, **sizes, **values)["out"].cpu()
        first = (given - groups) * dim
        assert values.get("v_norm") or torch.equal(product[:, (queries + groups) * dim :], qkv[:, first:])
    OPERATIONS["rope"](product, **options, **expected)
    alone = lab.launch(rotate.rotate, outs, qkv=product, **options)
    assert all(same_bits(alone[key], expected[key]) for key in outs)
    found = lab.launch(rotate.rotate, outs, qkv=qkv, **options, **norms, eps=eps, **values)
    check(f"rotate {heads}", found, expected)
    assert all(same_bits(found[key], alone[key]) for key in outs)
    early = lab.launch(rotate.rotate, outs, qkv=qkv, **options, **norms, eps=eps, **values, triggers_first=True)
    assert all(same_bits(early[key], alone[key]) for key in outs)
    if groups:
        outs.pop("k"), outs.pop("v")
        check_write(lab, outs, found, block, qkv=qkv, **options, **norms, eps=eps, **values)


def check_write(lab: Lab, outs: Arrays, found: Arrays, block: int, **options: Any) -> None:
    """Keys and values in the caches have the bits that they have in buffers; nothing else is written."""
    live, table_width = options["row_live"], 6
    batch, rows = live.shape
    slots = torch.randperm(batch + 1)[:batch]
    write = {
        "block_table": torch.randperm((batch + 1) * table_width).reshape(batch + 1, table_width).int(),
        "slots": torch.where(live.sum(1) == 0, -1, slots).int(),
        "write_lens": torch.randint(0, (table_width - 1) * block - rows, (batch,)).int(),
        "offsets": torch.randperm(rows + 2)[:rows].int(),
    }
    _, groups, dim = found["k"].shape
    caches = {name: poison((batch + 1) * table_width, groups, block, dim) for name in ("k_cache", "v_cache")}
    expected = {key: tensor.clone() for key, tensor in caches.items()}
    OPERATIONS["kv_write"](found["k"].cpu(), found["v"].cpu(), row_live=live, **write, **expected)
    written = lab.launch(rotate.rotate, outs | caches, **options, **write)
    for key in caches:
        assert same_bits(written[key].nan_to_num(7), expected[key].nan_to_num(7)), key
    if outs:
        assert same_bits(written["q"], found["q"])
    write["kv_scales"] = torch.rand(2, groups).bfloat16().float() + 2**-9
    codes = {key: torch.zeros(each.shape, dtype=torch.uint8) for key, each in caches.items()}
    expected = {key: each.clone() for key, each in codes.items()}
    OPERATIONS["kv_write"](found["k"].cpu(), found["v"].cpu(), row_live=live, **write, **expected)
    written = lab.launch(rotate.rotate, outs | codes, **options, **write, triggers_first=True)
    assert all(same_bits(written[key], expected[key]) for key in codes)


def check_layers(
    lab: Lab,
    layers: int,
    heads: tuple[int, int],
    eps: float | None,
    *,
    chunk: bool = False,
    coded: bool = False,
    turning: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    **values: bool,
) -> None:
    """Keys and values of layers side by side have the bits of each layer's alone, of a step's rows and of a chunk's.

    values  v_norm and keys_as_values, with eps
    """
    (groups, dim), contexts = heads, 64
    if chunk:
        write = Chunk(5, 8, 3, heads=groups, block=8, dim=dim, coded=coded).arrays()
        rows, shape = 5, write["k_cache"].shape
        for name in ("k", "v", "k_cache", "v_cache", "kv_scales"):
            write.pop(name, None)
    else:
        rows, shape = 6, torch.Size((12, groups, 12, dim))
        write = {
            "row_live": flags(rows).view(3, 2),
            "block_table": torch.randperm(12).reshape(4, 3).int(),
            "slots": torch.tensor([2, -1, 0]).int(),
            "write_lens": torch.randint(0, 24, (3,)).int(),
            "offsets": torch.tensor([1, 0]).int(),
        }
        write["row_live"][1] = 0
    qkv, angles = (
        torch.randn(rows, layers, (1 if values.get("keys_as_values") else 2) * groups * dim),
        torch.rand(contexts, (turning or dim) // 2) * 6,
    )
    shared = {"positions": torch.randint(0, contexts, (rows,)).int(), "cos": angles.cos(), "sin": angles.sin(), **write}
    empty = torch.zeros(shape, dtype=torch.uint8) if coded else poison(*shape)
    own = [{} if eps is None else {"k_weight": weights(dim, dtype)} for _ in range(layers)]
    for each in own:
        each |= {"kv_scales": torch.rand(2, groups).bfloat16().float() + 2**-9} if coded else {}
    want = [
        lab.launch(
            rotate.rotate,
            {"k_cache": empty, "v_cache": empty},
            qkv=qkv[:, layer],
            **shared,
            **own[layer],
            eps=eps,
            **values,
        )
        for layer in range(layers)
    ]
    placed = [{name: lab.place(each) for name, each in layer.items()} for layer in own]
    kept = list[torch.Tensor]()

    def workspace(_: str, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        kept.append(torch.zeros(size, dtype=dtype, device=lab.device))
        return kept[-1]

    def build(**given: Any) -> list[KernelCall]:
        caches = [{f"{part}_cache": given.pop(f"{part}{layer}") for part in "kv"} for layer in range(layers)]
        made = [rotate.LayerKV(**cache, **placed[layer]) for layer, cache in enumerate(caches)]
        return rotate.rotate_layers(**given, layers=made, workspace=workspace)

    outs = {f"{part}{layer}": empty for layer in range(layers) for part in "kv"}
    found = lab.launch(build, outs, qkv=qkv.reshape(rows, -1), **shared, eps=eps, **values)
    for layer, each in enumerate(want):
        for part in "kv":
            got = found[f"{part}{layer}"].cpu().view(torch.uint8)
            assert torch.equal(got, each[f"{part}_cache"].cpu().view(torch.uint8)), (layer, part)


def check_chunk_write(
    lab: Lab,
    heads: tuple[int, int, int],
    eps: float | None,
    chunk: tuple[int, int, int],
    *,
    coded: bool = False,
    turning: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    **values: bool,
) -> None:
    """A chunk of prefill has the bits of norm, rotation and KV write one by one, dead rows' queries too.

    chunk   rows, start and live rows
    values  v_norm and keys_as_values, with eps
    """
    queries, groups, dim = heads
    rows, contexts = chunk[0], 64
    write = Chunk(*chunk, heads=groups, block=8, dim=dim, coded=coded).arrays()
    caches = {key: write.pop(key) for key in ("k_cache", "v_cache")}
    del write["k"], write["v"]
    given = queries + (1 if values.get("keys_as_values") else 2) * groups
    qkv, angles = torch.randn(rows, given * dim), torch.rand(contexts, (turning or dim) // 2) * 6
    options: dict[str, Any] = {
        "positions": torch.randint(0, contexts, (rows,)).int(), "cos": angles.cos(), "sin": angles.sin()
    }  # fmt: skip
    norms, product = {"q_weight": weights(dim, dtype), "k_weight": weights(dim, dtype)}, qkv
    if eps is not None:
        sizes: dict[str, Any] = {"num_heads": queries, "num_kv_heads": groups, "head_dim": dim, "eps": eps}
        wide = {"out": poison(rows, (queries + 2 * groups) * dim, dtype=torch.float32)}
        product = lab.launch(qk_norm.qk_norm, wide, qkv=qkv, **norms, **sizes, **values)["out"]
    outs = {"q": poison(rows, queries, dim)} if queries else {}
    kept = {"k": poison(rows, groups, dim), "v": poison(rows, groups, dim)}
    alone = lab.launch(rotate.rotate, outs | kept, qkv=product, **options)
    want = lab.launch(kv_write.prefill_kv_write, caches, k=alone["k"], v=alone["v"], **write)
    found = lab.launch(rotate.rotate, outs | caches, qkv=qkv, **options, **norms, **write, eps=eps, **values)
    for key, each in {**want, **{key: alone[key] for key in outs}}.items():
        assert torch.equal(found[key].cpu().view(torch.uint8), each.cpu().view(torch.uint8)), key
