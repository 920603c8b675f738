"""The model on a rank: how it is built, its inputs and outputs by name, its modes."""

from __future__ import annotations

import contextlib
import inspect
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import ModelError, brief
from ...training.spec import ModelNames, ModelSource, OutputSpec
from .torch_model import TorchModel, refuse_lightning

Path = tuple[str | int, ...]
# The last thing done to an output, as far as modules tell.
_ACTIVATIONS: dict[type, str] = {
    nn.Softmax: "softmax",
    nn.Sigmoid: "sigmoid",
    nn.Linear: "linear",
    nn.LogSoftmax: "log_softmax",
}


def build_model(source: ModelSource) -> tuple[TorchModel, nn.Module]:
    """Build a source's model; return it and its module.

    Raises:
        ModelError: it gives no `TorchModel`, or that has no module.
    """
    model = source.call_function()
    refuse_lightning(model)
    if not isinstance(model, TorchModel):
        raise ModelError(
            "model_fn must return TorchModel(module, loss=…, optimizer=…), but returned "
            f"{brief(model)}"
        )
    module = _make_module(model.module)
    return replace(model, module=module), module


def build_module(source: ModelSource) -> nn.Module:
    """Return the module that a source gives, of a `TorchModel` or bare: to predict, it suffices.

    Raises:
        ModelError: it gives none.
    """
    made = source.call_function()
    return _make_module(made.module if isinstance(made, TorchModel) else made)


def _make_module(source: object) -> nn.Module:
    module = source if isinstance(source, nn.Module) or not callable(source) else source()
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"module must be a torch.nn.Module, but the function given returned {brief(module)}"
        )
    check_module(module)
    return module


def check_module(module: nn.Module) -> None:
    """Check that a module's state is tensors that can be trained and saved.

    Raises:
        ModelError: it is not; the message names what cannot be used.
    """
    kind = type(module).__name__
    if type(module).__module__.startswith("torch._dynamo"):
        raise ModelError(
            "module was compiled by torch.compile, whose graphs cannot be sent or kept; give the "
            "module itself"
        )
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ModelError(
            f"module is a {kind}, but the ranks exchange gradients by Horovod; give the module "
            "that it wraps"
        )
    lazy = [n for n, p in module.named_parameters() if isinstance(p, nn.UninitializedParameter)]
    if lazy:
        raise ModelError(
            f"parameter {lazy[0]!r} of {kind} has no shape yet; call the module once in model_fn, "
            "or give its layers their sizes"
        )
    extra = [name for name in module.state_dict() if name.endswith("_extra_state")]
    if extra:
        raise ModelError(
            f"{kind} keeps extra state ({extra[0]!r}), which checkpoints cannot hold: they are "
            "arrays and JSON; register it as buffers"
        )


def seed_generators(seed: int) -> None:
    """Seed the generators of Python, NumPy and PyTorch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def usable_threads() -> int:
    """Return how many threads this rank's computations may use: those of its cores."""
    threads = int(os.environ.get("OMP_NUM_THREADS") or 0)
    cores = len(os.sched_getaffinity(0))
    return max(1, min(threads, cores) if threads else cores)


def names_of(source: ModelSource) -> ModelNames:
    """Return the names of a model's inputs, the parameters of its ``forward``.

    Raises:
        ModelError: ``source`` gives no model.
    """
    model, module = build_model(source)
    names = input_names(module)
    # A function may be one of the outputs alone.
    compares = isinstance(model.loss, (str, nn.Module, Mapping, Sequence))
    return ModelNames(inputs=(names,) if names else (), needs_labels=compares)


def input_names(module: nn.Module) -> tuple[str, ...]:
    """Return the parameters of ``forward`` that must be given."""
    parameters = forward_signature(module).parameters.values()
    many = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(p.name for p in parameters if p.default is p.empty and p.kind not in many)


def forward_signature(module: nn.Module) -> inspect.Signature:
    """Return the signature of ``forward``, without annotations; any if it does not show."""
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):  # it is not written in Python
        signature = inspect.signature(lambda *args, **kwargs: None)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return inspect.Signature(bare)


def output_leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield every tensor of a module's outputs, with the keys and indices of its path.

    Raises:
        ModelError: there is something else in it.
    """
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from output_leaves(inner, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from output_leaves(inner, (*path, index))
    elif value is not None:
        raise ModelError(
            "a module must return tensors, alone or in tuples, lists and dictionaries, but its "
            f"forward returned {brief(value)}"
        )


def pick(value: Any, path: Path) -> Tensor:
    """Return the tensor at ``path`` of a module's outputs."""
    for key in path:
        value = value[key]
    tensor: Tensor = value
    return tensor


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Return an output as an array; NumPy has no bfloat16."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.float()
    array: np.ndarray = tensor.cpu().numpy()
    return array


def one_number(value: Any) -> Tensor | float | None:
    """Return a number from a Python or NumPy number, or from a tensor of one element.

    A tensor is float64 and without a gradient then. ``None`` for anything else.
    """
    if isinstance(value, Tensor):
        return value.detach().reshape(()).double() if value.numel() == 1 else None
    return float(value) if isinstance(value, (bool, int, float, np.number)) else None


def output_specs(module: nn.Module, outputs: Any, rows: int) -> tuple[OutputSpec, ...]:
    """Describe the ``outputs`` that a module gave for ``rows`` rows.

    Raises:
        ModelError: an output has no value for each row.
    """
    specs = []
    for path, tensor in output_leaves(outputs):
        if not tensor.shape or tensor.shape[0] != rows:
            raise ModelError(
                f"output {_output_name(path)!r} has shape {tuple(tensor.shape)} for {rows} rows; "
                "outputs need a value for each row"
            )
        specs.append(
            OutputSpec(
                _output_name(path),
                tuple(tensor.shape[1:]),
                dtype_name(tensor.dtype),
                path,
                "" if path else _activation(module),
            )
        )
    if not specs:
        raise ModelError("the module's forward returned no tensor")
    return tuple(specs)


def _output_name(path: Path) -> str:
    """Return the name of the output at ``path``."""
    if not path:
        return "output"
    if all(isinstance(key, int) for key in path):
        return "_".join(["output", *map(str, path)])
    return "_".join(map(str, path))


def _activation(module: nn.Module) -> str:
    if isinstance(module, nn.Sequential) and len(module):
        return _activation(module[-1])
    return _ACTIVATIONS.get(type(module), "")


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a tensor's type, NumPy's where that has it."""
    return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module, and all its parts, into evaluation mode."""
    modes = Modes(module)
    modes.evaluate()
    try:
        yield
    finally:
        modes.train()


class Modes:
    """Switch of a module to evaluation mode and back.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # What was in training mode, while the module is evaluated.
        self._trained: list[nn.Module] | None = None

    def evaluate(self) -> None:
        """Bring all parts into evaluation mode."""
        if self._trained is None:
            self._trained = [each for each in self._module.modules() if each.training]
            self._module.eval()

    def train(self) -> None:
        """Bring each part back into the mode it had before."""
        if self._trained is not None:
            for each in self._trained:
                each.training = True
            self._trained = None


@contextlib.contextmanager
def preserve_random() -> Iterator[None]:
    """Leave the random generators as they are."""
    state = random.getstate(), np.random.get_state()
    gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(gpus):
        try:
            yield
        finally:
            random.setstate(state[0])
            np.random.set_state(state[1])
