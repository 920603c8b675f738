"""Saving and finding checkpoints; knows arrays and JSON, no framework.

A checkpoint is a folder with ``variables.npz`` and ``checkpoint.json``. The latter holds the
SHA-256 of the former and is written last, so a folder without it, or whose sum does not fit, is
not a checkpoint: it is skipped, loudly, for the one before.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from .arrays import dump_arrays, load_arrays
from .filesystem import Location
from .run_directory import RunDirectory

logger = logging.getLogger(__name__)

FORMAT = 1
VARIABLES_FILE = "variables.npz"
MANIFEST_FILE = "checkpoint.json"


@dataclass(frozen=True)
class CheckpointInfo:
    """All of a checkpoint but its arrays.

    Attributes:
        step: steps of the whole run so far.
        epoch: whole epochs so far.
        history: metrics of each of those epochs.
        data_fingerprint: identity of the training data.
        variables: (name, shape, dtype) of the model's and optimizer's variables, in order.
        settings: what the run was started with.
        state: small values that training goes on with, such as the unscaled learning rate.
    """

    step: int
    epoch: int
    history: list[dict[str, float]]
    data_fingerprint: str
    variables: list[list[Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


def save_checkpoint(
    directory: RunDirectory, info: CheckpointInfo, arrays: Mapping[str, np.ndarray], keep: int
) -> Location:
    """Write a checkpoint and delete all but the ``keep`` newest; return its folder."""
    folder = directory.checkpoint(info.step)
    folder.delete_folder()  # what an interrupted attempt may have left
    folder.make_folder()
    data = dump_arrays(arrays)
    folder.join(VARIABLES_FILE).write_bytes(data)
    manifest = {
        "format": FORMAT,
        "sha256": {VARIABLES_FILE: hashlib.sha256(data).hexdigest()},
        **asdict(info),
    }
    folder.join(MANIFEST_FILE).write_text(json.dumps(manifest))
    for step in directory.checkpoint_steps()[keep:]:
        directory.checkpoint(step).delete_folder()
    return folder


def read_info(folder: Location) -> CheckpointInfo:
    """Return what ``checkpoint.json`` in ``folder`` says.

    Raises:
        ValueError: the folder is no whole checkpoint.
    """
    return _read_manifest(folder)[0]


def load_checkpoint(folder: Location) -> tuple[CheckpointInfo, dict[str, np.ndarray]]:
    """Return a checkpoint.

    Raises:
        ValueError: it is not whole, or its contents have changed.
    """
    info, sums = _read_manifest(folder)
    try:
        data = folder.join(VARIABLES_FILE).read_bytes()
    except OSError as error:
        raise ValueError(f"{VARIABLES_FILE} cannot be read: {error}") from error
    if hashlib.sha256(data).hexdigest() != sums.get(VARIABLES_FILE):
        raise ValueError(f"{VARIABLES_FILE} is damaged: its SHA-256 is not the one recorded")
    return info, load_arrays(data)


def newest_checkpoint(directory: RunDirectory) -> Location | None:
    """Return the newest checkpoint that can be loaded, or ``None``; reports those that cannot."""
    for step in directory.checkpoint_steps():
        folder = directory.checkpoint(step)
        try:
            load_checkpoint(folder)
        except ValueError as error:
            logger.warning("checkpoint %s is skipped: %s", folder, error)
            continue
        return folder
    return None


def _read_manifest(folder: Location) -> tuple[CheckpointInfo, dict[str, str]]:
    try:
        fields = json.loads(folder.join(MANIFEST_FILE).read_text())
        if fields.pop("format") != FORMAT:
            raise ValueError("it is of another format")
        sums = fields.pop("sha256")
        return CheckpointInfo(**fields), sums
    except (OSError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"{MANIFEST_FILE} cannot be read: {error}") from error
