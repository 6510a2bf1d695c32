"""RoPE on a GPU with the norm of heads before it and the KV write after it."""

from typing import Any

import pytest
import torch
from rotation_cases import check_chunk_write, check_layers, check_rotate
from rowwise_cases import Lab, poison, same_bits, weights

from lowlat.kernels.elementwise.rotate import rotate

HEADS = [(32, 8, 128), (64, 8, 64), (4, 2, 256), (6, 2, 40), (3, 1, 8), (32, 0, 128), (0, 8, 128)]


@pytest.mark.parametrize("eps", [None, 1e-6])
@pytest.mark.parametrize("heads", HEADS)
def test_against_the_reference(lab: Lab, heads: tuple[int, int, int], eps: float | None) -> None:
    check_rotate(lab, heads, eps, batch=3, rows=4, block=12)
    check_rotate(lab, heads, eps, batch=1, rows=1, block=32)


@pytest.mark.parametrize("eps", [None, 1e-6])
@pytest.mark.parametrize(
    ("heads", "turning"), [((16, 2, 256), 64), ((24, 4, 256), 0), ((6, 2, 40), 32), ((8, 2, 128), 64)]
)
def test_the_first_elements_turn_and_weights_are_wide(
    lab: Lab, heads: tuple[int, int, int], turning: int, eps: float | None
) -> None:
    wide: dict[str, Any] = {"turning": turning, "dtype": torch.float32}
    check_rotate(lab, heads, eps, batch=3, rows=4, block=16, **wide)
    check_layers(lab, 2, heads[1:], eps, **wide)
    for coded in (False, True):
        check_chunk_write(lab, heads, eps, (64, 32, 17), coded=coded and heads[2] % 16 == 0, **wide)


@pytest.mark.parametrize("from_keys", [False, True])
@pytest.mark.parametrize("heads", [(32, 4, 512), (16, 8, 256), (6, 2, 40), (0, 1, 512)])
def test_values_are_normed_or_keys_and_heads_may_be_wide(
    lab: Lab, heads: tuple[int, int, int], from_keys: bool
) -> None:
    kinds: tuple[dict[str, Any], ...] = ({"v_norm": True}, {})
    for values in ({"keys_as_values": from_keys, **each} for each in kinds):
        check_rotate(lab, heads, 1e-6, batch=3, rows=4, block=16, **values)
        check_rotate(lab, heads, 1e-6, batch=1, rows=1, block=32, dtype=torch.float32, **values)
        check_chunk_write(lab, heads, 1e-6, (64, 32, 17), **values)
    check_rotate(lab, (8, 2, 512), None)
    check_rotate(lab, (8, 0, 512), 1e-6)


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("eps", [None, 1e-6])
@pytest.mark.parametrize("heads", [(32, 8, 128), (64, 8, 64), (6, 2, 48), (0, 8, 128)])
def test_rows_of_a_chunk_are_stored_as_one_by_one(
    lab: Lab, heads: tuple[int, int, int], eps: float | None, coded: bool
) -> None:
    for chunk in ((64, 0, 64), (64, 32, 17), (128, 96, 0)):
        check_chunk_write(lab, heads, eps, chunk, coded=coded)


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("chunk", [False, True])
@pytest.mark.parametrize("eps", [None, 1e-6])
def test_layers_side_by_side_are_stored_as_one_by_one(lab: Lab, eps: float | None, chunk: bool, coded: bool) -> None:
    for layers, heads in ((5, (8, 128)), (1, (8, 64)), (2, (2, 48))):
        check_layers(lab, layers, heads, eps, chunk=chunk, coded=coded)
    if eps is not None:
        check_layers(lab, 5, (1, 512), eps, chunk=chunk, coded=coded, v_norm=True, keys_as_values=True)
        check_layers(lab, 3, (8, 256), eps, chunk=chunk, coded=coded, v_norm=True)


def test_a_row_has_the_same_bits_in_any_company(lab: Lab) -> None:
    count, dim = 7, 128
    qkv, angles = torch.randn(count, 12 * dim), torch.rand(64, dim // 2) * 6
    tables = {"cos": angles.cos(), "sin": angles.sin(), "q_weight": weights(dim), "k_weight": weights(dim)}
    positions = torch.randint(0, 64, (count,)).int()

    def run(rows: slice) -> dict[str, torch.Tensor]:
        some = qkv[rows].shape[0]
        outs = {"q": poison(some, 8, dim), "k": poison(some, 2, dim), "v": poison(some, 2, dim)}
        return lab.launch(rotate, outs, qkv=qkv[rows], positions=positions[rows], **tables, eps=1e-6)

    together = run(slice(None))
    for row in (0, 3, 6):
        alone = run(slice(row, row + 1))
        assert all(same_bits(alone[key][0], together[key][row]) for key in alone)
