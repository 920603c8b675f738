"""A trained model as the driver knows it: read from a run directory, never loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..data.prepare.schema import quote_all
from ..errors import DataError, InvalidInputError, ModelError, RunDirectoryError
from ..rundir.directory import RunDirectory
from ..rundir.model_folder import (
    ARCHIVE_FILE,
    SAMPLE_FILE,
    WEIGHTS_FILE,
    StoredModel,
    read_model,
)
from ..serialize import check_picklable, dumps
from ..settings.data import Transform
from ..training.archive import LAMBDA, CustomPart, custom_parts, read_config
from ..training.signature import Signature
from ..training.spec import ModelSource, SavedModel, check_objects
from .loading import Recipe

WITH_MODEL_FN = "TFTransformer.from_run(run_dir, model_fn=…)"


@dataclass(frozen=True)
class TrainedModel:
    """A trained model, and how to make it again.

    Attributes:
        recipe: how; without outputs for a model that cannot be called.
        problem: why it could not be called when it was saved; ``""`` if it could.
        learn_outputs: whether it is built by a function that may build another model, or one with
            a ``call`` that the trained one had not: what it gives has to be found out.
        place: where it lies, for messages.
    """

    recipe: Recipe = field(repr=False)
    problem: str = ""
    place: str = ""
    learn_outputs: bool = False


def read_trained_model(
    directory: RunDirectory,
    source: ModelSource,
    saved: SavedModel | None,
    transforms: Mapping[str, Transform],
) -> TrainedModel:
    """Return the model of a run that has just ended.

    Args:
        directory: its run directory.
        source: what the model was built from.
        saved: what rank 0 says of it.
        transforms: what to do with decoded images, by column.
    """
    model = read_model(directory)
    signature = read_signature(model)
    recipe = _recipe(signature, transforms)
    if saved is not None and saved.loads in ("archive", "objects"):
        recipe = replace(recipe, archive=model.read(ARCHIVE_FILE), objects=saved.objects)
    else:
        recipe = _built_anew(model, recipe, source)
    return _trained(directory, signature, recipe)


def read_finished_run(
    directory: RunDirectory,
    *,
    custom_objects: Mapping[str, Any] | None = None,
    model_fn: Callable[[], Any] | None = None,
    transforms: Mapping[str, Transform] | None = None,
) -> TrainedModel:
    """Return the model that an earlier run left in its directory.

    Args:
        directory: the run directory.
        custom_objects: the model's own classes and functions by name.
        model_fn: builds the model, if it is to be built and given its weights.
        transforms: the functions its image columns were trained with.

    Raises:
        RunDirectoryError: there is no finished model, or it needs the user's code.
        DataError: a transform that the model was trained with lacks.
        InvalidInputError: an argument cannot be used.
    """
    custom_objects, transforms = check_objects(custom_objects), dict(transforms or {})
    if model_fn is not None and not callable(model_fn):
        raise InvalidInputError(
            "model_fn must be a function without arguments that returns the model, got "
            f"{model_fn!r}"
        )
    check_picklable(
        {"model_fn": model_fn, "custom_objects": custom_objects, "transforms": transforms}
    )
    model = read_model(directory)
    signature = read_signature(model)
    lacking = [name for name in signature.transforms if name not in transforms]
    if lacking:
        raise DataError(
            f"the model in {directory.location} was trained with transforms of column "
            f"{quote_all(lacking)}; functions are not kept in storage: give them, transforms={{…}}"
        )
    recipe = _recipe(signature, transforms)
    if model_fn is not None:
        recipe = _built_anew(model, recipe, ModelSource(function=model_fn))
        return replace(_trained(directory, signature, recipe), learn_outputs=True)
    if signature.outputs is None:
        return _trained(directory, signature, recipe)
    if not signature.archive:
        raise RunDirectoryError(
            f"{directory.location} holds the model's weights only, because Keras could not write "
            f"it; its layers need get_config(). Or give the function that builds it: "
            + WITH_MODEL_FN
        )
    if signature.needs_source:
        raise RunDirectoryError(
            f"the archive in {directory.location} does not give the model that was trained "
            f"({signature.problem}); give the function that builds it: {WITH_MODEL_FN}"
        )
    archive = model.read(ARCHIVE_FILE)
    objects = None
    if not signature.self_contained:
        objects = dumps(_needed_objects(directory, signature, archive, custom_objects))
    return _trained(directory, signature, replace(recipe, archive=archive, objects=objects))


def read_signature(model: StoredModel) -> Signature:
    """Return what is known of a finished model.

    Raises:
        RunDirectoryError: it is none that this version knows.
    """
    try:
        return Signature.from_fields(model.signature)
    except ValueError as error:
        place = model.directory.signature
        raise RunDirectoryError(f"{place} cannot be read: {error}") from error


def check_callable(model: TrainedModel) -> None:
    """Check that there is something to predict with.

    Raises:
        ModelError: the model cannot be called.
    """
    if not model.recipe.outputs:
        raise ModelError(
            f"the model in {model.place} cannot predict: {model.problem}. Its weights are in "
            "model/weights.npz, in the order of model.weights (numpy.load and "
            "model.set_weights). To predict with it, give its class a call(), and the function "
            f"that builds it: {WITH_MODEL_FN}"
        )


def _trained(directory: RunDirectory, signature: Signature, recipe: Recipe) -> TrainedModel:
    return TrainedModel(recipe, signature.problem, str(directory.location))


def _recipe(signature: Signature, transforms: Mapping[str, Transform]) -> Recipe:
    return Recipe(
        inputs=signature.inputs,
        columns=signature.columns,
        outputs=signature.outputs or (),
        transforms=dict(transforms),
        state=signature.state,
        eager=signature.run_eagerly,
        batch_size=signature.batch_size,
    )


def _built_anew(model: StoredModel, recipe: Recipe, source: ModelSource) -> Recipe:
    """Return the recipe for a model that ``source`` builds, is given its weights, and checked."""
    return replace(
        recipe,
        source=source,
        weights=model.read(WEIGHTS_FILE),
        sample=model.read(SAMPLE_FILE) if SAMPLE_FILE in model.sums else None,
    )


def _needed_objects(
    directory: RunDirectory,
    signature: Signature,
    archive: bytes,
    custom_objects: Mapping[str, Any],
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
