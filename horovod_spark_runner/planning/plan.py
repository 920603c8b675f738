"""The plan of a training, as `plan_training` returns it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import InvalidInputError
from ..storage.filesystem import Location
from ..storage.folders import make_parent
from .advice import NetworkPlan
from .measurement import Measurement
from .page import plan_page
from .table import plan_text


@dataclass(frozen=True)
class TrainingPlan:
    """What `plan_training` returns; ``print(plan)`` shows it as a table.

    Attributes:
        name: what the plan is called.
        measurement: what was measured.
        networks: what would come of it on each network.
    """

    name: str
    measurement: Measurement
    networks: tuple[NetworkPlan, ...]

    def __str__(self) -> str:
        return plan_text(self.name, self.measurement, self.networks)

    def as_json(self) -> dict[str, Any]:
        """Return the plan as plain values that JSON can hold; times in seconds."""
        return {
            "name": self.name,
            "measured": self.measurement.as_json(),
            "networks": [
                {
                    **asdict(one),
                    "best": one.best.ranks,
                    "verdict": one.verdict,
                    "pays": one.pays,
                    "predictions": [
                        {**asdict(each), "step_seconds": each.step_seconds, "limit": each.limit}
                        for each in one.predictions
                    ],
                }
                for one in self.networks
            ],
        }

    def write(self, place: str | os.PathLike[str]) -> None:
        """Write the plan as a file.

        Args:
            place: path or URL: ``.json`` for JSON, ``.html`` for a page with charts. A local
                folder that is not there is made.

        Raises:
            InvalidInputError: it ends otherwise.
            OSError: storage fails.
        """
        file = plan_file(place)
        make_parent(file)
        if file.name.endswith(".json"):
            file.write_text(json.dumps(self.as_json(), indent=1) + "\n")
        else:
            file.write_text(plan_page(self.name, self.measurement, self.networks))


def plan_file(place: str | os.PathLike[str]) -> Location:
    """Return the file that a plan is to be written to.

    Raises:
        InvalidInputError: its name does not tell as what.
    """
    file = Location(place)
    if not file.name.endswith((".json", ".html")):
        raise InvalidInputError(
            f"a plan is written as a file that ends in .json or .html, got {file.name!r}"
        )
    return file
