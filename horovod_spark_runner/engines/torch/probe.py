"""Trial of a module's training step and metrics on some rows; see `part_comparison`."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import sys
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...training.part_comparison import CHANGE, GRADIENT, Values, measure_change, vary_weights
from .metrics import is_torchmetrics
from .model import preserve_random
from .optimizers import parameters_of
from .state import as_array, saved_buffers, set_tensor

# What PyTorch itself keeps in a module.
_OF_TORCH = frozenset(vars(nn.Module()))
# Top-level packages whose objects and functions are left alone: they are no user's notes.
_LIBRARIES = frozenset(sys.stdlib_module_names) | {
    *("torch", "torchvision", "torchmetrics", "lightning", "pytorch_lightning", "numpy", "pandas"),
    *("pyarrow", "pyspark", "py4j", "tensorflow", "keras", "horovod", "mpi4py", "transformers"),
    __name__.partition(".")[0],
}
# Containers of more values are not searched further, and larger arrays are data.
_MOST_VALUES, _MOST_BYTES = 10_000, 64 << 20
_IN_PLACE = (list, dict, set, deque)


@contextlib.contextmanager
def forgetting(*tried: object) -> Iterator[None]:
    """Restore, afterwards, everything that the called functions refer to.

    That is: attributes and buffers of a module and its parts; what a function finds in its closure,
    its globals and its object; and within these lists, sets, dictionaries, arrays, tensors and
    objects of the user's own classes. Other modules, optimizers, metrics of torchmetrics, iterators
    and files are left alone.

    Args:
        tried: modules and functions of the user's own.
    """
    snapshot = _Snapshot()
    for each in tried:
        if isinstance(each, nn.Module):
            for part in each.modules():
                snapshot.take_module(part)
        else:
            snapshot.take(each)
    try:
        yield
    finally:
        snapshot.put_back()


class _Snapshot:
    """Objects reachable from some others, with the functions that restore them."""

    def __init__(self) -> None:
        self._seen: dict[int, object] = {}  # held, so that no other object gets its number
        self._undo: list[Callable[[], object]] = []

    def take_module(self, part: nn.Module) -> None:
        """Record the attributes and buffers of a module, without its parts."""
        if is_torchmetrics(part):
            return
        space = vars(part)
        for holder in (space, part._buffers):
            self._undo.append(functools.partial(_refill, holder, dict(holder)))
        for buffer in part._buffers.values():
            if buffer is not None:
                self._undo.append(functools.partial(_overwrite, buffer, buffer.detach().clone()))
        self.take(*(value for name, value in space.items() if name not in _OF_TORCH))

    def take(self, *roots: object) -> None:
        """Record everything that these objects refer to."""
        pending = list(roots)
        while pending:
            each = pending.pop()
            if id(each) not in self._seen:
                self._seen[id(each)] = each
                pending += self._note(each)

    def _note(self, each: Any) -> Iterable[object]:
        """Record one object; return the objects it refers to."""
        if isinstance(each, _IN_PLACE):
            items = dict(each) if isinstance(each, dict) else list(each)
            self._undo.append(functools.partial(_refill, each, items))
            values = items.values() if isinstance(items, dict) else items
            return values if len(values) <= _MOST_VALUES else ()
        if isinstance(each, tuple):
            return each if len(each) <= _MOST_VALUES else ()
        if isinstance(each, Tensor | np.ndarray):
            if each.nbytes <= _MOST_BYTES:
                copied = each.detach().clone() if isinstance(each, Tensor) else each.copy()
                self._undo.append(functools.partial(_overwrite, each, copied))
            return ()
        if isinstance(each, functools.partial):
            return [each.func, *each.args, *each.keywords.values()]
        if isinstance(each, types.MethodType):
            return [each.__func__, each.__self__]
        if isinstance(each, types.FunctionType):
            return self._note_function(each)
        return self._note_object(each)

    def _note_function(self, function: types.FunctionType) -> Iterable[object]:
        if _package(function.__module__) in _LIBRARIES:
            return ()
        referred: list[object] = [vars(function)]
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # a variable that is assigned later
                referred.append(cell.cell_contents)
                self._undo.append(functools.partial(setattr, cell, "cell_contents", referred[-1]))
        space = function.__globals__
        used = {name: space[name] for name in _names_in(function.__code__) if name in space}
        self._undo.append(functools.partial(space.update, used))
        return [*referred, *used.values()]

    def _note_object(self, each: object) -> Iterable[object]:
        left_alone = (type, types.ModuleType, nn.Module, Optimizer)
        of_library = _package(type(each).__module__) in _LIBRARIES
        if isinstance(each, left_alone) or (
            of_library and not isinstance(each, types.SimpleNamespace)
        ):
            return ()
        space = getattr(each, "__dict__", None)
        called = [type(each).__call__] if callable(each) else []
        return called if not isinstance(space, dict) else [*called, space]

    def put_back(self) -> None:
        """Restore everything, even after failures; then raise the first failure."""
        failed: list[Exception] = []
        for undo in self._undo:
            try:
                undo()
            except Exception as error:
                failed.append(error)
        if failed:
            raise failed[0]


def _package(module: object) -> str:
    return str(module).partition(".")[0]


def _names_in(code: types.CodeType) -> set[str]:
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def _refill(holder: Any, items: Any) -> None:
    """Restore a container's values, if it has others."""
    if isinstance(holder, dict):
        if list(map(id, holder)) == list(map(id, items)) and all(
            one is other for one, other in zip(holder.values(), items.values(), strict=True)
        ):
            return
    elif list(map(id, holder)) == list(map(id, items)):
        return
    # A class of the user's own may allow no changes.
    base: Any = next(c for c in type(holder).__mro__ if c.__module__ in ("builtins", "collections"))
    base.clear(holder)
    fill = base.extend if isinstance(holder, (list, deque)) else base.update
    fill(holder, items)


def _overwrite(value: Any, saved: Any) -> None:
    if isinstance(value, np.ndarray):
        value[...] = saved
    elif not torch.equal(value, saved):
        with torch.no_grad():
            value.copy_(saved)


def unsaved_buffers(module: nn.Module, functions: Iterable[object]) -> dict[str, Tensor]:
    """Return the buffers that no checkpoint holds, those of losses too, by what to call them."""
    saved = {id(holder[key]) for holder, key in saved_buffers(module).values()}
    holders = [("", module)]
    holders += [(f" of {type(o).__name__}", o) for o in functions if isinstance(o, nn.Module)]
    return {
        f"buffer {name!r}{owner}": buffer
        for owner, each in holders
        for name, buffer in each.named_buffers()
        if id(buffer) not in saved
    }


def unsaved_values(module: nn.Module, functions: Iterable[object]) -> dict[str, np.ndarray]:
    """Return copies of the numbers and small tensors that no checkpoint holds, by name.

    They are the attributes of the user's modules and the variables of functions. What a library
    keeps is its own, and what any other object keeps is not searched for.
    """
    values: dict[str, Any] = dict(unsaved_buffers(module, functions))
    for prefix, part in module.named_modules():
        if not is_torchmetrics(part) and _package(type(part).__module__) not in _LIBRARIES:
            space = {key: value for key, value in vars(part).items() if key not in _OF_TORCH}
            path = f"{prefix}." if prefix else ""
            values.update((f"attribute {path + key!r}", held) for key, held in space.items())
    for each in functions:
        values.update(_variables_of(each))
    return {name: array for name, held in values.items() if (array := _copied(held)) is not None}


def _variables_of(function: Any) -> dict[str, object]:
    """Return the variables in a function's closure, or the attributes of its object."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = function.__self__ if isinstance(function, types.MethodType) else function
    if owner is not function and isinstance(owner, nn.Module):  # the one that is trained
        return {}
    space = {k: v for k, v in getattr(owner, "__dict__", {}).items() if k not in _OF_TORCH}
    if isinstance(owner, types.FunctionType):
        for key, cell in zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a variable that is assigned later
                space[key] = cell.cell_contents
    name = getattr(function, "__name__", type(function).__name__)
    return {f"variable {key!r} of {name}": held for key, held in space.items()}


def _copied(value: object) -> np.ndarray | None:
    """Return a copy of a number, or of a tensor that is neither data nor derived from weights."""
    if isinstance(value, Tensor):
        small = value.layout is torch.strided and value.numel() <= _MOST_VALUES
        if small and not value.requires_grad:
            with contextlib.suppress(Exception):  # NumPy has no such tensors
                return np.array(as_array(value))
    elif isinstance(value, (bool, int, float, np.number)):
        return np.array(value)
    return None


def changed_values(before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]) -> list[str]:
    """Return the names of values that have others of the same shape."""
    return [
        name
        for name, value in before.items()
        if name in after
        and after[name].shape == value.shape
        and after[name].tobytes() != value.tobytes()
    ]


_seeds = itertools.count()


@contextlib.contextmanager
def _preserve_state(
    module: nn.Module, optimizers: Sequence[Optimizer], functions: Sequence[object], *, vary: bool
) -> Iterator[None]:
    """Restore the state of a module, its optimizers and functions afterwards.

    Meanwhile PyTorch's layers that drop, or take moments of a batch, treat each row by itself.

    Args:
        module: the module.
        optimizers: its optimizers, which do not step meanwhile.
        functions: the user's own that a step calls.
        vary: whether the module has other weights meanwhile, by which rows differ.
    """
    weights = [(p, p.detach().clone(), p.grad) for p in module.parameters()]
    modes = [(each, each.training) for each in module.modules()]
    held = [(vars(optimizer), dict(vars(optimizer))) for optimizer in optimizers]
    groups = [(group, dict(group)) for optimizer in optimizers for group in optimizer.param_groups]
    seed = next(_seeds)  # what is random is to differ
    with preserve_random(), forgetting(module, *functions):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        try:
            for each, _ in modes:
                # A GPU goes backwards through recurrent layers in training mode only.
                from_torch = type(each).__module__.startswith("torch.nn.")
                each.training &= not from_torch or isinstance(each, nn.RNNBase)
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
    """Gradients passed to optimizers in a step, none of which is applied."""

    def __init__(self) -> None:
        self.gradients: dict[tuple[str, str], np.ndarray] = {}
        self._early: list[Optimizer] = []
        self._times = 0

    def record(self, *optimizers: Optimizer) -> None:
        """Record the gradients of optimizers, before they are to step."""
        for optimizer in optimizers:
            self._times += 1
            self._early.append(optimizer)
            for number, parameter in enumerate(parameters_of(optimizer)):
                if parameter.grad is not None:
                    gradient = parameter.grad.detach().double().cpu().numpy()
                    self.gradients[GRADIENT, f"{self._times}.{number}"] = gradient

    def step(self, optimizer: Optimizer, *_: object, **__: object) -> None:
        """Replace an optimizer's ``step``."""
        if not any(optimizer is each for each in self._early):
            self.record(optimizer)
        self._early = [each for each in self._early if each is not optimizer]


def values_of_step(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    functions: Sequence[object],
    compute: Callable[[Recorder], Values],
    *,
    vary: bool,
) -> Values:
    """Return a step's gradients, and the changes of buffers.

    Args:
        module: the module, whose state is what it was afterwards.
        optimizers: its optimizers.
        functions: the user's own that a step calls.
        compute: a step, which records what optimizers do not step with; it may return more values.
        vary: see `_preserve_state`.
    """
    recorder = Recorder()
    preserved = _preserve_state(module, optimizers, functions, vary=vary)
    with preserved, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # schedulers miss the steps
        places = saved_buffers(module)
        before = {
            name: as_array(holder[key].clone())
            for name, (holder, key) in places.items()
            if holder[key] is not None
        }
        for optimizer in optimizers:
            vars(optimizer)["step"] = functools.partial(recorder.step, optimizer)
        values = dict(compute(recorder))
        for name, value in before.items():
            holder, key = places[name]
            if holder.get(key) is not None and as_array(holder[key]).shape == value.shape:
                values[CHANGE, name] = measure_change(as_array(holder[key]), value)
    return {**recorder.gradients, **values}
