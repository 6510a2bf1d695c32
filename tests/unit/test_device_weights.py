"""Weights as the kernels read them: packed once, in their products' orders, and given back to prefill as they were."""

import pytest
import torch

from lowlat.errors import ConfigError
from lowlat.executors.workspace import SharedWorkspace
from lowlat.kernels.gemm.packing import PackedMatrix, gate_up_permutation, unpack, unpack_rows
from lowlat.lowering.device_weights import DeviceWeights

CPU = torch.device("cpu")


def matrix(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def source() -> dict[str, torch.Tensor]:
    """A tied embedding, a fused gate and up with bias, a product without order, vectors and a map."""
    table = matrix(97, 64, seed=1)
    return {
        "embed.weight": table,
        "lm_head.weight": table,
        "gate_up.weight": matrix(48, 64, seed=2),
        "gate_up.bias": matrix(48, seed=3),
        "o.weight": matrix(64, 40, seed=4),
        "o.bias": matrix(64, seed=5),
        "norm.weight": matrix(64, seed=6),
        "draft_model.draft_to_target": torch.arange(9, dtype=torch.int32),
        "sinks": matrix(4, seed=7, dtype=torch.float32),
    }


@pytest.fixture
def weights(source: dict[str, torch.Tensor]) -> DeviceWeights:
    matrices = {"lm_head.weight", "gate_up.weight", "o.weight", "absent.weight"}
    return DeviceWeights(source, matrices, CPU, {"gate_up.weight": gate_up_permutation(24)})


def test_every_weight_comes_back_as_it_was(weights: DeviceWeights, source: dict[str, torch.Tensor]) -> None:
    for name, tensor in source.items():
        table = weights.table(name)
        assert torch.equal(unpack(table) if isinstance(table, PackedMatrix) else table, tensor), name


def test_weights_lie_where_they_are_placed(source: dict[str, torch.Tensor]) -> None:
    """Plain, packed, with scales, and shared by two names: each once."""
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    used = 0

    def place(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal used
        start, used = used, used + -(-tensor.nbytes // 16) * 16
        placed = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return placed.copy_(tensor)

    codes = torch.randint(0, 0x70, (32, 64), dtype=torch.uint8)
    every = {**source, "q.fp8": codes, "q.fp8_scales": torch.full((32, 1), 0.5)}
    matrices = {"lm_head.weight", "gate_up.weight", "o.weight", "q.weight"}
    orders = {"gate_up.weight": gate_up_permutation(24)}
    plain, placed = (
        DeviceWeights(every, matrices, CPU, orders),
        DeviceWeights(every, matrices, CPU, orders, place=place),
    )
    begin, end = memory.data_ptr(), memory.data_ptr() + used
    assert all(begin <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= end for tensor in placed.tensors())
    for name in ("gate_up.weight", "q.weight", "lm_head.weight"):
        assert torch.equal(placed.matrix(name).memory.view(torch.uint8), plain.matrix(name).memory.view(torch.uint8))
        scales, expected = placed.matrix(name).scales, plain.matrix(name).scales
        assert (scales is None) == (expected is None)
        assert scales is None or expected is None or torch.equal(scales, expected)
    assert placed.num_bytes == plain.num_bytes and used < placed.num_bytes + 16 * len(every)


def test_rows_of_packed_matrices_are_found_at_their_places(
    weights: DeviceWeights, source: dict[str, torch.Tensor]
) -> None:
    places = weights.places("gate_up.weight")
    assert places is not None and weights.places("gate_up.weight") is places
    assert torch.equal(unpack_rows(weights.matrix("gate_up.weight"))[places], source["gate_up.weight"])
    assert weights.places("o.weight") is None
    assert torch.equal(unpack_rows(weights.matrix("o.weight")), source["o.weight"])
    with pytest.raises(ConfigError, match=r"norm\.weight is missing, or no GEMM reads it"):
        weights.places("norm.weight")


def test_products_find_packed_matrices_and_biases_in_their_order(
    weights: DeviceWeights, source: dict[str, torch.Tensor]
) -> None:
    order = gate_up_permutation(24)
    packed = weights.matrix("gate_up.weight")
    assert torch.equal(unpack(packed), source["gate_up.weight"])
    assert packed.order is not None
    assert torch.equal(packed.order, order)
    assert torch.equal(weights.bias("gate_up.bias"), source["gate_up.bias"][order])
    assert weights.bias("gate_up.bias") is weights.bias("gate_up.bias")  # an address that graphs may hold
    assert torch.equal(weights.bias("o.bias"), source["o.bias"])
    assert weights.matrix("o.weight").order is None
    assert weights.vector("norm.weight").is_contiguous()


def test_one_tensor_of_two_names_is_one_copy(weights: DeviceWeights, source: dict[str, torch.Tensor]) -> None:
    table = weights.table("embed.weight")
    assert isinstance(table, PackedMatrix)  # a product reads it: the embedding reads the packed copy
    assert table.tiles.data_ptr() == weights.matrix("lm_head.weight").tiles.data_ptr()
    alone = DeviceWeights({"embed.weight": source["embed.weight"]}, set(), CPU)
    assert isinstance(alone.table("embed.weight"), torch.Tensor)
    padded = 112 * 64 * 2 + 48 * 64 * 2 + 64 * 64 * 2  # tied table, gate and up, o: each once, padded to tiles
    vectors = 2 * (48 + 64 + 64) + 9 * 4 + 4 * 4
    assert weights.num_bytes == padded + vectors
    weights.bias("gate_up.bias")
    assert weights.num_bytes == padded + vectors + 2 * 48


def test_everything_that_a_launch_may_point_into_is_listed(weights: DeviceWeights) -> None:
    bias = weights.bias("gate_up.bias")
    listed = {tensor.data_ptr() for tensor in weights.tensors()}
    assert bias.data_ptr() in listed
    assert weights.matrix("lm_head.weight").tiles.data_ptr() in listed
    assert weights.vector("sinks").data_ptr() in listed
    weights.clear()
    assert weights.tensors() == []
    assert weights.num_bytes == 0


def test_transposed_weights_are_laid_out() -> None:
    weights = DeviceWeights({"a": matrix(8, 16).t(), "b.weight": matrix(16, 64).t()}, {"b.weight"}, CPU)
    assert weights.vector("a").is_contiguous()
    assert torch.equal(unpack(weights.matrix("b.weight")), matrix(16, 64).t())


def test_errors_name_the_weight(weights: DeviceWeights) -> None:
    for get in (weights.matrix, weights.vector, weights.places):
        with pytest.raises(ConfigError, match=r"weight absent\.weight is missing"):
            get("absent.weight")
    with pytest.raises(ConfigError, match=r"norm\.weight is missing, or no GEMM reads it"):
        weights.matrix("norm.weight")
    with pytest.raises(ConfigError, match=r"gate_up\.weight is missing"):
        weights.vector("gate_up.weight")  # there is only the packed copy


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("a.weight", torch.zeros(4, 4), "a.weight is float32; .* load with dtype='bfloat16', or executor='reference'"),
        ("b", torch.zeros(4, dtype=torch.float16), "b is torch.float16; the kernels read bfloat16"),
        ("c", torch.zeros(2, 2, dtype=torch.float64), "c is torch.float64"),
    ],
)
def test_other_dtypes_are_refused(name: str, tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DeviceWeights({name: tensor}, {name}, CPU)


def test_workspaces_are_shared_by_name_and_never_move() -> None:
    workspace = SharedWorkspace(CPU)
    large = workspace("sums", (4, 8), torch.float32)
    small = workspace("sums", (2, 3), torch.float32)
    assert small.data_ptr() == large.data_ptr()
    assert small.shape == (2, 3)
    assert small.is_contiguous()
    larger = workspace("sums", (40,), torch.float32)
    assert larger.data_ptr() != large.data_ptr()
    assert workspace("sums", (4, 8), torch.float32).data_ptr() == large.data_ptr()  # graphs hold the first address
    assert workspace("sums", (4, 8), torch.int32).dtype is torch.int32
    assert workspace("other", (4, 8), torch.float32).data_ptr() != large.data_ptr()
    assert not any(tensor.any() for tensor in workspace.tensors())
    assert workspace.num_bytes == 4 * (32 + 40 + 32 + 32)
    assert workspace("counter", (), torch.int64).shape == ()
    workspace.clear()
    assert workspace.tensors() == []
