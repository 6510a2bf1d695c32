"""`lowlat models`: what it lists is what runs, and the table of the page of targets is made of it."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_calls import answer

from lowlat.checkpoint.recipes import Recipe
from lowlat.cli.reports.published import markdown
from lowlat.models import target
from lowlat.models.families import FAMILIES
from lowlat.models.geometry import ModelConfig
from lowlat.models.published import PUBLISHED

# parameters of the text model, embeddings and LM head included, in thousands of millions
PARAMETERS = {
    "Llama-3.1-8B-Instruct": 8.03,
    "Qwen3-8B": 8.19,
    "Qwen3-30B-A3B": 30.53,
    "Mistral-Small-3.2-24B-Instruct-2506": 23.57,
    "Mixtral-8x7B-Instruct-v0.1": 46.70,
    "phi-4": 14.66,
    "Phi-4-mini-instruct": 3.84,
    "GLM-4-9B-0414": 9.40,
    "granite-3.3-8b-instruct": 8.17,
    "granite-4.0-micro": 3.40,
    "Seed-OSS-36B-Instruct": 36.15,
    "SmolLM3-3B": 3.08,
    "ERNIE-4.5-0.3B-PT": 0.36,
    "gemma-3-1b-it": 1.00,
    "gemma-3-27b-it": 27.01,
    "gemma-4-E2B-it": 4.63,
    "gemma-4-E4B-it": 7.46,
    "gemma-4-12B-it": 11.91,
    "gemma-4-26B-A4B-it": 25.23,
    "gemma-4-31B-it": 30.70,
}


@pytest.fixture(scope="module")
def recipes_of() -> list[ModelConfig]:
    """The geometries whose recipes were made for the report."""
    return []


@pytest.fixture(scope="module")
def report(recipes_of: list[ModelConfig]) -> Iterator[dict[str, Any]]:
    make = target._recipes
    target._usual_recipes.cache_clear()

    def noted(config: ModelConfig, names: Collection[str] | None) -> list[Recipe]:
        recipes_of.append(config)
        return make(config, names)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "_recipes", noted)
        yield answer("models", "--json")


@pytest.mark.second
def test_recipes_of_a_geometry_are_made_once(report: dict[str, Any], recipes_of: list[ModelConfig]) -> None:
    """However it is rounded, and however often a plan asks."""
    assert len(recipes_of) == len(set(recipes_of)) == len(report["models"])


@pytest.mark.second
def test_models_have_their_published_sizes_and_formats(report: dict[str, Any]) -> None:
    assert report["families"] == list(FAMILIES) and len(report["models"]) == len(PUBLISHED)
    by_name = {each["model"].rpartition("/")[2]: each for each in report["models"]}
    for name, giga in PARAMETERS.items():
        assert by_name[name]["bytes"]["stored"] / 2e9 == pytest.approx(giga, abs=0.01), name
        assert by_name[name]["bytes"]["int4"] < by_name[name]["bytes"]["fp8"] < by_name[name]["bytes"]["stored"]
    assert by_name["Llama-3.1-8B-Instruct"]["expanded_bytes"] == 2 * by_name["Llama-3.1-8B-Instruct"]["bytes"]["stored"]
    assert by_name["Ministral-3-8B-Instruct-2512"]["max_context"] == 16384
    assert by_name["gpt-oss-20b"]["bytes"].keys() == {"stored"}, "it is quantised already"


@pytest.mark.second
def test_kernels_run_all_of_them_and_their_quantised_files_are_known(report: dict[str, Any]) -> None:
    assert {each["model"]: each["reason"] for each in report["models"] if each["executor"] != "kernels"} == {}
    assert {"compressed-tensors", "fp8", "awq", "gptq", "modelopt", "mxfp4"} <= set(report["quant_methods"])


@pytest.mark.second
def test_what_fits_is_smaller_than_free_memory(report: dict[str, Any]) -> None:
    assert report["device"] == "cpu"
    for each in report["models"]:
        assert each["expanded_bytes"] >= each["bytes"]["stored"]
        sizes = {"stored": each["expanded_bytes"]}  # formats are for GPUs
        assert each["fits"] == [kind for kind in sizes if sizes[kind] < report["free_bytes"]]


@pytest.mark.second
def test_the_page_of_targets_has_the_table(report: dict[str, Any], repository: Path) -> None:
    assert markdown(report) in (repository / "lowlat" / "models" / "README.md").read_text(), (
        "lowlat models --markdown prints it"
    )
