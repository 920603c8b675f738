"""Stage of an exported pipeline, stored as JSON and arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Protocol

import numpy as np

from ..storage.arrays import Arrays
from ..typed_json import read_fields
from .columns import Batch

# What becomes of rows with invalid values: an error, no row, or a place of their own.
ERROR, SKIP, KEEP = "error", "skip", "keep"


class Stage(Protocol):
    """One fitted stage: a frozen dataclass of plain values and arrays."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __call__(self, batch: Batch) -> None:
        """Add the stage's columns to a batch, or leave rows of it out.

        Raises:
            DataError: where Spark's stage raises an error; the message names column and value.
        """
        ...

    @property
    def adds(self) -> tuple[str, ...]:
        """The columns it adds."""
        ...


def inputs_of(stage: Stage) -> tuple[str, ...]:
    """Return the columns a stage takes: its field ``input``, or ``inputs`` where it has several."""
    several = getattr(stage, "inputs", None)
    return (stage.input,) if several is None else tuple(several)  # type: ignore[attr-defined]


def to_stored(stage: Stage, number: int) -> tuple[dict[str, Any], Arrays, dict[str, bytes]]:
    """Return a stage as JSON's values, its arrays by name, and its files by name.

    Args:
        stage: the stage.
        number: its place in the pipeline.
    """
    plain: dict[str, Any] = {"kind": type(stage).__name__}
    arrays: Arrays = {}
    files: dict[str, bytes] = {}
    for field in fields(stage):
        value = getattr(stage, field.name)
        name = f"{number}.{field.name}"
        if isinstance(value, np.ndarray):
            arrays[name] = value
            value = {"array": name}
        elif isinstance(value, bytes):
            files[f"{name}.zip"] = value
            value = {"file": f"{name}.zip"}
        plain[field.name] = value
    return plain, arrays, files


def from_stored(
    kinds: Mapping[str, type[Stage]],
    plain: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    files: Mapping[str, bytes],
) -> Stage:
    """Return the stage that `to_stored` was given.

    Raises:
        ValueError: it is of none of these kinds, or a field is of another type.
    """
    fields = dict(plain)
    kind = fields.pop("kind")
    if kind not in kinds:
        raise ValueError(f"it has a stage {kind!r}, which this version does not know")
    for name, value in fields.items():
        if isinstance(value, dict):
            fields[name] = arrays[value["array"]] if "array" in value else files[value["file"]]
    return read_fields(fields, kinds[kind])
