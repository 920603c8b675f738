"""The steps of `run_training` once all is checked: materialize, launch, wrap up."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from ..data.manifest import Manifest
from ..data.prepare.datasets import Prepared, prepared, session_of
from ..errors import CheckpointError, DataError
from ..launch.driver.console import Console
from ..launch.driver.launch import RunResult
from ..launch.driver.launcher import chosen_launcher
from ..ml.trained import read_trained_model
from ..ml.transformer import TFTransformer
from ..rundir.attempt import Attempt
from ..rundir.lock import RunLock
from ..training.changes import check_same_data
from ..training.entry import modules_for
from ..training.spec import TrainingSpec
from .attempts import Attempts
from .request import CheckedRequest


def train_request(checked: CheckedRequest) -> TFTransformer:
    """Materialize the data, train on all ranks and return the transformer."""
    request, directory = checked.request, checked.directory
    began = time.monotonic()
    spark, modules = session_of(request.frame), modules_for(checked.source.engine)
    console = Console(quiet=not request.stream_logs)
    console.say("preparing the data")
    launcher = chosen_launcher()
    launcher.prepare(spark, checked.launching, checked.allotment, modules)
    with (
        RunLock(directory) as lock,
        prepared(
            request.frame,
            checked.roles,
            request.data,
            request.validation,
            directory.data,
            checked.fit.seed,
        ) as data,
    ):
        materialized = time.monotonic()
        console.say(_describe(data, materialized - began))
        _check_enough_rows(data.train, checked.workers)
        if checked.checkpoint is not None:
            where = str(directory.location)
            check_same_data(checked.checkpoint, data.train.fingerprint, checked.settings, where)
        # The script's name only: its arguments may hold secrets.
        program = {"program": sys.argv[0]} if Path(sys.argv[0]).is_file() else {}
        try:
            run_id = _run_id(checked)
            directory.write_config({**checked.settings, **program, "rows": data.train.rows})
        except OSError as error:
            raise CheckpointError(
                f"run_dir {directory.location} takes no files: {error}"
            ) from error
        attempts = Attempts(
            spark,
            checked.launching,
            checked.workers,
            request.restarts,
            directory,
            lock,
            launcher,
            found=checked.found,
        )
        result = attempts.run(
            lambda checkpoint, token: _training_spec(checked, data, run_id, checkpoint, token),
            run_id,
        )
    trained = time.monotonic()
    transformer = _transformer(checked, result, attempts.done)
    ended = time.monotonic()
    transformer.timings = {
        **result.timings,
        **result.result.timings,
        "prepare": checked.seconds,
        "materialize": materialized - began,
        "attempts": max(0.0, trained - materialized - result.timings["total"]),
        "load": ended - trained,
        "total": checked.seconds + ended - began,
        "train": result.result.train_seconds,
        "samples_per_second": result.result.samples_per_second,
    }
    return transformer


def _describe(data: Prepared, seconds: float) -> str:
    """Say which rows there are, for people."""
    held_out = "" if data.validation is None else f", {data.validation.rows:,} to validate on"
    how = "found again" if data.reused else "written"
    return f"{data.train.rows:,} rows to train on{held_out}, {how} in {seconds:.1f} s"


def _training_spec(
    checked: CheckedRequest, data: Prepared, run_id: str, checkpoint: int | None, lock_token: str
) -> TrainingSpec:
    """Return what the ranks of one attempt are told."""
    request = checked.request
    return TrainingSpec(
        model=checked.source,
        inputs=checked.inputs,
        outputs=checked.outputs,
        weight=request.sample_weight_col,
        fit=checked.fit,
        sync=request.sync,
        window_bytes=request.data.window_bytes,
        train=data.train,
        validation=data.validation,
        run_dir=str(checked.directory.location),
        workers=checked.workers,
        checkpoint=checkpoint,
        warm_start=checked.warm_start,
        checkpoints=request.checkpoints,
        run_id=run_id,
        lock_token=lock_token,
        callbacks=request.callbacks,
        transforms=dict(request.data.transforms),
        settings=checked.settings,
    )


def _transformer(
    checked: CheckedRequest, result: RunResult, attempts: Sequence[Attempt]
) -> TFTransformer:
    report = result.result
    transforms = checked.request.data.transforms
    model = read_trained_model(checked.directory, checked.source, report.saved, transforms)
    return TFTransformer(
        model,
        run_dir=str(checked.directory.location),
        history=report.history,
        placement=result.placement,
        prediction_col=checked.request.prediction_col,
        attempts=attempts,
    )


def _run_id(checked: CheckedRequest) -> str:
    """Return the identity that this run's checkpoints carry, kept in the run directory."""
    known = checked.directory.run_id()
    if known is None:
        known = uuid.uuid4().hex if checked.checkpoint is None else checked.checkpoint.run_id
        checked.directory.write_run_id(known)
    return known


def _check_enough_rows(train: Manifest, num_workers: int) -> None:
    if train.rows < num_workers:
        raise DataError(
            f"the training data have {train.rows} rows, fewer than the {num_workers} ranks asked "
            "for; lower num_workers"
        )
