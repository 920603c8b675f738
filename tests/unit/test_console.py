"""What of a run is shown on the driver."""

from __future__ import annotations

import io
import re
import time

from horovod_spark_runner.cluster.protocol.messages import (
    Envelope,
    Heartbeat,
    Log,
    Notice,
    Placed,
    Progress,
    Queued,
    from_driver,
)
from horovod_spark_runner.observe.console import Console

WARNING = Envelope(0, 1, "h", Notice("the rate is kept", warn=True))
MESSAGES = (
    from_driver(Queued()),
    from_driver(Placed(2, "h: ranks 0, 1 (CPU)")),
    Envelope(0, 1, "h", Log(("one", "two"))),
    Envelope(0, 1, "h", Notice("all weights taken", warn=False)),
    WARNING,
    Envelope(0, 0, "h", Progress(0, 2, 5, 5, 5, {"loss": 0.25})),
    Envelope(0, 0, "h", Progress(1, 2, 5, 5, 10, {"loss": 0.125}, 1234.5)),
    Envelope(0, -1, "h", Heartbeat()),
)


def shown(*messages: Envelope, quiet: bool = False) -> list[str]:
    stream = io.StringIO()
    console = Console("run 1", stream, quiet=quiet)
    for message in messages:
        console.on_message(message)
    console.close()
    return stream.getvalue().splitlines()


def test_what_is_printed() -> None:
    assert shown(*MESSAGES) == [
        "waiting for slots that other runs of this process hold",
        "2 ranks on h: ranks 0, 1 (CPU)",
        "[1/h] one",
        "[1/h] two",
        "all weights taken",
        "epoch 1/2  5 steps  loss 0.25",
        "epoch 2/2  5 steps  loss 0.125  1,234 samples/s",
    ]


def test_a_name_in_what_is_said_is_not_obeyed_and_ends_no_line() -> None:
    notice = from_driver(Notice("resuming from a\nb\x1b[2J", warn=False))
    assert shown(notice) == ["resuming from a\\nb\\x1b[2J"]


def test_quiet_means_nothing() -> None:
    assert shown(*MESSAGES, quiet=True) == []
    Console("run 1", stream := io.StringIO(), quiet=True).report("preparing the data")
    assert not stream.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_rate_of_a_bar_is_right_from_its_first_update() -> None:
    """Steps that were made before it was drawn have taken no time that it knows of."""
    console = Console("run 1", stream := Terminal())
    for step in (4_000, 4_001):
        console.on_message(Envelope(0, 0, "h", Progress(0, 2, step, 10_000, step, {"loss": 0.25})))
        time.sleep(0.2)
    console.close()
    rates = [float(rate) for rate in re.findall(r"([\d.]+)step/s", stream.getvalue())]
    assert rates
    assert all(rate < 100 for rate in rates)
    assert "4000/10000" in stream.getvalue()
    assert "4001/10000" in stream.getvalue()


def test_something_is_always_shown() -> None:
    """Every five seconds, and in long epochs of a log now and then."""
    now = 0.0
    console = Console("run 1", stream := io.StringIO(), clock=lambda: now)

    def lines_after(seconds: float, message: Envelope | None = None) -> list[str]:
        nonlocal now
        stream.seek(0)
        stream.truncate()
        for _ in range(int(4 * seconds)):
            now += 0.25
            if message is not None:
                console.on_message(message)
            console.poll()
        return stream.getvalue().splitlines()

    console.report("preparing the data")
    printed = lines_after(17)
    assert printed == [f"preparing the data: {number} s so far" for number in (5, 10, 15)]
    console.on_message(from_driver(Notice("starting 2 ranks", warn=False)))
    assert lines_after(6) == ["starting 2 ranks: 5 s so far"]
    # What the function of a `HorovodRunner` does, nobody knows.
    console.on_message(from_driver(Placed(2, "h: ranks 0, 1 (CPU)")))
    assert lines_after(60) == []
    console.report("building the model")
    first = Envelope(0, 0, "h", Progress(0, 2, 7, 5000, 7, {"loss": 0.25}, 1234.5))
    printed = lines_after(16, first)
    assert printed == ["epoch 1/2  7/5,000 steps  loss 0.25  1,234 samples/s"] * 3
    assert lines_after(7) == ["epoch 1/2 at step 7 of 5,000: 20.8 s so far"]
    assert 50 < len(lines_after(3600, first)) < 150, "no flood"
    console.on_message(Envelope(0, 0, "h", Progress(1, 2, 5, 5, 10, {"loss": 0.125})))
    assert lines_after(6) == ["saving the model: 5 s so far"]
    console.close()


def test_what_ranks_are_known_to_do_is_said() -> None:
    now = 0.0
    console = Console("plan", stream := io.StringIO(), task="measuring", clock=lambda: now)
    console.on_message(from_driver(Placed(1, "h: rank 0 (CPU)")))
    now = 6.0
    console.poll()
    assert stream.getvalue().splitlines()[-1] == "measuring: 6 s so far"
    console.close()


def test_warnings_are_left_to_the_log() -> None:
    assert shown(WARNING) == []


def test_one_rank_is_one() -> None:
    assert shown(from_driver(Placed(1, "h: rank 0 (CPU)"))) == ["1 rank on h: rank 0 (CPU)"]


def progress(step: int, loss: float) -> Envelope:
    return Envelope(0, 0, "h", Progress(0, 2, step, 5, step, {"loss": loss}))


def test_lines_of_runs_at_once_say_whose_they_are() -> None:
    stream = io.StringIO()
    one, two = Console("fold-1", stream), Console("fold-2", stream)
    one.on_message(progress(5, 0.5))
    two.on_message(progress(5, 0.25))
    one.on_message(Envelope(0, 1, "h", Log(("said",))))
    one.report("done")
    one.close()
    two.on_message(progress(5, 0.125))
    two.close()
    assert stream.getvalue().splitlines() == [
        "epoch 1/2  5 steps  loss 0.5",
        "fold-2: epoch 1/2  5 steps  loss 0.25",
        "fold-1: [1/h] said",
        "fold-1: done",
        "epoch 1/2  5 steps  loss 0.125",
    ]


def test_bars_of_runs_at_once_stay_apart() -> None:
    """Each bar keeps its line of the terminal, and what is printed is on one of its own."""
    stream = Terminal()
    one, two = Console("fold-1", stream), Console("fold-2", stream)
    one.on_message(progress(1, 0.5))
    two.on_message(progress(1, 0.25))
    before = screen(stream.getvalue())
    assert before[0].startswith("epoch 1/2")
    assert before[1].startswith("fold-2: epoch 1/2")
    one.on_message(Envelope(0, 1, "h", Log(("said",))))
    one.close()
    two.close()
    lines = screen(stream.getvalue())
    assert lines[:1] == ["fold-1: [1/h] said"]
    assert not any(lines[1:])  # bars leave nothing


def screen(written: str) -> list[str]:
    """Return what a terminal shows."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[\d*[A-Zm]|[\r\n]|[^\r\n\x1b]+", written):
        if part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif part.endswith("A"):
            row -= 1
        elif part[0] != "\x1b":
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines]
