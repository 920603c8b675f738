"""What a trained model takes, and what its outputs were compared with, as a training knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..data.manifest import Column
from .spec import Binding, TrainingSpec
from .trained_model import Targets


@dataclass(frozen=True)
class ModelInputs:
    """What a trained model takes.

    Attributes:
        inputs: which column feeds which input.
        columns: the feature columns.
        transforms: those of them that were trained with a transform.
        custom_objects: classes and functions by name that the model itself was made with.
        targets: what its outputs were compared with, if that is known.
    """

    inputs: Binding
    columns: tuple[Column, ...]
    transforms: tuple[str, ...]
    custom_objects: Mapping[str, Any] = field(default_factory=dict)
    targets: Targets | None = None

    @classmethod
    def of_training(cls, spec: TrainingSpec) -> ModelInputs:
        """Return what the model of a training takes."""
        names = spec.inputs.columns
        return cls(
            inputs=spec.inputs,
            columns=tuple(spec.train.column(name) for name in names),
            transforms=tuple(sorted(set(spec.transforms) & set(names))),
            custom_objects=spec.model.custom_objects,
            targets=_targets(spec),
        )


def _targets(spec: TrainingSpec) -> Targets:
    weight = () if spec.weight is None else (spec.weight,)
    names = dict.fromkeys((*spec.outputs.columns, *weight))
    return Targets(
        spec.outputs,
        tuple(spec.train.column(name) for name in names),
        spec.weight,
        tuple(sorted(set(spec.transforms) & set(names))),
    )
