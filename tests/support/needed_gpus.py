"""A skip of tests that need more GPUs than there are."""

import pytest
import torch


def need_gpus(count: int) -> None:
    """Skip the test where there are fewer GPUs."""
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA devices, and {torch.cuda.device_count()} is there")
