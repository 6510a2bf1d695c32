"""This module shows the server's figures in Prometheus' format: vLLM's names with the prefix `lowlat:`, and more.

The figures cover all clients of the server, through any gateway or none.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

__all__ = ["CONTENT_TYPE", "exposition"]

FIRST_OCTAVE = 6  # buckets of histograms begin at 64 us: no timed event is faster
CACHE_BITS = {"fp8": 8, "bfloat16": 16, "float32": 32}
GAUGES = {
    "num_requests_running": ("num_running", "Requests inside the engine."),
    "num_requests_waiting": ("num_waiting", "Requests that wait for a slot."),
    "num_clients": ("num_clients", "Clients connected to the server, this gateway among them."),
    "num_slots": ("num_slots", "Requests that can decode together."),
    "uptime_seconds": ("uptime_s", "Since the server started."),
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("time_to_first_token_ms", "From a request's arrival to its first token."),
    "inter_token_latency_seconds": ("inter_token_ms", "Between a request's tokens."),
    "request_queue_time_seconds": ("queued_ms", "From a request's arrival to the engine."),
    "e2e_request_latency_seconds": ("duration_ms", "From a request's arrival to its end."),
    "step_duration_seconds": ("step_ms", "One decode step."),
}
SPECULATION = {
    "spec_decode_num_drafts": ("num_drafts", "Steps that verified draft tokens."),
    "spec_decode_num_draft_tokens": ("total_draft_tokens", "Draft tokens verified."),
    "spec_decode_num_accepted_tokens": ("total_accepted_tokens", "Draft tokens accepted."),
    "spec_decode_num_rewound_tokens": ("num_rewound_tokens", "Draft tokens verified and rejected."),
    "spec_decode_num_rewind_steps": ("rewind_steps", "Steps that rejected a draft token."),
}
STRUCTURED = {
    "structured_output_requests": ("num_requests", "Requests with a grammar that began to decode."),
    "structured_output_mask_steps": ("num_mask_steps", "Steps of requests whose masks were filled."),
    "structured_output_mask_rows": ("num_mask_rows", "Masks filled."),
    "structured_output_mask_seconds": ("mask_s", "Time in which masks were filled."),
    "structured_output_rows_wait_seconds": ("rows_wait_s", "Time in which the host waited for the rows of a step."),
    "structured_output_forced_drafts": ("num_forced_drafts", "Tokens drafted because nothing else may follow."),
    "structured_output_forced_accepted": (
        "num_forced_accepted",
        "Tokens drafted because nothing else may follow, and committed.",
    ),
    "structured_output_draft_tokens": ("num_draft_tokens", "Draft tokens verified under a grammar."),
    "structured_output_accepted_tokens": ("num_accepted_tokens", "Draft tokens accepted under a grammar."),
}
TIER_GAUGES = {
    "cache_host_bytes": ("host_bytes", "Cached prefixes in host memory."),
    "cache_disk_bytes": ("disk_bytes", "Cached prefixes in files, those of others in the same cache_dir included."),
    "cache_copies_under_way": ("copies_under_way", "Copies between the device and the cache's host memory."),
}
TIERS = {
    "cache_host_hits": ("hits", "Chunks of prompts found in host memory."),
    "cache_disk_reads": ("read", "Chunks read from files."),
    "cache_disk_misses": ("misses", "Chunks whose file was gone, or not whole."),
    "cache_saved_chunks": ("saved", "Chunks copied from the device."),
    "cache_bytes_to_device": ("bytes_in", "Bytes copied to the device."),
    "cache_bytes_from_device": ("bytes_out", "Bytes copied from the device."),
}
KV_GAUGES = {
    "kv_cache_capacity_tokens": ("capacity_tokens", "Tokens that the KV cache holds, cached prefixes included."),
}
HELD_UP = {  # all 0 while the queue moves
    "queue_held_up": (
        "is_held_up",
        "1 while the engine's first waiting request waits for what paused requests or open prompts hold.",
    ),
    "queue_held_up_blocks_needed": ("num_needed", "KV blocks that it needs."),
    "queue_held_up_blocks_available": ("num_available", "KV blocks that are free or reusable meanwhile."),
    "queue_held_up_blocks_paused": ("num_paused_blocks", "KV blocks that paused requests hold meanwhile."),
    "queue_held_up_blocks_open": ("num_open_blocks", "KV blocks that open prompts hold meanwhile."),
}
SESSIONS = {
    "sessions": ("num_sessions", "Sessions that live."),
    "sessions_running": ("num_running", "Sessions with requests under way."),
    "session_pinned_blocks": ("num_pinned", "KV blocks that sessions pin."),
}
POSITIONS = {
    "spec_decode_num_accepted_tokens_per_pos": ("accepted_by_position", "Draft tokens accepted, by position."),
    "spec_decode_num_draft_tokens_per_pos": ("drafted_by_position", "Draft tokens verified, by position."),
}


SOURCES = {
    "spec_decode_num_steps_per_source": ("steps", "Steps of slots, by the source of the drafts that they verified."),
    "spec_decode_num_draft_tokens_per_source": ("draft_tokens", "Draft tokens verified, by their source."),
    "spec_decode_num_accepted_tokens_per_source": ("accepted_tokens", "Draft tokens accepted, by their source."),
}


class _Snapshot(Collector):
    """Converts one answer to STATS to metrics; figures that it lacks are left out."""

    def __init__(self, stats: Mapping[str, Any]) -> None:
        self._stats = stats
        self._engine: Mapping[str, Any] = stats.get("engine", {})
        self._model = str(stats.get("model", ""))

    def collect(self) -> Iterator[Metric]:
        stats, engine = self._stats, self._engine
        for name, (key, help) in GAUGES.items():
            if key in stats:
                yield self._gauge(name, help, stats[key])
        yield self._counter("generation_tokens", "Tokens sent.", [((), stats.get("num_tokens", 0))])
        if "prompt_tokens" in engine:
            yield self._counter("prompt_tokens", "Tokens of prompts.", [((), engine["prompt_tokens"])])
        ends = [((reason,), count) for reason, count in stats.get("ends", {}).items()]
        yield self._counter("request_success", "Completions that ended, by how.", ends, "finished_reason")
        conversions = [((reason,), count) for reason, count in stats.get("conversions", {}).items()]
        yield self._counter("conversions", "Conversions that ended, by how.", conversions, "finished_reason")
        refusals = [((code,), count) for code, count in stats.get("refusals", {}).items()]
        yield self._counter("request_refused", "Requests that were refused, by the code of why.", refusals, "code")
        for name, (key, help) in HISTOGRAMS.items():
            if "octaves" in stats.get(key, {}):
                yield self._histogram(name, help, stats[key])
        if "query_tokens" in (kv := engine.get("kv", {})):
            used = kv["num_used"] / max(kv["num_blocks"], 1)
            yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use; 1 is all.", used)
            yield from self._gauges(KV_GAUGES, kv)
            held_up = {"is_held_up": 1, **engine["held_up"]} if "held_up" in engine else {}
            yield from self._gauges(HELD_UP, {key: held_up.get(key, 0) for key, _ in HELD_UP.values()})
            if kv.get("cache_dtype") in CACHE_BITS:
                bits = CACHE_BITS[kv["cache_dtype"]]
                yield self._gauge("kv_cache_bits", "Bits of a number in the KV cache.", bits)
            yield self._counter("prefix_cache_queries", "Tokens of prompts looked up.", [((), kv["query_tokens"])])
            yield self._counter(
                "prefix_cache_hits", "Tokens of prompts found in the prefix cache.", [((), kv["hit_tokens"])]
            )
            tiers, sessions = kv.get("tiers", {}), kv.get("sessions", {})
            yield from self._gauges(TIER_GAUGES, tiers)
            yield from self._counters(TIERS, tiers)
            yield from self._gauges(SESSIONS, sessions | {"num_pinned": kv["num_pinned"]} if sessions else {})
        yield from self._counters(STRUCTURED, engine.get("structured_output", {}))
        yield from self._speculation(engine.get("eagle_speculation", {}))
        if "partial_steps" in (partial := engine.get("specpv", {})):
            help = "Steps of slots over a part of the KV cache (SpecPV), lossy unless they only propose."
            yield self._counter("specpv_partial_steps", help, [((), partial["partial_steps"])])

        if "failed" in (checks := engine.get("checks", {})):
            failed = [((kind,), count) for kind, count in checks["failed"].items()]
            yield self._counter("failed_checks", "Checks of steps that failed, by kind.", failed, "kind")

    def _gauges(self, named: Mapping[str, tuple[str, str]], figures: Mapping[str, Any]) -> Iterator[Metric]:
        for name, (key, help) in named.items():
            if key in figures:
                yield self._gauge(name, help, figures[key])

    def _counters(self, named: Mapping[str, tuple[str, str]], figures: Mapping[str, Any]) -> Iterator[Metric]:
        for name, (key, help) in named.items():
            if key in figures:
                yield self._counter(name, help, [((), figures[key])])

    def _speculation(self, figures: Mapping[str, Any]) -> Iterator[Metric]:
        yield from self._counters(SPECULATION, figures)
        for name, (key, help) in POSITIONS.items():
            if key in figures:
                counts = [((str(position),), count) for position, count in enumerate(figures[key])]
                yield self._counter(name, help, counts, "position")
        for name, (key, help) in SOURCES.items():
            if "by_source" in figures:
                counts = [((source,), each[key]) for source, each in figures["by_source"].items()]
                yield self._counter(name, help, counts, "source")

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"lowlat:{name}", help, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, help: str, values: Iterable[tuple[tuple[str, ...], float]], *labels: str) -> Metric:
        family = CounterMetricFamily(f"lowlat:{name}", help, labels=["model_name", *labels])
        for own, value in values:
            family.add_metric([self._model, *own], value)
        return family

    def _histogram(self, name: str, help: str, figures: Mapping[str, Any]) -> Metric:
        family = HistogramMetricFamily(f"lowlat:{name}", help, labels=["model_name"])
        total, buckets = 0, []
        for octave, count in enumerate(figures["octaves"]):
            total += count
            if octave >= FIRST_OCTAVE:
                buckets.append((f"{1e-6 * 2**octave:.6f}", float(total)))
        buckets[-1] = ("+Inf", float(total))  # the last octave also has all longer times
        family.add_metric([self._model], buckets, figures["sum"] / 1e3)
        return family


class _Snapshots(Collector):
    """Snapshots of several models: one family of each name, whose samples name their models."""

    def __init__(self, stats: Sequence[Mapping[str, Any]]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        found: dict[str, Metric] = {}
        for own in self._stats:
            for family in _Snapshot(own).collect():
                found.setdefault(family.name, family)
                if found[family.name] is not family:
                    found[family.name].samples += family.samples
        return found.values()


def exposition(stats: Sequence[Mapping[str, Any]]) -> bytes:
    """Snapshots of servers' figures as text, one for each model."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshots(stats))
    return generate_latest(registry)
