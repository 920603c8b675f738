"""Which modules are Lightning's, and what they ask of its Trainer. Imports no framework."""

from __future__ import annotations

from typing import Any

from ....errors import ModelError
from ...said_engine import LIGHTNING_MODULES

_LIBRARIES = ("lightning.", "pytorch_lightning.", "lightning_fabric.", "torch.")

# What a module may say of its training, and nobody here asks for, and what to do instead.
_REFUSED = {
    "train_dataloader": "batches are made of the DataFrame's rows",
    "val_dataloader": "batches are made of the rows of validation=…",
    "prepare_data": "prepare the DataFrame before the call",
    "transfer_batch_to_device": "tensors are where the module is",
    "configure_callbacks": "give callbacks=[…] of TorchCallback",
    "configure_gradient_clipping": "give TorchModel(module, clip_norm=…) or clip_value=…",
    "configure_sharded_model": "use configure_model, which builds the whole module",
    "optimizer_step": "set automatic_optimization = False, and step in training_step",
    "optimizer_zero_grad": "set automatic_optimization = False, and do so in training_step",
    "backward": "set automatic_optimization = False, and call manual_backward in training_step",
    "lr_scheduler_step": "set automatic_optimization = False, and step it in training_step",
    "on_save_checkpoint": "checkpoints are arrays and JSON; keep tensors as buffers",
    "on_load_checkpoint": "checkpoints are arrays and JSON; keep tensors as buffers",
    "on_validation_model_zero_grad": "gradients are not touched between epochs",
    "on_validation_model_eval": "validation is in evaluation mode",
    "on_validation_model_train": "training is in training mode",
}


def is_lightning(value: object) -> bool:
    """Tell whether ``value`` is a ``LightningModule``, or a class of some."""
    cls = value if isinstance(value, type) else type(value)
    return any(f"{base.__module__}.{base.__name__}" in LIGHTNING_MODULES for base in cls.__mro__)


def overrides(module: object, name: str) -> bool:
    """Tell whether a class of the user's has a method of that name."""
    owner = next((cls for cls in type(module).__mro__ if name in vars(cls)), None)
    return owner is not None and not f"{owner.__module__}.".startswith(_LIBRARIES)


def check_module(module: Any) -> None:
    """Check that a module asks for nothing that only Lightning's Trainer does.

    Raises:
        ModelError: it does; the message names the first.
    """
    kind = type(module).__name__
    if not overrides(module, "training_step"):
        raise ModelError(f"{kind} has no training_step to train it by")
    if not overrides(module, "configure_optimizers"):
        raise ModelError(f"{kind} has no configure_optimizers to train it by")
    for name, instead in _REFUSED.items():
        if overrides(module, name):
            raise ModelError(f"{kind}.{name} is not called here, as by Lightning: {instead}")
