"""Weights to begin with, put into the module that model_fn built."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from ...checkpoint.attachments import contents_of
from ...checkpoint.files import VARIABLES_FILE
from ...cluster.worker.reporting import notify
from ...errors import ModelError, on_one_line
from ...storage.arrays import ArraysFile
from ...training.spec import WarmStart
from ...training.warm_start import ARRAYS
from .program_file import ProgramFile
from .variables import set_tensor, weights_of

_SHOWN = 5
# What a state_dict is called in a dictionary.
_KEYS = ("state_dict", "model_state_dict")
# What DataParallel, torch.compile and modules of Lightning put before the names of weights.
_PREFIXES = ("module.", "_orig_mod.", "model.")


def load_initial_weights(module: nn.Module, start: WarmStart) -> None:
    """Load the weights of ``start`` into ``module``; report weights that were left out.

    Raises:
        ModelError: they do not fit; the first difference is shown. With ``skip_mismatch``: none
            of them does.
    """
    source = _of_run(start) if start.kind == ARRAYS else _of_file(start)
    weights = weights_of(module)
    fitting = [
        n for n in source if n in weights and tuple(source[n].shape) == tuple(weights[n].shape)
    ]
    if not fitting:
        raise ModelError(_no_fit(weights, source, start.origin))
    if not start.skip_mismatch:
        _check_all(weights, source, start.origin)
    for name in fitting:
        value = source[name]
        if isinstance(value, Tensor):
            with torch.no_grad():
                weights[name].copy_(value)
        else:
            set_tensor(weights[name], value)
    if len(fitting) < len(weights):
        left = [name for name in weights if name not in fitting]
        more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        notify(
            f"initial_weights={start.origin!r}: took {len(fitting)} of {len(weights)} weights; "
            f"left as they are: {', '.join(left[:_SHOWN])}{more}"
        )


def _of_run(start: WarmStart) -> Mapping[str, np.ndarray]:
    ((name, data),) = start.files.items()
    arrays = ArraysFile(contents_of(data))
    prefix = "model/" if name == VARIABLES_FILE else ""
    values = [arrays.read(key) for key in sorted(arrays.names) if key.startswith(prefix)]
    return dict(zip(start.paths, values, strict=True))


def _of_file(start: WarmStart) -> Mapping[str, Tensor]:
    ((name, carried),) = start.files.items()
    data = contents_of(carried)
    if name.endswith(".pt2"):
        file = ProgramFile(data.read(), f"initial_weights={start.origin!r}")
        return file.tensors("weights", torch.device("cpu"))
    try:
        # Nothing but tensors and plain containers is made of what a file says.
        weights = torch.load(data.open(), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever PyTorch raises for what it does not load
        reason = on_one_line((str(error).strip() or type(error).__name__).splitlines()[0])
        raise ModelError(
            f"initial_weights={start.origin!r} holds something else than weights: {reason}; write "
            "them with torch.save(module.state_dict(), …)"
        ) from error
    for key in _KEYS:
        if isinstance(weights, Mapping) and isinstance(weights.get(key), Mapping):
            weights = weights[key]
    if not isinstance(weights, Mapping) or not all(isinstance(v, Tensor) for v in weights.values()):
        raise ModelError(
            f"initial_weights={start.origin!r} holds no state_dict, tensors by name; write it with "
            "torch.save(module.state_dict(), …)"
        )
    return weights


def _no_fit(
    weights: Mapping[str, Tensor], source: Mapping[str, np.ndarray | Tensor], origin: str
) -> str:
    """Return the message for weights of which none has a name and shape of the module's."""
    text = (
        f"initial_weights={origin!r}: no weight has the name and shape of one of the module's. "
        f"There are {_listed(source)}; the module has {_listed(weights)}"
    )
    for prefix in _PREFIXES:
        if any(prefix + name in source for name in weights):
            return (
                f"{text}. Without the prefix {prefix!r} their names are the module's: write them "
                f"with torch.save({{name.removeprefix({prefix!r}): value for name, value in "
                "weights.items()}, …)"
            )
    return text


def _listed(weights: Mapping[str, np.ndarray | Tensor]) -> str:
    shown = [f"{name!r} {tuple(value.shape)}" for name, value in weights.items()]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return (", ".join(shown[:_SHOWN]) or "none") + more


def _check_all(
    weights: Mapping[str, Tensor], source: Mapping[str, np.ndarray | Tensor], origin: str
) -> None:
    for name in dict.fromkeys([*weights, *source]):
        ours = f"shape {tuple(weights[name].shape)}" if name in weights else "no such weight"
        theirs = f"shape {tuple(source[name].shape)}" if name in source else "no such weight"
        if ours != theirs:
            raise ModelError(
                f"initial_weights={origin!r} does not fit the module: {name!r} has {theirs} there "
                f"and {ours} in the module; InitialWeights(…, skip_mismatch=True) takes what fits"
            )
