"""What a case of the table is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# A column, or columns by place or by name, as `run_training` takes them; `None` for no label.
Columns = str | list[Any] | dict[str, Any] | None

SAME = 1e-6
CLOSE = 1e-5


def no_callbacks(folder: Path) -> list[Any]:
    return []


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        name: what is shown, in lower case with dashes.
        model: returns the compiled model.
        x: the columns that feed the model; `Model.fit` gets their arrays in the same places.
        y: the columns it is compared with.
        fit_x: makes what `Model.fit` gets as inputs of the arrays, where it is something else.
        fit_y: the same for labels.
        weight: column of sample weights.
        callbacks: returns Keras callbacks that write into a folder.
        rows: rows of the training data; 16 make a global batch.
        epochs: epochs.
        validation: whether there are validation data.
        options: further settings, as `FitOptions` and `Model.fit` call them.
        one: how far one rank may be from `Model.fit`, relative to 1 or to the value.
        two: how far two ranks may be from one; ``None`` where they are to differ.
        why: the reason of a tolerance that is not the usual one.
        predicts: how far the saved model's predictions may be from the model's own; ``None``
            where it cannot predict.
        refused: part of the message of a training that is refused.
        lost: part of the message by which `from_run` refuses a model that Keras cannot write.
        custom_objects: the model's own classes, for `from_run`.
        shows: names that Keras exports and that this case is there for.
        note: what else a reader should know.
    """

    name: str
    model: Callable[[], Any] = field(repr=False)
    x: Columns = "x"
    y: Columns = "y"
    fit_x: Callable[[Mapping[str, Any]], Any] | None = field(default=None, repr=False)
    fit_y: Callable[[Mapping[str, Any]], Any] | None = field(default=None, repr=False)
    weight: str | None = None
    callbacks: Callable[[Path], list[Any]] = field(default=no_callbacks, repr=False)
    rows: int = 59
    epochs: int = 2
    validation: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    one: float = SAME
    two: float | None = CLOSE
    why: str = ""
    predicts: float | None = CLOSE
    refused: str = ""
    lost: str = ""
    custom_objects: Mapping[str, Any] = field(default_factory=dict, repr=False)
    shows: tuple[str, ...] = ()
    note: str = ""

    def inputs(self, arrays: Mapping[str, Any]) -> Any:
        """Return the inputs as `Model.fit` gets them."""
        return fill(self.x, arrays) if self.fit_x is None else self.fit_x(arrays)

    def batch(self, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return inputs, labels and weights as `Model.fit` gets them."""
        values: tuple[Any, ...] = (self.inputs(arrays),)
        if self.y is not None or self.fit_y is not None:
            values += (fill(self.y, arrays) if self.fit_y is None else self.fit_y(arrays),)
        return values if self.weight is None else (*values, arrays[self.weight])


def columns_in(columns: Columns) -> list[str]:
    """Return the names of all columns, in order."""
    if columns is None:
        return []
    if isinstance(columns, str):
        return [columns]
    parts = columns.values() if isinstance(columns, dict) else columns
    return [name for part in parts for name in columns_in(part)]


def fill(columns: Columns, arrays: Mapping[str, Any]) -> Any:
    """Return the arrays in the place of their columns."""
    if isinstance(columns, str):
        return arrays[columns]
    if isinstance(columns, dict):
        return {name: fill(part, arrays) for name, part in columns.items()}
    # Keras itself turns lists into tuples; TensorFlow would take a list for one tensor.
    return tuple(fill(part, arrays) for part in columns or ())
