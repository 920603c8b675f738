"""A plan as text, for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ..report.numbers import duration, number, share, size
from .advice import NetworkPlan
from .links import link_text
from .measurement import Measurement
from .model import Prediction, Workload

_HEADER = ("RANKS", "HOSTS", "STEP", "SAMPLES/S", "EFFICIENT", "EPOCH", "IN ALL", "RANK-HOURS", "")


def plan_text(
    name: str,
    measured: Measurement,
    networks: Sequence[NetworkPlan],
) -> str:
    """Return a plan as lines of text.

    Args:
        name: what it is of.
        measured: what was measured.
        networks: what would come of it on each network.
    """
    lines = [f"plan for {name}", *measured_lines(measured)]
    for network in networks:
        lines += ["", network_title(network), *_table(network)]
        lines += [network.verdict, *notes(network, measured.workload)]
    return "\n".join(lines)


def measured_lines(measured: Measurement) -> list[str]:
    """Return what was measured, as lines."""
    work = measured.workload
    steps = work.steps[work.batch_size]
    how = (
        f"measured in {duration(measured.seconds)} on {measured.measured_rows:,} rows, for epochs "
        f"of {work.rows:,}, with 1 rank"
        + (f" and {measured.workers:,}" if measured.workers > 1 else "")
    )
    lines = [
        f"told by {measured.source}, with {count(measured.workers, 'rank')}"
        if measured.source
        else how,
        f"step of {work.batch_size:,} rows: "
        + ", ".join(
            f"{duration(steps[here].seconds)} with {here} on a host" for here in sorted(steps)
        )
        + ("" if measured.source else _processor(steps[min(steps)].cpu_seconds, measured.cores)),
    ]
    others = [rows for rows in sorted(work.steps) if rows != work.batch_size]
    if others:
        lines.append(
            "other batches: "
            + ", ".join(f"{rows:,} rows {duration(work.steps[rows][1].seconds)}" for rows in others)
        )
    lines.append(f"exchanged: {size(work.gradient_bytes)} of gradients")
    link = work.inside or measured.between
    if measured.source:
        if measured.between is not None:
            lines.append(f"link between hosts: {link_text(measured.between)}")
        elif measured.workers > 1:
            lines.append(f"each exchange within a host: {duration(work.overhead)}")
    elif link is not None:
        where = "within a host" if measured.between is None else "between hosts"
        lines.append(
            f"link {where}: {link_text(link)}, and {duration(work.overhead)} for each exchange"
        )
    longer = ", ".join(
        f"{duration(work.sharing[per_core])} with {number(per_core)}"
        for per_core in sorted(work.sharing)
    )
    if longer:
        lines.append(f"a step takes longer where ranks share a core: {longer} on it")
    if not measured.source:
        read = (
            f"{number(work.reader_rows[here])} with {here}" for here in sorted(work.reader_rows)
        )
        lines.append(f"reader: rows/s of a rank, {', '.join(read)} on a host")
    lines.append(
        f"before the first epoch: {duration(max(work.launch.values()))} of launching, "
        f"{duration(work.build)} of building, {duration(work.materialize)} of writing the rows"
    )
    if measured.noise_asked:
        lines.append(_noise(measured.noise_scale, work.batch_size))
    return lines


def _processor(seconds: float, cores: int) -> str:
    return f"; {duration(seconds)} of processor time, on {count(cores, 'core')}"


def count(number: int, what: str) -> str:
    """Return so many of what is counted: ``"1 rank"``, ``"1,024 ranks"``."""
    return f"{number:,} {what}" + "s" * (number != 1)


def network_title(network: NetworkPlan) -> str:
    """Return which network it is, and which hosts."""
    cluster = network.cluster
    return (
        f"{network.name} between hosts ({link_text(cluster.between)}), "
        f"{count(cluster.ranks_per_host, 'rank')} on each with "
        f"{count(cluster.cores_per_host, 'core')}"
    )


def _noise(noise_scale: float | None, batch_size: int) -> str:
    """Return what the gradient noise scale says."""
    if noise_scale is None:
        return (
            "gradient noise scale: not found, since the mean gradient of these steps cannot be "
            "told from noise; more ranks or a larger batch_size tell it"
        )
    ranks = max(1, round(noise_scale / batch_size))
    return (
        f"gradient noise scale: {number(noise_scale, 2)} rows; above about {ranks:,} ranks, larger "
        "global batches save hardly any steps"
    )


def notes(network: NetworkPlan, work: Workload) -> list[str]:
    """Return what is to be said besides: of shared cores, and of other ways of synchronising."""
    return [*_left_out(network, work), *_cores(network, work), _rounds(network)]


def _left_out(network: NetworkPlan, work: Workload) -> list[str]:
    """Return which numbers of ranks are not there although they were asked for."""
    if not network.left_out:
        return []
    numbers = ", ".join(f"{one:,}" for one in network.left_out)
    return [
        f"left out: {numbers} ranks, whose step of {work.batch_size:,} rows each takes more than "
        f"an epoch has ({work.rows:,})"
    ]


def _cores(network: NetworkPlan, work: Workload) -> list[str]:
    """Return what holds where more ranks share a core than were measured."""
    cluster = network.cluster
    measured = max([work.crowding, *work.sharing]) * cluster.cores_per_host
    crowded = [
        one
        for one in network.predictions
        if one.limit == "cores" and min(one.ranks, cluster.ranks_per_host) > measured
    ]
    if not crowded:
        return []
    return [
        f"ranks that share cores also wait for each other: from {crowded[0].ranks:,} ranks on, "
        "take these samples/s for the most there can be, and give ranks cores of their own"
    ]


def _rounds(network: NetworkPlan) -> str:
    """Return what another way of synchronising would bring, if it pays."""
    local = network.local
    if local is None:
        return "allreduce in every step is the way to begin with: others bring less than a tenth"
    plain = next(one for one in network.predictions if one.ranks == local.ranks)
    return (
        f"sync=LocalSGD(every={local.every}) on {local.ranks:,} ranks: "
        f"{number(local.samples_per_second)} samples/s in place of "
        f"{number(plain.samples_per_second)}; it trains in another way, and may need more epochs"
    )


def prediction_cells(one: Prediction) -> list[str]:
    """Return a row of the table."""
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
        + "  "
        + row[-1]
        for row in rows
    ]
