"""Arguments of a user-defined step, and the connection of its optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...errors import ModelError


class TorchStep:
    """A batch, for a ``train_step``.

    Attributes:
        module: the module, in training mode.
        inputs: the inputs, in the order of ``feature_cols``.
        labels: the labels, in the order of ``label_cols``.
        weights: weights of the rows; ``None`` where there are none.
        optimizers: the optimizers, by name; a single one is called ``""``.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[Tensor],
        labels: Sequence[Tensor],
        weights: Tensor | None,
        optimizers: Mapping[str, Optimizer],
        call: Callable[[], Any],
        synchronize: Callable[[Optimizer | None], None],
    ) -> None:
        self.module = module
        self.inputs = tuple(inputs)
        self.labels = tuple(labels)
        self.weights = weights
        self.optimizers = optimizers
        self._call = call
        self._synchronize = synchronize

    @property
    def rows(self) -> int:
        """Rows of this rank's part of the batch."""
        return len(self.inputs[0])

    @property
    def optimizer(self) -> Optimizer:
        """The only optimizer.

        Raises:
            ModelError: there are several.
        """
        if len(self.optimizers) > 1:
            raise ModelError(
                "step.optimizer is for one optimizer; there are "
                f"{', '.join(map(repr, self.optimizers))} in step.optimizers"
            )
        return next(iter(self.optimizers.values()))

    def outputs(self) -> Any:
        """Return what the module gives for the inputs."""
        return self._call()

    def synchronize(self, optimizer: Optimizer | None = None) -> None:
        """Make gradients those of all ranks now, and not when an optimizer steps.

        Between this, after the last ``backward()``, and ``step()``, gradients can be looked at and
        changed, all at once (``torch.nn.utils.clip_grad_norm_``) as in one process. All ranks must
        call it alike.

        Args:
            optimizer: whose gradients; by default those of all optimizers.

        Raises:
            ModelError: gradients were changed before, or a backward pass came after another call.
        """
        self._synchronize(optimizer)


def clip(
    optimizer_parameters: Sequence[nn.Parameter], norm: float | None, value: float | None
) -> None:
    """Limit gradients, as `TorchModel.clip_norm` and ``clip_value`` say."""
    there = [parameter for parameter in optimizer_parameters if parameter.grad is not None]
    if norm is not None and there:
        torch.nn.utils.clip_grad_norm_(there, norm)
    if value is not None and there:
        torch.nn.utils.clip_grad_value_(there, value)
