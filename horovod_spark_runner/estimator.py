"""`HorovodEstimator`: training of a Keras model or a PyTorch module as a stage of Spark ML."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark.ml import Estimator
from pyspark.ml.util import MLReadable, MLWritable

from .cluster.spark.session import check_running, is_case_sensitive, new_folder
from .config.data import WINDOW_BYTES, DataOptions
from .config.estimator import parse_options, parse_strategy
from .config.importable import (
    by_import_name,
    explain_misfit,
    is_import_name,
    iterate_items,
    refuse_stored_names,
)
from .config.keywords import snake_case, unknown_argument, usage_of, usage_within
from .config.prediction import PredictionSettings
from .config.sync import STRATEGIES
from .config.training import OPTIONS, FitOptions, TrainingConfig
from .config.validators import ColumnNames
from .data.prepare.datasets import Prepared, session_of
from .data.prepare.folds import SharedData, prepare_folds
from .errors import InvalidInputError, brief
from .model.outputs import check_added, check_classes, surely_added
from .model.params import EstimatorParams, camel_case, check_stage_params, prediction_settings
from .model.persistence import EstimatorReader, EstimatorWriter
from .model.transformer import TrainedTransformer
from .run.pipeline import import_ahead, prepare_data, train_run
from .run.resolve import ResolvedRun, resolve
from .storage.filesystem import Location
from .training.spec import FEATURES, LABEL, bind_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_ParamMap = Mapping[Any, Any]

logger = logging.getLogger(__name__)

# Arguments of `run_training` whose Params have another name.
_RENAMED = {"sample_weight_col": "weightCol=…", "validation": "validationFraction=…"}


class HorovodEstimator(Estimator, EstimatorParams, MLReadable, MLWritable):  # type: ignore[misc]
    """Trains a model on a DataFrame with Horovod; its model is a transformer of that framework.

    An estimator of Spark ML: it goes into a ``Pipeline``, a ``CrossValidator`` or a
    ``TrainValidationSplit``, also with ``parallelism`` above 1, and can be saved and loaded. Its
    settings are Params, set by keywords, setters or maps, and validated at once;
    ``explainParams()`` explains each. `run_training` trains as `fit` does, with the same settings.

    A grid searches over the model by ``modelArgs``, the arguments of ``modelFn``. Every fit has a
    separate run directory in ``runDir``.

    Args:
        params: the Params by name, such as ``modelFn=make_model, epochs=3``.

    Raises:
        InvalidInputError: there is no such Param, or its value is invalid.
    """

    def __init__(self, **params: Any) -> None:
        super().__init__()
        self.setParams(**params)

    def setParams(self, **params: Any) -> HorovodEstimator:
        """Set Params by name and return this estimator; ``None`` resets one to its default.

        Args:
            params: the Params by name.

        Raises:
            InvalidInputError: there is no such Param, or its value is invalid.
        """
        for name in params:
            if not self.hasParam(name):
                raise unknown_argument("HorovodEstimator", name, self._usage())
        for name, value in params.items():
            self._assign(name, value)
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
            InvalidInputError: another Param is invalid (the three above are kinds of it).
            EnvironmentProblem: something is not installed or set up.
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
        paramMaps: Sequence[_ParamMap],
    ) -> Iterator[tuple[int, TrainedTransformer]]:
        """Train a model for each map; the rows are prepared once where the maps allow it.

        Args:
            dataset: the rows.
            paramMaps: maps from this estimator's Params to values.

        Returns:
            An iterator over numbers of maps and their models, which threads may share.

        Raises:
            InvalidInputError: a map, or a Param in it, is invalid; before any training.
            NotEnoughSlotsError: Spark cannot run as many tasks at once as a map requests.
            EnvironmentProblem: something is not installed or set up.
        """
        for one in paramMaps:
            check_stage_params(self, one)
        _warn_of_unnamed(paramMaps)
        stages = [self.copy(one) for one in paramMaps]
        place = self._new_place(dataset)
        configs = [
            replace(
                stage._config(dataset, place.join(f"fit-{number:02}")),
                title=_describe_map(paramMaps[number]),
            )
            for number, stage in enumerate(stages)
        ]
        resumed = [config.run_dir for config in configs if config.resume == "required"]
        if len(set(resumed)) < len(resumed):
            raise InvalidInputError(
                "resumeFrom names one run directory for several maps; each fit needs its own"
            )
        return _Fits(stages, _train_several(dataset, configs, place.join("data")))

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
        refuse_stored_names({**code, "data['transforms']": value("data").get("transforms")})
        resume_from = value("resumeFrom")
        features, labels = self._columns(dataset)
        if hasattr(dataset, "sparkSession"):  # other objects are refused with the rest
            added = surely_added(settings, self._outputs(dataset.columns, features, labels))
            by_case = is_case_sensitive(check_running(dataset.sparkSession))
            check_added(added, dataset.columns, settings, by_case=by_case)
        option_objects: dict[str, Any] = {
            name: None if value(name) is None else parse_options(kind, name, value(name))
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
            sync=parse_strategy("sync", value("sync")),
            **option_objects,
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
                f"validationIndicatorCol={column!r} and validationFraction={fraction} both choose "
                "the validation rows; give one of them"
            )
        return fraction if column is None else column

    def _build(self) -> Any:
        """Return the function or file that builds the model, with its arguments."""
        model_fn = self.getOrDefault("modelFn")
        if model_fn is None:
            raise InvalidInputError(
                "modelFn is not set; give a function that returns a compiled keras.Model or a "
                "TorchModel, or the path of a .keras or .json file"
            )
        function, arguments = _imported("modelFn", model_fn), self.getOrDefault("modelArgs")
        if not arguments:
            return function
        if not callable(function):
            raise InvalidInputError(
                f"modelArgs={brief(arguments)} are for a function, but modelFn={model_fn!r} is "
                "a file"
            )
        wrong = explain_misfit(function, **arguments)
        if wrong:
            raise InvalidInputError(f"modelArgs={brief(arguments)} do not fit modelFn: {wrong}")
        return partial(function, **arguments)

    def _new_place(self, dataset: Any) -> Location:
        """Return a new run directory."""
        return new_folder(session_of(dataset), "runDir", "runs", self.getOrDefault("runDir"))

    def _usage(self) -> dict[str, str]:
        """Return how to set each Param, and each setting within one, by its name elsewhere."""
        within = usage_within("sync", *STRATEGIES.values())
        for param, kind in OPTIONS.items():
            within |= {name: f"{param}={{{name!r}: …}}" for name in usage_of(kind)}
        params = {snake_case(one.name): f"{one.name}=…" for one in self.params}
        return {**within, **params, **_RENAMED}


class _Fits(Iterator[tuple[int, TrainedTransformer]]):
    """Iterator that trains a model per step; safe for threads.

    Spark's searches iterate in threads, which continue after the search has ended. So a failed fit,
    such as one that Ctrl-C cancels, is the last one.
    """

    def __init__(self, stages: Sequence[HorovodEstimator], fits: Sequence[_SharedFit]) -> None:
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
    """Return the model that ``train`` returns, with the Params that it shares with ``stage``."""
    trained = train()
    # As in Spark's models: a map of the estimator's Params holds for the model, too.
    trained._resetUid(stage.uid)
    model: TrainedTransformer = stage._copyValues(trained)
    return model


def _describe_map(params: _ParamMap) -> str:
    """Return the values of a map for display; those of ``modelArgs`` by their names."""
    values: dict[str, Any] = {}
    for param, value in params.items():
        values |= value if param.name == "modelArgs" else {param.name: value}
    return ", ".join(f"{name}={brief(value)}" for name, value in values.items())


def _check_of_classes(settings: PredictionSettings) -> Callable[..., None] | None:
    """Return the ranks' check of the model's outputs, if class columns are requested."""
    if settings.probability_col is None and settings.raw_prediction_col is None:
        return None
    return partial(check_classes, settings=settings, whole=True)


def _warn_of_unnamed(maps: Sequence[_ParamMap]) -> None:
    """Warn, before a search begins, of functions in its maps that prevent saving it."""
    pairs = [pair for one in maps for pair in one.items()]
    unnamed = {
        param.name: one for param, value in pairs for one in iterate_items(value) if callable(one)
    }
    for name, one in unnamed.items():
        logger.warning(
            "%s has %s, which has no name that another process could import it by: a search over "
            "it cannot be saved, only its bestModel; define it at the top level of a module, "
            "script or notebook",
            name,
            getattr(one, "__qualname__", repr(one)),
        )


def _imported(name: str, value: Any) -> object:
    return by_import_name(name, value) if is_import_name(value) else value


@dataclass(frozen=True)
class _SharedFit:
    """One of several trainings that share their rows; called once, or abandoned."""

    run: ResolvedRun
    shared: SharedData

    def __call__(self) -> TrainedTransformer:
        use = partial(self.shared.use, _validation_column(self.run))
        return train_run(self.run, use)

    def abandon(self) -> None:
        """Give up this training; the rows are deleted after the last one."""
        self.shared.leave()


def _train_several(
    df: DataFrame, configs: Sequence[TrainingConfig], run_folder: Location
) -> list[_SharedFit]:
    """Resolve all configurations, and return a `_SharedFit` for each.

    They may be called by several threads. Those with equally prepared rows share the datasets,
    which the first of them writes and which are deleted, unless they are kept, after the last one;
    also if they differ in the column of validation rows.

    Args:
        df: the rows.
        configs: the trainings.
        run_folder: folder for the datasets if there is no cache directory.

    Raises:
        InvalidInputError: a training cannot be carried out.
        NotEnoughSlotsError: Spark cannot run as many tasks at once.
        EnvironmentProblem: something is not installed or set up.
    """
    runs = [resolve(df, config) for config in configs]
    groups: list[list[ResolvedRun]] = []
    for run in runs:
        matching = next((group for group in groups if _share_rows(group[0], run)), None)
        if matching is None:
            groups.append([run])
        else:
            matching.append(run)
    fits: dict[int, _SharedFit] = {}
    for number, group in enumerate(groups):
        # In separate folders: the next writer in one deletes incomplete datasets.
        folder = run_folder if len(groups) == 1 else run_folder.join(str(number))
        shared = SharedData(partial(_prepare_group, group, folder), len(group))
        for run in group:
            fits[id(run)] = _SharedFit(run, shared)
    return [fits[id(run)] for run in runs]


def _share_rows(one: ResolvedRun, other: ResolvedRun) -> bool:
    """Return whether the rows of two trainings can be prepared together."""
    ours, theirs = one.config, other.config
    split = ours.validation is theirs.validation
    if _validation_column(one) is not None:
        split = _validation_column(other) is not None
    elif isinstance(ours.validation, float):  # others may be DataFrames, which do not compare
        split = ours.validation == theirs.validation and one.fit.seed == other.fit.seed
    same_options = _row_options(ours.data) == _row_options(theirs.data)
    return split and one.columns.roles == other.columns.roles and same_options


def _validation_column(run: ResolvedRun) -> str | None:
    """Return the column of validation rows, if there is one."""
    validation = run.config.validation
    return validation if isinstance(validation, str) else None


@contextlib.contextmanager
def _prepare_group(
    group: Sequence[ResolvedRun], run_folder: Location
) -> Iterator[Mapping[str | None, Prepared]]:
    first = group[0]
    import_ahead(first)
    names = [name for name in dict.fromkeys(map(_validation_column, group)) if name is not None]
    if len(names) > 1:
        with prepare_folds(
            first.df, first.columns.roles, first.config.data, names, run_folder
        ) as folds:
            yield folds
    else:
        with prepare_data(first, run_folder) as data:
            yield {_validation_column(first): data}


def _row_options(options: DataOptions) -> DataOptions:
    """Return the options that affect the preparation of rows."""
    return replace(options, transforms={}, window_bytes=WINDOW_BYTES)
