"""This module fetches models by name from the Hugging Face hub into its cache, as directories that loaders read.

huggingface_hub transfers the files and obeys its variables: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE, and, in
seconds, HF_HUB_ETAG_TIMEOUT and HF_HUB_DOWNLOAD_TIMEOUT. Only configs, tokenizers, chat templates and safetensors are
fetched, never pickles or code. Weights come last, so that a snapshot with its weights is complete and needs no network.
"""

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowlat.checkpoint.foreign import foreign_files
from lowlat.checkpoint.hub_answers import COMMIT, ByteLimit, checked, read_listing
from lowlat.checkpoint.json_file import read_object, shown
from lowlat.checkpoint.tensors import INDEX_FILE, MAX_HEADER_BYTES, QUANTISATION_FILE, SINGLE_FILE
from lowlat.errors import ConfigError
from lowlat.options.model_names import Repository, find_repository

__all__ = ["Download", "Outline", "Progress", "fetch", "outline"]

logger = logging.getLogger("lowlat")
Progress = Callable[[int, int], None]  # bytes done, bytes in all

CONFIG_FILE = "config.json"
CONFIG_FILES = (CONFIG_FILE, "generation_config.json", QUANTISATION_FILE, INDEX_FILE)
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
TEMPLATES = "additional_chat_templates"  # a folder of further chat templates
CHUNK = 1 << 16  # bytes of a header that are read at a time
SPARE_BYTES = 64 << 20  # bytes of the cache's disk that a download leaves free


@dataclass(frozen=True)
class Download:
    """The download of a model: number and bytes of the files that the cache lacks, and the free bytes of its disk."""

    files: int
    bytes: int
    free_bytes: int
    cache: str


@dataclass(frozen=True)
class Outline:
    """A directory with a model's configs and the headers of its weights; `download` is None if the cache has it all."""

    directory: Path
    download: Download | None


@dataclass(frozen=True)
class _Listing:
    """The files of a repository at one commit: bytes by name."""

    repository: Repository
    commit: str
    sizes: Mapping[str, int]

    @property
    def text_files(self) -> tuple[str, ...]:
        """The files for the tokenizer and chat templates."""
        further = (name for name in self.sizes if name.startswith(f"{TEMPLATES}/") and name.endswith(".jinja"))
        return (*TEXT_FILES, *(name for name in further if name.count("/") == 1))

    def missing(self, directory: Path, names: Sequence[str]) -> list[str]:
        """Return those of the names that the repository has and its snapshot lacks."""
        return [name for name in names if name in self.sizes and not (directory / name).exists()]


def fetch(
    model: str | Path, *, check: Callable[[Path], object] | None = None, progress: Progress | None = None
) -> Path:
    """Return the directory of a model; fetch the repository if the cache lacks it.

    check      called with the directory when it has config.json and the other configs, but no weights; raises
               ConfigError if the weights should not be downloaded
    progress   called with bytes fetched and bytes in all; None: the library's own bars, on a terminal
    If the cache has a complete snapshot, the hub is only asked for the commit; under HF_HUB_OFFLINE, or if the revision
    is a commit, it is not asked at all. Raises ConfigError that says what to do.
    """
    repository = find_repository(model)
    if repository is None:
        return Path(model)
    listing = _locate(repository)
    if isinstance(listing, Path):
        return listing
    directory = _snapshot(listing)
    if check is not None:
        check(directory)
    weights = listing.missing(directory, _weight_files(listing, directory))
    total = sum(listing.sizes[name] for name in weights)
    _check_room(repository, total)
    logger.info("fetching %s, %.1f MB, into %s", repository, total / 1e6, directory)
    _fetch_files(listing, directory, listing.text_files)
    _fetch_files(listing, directory, weights, None if progress is None else _bar_class(progress, total))
    return directory


@contextmanager
def outline(model: str | Path) -> Iterator[Outline]:
    """Make a directory with a model's configs and the headers of its weights, while the context lasts.

    The weights themselves are not fetched: their files have the true headers and sizes, and read as zeros. A directory,
    or a complete snapshot in the cache, is used as it is. Raises ConfigError as `fetch` does.
    """
    repository = find_repository(model)
    listing = Path(model) if repository is None else _locate(repository)
    if isinstance(listing, Path):
        yield Outline(listing, None)
        return
    with tempfile.TemporaryDirectory(prefix="lowlat-") as scratch:
        directory = Path(scratch, listing.repository.name)
        directory.mkdir(parents=True)
        snapshot = _snapshot(listing)
        for name in CONFIG_FILES:
            if (snapshot / name).exists():
                (directory / name).symlink_to((snapshot / name).resolve())
        weights = _weight_files(listing, snapshot)
        for name in weights:
            _write_header(listing, name, directory / name)
        wanted = listing.missing(snapshot, (*listing.text_files, *weights))
        place, free = _room()
        size = sum(listing.sizes[name] for name in wanted)
        yield Outline(directory, Download(len(wanted), size, free, str(place)))


def _locate(repository: Repository) -> Path | _Listing:
    """Return the complete snapshot in the cache, or else the hub's listing. Raises ConfigError."""
    from huggingface_hub import is_offline_mode

    cached = _whole_snapshot(repository, repository.revision)
    if cached is not None and (is_offline_mode() or COMMIT.fullmatch(repository.revision)):
        return cached
    try:
        listing = _list(repository)
    except ConfigError as error:
        if cached is None:
            raise
        logger.warning("%s: taken from the cache as it is: %s", repository, error)
        return cached
    return _whole_snapshot(repository, listing.commit) or listing


def _whole_snapshot(repository: Repository, revision: str) -> Path | None:
    """Return the cache's snapshot of a revision, if it has its config and all weights, else None."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repository.name, CONFIG_FILE, revision=revision)
    if not isinstance(found, str):
        return None
    directory = Path(found).parent
    if (directory / SINGLE_FILE).exists():
        return directory
    if not (directory / INDEX_FILE).exists():
        return None
    return directory if all((directory / name).exists() for name in _shards(directory)) else None


def _list(repository: Repository) -> _Listing:
    """Ask the hub for a revision's commit and files. Raises ConfigError."""
    from huggingface_hub import HfApi, constants

    with _explained(repository):
        try:
            info = HfApi(library_name="lowlat").model_info(
                repository.name,
                revision=repository.revision,
                files_metadata=True,
                timeout=constants.HF_HUB_ETAG_TIMEOUT,
            )
        except (AttributeError, TypeError, RecursionError) as error:  # the library does not expect such JSON
            raise ValueError(f"its answer describes no repository: {type(error).__name__}") from error
        commit, sizes = read_listing(info, f"{repository}: {constants.ENDPOINT}")
    if CONFIG_FILE not in sizes:
        why = foreign_files(sizes) or "it is no model that can be run"
        raise ConfigError(f"{repository} on {constants.ENDPOINT} has no {CONFIG_FILE}: {why}")
    return _Listing(repository, commit, sizes)


def _snapshot(listing: _Listing) -> Path:
    """Return the directory of a listing's snapshot, after the configs were fetched.

    config.json is asked for by the name of the revision, so that the cache knows that name without a network.
    """
    from huggingface_hub import hf_hub_download

    repository = listing.repository
    with _explained(repository), checked(CONFIG_FILE, listing.sizes[CONFIG_FILE]):
        config = hf_hub_download(
            repository.name, CONFIG_FILE, revision=repository.revision, library_name="lowlat", tqdm_class=_silent_bar()
        )
    directory = Path(config).parent
    _fetch_files(listing, directory, CONFIG_FILES, _silent_bar())
    return directory


def _fetch_files(listing: _Listing, directory: Path, names: Sequence[str], bar: Any = None) -> None:
    """Fetch those of the files that the repository has and the snapshot lacks, one after the other."""
    from huggingface_hub import hf_hub_download

    bar = _library_bar() if bar is None else bar
    for name in listing.missing(directory, names):
        with _explained(listing.repository), checked(name, listing.sizes[name]):
            hf_hub_download(
                listing.repository.name, name, revision=directory.name, library_name="lowlat", tqdm_class=bar
            )


def _weight_files(listing: _Listing, directory: Path) -> list[str]:
    """Return the repository's safetensors: one file, or those in its index. Raises ConfigError if there are none."""
    if SINGLE_FILE in listing.sizes:
        return [SINGLE_FILE]
    where = f"{listing.repository}: expected {SINGLE_FILE} or {INDEX_FILE}"
    if INDEX_FILE not in listing.sizes:
        why = foreign_files(listing.sizes)
        raise ConfigError(f"{where} in the repository, found neither{f': {why}' if why else ''}")
    shards = _shards(directory)
    for name in shards:
        if name not in listing.sizes:
            raise ConfigError(f"{listing.repository}: {INDEX_FILE} names {shown(name)}, which the repository lacks")
    return shards


def _shards(directory: Path) -> list[str]:
    """Return the files that a snapshot's index names, each once. Raises ConfigError for an invalid index."""
    path = directory / INDEX_FILE
    weight_map = read_object(path, max_bytes=MAX_HEADER_BYTES).get("weight_map")
    files = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []
    if not files or any(not name.endswith(".safetensors") or "/" in name for name in files):
        raise ConfigError(f"{path}: weight_map must be an object that names .safetensors files next to it")
    return files


def _write_header(listing: _Listing, name: str, path: Path) -> None:
    """Write a sparse file of weights: it has the true header and size, and a hole in place of the tensors."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    url = hf_hub_url(listing.repository.name, name, revision=listing.commit)
    headers = {**build_hf_headers(library_name="lowlat"), "range": f"bytes=0-{8 + MAX_HEADER_BYTES - 1}"}
    data, wanted = bytearray(), 8
    with _explained(listing.repository):
        with get_session().stream("GET", url, headers=headers, timeout=HF_HUB_DOWNLOAD_TIMEOUT) as response:
            hf_raise_for_status(response)
            for chunk in response.iter_bytes(CHUNK):
                data += chunk
                if len(data) >= 8:
                    wanted = 8 + min(int.from_bytes(data[:8], "little"), MAX_HEADER_BYTES)
                if len(data) >= wanted:
                    break
        with path.open("wb") as file:
            file.write(data[:wanted])
            file.truncate(listing.sizes[name])


def _room() -> tuple[Path, int]:
    """Return the folder of the hub's cache, and the free bytes on its disk."""
    from huggingface_hub.constants import HF_HUB_CACHE

    place = Path(HF_HUB_CACHE).expanduser().absolute()
    existing = next(folder for folder in (place, *place.parents) if folder.exists())
    return place, shutil.disk_usage(existing).free


def _check_room(repository: Repository, size: int) -> None:
    place, free = _room()
    if size and size + SPARE_BYTES > free:
        raise ConfigError(
            f"{repository} takes {size / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free in {place}; make room there, or "
            "let HF_HOME name a folder on another disk"
        )


def _silent_bar() -> type:
    """Return a progress bar that shows nothing, for small files."""
    return _bar_class(lambda done, total: None, 0)


def _library_bar() -> type:
    """Return huggingface_hub's own bar, for terminals; it also refuses files that are longer than listed."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Bar(tqdm):
        def __init__(self, *arguments: Any, name: str | None = None, **options: Any) -> None:
            # a bar of transfers counts chunks that several files share, not the file's bytes
            self._file = None if (name or "").endswith(".transfer") else ByteLimit()
            super().__init__(*arguments, name=name, **options)  # type: ignore[no-untyped-call]

        def update(self, count: float | None = 1) -> bool | None:
            if self._file is not None:
                self._file.add(count or 0)
            return super().update(count)  # type: ignore[no-any-return]

    return Bar


def _bar_class(progress: Progress, total: int) -> type:
    """Return a class in place of tqdm for huggingface_hub; its bars add up to one call of `progress`."""
    done = 0

    class Bar:
        def __init__(self, *_: Any, initial: int = 0, **__: Any) -> None:
            self._file = ByteLimit()
            self.update(initial)

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

        def update(self, count: int | float | None = 1) -> None:
            nonlocal done
            self._file.add(count or 0)
            done += int(count or 0)
            progress(min(done, total), total)

        def ignore(self, *_: Any, **__: Any) -> None:
            """Ignore calls about the bar's looks, or bytes on the wire."""

        close = refresh = update_transfer = set_postfix_str = set_transfer_postfix_str = set_description = ignore

    return Bar


@contextmanager
def _explained(repository: Repository) -> Iterator[None]:
    """Turn errors of huggingface_hub into a ConfigError that says what to do."""
    import httpx2
    from huggingface_hub import errors

    try:
        yield
    except ConfigError:
        raise
    except (httpx2.HTTPError, errors.OfflineModeIsEnabled, OSError, ValueError, KeyError) as error:  # or no hub answers
        raise ConfigError(_explanation(repository, error)) from error


def _explanation(repository: Repository, error: Exception) -> str:
    from huggingface_hub import constants, errors

    hub, name = constants.ENDPOINT, repository.name
    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ else error
    response = getattr(cause, "response", None)
    status = getattr(response, "status_code", None)
    if constants.is_offline_mode() or isinstance(cause, errors.OfflineModeIsEnabled):
        return (
            f"{repository} is neither a directory nor whole in the cache, {constants.HF_HUB_CACHE}; HF_HUB_OFFLINE is "
            "set: fetch it once without"
        )
    if isinstance(cause, errors.GatedRepoError):
        return f"{repository} is gated: accept its terms at {hub}/{name}, and set HF_TOKEN to a token of your account"
    if isinstance(cause, errors.RevisionNotFoundError):
        return f"{name} on {hub} has no revision {repository.revision!r}; give a branch, a tag or a commit after the @"
    if isinstance(cause, errors.RepositoryNotFoundError) or status == 404:
        return (
            f"{name}: there is no such directory, and no such repository on {hub}; mind the spelling, and set HF_TOKEN "
            "if it is private"
        )
    if status in (401, 403):
        return (
            f"{repository}: {hub} lets nobody read it without a token that may (status {status}): set HF_TOKEN, or run "
            "`hf auth login`, and mind the spelling"
        )
    if status is not None:
        return f"{repository}: {hub} answers with status {status}; try again later"
    reason = f"{type(cause).__name__}: {cause!s:.200}"
    return (
        f"{repository} is no directory, and could not be fetched from {hub} ({reason}); what came whole is kept, and a "
        "new start goes on from there"
    )
