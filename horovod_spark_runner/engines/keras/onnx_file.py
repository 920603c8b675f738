"""A trained model as one ONNX file, whose inputs are the columns: many runtimes score with it.

TensorFlow's graph is converted by tf2onnx. That may go wrong in silence, so the file is run by
onnxruntime on the model's sample rows, and what Keras does not give is refused.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ...data.manifest import Column
from ...errors import DataError, ModelError, on_one_line
from ...quiet import quiet_imports
from ...storage.arrays import Arrays
from ...storage.filesystem import Location
from ...training.onnx import MOST_BYTES, ROWS, OnnxSession, check_installed, write_facts
from ...training.sample_rows import check_close, finite_rows, repeat_rows
from ...training.trained_model import Recipe
from .export import SavedModelBuilder, serving
from .model import to_numpy
from .saved import SERVING, check_transforms

OPSET = 18
# A batch of one, and one of many.
_SIZES = (1, 17)


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
    with serving(recipe, plain, names, output_names) as base:
        builder = replace(base, kind="an ONNX file", checked=False)  # which raises no errors
        _check_size(builder.model)
        inputs = [replace(column, name=n) for column, n in zip(plain, columns, strict=True)]
        called = dict(zip((*names, *output_names), (*columns, *outputs), strict=True))
        model = _converted(builder, called, inputs)
        predict = builder.trace()[SERVING]
        size = max(_SIZES) if builder.rows is None else builder.rows
        sample = recipe.sample_rows().inputs
        rows = dict(zip(names, (sample[column.name] for column in recipe.columns), strict=True))
        try:
            rows = finite_rows(rows, size, lambda some: [*_called(predict, some).values()])
        except Exception as error:  # the user's own call may fail in any way
            raise _cannot(builder, f"{type(error).__name__}: {error}") from error
        contents = bytes(model.SerializeToString())
        _check(builder, called, predict, rows, contents)
    target.write_bytes(contents)


def _check_size(model: Any) -> None:
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
                model = _onnx_of(graph, taken, outputs, tables, names)
        except Exception as error:  # whatever tf2onnx comes across
            raise _cannot(builder, f"tf2onnx says {type(error).__name__}: {error}") from error
    unknown = {
        f"{node.op_type} ({node.name})"
        for node in model.graph.node
        if not onnx.defs.has(node.op_type, OPSET, node.domain)
    }
    if unknown:
        raise _cannot(builder, f"tf2onnx knows no form of {', '.join(sorted(unknown))}")
    input_names = {value.name for value in model.graph.input}
    if input_names != {column.name for column in builder.inputs}:
        raise _cannot(builder, f"tf2onnx leaves the inputs {sorted(input_names)} open")
    _rename(model.graph, called)
    _shape(model.graph, builder, called)
    added = [called[name] for name in builder.added]
    outside = dict(
        zip((one.name for one in builder.columns), (c.name for c in inputs), strict=True)
    )
    bounds = {outside[name]: limits for name, limits in builder.bind.bounds.items()}
    write_facts(model, inputs, builder.outputs, added, bounds)
    try:
        onnx.checker.check_model(model)
    except Exception as error:  # a graph that is none
        raise _cannot(builder, str(error)) from error
    return model


def _onnx_of(graph: Any, inputs: Any, outputs: Any, tables: Any, names: Any) -> Any:
    """Return TensorFlow's frozen graph as ONNX."""
    import tf2onnx

    with tf.Graph().as_default() as whole:
        tf.import_graph_def(graph, name="")
        made = tf2onnx.tfonnx.process_tf_graph(
            whole,
            opset=OPSET,
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
    from keras.src.export.tf2onnx_lib import patch_tf2onnx

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


def _rename(graph: Any, called: Mapping[str, str]) -> None:
    """Rename a graph's inputs and outputs; other nodes of those names get new ones.

    Args:
        graph: the ``onnx.GraphProto``.
        called: the new names by the old ones.
    """
    taken = set(called.values())

    def name(old: str) -> str:
        if old in called:
            return called[old]
        return f"inner {old}" if old in taken else old

    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = name(value.name)
    for node in graph.node:
        node.input[:] = [name(one) for one in node.input]
        node.output[:] = [name(one) for one in node.output]
        for attribute in node.attribute:  # what branches and loops see of it
            for inner in (attribute.g, *attribute.graphs):
                _rename(inner, called)


def _shape(graph: Any, builder: SavedModelBuilder, called: Mapping[str, str]) -> None:
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


def _check(
    builder: SavedModelBuilder,
    called: Mapping[str, str],
    predict: Any,
    rows: Arrays,
    contents: bytes,
) -> None:
    """Check that the file's outputs equal those of Keras.

    Raises:
        ModelError: it does not.
    """
    try:
        session = OnnxSession(contents)
    except ModelError as error:
        raise _cannot(builder, str(error)) from error
    for size in _SIZES if builder.rows is None else (builder.rows,):
        batch = repeat_rows(rows, size)
        expected = _called(predict, batch)
        try:
            onnx_outputs = session({called[name]: value for name, value in batch.items()})
            for name, value in expected.items():
                check_close(value, onnx_outputs[called[name]])
        except (AssertionError, DataError, ModelError) as error:
            reason = on_one_line(error)
            raise _cannot(
                builder, f"for {size} rows it does not give what Keras gives: {reason}"
            ) from error


def _called(predict: Any, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return Keras' outputs for columns."""
    made = predict({name: tf.constant(_for_tensorflow(v)) for name, v in columns.items()})
    return {name: to_numpy(value) for name, value in made.items()}


def _for_tensorflow(values: np.ndarray) -> Any:
    return values.tolist() if values.dtype == object else values


def _cannot(builder: SavedModelBuilder, reason: str) -> ModelError:
    name = getattr(builder.model, "name", "")
    return ModelError(
        f"an ONNX file cannot hold the model {name!r}: {' '.join(reason.split()):.1000}. Its "
        "SavedModel (format='saved_model') may"
    )
