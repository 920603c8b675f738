"""Format a plan as text. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ..formatting import duration, number, share, size
from .advice import NetworkPlan
from .links import format_link
from .measurement import Measurement
from .model import Prediction, Workload

_HEADER = ("RANKS", "HOSTS", "STEP", "SAMPLES/S", "EFFICIENT", "EPOCH", "IN ALL", "RANK-HOURS", "")


def plan_text(name: str, measured: Measurement, networks: Sequence[NetworkPlan]) -> str:
    """Format a plan as lines of text."""
    lines = [f"plan for {name}", *measured_lines(measured)]
    for network in networks:
        lines += ["", network_title(network), *_table(network)]
        lines += [network.verdict, *left_out_lines(network, measured.workload)]
    return "\n".join(lines)


def measured_lines(measured: Measurement) -> list[str]:
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


def network_title(network: NetworkPlan) -> str:
    """Format a network and its hosts."""
    cluster = network.cluster
    return (
        f"{network.name} between hosts ({format_link(cluster.between)}), "
        f"{count(cluster.ranks_per_host, 'rank')} on each with "
        f"{count(cluster.cores_per_host, 'core')}"
    )


def left_out_lines(network: NetworkPlan, work: Workload) -> list[str]:
    """List the requested numbers of ranks that have no prediction, with the reason."""
    if not network.left_out:
        return []
    numbers = ", ".join(f"{one:,}" for one in network.left_out)
    return [
        f"left out: {numbers} ranks, whose step of {work.batch_size:,} rows each takes more than "
        f"an epoch has ({work.rows:,})"
    ]


def prediction_cells(one: Prediction) -> list[str]:
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


def _table(network: NetworkPlan) -> list[str]:
    best = network.best.ranks if network.pays else None
    rows = [list(_HEADER)]
    for one in network.predictions:
        *cells, limit = prediction_cells(one)
        rows.append([*cells, limit + (", best" if one.ranks == best else "")])
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False))
        + f"  {row[-1]}"
        for row in rows
    ]
