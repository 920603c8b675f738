"""Inputs and targets of a trained model, as its training knows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..data.manifest import Column
from ..storage.arrays import Arrays
from .sample_rows import Call, SampleRows, choose_rows
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
        sample: a few rows of the columns, to try it with; without any, they are made up.
        keep_sample: whether these rows may be kept with the model.
    """

    inputs: Binding
    columns: tuple[Column, ...]
    transforms: tuple[str, ...]
    custom_objects: Mapping[str, Any] = field(default_factory=dict)
    targets: Targets | None = None
    sample: Arrays | None = field(default=None, repr=False)
    keep_sample: bool = True

    @classmethod
    def of_training(cls, spec: TrainingSpec) -> ModelInputs:
        """Return what the model of a training takes."""
        names = spec.inputs.columns
        return cls(
            inputs=spec.inputs,
            columns=tuple(spec.train.column(name) for name in names),
            transforms=tuple(sorted(set(spec.config.data.transforms) & set(names))),
            custom_objects=spec.model.custom_objects,
            targets=_targets(spec),
            sample=None if spec.sample is None else {name: spec.sample[name] for name in names},
            keep_sample=spec.config.data.keep_data is not False,
        )

    def choose_rows(self, call: Call) -> Arrays:
        """Return rows that a model which takes this is tried with; see `choose_rows`."""
        return choose_rows(self.columns, self.sample, call)

    def kept_rows(self, call: Call, tried: Arrays) -> SampleRows | None:
        """Return the rows that are kept with the model; ``None`` if it takes none that may be.

        Args:
            call: the model.
            tried: the rows that it was tried with.
        """
        if not self.keep_sample:
            try:
                tried = choose_rows(self.columns, None, call)
            except Exception:  # the user's own call may fail in any way
                return None
        return SampleRows.of(call, tried)


def _targets(spec: TrainingSpec) -> Targets:
    weight = () if spec.weight_col is None else (spec.weight_col,)
    names = dict.fromkeys((*spec.outputs.columns, *weight))
    return Targets(
        spec.outputs,
        tuple(spec.train.column(name) for name in names),
        spec.weight_col,
        tuple(sorted(set(spec.config.data.transforms) & set(names))),
    )
