"""Trial of a module's training step and metrics on some rows; see `part_comparison`."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ...training.part_comparison import CHANGE, GRADIENT, Values, measure_change, vary_weights
from .forgetting import forgetting
from .variables import as_array, kept_buffers, parameters_of, set_tensor

_seeds = itertools.count()


@contextlib.contextmanager
def random_kept() -> Iterator[None]:
    """Leave the random generators as they are."""
    state = random.getstate(), np.random.get_state()
    gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(gpus):
        try:
            yield
        finally:
            random.setstate(state[0])
            np.random.set_state(state[1])


@contextlib.contextmanager
def preserve_state(
    module: nn.Module, optimizers: Sequence[Optimizer], *, vary: bool
) -> Iterator[None]:
    """Give a module and its optimizers their state back afterwards.

    Meanwhile PyTorch's layers that drop, or take moments of a batch, treat each row by itself.

    Args:
        module: the module.
        optimizers: its optimizers, which do not step meanwhile.
        vary: whether the module has other weights meanwhile, by which rows differ.
    """
    weights = [(p, p.detach().clone(), p.grad) for p in module.parameters()]
    modes = [(each, each.training) for each in module.modules()]
    held = [(vars(optimizer), dict(vars(optimizer))) for optimizer in optimizers]
    groups = [(group, dict(group)) for optimizer in optimizers for group in optimizer.param_groups]
    seed = next(_seeds)  # what is random is to differ
    with random_kept(), forgetting(module):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        try:
            for each, _ in modes:
                # A GPU goes backwards through recurrent layers in training mode only.
                known = type(each).__module__.startswith("torch.nn.")
                each.training &= not known or isinstance(each, nn.RNNBase)
            for parameter, value, _ in weights:
                parameter.grad = None
                if vary and parameter.requires_grad and parameter.is_floating_point():
                    set_tensor(parameter, vary_weights(as_array(value)))
            yield
        finally:
            for parameter, value, gradient in weights:
                parameter.data.copy_(value)
                parameter.grad = gradient
            for each, training in modes:
                each.training = training
            for now, before in (*held, *groups):
                now.clear()
                now.update(before)


class Recorder:
    """Gradients that optimizers are given in a step, none of which is made."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], np.ndarray] = {}
        self._early: list[Optimizer] = []
        self._times = 0

    def record(self, optimizer: Optimizer) -> None:
        """Take the gradients of an optimizer, before it is to step."""
        self._times += 1
        self._early.append(optimizer)
        for number, parameter in enumerate(parameters_of(optimizer)):
            if parameter.grad is not None:
                gradient = parameter.grad.detach().double().cpu().numpy()
                self.found[GRADIENT, f"{self._times}.{number}"] = gradient

    def step(self, optimizer: Optimizer, *_: object, **__: object) -> None:
        """Take the place of an optimizer's ``step``."""
        if not any(optimizer is each for each in self._early):
            self.record(optimizer)
        self._early = [each for each in self._early if each is not optimizer]


def values_of_step(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    compute: Callable[[Recorder], Values],
    *,
    vary: bool,
) -> Values:
    """Return what a step gives: gradients, and by what buffers change.

    Args:
        module: the module, whose state is what it was afterwards.
        optimizers: its optimizers.
        compute: a step, which records what optimizers do not step with; it may return more values.
        vary: see `preserve_state`.
    """
    recorder = Recorder()
    with preserve_state(module, optimizers, vary=vary), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # schedulers miss the steps
        places = kept_buffers(module)
        before = {
            name: as_array(holder[key].clone())
            for name, (holder, key) in places.items()
            if holder[key] is not None
        }
        for optimizer in optimizers:
            vars(optimizer)["step"] = functools.partial(recorder.step, optimizer)
        found = dict(compute(recorder))
        for name, value in before.items():
            holder, key = places[name]
            if holder.get(key) is not None and as_array(holder[key]).shape == value.shape:
                found[CHANGE, name] = measure_change(as_array(holder[key]), value)
    return {**recorder.found, **found}
