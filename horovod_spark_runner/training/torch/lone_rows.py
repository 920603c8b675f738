"""Partial batches that leave a rank a single row, which batch normalisation cannot do with."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...errors import ModelError
from ..spec import TrainingSpec
from .batches import Batches
from .lightning.recognise import is_lightning


def check_lone_rows(module: nn.Module, batches: Batches, spec: TrainingSpec, size: int) -> None:
    """Check that no step gives a rank one row only, where the module cannot be trained on it.

    Args:
        module: the module, before its first step; it stays as it is.
        batches: makes its inputs.
        spec: the training.
        size: number of ranks.

    Raises:
        ModelError: one does.
    """
    left = spec.train.rows % spec.global_batch
    shares = [left * (rank + 1) // size - left * rank // size for rank in range(size)]
    if spec.fit.batch_size > 1 and 1 not in shares:
        return
    if not any(isinstance(layer, _BatchNorm) for layer in module.modules()):
        return
    tried = copy.deepcopy(module)
    if not is_lightning(module):  # whose parts stay in the mode that they are in
        tried.train()
    state = torch.get_rng_state()
    try:
        with torch.no_grad():
            batches.call(tried, batches.of(batches.blank, training=False))
    except ValueError as error:
        raise ModelError(
            f"{spec.train.rows} rows in global batches of {spec.global_batch} leave a rank a "
            f"single row in the last step of an epoch, of which {type(module).__name__} cannot "
            f"take moments ({error}); choose another batch_size, or sync_batch_norm=True, which "
            "takes those of all ranks"
        ) from error
    finally:
        torch.set_rng_state(state)
