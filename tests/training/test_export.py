"""Models as SavedModels: what they give with TensorFlow alone, and what is refused."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from PIL import Image

from horovod_spark_runner import InvalidInputError, ModelError, RunDirectoryError, TFTransformer
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.data.read.decode import RowDecoder
from horovod_spark_runner.engines.keras.artifact import save_model
from horovod_spark_runner.engines.keras.binding import InputBinding
from horovod_spark_runner.model.load import read_finished_run
from horovod_spark_runner.model.shipping import load_model
from horovod_spark_runner.training.spec import Binding
from horovod_spark_runner.training.trained_model import ModelInputs

from ..runs import spec_of

RNG = np.random.default_rng(0)
ROWS = 9
TEXTS = ["a", "b", "c", "ü", ""]

# Predicts on arrays in files, with TensorFlow and nothing else.
SCORER = """
import json, sys
import numpy as np, tensorflow as tf
for place, signature in json.load(sys.stdin):
    call = tf.saved_model.load(place).signatures[signature]
    with np.load(place + ".in.npz", allow_pickle=True) as file:
        given = {name: file[name] for name in file.files}
    inputs = {n: tf.constant(v.tolist() if v.dtype == object else v) for n, v in given.items()}
    np.savez(place + ".out.npz", **{n: value.numpy() for n, value in call(**inputs).items()})
assert not {"horovod_spark_runner", "pyspark"} & sys.modules.keys()
"""


def one_vector() -> Any:
    x = keras.Input((3,))
    y = layers.BatchNormalization()(layers.Dense(8, "relu")(x))
    return keras.Model(x, layers.Dense(1)(layers.Dropout(0.5)(y)))


def scalars() -> Any:
    return keras.Sequential([keras.Input((4,)), layers.Dense(3, "tanh"), layers.Dense(2)])


def by_name() -> Any:
    a, b = keras.Input((3,), name="first"), keras.Input((1,), name="second")
    both = layers.Concatenate()([a, b])
    return keras.Model(
        {"first": a, "second": b},
        {"sum": layers.Dense(1)(both), "grid": layers.Reshape((2, 2))(layers.Dense(4)(both))},
    )


def convolution() -> Any:
    x = keras.Input((8, 6, 3))
    y = layers.Conv2D(4, 3, activation="relu")(layers.Rescaling(1 / 255)(x))
    return keras.Model(x, layers.Dense(2, "softmax")(layers.Flatten()(y)))


def lookup() -> Any:
    text, n = (
        keras.Input((1,), name="t", dtype="string"),
        keras.Input((1,), name="n", dtype="int32"),
    )
    known = layers.StringLookup(vocabulary=TEXTS[:3])(text)
    embedded = layers.Flatten()(layers.Embedding(5, 3)(known))
    return keras.Model([text, n], layers.Dense(1)(embedded) + keras.ops.cast(n, "float32"))


def raw() -> Any:
    return keras.Sequential([keras.Input((2, 2)), layers.Flatten(), layers.Dense(1)])


def encoded(form: str, mode: str = "RGB", size: tuple[int, int] = (6, 8), **options: Any) -> bytes:
    shape = (size[1], size[0]) if mode in ("L", "1", "P") else (size[1], size[0], len(mode))
    pixels = RNG.integers(0, 256, shape, np.uint8)
    image = Image.fromarray(pixels, mode="L" if mode in ("1", "P") else mode)
    if mode in ("1", "P"):
        image = image.convert(mode)
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


IMAGES = [
    encoded("PNG"),
    encoded("PNG", "RGBA"),
    encoded("PNG", "LA"),
    encoded("PNG", "L"),
    encoded("PNG", "L", transparency=7),
    encoded("PNG", "1"),
    encoded("PNG", "P"),
    encoded("JPEG", quality=50),
    encoded("JPEG", "L"),
]


@dataclass(frozen=True)
class Case:
    """A model, its columns, and rows of them as a DataFrame would hand them over."""

    make: Callable[[], Any]
    columns: list[Column]
    values: dict[str, Any]
    binding: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)


def reals(*shape: int) -> np.ndarray:
    return RNG.normal(size=(ROWS, *shape)).astype(np.float32)


def objects(values: Any) -> np.ndarray:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def images(**changes: Any) -> Case:
    column = Column(
        "picture", **{"dtype": "uint8", "shape": (8, 6, 3), "encoding": "image", **changes}
    )
    return Case(convolution, [column], {"picture": objects(IMAGES)})


CASES = {
    "one vector": Case(one_vector, [Column("x", "float32", (3,))], {"x": reals(3)}),
    "scalars joined": Case(
        scalars,
        [Column("a_b", "float32"), Column("Nm", "int64"), Column("v", "float64", (2,))],
        {"a_b": reals(), "Nm": RNG.integers(-9, 9, ROWS), "v": RNG.normal(size=(ROWS, 2))},
        {"inputs": Binding([["a_b", "Nm", "v"]])},
        {"prediction_col": "p é.q"},
    ),
    "inputs and outputs by name": Case(
        by_name,
        [Column("u", "float32", (3,)), Column("w", "float32")],
        {"u": reals(3), "w": reals()},
        {"inputs": Binding(["u", "w"], ("first", "second"))},
        {"prediction_col": {"sum": "total"}},
    ),
    "image": images(),
    "image in float32": images(dtype="float32"),
    "string and integer": Case(
        lookup,
        [Column("t", "string"), Column("n", "int32")],
        {"t": objects((TEXTS * 2)[:ROWS]), "n": np.arange(ROWS, dtype=np.int32)},
    ),
    "raw bytes": Case(
        raw,
        [Column("r", "float32", (2, 2), "raw")],
        {"r": objects([row.tobytes() for row in reals(2, 2)])},
    ),
    "renamed columns": Case(
        one_vector,
        [Column("x", "float32", (3,))],
        {"x": reals(3)},
        params={"feature_cols": ["other"]},
    ),
}


def fitted(model: Any) -> Any:
    """Give weights and moving averages other values than those of a new model."""
    for weight in model.weights:
        if "seed" not in weight.path:
            weight.assign(abs(RNG.normal(size=weight.shape)) + 0.1)
    model.compile("sgd", "mse")
    return model


def leave(place: Path, model: Any, case: Case) -> None:
    """Leave a model in a run directory as a training does."""
    spec = spec_of(case.columns, **case.binding)
    bind = InputBinding(model, spec.inputs, spec.train)
    save_model(RunDirectory(str(place)), model, ModelInputs.of_training(spec), bind)


@dataclass(frozen=True)
class Exports:
    """All cases, exported and scored by one process that knows TensorFlow only."""

    place: Path

    def transformer(self, name: str) -> TFTransformer:
        return TFTransformer.from_run(self.place / name, **CASES[name].params)

    def folder(self, name: str) -> Path:
        return self.place / f"{name} exported"

    def outputs(self, name: str) -> dict[str, Any]:
        with np.load(f"{self.folder(name)}.out.npz") as file:
            return dict(file)


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    made = Exports(tmp_path_factory.mktemp("exports"))
    for name, case in CASES.items():
        columns = case.columns
        leave(made.place / name, fitted(case.make()), case)
        made.transformer(name).export(made.folder(name))
        renamed = dict(
            zip((c.name for c in columns), case.params.get("feature_cols", ()), strict=False)
        )
        given: dict[str, Any] = {renamed.get(n, n): values for n, values in arrays(case).items()}
        np.savez(f"{made.folder(name)}.in.npz", **given)
    asked = json.dumps([[str(made.folder(name)), "serving_default"] for name in CASES])
    run = subprocess.run(
        [sys.executable, "-c", SCORER], input=asked, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return made


def arrays(case: Case) -> dict[str, np.ndarray]:
    """Return the rows of a case as arrays, decoded."""
    values = {
        c.name: np.stack([np.frombuffer(r, c.dtype).reshape(c.shape) for r in case.values[c.name]])
        if c.encoding == "raw"
        else case.values[c.name]
        for c in case.columns
    }
    return RowDecoder(case.columns, {}, allow_nan=True)(values)


def predicted(place: Path, case: Case) -> list[Any]:
    """Return what the body of `transform` gives."""
    return load_model(read_finished_run(RunDirectory(str(place))).recipe)(arrays(case))


def called(name: str) -> list[str]:
    """Return what the outputs of a case are called, in the model's order."""
    if name == "inputs and outputs by name":
        return ["total", "grid"]
    return ["p é.q" if name == "scalars joined" else "prediction"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_it_scores_with_tensorflow_alone_as_transform_does(exports: Exports, name: str) -> None:
    found, expected = exports.outputs(name), predicted(exports.place / name, CASES[name])
    assert sorted(found) == sorted(called(name))
    for output, value in zip(called(name), expected, strict=True):
        np.testing.assert_allclose(found[output], value, rtol=1e-6, atol=1e-6)
        assert found[output].dtype == value.dtype


@pytest.mark.parametrize("name", ["one vector", "scalars joined", "inputs and outputs by name"])
def test_it_gives_what_keras_gives(exports: Exports, name: str) -> None:
    values: Any = [v.reshape(ROWS, -1) for v in CASES[name].values.values()]
    if name == "inputs and outputs by name":
        values = dict(zip(("first", "second"), values, strict=True))
    else:
        values = np.concatenate(values, 1)
    given = exports.transformer(name).getModel().predict(values, verbose=0)
    expected = [given["sum"], given["grid"]] if isinstance(given, dict) else [given]
    for output, value in zip(called(name), expected, strict=True):
        np.testing.assert_allclose(exports.outputs(name)[output], value, rtol=1e-5, atol=1e-6)


def score(place: Path, signature: str = "serving_default", **given: Any) -> dict[str, Any]:
    """Return what a SavedModel gives, in this process."""
    import tensorflow as tf

    call = tf.saved_model.load(str(place)).signatures[signature]
    return {name: value.numpy() for name, value in call(**given).items()}


def test_bytes_of_an_encoded_column_are_refused(exports: Exports) -> None:
    import tensorflow as tf

    for name in ("image", "raw bytes"):
        ((column, values),) = CASES[name].values.items()
        with pytest.raises(tf.errors.InvalidArgumentError, match="string"):
            score(exports.folder(name), **{column: tf.constant(values.tolist())})


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_it_is_read_back_with_its_columns(exports: Exports, name: str) -> None:
    read = TFTransformer.from_saved_model(exports.folder(name))
    renamed = CASES[name].params.get("feature_cols")
    recipe = read._model.metadata.recipe
    found = {column.name: column for column in recipe.columns}
    names = renamed or [column.name for column in CASES[name].columns]
    wanted = dict(zip(names, CASES[name].columns, strict=True))
    assert {n: (c.dtype, c.shape, c.encoding) for n, c in found.items()} == {
        n: (c.dtype, c.shape, c.encoding) for n, c in wanted.items()
    }
    assert sorted(read.output_names) == sorted(
        ["prediction"] if len(called(name)) == 1 else called(name)
    )


def test_damage_is_told(exports: Exports, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    exports.transformer("one vector").export(folder)
    weights = next((folder / "variables").glob("*.data*"))
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ModelError, match=weights.name):
        TFTransformer.from_saved_model(folder)
    weights.unlink()
    with pytest.raises(ModelError, match=weights.name):
        TFTransformer.from_saved_model(folder)
    facts = folder / "columns.json"
    facts.write_text(facts.read_text().replace("float32", "float64"))
    with pytest.raises(ModelError, match=r"columns\.json"):
        TFTransformer.from_saved_model(folder)


def test_what_is_there_stays_unless_asked_otherwise(exports: Exports, tmp_path: Path) -> None:
    transformer, target = exports.transformer("one vector"), tmp_path / "out"
    target.mkdir()
    transformer.export(target)
    (target / "variables" / "old").write_text("")
    with pytest.raises(RunDirectoryError, match="mode='overwrite'"):
        transformer.export(target)
    transformer.export(target, mode="overwrite")
    assert not (target / "variables" / "old").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(RunDirectoryError, match="an export"):
        transformer.export(tmp_path, mode="overwrite")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("column", "told"),
    [
        (Column("x y", "float32", (3,)), "'x y'.*TensorFlow.*setFeatureCols"),
        (Column("class", "float32", (3,)), r"'class'"),
    ],
)
def test_columns_that_no_signature_takes_are_refused(
    tmp_path: Path, column: Column, told: str
) -> None:
    case = Case(one_vector, [column], {})
    leave(tmp_path, case.make(), case)
    with pytest.raises(ModelError, match=told):
        TFTransformer.from_run(tmp_path).export(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_an_export_cannot_be_is_refused(exports: Exports, tmp_path: Path) -> None:
    transformer, target = exports.transformer("one vector"), tmp_path / "out"
    with pytest.raises(InvalidInputError, match="'onxx'.*'saved_model'.*'keras'"):
        transformer.export(target, format="onxx")
    with pytest.raises(InvalidInputError, match="mode.*error.*overwrite"):
        transformer.export(target, mode="replace")
    classes = transformer.copy({transformer.rawPredictionCol: "raw"})
    for format, suffix in (("saved_model", ""), ("onnx", ".onnx"), ("keras", ".keras")):
        with pytest.raises(InvalidInputError, match=f"'{format}'.*'prediction'.*'raw'.*pipeline"):
            classes.export(f"{target}{suffix}", format=format)
    struct = transformer.copy({transformer.outputForm: "struct"})
    with pytest.raises(InvalidInputError, match="'struct'"):
        struct.export(target)
    eager = one_vector()
    case = CASES["one vector"]
    eager.compile("sgd", "mse", run_eagerly=True)
    leave(tmp_path / "eager", eager, case)
    with pytest.raises(ModelError, match="run_eagerly=True"):
        TFTransformer.from_run(tmp_path / "eager").export(target)
    moved = TFTransformer.from_run(exports.place / "one vector")
    moved._model._shipped = type(moved._model._shipped)(
        replace(moved._model._shipped.recipe(), transforms={"x": lambda value, rng: value})
    )
    with pytest.raises(ModelError, match="'x'.*transform"):
        moved.export(target)
    assert not target.exists()


def test_a_model_of_a_fixed_batch_takes_that_many_rows(tmp_path: Path) -> None:
    x = keras.Input(batch_shape=(4, 3))
    case = Case(lambda: keras.Model(x, x * 2), [Column("x", "float32", (3,))], {})
    leave(tmp_path, case.make(), case)
    TFTransformer.from_run(tmp_path).export(tmp_path / "out")
    rows = reals(3)[:4]
    np.testing.assert_array_equal(score(tmp_path / "out", x=rows)["prediction"], rows * 2)
