"""A trained Keras model with the losses and metrics it was compiled with."""

from __future__ import annotations

import cloudpickle
import keras

from ...errors import ModelError
from ...storage.contents import Contents
from ...training.spec import ModelSource
from ...training.trained_model import Recipe
from .archive import LAMBDA, custom_parts, read_compile_config
from .binding import InputBinding
from .loading import make_model, set_weights
from .model import build_model
from .saved import WITH_MODEL_FN, KerasParts
from .variables import value_of

_OTHERS = "or evaluate by other metrics only, metrics=[…] without 'compiled'"


def make_compiled(recipe: Recipe) -> tuple[keras.Model, InputBinding]:
    """Return `make_model`, compiled as it was for its training.

    The archive says how, unless it names losses or metrics of the user's own, or the model's class
    compiles itself: these are built by their source, and given the weights.

    Raises:
        ModelError: it was not compiled, or what it was compiled with is not known here.
    """
    parts: KerasParts = recipe.own
    model, bind = make_model(recipe)
    if parts.archive is not None:
        model = _compiled(model, parts.archive, recipe, bind)
    if not model.compiled:
        raise ModelError(
            f"model {model.name!r} is not compiled: its function must call model.compile(loss=…), "
            + _OTHERS
        )
    return model, bind


def _compiled(
    model: keras.Model, archive: Contents, recipe: Recipe, bind: InputBinding
) -> keras.Model:
    pickled = recipe.own.compiled_by
    source: ModelSource = ModelSource() if pickled is None else cloudpickle.loads(pickled)
    config, objects = read_compile_config(archive), dict(source.custom_objects)
    own = type(model).compile is not keras.Model.compile
    parts = custom_parts(config)
    missing = [p for p in parts if p.name == LAMBDA or not {p.key, p.name} & objects.keys()]
    if not (own or missing) and config:
        objects.update({part.key: objects.get(part.key, objects.get(part.name)) for part in parts})
        model.compile(**keras.saving.deserialize_keras_object(config, custom_objects=objects))
        return model
    if source.function is not None or source.file is not None:
        built = build_model(source)
        values = [value_of(weight) for weight in model.weights]
        set_weights(built, [value.shape for value in values], values, recipe, bind)
        return built
    if missing:
        which = ", ".join(sorted({part.describe() for part in missing}))
        raise ModelError(
            f"model {model.name!r} was compiled with what is not Keras' own, and code is not kept "
            f"in storage: {which}. Give it, TFTransformer.from_run(run_dir, custom_objects={{…}}), "
            f"or the function that builds the model, {WITH_MODEL_FN}, {_OTHERS}"
        )
    what = f"{type(model).__name__} compiles itself" if own else "it is not known how"
    raise ModelError(
        f"model {model.name!r} cannot be compiled here, as {what}. Give the function that builds "
        f"it, {WITH_MODEL_FN}, {_OTHERS}"
    )
