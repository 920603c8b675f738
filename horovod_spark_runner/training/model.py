"""The model on a rank: built, checked against the columns, and bound to them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from ..data.manifest import Column, Manifest
from ..errors import ModelError
from .spec import Binding, ModelSource, OutputSpec

Arrays = Mapping[str, Any]


def build_model(source: ModelSource) -> Any:
    """Return the compiled Keras model of ``source``.

    Raises:
        ModelError: it gives something else.
    """
    if source.function is not None:
        model = source.function()
        origin = "model_fn"
    elif source.archive is not None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.keras")
            path.write_bytes(source.archive)
            model = keras.saving.load_model(path, custom_objects=dict(source.custom_objects))
        origin = "the model file"
    else:
        model = keras.models.model_from_json(source.json, custom_objects=source.custom_objects)
        origin = "the model file"
    if not isinstance(model, keras.Model):
        raise ModelError(
            f"{origin} returned {_describe(model)}; it must return a compiled keras.Model"
        )
    return model


def _describe(value: Any) -> str:
    if value is None:
        return "None (is its return statement missing?)"
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def check_trainable(model: Any) -> None:
    """Check that ``model`` can be trained here.

    Raises:
        ModelError: it is not compiled, or was wrapped by Horovod's own Keras optimizer.
    """
    if not model.compiled or model.optimizer is None:
        raise ModelError(
            f"model {model.name!r} is not compiled; call model.compile(optimizer=…, loss=…) in "
            "model_fn"
        )
    for optimizer in find_optimizers(model):
        if _is_horovods(optimizer):
            raise ModelError(
                f"optimizer {optimizer.name!r} was made by Horovod's Keras DistributedOptimizer, "
                "which does not average gradients under Keras 3; compile the model with the plain "
                "Keras optimizer: run_training exchanges the gradients itself"
            )
    if model.jit_compile:
        raise ModelError(
            f"model {model.name!r} was compiled with jit_compile=True, but Horovod's collectives "
            "cannot run inside an XLA-compiled step; compile it with jit_compile=False"
        )


def averages_by_weight(model: Any) -> bool:
    """Tell whether the model's loss divides by the sum of sample weights instead of by rows.

    Raises:
        ModelError: the loss is a sum, which depends on how rows are spread over ranks.
    """
    losses = [
        loss for loss in keras.tree.flatten(model.loss) if isinstance(loss, keras.losses.Loss)
    ]
    reductions = {loss.reduction for loss in losses}
    if "sum" in reductions or "none" in reductions or None in reductions:
        raise ModelError(
            f"the model's loss has reduction={sorted(map(str, reductions))}; use "
            "'sum_over_batch_size' (the default), so that the loss of a global batch is the mean "
            "over its rows"
        )
    return "mean_with_sample_weight" in reductions


def find_optimizers(model: Any) -> list[Any]:
    """Return the model's optimizers: the compiled one, and any further attribute of a subclass."""
    found = [model.optimizer] if model.optimizer is not None else []
    for value in vars(model).values():
        if isinstance(value, keras.optimizers.Optimizer) and not any(value is o for o in found):
            found.append(value)
    return found


def _is_horovods(optimizer: Any) -> bool:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return any(
        str(getattr(member, "__module__", "")).startswith("horovod.")
        for cls in type(inner).__mro__
        for member in vars(cls).values()
    )


class InputBinding:
    """Turns a batch's columns into what the model is called with.

    Args:
        model: the model.
        binding: the columns, and the inputs they are for.
        manifest: the columns' shapes.

    Raises:
        ModelError: inputs and columns do not fit; the message shows both.
    """

    def __init__(self, model: Any, binding: Binding, manifest: Manifest) -> None:
        columns = [manifest.column(name) for name in binding.columns]
        inputs = list(model.inputs or [])
        self._single = len(columns) == 1 and len(inputs) <= 1
        self._pairs: list[tuple[str, Column, tuple[int, ...] | None]] = []
        if not inputs:  # a subclass: its call() decides
            names = binding.names or binding.columns
            self._pairs = [(n, c, None) for n, c in zip(names, columns, strict=True)]
            return
        for tensor, column in _match(inputs, binding, columns):
            self._pairs.append((tensor.name, column, _fit(tensor, column, inputs, columns)))

    def __call__(self, arrays: Arrays) -> Any:
        """Return the model's input: one array, or arrays by input name."""
        values = {name: _shaped(arrays[c.name], shape) for name, c, shape in self._pairs}
        return next(iter(values.values())) if self._single else values


def _match(
    inputs: Sequence[Any], binding: Binding, columns: Sequence[Column]
) -> list[tuple[Any, Column]]:
    names = [tensor.name for tensor in inputs]
    given = binding.names or (binding.columns if len(inputs) > 1 else ())
    if set(given) == set(names):
        by_name = dict(zip(given, columns, strict=True))
        return [(tensor, by_name[tensor.name]) for tensor in inputs]
    if binding.names is not None or len(inputs) != len(columns):
        keys = f"feature_cols names the inputs {list(binding.names)}, " if binding.names else ""
        raise ModelError(f"{keys}{_both(inputs, columns)}" + _assembler_hint(inputs, columns))
    return list(zip(inputs, columns, strict=True))


def _assembler_hint(inputs: Sequence[Any], columns: Sequence[Column]) -> str:
    if len(inputs) == 1 and len(columns) > 1:
        return "; join the columns into one with pyspark.ml.feature.VectorAssembler"
    return ""


def _fit(
    tensor: Any, column: Column, inputs: Sequence[Any], columns: Sequence[Column]
) -> tuple[int, ...]:
    """Return the shape to give ``column``'s rows so that they are the input ``tensor``."""
    wanted = tuple(tensor.shape[1:])
    if _fits(column.shape, wanted):
        return column.shape
    if column.shape == () and _fits((1,), wanted):
        return (1,)
    raise ModelError(
        f"model input {tensor.name!r} takes rows of shape {wanted}, but column {column.name!r} "
        f"has rows of shape {column.shape}; give it another with shapes={{{column.name!r}: …}}. "
        + _both(inputs, columns)
    )


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(
        size is None or size == have for have, size in zip(shape, wanted, strict=True)
    )


def _both(inputs: Sequence[Any], columns: Sequence[Column]) -> str:
    has = ", ".join(f"{t.name!r}: {t.dtype} of shape {tuple(t.shape[1:])}" for t in inputs)
    return f"the model's inputs are {has}; the feature columns are " + ", ".join(
        column.describe() for column in columns
    )


def _shaped(values: Any, shape: tuple[int, ...] | None) -> Any:
    if shape is None or tuple(values.shape[1:]) == shape:
        return values
    return values.reshape(-1, *shape)


def bind_outputs(model: Any, binding: Binding) -> Callable[[Arrays], Any]:
    """Return the function that makes the labels of a batch as the model's loss takes them.

    Raises:
        ModelError: outputs and label columns do not fit.
    """
    outputs = model.outputs or [None]
    if len(binding.columns) == 1 and len(outputs) == 1:
        name = binding.columns[0]
        return lambda arrays: arrays[name]
    names = output_names(model)
    given = binding.names or binding.columns
    columns = binding.columns
    if model.outputs and set(given) == set(names):
        columns = tuple(dict(zip(given, binding.columns, strict=True))[name] for name in names)
    elif binding.names is not None or (model.outputs and len(outputs) != len(binding.columns)):
        raise ModelError(
            f"the model's outputs are {names}, but label_cols gives {list(given)}; name one label "
            "column for each output"
        )
    if isinstance(getattr(model, "output", None), dict):
        return lambda arrays: {n: arrays[c] for n, c in zip(names, columns, strict=True)}
    return lambda arrays: [arrays[column] for column in columns]


def output_names(model: Any) -> list[str]:
    """Return the names of the model's outputs; a single one is called "prediction"."""
    outputs = model.outputs or [None]
    if len(outputs) == 1:
        return ["prediction"]
    return list(
        getattr(model, "output_names", None) or [f"output_{i}" for i in range(len(outputs))]
    )


def output_specs(model: Any, example: Any) -> list[OutputSpec]:
    """Return names, shapes and types of what the model gives for ``example`` inputs."""
    values = flatten_outputs(model(example, training=False))
    names = output_names(model)
    if len(names) != len(values):  # a subclass that returns several
        names = [f"output_{i}" for i in range(len(values))]
    return [
        OutputSpec(name, tuple(value.shape[1:]), keras.backend.standardize_dtype(value.dtype))
        for name, value in zip(names, values, strict=True)
    ]


def flatten_outputs(value: Any) -> list[Any]:
    """Return the tensors of a model's output in the order of its names."""
    return list(keras.tree.flatten(value))


def finalize_layers(model: Any) -> None:
    """Let layers compute anew what they derive from their weights; to be called after setting them.

    `keras.layers.Normalization` keeps mean and variance as weights, but computes with constants
    made of them. Functions compiled before keep the old constants.

    Args:
        model: a built ``keras.Model``.
    """
    for layer in model._flatten_layers(include_self=True, recursive=True):
        finalize = getattr(layer, "finalize_state", None)
        # Layers without weights (Discretization) derive their state from what `adapt` saw, which a
        # loaded model has no longer: finalising them again would empty them.
        if finalize is not None and layer.weights:
            finalize()
