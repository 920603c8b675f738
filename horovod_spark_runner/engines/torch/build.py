"""A PyTorch model, as its source makes it."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from torch import nn

from ...errors import ModelError, brief
from ...training.spec import ModelNames, ModelSource
from .feeding import input_names
from .lightning.recognise import is_lightning
from .torch_model import TorchModel


def build(source: ModelSource) -> tuple[TorchModel, nn.Module]:
    """Build a source's model; return it and its module.

    Raises:
        ModelError: it gives no `TorchModel`, or that has no module.
    """
    model = source.call_function()
    if is_lightning(model):
        model = TorchModel(cast("nn.Module", model))
    if not isinstance(model, TorchModel):
        raise ModelError(
            "model_fn must return TorchModel(module, loss=…, optimizer=…) or a LightningModule, "
            f"but returned {brief(model)}"
        )
    module = _made(model.module)
    return replace(model, module=module), module


def build_module(source: ModelSource) -> nn.Module:
    """Return the module that a source gives, of a `TorchModel` or bare: to predict, it suffices.

    Raises:
        ModelError: it gives none.
    """
    made = source.call_function()
    return _made(made.module if isinstance(made, TorchModel) else made)


def _made(source: object) -> nn.Module:
    module = source if isinstance(source, nn.Module) or not callable(source) else source()
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"module must be a torch.nn.Module, but the function given returned {brief(module)}"
        )
    check_module(module)
    return module


def check_module(module: nn.Module) -> None:
    """Check that a module's state is tensors that can be trained and saved.

    Raises:
        ModelError: it is not; the message names what cannot be used.
    """
    kind = type(module).__name__
    if type(module).__module__.startswith("torch._dynamo"):
        raise ModelError(
            "module was compiled by torch.compile, whose graphs cannot be sent or kept; give the "
            "module itself"
        )
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ModelError(
            f"module is a {kind}, but the ranks exchange gradients by Horovod; give the module "
            "that it wraps"
        )
    lazy = [n for n, p in module.named_parameters() if isinstance(p, nn.UninitializedParameter)]
    if lazy:
        raise ModelError(
            f"parameter {lazy[0]!r} of {kind} has no shape yet; call the module once in model_fn, "
            "or give its layers their sizes"
        )
    extra = [name for name in module.state_dict() if name.endswith("_extra_state")]
    if extra:
        raise ModelError(
            f"{kind} keeps extra state ({extra[0]!r}) that is no tensor, which checkpoints cannot "
            "hold: they are arrays and JSON; register it as buffers"
        )


def names_of(source: ModelSource) -> ModelNames:
    """Return the names of a model's inputs, the parameters of its ``forward``.

    Raises:
        ModelError: ``source`` gives no model.
    """
    model, module = build(source)
    names = input_names(module)
    return ModelNames(inputs=(names,) if names else (), needs_labels=model.loss is not None)
