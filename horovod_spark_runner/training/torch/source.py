"""Where a PyTorch model comes from, as far as the driver can tell. Loads no framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ...errors import InvalidInputError, ModelError, brief
from ...frameworks import TORCH
from ..spec import ModelSource, check_model_fn
from .lightning.recognise import is_lightning
from .torch_model import TorchModel

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class _Given:
    """A function that returns what it was made with."""

    model: TorchModel

    def __call__(self) -> TorchModel:
        return self.model


def model_source(model: object, custom_objects: Mapping[str, object] | None = None) -> ModelSource:
    """Return the source for ``run_training``'s ``model_fn`` argument.

    Args:
        model: a function without required arguments that returns a `TorchModel` or a
            ``LightningModule``, or one of these itself.
        custom_objects: must not be given.

    Raises:
        ModelError: it is neither.
        InvalidInputError: ``custom_objects`` is given.
    """
    if custom_objects:
        raise InvalidInputError(
            "custom_objects are for Keras' files; what a PyTorch module needs is part of model_fn"
        )
    if isinstance(model, TorchModel):
        return ModelSource(function=_Given(model), engine=TORCH)
    if is_lightning(model) and not isinstance(model, type):
        return ModelSource(function=_Given(TorchModel(cast("nn.Module", model))), engine=TORCH)
    if is_of_torch(model, "torch.nn.modules.module.Module"):
        raise ModelError(
            f"model_fn is a {type(model).__name__}, a module without loss and optimizer; give "
            "TorchModel(module, loss=…, optimizer=…), or a function that returns one"
        )
    if not callable(model) or (isinstance(model, type) and not is_lightning(model)):
        raise ModelError(
            "model_fn must be a function that returns a TorchModel, or a TorchModel, got "
            f"{brief(model)}"
        )
    check_model_fn(model)
    return ModelSource(function=model, engine=TORCH)


def check_given_callbacks(given: object) -> None:
    """Check as much of ``callbacks`` as shows without PyTorch; ranks check what functions return.

    Raises:
        InvalidInputError: it holds something else than callbacks of PyTorch trainings.
    """
    from .callbacks import TorchCallback, check_hooks

    if isinstance(given, TorchCallback):
        given = [given]
    if callable(given):
        return
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise InvalidInputError(
            "callbacks must be a list of TorchCallback, or a function that returns one, got "
            f"{brief(given)}"
        )
    for callback in given:
        if not isinstance(callback, TorchCallback):
            raise InvalidInputError(
                f"callbacks holds {brief(callback)}, which is no TorchCallback: the training is "
                "one of a PyTorch module"
            )
        check_hooks(callback)


def is_of_torch(value: object, name: str) -> bool:
    """Tell whether ``value`` is an instance of PyTorch's class of that name."""
    # Without importing PyTorch: if it is an instance, PyTorch is loaded already.
    return any(f"{cls.__module__}.{cls.__qualname__}" == name for cls in type(value).__mro__)
