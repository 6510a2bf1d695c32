"""A skip of tests that need more cards than there are."""

import pytest
import torch


def need_cards(count: int) -> None:
    """Skip the test where there are fewer cards."""
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA devices, and {torch.cuda.device_count()} is there")
