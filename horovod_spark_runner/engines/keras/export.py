"""A trained model as a SavedModel, whose inputs are the columns: it scores without this package."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from ...data.manifest import Column
from ...errors import ModelError, on_one_line
from ...storage.filesystem import Location
from ...training.onnx import CLASS, PROBABILITY, TOLERANCE, ClassColumn
from ...training.spec import OutputSpec, TrainingSpec
from ...training.trained_model import Recipe
from .binding import InputBinding
from .loading import Graph, make_model
from .model import (
    Nest,
    call_model,
    fixed_batch,
    fresh_keras_state,
    keras_state,
    output_specs,
    pick,
    unchanged,
    using_keras_state,
)
from .saved import SERVING, check_exportable, publish


def _class_values(column: ClassColumn, spec: OutputSpec, output_value: Any) -> Any:
    """Return a column of classes, of doubles as Spark's are.

    What cannot be probabilities or scores of classes is an error of the call.

    Args:
        column: what is made.
        spec: the output it is made of.
        output_value: the value of that output.
    """
    rows = tf.shape(output_value)[0]
    values = tf.cast(
        tf.reshape(output_value, [rows, spec.shape[0] if spec.shape else 1]), tf.float64
    )
    make = _of_two if values.shape[1] == 1 else _of_several
    classes = make(column, spec, values)
    if column.holds == CLASS:
        return tf.cast(tf.argmax(classes, axis=1), tf.float64)
    return classes


def _of_two(column: ClassColumn, spec: OutputSpec, value: Any) -> Any:
    """Return the values of both classes from an output that describes class 1."""
    if not column.scores:
        value = _checked(column, spec, value, (value >= 0) & (value <= 1))
        return tf.concat([1.0 - value, value], axis=1)
    value = _checked(column, spec, value, tf.math.logical_not(tf.math.is_nan(value)))
    if column.holds == PROBABILITY:
        share = 1.0 / (1.0 + tf.exp(-value))
        return tf.concat([1.0 - share, share], axis=1)
    return tf.concat([-value, value], axis=1)


def _of_several(column: ClassColumn, spec: OutputSpec, values: Any) -> Any:
    """Return an output's value of each class."""
    if not column.scores:
        tolerance = TOLERANCE[spec.dtype]
        low = tf.reduce_min(values, axis=1) >= -tolerance
        near = tf.abs(tf.reduce_sum(values, axis=1) - 1.0) <= tolerance
        return _checked(column, spec, values, low & near)
    values = _checked(column, spec, values, tf.math.logical_not(tf.math.is_nan(values)))
    if column.holds != PROBABILITY:
        return values
    powers = tf.exp(values - tf.reduce_max(values, axis=1, keepdims=True))
    return powers / tf.reduce_sum(powers, axis=1, keepdims=True)


def _checked(column: ClassColumn, spec: OutputSpec, values: Any, right: Any) -> Any:
    """Return ``values``; the call fails where some are not right."""
    what = "has scores that are no numbers" if column.scores else "is no probabilities"
    message = f"output {spec.name!r} of the model {what}:"
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(right), [message, values])]):
        return tf.identity(values)


# Operations that call back into the process they were made in.
_OF_PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
NameOutputs = Callable[[Sequence[str]], Sequence[str]]


@dataclass(frozen=True)
class SavedModelBuilder:
    """Builder of a SavedModel.

    Attributes:
        model: the model, whose variables it holds.
        bind: makes the model's inputs of columns.
        columns: the feature columns, as the model was trained on them.
        names: what they are called outside.
        outputs: what the model gives.
        added: what its outputs are called outside.
        rows: how many it has to be called with; ``None`` for any number.
        transformed: feature columns that were trained with a transform.
        eager: whether the model is called without making a graph of it.
        classes: columns of classes, in place of the outputs they are made of.
        kind: what it is made for, in messages.
        checked: whether a number that an input's type cannot hold is an error of the call.

    Raises:
        ModelError: it cannot be made; the message says why.
    """

    model: keras.Model | Graph
    bind: InputBinding
    columns: Sequence[Column]
    names: Sequence[str]
    outputs: Sequence[OutputSpec]
    added: Sequence[str]
    rows: int | None = None
    transformed: Sequence[str] = ()
    eager: bool = False
    classes: Sequence[ClassColumn] = ()
    kind: str = "a SavedModel"
    checked: bool = True

    def __post_init__(self) -> None:
        check_exportable(self.names, self.transformed)
        names = [name for _, name in self._plain] + [column.name for column in self.classes]
        if len(set(names)) < len(names):
            raise ModelError(f"{self.kind} cannot give several outputs one name: {names}")
        if self.eager:
            raise ModelError(
                f"{self.kind} cannot hold this model: it is compiled with run_eagerly=True, so its "
                "Python code runs for every batch, and a graph would keep one run of it"
            )

    @property
    def _plain(self) -> list[tuple[int, str]]:
        """Indices of the outputs that are exported unchanged, and their exported names."""
        of_classes = {column.output for column in self.classes}
        return [(n, name) for n, name in enumerate(self.added) if n not in of_classes]

    @property
    def inputs(self) -> list[Column]:
        """The columns by their names outside."""
        return [replace(c, name=n) for c, n in zip(self.columns, self.names, strict=True)]

    def write(self, target: Location) -> None:
        """Write it, in place of an earlier one.

        Raises:
            ModelError: TensorFlow cannot make a graph of the model.
            OSError: storage fails.
        """
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder, "saved_model")
            self.leave(place)
            publish(place, target, self.inputs)

    def leave(self, place: Path) -> None:
        """Write TensorFlow's files of it.

        Raises:
            ModelError: TensorFlow cannot make a graph of the model.
        """
        archive = keras.export.ExportArchive()
        archive.track(self.model.loaded if isinstance(self.model, Graph) else self.model)
        for name, function in self.trace().items():
            archive.add_endpoint(name, function)
        try:
            archive.write_out(place, verbose=False)
        except (AssertionError, TypeError, ValueError, tf.errors.OpError) as error:
            raise self._cannot(error) from error

    def trace(self) -> dict[str, Any]:
        """Return the functions of its signatures by name, traced.

        Raises:
            ModelError: TensorFlow cannot make a graph of the model.
        """
        try:
            return {SERVING: self._traced()}
        except Exception as error:  # the user's own call may fail in any way
            raise self._cannot(error) from error

    def _traced(self) -> Any:
        outside = dict(zip((c.name for c in self.columns), self.names, strict=True))

        def serve(inputs: Mapping[str, Any]) -> dict[str, Any]:
            values = {name: inputs[called] for name, called in outside.items()}
            if self.checked:
                for name, bounds in self.bind.bounds.items():
                    values[name] = _within(values[name], bounds, outside[name])
            outputs = call_model(self.model, self.bind.of_tensors(values))
            leaves = [pick(outputs, output.path) for output in self.outputs]
            named_outputs = {name: tf.identity(leaves[place]) for place, name in self._plain}
            for one in self.classes:
                spec, leaf = self.outputs[one.output], leaves[one.output]
                named_outputs[one.name] = _class_values(one, spec, leaf)
            return named_outputs

        function = tf.function(serve, autograph=False)
        made = function.get_concrete_function(
            {
                column.name: tf.TensorSpec([self.rows, *column.shape], column.dtype, column.name)
                for column in self.inputs
            }
        )
        _check_no_python(made.graph.as_graph_def())
        return function

    def _cannot(self, error: BaseException) -> ModelError:
        name = getattr(self.model, "name", "")
        reason = on_one_line(error)
        kind = "" if isinstance(error, ModelError) else f"{type(error).__name__}: "
        return ModelError(f"{self.kind} cannot hold the model {name!r}: {kind}{reason}")


def _within(values: Any, bounds: tuple[int, int], column: str) -> Any:
    """Return ``values`` of a graph, which fails where an input does not hold them."""
    low, high = bounds
    have = values.dtype  # which may not reach the bounds
    right = (values >= max(low, have.min)) & (values <= min(high, have.max))
    message = f"column {column} holds what the model's input does not, which takes {low} to {high}:"
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(right), [message, values])]):
        return tf.identity(values)


def _check_no_python(graph: Any) -> None:
    """Check that a graph calls no function of Python's, which only this process has.

    Raises:
        ModelError: it does.
    """
    functions = (node for function in graph.library.function for node in function.node_def)
    for node in itertools.chain(graph.node, functions):
        if node.op in _OF_PYTHON:
            raise ModelError(
                f"it calls a function of Python's ({node.op} {node.name!r}, as tf.py_function and "
                "tf.numpy_function make), which other processes do not have; write it with "
                "keras.ops or TensorFlow's own operations"
            )


def export_recipe(
    recipe: Recipe,
    columns: Sequence[str],
    outputs: Sequence[str],
    target: Location,
    classes: Sequence[ClassColumn] = (),
) -> None:
    """Write the model of a recipe; see `Engine.export`."""
    with serving(recipe, recipe.columns, columns, outputs) as builder:
        replace(builder, classes=classes).write(target)


@contextlib.contextmanager
def serving(
    recipe: Recipe, columns: Sequence[Column], names: Sequence[str], outputs: Sequence[str]
) -> Iterator[SavedModelBuilder]:
    """Yield the builder of a SavedModel, in the Keras state of the training.

    Args:
        recipe: the model.
        columns: its feature columns, as they are to be taken.
        names: what they are called outside.
        outputs: what its outputs are called outside.

    Raises:
        ModelError: a SavedModel cannot hold the model.
    """
    state = recipe.parts.state
    with using_keras_state(keras_state()), fresh_keras_state():
        model, bind = make_model(recipe)
        with using_keras_state(state):
            yield SavedModelBuilder(
                model,
                bind,
                columns,
                names,
                recipe.outputs,
                outputs,
                recipe.batch_size,
                tuple(recipe.transforms),
                eager=recipe.parts.eager,
            )


def make_builder(
    spec: TrainingSpec, model: keras.Model, inputs: Nest, name: NameOutputs
) -> SavedModelBuilder:
    """Return the builder of a training's SavedModel.

    Args:
        spec: the training.
        model: its model.
        inputs: rows that it takes.
        name: names the outputs.
    """
    with unchanged(model):
        outputs = output_specs(model, inputs)
    names = spec.inputs.columns
    return SavedModelBuilder(
        model,
        InputBinding(model, spec.inputs, spec.train),
        [spec.train.column(one) for one in names],
        names,
        outputs,
        name([output.name for output in outputs]),
        fixed_batch(model),
        [one for one in names if one in spec.config.data.transforms],
        eager=bool(model.run_eagerly),
    )
