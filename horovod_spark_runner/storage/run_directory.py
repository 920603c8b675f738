"""The layout of a run directory; the one place that knows its names.

::

    RUN_DIR/
        config.json                 settings of the newest call
        data/                       materialized rows, while they are needed
        checkpoints/step-00000042/  variables.npz, checkpoint.json (written last)
        logs/rank-00000.log         all output of each rank
        metrics.jsonl               one line per epoch
        model/                      model.keras, weights.npz, signature.json (written last)
"""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

from ..errors import RunDirectoryError
from .filesystem import Location

_STEP = re.compile(r"step-(\d{8,})")


class RunDirectory:
    """A run directory in local or shared storage.

    Args:
        place: path or URL.
    """

    def __init__(self, place: str | Location) -> None:
        self.location = place if isinstance(place, Location) else Location(place)

    @property
    def config(self) -> Location:
        return self.location.join("config.json")

    @property
    def data(self) -> Location:
        return self.location.join("data")

    @property
    def checkpoints(self) -> Location:
        return self.location.join("checkpoints")

    @property
    def logs(self) -> Location:
        return self.location.join("logs")

    @property
    def metrics(self) -> Location:
        return self.location.join("metrics.jsonl")

    @property
    def model(self) -> Location:
        return self.location.join("model")

    @property
    def signature(self) -> Location:
        return self.model.join("signature.json")

    def checkpoint(self, step: int) -> Location:
        """Return the folder of the checkpoint taken after ``step`` steps of the whole run."""
        return self.checkpoints.join(f"step-{step:08d}")

    def checkpoint_steps(self) -> list[int]:
        """Return the steps of all checkpoint folders, newest first, whole or not."""
        matches = (_STEP.fullmatch(folder.name) for folder in self.checkpoints.list())
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def check_writable(self) -> None:
        """Make the directory and prove that a file can be written to it.

        Raises:
            RunDirectoryError: it cannot.
        """
        probe = self.location.join(f".probe-{uuid.uuid4().hex[:8]}")
        try:
            self.location.make_folder()
            probe.write_text("")
            probe.delete_file()
        except OSError as error:
            raise RunDirectoryError(
                f"run_dir {self.location} is not writable: {error}. Give a folder that the driver "
                "and all executors can write to"
            ) from error

    def write_config(self, settings: dict[str, Any]) -> None:
        self.config.write_text(json.dumps(settings, indent=1))

    def write_metrics(self, epochs: list[dict[str, float]]) -> None:
        """Write the metrics of all epochs so far, one JSON object per line."""
        lines = (json.dumps({"epoch": number, **logs}) for number, logs in enumerate(epochs))
        self.metrics.write_text("".join(f"{line}\n" for line in lines))
