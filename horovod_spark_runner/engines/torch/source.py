"""Check the source of a PyTorch model on the driver. Loads no framework."""

from __future__ import annotations

import keyword
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ...errors import InvalidInputError, ModelError, brief
from ...frameworks import TORCH
from ...training.engine import TORCH_EXPORT
from ...training.spec import ModelSource, check_model_fn
from .lightning.recognise import is_lightning
from .torch_model import TorchModel

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class _ModelFunction:
    """A function that returns a fixed model."""

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
        return ModelSource(function=_ModelFunction(model), engine=TORCH)
    if is_lightning(model) and not isinstance(model, type):
        return ModelSource(
            function=_ModelFunction(TorchModel(cast("nn.Module", model))), engine=TORCH
        )
    if _is_of_torch(model, "torch.nn.modules.module.Module"):
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


def check_callback_argument(callbacks: object) -> None:
    """Check ``callbacks`` without importing PyTorch; ranks check a function's result.

    Raises:
        InvalidInputError: it holds something else than callbacks of PyTorch trainings.
    """
    from .callbacks import TorchCallback, check_hooks

    if isinstance(callbacks, TorchCallback):
        callbacks = [callbacks]
    if callable(callbacks):
        return
    if isinstance(callbacks, str) or not isinstance(callbacks, Sequence):
        raise InvalidInputError(
            "callbacks must be a list of TorchCallback, or a function that returns one, got "
            f"{brief(callbacks)}"
        )
    for callback in callbacks:
        if not isinstance(callback, TorchCallback):
            raise InvalidInputError(
                f"callbacks holds {brief(callback)}, which is no TorchCallback: the training is "
                "one of a PyTorch module"
            )
        check_hooks(callback)


def _is_of_torch(value: object, name: str) -> bool:
    """Return whether ``value`` is an instance of PyTorch's class of that name."""
    # Without importing PyTorch: if it is an instance, PyTorch is loaded already.
    return any(f"{cls.__module__}.{cls.__qualname__}" == name for cls in type(value).__mro__)


def check_exportable(format: str, names: Sequence[str], transformed: Collection[str]) -> None:
    """Check as much of an export as shows without the module; see `Engine.check_export`."""
    for name in names:
        if format == TORCH_EXPORT and (not name.isidentifier() or keyword.iskeyword(name)):
            raise ModelError(
                f"a program cannot take feature column {name!r}: PyTorch makes it the name of a "
                "Python parameter. Call it otherwise, in the rows that are trained on, or only "
                "there: TorchTransformer.setFeatureCols([…]), then export"
            )
    for name in transformed:
        raise ModelError(
            f"a program cannot take feature column {name!r}: the model was trained with a "
            "transform of it, which is a function of Python's; transform the rows before, in a "
            "column of their own, or put it into the module's forward"
        )


def portable_metrics(metrics: object) -> object:
    """Return metrics in a form that can be pickled; see `Engine.portable_metrics`."""
    if isinstance(metrics, Mapping):
        return {str(name): _checked(one) for name, one in metrics.items()}
    if isinstance(metrics, Sequence) and not isinstance(metrics, str):
        return [_checked(one) for one in metrics]
    return [_checked(metrics)]


def _checked(metric: object) -> object:
    if isinstance(metric, str) or (callable(metric) and not isinstance(metric, type)):
        return metric
    hint = f"; give an object, {metric.__name__}(…)" if isinstance(metric, type) else ""
    raise InvalidInputError(
        f"{metric!r:.200} is no metric of a PyTorch model{hint}. A metric is 'accuracy', 'mae' or "
        "'mse', a function of outputs and labels, or 'spark:…'; a dictionary gives them names"
    )
