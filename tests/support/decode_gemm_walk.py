"""Decode's GEMM walked thread by thread: its modules, a plan with changes, and products in float64."""

import dataclasses
from types import ModuleType
from typing import Any

import torch
from kernel_walk import Walker, walkable

from lowlat.kernels.toolchain.kernel import Gpu

SHARED = tuple(f"common.{name}" for name in ("activation", "pipeline", "kv_codes", "norm_math", "norm_row"))
PEERS = tuple(f"collectives.peers.{name}" for name in ("chunk", "words", "rows"))
PARTS = ("k_parts", "decode.plan", "decode.norm_prologue", "decode.group_product", "decode.mainloop")
ENDS = ("all_reduce_epilogue", "rotated_epilogue", "value_epilogue", "epilogue", "shared_rows", "gemm")
NAMES = (
    *(*SHARED, "elementwise.norm", "sampling.select", *PEERS, "formats.fragment"),
    *(f"gemm.{part}" for part in (*PARTS, "decode.partial_argmax", "decode.epilogue_parts")),
    *(f"gemm.decode.{part}" for part in ENDS),
)
SMALL = Gpu(2, 227 * 1024, (9, 0))


def walked(walker: Walker) -> Any:
    return walkable(walker, *NAMES)


def run(walker: Walker, modules: list[ModuleType], changes: dict[str, int], **arguments: Any) -> None:
    thin = modules[-1]
    plan = thin.plan_decode_gemm(arguments["x"].shape[0], arguments["weight"].rows, SMALL)
    for call in thin.decode_gemm(**arguments, gpu=SMALL, plan=dataclasses.replace(plan, **changes)):
        walker.run(call)


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).bfloat16()


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.double().t()
