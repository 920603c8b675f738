"""A plan as a page of HTML. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..report.lines import Mark, Series, line_chart
from ..report.markup import Child
from ..report.page import Section, facts, figure, grid, page, paragraph, table
from ..report.stacked import Part, Whole, legend, stacked_rows
from .advice import NetworkPlan
from .measurement import Measurement
from .model import Workload
from .table import count, measured_lines, network_title, notes, prediction_cells

_PARTS = {
    "computing": Part("computing", 2, "on cores that nobody else wants"),
    "sharing cores": Part("sharing cores", 7, "ranks of a host ask for more than it has"),
    "slow ranks": Part("slow ranks", 6, "waiting for the slowest, whose step is longer by chance"),
    "latency": Part("latency", 1, "messages, however small"),
    "bandwidth": Part("bandwidth", 3, "bytes of gradients"),
    "reader": Part("reader", 0, "waiting for rows"),
}
_HEADER = (
    "ranks", "hosts", "step", "samples/s", "efficiency", "epoch", "in all", "rank-hours", "limit",
)  # fmt: skip


def plan_page(
    name: str,
    measured: Measurement,
    networks: Sequence[NetworkPlan],
) -> str:
    """Return a plan as a page; see `table.plan_text`."""
    told: list[Child] = [paragraph(line) for line in measured_lines(measured)]
    sections = [
        Section("What was measured", told),
        Section(
            "More ranks",
            [grid(_rates(networks), _times(networks))],
            "Both axes are logarithmic: of the ranks, the exponent of two is shown. Samples per "
            "second are of full steps; the last step of an epoch may have fewer rows.",
        ),
        *(
            Section(one.name, _network(one, measured.workload), network_title(one))
            for one in networks
        ),
    ]
    best = {one.name: one.verdict.partition(":")[0] for one in networks}
    return page(f"Plan for {name}", "what more ranks would bring", sections, facts(dict(best)))


def _rates(networks: Sequence[NetworkPlan]) -> Child:
    curves = [
        Series(
            one.name,
            [_exponent(each.ranks) for each in one.predictions],
            [each.samples_per_second for each in one.predictions],
            marks=_mark(one),
        )
        for one in networks
    ]
    chart = line_chart(curves, x_title="ranks, as powers of two", y_title="samples/s", log_y=True)
    return figure(
        "Samples per second", chart, about="the best number of ranks is marked, where it pays"
    )


def _mark(network: NetworkPlan) -> tuple[Mark, ...]:
    best = network.best
    if not network.pays:
        return ()
    return (Mark(_exponent(best.ranks), best.samples_per_second, f"{best.ranks:,}"),)


def _times(networks: Sequence[NetworkPlan]) -> Child:
    curves = [
        Series(
            one.name,
            [_exponent(each.ranks) for each in one.predictions],
            [each.total_seconds for each in one.predictions],
        )
        for one in networks
    ]
    chart = line_chart(curves, x_title="ranks, as powers of two", y_title="seconds", log_y=True)
    return figure("The whole call", chart, about="writing rows, launching, all epochs")


def _exponent(ranks: int) -> float:
    return math.log2(ranks)


def _network(network: NetworkPlan, work: Workload) -> list[Child]:
    wholes = [
        Whole(
            count(one.ranks, "rank"),
            {
                "computing": one.compute,
                "sharing cores": one.cores,
                "slow ranks": one.waiting,
                "latency": one.latency,
                "bandwidth": one.transfer,
                "reader": one.reading,
            },
        )
        for one in network.predictions
    ]
    parts = list(_PARTS.values())
    strong = [
        i for i, one in enumerate(network.predictions) if network.pays and one is network.best
    ]
    return [
        paragraph(network.verdict),
        *(paragraph(line) for line in notes(network, work)),
        figure(
            "A step", legend(parts, wholes), stacked_rows(wholes, parts, title="time of a step")
        ),
        table(
            _HEADER,
            [prediction_cells(one) for one in network.predictions],
            numeric=range(len(_HEADER) - 1),
            strong=strong,
        ),
    ]
