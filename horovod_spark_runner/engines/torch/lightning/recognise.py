"""Recognition of Lightning's modules, and of methods that only its Trainer calls.

Imports no framework.
"""

from __future__ import annotations

from typing import Any

from ....errors import ModelError
from ....training.engine import LIGHTNING_MODULES

_LIBRARIES = ("lightning.", "pytorch_lightning.", "lightning_fabric.")

# Methods that are called as Lightning's Trainer calls them.
CALLED = (
    *("setup", "configure_optimizers", "on_train_start", "teardown"),
    *("on_train_epoch_start", "training_step", "on_train_epoch_end"),
    *("on_validation_epoch_start", "validation_step", "on_validation_epoch_end"),
)
# Methods that no fit calls, or that only the module itself and its user call.
_LEFT_ALONE = (
    *("forward", "print", "freeze", "unfreeze", "log_dict", "load_from_checkpoint"),
    *("cpu", "cuda", "to", "type", "double", "float", "half"),
    *("save_hyperparameters", "remove_ignored_hparams"),
)
_LEFT_ALONE_PREFIXES = ("test_", "predict_", "on_test_", "on_predict_", "to_")

CUSTOM_STEP_ADVICE = (
    "give the networks as an nn.Module, TorchModel(module, optimizer=…, train_step=…), whose "
    "train_step computes gradients and steps"
)
# Methods that Lightning's Trainer calls, or has called before version 2, and what to do instead.
_INSTEAD = {
    "train_dataloader val_dataloader prepare_data transfer_batch_to_device": (
        "batches are made of the DataFrame's rows, and of those of validation=…"
    ),
    "on_before_batch_transfer on_after_batch_transfer on_train_batch_start on_train_batch_end "
    "on_validation_batch_start on_validation_batch_end on_batch_start on_batch_end "
    "training_step_end validation_step_end": (
        "write it into training_step or validation_step; what follows a step of all ranks, into "
        "on_step_end of a TorchCallback"
    ),
    "on_validation_start on_validation_end on_validation_model_eval on_validation_model_train "
    "on_validation_model_zero_grad training_epoch_end validation_epoch_end on_epoch_start "
    "on_epoch_end": "use on_train_epoch_start or …_end, or on_validation_epoch_start or …_end",
    "configure_callbacks on_fit_start on_fit_end on_train_end": (
        "give callbacks=[…] of TorchCallback, which has on_train_begin and on_train_end"
    ),
    "configure_model configure_sharded_model": "build the whole module in __init__ or setup",
    "configure_gradient_clipping clip_gradients": (
        "give TorchModel(module, clip_norm=…) or clip_value=…"
    ),
    "lr_scheduler_step": "let configure_optimizers return a scheduler with its 'interval'",
    "on_save_checkpoint on_load_checkpoint": (
        "checkpoints are arrays and JSON; keep tensors as buffers"
    ),
    "on_before_zero_grad on_before_backward on_after_backward on_before_optimizer_step backward "
    "optimizer_step optimizer_zero_grad manual_backward": CUSTOM_STEP_ADVICE,
}
_INSTEAD_OF = {name: instead for names, instead in _INSTEAD.items() for name in names.split()}


def is_lightning(value: object) -> bool:
    """Return whether ``value`` is a ``LightningModule``, or a class of some."""
    cls = value if isinstance(value, type) else type(value)
    return any(f"{base.__module__}.{base.__name__}" in LIGHTNING_MODULES for base in cls.__mro__)


def overrides(module: object, name: str) -> bool:
    """Return whether a user's class overrides a method."""
    owner = next((cls for cls in type(module).__mro__ if name in vars(cls)), None)
    return owner is not None and not f"{owner.__module__}.".startswith((*_LIBRARIES, "torch."))


def check_module(module: Any) -> None:
    """Check that a module defines its training, and no hook that only Lightning's Trainer calls.

    Raises:
        ModelError: it has not; the message names the method and what to write instead.
    """
    kind = type(module).__name__
    for name in ("training_step", "configure_optimizers"):
        if not overrides(module, name):
            raise ModelError(f"{kind} has no {name} to train it by")
    for name in sorted(_lightning_methods(type(module))):
        if name in CALLED or name in _LEFT_ALONE or name.startswith(_LEFT_ALONE_PREFIXES):
            continue
        if overrides(module, name):
            instead = _INSTEAD_OF.get(name, f"leave it out; {', '.join(CALLED)} are called")
            raise ModelError(
                f"{kind}.{name} is not called here, where Lightning's Trainer does not train: "
                f"{instead}"
            )
    check_automatic(module)


def check_automatic(module: Any) -> None:
    """Check that a module leaves the steps of its optimizer to the training.

    Raises:
        ModelError: it steps itself.
    """
    if not module.automatic_optimization:
        raise ModelError(
            f"{type(module).__name__} sets automatic_optimization = False, but its training_step "
            f"is not to step here: {CUSTOM_STEP_ADVICE}"
        )


def _lightning_methods(cls: type) -> set[str]:
    """Return the public methods that Lightning has for a module, or has had."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith(_LIBRARIES)]
    names = {name for base in bases for name in vars(base) if not name.startswith("_")}
    return {*_INSTEAD_OF, *(name for name in names if callable(getattr(cls, name)))}
