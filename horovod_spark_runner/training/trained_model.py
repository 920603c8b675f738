"""The trained model in a run directory: its files, written and read, for any engine.

``signature.json`` says what the model takes and gives, and holds the SHA-256 of the other files and
of itself. It is written last: until then, and if a writer is killed, files and sums do not fit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..data.manifest import Column
from ..errors import RunDirectoryError
from ..rundir.directory import RunDirectory
from ..settings.data import Transform
from ..storage.sums import read_checked, sealed, sum_of, unsealed
from .spec import KERAS, Binding, OutputSpec

# The bare weights, arrays named by their place: what any engine writes.
WEIGHTS_FILE = "weights.npz"
# What to call where a model cannot be made again from storage alone.
WITH_MODEL_FN = "TFTransformer.from_run(run_dir, model_fn=…)"


@dataclass(frozen=True)
class Model:
    """A trained model, from columns to the outputs' values, in two steps.

    The second of one batch may run while another thread is at the first of the next one.

    Attributes:
        prepare: makes of the columns what is computed with, on the device where that is done.
        compute: gives the outputs.
        slow: whether preparing is much work, such as decoding images.
    """

    prepare: Callable[[dict[str, np.ndarray]], Any]
    compute: Callable[[Any], list[np.ndarray]]
    slow: bool = False

    def __call__(self, values: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Return the outputs for any number of rows."""
        return self.compute(self.prepare(values))


@dataclass(frozen=True)
class Signature:
    """What is known of a trained model without loading it.

    Attributes:
        inputs: which column feeds which input.
        columns: the feature columns as they were trained on.
        outputs: what it gives; ``None`` if it cannot be called.
        engine: dotted name of the engine that has trained it.
        weights: paths of its weights, in their order.
        transforms: columns that were trained with a transform.
        problem: why it cannot be called, or made again without the user's code; ``""`` if it can.
        batch_size: rows it has to be called with; ``None`` for any number.
        own: what its engine has to know besides, as JSON.
    """

    inputs: Binding
    columns: tuple[Column, ...]
    outputs: tuple[OutputSpec, ...] | None
    engine: str = KERAS
    weights: tuple[str, ...] = ()
    transforms: tuple[str, ...] = ()
    problem: str = ""
    batch_size: int | None = None
    own: Mapping[str, Any] = field(default_factory=dict)

    def to_fields(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Signature:
        """Rebuild a signature; what an older one did not record has its default.

        Raises:
            ValueError: they are of none.
        """
        try:
            names = fields["inputs"]["names"]
            outputs = fields["outputs"]
            known = {
                **{name: value for name, value in fields.items() if name in cls.__annotations__},
                "inputs": Binding(
                    tuple(tuple(slot) for slot in fields["inputs"]["slots"]),
                    None if names is None else tuple(names),
                ),
                "columns": tuple(
                    Column(**{**c, "shape": tuple(c["shape"])}) for c in fields["columns"]
                ),
                "outputs": None if outputs is None else tuple(output_from(o) for o in outputs),
                "weights": tuple(fields.get("weights", ())),
                "transforms": tuple(fields.get("transforms", ())),
            }
            return cls(**known)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a model's signature: {error!r}") from error


def output_from(fields: Mapping[str, Any]) -> OutputSpec:
    """Return the output whose fields JSON gave back."""
    return OutputSpec(
        fields["name"], tuple(fields["shape"]), fields["dtype"], tuple(fields.get("path", ()))
    )


class ModelWriter:
    """Writes the files of one trained model, in place of an earlier one's.

    Args:
        directory: the run directory.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._sums: dict[str, str] = {}
        directory.model.make_folder()

    def write(self, name: str, data: bytes | memoryview) -> None:
        self._sums[name] = sum_of(data)
        self._directory.model.join(name).write_bytes(data)

    def finish(self, signature: Signature, names: Collection[str] = ()) -> None:
        """Write the signature; what an earlier model had besides goes.

        Args:
            signature: what is known of the model.
            names: the files that the engine's models may have.
        """
        run_id = self._directory.run_id()
        facts = {"run_id": run_id, "sums": self._sums, "signature": signature.to_fields()}
        text = json.dumps(facts, indent=1)
        self._directory.signature.write_text(sealed(text))
        for name in set(names) - self._sums.keys():
            place = self._directory.model.join(name)
            if place.exists():
                place.delete_file()


@dataclass(frozen=True)
class StoredModel:
    """The files of a trained model.

    Attributes:
        directory: its run directory.
        signature: what is known of the model.
        sums: of its files, by name.
    """

    directory: RunDirectory
    signature: Signature
    sums: Mapping[str, str]

    def read(self, name: str) -> bytes:
        """Return the contents of a file.

        Raises:
            RunDirectoryError: it is missing or damaged.
        """
        try:
            return read_checked(self.directory.model, name, self.sums)
        except ValueError as error:
            raise RunDirectoryError(f"the model in {self.directory.location}: {error}") from error


def read_model(directory: RunDirectory) -> StoredModel:
    """Return the finished model in ``directory``.

    Raises:
        RunDirectoryError: there is none, its signature is damaged, or it is of another run.
    """
    try:
        fields = unsealed(directory.signature.read_text())
        signature = Signature.from_fields(fields["signature"])
        model = StoredModel(directory, signature, fields["sums"])
        trained_by, here = fields["run_id"], directory.run_id()
    except FileNotFoundError as error:
        raise RunDirectoryError(
            f"{directory.location} holds no finished model ({directory.signature} is missing)"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(f"{directory.signature} cannot be read: {error}") from error
    if None not in (trained_by, here) and trained_by != here:
        raise RunDirectoryError(
            f"the model in {directory.location} is of another run ({trained_by}) than its "
            f"directory ({here}): its files were put there from elsewhere"
        )
    return model


@dataclass(frozen=True)
class Recipe:
    """How a trained model is made again in another process, and called.

    Attributes:
        engine: dotted name of the engine that makes it.
        inputs: which column feeds which input.
        columns: the feature columns as they were trained on.
        outputs: what it gives.
        transforms: what to do with a column's values, by its name.
        batch_size: rows it has to be called with; ``None`` for any number.
        own: what the engine makes it from; can be pickled.
    """

    engine: str
    inputs: Binding
    columns: tuple[Column, ...]
    outputs: tuple[OutputSpec, ...]
    transforms: Mapping[str, Transform] = field(default_factory=dict)
    batch_size: int | None = None
    own: Any = field(default=None, repr=False)
