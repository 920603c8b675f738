"""A trained PyTorch module in its directory, for inference and for other programs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import nn

from ...checkpoint.run_directory import RunDirectory
from ...config.importable import import_name
from ...errors import CheckpointError, ModelError, on_one_line
from ...frameworks import TORCH
from ...storage.arrays import Arrays, dump_arrays
from ...training.sample_rows import SAMPLE_FILE, check_close, repeat_rows
from ...training.spec import OutputSpec
from ...training.trained_model import WEIGHTS_FILE, ModelInputs, ModelWriter, Signature
from .feeding import Feed
from .loading import (
    BY_CHANCE,
    CPU,
    ROWS,
    Predicting,
    device_of,
    to_numpy,
    unsteady,
)
from .outputs import leaves, output_specs
from .program import dump_program, load_program, make_program, silent
from .saved import FILES, PROGRAM_FILE, TorchFacts
from .variables import as_array, weights_of

# Rows that a program is tried with: other numbers of them than it is made with.
_OTHERS = (1, 5)

logger = logging.getLogger(__name__)


def save_module(directory: RunDirectory, module: nn.Module, inputs: ModelInputs, feed: Feed) -> str:
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
        with _evaluating(module):
            return _save(directory, module, inputs, feed)
    except OSError as error:
        raise CheckpointError(
            f"the training is done, but its model could not be written to {directory.model}: "
            f"{error}. Once the storage takes files again, the same call goes on from the newest "
            "checkpoint, and writes it"
        ) from error


def outputs_of(module: nn.Module, inputs: ModelInputs, feed: Feed) -> tuple[OutputSpec, ...] | None:
    """Return a module's outputs, if it can be called; see `save_module`."""
    with _evaluating(module):
        return _outputs(Predicting(module, feed, device_of(module)), inputs)[0]


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module, and all its parts, into evaluation mode."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def _save(directory: RunDirectory, module: nn.Module, inputs: ModelInputs, feed: Feed) -> str:
    device = device_of(module)
    called = Predicting(module, feed, device)
    files = ModelWriter(directory)
    weights = weights_of(module)
    arrays = {f"{number:05d}": as_array(one) for number, one in enumerate(weights.values())}
    files.write(WEIGHTS_FILE, dump_arrays(arrays))
    del arrays  # may be of gigabytes
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
        own=facts.to_fields(),
        targets=inputs.targets,
    )
    files.finish(signature, FILES)
    return why and (
        f"{type(module).__name__} {why}, in evaluation mode as well: what it predicts depends on "
        + ("chance" if why == BY_CHANCE else "which rows Spark puts into a batch together")
    )


def _outputs(
    called: Predicting, inputs: ModelInputs
) -> tuple[tuple[OutputSpec, ...] | None, Arrays, str]:
    """Return the module's outputs and the rows it was tried with, or the reason why it has none."""
    try:
        rows = inputs.choose_rows(called.outputs)
        return output_specs(called.module, called.of(repeat_rows(rows, ROWS)), ROWS), rows, ""
    except Exception as error:  # the user's own forward may fail in any way
        return None, {}, _first_line(error)


def _program(called: Predicting, rows: Arrays) -> tuple[bytes | None, str]:
    """Return the module as a program that gives the same, or why there is none."""
    on_cpu = called.feed.values(repeat_rows(rows, ROWS), CPU)
    try:
        with silent():
            data = dump_program(make_program(called.module, called.feed, on_cpu))
        again = load_program(data, PROGRAM_FILE, called.device)
        made = Predicting(again, called.feed, called.device)
        for count in _OTHERS:
            _check_same(called, made, repeat_rows(rows, count))
    except Exception as error:  # whatever torch.export or the module raises
        return None, f"torch.export cannot hold it: {_first_line(error)}"
    return data, ""


def _check_same(called: Predicting, other: Predicting, arrays: Mapping[str, np.ndarray]) -> None:
    """Check that two modules give the same for some rows.

    Raises:
        ModelError: they give outputs in other places.
        AssertionError: they give other numbers.
    """
    ours, theirs = list(leaves(called.of(arrays))), list(leaves(other.of(arrays)))
    if [path for path, _ in ours] != [path for path, _ in theirs]:
        raise ModelError("its outputs are in other places")
    for (_, value), (_, other_value) in zip(ours, theirs, strict=True):
        check_close(to_numpy(value), to_numpy(other_value))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {on_one_line(error, 300)}"
