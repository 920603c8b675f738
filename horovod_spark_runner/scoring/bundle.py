"""An exported pipeline in storage: data only, nothing is unpickled.

::

    PATH/
        pipeline.json           format, inputs, stages; SHA-256 of itself and the other files
        arrays.npz              fitted arrays, by stage and name
        N.contents.zip          the network of stage N: a SavedModel, or an ONNX file

``pipeline.json`` is written last.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from .._version import __version__
from ..errors import InvalidInputError, RunDirectoryError
from ..storage.arrays import Arrays, dump_arrays, load_arrays
from ..storage.checksums import compute_checksum, parse_checksums, read_verified, seal, unseal
from ..storage.contents import MAX_TEXT_BYTES, Contents, FilePart, convert_parse_errors
from ..typed_json import read_fields
from .columns import Input, Stage
from .network import Network
from .text import (
    CountVectorizer,
    FeatureHasher,
    HashingTF,
    NGram,
    RegexTokenizer,
    StopWordsRemover,
    Tokenizer,
)
from .values import Binarizer, Bucketizer, Imputer, IndexToString, OneHotEncoder, StringIndexer
from .vectors import (
    Interaction,
    MinMaxScaler,
    Normalizer,
    PolynomialExpansion,
    Projection,
    Scaler,
    VectorAssembler,
    VectorSlicer,
)

_FORMAT = 1
MAIN_FILE, ARRAYS_FILE = "pipeline.json", "arrays.npz"
KINDS: dict[str, type[Stage]] = {
    kind.__name__: kind
    for kind in (
        Binarizer,
        Bucketizer,
        CountVectorizer,
        FeatureHasher,
        HashingTF,
        Imputer,
        IndexToString,
        Interaction,
        MinMaxScaler,
        NGram,
        Network,
        Normalizer,
        OneHotEncoder,
        Projection,
        PolynomialExpansion,
        RegexTokenizer,
        Scaler,
        StopWordsRemover,
        StringIndexer,
        Tokenizer,
        VectorAssembler,
        VectorSlicer,
    )
}


@dataclass(frozen=True)
class Bundle:
    """An exported pipeline.

    Attributes:
        inputs: the columns it takes.
        stages: what is done with them, in this order.
        version: the version of this package that has written it.
    """

    inputs: tuple[Input, ...]
    stages: tuple[Stage, ...]
    version: str = __version__


def bundle_files(bundle: Bundle) -> dict[str, bytes | memoryview]:
    """Return the files of a bundle by name; ``pipeline.json`` is the last."""
    stages, arrays = [], Arrays()
    files: dict[str, bytes | memoryview] = {}
    for number, stage in enumerate(bundle.stages):
        plain, stage_arrays, contents = _to_stored(stage, number)
        stages.append(plain)
        arrays.update(stage_arrays)
        files.update(contents)
    files[ARRAYS_FILE] = dump_arrays(arrays)
    facts = {
        "format": _FORMAT,
        "version": __version__,
        "inputs": [asdict(one) for one in bundle.inputs],
        "stages": stages,
        "sums": {name: compute_checksum(data) for name, data in files.items()},
    }
    files[MAIN_FILE] = seal(json.dumps(facts, indent=1)).encode()
    return files


def read_bundle(path: str | os.PathLike[str]) -> Bundle:
    """Read the bundle at a location.

    Args:
        path: folder; or a URL, which needs pyarrow.

    Raises:
        RunDirectoryError: there is none, or it is damaged, or of a newer format.
        InvalidInputError: ``path`` is none.
    """
    read = _reader(path)
    try:
        with convert_parse_errors("an exported pipeline"):
            facts = unseal(read(MAIN_FILE).read().decode())
            return _bundle(facts, read, path)
    except NotADirectoryError as error:
        raise RunDirectoryError(
            f"{path} is a file; an exported pipeline is the folder that {MAIN_FILE} lies in"
        ) from error
    except FileNotFoundError as error:
        raise RunDirectoryError(
            f"{path} holds no exported pipeline: {MAIN_FILE} is missing"
        ) from error
    except RunDirectoryError:
        raise
    except (OSError, ValueError) as error:
        raise RunDirectoryError(
            f"the exported pipeline in {path} cannot be read: {error}"
        ) from error


def _to_stored(stage: Stage, number: int) -> tuple[dict[str, Any], Arrays, dict[str, bytes]]:
    """Return a stage as JSON's values, its arrays by name, and its files by name.

    Args:
        stage: the stage.
        number: its place in the pipeline.
    """
    plain: dict[str, Any] = {"kind": type(stage).__name__}
    arrays: Arrays = {}
    files: dict[str, bytes] = {}
    for field in fields(stage):
        value = getattr(stage, field.name)
        name = f"{number}.{field.name}"
        if isinstance(value, np.ndarray):
            arrays[name] = value
            value = {"array": name}
        elif isinstance(value, bytes):
            files[f"{name}.zip"] = value
            value = {"file": f"{name}.zip"}
        plain[field.name] = value
    return plain, arrays, files


def _from_stored(
    plain: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    files: Mapping[str, bytes],
) -> Stage:
    """Return the stage that `_to_stored` was given.

    Raises:
        ValueError: it is of none of these kinds, or a field is of another type.
    """
    fields = dict(plain)
    kind = fields.pop("kind")
    if kind not in KINDS:
        raise ValueError(f"it has a stage {kind!r}, which this version does not know")
    for name, value in fields.items():
        if isinstance(value, dict):
            fields[name] = arrays[value["array"]] if "array" in value else files[value["file"]]
    return read_fields(fields, KINDS[kind])


@dataclass(frozen=True)
class _Version:
    """Fields of ``pipeline.json`` that every format has."""

    format: int
    version: str


@dataclass(frozen=True)
class _Facts:
    """Fields of ``pipeline.json``."""

    inputs: tuple[Input, ...]
    stages: tuple[dict[str, Any], ...]
    sums: dict[str, str]


def _bundle(plain: object, read: Callable[[str], Contents], path: str | os.PathLike[str]) -> Bundle:
    written = read_fields(plain, _Version)
    if written.format > _FORMAT:
        raise RunDirectoryError(
            f"{path} was exported by horovod_spark_runner {written.version} in format "
            f"{written.format}; this one, {__version__}, reads format {_FORMAT}: update it"
        )
    facts = read_fields(plain, _Facts)
    sums = parse_checksums(facts.sums)
    data = {name: read_verified(name, read, sums) for name in sums}
    arrays = load_arrays(data.pop(ARRAYS_FILE))
    files = {name: contents.read() for name, contents in data.items()}
    stages = tuple(_from_stored(one, arrays, files) for one in facts.stages)
    return Bundle(facts.inputs, stages, written.version)


def _reader(path: str | os.PathLike[str]) -> Callable[[str], Contents]:
    """Return a function that reads a folder's files, large ones in place."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise InvalidInputError(f"path must be a path or URL, got {path!r}")
    if "://" in os.fspath(path):
        from ..storage.filesystem import Location

        folder = Location(path)

        def fetch(name: str) -> Contents:
            place = folder.join(name)
            if name == MAIN_FILE:
                return Contents(place.read_bytes(MAX_TEXT_BYTES))
            return place.spool(lambda part: None)

        return fetch
    place = Path(path).expanduser()

    def read(name: str) -> Contents:
        status = (place / name).stat()
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise InvalidInputError(f"{place / name} is not a regular file")
        if name == MAIN_FILE and status.st_size > MAX_TEXT_BYTES:
            raise InvalidInputError(f"{place / name} has more than {MAX_TEXT_BYTES:,} bytes")
        return Contents(FilePart(str(place / name), 0, status.st_size))

    return read
