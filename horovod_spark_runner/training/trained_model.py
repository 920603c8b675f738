"""The trained model in a run directory: its files, written and read, for any engine.

``signature.json`` says what the model takes and gives, and holds the SHA-256 of the other files and
of itself. It is written last: until then, and if a writer is killed, files and sums do not fit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from ..checkpoint.files import read_variables
from ..checkpoint.run_directory import RunDirectory
from ..config.data import Transform
from ..data.manifest import Column
from ..errors import RunDirectoryError
from ..frameworks import KERAS, transformer_of
from ..storage.arrays import Arrays, ArraysFile, write_arrays
from ..storage.checksums import (
    compute_checksum,
    parse_checksums,
    read_verified_file,
    seal,
    unseal,
    write_with_checksum,
)
from ..storage.contents import Contents, Sink, spool
from ..typed_json import read_fields
from .sample_rows import SAMPLE_FILE, Call, SampleRows, choose_rows, made_up_rows
from .spec import Binding, OutputSpec, TrainingSpec

T = TypeVar("T")
# The bare weights, arrays named by their number: what any engine writes.
WEIGHTS_FILE = "weights.npz"
_MOST_LAYERS = 400


def with_model_fn(engine: str) -> str:
    """Return the call to make where an engine's model cannot be rebuilt from storage alone."""
    return f"{transformer_of(engine)}.from_run(run_dir, model_fn=…)"


@dataclass(frozen=True)
class Model:
    """A trained model, from columns to the outputs' values, in two steps.

    The second of one batch may run while another thread is at the first of the next one.

    Attributes:
        prepare: makes of the columns what is computed with, on the device where that is done.
        compute: gives the outputs.
        slow: whether preparing is much work, such as decoding images.
    """

    prepare: Callable[[dict[str, np.ndarray]], object]
    compute: Callable[[Any], list[np.ndarray]]
    slow: bool = False

    def __call__(self, values: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Return the outputs for any number of rows."""
        return self.compute(self.prepare(values))


@dataclass(frozen=True)
class Targets:
    """Labels that a model's outputs were compared with in training.

    Attributes:
        outputs: which label column is compared with which output.
        columns: the label columns, and that of sample weights, as they were trained on.
        weight: the column of sample weights.
        transforms: label columns that were trained with a transform.
    """

    outputs: Binding
    columns: tuple[Column, ...]
    weight: str | None = None
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layer:
    """A layer of a model.

    Attributes:
        name: of the layer.
        kind: its class.
        output: shape of its output, ``None`` for the batch; empty if unknown.
        parameters: number of its parameters.
    """

    name: str
    kind: str
    output: str
    parameters: int


@dataclass(frozen=True)
class ModelSummary:
    """Layers and parameters of a model.

    Attributes:
        layers: the first `_MOST_LAYERS`, in the model's order.
        parameters: number of all parameters.
        trainable: number of those that training changes.
        left_out: number of further layers.
    """

    layers: tuple[Layer, ...]
    parameters: int
    trainable: int
    left_out: int = 0

    @classmethod
    def of(cls, layers: Sequence[Layer], parameters: int, trainable: int) -> ModelSummary:
        shown = tuple(layers[:_MOST_LAYERS])
        return cls(shown, parameters, trainable, len(layers) - len(shown))


@dataclass(frozen=True)
class Signature:
    """Metadata of a trained model, readable without loading it.

    Attributes:
        inputs: which column feeds which input.
        columns: the feature columns as they were trained on.
        outputs: what it gives; ``None`` if it cannot be called.
        engine: dotted name of the engine that has trained it.
        weights: paths of its weights, in their order.
        reweighted: whether the weights file counts, and not what other files hold of weights:
            those are of another point of the training.
        transforms: columns that were trained with a transform.
        problem: why it cannot be called, or made again without the user's code; ``""`` if it can.
        batch_size: rows it has to be called with; ``None`` for any number.
        own: what its engine has to know besides, as JSON.
        targets: what its outputs were compared with, where that was recorded.
        summary: its layers and parameters, where they were recorded.
    """

    inputs: Binding
    columns: tuple[Column, ...]
    outputs: tuple[OutputSpec, ...] | None
    engine: str = KERAS
    weights: tuple[str, ...] = ()
    reweighted: bool = False
    transforms: tuple[str, ...] = ()
    problem: str = ""
    batch_size: int | None = None
    own: Mapping[str, Any] = field(default_factory=dict)
    targets: Targets | None = None
    summary: ModelSummary | None = None

    def to_fields(self) -> dict[str, Any]:
        return asdict(self)


class ModelWriter:
    """Writes the files of one trained model, in place of an earlier one's.

    Args:
        directory: the run directory.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._sums: dict[str, str] = {}
        directory.model.make_folder()

    def write(self, name: str, data: bytes | memoryview | Contents) -> None:
        self.write_stream(name, lambda sink: sink.write_all(data))

    def write_stream(self, name: str, fill: Callable[[Sink], object]) -> None:
        """Write a file that is too large to be held in memory.

        Args:
            name: of the file.
            fill: writes its contents.
        """
        self._sums[name] = write_with_checksum(self._directory.model.join(name).write_stream, fill)

    def copy(self, model: StoredModel, name: str) -> None:
        """Copy a file of another model.

        Raises:
            RunDirectoryError: it is missing or damaged.
        """
        self.write(name, model.contents(name))

    def finish(self, signature: Signature, names: Collection[str] = ()) -> None:
        """Write the signature, and delete an earlier model's remaining files.

        Args:
            signature: what is known of the model.
            names: files that an earlier model may have.
        """
        run_id = self._directory.run_id()
        facts = {"run_id": run_id, "sums": self._sums, "signature": signature.to_fields()}
        text = json.dumps(facts, indent=1)
        self._directory.check_held()
        self._directory.signature.write_text(seal(text))
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
        weights: contents of a weights file that counts in place of the one that is stored.
    """

    directory: RunDirectory
    signature: Signature
    sums: Mapping[str, str]
    weights: Contents | None = field(default=None, repr=False)

    def facts(self, cls: type[T]) -> T:
        """Return its engine's own fields.

        Raises:
            RunDirectoryError: the signature says something else.
        """
        try:
            return read_fields(self.signature.own, cls)
        except ValueError as error:
            raise RunDirectoryError(f"{self.directory.signature}: {error}") from error

    def read(self, name: str) -> bytes:
        """Return the bytes of a file; see `contents`."""
        return self.contents(name).read()

    def contents(self, name: str) -> Contents:
        """Return the contents of a file, which stay unchanged if the file is replaced.

        Raises:
            RunDirectoryError: it is missing or damaged.
        """
        if name == WEIGHTS_FILE and self.weights is not None:
            return self.weights
        try:
            return read_verified_file(self.directory.model, name, self.sums)
        except ValueError as error:
            raise RunDirectoryError(f"the model in {self.directory.location}: {error}") from error

    def sample(self, *, strict: bool) -> Contents | None:
        """Return the contents of its file of `SampleRows`; ``None`` if it has none.

        Args:
            strict: raise an error if the file is missing or damaged.

        Raises:
            RunDirectoryError: the file is missing or damaged.
        """
        if SAMPLE_FILE not in self.sums:
            return None
        try:
            contents = self.contents(SAMPLE_FILE)
            rows = SampleRows.load(contents)
        except (RunDirectoryError, ValueError) as error:
            if strict:
                raise RunDirectoryError(f"{SAMPLE_FILE} cannot be used: {error}") from error
            return None
        if not rows.fits(self.signature.columns):  # of an earlier version
            return None
        return Contents(SampleRows(rows.inputs).dump()) if self.signature.reweighted else contents


def read_model(directory: RunDirectory) -> StoredModel:
    """Return the finished model in ``directory``.

    Raises:
        RunDirectoryError: there is none, its signature is damaged, or it is of another run.
    """
    try:
        fields = unseal(directory.signature.read_text())
        signature = read_fields(fields["signature"], Signature)
        model = StoredModel(directory, signature, parse_checksums(fields["sums"]))
        trained_by, here = fields["run_id"], directory.run_id()
    except FileNotFoundError as error:
        raise RunDirectoryError(
            f"{directory.location} holds no finished model ({directory.signature} is missing)"
            + _checkpoint_hint(directory)
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(f"{directory.signature} cannot be read: {error}") from error
    if None not in (trained_by, here) and trained_by != here:
        raise RunDirectoryError(
            f"the model in {directory.location} is of another run ({trained_by}) than its "
            f"directory ({here}): its files were put there from elsewhere"
        )
    return model


def _checkpoint_hint(directory: RunDirectory) -> str:
    """Return what to name instead of a checkpoint, or of a folder of runs."""
    place = directory.location
    run = RunDirectory(place.parent.parent)
    steps = [step for step in run.checkpoint_steps() if run.checkpoint(step).name == place.name]
    if place.parent.name != run.checkpoint(0).parent.name or not steps:
        inner = [one for one in place.list() if RunDirectory(one).identity.exists()]
        return f": it holds runs; name one of them, such as {inner[-1]}" if inner else ""
    return (
        f": it is a checkpoint of the run in {run.location}; its weights are those of "
        f"from_run({str(run.location)!r}, checkpoint={steps[0]}) once that run is finished"
    )


def with_checkpoint(model: StoredModel, step: int) -> StoredModel:
    """Return the model with the weights of a checkpoint of its run.

    Args:
        model: the finished model.
        step: steps of the whole run after which the checkpoint was taken.

    Raises:
        RunDirectoryError: there is no such checkpoint, it is damaged, or of another model.
    """
    directory = model.directory
    folder = directory.checkpoint(step)
    try:
        info, data = read_variables(folder)
    except (ValueError, FileNotFoundError) as error:
        there = ", ".join(map(str, reversed(directory.checkpoint_steps()))) or "none"
        raise RunDirectoryError(
            f"checkpoint={step}: {folder} cannot be used: {error}; in {directory.location} there "
            f"are those after these steps: {there}"
        ) from error
    weight_names = [name for name, *_ in info.variables if name.startswith("model/")]
    if info.run_id != directory.run_id() or len(weight_names) != len(model.signature.weights):
        raise RunDirectoryError(
            f"checkpoint={step}: {folder} is of another run or model than {directory.model}"
        )
    arrays = ArraysFile(data)
    weights = spool(
        lambda file: write_arrays(
            file, ((f"{number:05d}", arrays.read(name)) for number, name in enumerate(weight_names))
        )
    )
    signature = replace(model.signature, reweighted=True)
    # The stored outputs are those of the last weights.
    return replace(model, signature=signature, weights=weights)


def copy_model(
    model: StoredModel, target: RunDirectory, held: Callable[[], Mapping[str, bytes | Contents]]
) -> None:
    """Write the files of a trained model to another directory.

    Args:
        model: where they lie, or lay once.
        target: the directory.
        held: returns files in memory that suffice to make the model again without the others; is
            called only where the files are no longer there.

    Raises:
        RunDirectoryError: files are no longer there as they were, and ``held`` has none.
        OSError: storage fails.
    """
    writer = ModelWriter(target)
    in_memory: Mapping[str, bytes | Contents] | None = None
    for name, wanted in model.sums.items():
        try:
            writer.copy(model, name)
        except RunDirectoryError as error:
            in_memory = held() if in_memory is None else in_memory
            if not in_memory:
                raise RunDirectoryError(
                    f"{error}. It was deleted or trained on since it was read; read it again"
                ) from error
            if name in in_memory and compute_checksum(in_memory[name]) == wanted:
                writer.write(name, in_memory[name])
    present = {entry.name for entry in target.model.list()} - {target.signature.name}
    writer.finish(model.signature, present)


@dataclass(frozen=True)
class Recipe:
    """Recipe for rebuilding a trained model in another process, and calling it.

    Attributes:
        engine: dotted name of the engine that makes it.
        inputs: which column feeds which input.
        columns: the feature columns as they were trained on.
        outputs: what it gives.
        transforms: what to do with a column's values, by its name.
        batch_size: rows it has to be called with; ``None`` for any number.
        parts: what the engine makes it from; can be pickled.
        targets: what its outputs were compared with, where that was recorded.
        sample: contents of a file of `SampleRows`, where there is one.
    """

    engine: str
    inputs: Binding
    columns: tuple[Column, ...]
    outputs: tuple[OutputSpec, ...]
    transforms: Mapping[str, Transform] = field(default_factory=dict)
    batch_size: int | None = None
    parts: Any = field(default=None, repr=False)
    targets: Targets | None = None
    sample: Contents | None = field(default=None, repr=False)

    def sample_rows(self) -> SampleRows:
        """Return rows to try the model with: made up, where none were saved."""
        if self.sample is None:
            return SampleRows(made_up_rows(self.columns))
        return SampleRows.load(self.sample)


@dataclass(frozen=True)
class ModelInputs:
    """Inputs of a trained model.

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
    custom_objects: Mapping[str, object] = field(default_factory=dict)
    targets: Targets | None = None
    sample: Arrays | None = field(default=None, repr=False)
    keep_sample: bool = True

    @classmethod
    def of_training(cls, spec: TrainingSpec) -> ModelInputs:
        """Return the inputs of a training's model."""
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

    def saved_rows(self, call: Call, tried: Arrays) -> SampleRows | None:
        """Return the sample rows to save with the model; ``None`` if none may be saved.

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
