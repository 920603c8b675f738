"""Store of materialized datasets: find, list and clear them.

::

    FOLDER/                       a cache directory, or a run directory's data/
        data-<key>-<unique>/      one dataset; the key is a hash of the request
            …/part-….parquet      the rows, in the folder their writer made
            manifest.json         written last: without it the folder is incomplete
            used                  empty; as old as the last use

Only folders of such names are ever listed or deleted: a folder named by mistake is safe.
"""

from __future__ import annotations

import functools
import logging
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..storage.filesystem import Location
from ..storage.folders import delete_quietly
from ..storage.retries import retry
from .manifest import Manifest

logger = logging.getLogger(__name__)

_MANIFEST_FILE = "manifest.json"
_USED_FILE = "used"
_NAME = re.compile(r"data-([0-9a-f]{16})-[0-9a-f]{12}")


@dataclass(frozen=True)
class StoredDataset:
    """A dataset in storage.

    Attributes:
        location: its folder.
        size: bytes of all its files.
        used: when it was last made, used or written to, in seconds since 1970.
        manifest: its manifest; ``None`` if it is incomplete: its writer was killed, or is writing.
    """

    location: Location
    size: int
    used: float
    manifest: Manifest | None


def new_folder(folder: Location, key: str) -> Location:
    """Create the folder of a new dataset for ``key`` (16 hexadecimal digits)."""
    place = folder.join(f"data-{key}-{uuid.uuid4().hex[:12]}")
    place.make_folder()
    place.join(_USED_FILE).write_text("")  # dates the folder if its writer is killed
    return place


def key_of(manifest: Manifest) -> str:
    """Return the key that a dataset was made for; ``""`` for files that are read in place."""
    match = _NAME.fullmatch(Location(manifest.url).name)
    return match[1] if match else ""


def publish(manifest: Manifest) -> None:
    """Make a written dataset visible: its manifest is written last."""
    Location(manifest.url).join(_MANIFEST_FILE).write_text(manifest.to_json())


def find_datasets(folder: Location, key: str) -> Iterator[Manifest]:
    """Yield the complete datasets in ``folder`` that were made for ``key``.

    Raises:
        CheckpointError: the storage fails repeatedly.
    """
    for place in retry(folder.list, f"{folder} cannot be read"):
        match = _NAME.fullmatch(place.name)
        if match and match[1] == key:
            # Rows that are written anew have another order, in which no epoch can be resumed.
            manifest = retry(functools.partial(_read, place), f"{place} cannot be read")
            if manifest is not None:
                yield manifest


def mark_used(manifest: Manifest) -> None:
    """Note that a dataset is used now, which resets its age; warn if that fails."""
    try:
        Location(manifest.url).join(_USED_FILE).write_text("")
    except OSError as error:  # such as another user's
        logger.warning(
            "%s is read, but its age could not be reset (%s): clearing the folder by age may "
            "delete it meanwhile",
            manifest.url,
            error,
        )


def delete_dataset(manifest: Manifest, *, quietly: bool = False) -> None:
    """Delete a materialized dataset; the user's Parquet files stay.

    Args:
        manifest: the dataset.
        quietly: warn if it cannot be deleted, in place of an error.

    Raises:
        OSError: it cannot be deleted.
    """
    place = Location(manifest.url)
    if _NAME.fullmatch(place.name):
        delete_quietly(place) if quietly else place.delete_folder()


def list_datasets(folder: Location) -> list[StoredDataset]:
    """Return the datasets in ``folder``, complete or not, the longest unused first."""
    datasets = []
    for place in folder.list():
        if _NAME.fullmatch(place.name):
            try:
                files = place.files()
                if not files:
                    continue  # just being made
                used = max(file.changed for file in files) / 1e9
                size = sum(file.size for file in files)
                manifest = _read(place)
            except OSError as error:  # it may be whole, so it is not deleted
                logger.warning("%s is skipped: %s", place, error)
                continue
            datasets.append(StoredDataset(place, size, used, manifest))
    return sorted(datasets, key=lambda dataset: dataset.used)


def clear_datasets(folder: Location, older_than: float, now: float) -> list[StoredDataset]:
    """Delete the datasets in ``folder`` that were not used for ``older_than`` seconds.

    Returns:
        The deleted datasets.
    """
    old = [dataset for dataset in list_datasets(folder) if now - dataset.used >= older_than]
    for dataset in old:
        dataset.location.delete_folder()
    return old


def discard_datasets(folder: Location) -> None:
    """Delete all datasets in ``folder``, which nobody reads; warn of failures."""
    for dataset in _listed_quietly(folder):
        delete_quietly(dataset.location)


def sweep_incomplete(folder: Location, older_than: float, now: float) -> list[StoredDataset]:
    """Delete incomplete datasets of killed writers in ``folder``, if they are older than that.

    They only take room, so failures are warned of.

    Returns:
        The datasets to delete.
    """
    old = [
        dataset
        for dataset in _listed_quietly(folder)
        if dataset.manifest is None and now - dataset.used >= older_than
    ]
    for dataset in old:
        delete_quietly(dataset.location)
    return old


def _listed_quietly(folder: Location) -> list[StoredDataset]:
    try:
        return list_datasets(folder)
    except OSError as error:
        logger.warning("%s is not cleaned up: %s", folder, error)
        return []


def _read(place: Location) -> Manifest | None:
    """Return the manifest of a dataset; ``None`` if a file of it is missing or cut.

    Raises:
        OSError: the storage fails.
    """
    try:
        manifest = Manifest.from_json(place.join(_MANIFEST_FILE).read_text())
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
    manifest = replace(manifest, url=str(place))  # it may have been moved
    sizes = {file.name: file.size for file in place.files()}
    whole = all(
        sizes.get(name) == size
        for name, size in zip(manifest.files, manifest.file_sizes, strict=True)
    )
    return manifest if whole else None
