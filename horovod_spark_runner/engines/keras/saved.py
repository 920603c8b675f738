"""Everything needed to rebuild a trained Keras model. Loads no framework."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...checkpoint.run_directory import RunDirectory
from ...errors import RunDirectoryError
from ...frameworks import KERAS
from ...serialize import dumps
from ...storage.contents import Contents
from ...training.sample_rows import SAMPLE_FILE
from ...training.spec import ModelSource
from ...training.trained_model import WEIGHTS_FILE, StoredModel, with_model_fn
from .archive import (
    LAMBDA,
    CustomPart,
    custom_parts,
    read_compile_config,
    read_config,
)

ARCHIVE_FILE = "model.keras"
PACKED_FILE = "saved_model.zip"
FILES = (ARCHIVE_FILE, WEIGHTS_FILE, SAMPLE_FILE, PACKED_FILE)
# What to call where a Keras model cannot be made again from storage alone.
WITH_MODEL_FN = with_model_fn(KERAS)


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


def facts_of(model: StoredModel) -> KerasFacts:
    """Return a stored model's Keras-specific fields, with defaults for missing ones."""
    return model.facts(KerasFacts)


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
    custom_objects: Mapping[str, Any],
) -> KerasParts:
    """Return the parts of a stored model; see `Engine.parts`."""
    facts = facts_of(model)
    state, eager = facts.state, facts.run_eagerly
    reweighted = model.signature.reweighted
    if facts.graph and source is None:
        return KerasParts(packed=model.contents(PACKED_FILE), graph=facts.graph)
    if saved is not None and saved.loads in ("archive", "objects"):
        archive = model.contents(ARCHIVE_FILE)
        compiled_by = None
        if source is not None and (saved.objects is not None or _compile_parts(archive)):
            compiled_by = dumps(source)
        return KerasParts(
            archive=archive,
            objects=saved.objects,
            state=state,
            eager=eager,
            compiled_by=compiled_by,
        )
    if source is not None:
        return KerasParts(
            source=source,
            weights=model.contents(WEIGHTS_FILE),
            state=state,
            eager=eager,
        )
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
    weights = model.contents(WEIGHTS_FILE) if reweighted else None
    compiled_by = dumps(ModelSource(custom_objects=custom_objects)) if custom_objects else None
    return KerasParts(
        archive=archive,
        objects=objects,
        weights=weights,
        state=state,
        eager=eager,
        compiled_by=compiled_by,
    )


def _compile_parts(archive: Contents) -> list[CustomPart]:
    return custom_parts(read_compile_config(archive))


def _needed_objects(
    directory: RunDirectory, archive: Contents, custom_objects: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the custom objects under all names by which the archive calls them.

    Raises:
        RunDirectoryError: some are missing.
    """
    try:
        parts = custom_parts(read_config(archive))
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
