"""A trained model on the driver: read from a run directory, never loaded."""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..checkpoint.retry_policy import Attempt
from ..checkpoint.run_directory import RunDirectory
from ..cluster.protocol.topology import RankPlacement
from ..cluster.spark.tasks import query_worker
from ..config.data import Transform
from ..config.validators import ColumnNames, check_count, check_flag
from ..errors import (
    DataError,
    InvalidInputError,
    ModelError,
    RunDirectoryError,
    brief,
)
from ..formatting import quote_all
from ..frameworks import FRAMEWORKS, KERAS, transformer_of
from ..observe.notebook import facts_of_training, never_failing, training_html
from ..serialize import check_picklable
from ..storage.contents import Contents
from ..training.engine import engine_named, engine_of
from ..training.sample_rows import SAMPLE_FILE
from ..training.spec import ModelSource, OutputSpec, bind_columns, check_model_fn, check_objects
from ..training.trained_model import (
    Recipe,
    StoredModel,
    copy_model,
    read_model,
    with_checkpoint,
    with_model_fn,
)
from ..typed_json import read_fields
from .features import feature_names
from .inference import Predictor, describing
from .shipping import ShippedModel

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ..config.prediction import PredictionSettings


@dataclass(frozen=True)
class TrainingSummary:
    """The training that a model comes from.

    Attributes:
        run_dir: path or URL of the run directory.
        history: metrics of each epoch, over all ranks.
        placement: where the ranks ran; empty for a model that was read from a run directory.
        timings: seconds per phase of the run, one after the other: ``prepare`` (checks),
            ``materialize``, ``attempts`` (earlier ones, and the pauses between), ``check``,
            ``slots``, ``tasks``, ``rendezvous``, ``start``, ``function``, ``results`` (of the last
            attempt; see `RunResult`) and ``load``; in all ``total``. Of ``function``, on rank 0:
            ``build``, ``epochs``, ``save``. Of ``epochs``, and summing up to it: ``first_step``,
            ``data`` (waiting for the reader), ``compute``, ``exchange`` (with other ranks, and
            waiting for them), or both as ``step`` where a framework does not tell them apart,
            ``callbacks`` (and the loop itself), ``validation``, ``agree`` (on metrics and what is
            next) and ``checkpoint``; what took no time is not there. Besides, ``train`` (the part
            of ``epochs`` from the first step of an epoch to the last) and its
            ``samples_per_second``. Empty for a model that was read from a run directory.
        attempts: the attempts the run took; empty for a model that was read from a run directory.
        traffic: bytes that the ranks of the last attempt have sent in their steps, all together:
            ``bytes_sent``, and ``bytes_uncompressed``, what ``Allreduce()`` would have sent;
            counted as a ring of the ranks sends them. Empty for a model that was read from a run
            directory.
        staleness: with ``sync=AsyncServer(…)``, how many updates of the last attempt came 0, 1, …
            updates of other ranks after the weights they change had been taken; else empty.
        weights: description of the epoch that the model's weights are of; empty for a model that
            was read from a run directory.
    """

    run_dir: str
    history: Sequence[Mapping[str, Any]] = ()
    placement: tuple[RankPlacement, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)
    attempts: tuple[Attempt, ...] = ()
    traffic: Mapping[str, int] = field(default_factory=dict)
    staleness: tuple[int, ...] = ()
    weights: str = ""

    @never_failing
    def _repr_html_(self) -> str:
        return self.html("training")

    def html(self, title: str) -> str:
        """Return the summary as HTML, for notebooks; no storage is read.

        Args:
            title: heading.
        """
        seconds = self.timings.get("total")
        hosts = [rank.host for rank in self.placement]
        facts = facts_of_training(self.run_dir, seconds, hosts, self.weights)
        return training_html(title, facts, self.history)


@dataclass(frozen=True)
class _TrainedModel:
    """A trained model, and how to make it again.

    Attributes:
        recipe: how; without outputs for a model that cannot be called.
        problem: why it could not be called when it was saved; ``""`` if it could.
        learn_outputs: whether it is built by a function that may build another model, or one with
            a ``call`` that the trained one had not: what it gives has to be found out.
        stored: its files.
    """

    recipe: Recipe = field(repr=False)
    stored: StoredModel = field(repr=False)
    problem: str = ""
    learn_outputs: bool = False

    @property
    def place(self) -> str:
        """The location, for messages."""
        return str(self.stored.directory.location)


def read_trained_model(
    directory: RunDirectory,
    source: ModelSource,
    saved: object,
    transforms: Mapping[str, Transform],
) -> _TrainedModel:
    """Return the model of a run that has just ended.

    Args:
        directory: its run directory.
        source: what the model was built from.
        saved: what rank 0 says of it.
        transforms: what to do with a column's values, by its name.
    """
    model = read_model(directory)
    recipe = _make_recipe(model, source.engine, transforms, source)
    parts = engine_named(source.engine).parts(model, source, saved, {})
    return _trained(model, replace(recipe, parts=parts))


def adopt_model(
    engine: str,
    model: object,
    feature_cols: ColumnNames | None,
    custom_objects: Mapping[str, object] | None = None,
    signature: str = "",
) -> _TrainedModel:
    """Return a model that was trained elsewhere.

    Args:
        engine: the engine that makes it again.
        model: the model, or the path or URL of its file.
        feature_cols: the columns of its inputs.
        custom_objects: the model's own classes and functions by name.
        signature: see `Engine.adopt`; its files suffice then.

    Raises:
        ModelError: it cannot be predicted with.
        InvalidInputError: an argument cannot be used.
    """
    objects = check_objects(custom_objects)
    inputs = None if feature_cols is None else bind_columns(feature_cols, "feature_cols")
    with tempfile.TemporaryDirectory() as folder:
        directory = RunDirectory(folder)
        saved = engine_named(engine).adopt(directory, model, inputs, objects, signature)
        if signature:
            return read_finished_run(directory, engine=engine, trusted=True)
        source = ModelSource(custom_objects=objects, engine=engine)
        return read_trained_model(directory, source, saved, {})


def read_finished_run(
    directory: RunDirectory,
    *,
    engine: str = KERAS,
    custom_objects: Mapping[str, object] | None = None,
    model_fn: Callable[[], object] | None = None,
    transforms: Mapping[str, Transform] | None = None,
    trusted: bool = False,
    checkpoint: int | None = None,
) -> _TrainedModel:
    """Return the model that an earlier run left in its directory.

    Args:
        directory: the run directory.
        engine: the engine whose models are wanted, unless ``model_fn`` says another.
        custom_objects: the model's own classes and functions by name.
        model_fn: builds the model, if it is to be built and given its weights.
        transforms: the functions its columns were trained with; those of other columns, as of other
            stages of a pipeline, are left out.
        trusted: whether code that the files hold may be run.
        checkpoint: steps after which the checkpoint was taken whose weights are meant.

    Raises:
        RunDirectoryError: there is no finished model, or it needs the user's code; or there is no
            such checkpoint.
        DataError: a transform that the model was trained with is missing.
        InvalidInputError: an argument cannot be used.
    """
    custom_objects, transforms = check_objects(custom_objects), dict(transforms or {})
    trusted = check_flag("trusted", trusted)
    if model_fn is not None and not callable(model_fn):
        raise InvalidInputError(
            "model_fn must be a function without arguments that returns the model, got "
            f"{brief(model_fn)}"
        )
    if model_fn is not None:
        check_model_fn(model_fn)
    check_picklable(
        {"model_fn": model_fn, "custom_objects": custom_objects, "transforms": transforms}
    )
    with _reading(directory):
        model = read_model(directory)
        if checkpoint is not None:
            model = with_checkpoint(model, check_count("checkpoint", checkpoint, 0))
    signature = model.signature
    missing = [name for name in signature.transforms if name not in transforms]
    if missing:
        raise DataError(
            f"the model in {directory.location} was trained with transforms of column "
            f"{quote_all(missing)}; functions are not kept in storage: give them, transforms={{…}}"
        )
    needed = {*signature.transforms, *(signature.targets.transforms if signature.targets else ())}
    transforms = {name: one for name, one in transforms.items() if name in needed}
    wanted, engine = transformer_of(engine), engine_of(model_fn, engine)
    if signature.engine in FRAMEWORKS and wanted != transformer_of(signature.engine):
        raise RunDirectoryError(
            f"the model in {directory.location} was trained by the engine {signature.engine!r}: "
            f"read it with {transformer_of(signature.engine)}, not with {wanted}"
        )
    if engine != signature.engine:
        raise RunDirectoryError(
            f"the model in {directory.location} was trained by the engine {signature.engine!r}, "
            "and nothing that storage names is imported; give the function that builds it, which "
            f"says that engine: {with_model_fn(engine)}"
        )
    source = None if model_fn is None else ModelSource(function=model_fn, engine=engine)
    with _reading(directory):
        recipe = _make_recipe(model, engine, transforms, source)
        if signature.outputs is None and model_fn is None:
            return _trained(model, recipe)
        parts = engine_named(engine).parts(model, source, None, custom_objects, trusted)
    trained = _trained(model, replace(recipe, parts=parts))
    return replace(trained, learn_outputs=model_fn is not None)


@contextlib.contextmanager
def _reading(directory: RunDirectory) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(
            f"the model in {directory.location} cannot be read: {error}"
        ) from error


def _check_callable(model: _TrainedModel) -> None:
    """Check that there is something to predict with.

    Raises:
        ModelError: the model cannot be called.
    """
    if not model.recipe.outputs:
        raise ModelError(
            f"the model in {model.place} cannot predict: {model.problem}. Its weights are in "
            "model/weights.npz, in the order of the names in model/signature.json (numpy.load). To "
            "predict with it, give its class what is called, call() in Keras and forward() in "
            f"PyTorch, and the function that builds it: {with_model_fn(model.recipe.engine)}"
        )


def _trained(model: StoredModel, recipe: Recipe) -> _TrainedModel:
    return _TrainedModel(recipe, model, model.signature.problem)


def _make_recipe(
    model: StoredModel,
    engine: str,
    transforms: Mapping[str, Transform],
    source: ModelSource | None,
) -> Recipe:
    signature = model.signature
    return Recipe(
        engine=engine,
        inputs=signature.inputs,
        columns=signature.columns,
        outputs=signature.outputs or (),
        transforms=dict(transforms),
        batch_size=signature.batch_size,
        targets=signature.targets,
        sample=model.sample(strict=source is not None),
    )


class ModelHandle:
    """A model as bytes for Spark's workers, and its metadata; thread-safe.

    It can be pickled and copied.

    Args:
        model: the model, with its contents.
    """

    def __init__(self, model: _TrainedModel) -> None:
        self._shipped = ShippedModel(model.recipe)
        self._metadata = replace(model, recipe=_without_contents(model.recipe))
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    @property
    def metadata(self) -> _TrainedModel:
        """Metadata of the model, without loading it."""
        return self._metadata

    def model(self) -> Any:
        """Return the framework's model, on the driver; see `Engine.model`."""
        recipe = self._shipped.recipe()
        return engine_named(recipe.engine).model(recipe)

    def whole(self) -> Recipe:
        """Return all parts and outputs of the model; the framework may be loaded.

        Raises:
            ModelError: the model cannot be called, or is not the one that was trained.
        """
        recipe = self._shipped.recipe()
        metadata = self._metadata
        if metadata.learn_outputs and not recipe.outputs:
            described, problem = engine_named(recipe.engine).describe_outputs(recipe)
            outputs = tuple(read_fields(one, OutputSpec) for one in described)
            metadata = replace(metadata, recipe=replace(recipe, outputs=outputs), problem=problem)
        _check_callable(metadata)
        return replace(recipe, outputs=metadata.recipe.outputs)

    def save(self, directory: RunDirectory) -> None:
        """Write the model's files.

        Raises:
            RunDirectoryError: the files it was read from are gone, and what is in memory is not
                enough.
            OSError: storage fails.
        """

        def held() -> Mapping[str, bytes | Contents]:
            recipe = self._shipped.recipe()
            sample = {} if recipe.sample is None else {SAMPLE_FILE: recipe.sample}
            files = engine_named(recipe.engine).stored_files(recipe.parts)
            return {**sample, **files} if files else {}

        copy_model(self._metadata.stored, directory, held)

    def predictor(self, spark: SparkSession, settings: PredictionSettings) -> Predictor:
        """Return the predictor for the workers of a session.

        Raises:
            ModelError: the model cannot be called, or is not the one that was trained.
            InvalidInputError: other feature columns are named than it takes.
        """
        with self._lock:  # also so that it is sent once
            if self._metadata.learn_outputs:
                self.learn_outputs(spark)
            _check_callable(self._metadata)
            load = self._shipped.loader(spark)
        recipe = self._metadata.recipe
        return Predictor(
            digest=self._shipped.digest,
            load=load,
            columns=recipe.columns,
            outputs=recipe.outputs,
            batch_size=settings.predict_batch_size,
            handle_invalid=settings.handle_invalid,
            names=feature_names(settings, recipe.inputs, recipe.columns),
        )

    def learn_outputs(self, spark: SparkSession) -> None:
        """Determine the model's outputs in a worker; the driver loads no framework.

        Raises:
            ModelError: what its function builds is not the model that was trained.
        """
        answer = query_worker(spark, describing(self._shipped.loader(spark)), keep=True)
        outputs, problem, wrong = json.loads(answer)
        if wrong:
            raise ModelError(f"{wrong} (run {self._metadata.place})")
        recipe = self._metadata.recipe
        if not recipe.outputs:
            recipe = replace(recipe, outputs=tuple(read_fields(one, OutputSpec) for one in outputs))
        self._metadata = replace(
            self._metadata, recipe=recipe, problem=problem, learn_outputs=not outputs
        )


def _without_contents(recipe: Recipe) -> Recipe:
    """Return a recipe without contents, for the driver."""
    return replace(recipe, parts=None, transforms={}, sample=None)
