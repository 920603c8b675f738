"""Buffers, numbers and tensors of a module and its functions that no checkpoint holds."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import itertools
import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...cluster.worker.reporting import notify
from ...storage.arrays import Arrays
from ...training.part_comparison import sampled
from .metrics import is_torchmetrics
from .packing import pack_state
from .state import as_array, saved_buffers
from .torch_callback import TorchCallback

# What PyTorch itself keeps in a module.
_OF_TORCH = frozenset(vars(nn.Module()))
# Top-level packages whose objects hold no user state.
_LIBRARIES = frozenset(sys.stdlib_module_names) | {
    *("torch", "torchvision", "torchmetrics", "lightning", "pytorch_lightning", "numpy", "pandas"),
    *("pyarrow", "pyspark", "py4j", "tensorflow", "keras", "horovod", "mpi4py", "transformers"),
    __name__.partition(".")[0],
}
# Larger containers, more objects, or what lies deeper are not searched.
_MOST_PARTS, _MOST_OBJECTS, _DEPTH = 100, 10_000, 8
# Numbers and the like, of which a fingerprint is the text.
_PLAIN = (bool, int, float, str, np.number)
# Of values that a warning names.
_MOST_SHOWN = 5
# About so many elements of a tensor are compared.
_SAMPLED = 50_000


class UnsavedWatch:
    """Warns of values that checkpoints do not hold, if training has changed them.

    Args:
        module: the module.
        functions: the user's functions that a step calls.
        callbacks: the callbacks; those without a state of their own are searched.
        saved: objects beside the module that checkpoints hold.
    """

    def __init__(
        self,
        module: nn.Module,
        functions: Sequence[object],
        callbacks: Sequence[TorchCallback],
        saved: Sequence[object],
    ) -> None:
        self._module, self._functions = module, functions
        self._callbacks = [one for one in callbacks if not keeps_state(one)]
        self._saved = saved
        self._beside = objects_with_state([module, *saved])
        self._known = self._find()
        self._reported: set[str] = set()

    def warn(self) -> None:
        """Warn of values that have changed, of each once."""
        now = self._find()
        owners = tuple(self._reported)
        changed = [n for n in changed_values(self._known, now) if not n.endswith(owners)]
        self._reported.update(name.partition(" in ")[2] or name for name in changed)
        self._known = {**now, **self._known}
        if changed:
            shown = ", ".join(changed[:_MOST_SHOWN]) + (" …" if changed[_MOST_SHOWN:] else "")
            notify(
                f"training has changed values that are not in checkpoints: {shown}. A resumed run "
                "starts with their first values, and each rank has its own. Make what the training "
                "depends on a persistent buffer of the module, or keep it in an object with "
                "state_dict and load_state_dict, TorchModel(state={…})"
            )

    def _find(self) -> dict[str, bytes]:
        others = {
            f"callback {type(one).__name__}": {
                **vars(type(one)),
                **vars(one),
                "stop_training": None,
            }
            for one in self._callbacks
        }
        searched = [*self._functions, others]
        return _unsaved_values(self._module, searched, self._saved, self._beside)


def keeps_state(callback: TorchCallback) -> bool:
    """Return whether a callback has a ``state_dict`` of its own."""
    return type(callback).state_dict is not TorchCallback.state_dict


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


def _unsaved_values(
    module: nn.Module,
    functions: Iterable[object],
    saved: Iterable[object] = (),
    beside: Iterable[object] = (),
) -> dict[str, bytes]:
    """Return fingerprints of the values that no checkpoint holds, by name.

    They are attributes of the user's modules, variables of functions and of the functions that
    these call, and what is within these: numbers, tensors, containers, generators, objects with a
    ``state_dict``, objects of the user's classes. What a library keeps is its own.

    Args:
        module: the module.
        functions: the user's functions that a step calls.
        saved: objects beside the module that checkpoints hold.
        beside: objects with a ``state_dict``, which are searched wherever they are.
    """
    search = _Search([*with_parts([module, *saved]), *module.parameters()])
    for name, buffer in unsaved_buffers(module, functions).items():
        search.visit(name, buffer)
    for prefix, part in module.named_modules():
        if not is_torchmetrics(part):
            path = f"{prefix}." if prefix else ""
            of_library = _package(type(part).__module__) in _LIBRARIES
            for key, held in _settings_of(part) if of_library else vars(part).items():
                if key not in _OF_TORCH:
                    search.visit(f"attribute {path + key!r}", held)
    for each in functions:
        search.visit(f"state of {type(each).__name__}" if has_state(each) else "", each)
    for number, each in enumerate(beside):
        search.visit(f"state of {type(each).__name__} ({number})", each)
    return search.values


class _Search:
    """Search for values in objects, each searched once.

    Args:
        saved: objects that are passed over.

    Attributes:
        values: fingerprints of what was found, by name.
    """

    def __init__(self, saved: Iterable[object]) -> None:
        self.values: dict[str, bytes] = {}
        # Held, so that no other object gets its number.
        self._seen: dict[int, object] = {id(each): each for each in saved}
        self._most = len(self._seen) + _MOST_OBJECTS

    def visit(self, name: str, value: object, depth: int = 0) -> None:
        """Search a value, which has a name for messages."""
        if id(value) in self._seen:
            return
        if (found := fingerprint(value)) is not None:
            self.values[name] = found
            if has_state(value):
                self._seen[id(value)] = value
        elif depth < _DEPTH and len(self._seen) < self._most:
            self._seen[id(value)] = value
            for inner, part in _parts_of(value):
                self.visit(inner + (f" in {name}" if name else ""), part, depth + 1)


def _settings_of(module: nn.Module) -> list[tuple[str, object]]:
    """Return the plain attributes of a module, such as a momentum or a label smoothing."""
    return [
        (key, held)
        for key, held in vars(module).items()
        if key not in _OF_TORCH and isinstance(held, _PLAIN)
    ]


def _parts_of(value: Any) -> Iterable[tuple[str, object]]:
    """Yield what a value refers to, by name."""
    if isinstance(value, functools.partial):
        yield from _numbered([value.func, *value.args, *value.keywords.values()])
    elif isinstance(value, types.MethodType):
        yield from _numbered([value.__func__, value.__self__])
    elif isinstance(value, types.FunctionType):
        if _package(value.__module__) not in _LIBRARIES:
            yield from _variables_of(value)
    elif isinstance(value, dict):
        yield "length", len(value)
        if len(value) <= _MOST_PARTS:
            yield from ((f"{key!r}", held) for key, held in value.items())
    elif isinstance(value, list | tuple | set | deque):
        yield "length", len(value)
        if len(value) <= _MOST_PARTS and not isinstance(value, set):
            yield from _numbered(value)
    elif isinstance(value, np.random.Generator | np.random.RandomState | random.Random):
        yield "state", hash(repr(_state_of(value)))
    elif isinstance(value, torch.Generator):
        yield "state", value.get_state()
    elif isinstance(value, type):
        if _package(value.__module__) not in _LIBRARIES:
            plain = ((key, held) for key, held in vars(value).items() if isinstance(held, _PLAIN))
            yield from ((f"{key!r} of {value.__name__}", held) for key, held in plain)
    elif not isinstance(value, types.ModuleType | nn.Module | Optimizer):
        of_library = _package(type(value).__module__) in _LIBRARIES
        if not of_library or isinstance(value, types.SimpleNamespace):
            name = type(value).__name__
            yield from ((f"{key!r} of {name}", held) for key, held in _attributes(value).items())
            yield "", type(value)
            call = vars(type(value)).get("__call__")
            if isinstance(call, types.FunctionType):
                yield from _numbered([call])


def _numbered(values: Iterable[object]) -> Iterable[tuple[str, object]]:
    """Yield values that have no names."""
    return ((f"part {number}", value) for number, value in enumerate(values))


def _state_of(generator: Any) -> object:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return getattr(generator, "bit_generator", generator._bit_generator).state


def _attributes(value: object) -> dict[str, object]:
    slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {**held, **getattr(value, "__dict__", {})}


def _variables_of(function: types.FunctionType) -> Iterable[tuple[str, object]]:
    """Yield a function's variables: of its closure, global ones that it names, attributes."""
    space: dict[str, object] = dict(vars(function)) | (function.__kwdefaults__ or {})
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    space.update(zip(reversed(arguments), reversed(function.__defaults__ or ()), strict=False))
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a variable that is assigned later
            space[key] = cell.cell_contents
    names = _names_in(function.__code__)
    space.update({name: function.__globals__[name] for name in names & function.__globals__.keys()})
    return ((f"variable {key!r} of {function.__name__}", held) for key, held in space.items())


def _names_in(code: types.CodeType) -> set[str]:
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def fingerprint(value: Any) -> bytes | None:
    """Return what identifies a value: plain ones, tensors, arrays, an object's ``state_dict``.

    Of a large tensor, elements at equal distances count.

    Returns:
        ``None`` for anything else, as for tensors derived from weights.
    """
    if has_state(value):
        arrays: Arrays = {}
        with contextlib.suppress(Exception):  # of a user's own class
            state = value.metric_state if is_torchmetrics(value) else value.state_dict()
            packed: list[object] = [pack_state(dict(state), "", arrays, "")]
            if isinstance(value, nn.Module):
                packed += map(_settings_of, value.modules())
            return _digest(repr(packed).encode(), *map(_sampled, arrays.values()))
        return None
    with contextlib.suppress(Exception):  # NumPy has no such tensors
        if isinstance(value, Tensor):
            derived = value.grad_fn is not None or value.layout is not torch.strided
            return None if derived else _sampled(value.detach())
        if isinstance(value, np.ndarray) and value.dtype != object:
            return _sampled(value)
        if value is None or isinstance(value, (*_PLAIN, itertools.count)):
            return repr(value).encode()
    return None


def _sampled(values: Tensor | np.ndarray) -> bytes:
    some = sampled(values, _SAMPLED)
    array = as_array(some) if isinstance(some, Tensor) else some
    return _digest(f"{tuple(values.shape)} {array.dtype}".encode(), array.tobytes())


def _digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()


def has_state(value: object) -> bool:
    """Return whether an object has ``state_dict`` and ``load_state_dict``."""
    names = ("state_dict", "load_state_dict")
    try:
        return not isinstance(value, type) and all(hasattr(type(value), name) for name in names)
    except Exception:  # of a user's own class
        return False


def objects_with_state(saved: Iterable[object]) -> list[Any]:
    """Return all objects with a ``state_dict`` in this process but ``saved`` and their parts."""
    known = {id(each) for each in with_parts(saved)}
    found = [each for each in gc.get_objects() if has_state(each) and id(each) not in known]
    modules = [each for each in found if isinstance(each, nn.Module)]
    inner = {id(part) for each in modules for part in _parts_within(each)}
    return [each for each in found if id(each) not in inner]


def with_parts(values: Iterable[object]) -> list[object]:
    """Return objects, and the parts of modules and of what other objects hold."""
    values = list(values)
    return values + [part for each in values for part in _parts_within(each)]


def _parts_within(value: Any) -> Sequence[object]:
    if isinstance(value, nn.Module):
        return list(value.modules())[1:]
    if isinstance(value, Optimizer):
        return []
    parts = list(getattr(value, "__dict__", {}).values())
    parts += [part for held in parts if isinstance(held, (list, tuple)) for part in held]
    return parts + [
        inner for part in parts if isinstance(part, nn.Module) for inner in part.modules()
    ]


def changed_values(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> list[str]:
    """Return the names of values that have other fingerprints."""
    return [name for name, value in before.items() if name in after and after[name] != value]


def _package(module: object) -> str:
    return str(module).partition(".")[0]
