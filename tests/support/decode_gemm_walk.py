"""Decode's GEMM walked thread by thread: its modules, a plan with changes, and products in float64."""

import dataclasses
from types import ModuleType
from typing import Any

import torch
from kernel_walk import Walker, walkable

from lowlat.kernels.toolchain.kernel import Gpu

SMALL = Gpu(2, 227 * 1024, (9, 0))


def walked(walker: Walker) -> Any:
    return walkable(walker, "gemm.decode.gemm")


def run(walker: Walker, modules: list[ModuleType], changes: dict[str, int], **arguments: Any) -> None:
    thin = modules[-1]
    plan = thin.plan_decode_gemm(arguments["x"].shape[0], arguments["weight"].rows, SMALL)
    for call in thin.decode_gemm(**arguments, gpu=SMALL, plan=dataclasses.replace(plan, **changes)):
        walker.run(call)


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).bfloat16()


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.double().t()
