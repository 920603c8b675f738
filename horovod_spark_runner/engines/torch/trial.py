"""Trial of a module's training step and metrics on some rows; see `part_comparison`.

Rank 0 has it made by its side process, which builds a module of its own. Each attempt is made in a
fork of that, so none changes what the next one finds.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...cluster.worker.side_process import SideProcess, call_in_fork
from ...data.read.reader import Batch
from ...errors import ModelError, on_one_line
from ...storage.arrays import Arrays
from ...sync.allreduce import AllreduceSynchroniser
from ...training.epochs import NOTHING, Step
from ...training.part_comparison import (
    CHANGE,
    GRADIENT,
    LOW_PRECISION,
    TOLERANCE,
    Key,
    Values,
    compare_parts,
    measure_change,
    report_parts,
    sampled,
    vary_weights,
)
from ...training.spec import TrainingSpec, provide_steps
from .engine import ENGINE
from .exchange import TensorCollectives
from .model import seed_generators, usable_threads
from .optimizers import parameters_of
from .state import as_array, saved_buffers, set_tensor
from .unsaved import changed_values, fingerprint, objects_with_state, unsaved_buffers

if TYPE_CHECKING:
    from .trainee import TorchTrainee

# Seconds for one attempt, and for all with the building of the module.
_ATTEMPT_SECONDS, _TRIAL_SECONDS = 120.0, 300.0
# Steps after which state that changes is looked for.
_STEPS = 4

# A trial takes up to four times the memory of the weights, beside the rank's.
_MOST_BYTES = 2 << 30
_NOT_TRIED = "the training step was not tried on parts of a batch ({})"

_seeds = itertools.count()


@dataclass(frozen=True)
class Verdict:
    """Result of a trial.

    Attributes:
        notices: warnings.
        error: why the step cannot be trained.
    """

    notices: Sequence[str] = ()
    error: ModelError | None = None


def try_apart(process: SideProcess | None, spec: TrainingSpec, step: Step, ranks: int) -> Verdict:
    """Have a side process of this rank try a step.

    Args:
        process: started with the rank's call, of `train_rank`; ``None`` if it could not be.
        spec: the training, as this rank has it.
        step: a few rows.
        ranks: number of ranks.
    """
    if process is None:  # as in `one_rank_here`
        return Verdict([_NOT_TRIED.format("there is no side process")] if ranks > 1 else ())
    try:
        return process.call(_try_training, spec.sample, step, ranks, seconds=_TRIAL_SECONDS)
    except ModelError as error:
        return Verdict(error=error)
    except (ChildProcessError, RuntimeError) as error:
        return Verdict([_NOT_TRIED.format(on_one_line(error))])


def _try_training(spec: TrainingSpec, sample: Arrays | None, step: Step, ranks: int) -> Verdict:
    """Build the module of a training and try a step; called in the side process."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)  # a process with a pool of threads cannot be forked
    seed_generators(spec.fit.seed)
    # Callbacks may have effects outside, and are not tried.
    spec = replace(spec, sample=sample, config=replace(spec.config, callbacks=()))
    with provide_steps(spec.steps), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the ranks warn
        synchroniser = AllreduceSynchroniser("none", TensorCollectives())
        trainee: Any = ENGINE.trainee(spec, lone_world(), synchroniser)
        size = sum(parameter.nbytes for parameter in trainee.module.parameters())
        if size > _MOST_BYTES:
            return Verdict([_NOT_TRIED.format(f"its module has {size / 2**30:.1f} GiB of weights")])
        hooks = trainee.hooks(steps=spec.steps.per_epoch, resumed=False)
        hooks.train_begin()
        hooks.epoch_begin(0)
        notices = try_trainee(trainee, step) if ranks > 1 and step.batch.rows > 1 else []
        return Verdict(notices + check_state(trainee, step))


def lone_world() -> Any:
    """Return the communicator of a single process, which does not need MPI."""
    return SimpleNamespace(
        Get_rank=lambda: 0,
        Get_size=lambda: 1,
        bcast=lambda value, root=0: value,
        allreduce=lambda value, op=None: value,
        allgather=lambda value: [value],
    )


def try_trainee(trainee: TorchTrainee, step: Step) -> list[str]:
    """Return warnings of results of a step and of metrics that are no means over rows.

    This process must not have gone through a backward pass: it could not be forked then.

    Raises:
        ModelError: something is a sum over rows.
    """
    reason = ""
    # Equal weights may treat all rows alike, so others are tried first.
    for vary in (True, False):
        try:
            with _varied(trainee.module) if vary else contextlib.nullcontext():
                return _compare(trainee, step)
        except ModelError:
            raise
        except Exception as raised:
            reason = on_one_line(raised)
    return [_NOT_TRIED.format(reason)]


@contextlib.contextmanager
def _varied(module: nn.Module) -> Iterator[None]:
    """Let a module have weights by which rows differ, for a while."""
    trained = [p for p in module.parameters() if p.requires_grad and p.is_floating_point()]
    own = [parameter.detach().clone() for parameter in trained]
    for parameter in trained:
        set_tensor(parameter, vary_weights(as_array(parameter)))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(trained, own, strict=True):
                parameter.copy_(value)


def _compare(trainee: TorchTrainee, step: Step) -> list[str]:
    module, functions = trainee.module, trainee.step_functions()
    trainee.modes.train()
    before = _float_buffers(module, functions)
    ends: list[dict[str, bytes]] = []

    def compute(chosen: np.ndarray, fraction: float) -> Values:
        arrays = {name: array[chosen] for name, array in step.batch.arrays.items()}
        part = replace(step, batch=Batch(step.batch.step, len(chosen), arrays))
        attempt = functools.partial(_attempt, trainee, part, next(_seeds))
        values, end = call_in_fork(attempt, _ATTEMPT_SECONDS)
        ends.append(end)
        return values

    tolerance = LOW_PRECISION if trainee.has_low_precision else TOLERANCE
    differences = compare_parts(compute, step.batch.rows, tolerance)
    for name in changed_values(before, ends[0]):
        # A value that follows from shapes alone, as that of a cache, is the same on all ranks;
        # one that the same rows change, as noise, does not follow from them.
        by_rows = any(name in changed_values(ends[0], end) for end in ends[2:])
        if by_rows and name not in changed_values(ends[0], ends[1]):
            raise ModelError(
                f"{name} changes by the rows of a batch, but ranks share and checkpoints hold "
                "persistent buffers of the module only; register it as one (leave out "
                "persistent=False), or keep it as a plain attribute if the training does not "
                "depend on it"
            )
    subjects = {GRADIENT: trainee.trained_by, CHANGE: "what buffer '{name}' changes by"}
    return report_parts(differences, subjects, "take the mean, or let it give one value per row")


def _attempt(trainee: TorchTrainee, step: Step, seed: int) -> tuple[Values, dict[str, bytes]]:
    """Return a step's gradients and changes of buffers, and the buffers that are not saved.

    PyTorch's layers that drop, or take moments of a batch, treat each row by itself.
    """
    module, recorder = trainee.module, Recorder()
    torch.set_num_threads(usable_threads())
    warnings.simplefilter("ignore")  # schedulers miss the steps
    seed_generators(seed)
    for each in module.modules():
        each.training &= not type(each).__module__.startswith("torch.nn.")
    places = saved_buffers(module)
    before = {
        name: as_array(holder[key].clone())
        for name, (holder, key) in places.items()
        if holder[key] is not None
    }
    for optimizer in trainee.optimizers:
        vars(optimizer)["step"] = functools.partial(recorder.step, optimizer)
    values: dict[Key, Any] = dict(trainee.try_step(step, recorder))
    for name, value in before.items():
        holder, key = places[name]
        if holder.get(key) is not None and as_array(holder[key]).shape == value.shape:
            values[CHANGE, name] = measure_change(as_array(holder[key]), value)
    return {**recorder.gradients, **values}, _float_buffers(module, trainee.step_functions())


def check_state(trainee: TorchTrainee, step: Step) -> list[str]:
    """Check that a step changes no object whose state checkpoints do not hold.

    Returns:
        A warning, if that could not be found out.

    Raises:
        ModelError: it changes one that has a ``state_dict``.
    """
    if not trainee.has_own_step:
        return []
    try:
        changed = call_in_fork(lambda: _changed_objects(trainee, step), _ATTEMPT_SECONDS)
    except Exception as error:
        return [f"state beside the module was not looked for ({on_one_line(error)})"]
    if changed:
        kind, optimizes, schedules = changed[0]
        if optimizes:
            raise ModelError(
                f"train_step steps with an optimizer, {kind}, that TorchModel was not given: its "
                "gradients would not be those of all ranks, and no checkpoint holds its state. "
                "Make its weights part of the module, and give TorchModel(optimizer={…}) all "
                "optimizers by name"
            )
        advice = "give TorchModel(state={'name': …}) the object"
        if schedules:
            advice = f"give TorchModel(scheduler=…, schedule='step') the scheduler, or {advice}"
        raise ModelError(
            f"train_step changes the state of an object, {kind}, that no checkpoint holds, so a "
            f"resumed run would begin with its first state; {advice}"
        )
    return []


def _changed_objects(trainee: TorchTrainee, step: Step) -> list[tuple[str, bool, bool]]:
    """Return what some steps change of objects with a ``state_dict`` that checkpoints do not hold.

    Returns:
        Of each, its class, whether it is an optimizer, and whether it is a scheduler.
    """
    torch.set_num_threads(usable_threads())
    warnings.simplefilter("ignore")
    found = objects_with_state([trainee.module, *trainee.saved_objects])
    before = [fingerprint(each) for each in found]
    stepped: set[int] = set()
    register_optimizer_step_pre_hook(lambda optimizer, *_: stepped.add(id(optimizer)))
    whole = Step(0, step.batch, step.batch.rows, equal=True)
    for _ in range(_STEPS):
        trainee.train_step(whole, [False] * len(NOTHING), last=False)
    # An optimizer may step by means of another one.
    stepped -= {id(part) for each in trainee.optimizers for part in vars(each).values()}
    return [
        (type(each).__name__, id(each) in stepped, isinstance(each, LRScheduler))
        for each, digest in zip(found, before, strict=True)
        if id(each) in stepped or fingerprint(each) != digest
    ]


class Recorder:
    """Gradients passed to optimizers in a step, none of which is applied."""

    def __init__(self) -> None:
        self.gradients: dict[Key, np.ndarray] = {}
        self._early: list[Optimizer] = []
        self._times = 0

    def record(self, *optimizers: Optimizer) -> None:
        """Record the gradients of optimizers, before they are to step."""
        for optimizer in optimizers:
            self._times += 1
            self._early.append(optimizer)
            for number, parameter in enumerate(parameters_of(optimizer)):
                if parameter.grad is not None:
                    gradient = as_array(sampled(parameter.grad.detach()))
                    self.gradients[GRADIENT, f"{self._times}.{number}"] = gradient.copy()

    def step(self, optimizer: Optimizer, *_: object, **__: object) -> None:
        """Replace an optimizer's ``step``."""
        if not any(optimizer is each for each in self._early):
            self.record(optimizer)
        self._early = [each for each in self._early if each is not optimizer]


def _float_buffers(module: nn.Module, functions: Sequence[object]) -> dict[str, bytes]:
    """Return fingerprints of the float buffers that ranks do not share, by name and shape."""
    found = {
        f"{name} of shape {tuple(buffer.shape)}": fingerprint(buffer)
        for name, buffer in unsaved_buffers(module, functions).items()
        if buffer.dtype.is_floating_point
    }
    return {name: one for name, one in found.items() if one is not None}
