"""Checkpoint files: save, find, verify and prune them; imports no framework.

A checkpoint is a folder with some ``.npz`` files and ``checkpoint.json``. The latter holds the
SHA-256 of the others and of itself and is written last. So a folder without it, or with wrong
checksums, is no checkpoint: it is skipped, with a warning, for the one before. The driver needs no
arrays and reads ``checkpoint.json`` only; the ranks verify the other files when they read them. A
checkpoint that cannot be read now may be whole: the read is retried, and it is neither skipped nor
deleted. On storage that can rename a folder, the whole folder appears in one step.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TypeAlias, TypeVar

import numpy as np

from ..config.training import CheckpointOptions
from ..errors import RunDirectoryError
from ..storage.arrays import Arrays, load_arrays, write_arrays
from ..storage.checksums import (
    parse_checksums,
    read_verified_file,
    seal,
    unseal,
    verify_file,
    write_with_checksum,
)
from ..storage.contents import Contents, Sink
from ..storage.filesystem import Location
from ..storage.folders import delete_quietly, write_aside
from ..storage.retries import retry
from ..typed_json import JsonObject, read_fields
from .run_directory import RunDirectory

logger = logging.getLogger(__name__)

_FORMAT = 3
VARIABLES_FILE = "variables.npz"
RANKS_FILE = "ranks.npz"
MANIFEST_FILE = "checkpoint.json"

T = TypeVar("T")

LogValue: TypeAlias = "str | int | float | bool | list[LogValue] | None"
# Logs of an epoch, by name, as JSON: numbers, and lists where a metric has several.
PlainLogs: TypeAlias = Mapping[str, LogValue]


@dataclass(frozen=True)
class CheckpointInfo:
    """All of a checkpoint but its arrays.

    Attributes:
        step: steps of the whole run so far.
        epoch: whole epochs so far.
        history: metrics of each of those epochs.
        data_fingerprint: identity of the training data.
        tables: versions of the tables that they were read from, by name.
        variables: (name, path, shape, dtype) of the model's and optimizer's variables, in order.
        engine: dotted name of the engine whose model they are.
        epoch_step: steps of the epoch after those; 0 at the end of an epoch.
        world: ranks that took part.
        run_id: identity of the run.
        order: what the order of samples follows from: global batch, seed, shuffle, window, steps
            per epoch.
        settings: settings of the run.
        state: small values that training continues with, such as the unscaled learning rate.
        rank_states: small values of each rank, such as the state of its callbacks.
        model: the model's layers and what it was compiled with (``describe_model``), and by which
            optimizer which weights are trained; empty in checkpoints of earlier versions.
    """

    step: int
    epoch: int
    history: Sequence[PlainLogs]
    data_fingerprint: str
    variables: Sequence[tuple[str, str, list[int], str]]
    engine: str
    epoch_step: int = 0
    world: int = 1
    run_id: str = ""
    order: JsonObject = field(default_factory=dict)
    settings: JsonObject = field(default_factory=dict)
    state: JsonObject = field(default_factory=dict)
    rank_states: list[JsonObject] = field(default_factory=list)
    model: JsonObject = field(default_factory=dict)
    tables: dict[str, str] = field(default_factory=dict)


class _IncompleteCheckpoint(ValueError):
    """The folder was left by a writer that did not finish."""


def save_checkpoint(
    directory: RunDirectory, info: CheckpointInfo, files: Mapping[str, Arrays]
) -> Location:
    """Write a checkpoint atomically and return its folder.

    Args:
        directory: the run directory.
        info: all of it but its arrays.
        files: arrays by name, by file name.

    Raises:
        OSError: the storage fails; other checkpoints are untouched.
    """
    folder = directory.checkpoint(info.step)
    if folder.has_atomic_rename:
        # The same step is saved twice when the end of its epoch follows: the later one counts.
        write_aside(folder, lambda aside: _write(aside, info, files, directory.check_held))
    else:
        if folder.exists():
            folder.delete_folder()  # its manifest goes first or with it: never a mixture
        _write(folder, info, files, directory.check_held)
    return folder


def _write(
    folder: Location,
    info: CheckpointInfo,
    files: Mapping[str, Arrays],
    check_held: Callable[[], None],
) -> None:
    folder.make_folder()
    sums = {}
    for name, arrays in files.items():
        fill = functools.partial(_write_all, arrays)
        sums[name] = write_with_checksum(folder.join(name).write_stream_in_place, fill)
    facts = {item.name: getattr(info, item.name) for item in fields(info)}
    text = json.dumps({"format": _FORMAT, "sums": sums, **facts})
    check_held()  # last: the arrays of a large model may have taken minutes
    folder.join(MANIFEST_FILE).write_in_place(seal(text).encode())


def _write_all(arrays: Arrays, sink: Sink) -> None:
    write_arrays(sink, arrays.items())


def prune_checkpoints(directory: RunDirectory, newest: int, options: CheckpointOptions) -> None:
    """Delete all but the ``options.keep`` newest whole checkpoints and the best.

    Args:
        directory: the run directory.
        newest: step of the checkpoint just written. Later ones were damaged when this run began;
            they do not count and are not touched.
        options: how many to keep, and the metric of the best.
    """
    whole: dict[int, CheckpointInfo] = {}
    for step in directory.checkpoint_steps():
        if step <= newest:
            try:
                whole[step] = read_info(directory.checkpoint(step))
            except ValueError:
                delete_quietly(directory.checkpoint(step))
            except OSError as error:  # it may be whole, and the best
                logger.warning("checkpoint %s stays: %s", directory.checkpoint(step), error)
    retained = {*list(whole)[: options.keep]}
    best = best_step(whole, options)
    for step in whole.keys() - retained - {best}:
        delete_quietly(directory.checkpoint(step))
    for left in directory.checkpoints.list():
        if left.name.startswith(".step-"):  # of a writer that was killed
            delete_quietly(left)


def best_step(infos: Mapping[int, CheckpointInfo], options: CheckpointOptions) -> int | None:
    """Return the step of the best checkpoint at the end of an epoch, the earliest of equals."""
    metric = options.best_metric
    if metric is None:
        return None
    values = {
        step: info.history[-1].get(metric)
        for step, info in sorted(infos.items())
        if info.epoch_step == 0 and info.history
    }
    numbers = {
        step: value
        for step, value in values.items()
        if isinstance(value, (int, float)) and value == value
    }
    choose = max if options.best_is_highest else min
    return choose(numbers, key=lambda step: numbers[step], default=None)


def read_info(folder: Location) -> CheckpointInfo:
    """Return the contents of ``checkpoint.json`` in ``folder``.

    Raises:
        _IncompleteCheckpoint: the folder has no ``checkpoint.json``.
        ValueError: it is damaged.
        OSError: the storage fails.
    """
    return _read_manifest(folder)[0]


def verify_checkpoint(folder: Location) -> CheckpointInfo:
    """Read all files of a checkpoint, verify them, and return its `CheckpointInfo`.

    Raises:
        ValueError: it is not whole, or its contents have changed.
        OSError: the storage fails.
    """
    info, sums = _read_manifest(folder)
    for name in sums:
        verify_file(folder, name, sums)
    return info


def load_checkpoint(folder: Location) -> tuple[CheckpointInfo, dict[str, dict[str, np.ndarray]]]:
    """Return a checkpoint's info, and its arrays by name, by file name.

    Raises:
        ValueError: it is not whole, or its contents have changed.
        OSError: the storage fails.
    """
    info, sums = _read_manifest(folder)
    return info, {name: load_arrays(read_verified_file(folder, name, sums)) for name in sums}


def read_variables(folder: Location) -> tuple[CheckpointInfo, Contents]:
    """Return a checkpoint's info, and its file of variables, verified.

    Raises:
        ValueError: there is no such file, or its contents have changed.
        OSError: the storage fails.
    """
    info, sums = _read_manifest(folder)
    return info, read_verified_file(folder, VARIABLES_FILE, sums)


def newest_checkpoint(
    directory: RunDirectory,
    run_id: str | None = None,
    say: Callable[[str], None] = logger.warning,
) -> tuple[Location, CheckpointInfo] | None:
    """Return the newest checkpoint, by its manifest; no arrays are read.

    Args:
        directory: the run directory.
        run_id: identity of the run; a checkpoint of another run is skipped.
        say: prints a line about each skipped one.

    Raises:
        RunDirectoryError: there are checkpoints, but none can be resumed from.
        CheckpointError: the storage fails repeatedly.
    """
    newest = newest_readable(directory, lambda folder: (read_info(folder), None), run_id, say=say)
    return None if newest is None else newest[:2]


def read_steps(directory: RunDirectory) -> tuple[int, ...]:
    """Return the steps of all checkpoints there are, whole or not.

    Raises:
        CheckpointError: the storage fails repeatedly.
    """
    problem = f"{directory.checkpoints} cannot be read"
    return tuple(retry(directory.checkpoint_steps, problem))


def newest_readable(
    directory: RunDirectory,
    read: Callable[[Location], tuple[CheckpointInfo, T]],
    run_id: str | None = None,
    *,
    newest: int | None = None,
    say: Callable[[str], None] = logger.warning,
) -> tuple[Location, CheckpointInfo, T] | None:
    """Return the newest checkpoint that can be read; report those that cannot.

    Args:
        directory: the run directory.
        read: reads the needed part of it, such as `load_checkpoint`.
        run_id: identity of the run; a checkpoint of another run is skipped.
        newest: step of the newest one to consider.
        say: takes a line about each that is skipped.

    Raises:
        RunDirectoryError: there are checkpoints, but none is usable: starting anew would in the
            end delete what may still be repaired.
        CheckpointError: the storage fails repeatedly.
    """
    damaged = []
    for step in read_steps(directory):
        if newest is not None and step > newest:
            continue
        folder = directory.checkpoint(step)
        try:
            info, contents = retry(functools.partial(read, folder), f"{folder} cannot be read")
            if run_id is not None and info.run_id != run_id:
                raise ValueError(f"it belongs to another run ({info.run_id}, not {run_id})")
        except ValueError as error:
            say(f"checkpoint {folder} is skipped: {error}")
            if not isinstance(error, _IncompleteCheckpoint):
                damaged.append(f"{folder.name}: {error}")
            continue
        return folder, info, contents
    if damaged:
        raise RunDirectoryError(
            f"run_dir {directory.location} holds checkpoints, but none that can be resumed from "
            f"({'; '.join(damaged)}). Repair them, or give another run_dir to train anew"
        )
    return None


def _read_manifest(folder: Location) -> tuple[CheckpointInfo, dict[str, str]]:
    try:
        manifest = unseal(folder.join(MANIFEST_FILE).read_text())
        if manifest["format"] != _FORMAT:
            raise ValueError("it has another format")
        return read_fields(manifest, CheckpointInfo), parse_checksums(manifest["sums"])
    except FileNotFoundError as error:
        raise _IncompleteCheckpoint(f"it has no {MANIFEST_FILE}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{MANIFEST_FILE} cannot be read: {error}") from error
