"""The trained module in the run directory."""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import nn

from ...errors import CheckpointError
from ...rundir.directory import RunDirectory
from ...settings.code import import_name
from ...storage.arrays import Arrays, dump_arrays
from ..spec import TORCH, TrainingSpec
from ..trained_model import WEIGHTS_FILE, ModelWriter, Signature, Targets
from .feeding import Feed
from .outputs import leaves, output_specs
from .saved import FILES, SAMPLE_FILE, SavedModule, TorchFacts
from .variables import as_array, weights_of

_ROWS = 3

logger = logging.getLogger(__name__)


def save_module(
    directory: RunDirectory, module: nn.Module, spec: TrainingSpec, feed: Feed, autocast: str
) -> SavedModule:
    """Write the trained module's weights, what it takes and gives, and a sample of that.

    Args:
        directory: the run directory.
        module: the trained module.
        spec: its training.
        feed: how columns become its inputs.
        autocast: type that it is computed in, ``""`` for that of its weights.

    Raises:
        CheckpointError: it cannot be written.
    """
    try:
        return _save(directory, module, spec, feed, autocast)
    except OSError as error:
        raise CheckpointError(
            f"the training is done, but its model could not be written to {directory.model}: "
            f"{error}. Nothing is lost: once the storage takes files again, the same call writes "
            "the model of the newest checkpoint"
        ) from error


def _save(
    directory: RunDirectory, module: nn.Module, spec: TrainingSpec, feed: Feed, autocast: str
) -> SavedModule:
    directory.saved_model.delete_folder()  # an earlier one, of another model
    files = ModelWriter(directory)
    weights = weights_of(module)
    arrays = {f"{n:05d}": as_array(tensor) for n, tensor in enumerate(weights.values())}
    files.write(WEIGHTS_FILE, dump_arrays(arrays))
    del arrays  # may be of gigabytes
    names = spec.inputs.columns
    columns = tuple(spec.train.column(name) for name in names)
    outputs, problem = None, ""
    try:
        inputs = sample_inputs({column.name: column.blank() for column in columns})
        given = _evaluated(module, feed, inputs, autocast)
        outputs = output_specs(module, given, _ROWS)
        sample = {f"input/{name}": array for name, array in inputs.items()}
        for number, (_, tensor) in enumerate(leaves(given)):
            sample[f"output/{number:05d}"] = as_array(tensor.float() if _narrow(tensor) else tensor)
        files.write(SAMPLE_FILE, dump_arrays(sample))
    except Exception as error:  # the user's own forward may fail in any way
        problem = (str(error) or repr(error)).splitlines()[0]
        logger.warning("the model is saved, but it cannot predict: %s", problem)
    facts = TorchFacts(
        torch=torch.__version__,
        module=import_name(type(module)) or "",
        names=feed.names,
        autocast=autocast,
    )
    labels = tuple(dict.fromkeys((*spec.outputs.columns, *filter(None, [spec.weight]))))
    signature = Signature(
        inputs=spec.inputs,
        columns=columns,
        outputs=outputs,
        engine=TORCH,
        weights=tuple(weights),
        transforms=tuple(sorted(set(spec.transforms) & set(names))),
        problem=problem,
        own=facts.to_fields(),
        targets=Targets(
            spec.outputs,
            tuple(spec.train.column(name) for name in labels),
            spec.weight,
            tuple(sorted(set(spec.transforms) & set(labels))),
        ),
    )
    files.finish(signature, FILES)
    return SavedModule()


def sample_inputs(blank: Arrays) -> Arrays:
    """Return rows of inputs that tell modules apart, always the same for the same columns.

    Whole numbers are 0: no other is known to be an index that a module has.
    """
    draw = np.random.default_rng(0)
    return {
        name: draw.normal(size=(_ROWS, *array.shape[1:])).astype(array.dtype)
        if array.dtype.kind == "f"
        else np.repeat(array, _ROWS, axis=0)
        for name, array in blank.items()
    }


def _evaluated(module: nn.Module, feed: Feed, inputs: Arrays, autocast: str) -> object:
    """Return what a module gives for columns in an evaluation, in which nothing of it changes."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    module.eval()
    dtype = getattr(torch, autocast) if autocast else None
    with torch.no_grad(), torch.autocast(device.type, dtype=dtype, enabled=bool(autocast)):
        return feed.call(module, feed.values(inputs, device))


def _narrow(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.bfloat16
