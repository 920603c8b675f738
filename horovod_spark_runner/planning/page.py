"""Render a plan as an HTML page with one chart. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..report.lines import Series, line_chart
from ..report.page import Section, facts, figure, page, paragraph, table
from .advice import NetworkPlan
from .measurement import Measurement
from .table import left_out_lines, measured_lines, network_title, prediction_cells

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
