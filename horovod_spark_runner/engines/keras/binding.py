"""Columns and batches as inputs and labels of a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ...data.manifest import Column, Manifest
from ...data.read.decode import classes_of
from ...errors import DataError, ModelError
from ...storage.arrays import Arrays
from ...training.label_values import outside
from ...training.sample_rows import made_up_rows, repeat_rows
from ...training.spec import Binding, ModelNames, ModelSource, TrainingSpec
from .losses import LabelCheck
from .model import Nest, build_model, call_outputs, fresh_keras_state

_Columns = Mapping[str, np.ndarray]
_STRING = "string"
# In what Keras says of a layer that was given several.
_ONE_INPUT = "expects 1 input(s)"
# Bytes; kernels end the process if memory of any other alignment is passed to them.
ALIGNMENT = 64
# Batches that wait for the step.
_PREFETCH_BATCHES = 8
# A column, or several for a dictionary.
_Role = str | Sequence[str]


class BatchBinding:
    """Connects the columns of a training with its model.

    Args:
        model: the compiled model.
        spec: the training.

    Attributes:
        inputs: makes the model's inputs of columns.
        columns: the columns that the arrays of a batch hold.
        sample: a few rows of them.
        filler: a row that fills in where a rank has none of its own.

    Raises:
        ModelError: the model's inputs do not fit the columns.
    """

    def __init__(self, model: keras.Model, spec: TrainingSpec) -> None:
        self._model = model
        self._spec = spec
        self.inputs = InputBinding(model, spec.inputs, spec.train)
        self._labels: Callable[[Arrays], Nest]  # once the model's outputs are known
        self._check_labels: LabelCheck | None = None
        self.columns = spec.columns
        columns = [spec.train.column(name) for name in self.columns]
        self.sample = spec.sample or made_up_rows(columns)
        # Of a rank without rows.
        self.filler = repeat_rows(self.sample, 1)

    def bind_labels(self, outputs: Nest | None) -> None:
        """Bind the label columns to the model's outputs; ``None`` if it has none.

        Raises:
            ModelError: it does not fit the label columns.
        """
        model, spec = self._model, self._spec
        if spec.weight_col is not None:
            _check_weights_of_steps(spec.train.column(spec.weight_col), outputs)
        self._labels = bind_outputs(model, spec.outputs, spec.train, outputs)
        if needs_labels(model):
            of_classes = spec.fit.class_weight or {}
            weighted = spec.weight_col is not None or 0 in of_classes.values()
            columns = spec.outputs.columns
            self._check_labels = LabelCheck(model, outputs, columns, weighted=weighted)

    def outputs_of(self, example: Nest) -> Any | None:
        """Return the model's outputs for an example, or ``None`` if it has no call.

        Raises:
            ModelError: it takes one input, and several columns are given, one for each input.
        """
        try:
            return call_outputs(self._model, example)
        except ValueError as error:
            slots = self._spec.inputs.slots
            if len(slots) > 1 and _ONE_INPUT in str(error):
                names = [name for slot in slots for name in slot]
                raise ModelError(
                    f"the model takes one input, but feature_cols gives {len(slots)}; join the "
                    f"columns into one, feature_cols=[{names!r}], or with "
                    "pyspark.ml.feature.VectorAssembler"
                ) from error
            raise

    def data(self, arrays: Arrays) -> Any:
        """Return the data for the model's ``test_step``.

        Raises:
            ModelError: there are labels that the model's loss cannot be meant for.
        """
        # One of its own may make other labels of them.
        return self._data(arrays, check=type(self._model).test_step is keras.Model.test_step)

    def _data(self, arrays: Arrays, *, check: bool) -> Any:
        x, y = self.inputs(arrays), self._labels(arrays)
        if check and self._check_labels is not None:
            self._check_labels(y)
        weight = None if self._spec.weight_col is None else arrays[self._spec.weight_col]
        return _in_tensors(keras.utils.pack_x_y_sample_weight(x, y, weight))

    def training_data(self, arrays: Arrays) -> Nest:
        """Return the data for the model's ``train_step``, with the weights of classes.

        Raises:
            ModelError: there are labels that the model's loss cannot be meant for.
        """
        data = self._data(arrays, check=True)
        if self._spec.fit.class_weight is None:
            return data
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        weight = _class_weights(np.asarray(keras.tree.flatten(y)[0]), self._spec.fit.class_weight)
        return (x, y, tf.convert_to_tensor(weight))


def _check_weights_of_steps(weight: Column, outputs: Nest | None) -> None:
    """Check that each output has the steps that a column weighs, if it does not weigh whole rows.

    Raises:
        ModelError: one has others.
    """
    steps = weight.shape
    for output in keras.tree.flatten(outputs) if steps and outputs is not None else ():
        output_shape = tuple(output.shape[1:])
        if len(output_shape) < 2 or output_shape[0] not in (None, *steps):
            raise ModelError(
                f"sample_weight_col {weight.name!r} holds {steps[0]} weights per row, one for each "
                f"step, but the model gives an output of shape {output_shape} per row; "
                "give one weight per row, or one for each step of the output"
            )


def _class_weights(labels: np.ndarray, weights: Mapping[int, float]) -> np.ndarray:
    """Return the weight of each row's class. Pure.

    Args:
        labels: integers, or one-hot rows.
        weights: by class; 1 for those not in it.
    """
    of_rows = classes_of(labels)
    classes, indices = np.unique(of_rows, return_inverse=True)
    by_class = np.array([weights.get(int(c), 1.0) for c in classes], keras.config.floatx())
    return by_class[indices.reshape(of_rows.shape)]


class InputBinding:
    """Converts a batch's columns to the model's inputs.

    A functional model gets its inputs in the structure it was built with. Any other gets the only
    column as it is, columns given by a list as a tuple, columns given by a dictionary as one.

    Args:
        model: the model.
        binding: the columns, and the inputs they are for.
        manifest: the columns' types and shapes.

    Raises:
        ModelError: inputs and columns do not fit; the message shows both.
    """

    def __init__(self, model: keras.Model, binding: Binding, manifest: Manifest) -> None:
        self._slots = [_Slot(slot, manifest) for slot in binding.slots]
        self._pack: Callable[[Sequence[Any]], Nest]
        structure = input_structure(model)
        if structure is None:
            named = binding.names is not None
            names: Sequence[str | int] = binding.names or range(len(self._slots))
            self._pack = lambda values: _as_given(dict(zip(names, values, strict=True)), named)
            return
        tensors = keras.tree.flatten(structure)
        self._slots = _match(structure, binding, self._slots)
        for tensor, slot in zip(tensors, self._slots, strict=True):
            slot.fit(tensor, tensors, self._slots)
        shape = keras.tree.lists_to_tuples(structure)
        self._pack = lambda values: keras.tree.pack_sequence_as(shape, values)

    @property
    def bounds(self) -> dict[str, tuple[int, int]]:
        """The numbers that inputs hold, by columns that could hold others."""
        return {name: slot.bounds for slot in self._slots if slot.bounds for name in slot.names}

    def __call__(self, arrays: _Columns) -> Any:
        """Return the model's input."""
        return self._pack([slot(arrays) for slot in self._slots])

    def of_tensors(self, tensors: Mapping[str, tf.Tensor]) -> Nest:
        """Return the model's input in a graph, of tensors in place of arrays."""
        return self._pack([slot.of_tensors(tensors) for slot in self._slots])


def _as_given(values: dict[str | int, object], named: bool) -> Nest:
    """Return values in the form in which columns are given: by name, alone, or as a tuple."""
    if named:
        return values
    plain = tuple(values.values())
    return plain[0] if len(plain) == 1 else plain


def match_inputs(
    model: keras.Model, binding: Binding
) -> list[tuple[keras.KerasTensor, tuple[str, ...]]]:
    """Return each input of a model whose inputs are known, and the columns that feed it.

    Raises:
        ModelError: inputs and columns do not fit by name or number.
    """
    structure = input_structure(model)
    columns = tuple(Column(name, "float32") for name in binding.columns)
    slots = [_Slot(slot, Manifest("", (), columns, (), "")) for slot in binding.slots]
    matched = _match(structure, binding, slots)
    return [(t, s.names) for t, s in zip(keras.tree.flatten(structure), matched, strict=True)]


def input_structure(model: keras.Model) -> Any | None:
    """Return the symbolic inputs a model was built with, or ``None`` where its call decides."""
    inputs = getattr(model, "inputs", None)
    if not inputs:
        return None
    return inputs[0] if isinstance(model, keras.Sequential) else model.input


def _match(structure: Nest, binding: Binding, slots: Sequence[_Slot]) -> list[_Slot]:
    """Return the slots in the order of the flattened inputs."""
    tensors = keras.tree.flatten(structure)
    keys = _path_names(structure)
    singles = [slot[0] if len(slot) == 1 else "" for slot in binding.slots]
    slot_names = list(binding.names) if binding.names is not None else singles
    if binding.names is not None or len(tensors) > 1:
        for names in ([tensor.name for tensor in tensors], keys):
            if sorted(slot_names) == sorted(names):
                by_name = dict(zip(slot_names, slots, strict=True))
                return [by_name[name] for name in names]
    if binding.names is not None or len(tensors) != len(slots):
        prefix = f"feature_cols names the inputs {list(binding.names)}, " if binding.names else ""
        raise ModelError(f"{prefix}{_both(tensors, slots)}" + _joining_hint(tensors, slots))
    if len(tensors) > 1 and _holds_dictionary(structure):
        raise ModelError(
            f"the model's inputs are a dictionary with the keys {keys}, which have no order; say "
            f"which column feeds which, feature_cols={{{keys[0]!r}: …}}. {_both(tensors, slots)}"
        )
    return list(slots)


def _path_names(structure: Nest) -> list[str]:
    """Return a name for every leaf of a structure: its keys, joined by ``_``."""
    return [
        "_".join(str(key) for key in path) for path, _ in keras.tree.flatten_with_path(structure)
    ]


def _holds_dictionary(structure: Nest) -> bool:
    """Return whether a structure has dictionaries in it, whose entries have no order."""
    if isinstance(structure, Mapping):
        return True
    return isinstance(structure, (list, tuple)) and any(map(_holds_dictionary, structure))


def _joining_hint(tensors: Sequence[keras.KerasTensor], slots: Sequence[_Slot]) -> str:
    if len(tensors) == 1 and len(slots) > 1:
        names = [slot.column.name for slot in slots]
        return (
            f"; join the columns into one, feature_cols=[{names!r}], or with "
            "pyspark.ml.feature.VectorAssembler"
        )
    return ""


def _both(tensors: Sequence[keras.KerasTensor], slots: Sequence[_Slot]) -> str:
    has = ", ".join(f"{t.name!r}: {t.dtype} of shape {tuple(t.shape[1:])}" for t in tensors)
    return f"the model's inputs are {has}; the feature columns are " + ", ".join(
        slot.column.describe() for slot in slots
    )


def bind_outputs(
    model: keras.Model, binding: Binding, manifest: Manifest, outputs: Nest | None
) -> Callable[[_Columns], Any]:
    """Return the function that makes the labels of a batch as the model's loss takes them.

    Args:
        model: the compiled model.
        binding: the label columns, and the outputs they are for.
        manifest: the columns' types and shapes.
        outputs: what the model's call gives, tensors in any structure; ``None`` if it has no call,
            and labels are passed on as they were given.

    Raises:
        ModelError: outputs and label columns do not fit.
    """
    slots = [_Slot(slot, manifest) if slot else None for slot in binding.slots]
    if not slots:
        if needs_labels(model):
            raise ModelError(
                f"label_cols names no column, but model {model.name!r} is compiled with a loss; "
                "name the label columns (for an autoencoder, those of feature_cols), or compile it "
                "without"
            )
        return lambda arrays: None
    leaves = [] if outputs is None else keras.tree.flatten(outputs)
    unequal = len(slots) != len(leaves)
    if outputs is None or (binding.names is None and unequal and _compares_itself(model)):
        names: Sequence[str | int] = binding.names or range(len(slots))
        labelled = {name: slot for name, slot in zip(names, slots, strict=True) if slot is not None}
        named = binding.names is not None
        return lambda arrays: _as_given({n: s(arrays) for n, s in labelled.items()}, named)
    ordered = _match_outputs(model, outputs, binding, slots)
    if not keras.tree.is_nested(outputs):
        (only,) = ordered
        return lambda arrays: None if only is None else only(arrays)
    shape = keras.tree.lists_to_tuples(keras.tree.map_structure(lambda _: 0, outputs))
    blank = [np.zeros((1,), np.float32)] * len(leaves)

    def labels(arrays: _Columns) -> Any:
        rows = len(next(iter(arrays.values())))
        values = [
            # Nothing is compared with it; Keras wants as many labels as outputs.
            np.broadcast_to(blank[i], (rows, 1)) if slot is None else slot(arrays)
            for i, slot in enumerate(ordered)
        ]
        return keras.tree.pack_sequence_as(shape, values)

    return labels


def needs_labels(model: keras.Model) -> bool:
    """Return whether the model is compiled with a loss that compares outputs with labels."""
    return getattr(model, "_compile_loss", None) is not None and not _compares_itself(model)


def _compares_itself(model: keras.Model) -> bool:
    """Return whether the user's own code compares outputs with labels."""
    kind = type(model)
    return (
        kind.train_step is not keras.Model.train_step
        or kind.compute_loss is not keras.Model.compute_loss
    )


def _match_outputs(
    model: keras.Model, outputs: Nest, binding: Binding, slots: Sequence[_Slot | None]
) -> list[_Slot | None]:
    """Return the slots in the order of the flattened outputs; ``None`` where there is no label."""
    count = len(keras.tree.flatten(outputs))
    choices = _name_choices(model, outputs)
    singles = [slot[0] if len(slot) == 1 else "" for slot in binding.slots]
    slot_names = list(binding.names) if binding.names is not None else singles
    if binding.names is not None or count > 1:
        for names in choices:
            unique = len(set(names)) == len(names)
            if unique and set(slot_names) <= set(names) and len(set(slot_names)) == len(slot_names):
                by_name = dict(zip(slot_names, slots, strict=True))
                if binding.names is None and len(slot_names) < len(names):
                    continue
                ordered = [by_name.get(name) for name in names]
                _check_unlabelled(model, [n for n in names if by_name.get(n) is None], names)
                return ordered
    if binding.names is not None or count != len(slots):
        hint = ""
        if binding.names is None and count == 1:
            hint = f"; two columns of one output are a list, label_cols=[{slot_names}]"
        raise ModelError(
            f"the model's outputs are {choices[0]}, but label_cols gives {slot_names}; name one "
            f"label column for each output{hint}"
        )
    if count > 1 and _holds_dictionary(outputs):
        raise ModelError(
            f"the model's outputs are a dictionary with the keys {choices[0]}, which have no "
            "order; say which column is compared with which, "
            f"label_cols={{{choices[0][0]!r}: …}}, got {slot_names}"
        )
    unlabelled = [name for name, slot in zip(choices[0], slots, strict=True) if slot is None]
    _check_unlabelled(model, unlabelled, choices[0])
    return list(slots)


def _output_layers(model: keras.Model) -> list[str]:
    """Return the names of the layers that give the outputs; none where its call decides."""
    if isinstance(model, keras.Sequential):
        return [layer.name for layer in model.layers[-1:]]
    return list(getattr(model, "output_names", None) or [])


def _name_choices(model: keras.Model, outputs: Nest) -> list[list[str]]:
    """Return the names that outputs may be called by: the structure's own, and their layers'."""
    names = _path_names(outputs)
    layers = _output_layers(model)
    if not keras.tree.is_nested(outputs):
        return [layers or ["prediction"], ["prediction"]]
    if _holds_dictionary(outputs):
        return [names, layers] if len(layers) == len(names) else [names]
    if len(layers) == len(names) and len(set(layers)) == len(layers):
        return [layers, names]
    return [[f"output_{name}" for name in names], names]


def _check_unlabelled(model: keras.Model, unlabelled: Sequence[str], names: Sequence[str]) -> None:
    """Check that nothing is compared with the outputs that have no label."""
    if not unlabelled:
        return
    for title, compiled in (
        ("loss", getattr(getattr(model, "_compile_loss", None), "_user_loss", None)),
        ("metrics", getattr(getattr(model, "_compile_metrics", None), "_user_metrics", None)),
    ):
        for name in unlabelled:
            if isinstance(compiled, Mapping):
                used = compiled.get(name) is not None
            elif isinstance(compiled, (list, tuple)) and len(compiled) == len(names):
                used = compiled[list(names).index(name)] is not None
            else:
                used = compiled is not None
            if used:
                raise ModelError(
                    f"output {name!r} has no label column, but the model is compiled with "
                    f"{title} for it; name its column in label_cols={{{name!r}: …}}, or compile "
                    f"the model with {title} for the other outputs only"
                )


class _Slot:
    """One input or label: a column, or several joined along their last axis."""

    def __init__(self, names: Sequence[str], manifest: Manifest) -> None:
        columns = [manifest.column(name) for name in names]
        self._names = list(names)
        self.column = columns[0] if len(columns) == 1 else _joined(columns)
        self._shape: tuple[int, ...] | None = None
        self.bounds: tuple[int, int] | None = None
        self._taken = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def __call__(self, arrays: _Columns) -> np.ndarray:
        if len(self._names) == 1:
            values = arrays[self._names[0]]
        else:
            parts = [arrays[name] for name in self._names]
            parts = [part.reshape(len(part), -1) if part.ndim == 1 else part for part in parts]
            values = np.concatenate(parts, axis=-1).astype(self.column.dtype, copy=False)
        if self.bounds is not None:
            _check_within(values, self.bounds, self.column.name, self._taken)
        if self._shape is None or tuple(values.shape[1:]) == self._shape:
            return values
        return values.reshape(-1, *self._shape)

    def of_tensors(self, tensors: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Return the same inputs as `__call__`, computed from tensors."""
        parts = [tensors[name] for name in self._names]
        values = parts[0]
        if len(parts) > 1:
            # NumPy joins in the type that holds all of them, too.
            wide = np.result_type(*(part.dtype.as_numpy_dtype for part in parts)).name
            ranked = [keras.ops.expand_dims(p, -1) if len(p.shape) == 1 else p for p in parts]
            joined = keras.ops.concatenate([keras.ops.cast(p, wide) for p in ranked], axis=-1)
            values = keras.ops.cast(joined, self.column.dtype)
        if self._shape is None or tuple(values.shape[1:]) == self._shape:
            return values
        return keras.ops.reshape(values, (-1, *self._shape))

    def fit(
        self,
        tensor: keras.KerasTensor,
        tensors: Sequence[keras.KerasTensor],
        slots: Sequence[_Slot],
    ) -> None:
        """Adopt the shape of rows that turns the values into the input ``tensor``."""
        wanted, column = tuple(tensor.shape[1:]), self.column
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        self.bounds, self._taken = _bounds_of(column.dtype, dtype), f"{tensor.name!r} of {dtype}"
        text = dtype == _STRING
        if text != (column.dtype == _STRING):
            advice = (
                "build the model with keras.layers.StringLookup, TextVectorization or Hashing on "
                "keras.Input(…, dtype='string'), or index the column with Spark ML's StringIndexer"
                if not text
                else "give a column of strings"
            )
            raise ModelError(
                f"model input {tensor.name!r} takes {tensor.dtype}, but column {column.name!r} "
                f"holds {column.dtype}; {advice}. {_both(tensors, slots)}"
            )
        if _fits(column.shape, wanted):
            self._shape = column.shape
        elif column.shape == () and _fits((1,), wanted):
            self._shape = (1,)
        else:
            raise ModelError(
                f"model input {tensor.name!r} takes rows of shape {wanted}, but column "
                f"{column.name!r} has rows of shape {column.shape}; give it another with "
                f"shapes={{{column.name!r}: …}}. {_both(tensors, slots)}"
            )


def _joined(columns: Sequence[Column]) -> Column:
    shapes = {column.shape[:-1] for column in columns}
    names = " + ".join(column.name for column in columns)
    if len(shapes) > 1 or any(column.dtype == _STRING for column in columns):
        raise ModelError(
            f"columns {names} cannot be joined into one: they are "
            + ", ".join(column.describe() for column in columns)
        )
    width = sum(column.shape[-1] if column.shape else 1 for column in columns)
    dtype = np.result_type(*(column.dtype for column in columns))
    if dtype == np.float64 and not any(column.dtype == "float64" for column in columns):
        dtype = np.dtype(np.float32)  # float32 beside int32: as TensorFlow takes numbers
    return replace(columns[0], name=names, dtype=dtype.name, shape=(*shapes.pop(), width))


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(
        size is None or size == have for have, size in zip(shape, wanted, strict=True)
    )


def _bounds_of(column_dtype: str, input_dtype: str) -> tuple[int, int] | None:
    """Return the least and the largest number of an input, where a column may hold others.

    Args:
        column_dtype: dtype of a column.
        input_dtype: dtype of the input it feeds.

    Returns:
        The bounds; ``None`` if one of the types is no integer type, or all numbers fit.
    """
    if not (_is_whole(column_dtype) and _is_whole(input_dtype)):
        return None
    have, can = np.iinfo(column_dtype), np.iinfo(input_dtype)
    return None if can.min <= have.min and have.max <= can.max else (int(can.min), int(can.max))


def _is_whole(dtype: str) -> bool:
    try:
        return np.dtype(dtype).kind in ("i", "u")
    except TypeError:  # one that NumPy does not know, such as bfloat16
        return False


def _check_within(values: np.ndarray, bounds: tuple[int, int], column: str, taken: str) -> None:
    """Check that an input can hold all numbers of a batch.

    Args:
        values: the numbers.
        bounds: the least and the largest that it can hold.
        column: where they come from, for messages.
        taken: the input and its type, for messages.

    Raises:
        DataError: a number is out of the input's bounds.
    """
    low, high = bounds
    wrong = outside(values, low, high)
    if wrong.size:
        raise DataError(
            f"column {column!r} holds {int(wrong[0])}, which the model's input {taken} cannot "
            f"hold: it takes {low:,} to {high:,}. Mend the rows, or build the model with a wider "
            "keras.Input(…, dtype=…)"
        )


def names_of(source: ModelSource) -> ModelNames:
    """Return the names of the model that ``source`` builds; see `Engine.names`."""
    with fresh_keras_state():
        model = build_model(source)
        structure = input_structure(model)
        if structure is None:
            return ModelNames(needs_labels=needs_labels(model))
        layers = [tensor.name for tensor in keras.tree.flatten(structure)]
        outputs = model.outputs[0] if isinstance(model, keras.Sequential) else model.output
        output_names = _tensor_names(_output_layers(model), outputs)
        return ModelNames(_tensor_names(layers, structure), output_names, needs_labels(model))


def _tensor_names(layers: list[str], structure: Nest) -> tuple[tuple[str, ...], ...]:
    """Return the names that call each tensor one thing only; a position in a list is no name."""
    choices = [layers, _path_names(structure)] if _holds_dictionary(structure) else [layers]
    count = len(keras.tree.flatten(structure))
    whole = [tuple(names) for names in choices if len(names) == count == len(set(names))]
    return tuple(dict.fromkeys(whole))


def as_tensor(values: np.ndarray) -> tf.Tensor:
    """Return ``values`` as a tensor that shares their memory, so they must not change any more.

    What cannot be shared, such as strings and memory that is not aligned as TensorFlow's kernels
    need it, is copied.
    """
    flags = values.flags
    if (
        values.dtype.kind in "fiub"
        and flags.c_contiguous
        and flags.writeable
        and values.__array_interface__["data"][0] % ALIGNMENT == 0
    ):
        return tf.experimental.dlpack.from_dlpack(values.__dlpack__())
    return tf.convert_to_tensor(values)


def _in_tensors(values: Any) -> Any:
    """Return nested arrays as tensors; ``tf.nest`` takes as long for it as for making them."""
    if isinstance(values, np.ndarray):
        return as_tensor(values)
    if isinstance(values, dict):
        return {name: _in_tensors(value) for name, value in values.items()}
    if type(values) in (tuple, list):
        return type(values)(map(_in_tensors, values))
    return tf.nest.map_structure(as_tensor, values)


def as_tensors(arrays: Arrays) -> dict[str, tf.Tensor]:
    """Return every array `as_tensor`."""
    return {name: as_tensor(values) for name, values in arrays.items()}


def blocks_to_dataset(
    blocks: Callable[[], Iterator[Arrays]],
    columns: Mapping[str, Column],
    roles: Sequence[_Role],
    batch_size: int,
) -> tf.data.Dataset:
    """Return a dataset of batches.

    Args:
        blocks: yields arrays of shape ``(batches, batch_size, *shape)`` by column. Many batches at
            once, because every way from Python into ``tf.data`` costs as much as a small batch.
        columns: types and shapes.
        roles: what an element consists of: each a column, or several for a dict.
        batch_size: rows of a batch.
    """
    signature = {
        name: tf.TensorSpec((None, batch_size, *column.shape), column.dtype)
        for name, column in columns.items()
    }
    batches = tf.data.Dataset.from_generator(blocks, output_signature=signature)
    batches = batches.flat_map(tf.data.Dataset.from_tensor_slices)
    return batches.map(functools.partial(_by_role, roles)).prefetch(_PREFETCH_BATCHES)


def _by_role(
    roles: Sequence[_Role], batch: dict[str, tf.Tensor]
) -> tuple[tf.Tensor | dict[str, tf.Tensor], ...]:
    return tuple(
        batch[role] if isinstance(role, str) else {name: batch[name] for name in role}
        for role in roles
    )
