"""A trained module's weights, given to one that was just built."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import nn

from ...errors import ModelError
from .variables import as_array, set_tensor, weights_of


def give_weights(module: nn.Module, names: Sequence[str], values: Sequence[np.ndarray]) -> None:
    """Give a module the weights of the trained one.

    Args:
        module: the module.
        names: what the trained one's ``state_dict()`` calls them.
        values: the weights, as `as_array` returns them.

    Raises:
        ModelError: they are not those of such a module.
    """
    built, trained = weights_of(module), dict(zip(names, values, strict=True))
    kind = type(module).__name__
    for name in [*trained, *built]:
        if name not in built or name not in trained:
            where = "it has no" if name not in built else "the trained one had no"
            raise ModelError(
                f"model_fn builds another model than was trained: {kind}, {where} weight {name!r}; "
                f"it has {len(built)} weights, the trained one {len(trained)}"
            )
        ours, theirs = _described(as_array(built[name])), _described(trained[name])
        if ours != theirs:
            raise ModelError(
                f"model_fn builds another model than was trained: weight {name!r} of {kind} is "
                f"{ours}, that of the trained one {theirs}"
            )
    for name, array in trained.items():
        set_tensor(built[name], array)


def _described(weight: np.ndarray) -> str:
    return f"{weight.dtype} of shape {weight.shape}"
