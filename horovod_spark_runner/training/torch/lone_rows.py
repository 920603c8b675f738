"""Partial batches that leave a rank a single row, which batch normalisation cannot do with."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...errors import ModelError
from ..spec import TrainingSpec
from .batches import Batches


def check_lone_rows(
    module: nn.Module, batches: Batches, spec: TrainingSpec, size: int, *, together: bool
) -> None:
    """Check that no step takes moments of one row only, where the module cannot be trained on it.

    Args:
        module: the module, before its first step; it stays as it is.
        batches: makes its inputs.
        spec: the training.
        size: number of ranks.
        together: whether moments are taken of the rows of all ranks.

    Raises:
        ModelError: one does.
    """
    left = spec.train.rows % spec.global_batch
    if together and size > 1:  # moments are those of all ranks' rows
        shares, usual = [left], spec.global_batch
    else:
        shares = [left * (rank + 1) // size - left * rank // size for rank in range(size)]
        usual = spec.fit.batch_size
    if usual > 1 and 1 not in shares:
        return
    if not any(isinstance(layer, _BatchNorm) for layer in module.modules()):
        return
    tried = copy.deepcopy(module)
    state = torch.get_rng_state()
    try:
        with torch.no_grad():
            batches.call(tried, batches.of(batches.blank, training=False))
    except ValueError as error:
        whom = "all ranks together" if together else "a rank"
        advice = "choose another batch_size"
        if size > 1 and not together and left != 1:
            advice += ", or sync_batch_norm=True, which takes those of all ranks"
        raise ModelError(
            f"{spec.train.rows} rows in global batches of {spec.global_batch} leave {whom} a "
            f"single row in a step of an epoch, of which {type(module).__name__} cannot take "
            f"moments ({error}); {advice}"
        ) from error
    finally:
        torch.set_rng_state(state)
