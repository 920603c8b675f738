"""A training in MLflow: parameters, metrics of every epoch while it runs, and the model.

The driver logs, on a thread of its own: nothing of the training waits for MLflow, and no failure of
MLflow's ends it.
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
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass
from zlib import crc32

from ..checkpoint.run_directory import RunDirectory
from ..cluster.protocol.messages import Progress
from ..config.mlflow import MlflowOptions
from ..errors import (
    EnvironmentProblem,
    HorovodSparkError,
    InvalidInputError,
    RunCancelledError,
    on_one_line,
)
from ..storage.filesystem import Location
from ..storage.paths import without_secrets
from ..training.progress import beside, numbers

T = TypeVar("T")

# How long MLflow may take: to answer before the training, and for what is left, with the model, at
# its end, or after a failure.
ANSWER_SECONDS, END_SECONDS, FAIL_SECONDS = 60.0, 600.0, 10.0
_CONNECT_SECONDS = 10.0
# What MLflow takes at once, and of a value.
_BATCH, _VALUE = 100, 6000
_SAFE = frozenset("_-. :/")

logger = logging.getLogger(__name__)


def check_tracking(options: MlflowOptions) -> Any:
    """Return MLflow's client and the experiment's identity, once MLflow has answered.

    Raises:
        EnvironmentProblem: MLflow is not installed.
        InvalidInputError: it does not answer, or does not take the settings.
    """
    try:
        from mlflow import MlflowClient, get_tracking_uri
    except ImportError as error:
        raise EnvironmentProblem(
            "mlflow=MlflowOptions(…) needs MLflow on the driver: "
            "pip install 'horovod_spark_runner[mlflow]'"
        ) from error

    _check_reachable(options.tracking_uri or str(get_tracking_uri()))

    def ask() -> tuple[Any, str]:
        client = MlflowClient(options.tracking_uri)
        name = options.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        found = client.get_experiment_by_name(name)
        if found is None:
            return client, str(client.create_experiment(name))
        if found.lifecycle_stage != "active":
            raise InvalidInputError(f"mlflow: the experiment {name!r} is deleted; restore it")
        return client, str(found.experiment_id)

    return _answer(ask, options)


def _check_reachable(uri: str) -> None:
    """Check that something listens where a server should be; MLflow itself tries for minutes."""
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
            f"mlflow: {without_secrets(uri)} cannot be reached: {error}; see that tracking_uri is "
            "right and the driver reaches it"
        ) from None


def _answer(ask: Callable[[], T], options: MlflowOptions) -> T:
    """Return what ``ask`` does, within `ANSWER_SECONDS`: MLflow itself tries for minutes."""
    answer: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            answer.put((ask(), None))
        except Exception as error:  # whatever MLflow and its stores raise
            answer.put((None, error))

    threading.Thread(target=work, name="hsr-mlflow-ask", daemon=True).start()
    where = without_secrets(options.tracking_uri or "its own default (MLFLOW_TRACKING_URI)")
    try:
        value, error = answer.get(timeout=ANSWER_SECONDS)
    except queue.Empty:
        raise InvalidInputError(
            f"mlflow: there was no answer within {ANSWER_SECONDS:.0f} s from {where}; see that "
            "tracking_uri is right and the driver reaches it"
        ) from None
    if isinstance(error, HorovodSparkError):
        raise error
    if error is not None:
        told = _told(error, options)
        raise InvalidInputError(f"mlflow: {where} cannot be used: {told}") from None
    return value  # type: ignore[no-any-return]


def begin_tracking(
    found: tuple[Any, str] | None,
    options: MlflowOptions | None,
    directory: RunDirectory,
    settings: Mapping[str, Any],
) -> Tracking | None:
    """Return the `Tracking` of a training; ``None`` where it is not asked for."""
    if found is None or options is None:
        return None
    # By the names they are given by.
    params = {**settings["fit"], **{name: v for name, v in settings.items() if name != "fit"}}
    return Tracking(found, options, directory, params)


class Tracking:
    """One training in MLflow, in the run that an earlier part of it was logged to.

    Args:
        found: what `check_tracking` has returned.
        options: what to log.
        directory: the run directory, which keeps the identity of MLflow's run.
        settings: what the training was asked for.

    Raises:
        InvalidInputError: MLflow takes no run.
    """

    def __init__(
        self,
        found: tuple[Any, str],
        options: MlflowOptions,
        directory: RunDirectory,
        settings: Mapping[str, Any],
    ) -> None:
        self._client, self._experiment = found
        self._options = options
        self._directory = directory
        self._failed = False
        self._logged: dict[tuple[str, int], float] = {}
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.run_id: str = _answer(lambda: self._begin(settings), options)
        self._thread = threading.Thread(target=self._serve, name="hsr-mlflow", daemon=True)
        self._thread.start()

    # -- before the first step -----------------------------------------------------------------

    def _begin(self, settings: Mapping[str, Any]) -> str:
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

    def _earlier(self) -> Any | None:
        """Return MLflow's run of an earlier part; ``None`` if there is none in the experiment."""
        known = self._directory.mlflow_run()
        if known is None:
            return None
        from mlflow.exceptions import MlflowException

        try:
            run = self._client.get_run(known)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            logger.warning("MLflow no longer has the run %s; another one is begun", known)
            return None
        same = run.info.experiment_id == self._experiment
        return run if same and run.info.lifecycle_stage == "active" else None

    def _log_params(self, run: Any, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Param, RunTag

        params, changed = [], []
        known = run.data.params
        for key, value in _flat("", settings):
            name, text = _name(key), without_secrets(str(value))[:_VALUE]
            before = known.get(name)
            if before is None:
                params.append(Param(name, text))
            elif before != text:  # MLflow changes no parameter
                changed.append(RunTag(f"resumed.{name}", text))
        for begin in range(0, len(params), _BATCH):
            self._client.log_batch(run.info.run_id, params=params[begin : begin + _BATCH])
        for begin in range(0, len(changed), _BATCH):
            self._client.log_batch(run.info.run_id, tags=changed[begin : begin + _BATCH])

    # -- while it runs -------------------------------------------------------------------------

    def epoch(self, progress: Progress) -> None:
        """Log the metrics of an epoch that has ended; returns at once."""
        values = dict(progress.metrics)
        if progress.samples_per_second is not None:
            values |= beside(values, {"samples_per_second": progress.samples_per_second})
        self._work.put(functools.partial(self._log_epoch, progress.epoch, values))

    def poll(self) -> None:
        """Let the training go on, whatever becomes of its record."""

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
            except Exception as error:  # a record is no reason to lose a training
                if not self._failed:
                    self._failed = True
                    logger.warning(
                        "MLflow could not be told of the training, which goes on: %s",
                        _told(error, self._options),
                    )

    # -- at its end ----------------------------------------------------------------------------

    def finish(self, history: Sequence[Mapping[str, Any]]) -> None:
        """Log what is left of the metrics, and the model; the training has succeeded."""
        for epoch, logs in enumerate(history):  # reports of ranks may be lost
            values = numbers(dict(logs))
            self._work.put(functools.partial(self._log_epoch, epoch, values))
        if self._options.log_model:
            self._work.put(self._log_model)
        self._end("FINISHED")

    def fail(self, error: BaseException, *, stopped: bool = False) -> None:
        """Say how the training ended.

        Args:
            error: what ended it.
            stopped: whether that is what asked for the training, such as a search that prunes it.
        """
        killed = stopped or isinstance(error, (KeyboardInterrupt, RunCancelledError))
        if stopped:
            self._work.put(lambda: self._client.set_tag(self.run_id, "stopped", str(error)))
        self._end("KILLED" if killed else "FAILED", FAIL_SECONDS)

    def _end(self, status: str, seconds: float = END_SECONDS) -> None:
        self._work.put(lambda: self._client.set_terminated(self.run_id, status))
        self._work.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            logger.warning(
                "MLflow has not taken all of the training within %.0f s; the rest is left out",
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


def _told(error: Exception, options: MlflowOptions) -> str:
    text = f"{type(error).__name__}: {on_one_line(error)}"
    uri = options.tracking_uri
    return text if uri is None else text.replace(uri, without_secrets(uri))


def _name(key: str) -> str:
    """Return the name MLflow takes for ``key``: other characters become ``_``."""
    return "".join(c if c in _SAFE or (c.isascii() and c.isalnum()) else "_" for c in key)[:250]


def _names(keys: Iterable[str]) -> dict[str, str]:
    """Return the name MLflow takes for each key; those of one name end with a sum of the key."""
    names = {key: _name(key) for key in keys}
    times = Counter(names.values())
    return {
        key: name if key == name or times[name] == 1 else f"{name[:241]}_{crc32(key.encode()):08x}"
        for key, name in names.items()
    }


def _same(one: float | None, other: float) -> bool:
    return one is not None and (one == other or (one != one and other != other))


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the settings one by one, those in dictionaries by their path."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    elif isinstance(value, (list, tuple)):
        yield prefix, json.dumps([without_secrets(v) if isinstance(v, str) else v for v in value])
    else:
        yield prefix, value
