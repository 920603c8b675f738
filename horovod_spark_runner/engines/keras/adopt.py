"""A Keras model that was trained elsewhere, written as a training here would leave it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import keras

from ...checkpoint.run_directory import RunDirectory
from ...data.manifest import TEXT, Column, Manifest
from ...errors import ModelError
from ...storage.filesystem import Location
from ...training.sample_rows import SAMPLE_FILE, SampleRows
from ...training.spec import FEATURES, Binding
from ...training.trained_model import ModelInputs, ModelWriter, Signature
from .artifact import outputs_of, save_model
from .binding import InputBinding, input_structure, match_inputs
from .engine import read_archive
from .loading import Graph, load_archive, pack_saved_model
from .model import check_stateless
from .saved import PACKED_FILE, KerasFacts, SavedModel, read_exported

if TYPE_CHECKING:
    import tensorflow as tf

# dtype of an input -> dtype of its column, where Spark has it not.
_COLUMN_DTYPES = {
    "bool": "int8",
    "uint8": "int16",
    "uint16": "int32",
    "uint32": "int64",
    "float16": "float32",
    "bfloat16": "float32",
}
_PLAIN = ("int8", "int16", "int32", "int64", "float32", "float64", TEXT)


def adopt_model(
    directory: RunDirectory,
    model: object,
    inputs: Binding | None,
    custom_objects: Mapping[str, object],
) -> SavedModel:
    """Write ``model`` to ``directory``; see `Engine.adopt`.

    Raises:
        ModelError: it is no Keras model, its inputs are not known or are none that columns fit, it
            cannot be called, or cannot be written so that it is the same when it is read.
    """
    if isinstance(model, (str, os.PathLike)):
        model = load_archive(read_archive(model), custom_objects)
    if not isinstance(model, keras.Model):
        raise ModelError(
            "from_keras takes a keras.Model, or the path or URL of a .keras file, got "
            f"{type(model).__name__}"
        )
    check_stateless(model, "Spark's rows have no order, and are spread over tasks")
    structure = input_structure(model)
    if structure is None:
        raise ModelError(
            f"the inputs of the model {model.name!r} are not known before it is called: give a "
            "functional model, or a Sequential that begins with keras.Input(shape)"
        )
    tensors = keras.tree.flatten(structure)
    if inputs is None:
        names = [tensor.name for tensor in tensors]
        inputs = Binding(names, tuple(names)) if len(names) > 1 else Binding([FEATURES])
    columns = _columns(model, inputs)
    bind = InputBinding(model, inputs, Manifest("", (), columns, (), ""))
    takes = ModelInputs(inputs, columns, (), custom_objects)
    outputs, _, problem = outputs_of(model, takes, bind)
    if outputs is None:
        raise ModelError(f"the model {model.name!r} cannot be called: {problem}")
    saved = save_model(directory, model, takes, bind)
    if saved.loads == "source":
        raise ModelError(
            f"the model {model.name!r} cannot be sent to Spark's workers: what Keras writes of it "
            "does not give the same model again. Its layers need get_config()"
        )
    return saved


def adopt_graph(
    directory: RunDirectory, folder: Location, inputs: Binding | None, signature: str
) -> SavedModel:
    """Write the SavedModel in ``folder`` to ``directory``; see `Engine.adopt`.

    Raises:
        ModelError: there is none, or no such signature; or the columns do not fit its inputs.
    """
    exported = read_exported(folder)
    exported_columns = (
        {} if exported is None else {column.name: column for column in exported.columns}
    )
    packed = pack_saved_model(folder, None if exported is None else exported.sums)
    graph = Graph(packed, signature)
    names = sorted(graph.takes)
    if inputs is None and sorted(exported_columns) == names:
        inputs = Binding(tuple(exported_columns), tuple(exported_columns))
    elif inputs is None:
        inputs = Binding(names if len(names) > 1 else [FEATURES], tuple(names))
    elif inputs.names is None and len(names) == len(inputs.slots) == 1:
        inputs = Binding(inputs.slots, tuple(names))
    if sorted(inputs.names or ()) != names or any(len(slot) > 1 for slot in inputs.slots):
        raise ModelError(
            f"signature {signature!r} of the SavedModel takes {', '.join(map(repr, names))}; say "
            f"which column feeds each, feature_cols={{{names[0]!r}: …}}"
        )
    tensors = [graph.takes[name] for name in inputs.names or ()]
    columns = _fitting(inputs, list(zip(tensors, inputs.slots, strict=True)))
    fed = dict(zip(inputs.columns, inputs.names or (), strict=False))
    columns = tuple(replace(exported_columns.get(fed[c.name], c), name=c.name) for c in columns)
    bind = InputBinding(graph, inputs, Manifest("", (), columns, (), ""))
    outputs, rows, problem = outputs_of(graph, ModelInputs(inputs, columns, ()), bind)
    if outputs is None:
        raise ModelError(f"signature {signature!r} of the SavedModel cannot be called: {problem}")
    writer = ModelWriter(directory)
    writer.write(PACKED_FILE, packed)
    writer.write(SAMPLE_FILE, SampleRows(rows).dump())
    facts = KerasFacts(graph=signature, self_contained=True, keras=keras.__version__)
    writer.finish(Signature(inputs, columns, outputs, own=facts.to_fields()))
    return SavedModel("graph")


def _columns(model: keras.Model, inputs: Binding) -> tuple[Column, ...]:
    """Return the columns that fit a Keras model's inputs."""
    return _fitting(inputs, match_inputs(model, inputs))


def _fitting(
    inputs: Binding, matched: Sequence[tuple[keras.KerasTensor | tf.TensorSpec, Sequence[str]]]
) -> tuple[Column, ...]:
    """Return the columns that fit tensors, each of which some columns feed."""
    columns: dict[str, Column] = {}
    for tensor, names in matched:
        dtype = tensor.dtype if isinstance(tensor.dtype, str) else tensor.dtype.name
        dtype = _COLUMN_DTYPES.get(dtype, dtype)
        shape = tuple(tensor.shape[1:])
        if dtype not in _PLAIN or None in shape:
            raise ModelError(
                f"model input {tensor.name!r} takes {tensor.dtype} of shape {shape}, for which "
                "there is no column: its shape must be known, and its type one that Spark has"
            )
        if len(names) > 1 and shape != (len(names),):
            raise ModelError(
                f"model input {tensor.name!r} takes rows of shape {shape}, which are not "
                f"{len(names)} columns of a number each: {', '.join(names)}"
            )
        column_shape = () if len(names) > 1 or shape == (1,) else shape
        for name in names:
            column = Column(name, dtype, column_shape)
            if columns.setdefault(name, column) != column:
                raise ModelError(
                    f"column {name!r} feeds several inputs that take different values: "
                    f"{columns[name].describe()} and {column.describe()}"
                )
    return tuple(columns[name] for name in inputs.columns)
