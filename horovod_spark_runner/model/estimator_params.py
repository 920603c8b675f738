"""Spark ML's Params of `HorovodEstimator`: the table of settings, a line for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..config.estimator import EstimatorSettings
from ..config.launch import LaunchSettings
from ..config.training import FitOptions
from .params import PredictionParams, converted, param, set_defaults

Getter = Callable[[Any], Any]
Setter = Callable[[Any, Any], Any]


def _accessors(name: str) -> tuple[Getter, Setter]:
    """Return the getter and the setter of the Param ``name``."""

    def get(self: Any) -> Any:
        return self.getOrDefault(name)

    def set_to(self: Any, value: Any) -> Any:
        return self.setParams(**{name: value})

    title = name[0].upper() + name[1:]
    for function, prefix, text in (
        (get, "get", f"Return the value of `{name}`, or its default."),
        (set_to, "set", f"Set `{name}`, or with None take it back, and return this estimator."),
    ):
        function.__name__ = f"{prefix}{title}"
        function.__qualname__ = f"EstimatorParams.{prefix}{title}"
        function.__doc__ = text
    return get, set_to


class EstimatorParams(PredictionParams):
    """Params of the estimator: its training, and its model's columns."""

    modelFn = param(EstimatorSettings, "model_fn")
    getModelFn, setModelFn = _accessors("modelFn")
    modelArgs = param(EstimatorSettings, "model_args")
    getModelArgs, setModelArgs = _accessors("modelArgs")
    customObjects = param(EstimatorSettings, "custom_objects")
    getCustomObjects, setCustomObjects = _accessors("customObjects")
    callbacks = param(EstimatorSettings, "callbacks")
    getCallbacks, setCallbacks = _accessors("callbacks")
    initialWeights = param(EstimatorSettings, "initial_weights")
    getInitialWeights, setInitialWeights = _accessors("initialWeights")

    labelCol = param(EstimatorSettings, "label_col")
    getLabelCol, setLabelCol = _accessors("labelCol")
    labelCols = param(EstimatorSettings, "label_cols")
    getLabelCols, setLabelCols = _accessors("labelCols")
    weightCol = param(EstimatorSettings, "weight_col")
    getWeightCol, setWeightCol = _accessors("weightCol")
    validationIndicatorCol = param(EstimatorSettings, "validation_indicator_col")
    getValidationIndicatorCol, setValidationIndicatorCol = _accessors("validationIndicatorCol")
    validationFraction = param(EstimatorSettings, "validation_fraction")
    getValidationFraction, setValidationFraction = _accessors("validationFraction")

    numWorkers = param(LaunchSettings, "num_workers")
    getNumWorkers, setNumWorkers = _accessors("numWorkers")
    gpusPerWorker = param(LaunchSettings, "gpus_per_worker")
    getGpusPerWorker, setGpusPerWorker = _accessors("gpusPerWorker")
    streamLogs = param(LaunchSettings, "stream_logs")
    getStreamLogs, setStreamLogs = _accessors("streamLogs")

    batchSize = param(FitOptions, "batch_size")
    getBatchSize, setBatchSize = _accessors("batchSize")
    epochs = param(FitOptions, "epochs")
    getEpochs, setEpochs = _accessors("epochs")
    stepsPerEpoch = param(FitOptions, "steps_per_epoch")
    getStepsPerEpoch, setStepsPerEpoch = _accessors("stepsPerEpoch")
    validationFreq = param(FitOptions, "validation_freq")
    getValidationFreq, setValidationFreq = _accessors("validationFreq")
    classWeight = param(FitOptions, "class_weight")
    getClassWeight, setClassWeight = _accessors("classWeight")
    seed = param(FitOptions, "seed")
    getSeed, setSeed = _accessors("seed")
    shuffle = param(FitOptions, "shuffle")
    getShuffle, setShuffle = _accessors("shuffle")
    lrScaling = param(FitOptions, "lr_scaling")
    getLrScaling, setLrScaling = _accessors("lrScaling")
    warmupEpochs = param(FitOptions, "warmup_epochs")
    getWarmupEpochs, setWarmupEpochs = _accessors("warmupEpochs")

    runDir = param(EstimatorSettings, "run_dir")
    getRunDir, setRunDir = _accessors("runDir")
    resumeFrom = param(EstimatorSettings, "resume_from")
    getResumeFrom, setResumeFrom = _accessors("resumeFrom")

    data = param(EstimatorSettings, "data")
    getData, setData = _accessors("data")
    checkpoints = param(EstimatorSettings, "checkpoints")
    getCheckpoints, setCheckpoints = _accessors("checkpoints")
    restarts = param(EstimatorSettings, "restarts")
    getRestarts, setRestarts = _accessors("restarts")
    launch = param(EstimatorSettings, "launch")
    getLaunch, setLaunch = _accessors("launch")
    sync = param(EstimatorSettings, "sync")
    getSync, setSync = _accessors("sync")
    mlflow = param(EstimatorSettings, "mlflow")
    getMlflow, setMlflow = _accessors("mlflow")

    def __init__(self) -> None:
        super().__init__()
        for settings in (EstimatorSettings, FitOptions, LaunchSettings):
            set_defaults(self, settings)
        self._setDefault(featuresCol="features")

    def _set(self, **values: Any) -> EstimatorParams:
        # Converters name functions, for grids; a stage keeps what it was given.
        for name, value in values.items():
            one = self.getParam(name)
            self._paramMap[one] = converted(one, value)
        return self
