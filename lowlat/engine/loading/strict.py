"""This module has the checks by which `perf_mode="strict"` refuses devices and launches; other modules have the rest.

Strict mode refuses debugging (`RuntimeConfig`), a draft model that cannot be used (`load`), torch's operations in
place of kernels and launches without an entry in a tuning table (`check_device`, `check_launches`), sampling and
requests without drafts (`RequestChecks`), a step at another draft length (`Runtime.step`), and a step whose result is
inconsistent or has no drafts (`StepChecks`).

The following needs no check. A step's shapes are those of its bucket, and every mode refuses a size without a bucket. A
captured step holds only kernels, which the audit of its capture proves, and the host reads its publications from pinned
memory; the counters of waits and copies count the work between steps. A loop on the device begins with a fill of its
budget, eight bytes, which neither waits nor copies and is not counted. Masks are made on the device, from a tree that
was checked when it was read. If no kernel of ours takes prefill's attention, a library's is used, and never refused.
"""

from dataclasses import replace

from lowlat.engine.loading.geometry import chunks_of_context
from lowlat.engine.loading.programs import bucket_batches
from lowlat.errors import ConfigError
from lowlat.executors import LaunchCounts
from lowlat.executors.devices import DeviceChoice
from lowlat.models.geometry import ModelConfig
from lowlat.models.prefill_chunks import most_prefill_chunks
from lowlat.options.declaration import options_of
from lowlat.options.method_options import AUTO_METHOD
from lowlat.options.runtime import FEW_SLOTS, RuntimeConfig
from lowlat.options.speculative import SpeculativeConfig

__all__ = ["check_device", "check_launches", "tune_command"]

# options that decide which launches there are; `lowlat tune` covers all other sizes without options
TUNED_BY = (
    *("quantize", "quantize_lm_head", "kv_cache_dtype", "tensor_parallel_size", "tp_invariant", "prefill_chunk"),
    *("max_prefill_chunks", "activations", "forced_rows"),
)
DRAFTS_TUNED_BY = ("draft_quantize", "draft_tensor_parallel_size")
TUNED_SLOTS = frozenset(bucket_batches(FEW_SLOTS))  # batches that `lowlat tune` covers without --batch
MOST_NAMED = 3  # launches in a message


def check_device(config: RuntimeConfig, choice: DeviceChoice) -> None:
    """Raise ConfigError if strict mode would run torch's operations without executor 'reference' in the options."""
    if config.is_strict and not choice.has_kernels and config.executor != "reference":
        raise ConfigError(
            f"perf_mode 'strict' runs kernels, and this runtime would run torch's operations ({choice.reason}); "
            f"a test may ask for them by name: executor 'reference'"
        )


def tune_command(config: RuntimeConfig, target: ModelConfig, speculative: SpeculativeConfig | None = None) -> str:
    """The `lowlat tune` command that measures the missing plans of a runtime with these options.

    target       whole; it decides how many chunks run at once by default
    speculative  None: there is no draft model
    """
    words = ["lowlat tune all --model DIR"]
    if speculative is not None and speculative.model is not None:
        words.append("--draft-model DIR")
    elif speculative is not None:
        words.append(f"--method {'mtp' if speculative.method == AUTO_METHOD else speculative.method}")
    at_once: int | None = chunks_of_context(target, config)
    at_once = None if at_once == most_prefill_chunks(target, config.prefill_chunk, None) else at_once
    wide = max(config.forced_rows, 0 if speculative is None else speculative.wide_rows)  # with the same launches
    words += _flags(replace(config, max_prefill_chunks=at_once, forced_rows=wide), TUNED_BY)
    words += [] if TUNED_SLOTS.issuperset(bucket_batches(config.max_batch)) else [f"--batch {config.max_batch}"]
    words += [] if speculative is None else _flags(speculative, DRAFTS_TUNED_BY)
    return " ".join([*words, "--missing"])


def _flags(record: RuntimeConfig | SpeculativeConfig, names: tuple[str, ...]) -> list[str]:
    """The flags of options whose values differ from the defaults."""
    found, options = list[str](), type(record)
    for option in options_of(options):  # type: ignore[arg-type]
        value = getattr(record, option.name)
        if option.name in names and value != option.default:
            found.append(option.flag if value is True else f"{option.flag} {value}")
    return found


def check_launches(
    config: RuntimeConfig, counts: LaunchCounts, target: ModelConfig, speculative: SpeculativeConfig | None = None
) -> None:
    """Raise ConfigError if strict mode would launch untuned kernels, or torch in place of a kernel.

    counts       of all ranks: the launches of each need entries, since ranks' parts may have different shapes
    target       whole
    speculative  None: there is no draft model
    """
    if not config.is_strict:
        return
    if counts.fallbacks:
        raise ConfigError(
            f"perf_mode 'strict' runs kernels, and torch stands in for kernels in {len(counts.fallbacks)} calls, the "
            f"first {counts.fallbacks[0]}: no kernel takes such sizes, or weights of 8 and 4 bits, on this "
            "GPU; perf_mode 'default' goes on so"
        )
    if counts.tuned < counts.planned:
        raise ConfigError(
            f"perf_mode 'strict' launches by measured plans, and {counts.planned - counts.tuned} of {counts.planned} "
            f"launches have plans that were derived for this GPU: {_named(counts.untuned)}; "
            f"`{tune_command(config, target, speculative)}` measures them; perf_mode 'default' goes on with what "
            "was derived"
        )


def _named(untuned: tuple[tuple[str, str], ...]) -> str:
    """Name the first launches without an entry, and the number of others."""
    shown = [f"{kind} {key}" for kind, key in untuned[:MOST_NAMED]]
    more = len(untuned) - len(shown)
    return ", ".join([*shown, *([f"{more} more"] if more else [])])
