"""A trained PyTorch module made again, to predict."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn

from ...errors import ModelError
from ...storage.arrays import Arrays, load_arrays
from ..likeness import check_like
from ..trained_model import Model, Recipe
from .build import build_module
from .feeding import Feed
from .outputs import leaves, output_specs, pick
from .program import Program, load_program
from .saved import TorchParts
from .weights import give_weights

CPU = torch.device("cpu")
_ROWS = 2


@dataclass(frozen=True)
class Predicting:
    """A module to predict with.

    Attributes:
        module: the module, in evaluation mode.
        feed: how columns are fed to it.
        device: where it is.
        autocast: type that it is computed in, ``""`` for that of its weights.
    """

    module: nn.Module
    feed: Feed
    device: torch.device
    autocast: str = ""

    def __call__(self, values: Sequence[Tensor]) -> Any:
        """Return what the module gives for its inputs."""
        with computing_in(self.autocast, self.device):
            return self.feed.call(self.module, values)

    def of(self, arrays: Mapping[str, np.ndarray]) -> Any:
        """Return what the module gives for columns, which stay as they are."""
        values = [value.clone() for value in self.feed.values(arrays, self.device)]
        with torch.inference_mode():
            return self(values)


def computing_in(autocast: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which a module is computed in a type other than its weights'."""
    if not autocast:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, autocast))


def own_device() -> torch.device:
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
    called = make_predicting(recipe, own_device())
    guard = _InputsGuard()

    def prepare(values: dict[str, np.ndarray]) -> list[Tensor]:
        return called.feed.values(values, called.device)

    def compute(inputs: list[Tensor]) -> list[np.ndarray]:
        given = guard.own(inputs) if called.device.type == "cpu" else inputs
        with torch.inference_mode():
            outputs = called(given)
            found = [to_numpy(pick(outputs, output.path)) for output in recipe.outputs]
        guard.look(called.module, given)
        return found

    return Model(prepare, compute)


class _InputsGuard:
    """Keeps a module that changes its inputs in place from the rows, whose memory they share."""

    def __init__(self) -> None:
        self._copies: bool | None = None
        self._versions: list[int] = []

    def own(self, inputs: list[Tensor]) -> list[Tensor]:
        """Return what the module may have: copies of the first batch, and where it changes them."""
        given = inputs if self._copies is False else [tensor.clone() for tensor in inputs]
        self._versions = [tensor._version for tensor in given]
        return given

    def look(self, module: nn.Module, given: list[Tensor]) -> None:
        """Look whether a call has changed its inputs.

        Raises:
            ModelError: it has changed the rows themselves, which it had not done before.
        """
        if self._versions and self._copies is not True:
            changed = self._versions != [tensor._version for tensor in given]
            if changed and self._copies is False:
                raise ModelError(
                    f"{type(module).__name__} changes its inputs in place for some batches and not "
                    "for others; let its forward work on copies, x = x.clone()"
                )
            self._copies = changed


def make_predicting(recipe: Recipe, device: torch.device) -> Predicting:
    """Return the trained module on a device.

    Raises:
        ModelError: what was built is not the model that was trained.
    """
    parts: TorchParts = recipe.own
    feed = Feed(recipe.inputs.slots, parts.names)
    module = _made(parts, device)
    if parts.weights is not None:
        arrays = load_arrays(parts.weights)
        holder = module.module if isinstance(module, Program) else module
        give_weights(holder, parts.paths, [arrays[name] for name in sorted(arrays)])
    if not isinstance(module, Program):  # which is as it is
        module = module.eval().to(device)
    called = Predicting(module, feed, device, parts.autocast)
    if parts.sample is not None:
        check_sample(called, load_arrays(parts.sample))
    return called


def _made(parts: TorchParts, device: torch.device) -> nn.Module:
    if parts.source is not None:
        return build_module(parts.source)
    if parts.module is not None:
        module: nn.Module = cloudpickle.loads(parts.module)
        return module
    if parts.script is not None:
        return load_script(parts.script)
    assert parts.program is not None
    return Program(load_program(parts.program, "the model's program"), device)


def load_script(data: bytes) -> nn.Module:
    """Return the module in a file of TorchScript, on the CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module: nn.Module = torch.jit.load(  # type: ignore[no-untyped-call]
            io.BytesIO(data), map_location=CPU
        )
    return module.eval()


def made_module(recipe: Recipe) -> nn.Module:
    """Return the module on the CPU, in evaluation mode; see `Engine.model`."""
    module = make_predicting(recipe, CPU).module
    return module.module if isinstance(module, Program) else module


def describe_outputs(recipe: Recipe) -> tuple[list[dict[str, object]], str]:
    """Return what the module gives, or nothing and why; see `Engine.describe_outputs`."""
    called = make_predicting(recipe, own_device())
    blank = {column.name: column.blank().repeat(_ROWS, 0) for column in recipe.columns}
    try:
        specs = output_specs(called.module, called.of(blank), _ROWS)
        return [asdict(output) for output in specs], ""
    except ModelError:
        raise
    except Exception as error:  # the user's own forward may fail in any way
        return [], f"{type(error).__name__}: {error}"


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Return an output as an array; NumPy has no bfloat16."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.float()
    array: np.ndarray = tensor.cpu().numpy()
    return array


def take_sample(called: Predicting, arrays: Arrays) -> Arrays | None:
    """Return inputs and outputs by which the module is known again.

    Args:
        called: the module.
        arrays: some rows.

    Returns:
        ``None`` where they tell nothing, as the module gives something else each time.
    """
    given, again = ([to_numpy(leaf) for _, leaf in leaves(called.of(arrays))] for _ in range(2))
    if not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(given, again, strict=True)):
        return None
    inputs = {f"input/{name}": array for name, array in arrays.items()}
    return {**inputs, **{f"output/{number:05d}": a for number, a in enumerate(given)}}


def check_sample(called: Predicting, sample: Arrays) -> None:
    """Check that the module gives what the trained one gave.

    Raises:
        ModelError: it gives something else.
    """
    inputs = {n.partition("/")[2]: a for n, a in sample.items() if n.startswith("input/")}
    expected = [array for name, array in sorted(sample.items()) if name.startswith("output/")]
    found = [to_numpy(leaf) for _, leaf in leaves(called.of(inputs))]
    check_like(expected, found)
