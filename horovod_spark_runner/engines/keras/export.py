"""Export a trained model as a SavedModel, an ONNX file or a ``.keras`` file.

The inputs of a SavedModel and an ONNX file are the columns: they score without this package.
TensorFlow's graph is converted to ONNX by tf2onnx. That may go wrong in silence, so the file is run
by onnxruntime on the model's sample rows, and what Keras does not give is refused.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import cloudpickle
import keras
import numpy as np
import tensorflow as tf

from ...data.manifest import Column
from ...errors import DataError, ModelError, on_one_line
from ...frameworks import quiet_imports
from ...storage.arrays import Arrays
from ...storage.filesystem import Location
from ...training.onnx import (
    MOST_BYTES,
    ROWS,
    OnnxSession,
    check_installed,
    write_facts,
)
from ...training.sample_rows import check_close, finite_rows, repeat_rows
from ...training.spec import OutputSpec, TrainingSpec
from ...training.trained_model import Recipe
from .artifact import probe_loading, save_unpacked
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
    sample_inputs,
    to_numpy,
    unchanged,
    using_keras_state,
)
from .private import patch_tf2onnx
from .saved import SERVING, KerasParts, check_exportable, check_transforms, pack_archive, publish

# Operations that call back into the process they were made in.
_OF_PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
# The function of a signature.
_Predict: TypeAlias = tf.types.experimental.PolymorphicFunction
_NameOutputs = Callable[[Sequence[str]], Sequence[str]]
_OPSET = 18
# A batch of one, and one of many.
_SIZES = (1, 17)


def export_saved_model(
    recipe: Recipe,
    columns: Sequence[str],
    outputs: Sequence[str],
    target: Location,
) -> None:
    """Write the model of a recipe; see `Engine.export`."""
    with _serving(recipe, recipe.columns, columns, outputs) as builder:
        builder.write(target)


@contextlib.contextmanager
def _serving(
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
    spec: TrainingSpec, model: keras.Model, inputs: Nest, name: _NameOutputs
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
    kind: str = "a SavedModel"
    checked: bool = True

    def __post_init__(self) -> None:
        check_exportable(self.names, self.transformed)
        if len(set(self.added)) < len(self.added):
            raise ModelError(
                f"{self.kind} cannot give several outputs one name: {list(self.added)}"
            )
        if self.eager:
            raise ModelError(
                f"{self.kind} cannot hold this model: it is compiled with run_eagerly=True, so its "
                "Python code runs for every batch, and a graph would keep one run of it"
            )

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
        archive.add_endpoint(SERVING, self.trace())
        try:
            archive.write_out(place, verbose=False)
        except (AssertionError, TypeError, ValueError, tf.errors.OpError) as error:
            raise self._cannot(error) from error

    def trace(self) -> _Predict:
        """Return the function of its signature, traced.

        Raises:
            ModelError: TensorFlow cannot make a graph of the model.
        """
        try:
            return self._traced()
        except Exception as error:  # the user's own call may fail in any way
            raise self._cannot(error) from error

    def _traced(self) -> _Predict:
        outside = dict(zip((c.name for c in self.columns), self.names, strict=True))

        def serve(inputs: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            values = {name: inputs[called] for name, called in outside.items()}
            if self.checked:
                for name, bounds in self.bind.bounds.items():
                    values[name] = _within(values[name], bounds, outside[name])
            outputs = call_model(self.model, self.bind.of_tensors(values))
            return {
                name: tf.identity(pick(outputs, output.path))
                for name, output in zip(self.added, self.outputs, strict=True)
            }

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


def _check_no_python(graph: Any) -> None:
    """Check that a graph calls no function of Python's, which only this process has.

    Raises:
        ModelError: the graph calls a function of Python's.
    """
    functions = (node for function in graph.library.function for node in function.node_def)
    for node in itertools.chain(graph.node, functions):
        if node.op in _OF_PYTHON:
            raise ModelError(
                f"it calls a function of Python's ({node.op} {node.name!r}, as tf.py_function and "
                "tf.numpy_function make), which other processes do not have; write it with "
                "keras.ops or TensorFlow's own operations"
            )


def _within(values: tf.Tensor, bounds: tuple[int, int], column: str) -> tf.Tensor:
    """Return ``values`` of a graph, which fails where an input does not hold them."""
    low, high = bounds
    have = values.dtype  # which may not reach the bounds
    right = (values >= max(low, have.min)) & (values <= min(high, have.max))
    message = f"column {column} holds what the model's input does not, which takes {low} to {high}:"
    return _assert_all(right, message, values)


def _assert_all(right: tf.Tensor, message: str, values: tf.Tensor) -> tf.Tensor:
    """Return ``values`` of a graph, whose call fails with a message unless all are right."""
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(right), [message, values])]):
        return tf.identity(values)


def export_onnx(
    recipe: Recipe, columns: Sequence[str], outputs: Sequence[str], target: Location
) -> None:
    """Write the model of a recipe; see `Engine.export`."""
    with quiet_imports():
        check_installed("onnx", "tf2onnx")
    check_transforms(tuple(recipe.transforms), "an ONNX file")
    if len(set(outputs)) < len(outputs) or set(outputs) & set(columns):
        raise ModelError(
            f"an ONNX file names inputs and outputs once: inputs {list(columns)}, outputs "
            f"{list(outputs)}"
        )
    # What TensorFlow calls them must be names of Python's.
    plain = [replace(column, encoding="") for column in recipe.columns]
    names = [f"column{number}" for number in range(len(plain))]
    output_names = [f"output{number}" for number in range(len(outputs))]
    with _serving(recipe, plain, names, output_names) as base:
        builder = replace(base, kind="an ONNX file", checked=False)  # which raises no errors
        _check_size(builder.model)
        inputs = [replace(column, name=n) for column, n in zip(plain, columns, strict=True)]
        called = dict(zip((*names, *output_names), (*columns, *outputs), strict=True))
        model = _converted(builder, called, inputs)
        predict = builder.trace()
        size = max(_SIZES) if builder.rows is None else builder.rows
        sample = recipe.sample_rows().inputs
        rows = dict(zip(names, (sample[column.name] for column in recipe.columns), strict=True))
        try:
            rows = finite_rows(rows, size, lambda some: [*_call_keras(predict, some).values()])
        except Exception as error:  # the user's own call may fail in any way
            raise _onnx_refusal(builder, f"{type(error).__name__}: {error}") from error
        contents = bytes(model.SerializeToString())
        _check_outputs(builder, called, predict, rows, contents)
    target.write_bytes(contents)


def _converted(
    builder: SavedModelBuilder, called: Mapping[str, str], inputs: Sequence[Column]
) -> Any:
    """Return the model of the file.

    Args:
        builder: makes the SavedModel.
        called: what its inputs and outputs are called in the file.
        inputs: the columns, by their names in the file.
    """
    import onnx
    from tf2onnx import tf_loader

    with tempfile.TemporaryDirectory() as folder:
        builder.leave(Path(folder))
        try:
            with _numpy_of_old(), _silent():
                graph, taken, outputs, tables, names = tf_loader.from_saved_model(
                    folder,
                    None,
                    None,
                    signatures=[SERVING],
                    return_initialized_tables=True,
                    return_tensors_to_rename=True,
                )
                names = {tensor: called[name] for tensor, name in names.items()}
                model = _onnx_of(graph, taken, outputs, tables, names)
        except Exception as error:  # whatever tf2onnx comes across
            raise _onnx_refusal(builder, f"tf2onnx says {type(error).__name__}: {error}") from error
    unknown = {
        f"{node.op_type} ({node.name})"
        for node in model.graph.node
        if not onnx.defs.has(node.op_type, _OPSET, node.domain)
    }
    if unknown:
        raise _onnx_refusal(builder, f"tf2onnx knows no form of {', '.join(sorted(unknown))}")
    input_names = {value.name for value in model.graph.input}
    if input_names != {column.name for column in inputs}:
        raise _onnx_refusal(builder, f"tf2onnx leaves the inputs {sorted(input_names)} open")
    _set_shapes(model.graph, builder, called)
    added = [called[name] for name in builder.added]
    outside = dict(
        zip((one.name for one in builder.columns), (c.name for c in inputs), strict=True)
    )
    bounds = {outside[name]: limits for name, limits in builder.bind.bounds.items()}
    write_facts(model, inputs, builder.outputs, added, bounds)
    try:
        onnx.checker.check_model(model)
    except Exception as error:  # a graph that is none
        raise _onnx_refusal(builder, str(error)) from error
    return model


def _onnx_of(graph: Any, inputs: Any, outputs: Any, tables: Any, names: Any) -> Any:
    """Return TensorFlow's frozen graph as ONNX."""
    import tf2onnx

    with tf.Graph().as_default() as whole:
        tf.import_graph_def(graph, name="")
        made = tf2onnx.tfonnx.process_tf_graph(
            whole,
            opset=_OPSET,
            input_names=inputs,
            output_names=outputs,
            initialized_tables=tables,
            tensors_to_rename=names,
            custom_op_handlers={"Erfc": (_erfc, [])},
        )
        return tf2onnx.optimizer.optimize_graph(made).make_model("horovod_spark_runner")


def _erfc(graph: Any, node: Any, name: str, arguments: Any) -> None:
    """Write 1 - erf, of which TensorFlow makes one operation (in GELU), and ONNX has none."""
    from tf2onnx.utils import map_onnx_to_numpy_type

    shape, dtype = graph.get_shape(node.output[0]), graph.get_dtype(node.output[0])
    graph.remove_node(name)
    erf = graph.make_node("Erf", node.input, shapes=[shape], dtypes=[dtype])
    one = graph.make_const(f"{name}_one", np.ones((), map_onnx_to_numpy_type(dtype)))
    ends = {"outputs": node.output, "shapes": [shape], "dtypes": [dtype]}
    graph.make_node("Sub", [one.output[0], erf.output[0]], name=name, **ends)


@contextlib.contextmanager
def _numpy_of_old() -> Iterator[None]:
    """Provide tf2onnx with names that NumPy 2 has removed, as Keras' own export does."""
    missing = "object" not in vars(np)
    try:
        if missing:
            np.object = object  # type: ignore[attr-defined]
        patch_tf2onnx()
        yield
    finally:
        if missing and "object" in vars(np):
            del np.object  # type: ignore[attr-defined]


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Silence tf2onnx and TensorFlow; errors are still raised."""
    loggers = [logging.getLogger(name) for name in ("tf2onnx", "tensorflow")]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with quiet_imports():
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _set_shapes(graph: Any, builder: SavedModelBuilder, called: Mapping[str, str]) -> None:
    """Set the shapes of inputs and outputs; the first dimension is the rows, of any number."""
    shapes: dict[str, Sequence[int | None]] = {
        called[column.name]: column.shape for column in builder.inputs
    }
    names = (called[name] for name in builder.added)
    shapes.update(zip(names, (spec.shape for spec in builder.outputs), strict=True))
    for value in (*graph.input, *graph.output):
        shape = value.type.tensor_type.shape
        shape.Clear()
        for place, size in enumerate((builder.rows, *shapes[value.name])):
            dimension = shape.dim.add()
            if size is None:
                dimension.dim_param = f"{value.name} {place}" if place else ROWS
            else:
                dimension.dim_value = size


def _check_size(model: keras.Model | Graph) -> None:
    held = model.loaded if hasattr(model, "loaded") else model
    size = sum(
        int(np.prod(one.shape)) * np.dtype(str(keras.backend.standardize_dtype(one.dtype))).itemsize
        for one in getattr(held, "variables", ())
    )
    if size >= MOST_BYTES:
        raise ModelError(
            "an ONNX file of one piece holds less than 2 GiB, and the model's weights are "
            f"{size:,} bytes; export a 'saved_model'"
        )


def _check_outputs(
    builder: SavedModelBuilder,
    called: Mapping[str, str],
    predict: _Predict,
    rows: Arrays,
    contents: bytes,
) -> None:
    """Check that the file's outputs equal those of Keras.

    Raises:
        ModelError: an output of the two differs.
    """
    try:
        session = OnnxSession(contents)
    except ModelError as error:
        raise _onnx_refusal(builder, str(error)) from error
    for size in _SIZES if builder.rows is None else (builder.rows,):
        batch = repeat_rows(rows, size)
        expected = _call_keras(predict, batch)
        try:
            onnx_outputs = session({called[name]: value for name, value in batch.items()})
            for name, value in expected.items():
                check_close(value, onnx_outputs[called[name]])
        except (AssertionError, DataError, ModelError) as error:
            reason = on_one_line(error)
            raise _onnx_refusal(
                builder, f"for {size} rows it does not give what Keras gives: {reason}"
            ) from error


def _call_keras(predict: _Predict, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return Keras' outputs for columns."""
    made = predict({name: tf.constant(_for_tensorflow(v)) for name, v in columns.items()})
    return {name: to_numpy(value) for name, value in made.items()}


def _for_tensorflow(values: np.ndarray) -> object:
    return values.tolist() if values.dtype == object else values


def _onnx_refusal(builder: SavedModelBuilder, reason: str) -> ModelError:
    name = getattr(builder.model, "name", "")
    return ModelError(
        f"an ONNX file cannot hold the model {name!r}: {' '.join(reason.split()):.1000}. Its "
        "SavedModel (format='saved_model') may"
    )


def export_keras(recipe: Recipe, target: Location) -> None:
    """Write the model of a recipe; see `Engine.export`.

    A file that has been checked when the model was trained is written as it is.
    """
    parts: KerasParts = recipe.parts
    if parts.packed is not None:
        raise ModelError(
            "a .keras file cannot hold this model: it is a SavedModel, a graph without layers; "
            "format='saved_model' can"
        )
    if parts.archive is not None and parts.weights is None:
        target.write_bytes(parts.archive)
        return
    with using_keras_state(keras_state()), fresh_keras_state():
        model, bind = make_model(recipe)
        assert not isinstance(model, Graph)
        with using_keras_state(parts.state), tempfile.TemporaryDirectory() as folder:
            place = Path(folder, "model")
            _write_unpacked(recipe, model, bind, place)
            target.write_stream(functools.partial(pack_archive, place))


def _write_unpacked(recipe: Recipe, model: object, bind: InputBinding, folder: Path) -> None:
    """Write the contents of the file, from which the same model is loaded, into a new folder.

    Raises:
        ModelError: Keras cannot write it, or another model is loaded from it.
    """
    parts: KerasParts = recipe.parts
    objects = {} if parts.objects is None else cloudpickle.loads(parts.objects)
    if parts.source is not None:
        objects = {**(parts.source.custom_objects or {}), **objects}
    inputs = sample_inputs(model, bind, recipe.sample_rows().inputs)
    try:
        save_unpacked(model, folder)
    except Exception as error:  # a custom layer's get_config may fail in any way
        raise ModelError(f"a .keras file cannot hold this model: {error!s:.500}") from error
    saved, problem = probe_loading(folder, model, objects, inputs)
    if saved.loads == "source":
        raise ModelError(
            f"a .keras file cannot hold this model: what Keras loads from it differs ({problem})"
        )
