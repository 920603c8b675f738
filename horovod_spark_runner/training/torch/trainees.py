"""Which trainee a model is for: PyTorch's own modules, or Lightning's."""

from __future__ import annotations

from mpi4py import MPI

from ..spec import TrainingSpec
from ..sync.synchroniser import Synchroniser
from .build import build
from .lightning.recognise import is_lightning
from .lightning.trainee import LightningTrainee
from .trainee import TorchTrainee


def trainee_of(spec: TrainingSpec, world: MPI.Comm, synchroniser: Synchroniser) -> TorchTrainee:
    """Return the model on this rank; see `Engine.trainee`.

    Raises:
        ModelError: it cannot be trained here, or not on these columns.
        InvalidInputError: something given is no callback.
    """
    model, module = build(spec.model)
    kind = LightningTrainee if is_lightning(module) else TorchTrainee
    return kind(spec, world, synchroniser, model, module)
