"""Training by a user's ``train_step``: its argument, its results, its gradients on all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ...errors import ModelError, brief
from ...training.epochs import Step
from ...training.part_comparison import Values
from .binding import TorchBatch, plain_label
from .model import one_number
from .optimizers import parameters_of
from .step import Steps
from .trial import Recorder

# Where a gradient's values lie, and how often it was changed in place.
_State = tuple[int, int]


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

        Between this, after the last ``backward()``, and ``step()``, gradients can be read and
        changed, all at once (``torch.nn.utils.clip_grad_norm_``) as in one process. All ranks must
        call it alike.

        Args:
            optimizer: whose gradients; by default those of all optimizers.

        Raises:
            ModelError: gradients were changed before, or a backward pass came after another call.
        """
        self._synchronize(optimizer)


class CustomSteps(Steps):
    """Training by a user's ``train_step``; validation as usual."""

    def _connect(self) -> None:
        self._gradients = CustomStepGradients(self._optimizers, self._ranks)
        for optimizer in self._optimizers.values():
            optimizer.register_step_pre_hook(self._before_step)

    def _train_batch(self, step: Step) -> None:
        self._gradients.begin()
        batch = self._batch_of(step) or self._batches.nothing()
        logs = self._call(batch, self._synchronize)
        self._gradients.end()
        self._agree_to_step(None)
        self._add_logs(logs, step.batch.rows)

    def step_functions(self) -> list[object]:
        return [self._model.train_step]

    def try_step(self, step: Step, recorder: Recorder) -> Values:
        batch = self._batches.of(step.batch.arrays, training=True)
        self._call(batch, lambda optimizer: recorder.record(*self._chosen(optimizer)))
        return {}

    def _call(self, batch: TorchBatch, synchronize: Callable[[Optimizer | None], None]) -> object:
        """Call the user's ``train_step`` on a batch."""
        assert self._model.train_step is not None
        torch_step = TorchStep(
            self._module,
            batch.inputs,
            [plain_label(label) for label in batch.labels],
            batch.weights,
            self._optimizers,
            lambda: self._batches.call(self._module, batch),
            synchronize,
        )
        with self._autocast():
            return self._model.train_step(torch_step)

    def _add_logs(self, logs: object, rows: int) -> None:
        """Add what ``train_step`` returned to the results, by the rows that it is of."""
        if logs is None:
            return
        if not isinstance(logs, Mapping):
            raise ModelError(
                "train_step must return what to report, numbers by name, or None, but returned "
                f"{brief(logs)}"
            )
        for name, value in logs.items():
            number = one_number(value)
            if number is None:
                shown = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else brief(value)
                raise ModelError(
                    f"train_step reports {name!r} with {shown}; report one number, the mean over "
                    "the rows of the batch"
                )
            self._results.sums.add(str(name), number * rows if rows else 0.0, rows)

    def _chosen(self, optimizer: Optimizer | None) -> list[Optimizer]:
        return list(self._optimizers.values()) if optimizer is None else [optimizer]

    def _synchronize(self, optimizer: Optimizer | None) -> None:
        """Exchange gradients; see `TorchStep.synchronize`."""
        if self._ranks > 1:
            for each in self._chosen(optimizer):
                self._gradients.exchanged(each)
                self._exchange(each)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        clips = self._model.clip_norm is not None or self._model.clip_value is not None
        if closure is not None and (self._ranks > 1 or self.exchange.delays_gradients or clips):
            raise ModelError(
                "an optimizer's step() is given a closure, which computes gradients after those of "
                "all ranks were exchanged and clipped: call backward() before step(), and step() "
                "without a closure"
            )
        if self._gradients.stepping(optimizer):
            self._exchange(optimizer)
        self._clip(optimizer)

    def _exchange(self, optimizer: Optimizer) -> None:
        self._agree_to_step(optimizer)
        self.exchange.of(optimizer)

    def _agree_to_step(self, optimizer: Optimizer | None) -> None:
        """Check that all ranks are about to step with the same optimizer, or with none."""
        if self._ranks == 1:
            return
        found = (repr(name) for name, one in self._optimizers.items() if one is optimizer)
        name = next(found, "none")
        with self.exchange.waiting():
            names = self._world.allgather(name)
        if len(set(names)) > 1:
            shown = ", ".join(f"rank {rank} {each}" for rank, each in enumerate(names[:8]))
            raise ModelError(
                "train_step let the ranks step with other optimizers, or not as often: next "
                f"are {shown}. Call step() of each optimizer equally often in every step (multiply "
                "a loss by 0 where it is not to count)"
            )


class CustomStepGradients:
    """Record of the gradients in a custom step, by which steps that are not exact are refused.

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
        """Begin a step: clear gradients that an optimizer has stepped with."""
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
