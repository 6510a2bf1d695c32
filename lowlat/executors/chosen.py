"""Steps that choose, run part by part where the host reads what the device has chosen."""

from collections.abc import Callable, Mapping

import torch

from lowlat.graphs import Bucket

__all__ = ["chosen_body"]


def chosen_body(bucket: Bucket, state: Mapping[str, torch.Tensor], run: Callable[[Bucket], None]) -> Bucket:
    """Run the opening of a step that chooses, and its parts as far as it drafts; returns the body that is chosen.

    state  with `width_choice` and, where drafting is parts of its own, `draft_further`
    run    runs a program and waits until the state holds what it wrote
    """
    run(bucket)
    for part in bucket.parts:
        if not int(state["draft_further"]):
            break
        run(part)
    return bucket.bodies[int(state["width_choice"])]
