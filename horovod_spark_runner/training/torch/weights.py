"""A module's weights as arrays, and arrays as its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import ModelError
from ...storage.arrays import Arrays

# Types that NumPy lacks, and those of their size through which they pass.
_WITHOUT_NUMPY = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.int8,
    torch.float8_e5m2: torch.int8,
}


def weights_of(module: nn.Module) -> dict[str, np.ndarray]:
    """Return copies of all that ``state_dict()`` holds, parameters and buffers, by name."""
    return {name: to_array(tensor) for name, tensor in module.state_dict().items()}


def numbered(weights: Mapping[str, np.ndarray]) -> Arrays:
    """Return weights as the weights file has them, by their number."""
    return {f"{number:05d}": array for number, array in enumerate(weights.values())}


def to_array(tensor: Tensor) -> np.ndarray:
    """Return a copy of a tensor in its own type."""
    tensor = tensor.detach().cpu()
    through = _WITHOUT_NUMPY.get(tensor.dtype)
    if through is None:
        return np.array(tensor.numpy())
    import ml_dtypes  # as the files of arrays have them

    name = str(tensor.dtype).removeprefix("torch.")
    return np.array(tensor.view(through).numpy()).view(getattr(ml_dtypes, name))


def _tensor(array: np.ndarray, like: Tensor) -> Tensor:
    through = _WITHOUT_NUMPY.get(like.dtype)
    if through is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(f"int{8 * array.dtype.itemsize}")).view(like.dtype)


def give_weights(module: nn.Module, names: Sequence[str], values: Sequence[np.ndarray]) -> None:
    """Give a module that was just built the weights of the trained one.

    Args:
        module: the module.
        names: what the trained one's ``state_dict()`` calls them.
        values: the weights.

    Raises:
        ModelError: they are not those of such a module.
    """
    built = dict(module.state_dict())
    trained = dict(zip(names, values, strict=True))
    kind = type(module).__name__
    for name in [*trained, *built]:
        if name not in built or name not in trained:
            where = "it has no" if name not in built else "the trained one had no"
            raise ModelError(
                f"model_fn builds another model than was trained: {kind}, {where} weight {name!r}; "
                f"it has {len(built)} weights, the trained one {len(trained)}"
            )
        ours, theirs = describe(built[name]), describe(trained[name])
        if ours != theirs:
            raise ModelError(
                f"model_fn builds another model than was trained: weight {name!r} of {kind} is "
                f"{ours}, that of the trained one {theirs}"
            )
    state = {name: _tensor(array, built[name]) for name, array in trained.items()}
    module.load_state_dict(state)


def describe(weight: Tensor | np.ndarray) -> str:
    """Return "float32 of shape (3, 4)" for messages."""
    return f"{str(weight.dtype).removeprefix('torch.')} of shape {tuple(weight.shape)}"
