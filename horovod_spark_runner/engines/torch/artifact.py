"""A trained PyTorch module in its directory, for inference and for other programs."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...checkpoint.run_directory import RunDirectory
from ...config.importable import import_name
from ...data.manifest import Column
from ...errors import CheckpointError, ModelError, brief, on_one_line
from ...frameworks import TORCH
from ...serialize import dumps
from ...storage.arrays import Arrays, dump_arrays
from ...storage.filesystem import Location
from ...training.sample_rows import SAMPLE_FILE, SampleRows, check_close, few_rows, repeat_rows
from ...training.spec import FEATURES, Binding, OutputSpec
from ...training.trained_model import (
    WEIGHTS_FILE,
    Layer,
    ModelInputs,
    ModelSummary,
    ModelWriter,
    Signature,
)
from .binding import InputBinding, match_inputs
from .engine import (
    FILES,
    PROGRAM,
    PROGRAM_FILE,
    SCRIPT_FILE,
    ModuleWithExample,
    SavedModel,
    TorchFacts,
)
from .loading import BY_CHANCE, CPU, ROWS, Predictor, device_of, load_script, unsteady
from .model import check_module, evaluating, input_names, output_leaves, to_numpy
from .program import (
    describe_inputs,
    dump_program,
    load_program,
    make_program,
    read_program,
    silent,
)
from .state import as_array, weights_of

# Rows that a program is tried with: other numbers of them than it is made with.
_OTHERS = (1, 5)
logger = logging.getLogger(__name__)


def save_model(
    directory: RunDirectory, module: nn.Module, inputs: ModelInputs, feed: InputBinding
) -> str:
    """Write a trained module: its weights, its signature, and a program of it.

    A module that torch.export cannot hold is kept as weights only; they suffice with the function
    that built it. One that cannot be called is kept likewise, without outputs.

    Args:
        directory: the run directory.
        module: the module; its mode and its gradients stay as they are.
        inputs: what it takes.
        feed: how columns are fed to it.

    Returns:
        What is to be known of its predictions, ``""`` if they follow from each row alone.

    Raises:
        CheckpointError: it cannot be written.
    """
    try:
        directory.saved_model.delete_folder()  # an earlier one, of another model
        with evaluating(module):
            return _save(directory, module, inputs, feed)
    except OSError as error:
        raise CheckpointError(
            f"the training is done, but its model could not be written to {directory.model}: "
            f"{error}. Once the storage takes files again, the same call resumes from the newest "
            "checkpoint, and writes it"
        ) from error


def outputs_of(
    module: nn.Module, inputs: ModelInputs, feed: InputBinding
) -> tuple[OutputSpec, ...] | None:
    """Return a module's outputs, if it can be called; see `save_model`."""
    with evaluating(module):
        return _outputs(Predictor(module, feed, device_of(module)), inputs)[0]


def _save(
    directory: RunDirectory, module: nn.Module, inputs: ModelInputs, feed: InputBinding
) -> str:
    device = device_of(module)
    called = Predictor(module, feed, device)
    files = ModelWriter(directory)
    weights = weights_of(module)
    arrays = {f"{number:05d}": as_array(one) for number, one in enumerate(weights.values())}
    files.write(WEIGHTS_FILE, dump_arrays(arrays))
    del arrays  # may be of gigabytes
    with _output_shapes(module) as shapes:
        outputs, rows, problem = _outputs(called, inputs)
    if outputs is None:
        logger.warning("the model is saved, but it cannot predict: %s", problem)
    program, why = None, ""
    if outputs is not None:
        why = unsteady(called, rows)
        if sample := inputs.saved_rows(called.outputs, rows):
            files.write(SAMPLE_FILE, sample.dump())
        program, problem = _program(called, rows)
    if program is not None:
        files.write(PROGRAM_FILE, program)
    facts = TorchFacts(
        torch=torch.__version__,
        module=import_name(type(module)) or "",
        names=feed.names,
        program=program is not None,
    )
    signature = Signature(
        inputs=inputs.inputs,
        columns=inputs.columns,
        outputs=outputs,
        engine=TORCH,
        weights=tuple(weights),
        transforms=inputs.transforms,
        problem=problem,
        own=asdict(facts),
        targets=inputs.targets,
        summary=_summarize(module, shapes),
    )
    files.finish(signature, FILES)
    return why and (
        f"{type(module).__name__} {why}, in evaluation mode as well: what it predicts depends on "
        + ("chance" if why == BY_CHANCE else "which rows Spark puts into a batch together")
    )


@contextlib.contextmanager
def _output_shapes(module: nn.Module) -> Iterator[dict[nn.Module, str]]:
    """Yield the shapes of outputs by module, each as of its last call within the context."""
    shapes: dict[nn.Module, str] = {}

    def note(part: nn.Module, _: object, output: object) -> None:
        # A part may return anything, also tensors without sizes (nested ones): never a failure.
        with contextlib.suppress(Exception):
            sizes = [list(tensor.shape) for _, tensor in output_leaves(output)]
            # `Predictor.describe` makes the last call, with so many rows.
            shown = [[None, *size[1:]] if size[:1] == [ROWS] else size for size in sizes]
            shapes[part] = ", ".join(f"({', '.join(map(str, size))})" for size in shown)

    handles = [part.register_forward_hook(note) for part in module.modules()]
    try:
        yield shapes
    finally:
        for handle in handles:
            handle.remove()


def _summarize(module: nn.Module, shapes: Mapping[nn.Module, str]) -> ModelSummary:
    """Return the modules that have parameters, or no parts and outputs of known shape."""
    layers = []
    for name, part in module.named_modules():
        count = sum(one.numel() for one in part.parameters(recurse=False))
        if count or (part in shapes and not any(True for _ in part.children())):
            layers.append(Layer(name, type(part).__name__, shapes.get(part, ""), count))
    parameters = list(module.parameters())
    trainable = sum(one.numel() for one in parameters if one.requires_grad)
    return ModelSummary.of(layers, sum(one.numel() for one in parameters), trainable)


def _outputs(
    called: Predictor, inputs: ModelInputs
) -> tuple[tuple[OutputSpec, ...] | None, Arrays, str]:
    """Return the module's outputs and the rows it was tried with, or the reason why it has none."""
    try:
        rows = inputs.choose_rows(called.outputs)
        return called.describe(rows), rows, ""
    except Exception as error:  # the user's own forward may fail in any way
        return None, {}, _first_line(error)


def _program(called: Predictor, rows: Arrays) -> tuple[bytes | None, str]:
    """Return the module as a program that gives the same, or why there is none."""
    on_cpu = called.feed.values(repeat_rows(rows, ROWS), CPU)
    try:
        with silent():
            data = dump_program(make_program(called.module, called.feed, on_cpu))
        again = load_program(data, PROGRAM_FILE, called.device)
        made = Predictor(again, called.feed, called.device)
        for count in _OTHERS:
            _check_same(called, made, repeat_rows(rows, count))
    except Exception as error:  # whatever torch.export or the module raises
        return None, f"torch.export cannot hold it: {_first_line(error)}"
    return data, ""


def _check_same(called: Predictor, other: Predictor, arrays: Mapping[str, np.ndarray]) -> None:
    """Check that two modules give the same for some rows.

    Raises:
        ModelError: they give outputs in other places.
        AssertionError: they give other numbers.
    """
    ours, theirs = (dict(output_leaves(each.of(arrays))) for each in (called, other))
    if list(ours) != list(theirs):
        raise ModelError("its outputs are in other places")
    for path, value in ours.items():
        check_close(to_numpy(value), to_numpy(theirs[path]))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {on_one_line(error, 300)}"


# Types that Spark has as well.
_PLAIN = ("int8", "int16", "int32", "int64", "float32", "float64")
# Rows and calls that show whether a program drops some of what it computes.
_MANY, _CALLS = 8, 6


def adopt_model(
    directory: RunDirectory, model: Any, inputs: Binding | None, kind: str
) -> SavedModel:
    """Write an externally trained model to ``directory``; see `Engine.adopt`.

    Args:
        directory: a directory without a model.
        model: a `ModuleWithExample`, or the path or URL of a program.
        inputs: the columns of its inputs; ``None`` for the names by convention.
        kind: `PROGRAM`, `SCRIPT`, or ``""`` for a module.

    Raises:
        ModelError: it cannot be predicted with.
    """
    if not kind:
        return _adopt_module(directory, model, inputs)
    (_adopt_program if kind == PROGRAM else _adopt_script)(directory, model, inputs)
    return SavedModel()


def _adopt_module(
    directory: RunDirectory, source: ModuleWithExample, inputs: Binding | None
) -> SavedModel:
    """Write a module to ``directory``.

    Raises:
        ModelError: it is no module, is not called as ``example`` says, or cannot be sent to
            Spark's workers.
    """
    module = source.module
    if not isinstance(module, nn.Module):
        raise ModelError(f"from_module takes a torch.nn.Module, got {brief(module)}")
    if isinstance(module, torch.jit.ScriptModule):
        raise ModelError(
            "from_module takes a module of Python's, and this is TorchScript; save it, "
            "torch.jit.save(module, path), and give the file to from_torchscript(path)"
        )
    check_module(module)
    feed, takes = _fed(module, source.example, inputs)
    device = device_of(module)
    _try(Predictor(module.eval(), feed, device), takes)
    try:
        # Workers need not have the GPU that it may be on.
        pickled = dumps(module if device.type == "cpu" else copy.deepcopy(module).cpu())
    except Exception as error:  # whatever keeps its parts from being pickled
        raise ModelError(
            f"{type(module).__name__} cannot be sent to Spark's workers: {error}"
        ) from error
    if why := save_model(directory, module, takes, feed):
        logger.warning("%s", why)
    return SavedModel(module=pickled)


def _adopt_script(
    directory: RunDirectory, source: ModuleWithExample, inputs: Binding | None
) -> None:
    """Write a file of TorchScript to ``directory``.

    Raises:
        ModelError: there is none, or it is not called as ``example`` says.
    """
    place = Location(source.module)
    data = _contents(place)
    try:
        module = load_script(data)
    except Exception as error:  # PyTorch's own has no public base
        reason = on_one_line(error, 300)
        raise ModelError(f"{place} cannot be read as TorchScript: {reason}") from error
    feed, takes = _fed(module, source.example, inputs)
    _write_captured(
        directory,
        (SCRIPT_FILE, data),
        Predictor(module, feed, CPU),
        takes,
        "torch.jit.script or torch.jit.trace",
    )


def _adopt_program(
    directory: RunDirectory, path: str | os.PathLike[str], inputs: Binding | None
) -> None:
    """Write a program of torch.export, which is trusted, to ``directory``.

    Raises:
        ModelError: the file is missing or holds no such program, or columns do not fit its inputs.
    """
    place = Location(path)
    data = _contents(place)
    by_name, fixed = describe_inputs(read_program(data, str(place)))
    binding, names = _bound(inputs, list(by_name), "the program")
    columns = _columns(binding, names, [by_name[name] for name in names])
    program = load_program(data, str(place))
    called = Predictor(program, InputBinding(binding.slots, tuple(names)), CPU)
    _write_captured(
        directory,
        (PROGRAM_FILE, data),
        called,
        ModelInputs(binding, columns, ()),
        "torch.export.export",
        fixed,
    )


def _write_captured(
    directory: RunDirectory,
    file: tuple[str, bytes],
    called: Predictor,
    takes: ModelInputs,
    captured_by: str,
    fixed: int | None = None,
) -> None:
    """Write a model whose file holds all of it.

    Raises:
        ModelError: a prediction for a row depends on more than that row, as of what was captured
            in training mode.
    """
    outputs, rows = _try(called, takes, fixed)
    if why := unsteady(called, repeat_rows(rows, fixed or _MANY), _CALLS):
        raise ModelError(
            f"the program {why}, as a module does in training mode (dropout, batch normalisation "
            "by the batch's own moments). What it predicts would depend on chance, or on how Spark "
            f"cuts rows into batches: call module.eval() before {captured_by}, and write the file "
            "anew"
        )
    writer = ModelWriter(directory)
    writer.write(*file)
    writer.write(SAMPLE_FILE, SampleRows(rows).dump())
    program = file[0] == PROGRAM_FILE
    facts = TorchFacts(
        torch=torch.__version__, names=called.feed.names, program=program, script=not program
    )
    signature = Signature(
        takes.inputs,
        takes.columns,
        outputs,
        engine=TORCH,
        batch_size=fixed,
        own=asdict(facts),
    )
    writer.finish(signature)


def _contents(place: Location) -> bytes:
    if not place.exists() or place.is_folder:
        raise ModelError(f"model file {place} does not exist")
    return place.read_bytes()


def _fed(
    module: nn.Module, example: Any, inputs: Binding | None
) -> tuple[InputBinding, ModelInputs]:
    """Return the feed of a module that is called like ``example``, and its inputs."""
    by_name = isinstance(example, Mapping)
    values = list(example.values()) if isinstance(example, Mapping) else example
    values = list(values) if by_name or isinstance(values, tuple) else [values]
    tensors = [v if isinstance(v, Tensor) else torch.as_tensor(np.asarray(v)) for v in values]
    kinds = [_kind(tensor) for tensor in tensors]
    if by_name:
        names = list(example)
    elif isinstance(module, torch.jit.ScriptModule):
        names = [f"input{number}" for number in range(len(kinds))]
    else:
        names = [*input_names(module)][: len(kinds)]
        names += [f"input{number}" for number in range(len(names), len(kinds))]
    if not by_name and inputs is not None and inputs.names is None:
        if len(inputs.slots) != len(kinds):
            raise ModelError(
                f"feature_cols gives {inputs.describe()}, but the example has {len(kinds)} inputs"
            )
        binding, order = inputs, names
    else:
        binding, order = _bound(inputs, names, "the example")
    columns = _columns(binding, order, [kinds[names.index(name)] for name in order])
    sample = _rows_of(binding, columns, [tensors[names.index(name)] for name in order])
    takes = ModelInputs(binding, columns, (), sample=sample)
    if isinstance(module, torch.jit.ScriptModule):
        return InputBinding(binding.slots, tuple(order) if by_name else None), takes
    columns_by_name = {column.name: column for column in columns}
    return match_inputs(module, binding, columns_by_name), takes


def _rows_of(
    binding: Binding, columns: Sequence[Column], tensors: Sequence[Tensor]
) -> Arrays | None:
    """Return the rows of an example by column; ``None`` if there are none."""
    arrays: dict[str, np.ndarray] = {}
    for slot, tensor in zip(binding.slots, tensors, strict=True):
        values = tensor.detach().cpu().numpy()
        for number, name in enumerate(slot):
            arrays.setdefault(name, values if len(slot) == 1 else values[:, number])
    counts = {len(array) for array in arrays.values()}
    if len(counts) > 1 or counts == {0}:
        return None
    return few_rows({column.name: arrays[column.name] for column in columns})


def _kind(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and type of one row of an example."""
    if not tensor.ndim:
        raise ModelError(
            "example must hold what the module is called with, tensors or arrays with rows in the "
            f"first dimension; got {brief(tensor)}"
        )
    return tuple(tensor.shape[1:]), tensor.dtype


def _bound(inputs: Binding | None, names: Sequence[str], what: str) -> tuple[Binding, list[str]]:
    """Return the columns of all inputs, and the inputs in their order."""
    if inputs is None:
        binding = Binding(names, tuple(names)) if len(names) > 1 else Binding([FEATURES])
        return binding, list(names)
    if inputs.names is None and len(inputs.slots) == len(names) == 1:
        return inputs, list(names)
    if sorted(inputs.names or ()) != sorted(names):
        raise ModelError(
            f"{what} takes {', '.join(map(repr, names))}; say which column feeds each, "
            f"feature_cols={{{names[0]!r}: …}}"
        )
    return inputs, list(inputs.names or ())


def _columns(
    binding: Binding,
    names: Sequence[str],
    kinds: Sequence[tuple[tuple[int, ...], torch.dtype]],
) -> tuple[Column, ...]:
    """Return the columns that fit inputs of these shapes and types."""
    columns: dict[str, Column] = {}
    for input_name, slot, (shape, kind) in zip(names, binding.slots, kinds, strict=True):
        dtype = str(kind).removeprefix("torch.")
        if dtype not in _PLAIN:
            raise ModelError(
                f"input {input_name!r} takes {dtype}, which Spark has no column of; let forward "
                f"take one of {', '.join(_PLAIN)}, and cast it"
            )
        if len(slot) > 1 and shape != (len(slot),):
            raise ModelError(
                f"input {input_name!r} takes rows of shape {shape}, which are not {len(slot)} "
                f"columns of a number each: {', '.join(slot)}"
            )
        for name in slot:
            column = Column(name, dtype, () if len(slot) > 1 else shape)
            if columns.setdefault(name, column) != column:
                raise ModelError(
                    f"column {name!r} feeds several inputs that take different values: "
                    f"{columns[name].describe()} and {column.describe()}"
                )
    return tuple(columns[name] for name in binding.columns)


def _try(called: Predictor, takes: ModelInputs, fixed: int | None = None) -> tuple[Any, Arrays]:
    """Call a module; return its outputs, and the rows it was called with.

    Raises:
        ModelError: it cannot be called with such rows.
    """
    try:
        rows = takes.choose_rows(functools.partial(called.outputs, count=fixed))
        return called.describe(rows, fixed or ROWS), rows
    except ModelError:
        raise
    except Exception as error:  # the user's own forward may fail in any way
        described = ", ".join(column.describe() for column in takes.columns)
        raise ModelError(
            f"{type(called.module).__name__} cannot be called with {described}: "
            f"{type(error).__name__}: {on_one_line(error)}"
        ) from error
