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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .._version import __version__
from ..errors import HorovodSparkError, InvalidInputError, RunDirectoryError
from ..storage.arrays import Arrays, dump_arrays, load_arrays
from ..storage.sums import checked, sealed, sum_of, unsealed
from .categories import IndexToString, OneHotEncoder, StringIndexer
from .inputs import Input
from .network import Network
from .stage import Stage, from_stored, to_stored
from .text import (
    CountVectorizer,
    FeatureHasher,
    HashingTF,
    NGram,
    RegexTokenizer,
    StopWordsRemover,
    Tokenizer,
)
from .values import Binarizer, Bucketizer, Imputer
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

FORMAT = 1
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
        plain, own, contents = to_stored(stage, number)
        stages.append(plain)
        arrays.update(own)
        files.update(contents)
    files[ARRAYS_FILE] = dump_arrays(arrays)
    facts = {
        "format": FORMAT,
        "version": __version__,
        "inputs": [asdict(one) for one in bundle.inputs],
        "stages": stages,
        "sums": {name: sum_of(data) for name, data in files.items()},
    }
    files[MAIN_FILE] = sealed(json.dumps(facts, indent=1)).encode()
    return files


def read_bundle(path: str | os.PathLike[str]) -> Bundle:
    """Return the bundle that lies at a place.

    Args:
        path: folder; or a URL, which needs pyarrow.

    Raises:
        RunDirectoryError: there is none, or it is damaged, or of a newer format.
        InvalidInputError: ``path`` is none.
    """
    read = _reader(path)
    try:
        facts = unsealed(read(MAIN_FILE).decode())
        return _bundle(facts, read, path)
    except NotADirectoryError as error:
        raise RunDirectoryError(
            f"{path} is a file; an exported pipeline is the folder that {MAIN_FILE} lies in"
        ) from error
    except FileNotFoundError as error:
        raise RunDirectoryError(
            f"{path} holds no exported pipeline: {MAIN_FILE} is missing"
        ) from error
    except HorovodSparkError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(
            f"the exported pipeline in {path} cannot be read: {error}"
        ) from error


def _bundle(
    facts: Mapping[str, Any], read: Callable[[str], bytes], path: str | os.PathLike[str]
) -> Bundle:
    if facts["format"] > FORMAT:
        raise RunDirectoryError(
            f"{path} was exported by horovod_spark_runner {facts['version']} in format "
            f"{facts['format']}; this one, {__version__}, reads format {FORMAT}: update it"
        )
    sums: Mapping[str, str] = facts["sums"]
    data = {name: checked(name, lambda name=name: read(name), sums) for name in sums}  # type: ignore[misc]
    arrays = load_arrays(data[ARRAYS_FILE])
    stages: Sequence[Mapping[str, Any]] = facts["stages"]
    return Bundle(
        tuple(Input(**one) for one in facts["inputs"]),
        tuple(from_stored(KINDS, one, arrays, data) for one in stages),
        facts["version"],
    )


def _reader(path: str | os.PathLike[str]) -> Callable[[str], bytes]:
    """Return what reads a file of a folder."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise InvalidInputError(f"path must be a path or URL, got {path!r}")
    if "://" in os.fspath(path):
        from ..storage.filesystem import Location

        folder = Location(path)
        return lambda name: folder.join(name).read_bytes()
    place = Path(path).expanduser()
    return lambda name: (place / name).read_bytes()
