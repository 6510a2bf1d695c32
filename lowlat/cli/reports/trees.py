"""This module reports a tree's nodes, levels, paths, masks and buffers, and the best tree for a budget."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowlat.checkpoint.files import read_json
from lowlat.cli.console import format_bytes, print_table
from lowlat.errors import ConfigError
from lowlat.options.runtime import RuntimeConfig
from lowlat.options.speculative import MAX_SPECULATIVE_TOKENS, SpeculativeConfig

if TYPE_CHECKING:
    from lowlat.speculators.tree.planner import TreePlan, WhatIf
    from lowlat.speculators.tree.topology import TreeTopology

__all__ = ["DEFAULT_BUDGETS", "print_tree", "print_what_if", "tree_report", "what_if_report"]

MAX_TABLE_BYTES = 1 << 20
DEFAULT_BUDGETS = (2, 4, 8, 16, 32, 64)
# Assumed where nothing was measured: of accepted parents' next tokens, the share that the draft ranks first, second...
ASSUMED_ACCEPTANCE = [[0.70, 0.12, 0.05, 0.03, 0.02, 0.01, 0.01, 0.01]] * MAX_SPECULATIVE_TOKENS
# The step's buffers that a tree shapes or fills, without the activations of its rows.
TREE_BUFFERS = (
    *("drafts", "num_drafts", "tree_masks", "tree_paths"),
    *("row_tokens", "row_positions", "row_live", "row_masks", "paths", "num_verified", "verified_depth"),
    *("target_tokens", "accepted_tokens", "accepted_nodes", "accepted_lens", "best_path"),
)


def tree_report(file: Path | None, chain: int | None, batch: int, target: Path, head: Path) -> dict[str, Any]:
    """The tree of a file, or a chain, and its buffers in a pair's step. Raises ConfigError."""
    from lowlat.cli.reports.sizes import buffer_dict, plan_runtime
    from lowlat.cli.running import default_context
    from lowlat.speculators.methods import draft_method
    from lowlat.speculators.tree.topology import TreeTopology

    topology = TreeTopology.from_choices(file) if file is not None else TreeTopology.chain(chain or 0)
    choices = [list(path) for path in topology.choices]
    speculative = SpeculativeConfig(
        model=head, method=draft_method(head), num_speculative_tokens=topology.depth, tree=choices
    )
    options = RuntimeConfig(max_batch=batch, max_context=default_context(target, None))
    program = plan_runtime(target, options, speculative).program(batch, topology.depth)
    return {
        "tree": str(file) if file is not None else f"chain of {topology.depth}",
        **_shape(topology),
        "batch": batch,
        "buffers": [buffer_dict(program.buffers[name]) for name in TREE_BUFFERS],
    }


def _shape(topology: "TreeTopology") -> dict[str, Any]:
    nodes = [
        {
            "node": node,
            "choice": list(topology.choices[node - 1]) if node else [],
            "parent": topology.parents[node],
            "depth": topology.depths[node],
            "rank": topology.ranks[node],
            "leaf": topology.leaf_mask[node],
            "mask": f"{topology.packed_masks[node] & (1 << 64) - 1:#x}",
        }
        for node in range(topology.num_nodes)
    ]
    return {
        "num_nodes": topology.num_nodes,
        "depth": topology.depth,
        "is_chain": topology.is_chain,
        "num_paths": len(topology.paths),
        **{name: value for name, value in topology.limits.items() if name.startswith("max_")},
        "nodes": nodes,
        "levels": [
            [{"node": branch.node, "children": list(branch.children)} for branch in level] for level in topology.levels
        ],
        "paths": [list(path) for path in topology.paths],
        "mask_shape": [topology.num_nodes],
        "mask_dtype": "int64",
    }


def what_if_report(
    acceptance: Path | None,
    budgets: tuple[int, ...],
    step_times_us: tuple[int, ...] | None,
    batch: int,
    target: Path,
    head: Path,
) -> dict[str, Any]:
    """Return the best tree for each budget, from a measured or assumed acceptance, and the KV that its rows take.

    Each step writes keys and values of all its rows. The space of rows that are not accepted stays reserved in the slot
    for the next step. Raises ConfigError.
    """
    from lowlat.cli.reports.sizes import plan_runtime
    from lowlat.cli.running import default_context
    from lowlat.speculators.methods import draft_method
    from lowlat.speculators.tree.planner import what_if

    table = ASSUMED_ACCEPTANCE if acceptance is None else _read_acceptance(acceptance)
    times = None if step_times_us is None else [time * 1e-6 for time in step_times_us]
    found: WhatIf = what_if(table, budgets, step_times_s=times)
    speculative = SpeculativeConfig(model=head, method=draft_method(head), num_speculative_tokens=1)
    plan = plan_runtime(target, RuntimeConfig(max_context=default_context(target, None)), speculative)
    kv = plan.kv_bytes_per_token(plan.program(1, 1))
    source = "assumed, not measured: give --acceptance FILE" if acceptance is None else str(acceptance)
    return {
        "acceptance_from": source,
        "acceptance_by_rank": table,
        "batch": batch,
        "kv": kv,
        "plans": [_plan_dict(plan, kv, batch) for plan in found.plans],
        "recommended": _plan_dict(found.recommended, kv, batch),
        "because": "it is the smallest within 2 % of the longest"
        if times is None
        else "it has the most tokens a second",
    }


def _plan_dict(plan: "TreePlan", kv: Mapping[str, int], batch: int) -> dict[str, Any]:
    return {
        "budget": plan.budget,
        "max_path_len": plan.max_path_len,
        "max_decoding_tokens": plan.max_decoding_tokens,
        "max_non_leaves_per_layer": plan.max_non_leaves_per_layer,
        "mean_acceptance_length": plan.mean_acceptance_length,
        "chain_acceptance_length": plan.chain_acceptance_length,
        "kv_bytes": batch * plan.max_decoding_tokens * sum(kv.values()),
        "tokens_per_s": plan.tokens_per_s,
        "choices": [list(path) for path in plan.choices],
    }


def _read_acceptance(path: Path) -> list[list[float]]:
    """The table of a JSON file: lists of numbers, bare or under `acceptance_by_rank`. Raises ConfigError."""
    value = read_json(path, MAX_TABLE_BYTES)
    table = value.get("acceptance_by_rank") if isinstance(value, dict) else value
    if not isinstance(table, list) or not table or not all(isinstance(row, list) for row in table):
        raise ConfigError(f"{path}: expected a list for each depth with the acceptance of each rank")
    return table


def print_tree(report: Mapping[str, Any]) -> None:
    """Print what `tree_report` gave."""
    limits = [
        [name, report[name]] for name in ("num_nodes", "depth", "num_paths", "max_path_len", "max_decoding_tokens")
    ]
    limits.append(["max_non_leaves_per_layer", report["max_non_leaves_per_layer"]])
    print_table(f"tree {report['tree']}", ("what", "count"), limits)
    columns = ("node", "choice", "parent", "depth", "rank", "leaf", "mask")
    print_table("nodes", columns, [list(node.values()) for node in report["nodes"]])
    levels = [
        [depth, ", ".join(f"{branch['node']} -> {branch['children']}" for branch in level)]
        for depth, level in enumerate(report["levels"])
    ]
    print_table("levels: nodes whose children are drafted", ("depth", "nodes"), levels)
    print_table("paths", ("path", "nodes"), [[index, path] for index, path in enumerate(report["paths"])])
    title = f"buffers of a step for {report['batch']} slots; masks are one int64 a node"
    print_table(title, ("name", "shape", "dtype", "role", "bytes"), [list(b.values()) for b in report["buffers"]])


def print_what_if(report: Mapping[str, Any]) -> None:
    """Print what `what_if_report` gave."""
    limits = ("max_path_len", "max_decoding_tokens", "max_non_leaves_per_layer")
    shown = ("budget", *limits, "mean_acceptance_length", "chain_acceptance_length")
    rows = [[*(plan[name] for name in shown), format_bytes(plan["kv_bytes"])] for plan in report["plans"]]
    columns = ("rows", *limits, "tokens a step", "a chain's", f"KV of a step's rows, {report['batch']} slots")
    print_table(f"what if: the best tree for each budget; acceptance {report['acceptance_from']}", columns, rows)
    best = report["recommended"]
    click.echo(
        f"recommended: max_path_len {best['max_path_len']}, max_decoding_tokens {best['max_decoding_tokens']}, "
        f"max_non_leaves_per_layer {best['max_non_leaves_per_layer']}: {report['because']}"
    )
    click.echo(f"choices: {json.dumps(best['choices'])}")
