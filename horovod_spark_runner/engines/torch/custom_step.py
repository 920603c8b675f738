"""Arguments of a user-defined step, and the connection of its optimizers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...errors import ModelError
from .optimizers import parameters_of


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
        """Return the module's outputs for the inputs."""
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


# Where a gradient's values lie, and how often it was changed in place.
_State = tuple[int, int]


class CustomStepGradients:
    """Tracks gradients in a custom step, to refuse steps that are not exact.

    Args:
        optimizers: the optimizers, by name.
        ranks: number of ranks that make a step together.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer], ranks: int) -> None:
        self._optimizers = optimizers
        self._ranks = ranks
        self._owner: dict[int, Optimizer] = {}
        # After the last backward pass; when the step before ended; what was added to the latter.
        self._last: dict[int, _State] = {}
        self._left: dict[int, _State] = {}
        self._added: set[int] = set()
        # Those that were changed between two backward passes.
        self._changed: set[int] = set()
        self._stepped: set[int] = set()
        self._exchanged: set[int] = set()
        self._late: set[int] = set()
        self._watch()

    def _watch(self) -> None:
        """Follow the gradients of all parameters that have some, also of those that begin to."""
        for optimizer in self._optimizers.values():
            for parameter in parameters_of(optimizer):
                if not parameter.requires_grad or id(parameter) in self._owner:
                    continue
                self._owner[id(parameter)] = optimizer
                coming = functools.partial(self._coming, parameter)
                parameter.register_hook(coming)  # type: ignore[no-untyped-call]
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._arrived
                )

    def begin(self) -> None:
        """Begin a step: gradients that an optimizer has stepped with are gone."""
        self._watch()
        for noted in (self._last, self._added, self._changed, self._exchanged, self._late):
            noted.clear()
        for optimizer in self._optimizers.values():
            if not self._holds(optimizer):
                optimizer.zero_grad(set_to_none=True)
        self._stepped.clear()

    def exchanged(self, optimizer: Optimizer) -> None:
        """Record that an optimizer's gradients are those of all ranks.

        Raises:
            ModelError: they had been already.
        """
        self._check_late(optimizer)
        self._check_changed(optimizer)
        self._exchanged.add(id(optimizer))

    def stepping(self, optimizer: Optimizer) -> bool:
        """Record that an optimizer is about to step; return whether to exchange its gradients.

        Raises:
            ModelError: they are not what all ranks are to step with.
        """
        self._check_late(optimizer)
        parameters = parameters_of(optimizer)
        if any(id(parameter) in self._added for parameter in parameters):
            raise ModelError(
                f"{self._named(optimizer)} steps with gradients of an earlier step, too: ranks may "
                "have had other numbers of rows there. Call its zero_grad() before the backward "
                "pass; to add up gradients, cut the batch into parts within one step"
            )
        for parameter in parameters:
            self._left.pop(id(parameter), None)
        self._stepped.add(id(optimizer))
        if id(optimizer) in self._exchanged:
            self._exchanged.discard(id(optimizer))
            return False
        self._check_changed(optimizer)
        return True

    def end(self) -> None:
        """End a step.

        Raises:
            ModelError: the only optimizer has gradients, and has not stepped.
        """
        self._left.clear()
        for optimizer in self._optimizers.values():
            held = [p for p in parameters_of(optimizer) if p.grad is not None]
            waiting = bool(held) and id(optimizer) not in self._stepped
            if waiting and len(self._optimizers) == 1:
                raise ModelError(
                    "train_step ended with gradients that its optimizer has not stepped with, "
                    "which would be lost: call step() in every train_step; to add up gradients, "
                    "cut the batch into parts within one train_step"
                )
            for parameter in held:
                if waiting:
                    self._left[id(parameter)] = _state_of(parameter.grad)

    def _holds(self, optimizer: Optimizer) -> bool:
        return any(id(parameter) in self._left for parameter in parameters_of(optimizer))

    def _coming(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Record a gradient that the backward pass is about to add to."""
        key = id(parameter)
        left, last = self._left.pop(key, None), self._last.get(key)
        held = None if parameter.grad is None else _state_of(parameter.grad)
        if held is not None and held in (left, last):
            if held == left:
                self._added.add(key)
        elif parameter.grad is None or not parameter.grad.any():
            self._added.discard(key)
            self._changed.discard(key)
        elif left is not None:
            self._added.add(key)
        elif last is not None:
            self._changed.add(key)

    def _arrived(self, parameter: nn.Parameter) -> None:
        self._last[id(parameter)] = _state_of(parameter.grad)
        owner = id(self._owner[id(parameter)])
        if owner in self._exchanged:
            self._late.add(owner)

    def _check_late(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._late:
            raise ModelError(
                f"a backward pass after synchronize() adds this rank's own gradients to those of "
                f"all ranks that {self._named(optimizer)} has; synchronize() after the last one"
            )

    def _check_changed(self, optimizer: Optimizer) -> None:
        """Check that no gradient was changed, or replaced, since it came; it leaves now."""
        for parameter in parameters_of(optimizer):
            key, gradient = id(parameter), parameter.grad
            last = self._last.pop(key, None)
            changed = last is not None and gradient is not None and _state_of(gradient) != last
            if self._ranks > 1 and (changed or key in self._changed):
                raise ModelError(
                    f"gradients of {self._named(optimizer)} were changed between backward() and "
                    "step(), when they were those of one rank; call step.synchronize() after the "
                    "last backward(), which makes them those of all ranks, and then change them"
                )
            self._changed.discard(key)

    def _named(self, optimizer: Optimizer) -> str:
        name = next(name for name, one in self._optimizers.items() if one is optimizer)
        return f"optimizer {name!r}" if name else "the optimizer"


def _state_of(gradient: Tensor | None) -> _State:
    assert gradient is not None
    return gradient.data_ptr(), gradient._version
