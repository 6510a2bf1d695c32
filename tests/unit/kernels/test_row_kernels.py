"""The row-wise kernels without a GPU: what they compile to, what they refuse, and what the simulator can run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compiled_examples import Compiled
from stages import later, wide

from lowlat.errors import ShapeError
from lowlat.kernels.elementwise import arranged_norm, elementwise, embed, norm, norm_add, per_layer, qk_norm, rotate
from lowlat.kernels.elementwise.limits import MAX_WIDTH
from lowlat.kernels.moe import router
from lowlat.kernels.speculation import draft_input as draft_input

BF16 = torch.bfloat16
MODULES = (arranged_norm, elementwise, embed, draft_input, norm, norm_add, per_layer, qk_norm, rotate)


def tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def ints(*shape: int) -> torch.Tensor:
    return tensor(*shape, dtype=torch.int32)


@pytest.mark.parametrize("stage", ["first", later("second"), wide("wide")])
def test_registers_stack_and_wide_loads(stage: str, compiled: Compiled) -> None:
    for kernel, made, ptx in compiled.each(stage, *MODULES):
        assert made.stack_bytes == 0, kernel.name
        # two such blocks on an SM, and room for the next kernel's
        assert made.registers * kernel.threads <= 64 * 512, kernel.name
        assert ".local" not in ptx, kernel.name
        assert "ld.global.v4" in ptx or "ld.global.nc.L1::no_allocate.L2::128B.v4" in ptx, kernel.name
        before, after = ptx.split("griddepcontrol.wait;")
        assert "st.global" not in before, kernel.name
        first = kernel.name.endswith("_first")
        assert "griddepcontrol.launch_dependents;" in (before if first else after), kernel.name


def test_one_launch_each() -> None:
    x, weight = tensor(3, 64), tensor(64)
    assert len(norm.rms_norm(x, weight, out=x, eps=1e-5)) == 1
    assert (
        len(norm.split_norms(tensor(3, 192), out=tensor(3, 192), eps=1e-5, **{f"weight{k}": weight for k in range(3)}))
        == 1
    )
    assert len(embed.embed(ints(3), tensor(9, 64), out=x)) == 1
    (call,) = rotate.rotate(
        tensor(3, 6 * 16, dtype=torch.float32),
        ints(3),
        tensor(9, 8, dtype=torch.float32),
        tensor(9, 8, dtype=torch.float32),
        q=tensor(3, 2, 16),
        k=tensor(3, 2, 16),
        v=tensor(3, 2, 16),
    )
    assert call.grid == (3, 2, 1)


def test_norms_refuse_what_does_not_fit() -> None:
    with pytest.raises(ShapeError, match="multiple of 8"):
        norm.rms_norm(tensor(3, 63), tensor(63), out=tensor(3, 63), eps=1e-5)
    with pytest.raises(ShapeError, match="at most"):
        norm.check_width(MAX_WIDTH + 8)


def test_a_router_fills_whole_chunks_alone() -> None:
    x, logits = tensor(3, 64), tensor(3, 5, dtype=torch.float32)
    for place in range(3):
        awaited = tuple(tensor(3, 6 if number == place else 8) for number in range(3))
        with pytest.raises(ShapeError, match="must be of a multiple of 16 bytes, got 36"):
            router.router_logits(x, tensor(5, 64), tensor(5), logits=logits, awaited=awaited)


def test_dtypes_are_checked() -> None:
    x, wide = tensor(3, 64), tensor(3, 64, dtype=torch.float32)
    with pytest.raises(ShapeError, match="x must be"):
        norm.rms_norm(wide, tensor(64), out=x, eps=1e-5)
    with pytest.raises(ShapeError, match="tokens must be"):
        embed.embed(torch.zeros(3, dtype=torch.int64), tensor(9, 64), out=x)
    with pytest.raises(ShapeError, match="out must be"):
        elementwise.cast(x, out=wide)
    with pytest.raises(ShapeError, match="gate_up must be"):
        elementwise.silu_mul(tensor(3, 128), out=x)
    with pytest.raises(ShapeError, match="b must be"):
        elementwise.add_gated(wide, x, tensor(3, 1, dtype=torch.float32), out=wide)


def test_a_shared_expert_is_added_by_one_gate_a_row() -> None:
    wide, odd = tensor(3, 64, dtype=torch.float32), tensor(3, 60, dtype=torch.float32)
    with pytest.raises(ShapeError, match="gate must be float32"):
        elementwise.add_gated(wide, wide, wide, out=wide)
    with pytest.raises(ShapeError, match="multiple of 8, got 60"):
        elementwise.add_gated(odd, odd, tensor(3, 1, dtype=torch.float32), out=odd)


def test_rotate_refuses_what_does_not_go_together() -> None:
    table, cache = tensor(9, 8, dtype=torch.float32), tensor(5, 2, 4, 16)
    qkv, k = tensor(3, 4 * 16, dtype=torch.float32), tensor(3, 2, 16)
    positions = ints(3)
    with pytest.raises(ShapeError, match="nothing to rotate"):
        rotate.rotate(qkv, positions, table, table)
    with pytest.raises(ShapeError, match="partner"):
        rotate.rotate(qkv, positions, table, table, k=k)
    with pytest.raises(ShapeError, match="not to both"):
        rotate.rotate(qkv, positions, table, table, k=k, v=k, k_cache=cache, v_cache=cache)
    with pytest.raises(ShapeError, match="a KV write needs"):
        rotate.rotate(qkv, positions, table, table, k_cache=cache, v_cache=cache)
    with pytest.raises(ShapeError, match="k_weight"):
        rotate.rotate(qkv, positions, table, table, k=k, v=k, eps=1e-6)
    with pytest.raises(ShapeError, match="head_dim"):
        rotate.rotate(qkv, positions, table, table, q=tensor(3, 2, 12))


@pytest.mark.wide
@pytest.mark.timeout(600)
def test_results_in_the_simulator(repository: Path) -> None:
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": str(repository / "tests" / "support")}
    script = Path(__file__).with_name("row_kernels_simulated.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "all passed" in done.stdout
