"""Plan of a training: its options, its predictions, and its files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..config.validators import check_count
from ..errors import InvalidInputError, brief
from ..report.lines import Series, line_chart
from ..report.page import Section, facts, figure, page, paragraph, table
from ..storage.filesystem import Location
from ..storage.folders import make_parent
from .advice import NetworkPlan, advise
from .links import Link, format_link, parse_link
from .measurement import Measurement
from .model import Cluster
from .table import left_out_lines, measured_lines, network_title, plan_text, prediction_cells

_HEADER = (
    "ranks", "hosts", "step", "samples/s", "efficiency", "epoch", "in all", "rank-hours", "limit",
)  # fmt: skip


def plan_page(name: str, measured: Measurement, networks: Sequence[NetworkPlan]) -> str:
    """Render a plan; see `horovod_spark_runner.planning.table.plan_text`."""
    curves = [
        Series(
            one.name,
            [math.log2(each.ranks) for each in one.predictions],
            [each.samples_per_second for each in one.predictions],
        )
        for one in networks
    ]
    chart = line_chart(
        curves, x_title="ranks, as powers of two", y_title="samples/s", log_y=True, wide=True
    )
    about = "of full steps"
    sections = [
        Section("Measurement", [paragraph(line) for line in measured_lines(measured)]),
        Section("More ranks", [figure("Samples per second", chart, about=about, wide=True)]),
    ]
    for one in networks:
        best = [i for i, each in enumerate(one.predictions) if one.pays and each is one.best]
        rows = [prediction_cells(each) for each in one.predictions]
        contents = [
            paragraph(one.verdict),
            *(paragraph(line) for line in left_out_lines(one, measured.workload)),
            table(_HEADER, rows, numeric=range(len(_HEADER) - 1), strong=best),
        ]
        sections.append(Section(one.name, contents, network_title(one)))
    verdicts = {one.name: one.verdict.partition(":")[0] for one in networks}
    return page(f"Plan for {name}", "predicted for more ranks", sections, facts(dict(verdicts)))


RANKS = tuple(2**exponent for exponent in range(13))
NETWORKS = ("1gbit", "10gbit", "100gbit")
# Name of the link between the hosts that were measured.
MEASURED = "this cluster"


@dataclass(frozen=True)
class PlanOptions:
    """Clusters to predict for; see `plan_training`.

    Raises:
        InvalidInputError: a value is invalid.
    """

    networks: Sequence[str | Link] = NETWORKS
    ranks: Sequence[int] = RANKS
    ranks_per_host: int | None = None
    cores_per_host: int | None = None

    def __post_init__(self) -> None:
        _check_list("networks", self.networks)
        self.links()
        _check_list("ranks", self.ranks)
        for index, count in enumerate(self.ranks):
            check_count(f"ranks[{index}]", count)
        for name in ("ranks_per_host", "cores_per_host"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))

    def links(self) -> list[tuple[str, Link]]:
        """Return the networks with their names."""
        links = [parse_link(given) for given in self.networks]
        return [
            (given if isinstance(given, str) else format_link(link), link)
            for given, link in zip(self.networks, links, strict=True)
        ]


def _check_list(name: str, given: object) -> None:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise InvalidInputError(f"{name} must be a list, got {brief(given)}")
    if not given:
        raise InvalidInputError(f"{name} is an empty list; leave it out for the default")


@dataclass(frozen=True)
class TrainingPlan:
    """Result of `plan_training`; ``print(plan)`` shows it as a table.

    Attributes:
        name: name of the plan.
        measurement: the measurement.
        networks: predictions for each network.
    """

    name: str
    measurement: Measurement
    networks: tuple[NetworkPlan, ...]

    def __str__(self) -> str:
        return plan_text(self.name, self.measurement, self.networks)

    def as_json(self) -> dict[str, Any]:
        """Return plain values for JSON; times in seconds."""
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
        """Write the plan to a file.

        Args:
            place: path or URL, ``.json`` for JSON or ``.html`` for a page with a chart. A missing
                local folder is created.

        Raises:
            InvalidInputError: the name ends otherwise.
            OSError: storage fails.
        """
        file = plan_file(place)
        make_parent(file)
        if file.name.endswith(".json"):
            file.write_text(json.dumps(self.as_json(), indent=1) + "\n")
        else:
            file.write_text(plan_page(self.name, self.measurement, self.networks))


def build_plan(name: str, measured: Measurement, options: PlanOptions) -> TrainingPlan:
    """Predict for all networks and numbers of ranks; those that were measured are added.

    Raises:
        InvalidInputError: ranks of a host would share cores.
    """
    here = options.ranks_per_host or measured.ranks_per_host
    cores = options.cores_per_host or measured.cores
    if here > cores and not measured.on_gpus:
        raise InvalidInputError(
            f"{here} ranks on a host of {cores} cores would share cores, which a plan does not "
            "predict: give a core to each, by a smaller num_workers or ranks_per_host, or by "
            "cores_per_host"
        )
    own = [] if measured.between is None else [(MEASURED, measured.between)]
    counts = sorted({1, measured.workers, *options.ranks})
    plans = tuple(
        advise(called, measured.workload, Cluster(here, cores, link), counts)
        for called, link in (*own, *options.links())
    )
    return TrainingPlan(name, measured, plans)


def plan_file(place: str | os.PathLike[str]) -> Location:
    """Return the location of a plan's file.

    Raises:
        InvalidInputError: its suffix is unknown.
    """
    file = Location(place)
    if not file.name.endswith((".json", ".html")):
        raise InvalidInputError(
            f"a plan is written as a file that ends in .json or .html, got {file.name!r}"
        )
    return file
