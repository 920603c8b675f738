"""Which columns play which part, and in which shapes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import DataError


@dataclass(frozen=True)
class Roles:
    """Which columns play which part; every tuple holds column names.

    Attributes:
        features: the model's inputs.
        labels: what it is to predict.
        weight: weight of each row in the loss, if any.
        labelled: whether labels are needed.
    """

    features: tuple[str, ...]
    labels: tuple[str, ...]
    weight: str | None = None
    labelled: bool = True

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.features, *self.labels, *((self.weight,) if self.weight else ()))


def check_roles(roles: Roles, available: Sequence[str]) -> None:
    """Check that every column exists and has one part to play. Pure.

    Raises:
        DataError: a column is missing, named twice, ambiguous, or label and feature at once.
    """
    features = "feature_cols" if roles.labelled else "columns"
    if not roles.features:
        raise DataError(f"{features} names no column")
    if roles.labelled and not roles.labels:
        raise DataError("label_cols names no column")
    for title, names in ((features, roles.features), ("label_cols", roles.labels)):
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise DataError(f"{title} names {quote_all(twice)} more than once")
    both = [name for name in roles.labels if name in roles.features]
    if both:
        raise DataError(
            f"{quote_all(both)} is in label_cols and in feature_cols: the model would be shown "
            "what it is to predict"
        )
    if roles.weight is not None and roles.weight in (*roles.features, *roles.labels):
        raise DataError(f"sample_weight_col {roles.weight!r} is a feature or label too")
    missing = [name for name in roles.columns if name not in available]
    if missing:
        raise DataError(
            f"the DataFrame has no column {quote_all(missing)}; it has {quote_all(available)}"
        )
    ambiguous = [name for name in roles.columns if list(available).count(name) > 1]
    if ambiguous:
        raise DataError(
            f"the DataFrame has several columns named {quote_all(ambiguous)}; rename them so that "
            "each name is there once"
        )


def quoted(name: str) -> str:
    """Return a column name that Spark does not read dots or spaces into."""
    return "`" + name.replace("`", "``") + "`"


def check_shape_names(shapes: Mapping[str, object], names: Sequence[str]) -> None:
    """Check that ``shapes`` speaks of columns that are trained on. Pure.

    Raises:
        DataError: it does not.
    """
    unknown = [name for name in shapes if name not in names]
    if unknown:
        raise DataError(f"shapes names {quote_all(unknown)}, which is neither feature nor label")


def check_shapes(
    shapes: Mapping[str, tuple[int, ...]], widths: Mapping[str, int]
) -> dict[str, tuple[int, ...]]:
    """Return the shape of every column, as asked or flat. Pure.

    Args:
        shapes: shapes asked for, by column.
        widths: elements per row, by column; 0 for a scalar.

    Raises:
        DataError: a shape names no column, or does not hold its column's elements.
    """
    check_shape_names(shapes, tuple(widths))
    result: dict[str, tuple[int, ...]] = {}
    for name, width in widths.items():
        shape = tuple(int(size) for size in shapes.get(name, (width,) if width else ()))
        elements = 1
        for size in shape:
            elements *= size
        if elements != max(width, 1) or (shape and not width):
            found = f"{width} elements" if width else "a single number"
            raise DataError(
                f"shapes gives column {name!r} the shape {shape} of {elements} elements, but its "
                f"rows hold {found}"
            )
        result[name] = shape
    return result


def quote_all(names: Sequence[str]) -> str:
    """Return names in quotes, for messages."""
    return ", ".join(repr(name) for name in names)
