"""A second engine, as small as one can be: linear regression in NumPy; and a way to synchronise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from horovod_spark_runner.checkpoint.model_state import TrainingVariables
from horovod_spark_runner.storage.arrays import dump_arrays, load_arrays
from horovod_spark_runner.sync.synchroniser import Traffic
from horovod_spark_runner.training.engine import Engine, check_format
from horovod_spark_runner.training.spec import ModelNames, ModelSource, OutputSpec
from horovod_spark_runner.training.trained_model import (
    WEIGHTS_FILE,
    Model,
    ModelWriter,
    Signature,
    Targets,
)
from horovod_spark_runner.training.trainee import Hooks, Trainee

NAME = "tests.numpy_engine"
OUTPUT = OutputSpec("prediction", (), "float64")


@dataclass(frozen=True)
class Line:
    """A ``model_fn``: the line, and how it is found."""

    horovod_engine = NAME
    rate: float = 0.05
    momentum: float = 0.5
    noise: float = 0.01  # added to the inputs

    def __call__(self) -> Line:
        return self


class Value:
    """A variable."""

    def __init__(self, path: str, size: int) -> None:
        self.path, self.shape, self.dtype = path, (size,), np.dtype(np.float64)
        self.value = np.zeros(size)

    def numpy(self) -> np.ndarray:
        return self.value

    def assign(self, value: Any) -> None:
        self.value = np.array(value, self.dtype)


@dataclass(frozen=True)
class Part:
    """A rank's part of the rows of a step."""

    fraction: float

    def term(self, tensor: np.ndarray) -> np.ndarray:
        return self.fraction * tensor

    def total(self, summed: np.ndarray) -> np.ndarray:
        return summed


class Sums:
    """Sums over all ranks, and no compression of the framework's own."""

    traffic = Traffic(0.0, 0.0)

    @property
    def size(self) -> int:
        from mpi4py import MPI

        return int(MPI.COMM_WORLD.Get_size())

    def sum(self, tensors: Sequence[np.ndarray], name: str) -> list[np.ndarray]:
        from mpi4py import MPI

        for tensor in (summed := [np.array(tensor) for tensor in tensors]):
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, tensor)
        return summed

    def compression(self, name: str) -> Any:
        assert name == "none"
        return self

    def compress(self, tensor: np.ndarray) -> tuple[np.ndarray, None]:
        return tensor, None

    def decompress(self, tensor: np.ndarray, context: None) -> np.ndarray:
        return tensor

    def on_host(
        self, function: Callable[[Any], list[np.ndarray]], tensors: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        return function(tensors)

    def nbytes(self, tensors: Sequence[np.ndarray]) -> int:
        return sum(tensor.nbytes for tensor in tensors)

    def count(self, sent: float, whole: float) -> None:
        self.traffic = Traffic(self.traffic.sent + sent, self.traffic.whole + whole)

    def counted(self) -> Traffic:
        return self.traffic


@dataclass
class Variables(TrainingVariables):
    weights: Value
    velocity: Value

    @property
    def groups(self) -> dict[str, list[Any]]:
        return {"model": [self.weights], "optimizer": [self.velocity]}


@dataclass
class Functions(Hooks):
    """Callbacks that are functions of a step's number and logs."""

    given: Sequence[Callable[[int, Any], None]]

    def __post_init__(self) -> None:
        self.watch_end = bool(self.given)

    def train_step_end(self, number: int, logs: Any) -> None:
        for function in self.given:
            function(number, logs)


class LineTrainee(Trainee):
    def __init__(self, spec: Any, synchroniser: Any) -> None:
        self.spec, self.sync = spec, synchroniser
        self.line: Line = spec.model.function()
        self.columns = [*spec.inputs.columns, *spec.outputs.columns]
        columns = [spec.train.column(name) for name in self.columns]
        self.blank = {column.name: column.blank() for column in columns}
        size = inputs_of(self.blank, self.columns[:-1]).shape[1]
        self.variables: Any = Variables(Value("weights", size), Value("velocity", size))
        self.sums = Value("sums", 2)  # of squared errors, and rows

    def errors(self, step: Any, noise: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        arrays = step.batch.arrays if step.batch.rows else self.blank
        x = inputs_of(arrays, self.columns[:-1])
        x = x + noise * np.random.normal(size=x.shape)
        errors = x @ self.variables.weights.value - arrays[self.columns[-1]]
        if step.batch.rows:
            self.sums.value = self.sums.value + np.array([errors @ errors, len(errors)])
        return x, errors

    def train_step(self, step: Any, asked: Sequence[Any], last: bool) -> tuple[Any, Any]:
        x, errors = self.errors(step, self.line.noise)
        gradient, along = 2 * x.T @ errors / len(errors), [np.array(asked, float)]
        (mean,), counts = self.sync.gradients(
            [gradient], Part(step.fraction), "gradients", "line", along
        )
        velocity, weights = self.variables.velocity, self.variables.weights
        velocity.assign(self.line.momentum * velocity.value + mean)
        weights.assign(weights.value - self.line.rate * velocity.value)
        return {"loss": errors @ errors / len(errors)}, counts[0] if counts else None

    def test_step(self, step: Any, last: bool) -> Any:
        return {"loss": float(np.mean(self.errors(step)[1] ** 2))}

    def reset_metrics(self) -> None:
        self.sums.assign(np.zeros(2))

    def results(self, kind: str, logs: Any, fraction: float) -> dict[str, Any]:
        ((total, rows),) = Sums().sum([self.sums.value], kind)
        return {"loss": total / rows}

    def metric_variables(self) -> list[Any]:
        return [self.sums]

    def describe(self) -> dict[str, Any]:
        return asdict(self.line)

    def hooks(self, *, steps: int, resumed: bool) -> Hooks:
        return Functions(self.spec.config.callbacks)

    def save(self, directory: Any) -> None:
        inputs, train = self.spec.inputs, self.spec.train
        writer = ModelWriter(directory)
        writer.write(WEIGHTS_FILE, dump_arrays({"00000": self.variables.weights.value}))
        columns = tuple(train.column(name) for name in inputs.columns)
        labels = self.spec.outputs
        targets = Targets(labels, tuple(train.column(name) for name in labels.columns))
        signature = Signature(inputs, columns, (OUTPUT,), NAME, ("weights",), targets=targets)
        writer.finish(signature)


def inputs_of(arrays: Mapping[str, np.ndarray], names: Sequence[str]) -> np.ndarray:
    """Return a row of inputs for each row, and 1 for the intercept."""
    parts = [arrays[name].reshape(len(arrays[name]), -1) for name in names]
    return np.concatenate([*parts, np.ones((len(parts[0]), 1))], axis=1)


class NumpyEngine:
    tries_apart = False
    modules = ("numpy",)
    weights_formats = ()
    export_formats = ()

    def source(self, model: Any, custom_objects: Any) -> ModelSource:
        return ModelSource(function=model, engine=NAME)

    def check_callbacks(self, callbacks: Any) -> None:
        assert all(map(callable, callbacks))

    def names(self, source: ModelSource) -> ModelNames:
        return ModelNames()

    def begin(self, seed: int, environment: Mapping[str, str]) -> None:
        np.random.seed(seed)

    def collectives(self) -> Sums:
        return Sums()

    def trainee(self, spec: Any, world: Any, synchroniser: Any) -> LineTrainee:
        return LineTrainee(spec, synchroniser)

    def adopt(
        self, directory: Any, model: Any, inputs: Any, custom_objects: Any, signature: str = ""
    ) -> None:
        raise NotImplementedError("lines are trained here only")

    def parts(
        self, model: Any, source: Any, saved: Any, custom_objects: Any, trusted: bool = False
    ) -> bytes:
        weights: bytes = model.read(WEIGHTS_FILE)
        return weights

    def load(self, recipe: Any) -> Any:
        weights = load_arrays(recipe.parts)["00000"]
        prepare = functools.partial(inputs_of, names=recipe.inputs.columns)
        return Model(prepare, lambda inputs: [inputs @ weights])

    def model(self, recipe: Any) -> np.ndarray:
        return load_arrays(recipe.parts)["00000"]

    def stored_files(self, parts: bytes) -> Mapping[str, bytes]:
        return {WEIGHTS_FILE: parts}

    def check_export(self, format: str, names: Any, transformed: Any) -> None:
        check_format(format, self.export_formats)

    def export(self, recipe: Any, format: str, columns: Any, outputs: Any, target: Any) -> None:
        check_format(format, self.export_formats)

    def describe_outputs(self, recipe: Any) -> tuple[list[dict[str, Any]], str]:
        return [asdict(OUTPUT)], ""

    def portable_metrics(self, metrics: Any) -> Any:
        return metrics

    def evaluator(self, recipe: Any, request: Any) -> LineEvaluator:
        return LineEvaluator(self.load(recipe), request.targets.outputs.columns[0])


class LineEvaluator:
    """The mean of squared errors."""

    def __init__(self, predict: Any, label: str) -> None:
        self.predict, self.label = predict, label
        self.begin()

    def begin(self) -> None:
        self.sums = np.zeros(2)

    def update(self, features: Any, labels: Any) -> np.ndarray:
        output: np.ndarray = self.predict(features)[0]
        errors = output - labels[self.label]
        self.sums += [errors @ errors, len(errors)]
        return output

    def take_sums(self) -> list[np.ndarray]:
        sums = self.sums
        self.begin()
        return [sums]

    def results(self, sums: Sequence[np.ndarray]) -> dict[str, Any]:
        total, rows = sums[0]
        return {"loss": total / rows}


ENGINE: Engine = NumpyEngine()
