"""A run's output lines and progress on the driver's terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn, TextIO

from tqdm import tqdm

from ...errors import one_line
from ...formatting import duration
from ..protocol.messages import Dropped, Log, Notice, Placed, Progress, Queued, Told
from ..protocol.topology import in_words

# Seconds after which it is said again what is being done: at first, and as a part of what it has
# taken so far, so that the log of a long run stays short.
_PATIENCE, _LATER = 5.0, 0.05
# Waiting that is told, as a part of the time, and what it is for.
WORTH_TELLING = 0.1
_WAITS = {"data": "for data", "exchange": "in the exchange", "checkpoint": "for checkpoints"}
_COLOURS = (36, 33, 32, 35, 34, 31)
# Guards the consoles of the runs that go on, and keeps the lines of several whole.
_lock = threading.RLock()
_going_on: list[Console] = []


class Console:
    """Prints the ranks' lines with a ``[rank/host]`` prefix and draws a progress bar.

    The bar appears on a terminal; elsewhere (a log file, CI) a line is printed per epoch, and some
    in long ones. What takes long is named again every some seconds. Warnings are left to the log.
    While several runs go on at once, each has a bar of its own, and their lines begin with their
    names.

    Args:
        name: what the run is called beside others.
        stream: where to print; standard error by default.
        quiet: print nothing.
        task: what ranks do once they are there, to be named while it lasts; by default nobody
            knows.
        clock: seconds of a steady clock.
    """

    def __init__(
        self,
        name: str,
        stream: TextIO | None = None,
        *,
        quiet: bool = False,
        task: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = one_line(name)
        self._task = task
        self._clock = clock
        # When what goes on began, a line was shown, the ranks told how far they are, and that was
        # shown of an epoch.
        self._began = self._shown = self._heard = self._epoch_shown = clock()
        # What goes on; empty where the ranks run a function, which tells of itself.
        self._doing = ""
        self._stream = stream if stream is not None else sys.stderr
        self._quiet = quiet
        self._terminal = self._stream.isatty()
        self._bar: tqdm[NoReturn] | None = None

    def on_message(self, told: Told) -> None:
        """Show one message; most kinds are for others."""
        if self._quiet:
            return
        with _lock:
            if self not in _going_on:
                _going_on.append(self)
            self._show(told)

    def _show(self, told: Told) -> None:
        match told.message:
            case Notice(text, warn=False):  # of warnings the log tells
                if told.rank < 0:  # the driver's own
                    self._begin(one_line(text))
                self._print(one_line(text))
            case Log(lines):
                for line in lines:
                    self._print(self._prefix(told) + line)
            case Dropped(lines):
                self._print(f"({lines:,} lines of output came too fast, and are not shown)")
            case Queued():
                self._begin("waiting for slots that other runs of this process hold")
                self._print(self._doing)
            case Placed(size, placement):
                self._begin(self._task)
                self._print(f"{in_words(size)} on {placement}")
            case Progress() as progress:
                self._progress(progress)

    def look(self) -> None:
        """Say what is still being done, if nothing was shown for some seconds; ends no run."""
        now, last = self._clock(), max(self._shown, self._heard)
        if self._doing and not self._quiet and self._bar is None and self._due(last, now):
            self._print(f"{self._doing}: {duration(now - self._began)} so far")

    def say(self, text: str) -> None:
        """Show a line of the driver's own, on what is being done from now on."""
        if not self._quiet:
            self._begin(one_line(text))
            self._print(one_line(text))

    def _begin(self, doing: str) -> None:
        self._doing, self._began = doing, self._clock()

    def _due(self, last: float, now: float) -> bool:
        return now - last >= max(_PATIENCE, _LATER * (now - self._began))

    def close(self) -> None:
        """The run has ended."""
        with _lock:
            self._end_bar()
            if self in _going_on:
                _going_on.remove(self)

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _prefix(self, told: Told) -> str:
        prefix = f"[{told.rank}/{told.host}]"
        if self._terminal:
            prefix = f"\033[{_COLOURS[told.rank % len(_COLOURS)]}m{prefix}\033[0m"
        return prefix + " "

    def _progress(self, progress: Progress) -> None:
        if progress.step == progress.steps:
            self._end_epoch(progress)
        elif self._terminal:
            bar = self._bar or self._new_bar(progress)
            told = [_format_metrics(progress.metrics), *_pace(progress)]
            bar.set_postfix_str("  ".join(filter(None, told)), refresh=False)
            bar.update(progress.step - bar.n)
        else:
            self._within_epoch(progress)

    def _within_epoch(self, progress: Progress) -> None:
        """Print a line of an epoch that goes on, now and then."""
        now, title = self._clock(), _title(progress)
        self._heard = now
        if not self._doing.startswith(title):
            self._begin(title)
            self._epoch_shown = now
        self._doing = f"{title} at step {progress.step:,} of {progress.steps:,}"
        if self._due(self._epoch_shown, now):
            self._epoch_shown = now
            line = f"{title}  {progress.step:,}/{progress.steps:,} steps"
            told = [line, _format_metrics(progress.metrics), *_pace(progress)]
            self._print("  ".join(filter(None, told)))

    def _new_bar(self, progress: Progress) -> tqdm[NoReturn]:
        # The steps before the bar took time that it has not seen: its rate is that of those after.
        self._bar = tqdm(
            total=progress.steps,
            initial=progress.step,
            desc=self._tag() + _title(progress),
            unit="step",
            file=self._stream,
            leave=False,
        )
        return self._bar

    def _end_epoch(self, progress: Progress) -> None:
        self._end_bar()
        line = f"{_title(progress)}  {progress.steps} steps  {_format_metrics(progress.metrics)}"
        self._print("  ".join([line, *_pace(progress)]))
        last = progress.epoch + 1 == progress.epochs
        self._begin("saving the model" if last else f"after {_title(progress)}")

    def _print(self, line: str) -> None:
        with _lock:
            text = self._tag() + line
            if self._terminal:  # where there may be bars, also of other runs
                tqdm.write(text, file=self._stream)
            else:
                self._stream.write(text + "\n")
            self._stream.flush()
            self._shown = self._clock()

    def _tag(self) -> str:
        others = any(other._name != self._name for other in _going_on)
        return f"{self._name}: " if others else ""


def _title(progress: Progress) -> str:
    return f"epoch {progress.epoch + 1}/{progress.epochs}"


def _format_metrics(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def _pace(progress: Progress) -> list[str]:
    """Return how fast a training is, how long it will take, and what it waits for."""
    told = []
    if progress.samples_per_second:
        told.append(f"{progress.samples_per_second:,.0f} samples/s")
    if progress.seconds_left:
        told.append(f"{duration(progress.seconds_left)} left")
    waits = [
        f"{part:.0%} {_WAITS.get(kind, kind)}"
        for kind, part in progress.waits.items()
        if part >= WORTH_TELLING
    ]
    return [*told, *(["waiting " + ", ".join(waits)] if waits else [])]
