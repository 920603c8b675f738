"""A SavedModel that this package has exported, in its place in storage. Loads no framework.

::

    PLACE/
        saved_model.pb, variables/, assets/     as TensorFlow reads them
        columns.json                            what its inputs hold; SHA-256 of the other files
"""

from __future__ import annotations

import hashlib
import json
import keyword
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ...data.manifest import Column
from ...errors import ModelError
from ...storage.checksums import parse_checksums, seal, unseal
from ...storage.filesystem import Location
from ...storage.folders import write_aside
from ...training.engine import GRAPH_FILE
from ...typed_json import read_fields

COLUMNS_FILE = "columns.json"
FORMAT = 1
# The signature that every exported SavedModel has.
SERVING = "serving_default"
_ARGUMENT = re.compile("[A-Za-z][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Exported:
    """Metadata of an exported SavedModel beyond TensorFlow's own.

    Attributes:
        columns: its inputs in their order, by the names in its signatures.
        sums: SHA-256 of its files, by their paths in it.
    """

    columns: tuple[Column, ...]
    sums: Mapping[str, str]


def check_transforms(transformed: Collection[str], kind: str) -> None:
    """Check that a graph does to columns all that was done to them before a model took them.

    Args:
        transformed: feature columns that were trained with a transform.
        kind: what is to hold the graph, for messages.

    Raises:
        ModelError: it does not.
    """
    for name in transformed:
        raise ModelError(
            f"{kind} cannot take feature column {name!r}: the model was trained with a transform "
            "of it, which is a function of Python's; transform the rows before, in a column of "
            "their own, or put it into the model's layers"
        )


def check_exportable(names: Sequence[str], transformed: Collection[str]) -> None:
    """Check that feature columns can be inputs of a SavedModel.

    Args:
        names: what the feature columns are called in the signature.
        transformed: feature columns that were trained with a transform.

    Raises:
        ModelError: a column cannot be an input of a signature.
    """
    check_transforms(transformed, "a SavedModel")
    for name in names:
        if not _ARGUMENT.fullmatch(name) or keyword.iskeyword(name) or name == "self":
            raise ModelError(
                f"a SavedModel cannot take feature column {name!r}: TensorFlow makes it the name "
                "of a Python argument, of ASCII letters, digits and underscores after a letter, "
                "and no word of Python's. Call it otherwise, in the rows that are trained on, or "
                "only there: TFTransformer.setFeatureCols([…]), then export"
            )


def publish(folder: Path, target: Location, columns: Sequence[Column]) -> None:
    """Put a SavedModel into its place, in place of an earlier one.

    On local storage and HDFS a reader sees the old one or the new one; elsewhere
    ``saved_model.pb``, which every reader looks for first, is written last.

    Args:
        folder: where TensorFlow has written it.
        target: its place.
        columns: its inputs in their order, by the names in its signatures.

    Raises:
        OSError: storage fails.
    """
    if not target.has_atomic_rename:
        main = target.join(GRAPH_FILE)
        if main.exists():
            main.delete_file()
        written = _write(folder, target, columns)
        for file in target.files():
            if file.name not in written:
                target.join(file.name).delete_file()
        return
    write_aside(target, lambda aside: _write(folder, aside, columns))


def _write(folder: Path, target: Location, columns: Sequence[Column]) -> set[str]:
    """Write all files, the graph's last; return their names."""
    sums: dict[str, str] = {}
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in sorted(paths, key=lambda path: path.name == GRAPH_FILE):
        name = path.relative_to(folder).as_posix()
        if name == GRAPH_FILE:
            sums[name] = hashlib.sha256(path.read_bytes()).hexdigest()
            facts = {"format": FORMAT, "sums": sums, "columns": [asdict(c) for c in columns]}
            target.join(COLUMNS_FILE).write_in_place(seal(json.dumps(facts)).encode())
        place, digest = target.join(name), hashlib.sha256()
        place.parent.make_folder()
        Location(path).copy_to(place, digest.update)
        sums[name] = digest.hexdigest()
    return {*sums, COLUMNS_FILE}


def read_exported(folder: Location) -> Exported | None:
    """Return the metadata of a SavedModel; ``None`` for one written by other software.

    Raises:
        ModelError: its ``columns.json`` is damaged, or of a newer format.
    """
    place = folder.join(COLUMNS_FILE)
    try:
        facts = unseal(place.read_text())
        if facts["format"] > FORMAT:
            raise ModelError(
                f"{folder} is of format {facts['format']}, this package reads format {FORMAT}: "
                "update it"
            )
        columns = tuple(read_fields(one, Column) for one in facts["columns"])
        return Exported(columns, parse_checksums(facts["sums"]))
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{place} cannot be read: {error!r}") from error
