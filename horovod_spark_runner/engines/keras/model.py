"""The model on a rank: built, checked against the columns, and bound to them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import keras

from ...checkpoint.attachments import AttachedFile, contents_of
from ...errors import ModelError
from ...storage.contents import Contents
from ...training.spec import ModelSource


def build_model(source: ModelSource) -> keras.Model:
    """Return the compiled Keras model of ``source``.

    Raises:
        ModelError: it gives something else.
    """
    model, origin = _build(source)
    if not isinstance(model, keras.Model):
        kind = type(model).__name__
        advice = "it must return a compiled keras.Model"
        if hasattr(model, "horovod_engine"):
            advice = f"say so in its annotation, def model_fn() -> {kind}, to train one"
        raise ModelError(f"{origin} returned {_describe(model)}; {advice}")
    return model


def _build(source: ModelSource) -> tuple[object, str]:
    if source.function is not None:
        return source.call_function(), "model_fn"
    if isinstance(source.file, (Contents, AttachedFile)):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.keras")
            contents_of(source.file).write_to(path)
            objects = dict(source.custom_objects)
            return keras.saving.load_model(path, custom_objects=objects), "the model file"
    model = keras.models.model_from_json(source.file, custom_objects=source.custom_objects)
    return model, "the model file"


def _describe(value: object) -> str:
    if value is None:
        return "None (is its return statement missing?)"
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def check_trainable(
    model: keras.Model, batch_size: int, rows: Sequence[int] = (), ranks: int = 1
) -> None:
    """Check that ``model`` can be trained here, before its variables exist.

    Args:
        model: the model.
        batch_size: rows per rank and step.
        rows: rows of the training data and, where there are some, of the validation data.
        ranks: number of ranks that share a global batch.

    Raises:
        ModelError: it is not compiled, has a training procedure of its own that would not be
            called, or keeps state from batch to batch.
    """
    if not model.compiled:
        raise ModelError(
            f"model {model.name!r} is not compiled; call model.compile(optimizer=…, loss=…) in "
            "model_fn"
        )
    if model._distribute_strategy is not None:
        raise ModelError(
            f"model {model.name!r} was built under a tf.distribute strategy; build it without: "
            "run_training spreads the training over ranks itself"
        )
    for name in ("fit", "make_train_function", "make_test_function", "evaluate"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise ModelError(
                f"{type(model).__name__} overrides {name}(), which run_training does not call; put "
                "what differs into train_step, test_step, compute_loss or callbacks"
            )
    _check_batch_size(model, batch_size, rows, ranks)


def check_stateless(model: keras.Model, why: str) -> None:
    """Check that no layer carries its state from one batch to the next.

    Args:
        model: the model.
        why: why none may, for the message.

    Raises:
        ModelError: one does.
    """
    for layer in model._flatten_layers(include_self=False, recursive=True):
        if getattr(layer, "stateful", False) is True:
            raise ModelError(
                f"layer {layer.name!r} is stateful: it carries its state from one batch to the "
                f"next, but {why}; build it with stateful=False"
            )


def _check_batch_size(model: keras.Model, batch_size: int, rows: Sequence[int], ranks: int) -> None:
    check_stateless(model, "batches are shuffled and spread over ranks")
    for tensor in getattr(model, "inputs", None) or ():
        size = tensor.shape[0]
        if size is not None and (size != batch_size or any(r % (size * ranks) for r in rows)):
            raise ModelError(
                f"model input {tensor.name!r} takes batches of exactly {size} rows, but batch_size "
                f"is {batch_size} and the last batch of {' and '.join(map(str, rows))} rows is a "
                "partial one; build it with keras.Input(shape=…) instead of batch_shape"
            )


def check_losses(model: keras.Model) -> None:
    """Check that the losses a model is compiled with can be shared out over ranks.

    Raises:
        ModelError: one is not reduced to a number.
    """
    for loss in getattr(getattr(model, "_compile_loss", None), "_flat_losses", None) or ():
        if loss.loss.reduction in (None, "none"):
            raise ModelError(
                f"loss {loss.loss.name!r} of model {model.name!r} has reduction="
                f"{loss.loss.reduction!r}, so that the gradients of all rows are added up, however "
                "many ranks share them; use 'sum_over_batch_size' (the default), 'mean' or 'sum'"
            )


def has_custom_steps(model: keras.Model) -> bool:
    """Return whether the user overrides the model's steps, not only its call."""
    return any(
        getattr(type(model), name) is not getattr(keras.Model, name)
        for name in ("train_step", "test_step", "compute_loss", "compute_metrics")
    )


def finalize_layers(model: keras.Model) -> bool:
    """Recompute the constants that layers derive from their weights; call it after setting weights.

    `keras.layers.Normalization` keeps mean and variance as weights, but computes with constants
    made of them. Functions compiled before keep the old constants.

    Args:
        model: a built ``keras.Model``.

    Returns:
        Whether there are such layers.
    """
    finalized = False
    for layer in model._flatten_layers(include_self=True, recursive=True):
        finalize = getattr(layer, "finalize_state", None)
        # Layers without weights (Discretization) derive their state from what `adapt` saw, which a
        # loaded model has no longer: finalising them again would empty them.
        if finalize is not None and layer.weights:
            finalize()
            finalized = True
    return finalized
