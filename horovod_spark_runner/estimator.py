"""`HorovodEstimator`: the training of a Keras model or a PyTorch module as a stage of Spark ML."""

from __future__ import annotations

import difflib
import functools
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from pyspark.ml import Estimator
from pyspark.ml.util import MLReadable, MLWritable

from .cluster.spark.session import check_running, is_case_sensitive, runs_on_this_machine
from .config.estimator import options, sync_of
from .config.importable import (
    by_import_name,
    check_given,
    given_here,
    inside,
    is_import_name,
    misfit,
)
from .config.keywords import advice_on, meant_by
from .config.prediction import PredictionSettings
from .config.sync import WAYS
from .config.training import FitOptions
from .config.training_config import OPTIONS, TrainingConfig
from .config.validators import ColumnNames
from .data.prepare.datasets import session_of
from .errors import InvalidInputError, brief
from .formatting import quote_all
from .model.estimator_files import EstimatorReader, EstimatorWriter
from .model.estimator_params import EstimatorParams
from .model.frame import check_added, surely_added
from .model.outputs import check_classes
from .model.params import camel_case, check_stage_params, prediction_settings
from .model.trained_transformer import TrainedTransformer
from .run.pipeline import train_run
from .run.resolve import resolve
from .run.several import SharedFit, train_several
from .storage.filesystem import Location
from .training.columns import LABEL
from .training.spec import FEATURES, bind_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ParamMap = Mapping[Any, Any]

logger = logging.getLogger(__name__)

# What Params are called that `run_training` takes under another name.
_MEANT = {"sample_weight_col": "weightCol", "validation": "validationFraction"}


class HorovodEstimator(Estimator, EstimatorParams, MLReadable, MLWritable):  # type: ignore[misc]
    """Trains a model on a DataFrame with Horovod; its model is a transformer of that framework.

    An estimator of Spark ML: it goes into a ``Pipeline``, a ``CrossValidator`` or a
    ``TrainValidationSplit``, also with ``parallelism`` above 1, and can be saved and loaded. Its
    settings are Params, given as keywords, by setters or by maps, and checked when they are given;
    ``explainParams()`` tells of each. `run_training` trains as `fit` does, with the same settings.

    A grid searches over what the model is built of by ``modelArgs``, the arguments of ``modelFn``.
    Every fit has a run directory of its own in ``runDir``.

    Args:
        params: the Params by name, such as ``modelFn=make_model, epochs=3``.

    Raises:
        InvalidInputError: there is no such Param, or its value cannot be right.
    """

    def __init__(self, **params: Any) -> None:
        super().__init__()
        self.setParams(**params)

    def setParams(self, **params: Any) -> HorovodEstimator:
        """Set Params by name and return this estimator; ``None`` takes back what was set.

        Args:
            params: the Params by name.

        Raises:
            InvalidInputError: there is no such Param, or its value cannot be right.
        """
        for name in params:
            if not self.hasParam(name):
                raise InvalidInputError(self._no_such(name))
        for name, value in params.items():
            if value is None:
                self.clear(self.getParam(name))
            else:
                self._set(**{name: value})
                param = self.getParam(name)
                self._paramMap[param] = given_here(self._paramMap[param])
        return self

    def fit(self, dataset: DataFrame, params: Any = None) -> Any:
        """Train on a DataFrame.

        Args:
            dataset: the rows.
            params: a map from this estimator's Params to values that hold for this fit, or a list
                of maps, for each of which a model is trained.

        Returns:
            The `TFTransformer` or `TorchTransformer`, or a list of them.

        Raises:
            DataError: columns, types or values cannot be trained on.
            ModelError: the model cannot be trained on these columns.
            RunDirectoryError: ``runDir`` cannot be used, or ``resumeFrom`` holds no such run.
            InvalidInputError: another Param cannot be right (the three above are kinds of it).
            EnvironmentProblem: something is not installed or set up as it must be.
            NotEnoughSlotsError: Spark cannot run ``numWorkers`` tasks at once.
            RunFailedError: the run ended without a model; see `run_training` for its kinds.
        """
        if params is not None and not isinstance(params, (Mapping, list, tuple)):
            raise InvalidInputError(
                "params must be a map from Params to values, or a list of maps, got "
                f"{brief(params)}"
            )
        for one in (params,) if isinstance(params, Mapping) else params or ():
            check_stage_params(self, one)
        return super().fit(dataset, dict(params) if isinstance(params, Mapping) else params)

    def fitMultiple(
        self,
        dataset: DataFrame,
        paramMaps: Sequence[ParamMap],
    ) -> Iterator[tuple[int, TrainedTransformer]]:
        """Train a model for each map; the rows are prepared once where the maps allow it.

        Args:
            dataset: the rows.
            paramMaps: maps from this estimator's Params to values.

        Returns:
            An iterator over numbers of maps and their models, which threads may share.

        Raises:
            InvalidInputError: a map, or a Param in it, cannot be right; before any training.
            NotEnoughSlotsError: Spark cannot run as many tasks at once as a map asks for.
            EnvironmentProblem: something is not installed or set up as it must be.
        """
        for one in paramMaps:
            check_stage_params(self, one)
        _tell_of_unnamed(paramMaps)
        stages = [self.copy(one) for one in paramMaps]
        place = self._new_place(dataset)
        configs = [
            stage._config(dataset, place.join(f"fit-{number:02}"))
            for number, stage in enumerate(stages)
        ]
        resumed = [config.run_dir for config in configs if config.resume == "required"]
        if len(set(resumed)) < len(resumed):
            raise InvalidInputError(
                "resumeFrom names one run directory for several maps; each fit needs its own"
            )
        return _Fits(stages, train_several(dataset, configs, place.join("data")))

    def write(self) -> EstimatorWriter:
        """Return the writer; ``write().overwrite().save(path)`` replaces what is there.

        Its ``save`` refuses, by name, functions and classes that another process cannot import.

        Raises:
            InvalidInputError: at ``save``, a Param holds what cannot be saved.
            RunDirectoryError: at ``save``, there is something at the path already.
        """
        return EstimatorWriter(self)

    @classmethod
    def read(cls) -> EstimatorReader:
        """Return the reader; ``HorovodEstimator.load(path)`` is ``read().load(path)``.

        Raises:
            InvalidInputError: at ``load``, there is another stage, or one of a newer format.
            RunDirectoryError: at ``load``, there is none, or it is damaged.
        """
        return EstimatorReader(cls)

    def _fit(self, dataset: DataFrame) -> TrainedTransformer:
        config = self._config(dataset)
        return _model(self, lambda: train_run(resolve(dataset, config)))

    def _config(self, dataset: DataFrame, place: Location | None = None) -> TrainingConfig:
        """Return the configuration of a training in ``place``, by default a new folder."""
        settings = prediction_settings(self)
        value = self.getOrDefault
        code = {name: value(name) for name in ("modelFn", "customObjects", "callbacks")}
        check_given({**code, "data['transforms']": value("data").get("transforms")})
        resume_from = value("resumeFrom")
        features, labels = self._columns(dataset)
        if hasattr(dataset, "sparkSession"):  # what is no DataFrame is told of with the rest
            added = surely_added(settings, self._outputs(dataset.columns, features, labels))
            by_case = is_case_sensitive(check_running(dataset.sparkSession))
            check_added(added, dataset.columns, settings, by_case=by_case)
        given: dict[str, Any] = {
            name: None if value(name) is None else options(kind, name, value(name))
            for name, kind in OPTIONS.items()
        }
        return TrainingConfig(
            model_fn=self._build(),
            feature_cols=features,
            label_cols=labels,
            num_workers=value("numWorkers"),
            gpus_per_worker=value("gpusPerWorker"),
            stream_logs=value("streamLogs"),
            sample_weight_col=value("weightCol"),
            validation=self._validation(),
            custom_objects={
                name: _imported(f"customObjects[{name!r}]", one)
                for name, one in value("customObjects").items()
            },
            callbacks=_imported("callbacks", value("callbacks")),
            run_dir=resume_from or str(place or self._new_place(dataset)),
            resume="never" if resume_from is None else "required",
            initial_weights=value("initialWeights"),
            check_outputs=_check_of_classes(settings),
            fit=FitOptions(**{one.name: value(camel_case(one.name)) for one in fields(FitOptions)}),
            sync=sync_of("sync", value("sync")),
            **given,
        )

    def _columns(self, dataset: DataFrame) -> tuple[ColumnNames | None, ColumnNames | None]:
        """Return feature and label columns as `run_training` takes them; its conventions hold."""
        features, labels = self.getOrDefault("featureCols"), self.getOrDefault("labelCols")
        label = self.getOrDefault("labelCol")
        if labels is not None and self.isSet("labelCol"):
            raise InvalidInputError(
                f"labelCol={label!r} and labelCols={brief(labels)} both name the label columns; "
                "give one of them"
            )
        if features is None and self.isSet("featuresCol"):
            features = [self.getOrDefault("featuresCol")]
        by_default = features is not None and label in getattr(dataset, "columns", ())
        if labels is None and (self.isSet("labelCol") or by_default):
            labels = [label]
        return features, labels

    def _outputs(
        self, available: Sequence[str], features: ColumnNames | None, labels: ColumnNames | None
    ) -> int | None:
        """Return how many outputs are compared with labels; ``None`` if that is not yet known."""
        if features is None and labels is None and FEATURES in available and LABEL in available:
            return 1
        return None if labels is None else len(bind_columns(labels, "label_cols").slots)

    def _validation(self) -> str | float | None:
        column: str | None = self.getOrDefault("validationIndicatorCol")
        fraction: float | None = self.getOrDefault("validationFraction")
        if column is not None and fraction is not None:
            raise InvalidInputError(
                f"validationIndicatorCol={column!r} and validationFraction={fraction} both say "
                "which rows to validate with; give one of them"
            )
        return fraction if column is None else column

    def _build(self) -> Any:
        """Return what builds the model, with its arguments."""
        given = self.getOrDefault("modelFn")
        if given is None:
            raise InvalidInputError(
                "modelFn is not set; give a function that returns a compiled keras.Model or a "
                "TorchModel, or the path of a .keras or .json file"
            )
        function, arguments = _imported("modelFn", given), self.getOrDefault("modelArgs")
        if not arguments:
            return function
        if not callable(function):
            raise InvalidInputError(
                f"modelArgs={brief(arguments)} are for a function, but modelFn={given!r} is a file"
            )
        wrong = misfit(function, **arguments)
        if wrong:
            raise InvalidInputError(f"modelArgs={brief(arguments)} do not fit modelFn: {wrong}")
        return functools.partial(function, **arguments)

    def _new_place(self, dataset: Any) -> Location:
        """Return a run directory that nobody has."""
        base = self.getOrDefault("runDir")
        if base is None:
            if not runs_on_this_machine(session_of(dataset)):
                raise InvalidInputError(
                    "runDir is needed on a cluster: a folder or URL that the driver and all "
                    "executors can write to"
                )
            base = "runs"
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
        return Location(base).join(name)

    def _no_such(self, name: str) -> str:
        known, meant = [one.name for one in self.params], meant_by(name)
        param = _MEANT.get(meant) or camel_case(meant)
        within = [one for one, kind in OPTIONS.items() if meant in kind.__dataclass_fields__]
        ways = [way for way in WAYS.values() if meant in way.__dataclass_fields__]
        near = difflib.get_close_matches(name, known, n=3)
        if advice_on(name):
            advice = advice_on(name).replace("model_fn", "modelFn")
        elif param in known:
            advice = f"give {param}=…"
        elif within:
            advice = f"give {within[0]}={{{meant!r}: …}}"
        elif ways:
            advice = f"give sync={ways[0].__name__}({meant}=…)"
        else:
            advice = f"is it {quote_all(near)}?" if near else f"there are {', '.join(known)}"
        return f"HorovodEstimator has no Param {name!r}; {advice}"


class _Fits(Iterator[tuple[int, TrainedTransformer]]):
    """Models that are trained when they are asked for, each once; safe for threads.

    Spark's searches ask from threads of their own, which go on after the search has ended. So a fit
    that fails, as the one that Ctrl-C cancels does, is the last one.
    """

    def __init__(self, stages: Sequence[HorovodEstimator], fits: Sequence[SharedFit]) -> None:
        self._waiting = deque(enumerate(zip(stages, fits, strict=True)))
        self._lock = threading.Lock()

    def __next__(self) -> tuple[int, TrainedTransformer]:
        with self._lock:
            if not self._waiting:
                raise StopIteration
            number, (stage, fit) = self._waiting.popleft()
        try:
            return number, _model(stage, fit)
        except BaseException:
            with self._lock:
                while self._waiting:
                    self._waiting.pop()[1][1].abandon()
            raise


def _model(stage: HorovodEstimator, train: Callable[[], TrainedTransformer]) -> TrainedTransformer:
    """Return the model that ``train`` gives, with the Params that it shares with ``stage``."""
    trained = train()
    # As Spark's own models do: a map of the estimator's Params holds for the model, too.
    trained._resetUid(stage.uid)
    model: TrainedTransformer = stage._copyValues(trained)
    return model


def _check_of_classes(settings: PredictionSettings) -> Callable[..., None] | None:
    """Return what ranks are to check of the model's outputs, if that is more than any model's."""
    if settings.probability_col is None and settings.raw_prediction_col is None:
        return None
    return functools.partial(check_classes, settings=settings, whole=True)


def _tell_of_unnamed(maps: Sequence[ParamMap]) -> None:
    """Warn of functions that keep a search over these maps from being saved, before it begins."""
    pairs = [pair for one in maps for pair in one.items()]
    unnamed = {param.name: one for param, value in pairs for one in inside(value) if callable(one)}
    for name, one in unnamed.items():
        logger.warning(
            "%s has %s, which has no name that another process could import it by: a search over "
            "it cannot be saved, only its bestModel; define it at the top level of a module, "
            "script or notebook",
            name,
            getattr(one, "__qualname__", repr(one)),
        )


def _imported(name: str, given: Any) -> Any:
    return by_import_name(name, given) if is_import_name(given) else given
