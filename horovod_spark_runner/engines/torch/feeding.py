"""Conversion of columns to the arguments of a PyTorch module, for training and prediction."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...data.manifest import Column
from ...errors import ModelError
from ...training.spec import Binding

# Batches are gathered for one step, so a tensor may share their memory, writable or not.
warnings.filterwarnings("ignore", "The given NumPy array is not writable")

_KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Feed:
    """Arguments of a module, by position or by name.

    Attributes:
        slots: the columns of each input, or label; several are joined along their last axis.
        names: parameters of ``forward`` in the same order; ``None`` to give them by position.
    """

    slots: tuple[tuple[str, ...], ...]
    names: tuple[str, ...] | None = None

    def values(self, arrays: Mapping[str, np.ndarray], device: torch.device) -> list[Tensor]:
        """Return the tensor of each input; those on a CPU share the arrays' memory."""
        return [to_tensor(joined(arrays, slot), device) for slot in self.slots]

    def call(self, module: nn.Module, values: Sequence[Tensor]) -> Any:
        """Call ``module`` on `values`."""
        if self.names is None:
            return module(*values)
        return module(**dict(zip(self.names, values, strict=True)))


def to_tensor(values: np.ndarray, device: torch.device) -> Tensor:
    """Return an array as a tensor; one on a CPU shares its memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def joined(arrays: Mapping[str, np.ndarray], names: Sequence[str]) -> np.ndarray:
    """Return a column's values, or those of several columns joined along their last axis."""
    if len(names) == 1:
        return arrays[names[0]]
    parts = [arrays[name] for name in names]
    values = np.concatenate([p[:, None] if p.ndim == 1 else p for p in parts], axis=-1)
    wide = values.dtype == np.float64 and not any(p.dtype == np.float64 for p in parts)
    # float32 beside int32: as everything else that comes from columns.
    return values.astype(np.float32) if wide else values


def input_feed(module: nn.Module, binding: Binding, columns: Mapping[str, Column]) -> Feed:
    """Return how columns feed a module.

    A dictionary names parameters of ``forward``. A list is given by position, or by name if each
    column is called as a parameter.

    Raises:
        ModelError: inputs and columns do not fit; the message shows both.
    """
    check_columns(binding.slots, columns)
    parameters, keywords, positions = _parameters(module)
    fed = f"feature_cols feeds {len(binding.slots)}: {'; '.join(binding.describe())}"
    kind = type(module).__name__
    takes = f"{kind}.forward takes {_listed(parameters, keywords, positions)}"
    required = [p.name for p in parameters if p.default is inspect.Parameter.empty]
    names = binding.names
    if names is None:
        names = _by_name(binding, parameters, takes)
    if names is not None:
        accepted = [p.name for p in parameters if p.kind in _KEYWORDS]
        unknown = [name for name in names if name not in accepted and not keywords]
        missing = [name for name in required if name not in names]
        if unknown or missing:
            what = f"no parameter {unknown[0]!r}" if unknown else f"nothing feeds {missing[0]!r}"
            raise ModelError(f"{what}: {takes}, but feature_cols names {', '.join(names)}")
        return Feed(binding.slots, tuple(names))
    most = len([p for p in parameters if p.kind in _POSITIONAL])
    by_word = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name in required]
    least = len(required) - len(by_word)
    if len(binding.slots) < least or (len(binding.slots) > most and not positions) or by_word:
        hint = ""
        if len(binding.slots) > most == 1:
            flat = [name for slot in binding.slots for name in slot]
            hint = f"; to join the columns into one input, feature_cols=[{flat}]"
        raise ModelError(f"{takes}, but {fed}{hint}")
    return Feed(binding.slots)


def check_columns(slots: Sequence[Sequence[str]], columns: Mapping[str, Column]) -> None:
    """Check that all columns can be tensors, and those of a slot can be joined.

    Raises:
        ModelError: one cannot.
    """
    for slot in slots:
        for name in slot:
            if columns[name].is_text:
                raise ModelError(
                    f"column {name!r} holds strings, which no tensor can; index it with Spark "
                    "ML's StringIndexer, or give a transform that makes numbers of it"
                )
        shapes = {columns[name].shape[:-1] for name in slot}
        if len(shapes) > 1:
            described = ", ".join(columns[name].describe() for name in slot)
            raise ModelError(f"columns cannot be joined into one: they are {described}")


def input_names(module: nn.Module) -> tuple[str, ...]:
    """Return the parameters of ``forward`` that must be given."""
    parameters, _, _ = _parameters(module)
    return tuple(p.name for p in parameters if p.default is inspect.Parameter.empty)


def _parameters(module: nn.Module) -> tuple[list[inspect.Parameter], bool, bool]:
    """Return the parameters of ``forward``, and whether it takes any names or positions."""
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):  # one that is not written in Python
        return [], True, True
    keywords = any(p.kind is p.VAR_KEYWORD for p in parameters)
    positions = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return (
        [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)],
        keywords,
        positions,
    )


def _by_name(
    binding: Binding, parameters: Sequence[inspect.Parameter], takes: str
) -> tuple[str, ...] | None:
    """Return the names of inputs where the columns of a list are called as these.

    Raises:
        ModelError: some are, but stand where another is to be.
    """
    columns = [slot[0] if len(slot) == 1 else "" for slot in binding.slots]
    names = [parameter.name for parameter in parameters]
    if len(columns) > 1 and set(columns) <= set(names):
        return tuple(columns)
    wrong = [c for i, c in enumerate(columns) if c in names and names.index(c) != i]
    if wrong:
        raise ModelError(
            f"column {wrong[0]!r} is called as an input, but stands where another is fed: {takes}; "
            "say which column feeds which, feature_cols={input: column, …}"
        )
    return None


def _listed(parameters: Sequence[inspect.Parameter], keywords: bool, positions: bool) -> str:
    named = [
        p.name if p.default is inspect.Parameter.empty else f"{p.name} (optional)"
        for p in parameters
    ]
    named += ["any further inputs"] * positions + ["any further names"] * keywords
    return ", ".join(named) or "nothing"
