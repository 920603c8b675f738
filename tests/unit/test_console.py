"""What of a run is shown on the driver."""

from __future__ import annotations

import io
from typing import Any

from horovod_spark_runner.launch.driver.console import Console

PROGRESS = {
    "type": "progress",
    "epoch": 0,
    "epochs": 2,
    "step": 5,
    "steps": 5,
    "metrics": {"loss": 0.25},
}
MESSAGES: tuple[dict[str, Any], ...] = (
    {"type": "queued"},
    {"type": "placed", "size": 2, "placement": "h: ranks 0, 1 (CPU)"},
    {"type": "log", "rank": 1, "host": "h", "lines": ["one", "two"]},
    {"type": "notice", "text": "all weights taken", "warn": False},
    {"type": "notice", "text": "the rate is kept", "warn": True},
    PROGRESS,
    {"type": "of a later version"},
)


def shown(*messages: dict[str, Any], quiet: bool = False) -> list[str]:
    stream = io.StringIO()
    console = Console(stream, quiet=quiet)
    for message in messages:
        console.on_message(message)
    console.close()
    return stream.getvalue().splitlines()


def test_what_is_printed() -> None:
    assert shown(*MESSAGES) == [
        "waiting for another run of this process to end",
        "2 ranks on h: ranks 0, 1 (CPU)",
        "[1/h] one",
        "[1/h] two",
        "all weights taken",
        "epoch 1/2  5 steps  loss 0.25",
    ]


def test_quiet_means_nothing() -> None:
    assert shown(*MESSAGES, quiet=True) == []


def test_warnings_are_left_to_the_log() -> None:
    assert shown({"type": "notice", "text": "the rate is kept", "warn": True}) == []


def test_one_rank_is_one() -> None:
    placed = {"type": "placed", "size": 1, "placement": "h: rank 0 (CPU)"}
    assert shown(placed) == ["1 rank on h: rank 0 (CPU)"]
