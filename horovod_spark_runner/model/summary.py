"""Summary of the training that a model comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..checkpoint.retry_policy import Attempt
from ..cluster.protocol.topology import RankPlacement


@dataclass(frozen=True)
class TrainingSummary:
    """The training that a model comes from.

    Attributes:
        run_dir: path or URL of the run directory.
        history: metrics of each epoch, over all ranks.
        placement: where the ranks ran; empty for a model that was read from a run directory.
        timings: seconds per phase of the run, one after the other: ``prepare`` (checks),
            ``materialize``, ``attempts`` (earlier ones, and the pauses between), ``check``,
            ``slots``, ``tasks``, ``rendezvous``, ``start``, ``function``, ``results`` (of the last
            attempt; see `RunResult`) and ``load``; in all ``total``. Of ``function``, on rank 0:
            ``build``, ``epochs``, ``save``. Of ``epochs``, and summing up to it: ``first_step``,
            ``data`` (waiting for the reader), ``compute``, ``exchange`` (with other ranks, and
            waiting for them), or both as ``step`` where a framework does not tell them apart,
            ``callbacks`` (and the loop itself), ``validation``, ``agree`` (on metrics and what is
            next) and ``checkpoint``; what took no time is not there. Besides, ``train`` (the part
            of ``epochs`` from the first step of an epoch to the last) and its
            ``samples_per_second``. Empty for a model that was read from a run directory.
        attempts: the attempts the run took; empty for a model that was read from a run directory.
        traffic: bytes that the ranks of the last attempt have sent in their steps, all together:
            ``bytes_sent``, and ``bytes_uncompressed``, what ``Allreduce()`` would have sent;
            counted as a ring of the ranks sends them. Empty for a model that was read from a run
            directory.
        staleness: with ``sync=AsyncServer(…)``, how many updates of the last attempt came 0, 1, …
            updates of other ranks after the weights they change had been taken; else empty.
    """

    run_dir: str
    history: Sequence[Mapping[str, Any]] = ()
    placement: tuple[RankPlacement, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)
    attempts: tuple[Attempt, ...] = ()
    traffic: Mapping[str, int] = field(default_factory=dict)
    staleness: tuple[int, ...] = ()

    def to_fields(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return asdict(self)
