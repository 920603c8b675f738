"""A run's output lines and progress on the driver's terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn, TextIO

from tqdm import tqdm

from ..cluster.protocol.messages import Dropped, Envelope, Log, Notice, Placed, Progress, Queued
from ..cluster.protocol.topology import format_ranks
from ..errors import one_line
from ..formatting import duration

# Seconds after which the current activity is shown again: a minimum, and a fraction of its duration
# so far, so that the log of a long run stays short.
_REPEAT_SECONDS, _REPEAT_FRACTION = 5.0, 0.05
# Smallest fraction of time spent waiting that is shown, and the names of the reasons.
_SHOWN_WAITS = 0.1
_WAITS = {"data": "for data", "exchange": "in the exchange", "checkpoint": "for checkpoints"}
_COLOURS = (36, 33, 32, 35, 34, 31)
# Guards the consoles of the active runs, and keeps their lines whole.
_lock = threading.RLock()
_active: list[Console] = []


class Console:
    """Prints the ranks' lines with a ``[rank/host]`` prefix and draws a progress bar.

    The bar appears on a terminal; elsewhere (a log file, CI) a line is printed per epoch, and more
    in long ones. A long activity is shown again after some seconds. Warnings go to the log only.
    While several runs are active, each has its own bar, and their lines begin with their names.

    Args:
        name: name of the run beside others.
        stream: output; standard error by default.
        quiet: print nothing.
        task: activity of the ranks once they are placed, for display; by default unknown.
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
        # Times of: the activity's start, the last line, the last progress report, and the last line
        # within an epoch.
        self._began = self._shown = self._last_report = self._epoch_shown = clock()
        # The current activity; empty where the ranks run a function, which prints by itself.
        self._activity = ""
        self._stream = stream if stream is not None else sys.stderr
        self._quiet = quiet
        self._terminal = self._stream.isatty()
        self._bar: tqdm[NoReturn] | None = None

    def on_message(self, envelope: Envelope) -> None:
        """Show one message; kinds that are not for people are ignored."""
        if self._quiet:
            return
        with _lock:
            if self not in _active:
                _active.append(self)
            self._show(envelope)

    def _show(self, envelope: Envelope) -> None:
        match envelope.message:
            case Notice(text, warn=False):  # warnings go to the log
                if envelope.rank < 0:  # the driver's own
                    self._begin(one_line(text))
                self._print(one_line(text))
            case Log(lines):
                for line in lines:
                    self._print(self._prefix(envelope) + line)
            case Dropped(lines):
                self._print(f"({lines:,} lines of output came too fast, and are not shown)")
            case Queued():
                self._begin("waiting for slots that other runs of this process hold")
                self._print(self._activity)
            case Placed(size, placement):
                self._begin(self._task)
                self._print(f"{format_ranks(size)} on {placement}")
            case Progress() as progress:
                self._progress(progress)

    def poll(self) -> None:
        """Show the current activity if nothing was shown for some seconds."""
        now, last = self._clock(), max(self._shown, self._last_report)
        if self._activity and not self._quiet and self._bar is None and self._due(last, now):
            self._print(f"{self._activity}: {duration(now - self._began)} so far")

    def report(self, text: str) -> None:
        """Show an activity of the driver, which starts now."""
        if not self._quiet:
            self._begin(one_line(text))
            self._print(one_line(text))

    def _begin(self, activity: str) -> None:
        self._activity, self._began = activity, self._clock()

    def _due(self, last: float, now: float) -> bool:
        return now - last >= max(_REPEAT_SECONDS, _REPEAT_FRACTION * (now - self._began))

    def close(self) -> None:
        """Remove the bar: the run has ended."""
        with _lock:
            self._end_bar()
            if self in _active:
                _active.remove(self)

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _prefix(self, envelope: Envelope) -> str:
        prefix = f"[{envelope.rank}/{envelope.host}]"
        if self._terminal:
            prefix = f"\033[{_COLOURS[envelope.rank % len(_COLOURS)]}m{prefix}\033[0m"
        return prefix + " "

    def _progress(self, progress: Progress) -> None:
        if progress.step == progress.steps:
            self._end_epoch(progress)
        elif self._terminal:
            bar = self._bar or self._new_bar(progress)
            details = [_format_metrics(progress.metrics), *_pace(progress)]
            bar.set_postfix_str("  ".join(filter(None, details)), refresh=False)
            bar.update(progress.step - bar.n)
        else:
            self._within_epoch(progress)

    def _within_epoch(self, progress: Progress) -> None:
        """Print a line of a running epoch, now and then."""
        now, title = self._clock(), _title(progress)
        self._last_report = now
        if not self._activity.startswith(title):
            self._begin(title)
            self._epoch_shown = now
        self._activity = f"{title} at step {progress.step:,} of {progress.steps:,}"
        if self._due(self._epoch_shown, now):
            self._epoch_shown = now
            line = f"{title}  {progress.step:,}/{progress.steps:,} steps"
            details = [line, _format_metrics(progress.metrics), *_pace(progress)]
            self._print("  ".join(filter(None, details)))

    def _new_bar(self, progress: Progress) -> tqdm[NoReturn]:
        # ``initial``: the rate counts only the steps since the bar began.
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
        others = any(other._name != self._name for other in _active)
        return f"{self._name}: " if others else ""


def _title(progress: Progress) -> str:
    return f"epoch {progress.epoch + 1}/{progress.epochs}"


def _format_metrics(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def _pace(progress: Progress) -> list[str]:
    """Return the speed of a training, the time left, and its waits, as texts."""
    details = []
    if progress.samples_per_second:
        details.append(f"{progress.samples_per_second:,.0f} samples/s")
    if progress.seconds_left:
        details.append(f"{duration(progress.seconds_left)} left")
    waits = [
        f"{part:.0%} {_WAITS.get(kind, kind)}"
        for kind, part in progress.waits.items()
        if part >= _SHOWN_WAITS
    ]
    return [*details, *(["waiting " + ", ".join(waits)] if waits else [])]
