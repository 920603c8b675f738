"""Log a training to MLflow: parameters, metrics of every epoch while it runs, and the model.

The driver logs, in a separate thread: the training never waits for MLflow, and no failure of MLflow
ends it.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import queue
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass
from zlib import crc32

from ..checkpoint.run_directory import RunDirectory
from ..cluster.protocol.messages import Progress
from ..config.training import MlflowOptions
from ..errors import (
    EnvironmentProblem,
    HorovodSparkError,
    InvalidInputError,
    RunCancelledError,
    on_one_line,
)
from ..storage.filesystem import Location
from ..storage.paths import redact_url
from ..training.progress import numbers
from .event_files import beside

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

T = TypeVar("T")

# Timeouts of MLflow: for answers before the training, for the rest, with the model, at its end, and
# after a failure.
_ANSWER_SECONDS, _END_SECONDS, _FAIL_SECONDS = 60.0, 600.0, 10.0
_CONNECT_SECONDS = 10.0
# MLflow's limits: entries of a batch, characters of a value.
_BATCH, _VALUE = 100, 6000
_SAFE = frozenset("_-. :/")

logger = logging.getLogger(__name__)


def check_tracking(options: MlflowOptions) -> tuple[MlflowClient, str]:
    """Return MLflow's client and the experiment's identity, after MLflow has answered.

    Raises:
        EnvironmentProblem: MLflow is not installed.
        InvalidInputError: it does not answer, or refuses the settings.
    """
    try:
        from mlflow import MlflowClient, get_tracking_uri
    except ImportError as error:
        raise EnvironmentProblem(
            "mlflow=MlflowOptions(…) needs MLflow on the driver: "
            "pip install 'horovod_spark_runner[mlflow]'"
        ) from error

    _check_reachable(options.tracking_uri or str(get_tracking_uri()))

    def ask() -> tuple[MlflowClient, str]:
        client = MlflowClient(options.tracking_uri)
        name = options.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            return client, str(client.create_experiment(name))
        if experiment.lifecycle_stage != "active":
            raise InvalidInputError(f"mlflow: the experiment {name!r} is deleted; restore it")
        return client, str(experiment.experiment_id)

    return _answer(ask, options)


def _check_reachable(uri: str) -> None:
    """Check that the server is reachable; MLflow itself tries for minutes."""
    parts = urlsplit(uri)
    host = parts.hostname
    if parts.scheme not in ("http", "https") or host is None:
        return
    if parts.scheme in getproxies() and not proxy_bypass(host):
        return
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise InvalidInputError(
            f"mlflow: {redact_url(uri)} cannot be reached: {error}; check tracking_uri and "
            "the driver's network"
        ) from None


def _answer(ask: Callable[[], T], options: MlflowOptions) -> T:
    """Return the result of ``ask``, within `_ANSWER_SECONDS`: MLflow itself tries for minutes."""
    done: Future[T] = Future()

    def work() -> None:
        try:
            done.set_result(ask())
        except Exception as error:  # whatever MLflow and its stores raise
            done.set_exception(error)

    threading.Thread(target=work, name="hsr-mlflow-ask", daemon=True).start()
    where = redact_url(options.tracking_uri or "its own default (MLFLOW_TRACKING_URI)")
    wait([done], _ANSWER_SECONDS)
    if not done.done():
        raise InvalidInputError(
            f"mlflow: {where} did not answer within {_ANSWER_SECONDS:.0f} s; check tracking_uri "
            "and the driver's network"
        )
    try:
        return done.result()
    except HorovodSparkError:
        raise
    except Exception as error:
        description = _describe_error(error, options)
        raise InvalidInputError(f"mlflow: {where} cannot be used: {description}") from None


def begin_tracking(
    connection: tuple[MlflowClient, str] | None,
    options: MlflowOptions | None,
    directory: RunDirectory,
    settings: Mapping[str, Any],
) -> _Tracking | None:
    """Return the `_Tracking` of a training; ``None`` if it is not requested."""
    if connection is None or options is None:
        return None
    # By the names of `run_training`'s arguments.
    params = {**settings["fit"], **{name: v for name, v in settings.items() if name != "fit"}}
    return _Tracking(connection, options, directory, params)


class _Tracking:
    """Logs one training to MLflow, into the run of its earlier parts if there is one.

    Args:
        connection: result of `check_tracking`.
        options: options of logging.
        directory: the run directory, which stores the identity of MLflow's run.
        settings: settings of the training.

    Raises:
        InvalidInputError: MLflow refuses the run.
    """

    def __init__(
        self,
        connection: tuple[MlflowClient, str],
        options: MlflowOptions,
        directory: RunDirectory,
        settings: Mapping[str, object],
    ) -> None:
        self._client, self._experiment = connection
        self._options = options
        self._directory = directory
        self._failed = False
        self._logged: dict[tuple[str, int], float] = {}
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.run_id: str = _answer(lambda: self._begin(settings), options)
        self._thread = threading.Thread(target=self._serve, name="hsr-mlflow", daemon=True)
        self._thread.start()

    # -- before the first step -----------------------------------------------------------------

    def _begin(self, settings: Mapping[str, object]) -> str:
        run = self._earlier()
        if run is None:
            name = self._options.run_name or self._directory.location.name
            tags = dict(self._options.tags)
            run = self._client.create_run(self._experiment, run_name=name, tags=tags)
            self._directory.write_mlflow_run(run.info.run_id)
        else:
            self._client.update_run(run.info.run_id, status="RUNNING")
            for key, value in self._options.tags.items():
                self._client.set_tag(run.info.run_id, key, value)
            for key in run.data.metrics:
                for point in self._client.get_metric_history(run.info.run_id, key):
                    self._logged[key, point.step] = point.value
        self._log_params(run, settings)
        return str(run.info.run_id)

    def _earlier(self) -> Run | None:
        """Return MLflow's run of an earlier part; ``None`` if there is none in the experiment."""
        run_id = self._directory.mlflow_run()
        if run_id is None:
            return None
        from mlflow.exceptions import MlflowException

        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            logger.warning("MLflow no longer has the run %s; a new one is started", run_id)
            return None
        same = run.info.experiment_id == self._experiment
        return run if same and run.info.lifecycle_stage == "active" else None

    def _log_params(self, run: Run, settings: Mapping[str, object]) -> None:
        from mlflow.entities import Param, RunTag

        params, changed = [], []
        logged = run.data.params
        for key, value in _flat("", settings):
            name, text = _name(key), redact_url(str(value))[:_VALUE]
            before = logged.get(name)
            if before is None:
                params.append(Param(name, text))
            elif before != text:  # MLflow cannot change a parameter
                changed.append(RunTag(f"resumed.{name}", text))
        for begin in range(0, len(params), _BATCH):
            self._client.log_batch(run.info.run_id, params=params[begin : begin + _BATCH])
        for begin in range(0, len(changed), _BATCH):
            self._client.log_batch(run.info.run_id, tags=changed[begin : begin + _BATCH])

    # -- while it runs -------------------------------------------------------------------------

    def epoch(self, progress: Progress) -> None:
        """Log the metrics of an epoch that has ended; return immediately."""
        values = dict(progress.metrics)
        if progress.samples_per_second is not None:
            values |= beside(values, {"samples_per_second": progress.samples_per_second})
        self._work.put(functools.partial(self._log_epoch, progress.epoch, values))

    def poll(self) -> None:
        """Never end the training: a failure to log is not one of the training."""

    def _log_epoch(self, epoch: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now, names = int(time.time() * 1000), _names(values)
        new = {
            name: value
            for key, value in values.items()
            if not _same(self._logged.get((name := names[key], epoch)), value)
        }
        if new:
            metrics = [Metric(name, value, now, epoch) for name, value in new.items()]
            self._client.log_batch(self.run_id, metrics=metrics)
            self._logged.update({(name, epoch): value for name, value in new.items()})

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:  # logging must not end a training
                if not self._failed:
                    self._failed = True
                    logger.warning(
                        "the training could not be logged to MLflow, and continues: %s",
                        _describe_error(error, self._options),
                    )

    # -- at its end ----------------------------------------------------------------------------

    def finish(self, history: Sequence[Mapping[str, object]]) -> None:
        """Log the rest of the metrics, and the model; the training has succeeded."""
        for epoch, logs in enumerate(history):  # reports of ranks may be lost
            values = numbers(dict(logs))
            self._work.put(functools.partial(self._log_epoch, epoch, values))
        if self._options.log_model:
            self._work.put(self._log_model)
        self._end("FINISHED")

    def fail(self, error: BaseException, *, stopped: bool = False) -> None:
        """Log the failed end of the training.

        Args:
            error: the error that ended it.
            stopped: whether its caller stopped it, such as a search that prunes it.
        """
        killed = stopped or isinstance(error, (KeyboardInterrupt, RunCancelledError))
        if stopped:
            self._work.put(lambda: self._client.set_tag(self.run_id, "stopped", str(error)))
        self._end("KILLED" if killed else "FAILED", _FAIL_SECONDS)

    def _end(self, status: str, seconds: float = _END_SECONDS) -> None:
        self._work.put(lambda: self._client.set_terminated(self.run_id, status))
        self._work.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            logger.warning(
                "MLflow has not received all of the training within %.0f s; the rest is not logged",
                seconds,
            )

    def _log_model(self) -> None:
        for folder in (self._directory.model, self._directory.saved_model):
            if not folder.exists():
                continue
            with tempfile.TemporaryDirectory() as place:
                for file in folder.files():
                    path = Path(place, file.name)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    folder.join(file.name).copy_to(Location(path), len)
                self._client.log_artifacts(self.run_id, place, folder.name)


def _describe_error(error: Exception, options: MlflowOptions) -> str:
    text = f"{type(error).__name__}: {on_one_line(error)}"
    uri = options.tracking_uri
    return text if uri is None else text.replace(uri, redact_url(uri))


def _name(key: str) -> str:
    """Return a valid name for ``key`` in MLflow: other characters become ``_``."""
    return "".join(c if c in _SAFE or (c.isascii() and c.isalnum()) else "_" for c in key)[:250]


def _names(keys: Iterable[str]) -> dict[str, str]:
    """Return valid names for keys in MLflow; equal names get a checksum of the key."""
    names = {key: _name(key) for key in keys}
    times = Counter(names.values())
    return {
        key: name if key == name or times[name] == 1 else f"{name[:241]}_{crc32(key.encode()):08x}"
        for key, name in names.items()
    }


def _same(one: float | None, other: float) -> bool:
    return one is not None and (one == other or (one != one and other != other))


def _flat(prefix: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the single settings, those in dictionaries by their path."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    elif isinstance(value, (list, tuple)):
        yield prefix, json.dumps([redact_url(v) if isinstance(v, str) else v for v in value])
    else:
        yield prefix, value
