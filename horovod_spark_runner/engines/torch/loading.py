"""A trained PyTorch module made again, and given weights put into one."""

from __future__ import annotations

import io
import os
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn

from ...checkpoint.attachments import contents_of
from ...errors import ModelError, on_one_line
from ...storage.arrays import ArraysFile
from ...storage.contents import open_archive
from ...training.named_weights import (
    NamedWeight,
    describe_difference,
    take_over,
    weights_of_run,
)
from ...training.sample_rows import check_close, repeat_rows
from ...training.spec import OutputSpec, WarmStart
from ...training.trained_model import Model, Recipe
from ...training.warm_start import ARRAYS
from .binding import InputBinding
from .engine import TorchParts
from .model import build_module, output_leaves, output_specs, pick, preserve_random, to_numpy
from .program import load_program
from .state import as_array, set_tensor, weights_of

CPU = torch.device("cpu")
# Rows that a module is described by.
ROWS = 3
# What reads or writes files in the source that a file of TorchScript holds.
_FILE_OPERATORS = re.compile(rb"\b(?:save|from_file|load_tensor)\b")
# Answers of `unsteady`.
BY_CHANCE = "gives other outputs whenever it is called with the same rows"
_BY_OTHERS = "gives other outputs for a row where the rows beside it are others"
# What a state_dict is called in a dictionary.
_KEYS = ("state_dict", "model_state_dict")
# What DataParallel, torch.compile and many a LightningModule put before the names of weights.
_PREFIXES = ("module.", "_orig_mod.", "model.")


@dataclass(frozen=True)
class Predictor:
    """A module to predict with.

    Attributes:
        module: the module, in evaluation mode.
        feed: how columns are fed to it.
        device: where it is.
    """

    module: nn.Module
    feed: InputBinding
    device: torch.device

    def __call__(self, values: Sequence[Tensor]) -> Any:
        """Return the module's outputs for its inputs."""
        return self.feed.call(self.module, values)

    def of(self, arrays: Mapping[str, np.ndarray]) -> Any:
        """Return the module's outputs for columns, which stay unchanged."""
        values = [value.clone() for value in self.feed.values(arrays, self.device)]
        with torch.inference_mode():
            return self(values)

    def outputs(
        self, arrays: Mapping[str, np.ndarray], count: int | None = None
    ) -> list[np.ndarray]:
        """Return `of` as arrays, for so many rows, by default at least two."""
        rows = repeat_rows(arrays, count or max(2, len(next(iter(arrays.values())))))
        return [to_numpy(tensor) for _, tensor in output_leaves(self.of(rows))]

    def describe(
        self, arrays: Mapping[str, np.ndarray], count: int = ROWS
    ) -> tuple[OutputSpec, ...]:
        """Return the module's outputs, for so many rows."""
        return output_specs(self.module, self.of(repeat_rows(arrays, count)), count)


def task_device() -> torch.device:
    """Return the GPU of this task or rank, or the CPU, whose cores are then the task's."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal():  # also where PyTorch was imported before that was set
        torch.set_num_threads(int(threads))
    return torch.device("cuda", 0) if torch.cuda.is_available() else CPU


def device_of(module: nn.Module) -> torch.device:
    """Return where a module's weights are."""
    return next((tensor.device for tensor in module.state_dict().values()), CPU)


def load_model(recipe: Recipe) -> Model:
    """Return the function from feature columns to outputs; see `Engine.load`."""
    called = make_predictor(recipe, task_device())
    outputs = recipe.outputs  # what stays does not hold the recipe, which has the model's bytes

    def prepare(values: dict[str, np.ndarray]) -> list[Tensor]:
        return called.feed.values(values, called.device)

    def compute(inputs: list[Tensor]) -> list[np.ndarray]:
        # On a CPU inputs share the rows' memory, and a module may change them in place.
        passed = [one.clone() for one in inputs] if called.device.type == "cpu" else inputs
        with torch.inference_mode():
            results = called(passed)
            return [to_numpy(pick(results, output.path)) for output in outputs]

    return Model(prepare, compute)


def made_model(recipe: Recipe) -> nn.Module:
    """Return the module on the CPU, in evaluation mode; see `Engine.model`."""
    return make_predictor(recipe, CPU).module


def describe_outputs(recipe: Recipe) -> tuple[list[dict[str, object]], str]:
    """Return the module's outputs, or none and the reason; see `Engine.describe_outputs`."""
    called = make_predictor(recipe, task_device())
    try:
        specs = called.describe(recipe.sample_rows().inputs)
        return [asdict(output) for output in specs], ""
    except ModelError:
        raise
    except Exception as error:  # the user's own forward may fail in any way
        return [], f"{type(error).__name__}: {error}"


def make_predictor(recipe: Recipe, device: torch.device) -> Predictor:
    """Return the trained module on a device.

    Raises:
        ModelError: what was built is not the model that was trained.
    """
    parts: TorchParts = recipe.parts
    feed = InputBinding(recipe.inputs.slots, parts.names)
    module = _make_module(parts, device)
    if parts.weights is not None:
        _give_weights(module, parts.paths, ArraysFile(parts.weights))
    called = Predictor(module, feed, device)
    if parts.source is not None:
        recipe.sample_rows().check(called.outputs)
    return called


def _make_module(parts: TorchParts, device: torch.device) -> nn.Module:
    module: nn.Module
    if parts.source is not None:
        module = build_module(parts.source)
    elif parts.module is not None:
        module = cloudpickle.loads(parts.module)
    elif parts.script is not None:
        module = load_script(parts.script)
    else:
        assert parts.program is not None
        return load_program(parts.program, "the model's program", device)
    return module.eval().to(device)


def load_script(data: bytes) -> nn.Module:
    """Return the module in a file of TorchScript, on the CPU.

    Raises:
        ModelError: it reads or writes files.
        InvalidInputError: it is none, or is damaged.
    """
    # Readers of archives differ in which entries they find: what was searched is loaded.
    searched = io.BytesIO()
    opened = open_archive(io.BytesIO(data), "a file of TorchScript")
    with opened as archive, zipfile.ZipFile(searched, "w") as copy:
        # PyTorch looks names up in any case, and of two equal ones takes either.
        names = [name.lower() for name in archive.namelist()]
        if len(set(names)) < len(names):
            raise ModelError("the file of TorchScript is damaged: an entry is there twice")
        for name in archive.namelist():
            content = archive.read(name)
            copy.writestr(name, content)
            if not name.lower().endswith(".py"):
                continue
            if operator := _FILE_OPERATORS.search(content):
                raise ModelError(
                    f"the TorchScript calls {operator[0].decode()!r}, and with that may read or "
                    "write files, which a model that predicts has no need of"
                )
    searched.seek(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module: nn.Module = torch.jit.load(  # type: ignore[no-untyped-call]
            searched, map_location=CPU
        )
    return module.eval()


def _give_weights(module: nn.Module, names: Sequence[str], arrays: ArraysFile) -> None:
    """Load the trained weights into a module.

    Args:
        module: the module.
        names: what the trained one's ``state_dict()`` calls them.
        arrays: the weights, as `as_array` returns them.

    Raises:
        ModelError: they are not those of such a module.
    """
    ours = _weights_in(module, typed=True)
    values = [arrays.read(key) for key in sorted(arrays.names)]
    theirs = [
        NamedWeight(name, value.shape, partial(np.asarray, value), str(value.dtype))
        for name, value in zip(names, values, strict=True)
    ]
    if difference := describe_difference(ours, theirs, by_order=False):
        raise ModelError(
            f"model_fn builds another model than was trained, {type(module).__name__}: {difference}"
        )
    built = weights_of(module)
    for name, value in zip(names, values, strict=True):
        set_tensor(built[name], value)


def _weights_in(module: nn.Module, *, typed: bool = False) -> list[NamedWeight]:
    """Return a module's weights, also by their types if ``typed``."""
    return [
        NamedWeight(
            name,
            tuple(weight.shape),
            partial(as_array, weight),
            str(as_array(weight).dtype) if typed else "",
            partial(set_tensor, weight),
        )
        for name, weight in weights_of(module).items()
    ]


def unsteady(called: Predictor, arrays: Mapping[str, np.ndarray], calls: int = 2) -> str:
    """Find a dependence of a module's outputs on anything besides their own row.

    A program that was captured in training mode drops and normalises as it did there, whatever mode
    it is put into; a module may look at the rows of a batch together in evaluation mode, too. Spark
    cuts rows into batches as it likes.

    Args:
        called: the module; generators of random numbers stay as they are.
        arrays: some rows, which it can be called with.
        calls: how often it is called with them: few numbers may all be dropped twice.

    Returns:
        `BY_CHANCE`, `_BY_OTHERS`, or ``""``; also where it cannot be called with other such rows.
    """
    beside = {name: array[[0] * len(array)] for name, array in arrays.items()}
    with preserve_random():
        once = called.outputs(arrays)
        if not all(_same(once, called.outputs(arrays)) for _ in range(calls - 1)):
            return BY_CHANCE
        try:
            other = called.outputs(beside)
        except Exception:  # the user's own forward may fail in any way
            return ""
    return "" if _same([one[:1] for one in once], [one[:1] for one in other]) else _BY_OTHERS


def _same(some: list[np.ndarray], others: list[np.ndarray]) -> bool:
    try:
        for one, other in zip(some, others, strict=True):
            check_close(one, other)
    except AssertionError:
        return False
    return True


def load_initial_weights(module: nn.Module, start: WarmStart) -> None:
    """Load the weights of ``start`` into ``module``; report weights that were left out.

    Raises:
        ModelError: they do not fit; the first difference is shown. With ``skip_mismatch``: none
            of them does.
    """
    ours = _weights_in(module)
    theirs = weights_of_run(start) if start.kind == ARRAYS else _of_file(start)
    take_over(ours, theirs, start, by_order=False, advice=_without_prefix(ours, theirs))


def _of_file(start: WarmStart) -> list[NamedWeight]:
    (carried,) = start.files.values()
    data = contents_of(carried)
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
    return [
        NamedWeight(name, tuple(value.shape), partial(as_array, value))
        for name, value in weights.items()
    ]


def _without_prefix(ours: Sequence[NamedWeight], theirs: Sequence[NamedWeight]) -> str:
    """Return advice on names that have a prefix."""
    there = {weight.name for weight in theirs}
    for prefix in _PREFIXES:
        if any(prefix + weight.name in there for weight in ours):
            return (
                f". Without the prefix {prefix!r} their names are the module's: write them with "
                f"torch.save({{name.removeprefix({prefix!r}): value for name, value in "
                "weights.items()}, …)"
            )
    return ""
