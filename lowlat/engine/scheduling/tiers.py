"""This module makes the tiers of a runtime's prefix cache, and the digests that decide who may read their contents."""

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lowlat.checkpoint.tensors import read_header
from lowlat.engine.loading.loaded import Loaded
from lowlat.engine.numerics import digest_of
from lowlat.errors import CapacityError, ConfigError
from lowlat.executors.block_moves import content_layout
from lowlat.graphs import BufferSet
from lowlat.options.model_names import display_name
from lowlat.options.runtime import RuntimeConfig
from lowlat.sequence.tiers.arena import HostArena
from lowlat.sequence.tiers.disk import DiskTier
from lowlat.sequence.tiers.host import HostTier
from lowlat.sequence.tiers.key import ChunkKey
from lowlat.sequence.tiers.tiers import CacheTiers

__all__ = ["ContentFacts", "content_facts", "file_stamps", "make_tiers"]

GIB = 1 << 30
LEAST_HOST_GIB = 1.0  # if there is a disk tier: contents read from files wait in host memory for their request
SAMPLES, SAMPLE_BYTES = 64, 4096  # of each file, wherever its tensors lie
EDGE_BYTES = 2048  # of each tensor, its first and its last


def make_tiers(loaded: Loaded, config: RuntimeConfig, numerics: str) -> CacheTiers | None:
    """Make the tiers that the options ask for; None if they ask for none.

    numerics  the digest of all that decides the runtime's bits

    Raises ConfigError for options that tiers do not work with, and for a directory that cannot be used.
    """
    if not config.host_cache_gib and config.cache_dir is None:
        return None
    if not config.prefix_reuse:
        raise ConfigError("host_cache_gib and cache_dir keep what prefix_reuse shares, which is off; turn it on")
    if config.share_decoded:
        raise ConfigError("host_cache_gib and cache_dir keep what prefill wrote alone: leave share_decoded off")
    pins = Counter[bytes]()
    disk, host_gib, mover = None, config.host_cache_gib, loaded.executor.mover

    def is_pinned(key: ChunkKey) -> bool:
        return key.digest in pins

    if config.cache_dir is not None:
        size, draft = int(config.cache_gib * GIB), loaded.speculation.loaded
        facts = content_facts(loaded.target.directory, None if draft is None else draft.directory, mover.states)
        fingerprint = digest_of({"numerics": numerics, "model": facts.model, "layout": facts.layout})
        disk = DiskTier(Path(config.cache_dir), size, fingerprint, is_pinned)
        host_gib = max(host_gib, LEAST_HOST_GIB)
    try:
        arena = HostArena(int(host_gib * GIB), lambda size: mover.allocate(size, "host_cache_gib"))
    except CapacityError as error:
        raise ConfigError(str(error)) from error
    host = HostTier(arena, is_pinned)
    most = config.cache_copy_gb_per_s
    return CacheTiers(host, disk, mover, pins, max_bytes_per_s=None if most is None else most * 1e9)


@dataclass(frozen=True)
class ContentFacts:
    """The facts that decide, together with its numerics, the contents of a runtime's chunks.

    model       digest of names, sizes and samples of the files, and tensors, of the model and the draft model
    layout      digest of the layout of contents
    model_name  for messages
    """

    model: str
    layout: str
    model_name: str


def content_facts(target: Path, draft: Path | None, states: Sequence[BufferSet]) -> ContentFacts:
    """Digest the directories of a model and its draft model, and the layouts of each rank's state."""
    layouts = []
    for state in states:
        pools = sorted({spec.pool for spec in state.specs.values() if spec.paging is not None})
        layouts.append({pool: content_layout(state, pool, 1) for pool in pools})
    model = digest_of({"target": _files(target), "draft": _files(draft)})
    layout = digest_of({"layout": layouts[0] if len(layouts) == 1 else layouts})
    return ContentFacts(model, layout, display_name(target))


def file_stamps(target: Path, draft: Path | None) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and modification times of a model's and a draft model's files, to notice changes."""
    found = []
    for path in (*_model_files(target), *_model_files(draft)):
        facts = path.stat()
        found.append((path.name, facts.st_size, facts.st_mtime_ns))
    return tuple(found)


def _model_files(directory: Path | None) -> list[Path]:
    if directory is None:
        return []
    return [p for p in sorted(directory.glob("*")) if p.is_file() and p.suffix in (".safetensors", ".json", ".gguf")]


def _files(directory: Path | None) -> tuple[tuple[str, int, str], ...]:
    """Names, sizes and digests of samples of a model's files; two models, or versions of one, differ in some."""
    found = []
    for path in _model_files(directory):
        size = path.stat().st_size
        found.append((path.name, size, _sampled(path, size)))
    return tuple(found)


def _sampled(path: Path, size: int) -> str:
    """Digest samples all over a file, and both ends of each tensor: an edit of a tensor changes all of it."""
    digest = hashlib.sha256()
    places = [(size * number // SAMPLES, SAMPLE_BYTES) for number in range(SAMPLES)]
    if path.suffix == ".safetensors":
        # tensors lie end to end: a sample around the start of one also has the end of the one before
        with suppress(ConfigError):  # a file in the directory that is not loaded may be anything
            starts = sorted(entry.offset for entry in read_header(path).values())
            places += [(max(0, start - EDGE_BYTES), 2 * EDGE_BYTES) for start in [*starts, size]]
    with path.open("rb", buffering=0) as file:
        for start, count in places:
            digest.update(os.pread(file.fileno(), count, start))
    return digest.hexdigest()
