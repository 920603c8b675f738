"""What a case of the table is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# A column, or columns by place or by name, as `run_training` takes them.
Columns = str | list[Any] | dict[str, Any]

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
        x: the columns that feed the model, as `Model.fit` would get their arrays.
        y: the columns it is compared with.
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


def columns_in(columns: Columns) -> list[str]:
    """Return the names of all columns, in order."""
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
    return [fill(part, arrays) for part in columns]
