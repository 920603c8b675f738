"""Stored forms of a trained Keras model. Loads no framework.

- ``model.keras``, an archive: a zip file whose ``config.json`` describes every layer: classes and
  functions of Keras by their module, the user's own by their names, lambdas as marshalled code.
  That code is never run: `name_lambdas_in` puts names in its place, to be looked up as other
  functions are.
- An exported SavedModel::

    PLACE/
        saved_model.pb, variables/, assets/     as TensorFlow reads them
        columns.json                            what its inputs hold; SHA-256 of the other files
"""

from __future__ import annotations

import hashlib
import json
import keyword
import re
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ...checkpoint.run_directory import RunDirectory
from ...data.manifest import Column
from ...errors import ModelError, RunDirectoryError
from ...frameworks import KERAS
from ...serialize import dumps
from ...storage.checksums import parse_checksums, seal, unseal
from ...storage.contents import Contents, read_entry
from ...storage.filesystem import Location
from ...storage.folders import write_aside
from ...training.engine import GRAPH_FILE
from ...training.sample_rows import SAMPLE_FILE
from ...training.spec import ModelSource
from ...training.trained_model import WEIGHTS_FILE, StoredModel, with_model_fn
from ...typed_json import load_json, read_fields

ARCHIVE_FILE = "model.keras"
PACKED_FILE = "saved_model.zip"
FILES = (ARCHIVE_FILE, WEIGHTS_FILE, SAMPLE_FILE, PACKED_FILE)
# What to call where a Keras model cannot be made again from storage alone.
WITH_MODEL_FN = with_model_fn(KERAS)
CONFIG_FILE = "config.json"
# What an archive is, for messages.
KIND = "a Keras archive"
LAMBDA = "__lambda__"
# Keys and indices that lead to a value in JSON.
_Keys = tuple[str | int, ...]
_COLUMNS_FILE = "columns.json"
_FORMAT = 1
# The signature that every exported SavedModel has.
SERVING = "serving_default"
_ARGUMENT = re.compile("[A-Za-z][A-Za-z0-9_]*")


@dataclass(frozen=True)
class SavedModel:
    """Way of rebuilding the trained model, besides its `ModelSource`.

    Attributes:
        loads: ``"archive"`` if its archive suffices, ``"objects"`` if it does together with
            ``objects``, ``"source"`` if it must be built and given its weights, ``"graph"`` for
            TensorFlow's own format, which suffices.
        objects: pickled dictionary of the user's classes and functions that the archive names.
            They travel in memory only: nothing that is read from storage is unpickled.
    """

    loads: str
    objects: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class KerasFacts:
    """Keras-specific fields of a signature.

    Attributes:
        archive: whether there is a ``model.keras``.
        self_contained: whether it loads and predicts the same without the user's code.
        needs_source: whether it does not with the user's code either, but must be rebuilt.
        run_eagerly: whether it was compiled to run without a graph.
        state: Keras' global settings it was trained under, by name.
        keras: version of Keras.
        graph: the signature that is called of a SavedModel, which then is all there is; ``""`` for
            Keras' own files.
    """

    archive: bool = False
    self_contained: bool = False
    needs_source: bool = False
    run_eagerly: bool = False
    state: Mapping[str, Any] | None = None
    keras: str = ""
    graph: str = ""

    def to_fields(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class KerasParts:
    """Parts that a Keras model is rebuilt from.

    Attributes:
        archive: contents of its ``.keras`` file, if that is the way.
        objects: pickled dictionary of the user's classes and functions that the archive names.
        source: builds it, otherwise.
        weights: contents of the weights file, for ``source``, or where those of ``archive`` are not
            meant.
        state: Keras' global settings it was trained under.
        eager: call it without making a graph of it.
        packed: a SavedModel's files, if it is one.
        graph: the signature that is called of it.
        compiled_by: pickled `ModelSource` that knows the user's losses and metrics, where the
            archive names such or its class compiles itself; for evaluation only.
    """

    archive: Contents | None = field(default=None, repr=False)
    objects: bytes | None = field(default=None, repr=False)
    source: ModelSource | None = None
    weights: Contents | None = field(default=None, repr=False)
    state: Mapping[str, Any] | None = None
    eager: bool = False
    packed: Contents | None = field(default=None, repr=False)
    graph: str = ""
    compiled_by: bytes | None = field(default=None, repr=False)


def keras_parts(
    model: StoredModel,
    source: ModelSource | None,
    saved: SavedModel | None,
    custom_objects: Mapping[str, object],
) -> KerasParts:
    """Return the parts of a stored model; see `Engine.parts`."""
    facts = model.facts(KerasFacts)
    if facts.graph and source is None:
        return KerasParts(packed=model.contents(PACKED_FILE), graph=facts.graph)
    parts = KerasParts(state=facts.state, eager=facts.run_eagerly)
    if saved is not None and saved.loads in ("archive", "objects"):
        archive = model.contents(ARCHIVE_FILE)
        compiled_by = None
        if source is not None and (saved.objects or custom_parts(read_compile_config(archive))):
            compiled_by = dumps(source)
        return replace(parts, archive=archive, objects=saved.objects, compiled_by=compiled_by)
    if source is not None:
        return replace(parts, source=source, weights=model.contents(WEIGHTS_FILE))
    directory = model.directory
    if not facts.archive:
        raise RunDirectoryError(
            f"{directory.location} holds the model's weights only, because Keras could not write "
            f"it; its layers need get_config(). Or give the function that builds it: "
            + WITH_MODEL_FN
        )
    if facts.needs_source:
        raise RunDirectoryError(
            f"the archive in {directory.location} does not give the model that was trained "
            f"({model.signature.problem}); give the function that builds it: {WITH_MODEL_FN}"
        )
    archive = model.contents(ARCHIVE_FILE)
    objects = None
    if not facts.self_contained:
        objects = dumps(_needed_objects(directory, archive, custom_objects))
    return replace(
        parts,
        archive=archive,
        objects=objects,
        weights=model.contents(WEIGHTS_FILE) if model.signature.reweighted else None,
        compiled_by=dumps(ModelSource(custom_objects=custom_objects)) if custom_objects else None,
    )


def _needed_objects(
    directory: RunDirectory, archive: Contents, custom_objects: Mapping[str, object]
) -> dict[str, Any]:
    """Return the custom objects under all names by which the archive calls them.

    Raises:
        RunDirectoryError: some are missing.
    """
    try:
        parts = custom_parts({**_read_config(archive), "compile_config": None})
    except (ValueError, json.JSONDecodeError) as error:
        raise RunDirectoryError(f"{directory.model} cannot be read: {error}") from error
    objects = dict(custom_objects)
    for part in parts:
        if part.key not in objects and part.name in objects:
            objects[part.key] = objects[part.name]
    missing = [part for part in parts if part.key not in objects]
    if missing:
        raise RunDirectoryError(_missing(directory, missing))
    return objects


def _missing(directory: RunDirectory, missing: Sequence[CustomPart]) -> str:
    named = [part.name for part in missing if part.name != LAMBDA]
    text = (
        f"the model in {directory.location} has parts that are not Keras' own, and code is not "
        f"kept in storage: {', '.join(part.describe() for part in missing)}. "
    )
    if len(named) == len(missing):
        example = ", ".join(f"{name!r}: {name}" for name in named)
        return (
            f"{text}Give them, custom_objects={{{example}}}, or the function that builds the "
            + (f"model: {WITH_MODEL_FN}")
        )
    return f"{text}Give the function that builds the model, {WITH_MODEL_FN}"


@dataclass(frozen=True)
class CustomPart:
    """A class or function in an archive that is not Keras' own.

    Attributes:
        name: its name in Python; ``"__lambda__"`` for a function without one.
        key: the name it is looked up by; for a lambda, where it stands.
        layer: name of the layer that it is, or belongs to.
        field: argument of the layer that it is; ``""`` for the layer itself.
    """

    name: str
    key: str
    layer: str
    field: str = ""

    def describe(self) -> str:
        """Return "'my_function' in layer 'dense'" for messages."""
        what = "a lambda" if self.name == LAMBDA else repr(self.name)
        return f"{what} in layer {self.layer!r}" if self.layer else what


def _read_config(archive: Contents) -> dict[str, Any]:
    """Return the archive's description of the model.

    Raises:
        ValueError: it is no ``.keras`` archive.
    """
    config = load_json(read_entry(archive.open(), CONFIG_FILE, KIND))
    if not isinstance(config, dict):
        raise ValueError(f"not {KIND}: {CONFIG_FILE} holds no description")
    return config


def read_compile_config(archive: Contents) -> dict[str, Any]:
    """Return with which losses and metrics the archive's model was compiled; empty if with none.

    Raises:
        ValueError: it is no ``.keras`` archive.
    """
    config = _read_config(archive).get("compile_config") or {}
    names = ("loss", "loss_weights", "metrics", "weighted_metrics")
    return {name: config[name] for name in names if name in config}


def custom_parts(config: Mapping[str, Any]) -> list[CustomPart]:
    """Return the classes and functions that are not Keras' own, each name once."""
    parts = {part.key: part for _, part in _walk(config, (), "")}
    return list(parts.values())


def read_unpacked_config(folder: Path) -> dict[str, Any]:
    """Return what describes the model in an unpacked archive, without how it was compiled."""
    config: dict[str, Any] = load_json((folder / CONFIG_FILE).read_text())
    return {**config, "compile_config": None}


def pack_archive(folder: Path, file: Any) -> None:
    """Write the archive of the files in ``folder``, as Keras does.

    Args:
        folder: what Keras has written unpacked.
        file: takes bytes by its ``write``.
    """
    with zipfile.ZipFile(file, "w") as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.write(path, path.relative_to(folder))


def name_lambdas_in(folder: Path) -> None:
    """Replace each lambda in an unpacked archive by a function named by the key of its part."""
    place = folder / CONFIG_FILE
    config = read_unpacked_config(folder)
    lambdas = [path for path, part in _walk(config, (), "") if part.name == LAMBDA]
    for path in lambdas:
        owner: Any = config
        for step in path[:-1]:
            owner = owner[step]
        owner[path[-1]] = {
            "module": "builtins",
            "class_name": "function",
            "config": _lambda_key(path),
            "registered_name": "function",
        }
    if lambdas:
        place.write_text(json.dumps(config))


def _walk(value: object, path: _Keys, layer: str) -> Iterator[tuple[_Keys, CustomPart]]:
    if isinstance(value, Mapping):
        kind, inner = value.get("class_name"), value.get("config")
        if isinstance(kind, str) and "config" in value:
            if not path or _is_layer(inner):
                layer = _name_in(inner) or kind
            part = _custom(value, kind, path, layer)
            if part is not None:
                yield path, part
        for key, below in value.items():
            yield from _walk(below, (*path, key), layer)
    elif isinstance(value, (list, tuple)):
        for number, below in enumerate(value):
            yield from _walk(below, (*path, number), layer)


def _is_layer(config: object) -> bool:
    return isinstance(config, Mapping) and {"name", "trainable"} <= set(config)


def _name_in(config: object) -> str:
    return str(config.get("name") or "") if isinstance(config, Mapping) else ""


def _custom(value: Mapping[str, Any], kind: str, path: _Keys, layer: str) -> CustomPart | None:
    module, registered = value.get("module"), value.get("registered_name")
    field = str(path[-1]) if path and isinstance(path[-1], str) else ""
    if kind == LAMBDA:
        return CustomPart(LAMBDA, _lambda_key(path), layer, field)
    if kind == "function":
        name = str(value["config"])
        return CustomPart(name, name, layer, field)
    if not registered or (isinstance(module, str) and module.partition(".")[0] == "keras"):
        return None
    return CustomPart(kind, str(registered), layer or _name_in(value["config"]), field)


def _lambda_key(path: _Keys) -> str:
    return "lambda at " + "/".join(map(str, path))


@dataclass(frozen=True)
class _Exported:
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
        ModelError: a column was trained with a transform.
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
                f"a SavedModel cannot take feature column {name!r}: TensorFlow makes it a Python "
                "argument, of ASCII letters, digits and underscores, and no keyword. Rename the "
                "column, or call it otherwise in the export: TFTransformer.setFeatureCols([…])"
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
        written = _write_files(folder, target, columns)
        for file in target.files():
            if file.name not in written:
                target.join(file.name).delete_file()
        return
    write_aside(target, lambda aside: _write_files(folder, aside, columns))


def _write_files(folder: Path, target: Location, columns: Sequence[Column]) -> set[str]:
    """Write all files, the graph's last; return their names."""
    sums: dict[str, str] = {}
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in sorted(paths, key=lambda path: path.name == GRAPH_FILE):
        name = path.relative_to(folder).as_posix()
        if name == GRAPH_FILE:
            sums[name] = hashlib.sha256(path.read_bytes()).hexdigest()
            facts = {"format": _FORMAT, "sums": sums, "columns": [asdict(c) for c in columns]}
            target.join(_COLUMNS_FILE).write_in_place(seal(json.dumps(facts)).encode())
        place, digest = target.join(name), hashlib.sha256()
        place.parent.make_folder()
        Location(path).copy_to(place, digest.update)
        sums[name] = digest.hexdigest()
    return {*sums, _COLUMNS_FILE}


def read_exported(folder: Location) -> _Exported | None:
    """Return the metadata of a SavedModel; ``None`` for one written by other software.

    Raises:
        ModelError: its ``columns.json`` is damaged, or of a newer format.
    """
    place = folder.join(_COLUMNS_FILE)
    try:
        facts = unseal(place.read_text())
        if facts["format"] > _FORMAT:
            raise ModelError(
                f"{folder} is of format {facts['format']}, this package reads format {_FORMAT}: "
                "update it"
            )
        columns = tuple(read_fields(one, Column) for one in facts["columns"])
        return _Exported(columns, parse_checksums(facts["sums"]))
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{place} cannot be read: {error!r}") from error
