"""`lowlat compare` on a GPU: the kernels' stages next to the reference's."""

from pathlib import Path

from lowlat.cli.options import bundled
from lowlat.tools.compare.recording import load_recording, save_recording
from lowlat.tools.compare.stages import common_rows, differences, record


def test_stages_of_the_kernels_lie_by_those_of_the_reference(tmp_path: Path) -> None:
    arguments = (bundled("target"), bundled("head"), "The President shall")
    expected = record(*arguments, num_tokens=8, dtype="bfloat16", device="cpu")
    save_recording(expected, tmp_path / "x.safetensors")
    found = record(*arguments, num_tokens=8, dtype="bfloat16", device="cuda", executor="eager")
    ours, theirs, left_out = common_rows(found, load_recording(tmp_path / "x.safetensors"))
    assert left_out == [] and "draft.2.logits" in ours
    assert [each for each in differences(ours, theirs) if not each.within(0.99)] == []
