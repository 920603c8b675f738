"""Whether a SavedModel can be made of the model that is to be trained, before it is."""

from __future__ import annotations

from collections.abc import Container, Sequence

from ..data.manifest import Column
from ..training.engine import SAVED_MODEL, engine_named
from ..training.spec import Binding, ModelSource


def check_saved_model(
    source: ModelSource,
    inputs: Binding,
    transforms: Container[str],
    columns: Sequence[Column] = (),
) -> None:
    """Check it as far as the columns tell.

    Args:
        source: the model.
        inputs: its feature columns.
        transforms: columns that are given a transform.
        columns: the feature columns as they are written, once that is known.

    Raises:
        InvalidInputError: it cannot be made.
    """
    transformed = [name for name in inputs.columns if name in transforms]
    engine_named(source.engine).check_export(SAVED_MODEL, inputs.columns, transformed, columns)
