"""Check before a training that its model can become a SavedModel."""

from __future__ import annotations

from collections.abc import Container

from ..errors import InvalidInputError
from ..frameworks import model_of
from ..training.engine import SAVED_MODEL, engine_named
from ..training.spec import Binding, ModelSource


def check_saved_model(source: ModelSource, inputs: Binding, transforms: Container[str]) -> None:
    """Check it as far as the columns tell.

    Args:
        source: the model.
        inputs: its feature columns.
        transforms: columns that are given a transform.

    Raises:
        InvalidInputError: no SavedModel can be made of models of this engine.
        ModelError: a column cannot be an input of one.
    """
    transformed = [name for name in inputs.columns if name in transforms]
    engine = engine_named(source.engine)
    if SAVED_MODEL not in engine.export_formats:
        raise InvalidInputError(
            "CheckpointOptions(saved_model=True) is for Keras models, but a "
            f"{model_of(source.engine)} is to be trained. Leave it out, and export the trained "
            "model in another format: TorchTransformer.export, for a PyTorch module"
        )
    engine.check_export(SAVED_MODEL, inputs.columns, transformed)
