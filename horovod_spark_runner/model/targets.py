"""The columns a model's outputs are compared with when it is evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..config.validators import ColumnNames
from ..data.manifest import Column
from ..data.prepare.columns import Source, sources_of, sources_of_features
from ..data.prepare.schema import Roles
from ..errors import DataError, InvalidInputError, brief
from ..formatting import quote_all
from ..training.spec import LABEL, Binding, OutputSpec, bind_columns
from ..training.trained_model import Targets
from .features import feature_argument

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame


def targets_by_outputs(
    frame: DataFrame, outputs: Sequence[OutputSpec], label_cols: ColumnNames | str | None
) -> Targets:
    """Return the targets of an externally trained model's outputs.

    Args:
        frame: the rows; labels have the types that `run_training` would give them.
        outputs: the model's outputs, by which the shapes of labels are known.
        label_cols: the label columns; by default ``label`` for a model with one output.

    Raises:
        InvalidInputError: the label columns are not known, or do not fit the outputs.
        DataError: a column is missing, or of a type that is no label's.
    """
    if label_cols is None and not (len(outputs) == 1 and LABEL in frame.columns):
        raise InvalidInputError(
            "the model comes from no training of this package's, so that its label columns are not "
            f"known; give label_cols=…, a column for each output: {_names_of(outputs)}"
        )
    binding = bind_columns([LABEL] if label_cols is None else label_cols, "label_cols")
    names = [output.name for output in outputs]
    if binding.names is None and len(binding.slots) != len(outputs):
        raise InvalidInputError(
            f"label_cols gives {binding.describe()}; give a column for each output: "
            + _names_of(outputs)
        )
    unknown = [name for name in binding.names or () if name not in names]
    if len(outputs) == 1:  # the only one may be called by its layer, too, which workers know
        names, unknown = list(binding.names or names), []
    if unknown or len(names) != len(outputs):
        raise InvalidInputError(
            f"label_cols names {quote_all(unknown or names)}; the model's outputs are "
            + _names_of(outputs)
        )
    by_name = dict(zip(names, outputs, strict=True))
    columns: dict[str, Column] = {}
    for output, slot in zip(binding.names or names, binding.slots, strict=True):
        sources = sources_of(frame, Roles(slot, slot)) if slot else ()
        for source in sources:
            columns[source.name] = _label_column(source, by_name[output], len(slot))
    return Targets(binding, tuple(columns.values()))


def _label_column(source: Source, output: OutputSpec, joined: int) -> Column:
    """Return a label as it is compared with an output: of its shape, or of classes in its place."""
    depth = 1 if source.kind == "vector" else source.depth
    shape: tuple[int | None, ...] = ()
    if depth and joined == 1 and depth in (len(output.shape), len(output.shape) - 1):
        shape = output.shape[:depth]
    sizes = tuple(size for size in shape if size is not None)
    if source.kind == "binary" or len(sizes) != depth:
        raise DataError(
            f"label column {source.name!r} holds {source.kind} values, which cannot be compared "
            f"with output {output.name!r} of shape {output.shape}; give numbers, or arrays of "
            "that shape"
        )
    return Column(source.name, source.dtype, sizes)


def _names_of(outputs: Sequence[OutputSpec]) -> str:
    return quote_all([output.name for output in outputs])


def choose_targets(
    trained: Targets, label_cols: ColumnNames | str | None, weight: str | bool | None
) -> tuple[Targets, tuple[str, ...]]:
    """Return the targets of outputs, and the DataFrame's column for each of their columns.

    Args:
        trained: what they were compared with in training.
        label_cols: the label columns, if not called as those were.
        weight: the column of sample weights; ``None`` for that of the training, ``False`` for none.

    Raises:
        InvalidInputError: the label columns do not fit those of the training.
    """
    labels = trained.outputs.columns
    names = _renamed(trained.outputs, label_cols)
    columns = [column for column in trained.columns if column.name in labels]
    frame_columns = [names[column.name] for column in columns]
    chosen = trained.weight if weight is None else weight or None
    if chosen is True or not isinstance(chosen, (str, type(None))):
        raise InvalidInputError(
            "sample_weight_col must be a column's name, None for that of the training, or False "
            f"for no weights, got {brief(weight)}"
        )
    if chosen is None:
        return replace(trained, columns=tuple(columns), weight=None), tuple(frame_columns)
    key = "weight"  # a name of its own: the column may be a label, too
    while key in labels:
        key += "_"
    dtypes = [column.dtype for column in trained.columns if column.name == trained.weight]
    column = Column(key, dtypes[0] if dtypes else "float32")
    return replace(trained, columns=(*columns, column), weight=key), (*frame_columns, chosen)


def _renamed(trained: Binding, label_cols: ColumnNames | str | None) -> dict[str, str]:
    """Return the current name of each label column of the training."""
    names = {name: name for name in trained.columns}
    if label_cols is None:
        return names
    binding = bind_columns(label_cols, "label_cols")
    if binding.names is None:
        if len(binding.slots) != len(trained.slots):
            raise InvalidInputError(
                f"label_cols gives {binding.describe()}, but the model was trained on "
                f"{trained.describe()}; name as many, in this order"
            )
        pairs = list(zip(trained.slots, binding.slots, strict=True))
    else:
        slots_by_name = dict(zip(trained.names or (), trained.slots, strict=False))
        unknown = [name for name in binding.names if name not in slots_by_name]
        if unknown:
            right = (
                quote_all(list(slots_by_name))
                if slots_by_name
                else f"not named: give {trained.describe()}"
            )
            raise InvalidInputError(
                f"label_cols names {quote_all(unknown)}, but the outputs it was trained with are "
                + right
            )
        new_slots = dict(zip(binding.names, binding.slots, strict=True))
        pairs = [(slot, new_slots.get(name, slot)) for name, slot in slots_by_name.items()]
    called: dict[str, str] = {}
    for before, now in pairs:
        if len(before) != len(now):
            raise InvalidInputError(
                f"label_cols gives {' + '.join(now) or 'no column'} where the model was trained on "
                f"{' + '.join(before) or 'none'}"
            )
        for old, new in zip(before, now, strict=True):
            if called.setdefault(old, new) != new:
                raise InvalidInputError(
                    f"label_cols gives {called[old]!r} and {new!r} where the model was trained on "
                    f"one column for several outputs, {old!r}; give one column for all of these"
                )
    return {**names, **called}


def target_arguments(
    frame: DataFrame, columns: Sequence[Column], names: Sequence[str], weight: str | None
) -> list[SparkColumn]:
    """Return the Spark expressions that give labels and weights as the model was trained on them.

    Args:
        frame: the rows.
        columns: what the model was trained on.
        names: the DataFrame's column for each.
        weight: which of ``columns`` is that of sample weights.

    Raises:
        DataError: a column is missing, there twice, or of another type.
    """
    missing = [name for name in names if name not in frame.columns]
    if missing:
        raise DataError(
            f"the DataFrame has no column {quote_all(missing)}, which the outputs are compared "
            "with or rows are weighed by; name the right ones, label_cols=… and "
            f"sample_weight_col=…; it has {quote_all(frame.columns)}"
        )
    sources = sources_of_features(frame, names)
    for source, column in zip(sources, columns, strict=True):
        if column.name == weight and (source.kind != "scalar" or source.is_text):
            raise DataError(
                f"sample_weight_col {source.name!r} must hold one number per row in an evaluation; "
                "sample_weight_col=False weighs none"
            )
    return [feature_argument(s, c) for s, c in zip(sources, columns, strict=True)]
