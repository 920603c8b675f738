"""Read a measurement from the records of a finished run."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..checkpoint.files import CheckpointInfo, newest_checkpoint
from ..checkpoint.model_state import Described
from ..checkpoint.run_directory import RunDirectory
from ..data.read.sharding import epoch_steps
from ..errors import InvalidInputError, brief
from ..formatting import duration
from ..observe.report.facts import RunFacts, read_facts
from ..sync.allreduce import BUCKET_BYTES
from ..sync.synchroniser import bytes_of_sum
from ..training.time_breakdown import WHOLE, Kind, mean_seconds
from .measurement import Measurement
from .model import ETHERNET_LATENCY, Link, StepTime, Workload, ring_seconds

# Within a host only the duration of the run's own exchange is known; it counts as overhead.
_AT_ONCE = Link(0.0, 1e15)
# The reader limits the steps if they wait for it for more than this part of their time.
_SLOW_READER = 0.1


def measure_from_run(directory: RunDirectory, now: float) -> Measurement:
    """Read a measurement from a run's time breakdown, rows, batch size and hosts.

    A run has a single number of ranks, so the rest is assumed: an exchange within a host takes as
    long for any number of ranks, and does not overlap with computation; between hosts, the latency
    is 50 microseconds per message; a host has as many cores as it had ranks.

    Args:
        directory: directory of a run with at least two whole epochs.
        now: seconds since the epoch.

    Raises:
        InvalidInputError: it holds no run, or its records are not sufficient.
        RunDirectoryError: its metrics or checkpoints are damaged.
    """
    facts = read_facts(directory, now)
    # The first epoch of a call includes building the model, and may be a part of an epoch.
    accounts = [a for a in facts.accounts if a is not None and Kind.BUILD not in a["seconds"]]
    call, fit = facts.last_call, facts.settings.get("fit", {})
    rows, batch = int(facts.settings.get("rows", 0)), int(fit.get("batch_size", 0))
    missing = {
        "the placement of its last call": not call.get("placement"),
        "its rows and batch size": not rows or not batch,
        f"the time of an epoch after the first of a call (whole epochs in all: "
        f"{len(facts.epochs)})": not accounts,
    }
    if any(missing.values()):
        raise InvalidInputError(
            f"{directory.location} cannot be planned from: that takes a finished run of two epochs "
            "or more. Missing: "
            f"{', '.join(what for what, is_missing in missing.items() if is_missing)}. "
            + "".join(f"{note} " for note in facts.notes)
            + "plan_training measures instead"
        )
    ranks = len(call["placement"])
    accounts = [account for account in accounts if account.get("workers") == ranks]
    if ranks > 1 and any(Kind.STEP in account["seconds"] for account in accounts):
        raise InvalidInputError(
            f"{directory.location} has no record of the exchange by itself (on a GPU, steps are "
            "only queued); plan_training measures it"
        )
    if not accounts or facts.settings.get("sync", {}).get("sync") != "allreduce":
        raise InvalidInputError(
            f"{directory.location} was not trained by Allreduce with {ranks} ranks after its first "
            "epoch, which a plan needs; plan_training measures instead"
        )
    compression = facts.settings["sync"].get("compression", "none")
    if compression != "none":
        raise InvalidInputError(
            f"{directory.location} was trained by Allreduce(compression={brief(compression)}), "
            "whose exchange does not predict other numbers of ranks; plan_training measures instead"
        )
    return _measurement(directory, facts, accounts, rows, batch)


def _measurement(
    directory: RunDirectory,
    facts: RunFacts,
    accounts: Sequence[Mapping[str, Any]],
    rows: int,
    batch: int,
) -> Measurement:
    call, fit = facts.last_call, facts.settings["fit"]
    hosts = Counter(str(one["host"]) for one in call["placement"])
    ranks, here = sum(hosts.values()), max(hosts.values())
    steps = fit.get("steps_per_epoch") or epoch_steps(rows, ranks * batch)

    def of_step(*kinds: str) -> float:
        means = [mean_seconds(account) for account in accounts]
        return statistics.median(sum(m.get(k, 0.0) for k in kinds) for m in means) / steps

    computing = of_step(Kind.COMPUTE, Kind.STEP, Kind.CALLBACKS)
    waited = of_step(Kind.DATA)
    exchange = statistics.median(
        min(account["seconds"].get(Kind.EXCHANGE, [0.0])) / steps for account in accounts
    )
    # Short waits, as at the beginning of an epoch, count as computation.
    reads = computing + exchange + waited
    is_slow = waited > _SLOW_READER * reads
    if not is_slow:
        computing += waited
    info = _newest(directory)
    size = _weight_bytes(info)
    gradients = _gradient_bytes(accounts, ranks, steps) or size
    between = None
    if len(hosts) > 1:
        between = _between(directory, ranks, gradients, exchange)
    seconds = call.get("seconds", {})
    launch = sum(seconds.get(name, 0.0) for name in ("check", "tasks", "rendezvous", "start"))
    own = mean_seconds(call.get("accounts"))
    epochs = int(fit.get("epochs", 1))
    of_epoch = rows if fit.get("steps_per_epoch") is None else steps * ranks * batch
    workload = Workload(
        rows=of_epoch,
        epochs=epochs,
        passes=epochs * of_epoch / rows,
        batch_size=batch,
        steps={here: StepTime(computing, computing, 0.0)},
        gradient_bytes=gradients,
        reader_rows={here: batch / reads if is_slow else 1e12},
        reader_cpu_seconds=0.0,
        overhead=0.0 if between is not None else exchange,
        overlap=0.0,
        # Recorded waiting is a mean over all epochs.
        cached=False,
        inside=None if between is not None else _AT_ONCE,
        launch={here: launch + seconds.get("results", 0.0)},
        materialize=seconds.get("materialize", 0.0),
        build=own.get(Kind.BUILD, 0.0) + own.get(Kind.FIRST_STEP, 0.0),
    )
    return Measurement(
        workload=workload,
        cores=here,
        ranks_per_host=here,
        workers=ranks,
        between=between,
        sums={},
        measured_rows=rows,
        seconds=0.0,
        source=f"{facts.place}, whole epochs: {len(accounts)}",
        on_gpus=any(one["gpus"] for one in call["placement"]),
    )


def _between(directory: RunDirectory, ranks: int, gradients: int, exchange: float) -> Link:
    """Derive the link between hosts from the duration of an exchange.

    Raises:
        InvalidInputError: it cannot be derived.
    """
    latency = ring_seconds(ranks, 0, Link(ETHERNET_LATENCY, 1e15))
    if gradients > BUCKET_BYTES:
        why = "the overlap of its exchange with the backward pass is not recorded"
    elif exchange <= latency:
        why = (
            f"an exchange took {duration(exchange)}, less than {2 * (ranks - 1):,} messages of "
            f"{duration(ETHERNET_LATENCY)}"
        )
    else:
        return Link(ETHERNET_LATENCY, 2 * (ranks - 1) / ranks * gradients / (exchange - latency))
    raise InvalidInputError(
        f"the bandwidth between the hosts of {directory.location} is unknown: {why}; plan_training "
        "measures it"
    )


def _gradient_bytes(accounts: Sequence[Mapping[str, Any]], ranks: int, steps: int) -> int | None:
    """Return the bytes of a step's gradients; ``None`` if not recorded."""
    # The record is the bytes that all ranks sent around a ring.
    told = [account[WHOLE] for account in accounts if account.get(WHOLE)]
    return round(statistics.median(told) / bytes_of_sum(ranks, ranks) / steps) if told else None


def _newest(directory: RunDirectory) -> CheckpointInfo:
    found = newest_checkpoint(directory, directory.run_id(), lambda line: None)
    if found is None:
        raise InvalidInputError(
            f"{directory.location} has no checkpoint, from which the size of the model is read"
        )
    return found[1]


def _weight_bytes(info: CheckpointInfo) -> int:
    """Return the bytes of the model's weights."""
    weights = [Described(*one) for one in info.variables]
    # NumPy has no bfloat16.
    return sum(
        math.prod(one.shape) * (2 if one.dtype == "bfloat16" else np.dtype(one.dtype).itemsize)
        for one in weights
        if one.name.startswith("model/")
    )
