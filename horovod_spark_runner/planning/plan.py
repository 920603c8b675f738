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
from ..formatting import duration, number, share, size
from ..observe.report.charts import Series, line_chart
from ..observe.report.page import Section, facts, figure, page, paragraph, table
from ..storage.filesystem import Location
from ..storage.folders import make_parent
from .measurement import Measurement
from .model import Cluster, Link, Prediction, Workload, format_link, parse_link, predict

RANKS = tuple(2**exponent for exponent in range(13))
NETWORKS = ("1gbit", "10gbit", "100gbit")
# Name of the link between the hosts that were measured.
_MEASURED = "this cluster"


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
    networks: tuple[_NetworkPlan, ...]

    def __str__(self) -> str:
        return _plan_text(self.name, self.measurement, self.networks)

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
            file.write_text(_plan_page(self.name, self.measurement, self.networks))


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
    own = [] if measured.between is None else [(_MEASURED, measured.between)]
    counts = sorted({1, measured.workers, *options.ranks})
    plans = tuple(
        _advise(called, measured.workload, Cluster(here, cores, link), counts)
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


# Part of one process's time that distributing must save.
_WORTH = 0.1
# A number of ranks is as good as the fastest if it takes at most this much longer.
_AS_GOOD = 0.1


@dataclass(frozen=True)
class _NetworkPlan:
    """Predictions for one network.

    Attributes:
        name: of the network.
        cluster: hosts of this kind.
        predictions: one per number of ranks, ascending, as far as the rows fill a step.
        best: the smallest number of ranks that takes at most a tenth longer than the fastest, of
            those that pay if any does.
        alone: seconds of one process, without launching and writing rows.
        break_even: the smallest number of ranks, above 1, that is faster than ``alone``; ``None``
            if none is.
        break_even_epochs: epochs from which some number of ranks is faster; ``None`` if never.
        left_out: requested numbers of ranks whose step takes more rows than an epoch has.
    """

    name: str
    cluster: Cluster
    predictions: tuple[Prediction, ...]
    best: Prediction
    alone: float
    break_even: int | None
    break_even_epochs: float | None
    left_out: tuple[int, ...] = ()

    @property
    def pays(self) -> bool:
        """Whether distributing saves a tenth of the time of one process."""
        return _pays(self.best, self.alone)

    @property
    def verdict(self) -> str:
        """Recommendation, with the figures."""
        fastest = min(self.predictions, key=lambda one: one.total_seconds)
        if self.pays:
            faster = (
                f"; {fastest.ranks:,} ranks would be the fastest, with "
                f"{duration(fastest.total_seconds)}"
            )
            return (
                f"{self.best.ranks:,} ranks: {duration(self.best.total_seconds)} in place of "
                f"{duration(self.alone)} of one process, {share(self.best.efficiency, 1)} "
                f"efficient, limited by {self.best.limit}"
                + (faster if fastest.ranks != self.best.ranks else "")
            )
        many = [one for one in self.predictions if one.ranks > 1]
        if not many:
            return "do not distribute this: the rows do not fill a step of two ranks"
        nearest = _smallest_as_good(many)
        before = nearest.total_seconds - nearest.training_seconds
        later = (
            "no number of epochs makes it pay"
            if self.break_even_epochs is None
            else f"it is faster from {number(self.break_even_epochs, 3)} epochs on"
        )
        return (
            f"do not distribute this: one process takes {duration(self.alone)}, "
            f"{nearest.ranks:,} ranks {duration(nearest.total_seconds)}, of which "
            f"{duration(before)} come before the first epoch; a step of "
            f"{duration(nearest.compute)} of computation would take "
            f"{duration(nearest.step_seconds)}; {later}"
        )


def _pays(one: Prediction, alone: float) -> bool:
    return one.ranks > 1 and one.total_seconds <= (1 - _WORTH) * alone


def _smallest_as_good(predictions: Sequence[Prediction]) -> Prediction:
    fastest = min(one.total_seconds for one in predictions)
    return next(one for one in predictions if one.total_seconds <= (1 + _AS_GOOD) * fastest)


def _advise(name: str, work: Workload, cluster: Cluster, ranks: Sequence[int]) -> _NetworkPlan:
    """Predict a training on a cluster for several numbers of ranks.

    Args:
        name: of the network.
        work: the measured training.
        cluster: the hosts.
        ranks: numbers of ranks; must contain 1.
    """
    # More ranks than fill a step would train with another batch than was measured.
    filled = [
        count for count in sorted(ranks) if count == 1 or count * work.batch_size <= work.rows
    ]
    predictions = tuple(predict(work, cluster, count) for count in filled)
    single = predictions[0]
    alone = work.build + single.training_seconds
    # If the fastest just pays, one that is almost as good may not.
    best = _smallest_as_good([one for one in predictions if _pays(one, alone)] or predictions)
    nearest = min(predictions, key=lambda one: one.epoch_seconds)
    saved = single.epoch_seconds - nearest.epoch_seconds
    before = nearest.total_seconds - nearest.training_seconds - work.build
    faster = [one.ranks for one in predictions if one.ranks > 1 and one.total_seconds < alone]
    return _NetworkPlan(
        name=name,
        cluster=cluster,
        predictions=predictions,
        best=best,
        alone=alone,
        break_even=min(faster, default=None),
        break_even_epochs=before / saved if saved > 0 else None,
        left_out=tuple(sorted(set(ranks) - set(filled))),
    )


_HEADER = (
    "ranks", "hosts", "step", "samples/s", "efficient", "epoch", "in all", "rank-hours", "limit",
)  # fmt: skip


def _plan_text(name: str, measured: Measurement, networks: Sequence[_NetworkPlan]) -> str:
    """Format a plan as lines of text."""
    lines = [f"plan for {name}", *_measured_lines(measured)]
    for network in networks:
        lines += ["", _network_title(network), *_table(network)]
        lines += [network.verdict, *_left_out_lines(network, measured.workload)]
    return "\n".join(lines)


def _measured_lines(measured: Measurement) -> list[str]:
    """Format a measurement as lines of text."""
    work = measured.workload
    steps = ", ".join(
        f"{duration(work.steps[here].seconds)} with {here} on a host" for here in sorted(work.steps)
    )
    link = work.inside or measured.between
    lines = [f"step of {work.batch_size:,} rows: {steps}"]
    lines.append(f"exchange: {size(work.gradient_bytes)} of gradients")
    if measured.source:
        lines.insert(0, f"read from {measured.source}, with {count(measured.workers, 'rank')}")
        if measured.between is not None:
            lines.append(f"link between hosts: {format_link(measured.between)}")
        elif measured.workers > 1:
            lines.append(f"each exchange within a host: {duration(work.overhead)}")
    else:
        also = f" and {measured.workers:,}" if measured.workers > 1 else ""
        lines.insert(
            0,
            f"measured in {duration(measured.seconds)} on {measured.measured_rows:,} rows, for "
            f"epochs of {work.rows:,}, with 1 rank{also}",
        )
        if link is not None:
            where = "within a host" if measured.between is None else "between hosts"
            lines.append(
                f"link {where}: {format_link(link)}, and {duration(work.overhead)} per exchange"
            )
        rates = (f"{number(rate)} with {here}" for here, rate in sorted(work.reader_rows.items()))
        lines.append(f"reader: rows/s of a rank, {', '.join(rates)} on a host")
    lines.append(
        f"before the first epoch: {duration(max(work.launch.values()))} of launching, "
        f"{duration(work.build)} of building, {duration(work.materialize)} of writing the rows"
    )
    return lines


def count(number: int, what: str) -> str:
    """Format a count: ``"1 rank"``, ``"1,024 ranks"``."""
    return f"{number:,} {what}" + "s" * (number != 1)


def _network_title(network: _NetworkPlan) -> str:
    """Format a network and its hosts."""
    cluster = network.cluster
    return (
        f"{network.name} between hosts ({format_link(cluster.between)}), "
        f"{count(cluster.ranks_per_host, 'rank')} on each with "
        f"{count(cluster.cores_per_host, 'core')}"
    )


def _left_out_lines(network: _NetworkPlan, work: Workload) -> list[str]:
    """List the requested numbers of ranks that have no prediction, with the reason."""
    if not network.left_out:
        return []
    numbers = ", ".join(f"{one:,}" for one in network.left_out)
    return [
        f"left out: {numbers} ranks, whose step of {work.batch_size:,} rows each takes more than "
        f"an epoch has ({work.rows:,})"
    ]


def _prediction_cells(one: Prediction) -> list[str]:
    """Format a prediction as a row of a table."""
    return [
        f"{one.ranks:,}",
        f"{one.hosts:,}",
        duration(one.step_seconds),
        number(one.samples_per_second),
        share(one.efficiency, 1.0),
        duration(one.epoch_seconds),
        duration(one.total_seconds),
        number(one.rank_hours, 3),
        one.limit,
    ]


def _table(network: _NetworkPlan) -> list[str]:
    best = network.best.ranks if network.pays else None
    rows = [[*map(str.upper, _HEADER[:-1]), ""]]
    for one in network.predictions:
        *cells, limit = _prediction_cells(one)
        rows.append([*cells, limit + (", best" if one.ranks == best else "")])
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False))
        + f"  {row[-1]}"
        for row in rows
    ]


def _plan_page(name: str, measured: Measurement, networks: Sequence[_NetworkPlan]) -> str:
    """Render a plan; see `horovod_spark_runner.planning.plan.plan_text`."""
    curves = [
        Series(
            one.name,
            [math.log2(each.ranks) for each in one.predictions],
            [each.samples_per_second for each in one.predictions],
        )
        for one in networks
    ]
    chart = line_chart(curves, x_title="ranks, as powers of two", y_title="samples/s", log_y=True)
    about = "of full steps"
    sections = [
        Section("Measurement", [paragraph(line) for line in _measured_lines(measured)]),
        Section("More ranks", [figure("Samples per second", chart, about=about)]),
    ]
    for one in networks:
        best = [i for i, each in enumerate(one.predictions) if one.pays and each is one.best]
        rows = [_prediction_cells(each) for each in one.predictions]
        contents = [
            paragraph(one.verdict),
            *(paragraph(line) for line in _left_out_lines(one, measured.workload)),
            table(_HEADER, rows, numeric=range(len(_HEADER) - 1), strong=best),
        ]
        sections.append(Section(one.name, contents, _network_title(one)))
    verdicts = {one.name: one.verdict.partition(":")[0] for one in networks}
    return page(f"Plan for {name}", "predicted for more ranks", sections, facts(dict(verdicts)))
