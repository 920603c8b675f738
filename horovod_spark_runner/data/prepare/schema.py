"""Roles and shapes of columns. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...errors import DataError
from ...formatting import quote_all


@dataclass(frozen=True)
class Roles:
    """Roles of columns; every tuple holds column names.

    Attributes:
        features: the model's inputs.
        labels: the values to predict; empty if the model's loss needs none.
        weight: weight of each row in the loss, if any.
        labelled: whether columns have roles at all; if not, all are features.
    """

    features: tuple[str, ...]
    labels: tuple[str, ...]
    weight: str | None = None
    labelled: bool = True

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns, each once, in the order of their first role."""
        weight = (self.weight,) if self.weight else ()
        return tuple(dict.fromkeys((*self.features, *self.labels, *weight)))


def check_roles(roles: Roles, available: Sequence[str], *, case_sensitive: bool = False) -> None:
    """Check that every column exists, under an unambiguous name. Pure.

    Args:
        roles: the columns and their roles; a column may have several.
        available: names of the DataFrame's columns.
        case_sensitive: whether Spark distinguishes ``a`` and ``A``.

    Raises:
        DataError: a column is missing or ambiguous, or a feature is named twice.
    """
    title = "feature_cols" if roles.labelled else "columns"
    if not roles.features:
        raise DataError(f"{title} names no column")
    twice = sorted({name for name in roles.features if roles.features.count(name) > 1})
    if twice:
        raise DataError(f"{title} names {quote_all(twice)} more than once")
    missing = [name for name in roles.columns if name not in available]
    if missing:
        raise DataError(
            f"the DataFrame has no column {quote_all(missing)}; it has {quote_all(available)}"
            + field_hint(missing, available)
        )
    check_unambiguous(roles.columns, available, case_sensitive=case_sensitive)


def field_hint(missing: Sequence[str], available: Sequence[str]) -> str:
    """Return a hint on making a column of a struct's field, if a name refers to one. Pure.

    Args:
        missing: the missing names.
        available: names of the DataFrame's columns.
    """
    fields = [name for name in missing if name.partition(".")[0] in available]
    if not fields:
        return ""
    name = fields[0]
    return f'. A field of a struct is not a column: add it with df.withColumn("{name}", df.{name})'


def check_unambiguous(
    names: Sequence[str], available: Sequence[str], *, case_sensitive: bool = False
) -> None:
    """Check that each of ``names`` refers to one column in Spark. Pure.

    Raises:
        DataError: it refers to several.
    """
    for name in names:
        if list(available).count(name) > 1:
            raise DataError(
                f"the DataFrame has several columns named {name!r}; rename them so that each name "
                "is there once"
            )
        clashing = [other for other in available if other.lower() == name.lower()]
        if len(clashing) > 1 and not case_sensitive:
            raise DataError(
                f"the DataFrame has the columns {quote_all(clashing)}, which are equal "
                "to Spark; rename all but one of them, or set spark.sql.caseSensitive to true"
            )


def quoted(name: str) -> str:
    """Quote a column name, so that Spark does not interpret its dots."""
    return "`" + name.replace("`", "``") + "`"


def check_named(argument: str, entries: Mapping[str, object], roles: Roles) -> None:
    """Check that an argument by column names columns that are read. Pure.

    Args:
        argument: its name, such as ``"shapes"``.
        entries: the argument.
        roles: the columns and their roles.

    Raises:
        DataError: it names others.
    """
    unknown = [name for name in entries if name not in roles.columns]
    if unknown:
        reason = "neither feature nor label"
        if not roles.labelled:
            reason = f"not among the columns {quote_all(roles.columns)}"
        raise DataError(f"{argument} names {quote_all(unknown)}, which is {reason}")


def check_shape(name: str, shape: tuple[int, ...], width: int) -> None:
    """Check that a requested shape holds the elements of a column's rows. Pure.

    Args:
        name: the column.
        shape: its shape.
        width: elements per row; 0 for a scalar.

    Raises:
        DataError: the shape holds another number of elements.
    """
    elements = math.prod(shape)
    if elements != max(width, 1) or (shape and not width):
        actual = f"{width} elements" if width else "a single number"
        raise DataError(
            f"shapes gives column {name!r} the shape {shape} of {elements} elements, but its "
            f"rows hold {actual}"
        )
