"""What a PyTorch module calls its inputs."""

from __future__ import annotations

from ..spec import ModelNames, ModelSource
from .build import build
from .feeding import input_names


def names_of(source: ModelSource) -> ModelNames:
    """Return the names of a model's inputs, the parameters of its ``forward``.

    Raises:
        ModelError: ``source`` gives no model.
    """
    model, module = build(source)
    names = input_names(module)
    return ModelNames(inputs=(names,) if names else (), needs_labels=model.loss is not None)
