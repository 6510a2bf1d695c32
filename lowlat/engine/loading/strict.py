"""This module has the checks by which `perf_mode="strict"` refuses a device and launches, and says which are elsewhere.

Strict mode refuses, each in its place: debugging (`RuntimeConfig`), a draft model that cannot be used (`load`), torch's
operations in place of kernels and plans that no tuning table has (`check_device`, `check_launches`),
sampling and requests without drafts (`RequestChecks`), a step at another depth (`Runtime.step`), a step's result that
does not add up and drafts that fail to come (`StepChecks`).

Two things need no check: a step's shapes are those of its bucket, and a size without a bucket is refused in every mode.
A captured step holds kernels alone, as the audit of its capture says, and the host reads its publications from pinned
memory; the counters of waits and copies are of what is done between steps. A loop on the device begins with a fill of
its budget, eight bytes, which neither waits nor copies and is not counted. Masks are made on the device, from a tree
that was checked when it was read. A library's attention in prefill, where no kernel of ours takes it, is never refused.
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

# options that say which launches there are; other sizes `lowlat tune` has all by itself
TUNED_BY = (
    *("quantize", "quantize_lm_head", "kv_cache_dtype", "tensor_parallel_size", "tp_invariant", "prefill_chunk"),
    *("max_prefill_chunks", "activations", "forced_rows"),
)
DRAFTS_TUNED_BY = ("draft_quantize", "draft_tensor_parallel_size")
TUNED_SLOTS = frozenset(bucket_batches(FEW_SLOTS))  # which `lowlat tune` has by itself
MOST_NAMED = 3  # launches in a message


def check_device(config: RuntimeConfig, choice: DeviceChoice) -> None:
    """Raise ConfigError where strict mode would run torch's operations that nobody has asked for by name."""
    if config.is_strict and not choice.has_kernels and config.executor != "reference":
        raise ConfigError(
            f"perf_mode 'strict' runs kernels, and this runtime would run torch's operations ({choice.reason}); "
            f"a test may ask for them by name: executor 'reference'"
        )


def tune_command(config: RuntimeConfig, target: ModelConfig, speculative: SpeculativeConfig | None = None) -> str:
    """The command that measures the plans which a runtime of these options lacks.

    target       whole; it says how many chunks run at once by default
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
    """The flags of options that are not as they are by default."""
    found, options = list[str](), type(record)
    for option in options_of(options):  # type: ignore[arg-type]
        value = getattr(record, option.name)
        if option.name in names and value != option.default:
            found.append(option.flag if value is True else f"{option.flag} {value}")
    return found


def check_launches(
    config: RuntimeConfig, counts: LaunchCounts, target: ModelConfig, speculative: SpeculativeConfig | None = None
) -> None:
    """Raise ConfigError where strict mode would launch what was not tuned, or a library in place of a kernel.

    counts       of all ranks: each one's launches need entries, as parts of a target need not be alike
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
    """The first launches without an entry, and how many more there are."""
    shown = [f"{kind} {key}" for kind, key in untuned[:MOST_NAMED]]
    more = len(untuned) - len(shown)
    return ", ".join([*shown, *([f"{more} more"] if more else [])])
