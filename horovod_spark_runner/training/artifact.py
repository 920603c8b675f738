"""The trained model in the run directory, for inference and for other programs."""

from __future__ import annotations

import json
import logging
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import keras
import numpy as np

from ..storage.arrays import dump_arrays
from ..storage.run_directory import RunDirectory
from .model import output_specs
from .spec import TrainingSpec

logger = logging.getLogger(__name__)

ARCHIVE_FILE = "model.keras"
WEIGHTS_FILE = "weights.npz"


def save_model(directory: RunDirectory, model: Any, spec: TrainingSpec, example: Any) -> None:
    """Write the trained model: ``model.keras``, its bare weights, and what it takes and gives.

    A model that Keras cannot write (a custom layer without ``get_config``) is kept as weights
    only; they suffice with the function that built it.

    Args:
        directory: the run directory.
        model: the trained model.
        spec: its training.
        example: one row of inputs.
    """
    folder = directory.model
    folder.make_folder()
    weights = {f"{number:05d}": np.array(w.numpy()) for number, w in enumerate(model.weights)}
    folder.join(WEIGHTS_FILE).write_bytes(dump_arrays(weights))
    archive = _archive(model)
    if archive is not None:
        folder.join(ARCHIVE_FILE).write_bytes(archive)
    outputs = output_specs(model, example)
    directory.signature.write_text(
        json.dumps(
            {
                "inputs": asdict(spec.inputs),
                "columns": [asdict(spec.train.column(name)) for name in spec.inputs.columns],
                "outputs": [asdict(output) for output in outputs],
                "transforms": sorted(set(spec.transforms) & set(spec.inputs.columns)),
                "weights": [weight.path for weight in model.weights],
                "archive": archive is not None,
                "keras": keras.__version__,
            },
            indent=1,
        )
    )


def _archive(model: Any) -> bytes | None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, ARCHIVE_FILE)
        try:
            model.save(path)
        except Exception as error:  # a custom layer's get_config may fail in any way
            logger.warning("the model is kept as weights only; Keras cannot write it: %s", error)
            return None
        return path.read_bytes()
