"""A run's output lines and progress on the driver's terminal."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from tqdm import tqdm

from ..cluster.protocol.messages import Dropped, Envelope, Log, Notice, Placed, Progress, Queued
from ..cluster.protocol.topology import format_ranks
from ..cluster.spark.jobs import watch_jobs
from ..cluster.spark.session import mute_console_progress
from ..errors import one_line
from ..formatting import duration
from ..machine import repeat_in_thread
from .notebook import bar_class, in_notebook

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Seconds after which the current activity is shown again: a minimum, and a fraction of its duration
# so far, so that the log of a long run stays short.
_REPEAT_SECONDS, _REPEAT_FRACTION = 5.0, 0.05
# Seconds after which a usually short activity is shown, and between two polls.
_MOMENT, _LOOK_SECONDS = 2.0, 0.5
# Progress bar of an activity that has no steps.
_WITHOUT_STEPS = "{desc} [{elapsed}]"
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
    in long ones. A long activity is shown again after some seconds. In a notebook, one bar shows
    activities and epochs, and few lines are printed. Warnings go to the log only. While several
    runs are active, each has its own bar, and their lines begin with their names.

    Args:
        name: name of the run beside others.
        stream: output; by default standard error, in a notebook standard output.
        quiet: print nothing.
        title: what else distinguishes the run, such as its parameters; then all its lines begin
            with the name and the title.
        task: activity of the ranks once they are placed, for display; by default unknown.
        clock: seconds of a steady clock.
    """

    def __init__(
        self,
        name: str,
        stream: TextIO | None = None,
        *,
        quiet: bool = False,
        title: str = "",
        task: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._title = one_line(title)
        self._task = task
        self._clock = clock
        # Times of: the activity's start, the last line, the last progress report, and the last line
        # within an epoch.
        self._began = self._shown = self._last_report = self._epoch_shown = clock()
        # The current activity; empty where the ranks run a function, which prints by itself.
        self._activity = ""
        # Whether it was shown, whether it is an epoch, and its progress.
        self._announced, self._in_epoch = True, False
        self._describe: Callable[[], str] | None = None
        self._notebook = in_notebook()
        # Notebooks mark standard error as errors.
        default = sys.stdout if self._notebook else sys.stderr
        self._stream = default if stream is None else stream
        self.quiet = quiet
        self._draws = self._notebook or self._stream.isatty()
        self._bar: tqdm[Any] | None = None

    def on_message(self, envelope: Envelope) -> None:
        """Show one message; kinds that are not for people are ignored."""
        if self.quiet:
            return
        with _lock:
            if self not in _active:
                _active.append(self)
            self._show(envelope)

    def _show(self, envelope: Envelope) -> None:
        match envelope.message:
            case Notice(text, warn=False):  # warnings go to the log
                if envelope.rank < 0:  # the driver's own
                    self._show_activity(text)
                else:
                    self._print(one_line(text))
            case Log(lines):
                for line in lines:
                    self._print(self._prefix(envelope) + line)
            case Dropped(lines):
                self._print(f"({lines:,} lines of output came too fast, and are not shown)")
            case Queued():
                self._show_activity("waiting for slots that other runs of this process hold")
            case Placed(size, placement):
                if not self._task:
                    self._end_bar()
                self._begin(self._task)
                self._print(f"{format_ranks(size)} on {placement}")
            case Progress() as progress:
                self._progress(progress)

    def poll(self) -> None:
        """Show the current activity if nothing was shown for some seconds."""
        if self.quiet or not self._activity:
            return
        now = self._clock()
        if self._notebook:
            # Short activities do not replace the bar of the epoch before.
            drawn = self._bar is not None and self._bar.total is None
            if not self._in_epoch and (drawn or now - self._began >= _MOMENT):
                self._draw_activity()
        elif self._bar is None:
            if self._announced and self._due(max(self._shown, self._last_report), now):
                details = [self._progress_text(), f"{duration(now - self._began)} so far"]
                self._print(f"{self._activity}: {', '.join(filter(None, details))}")
            elif not self._announced and now - self._began >= _MOMENT:
                self._announce()

    def report(self, text: str) -> None:
        """Show an activity of the driver, which starts now."""
        if not self.quiet:
            self._show_activity(text)

    def print(self, text: str) -> None:
        """Print a line that stays, also in a notebook."""
        if not self.quiet:
            self._print(one_line(text))

    @contextlib.contextmanager
    def during(self, activity: str, progress: Callable[[], str] | None = None) -> Iterator[None]:
        """Show an activity of the driver while the block runs, if it takes more than a moment.

        Args:
            activity: for display; one that was reported already goes on.
            progress: describes how far it is, or returns nothing; called on another thread.
        """
        if not self._activity.startswith(activity):
            self._begin(activity)
            self._announced = False
        self._describe = progress
        try:
            with (
                contextlib.nullcontext()
                if self.quiet
                else repeat_in_thread(self.poll, "hsr-console", every=_LOOK_SECONDS)
            ):
                yield
        finally:
            self._describe = None
            if not self._announced:
                self._begin("")

    def _show_activity(self, text: str) -> None:
        self._begin(one_line(text))
        self._announce()

    def _announce(self) -> None:
        self._announced = True
        if self._notebook:
            self._draw_activity()
        else:
            self._print(self._activity)

    def _draw_activity(self) -> None:
        """Show the current activity in the bar, without a line."""
        text = self._tag() + ": ".join(filter(None, [self._activity, self._progress_text()]))
        with _lock:
            if self._bar is not None and self._bar.total is not None:
                self._end_bar()
            bar = self._open_bar(text, None) if self._bar is None else self._bar
            bar.set_description_str(text)

    def _progress_text(self) -> str:
        return "" if self._describe is None else self._describe()

    def _begin(self, activity: str) -> None:
        self._activity, self._began = activity, self._clock()
        self._announced, self._in_epoch = True, False

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
        if self._draws:
            prefix = f"\033[{_COLOURS[envelope.rank % len(_COLOURS)]}m{prefix}\033[0m"
        return prefix + " "

    def _progress(self, progress: Progress) -> None:
        if progress.step == progress.steps:
            self._end_epoch(progress)
        elif self._draws:
            bar = self._bar_of_epoch(progress)
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

    def _bar_of_epoch(self, progress: Progress) -> tqdm[object]:
        if self._bar is not None and self._in_epoch:
            return self._bar
        self._begin(_title(progress))
        self._in_epoch = True
        text = self._tag() + self._activity
        if self._bar is None:
            # ``initial``: the rate counts only the steps since the bar began.
            return self._open_bar(text, progress.steps, progress.step)
        bar = self._bar
        bar.bar_format, bar.initial = None, 0
        bar.set_description_str(text, refresh=False)
        bar.set_postfix_str("", refresh=False)
        bar.reset(total=progress.steps)  # the bar shows it
        bar.initial = bar.n = bar.last_print_n = progress.step
        return bar

    def _open_bar(self, text: str, steps: int | None, initial: int = 0) -> tqdm[Any]:
        self._bar = bar_class()(
            total=steps,
            initial=initial,
            desc=text,
            unit="step",
            file=self._stream,
            leave=False,
            bar_format=None if steps else _WITHOUT_STEPS,
        )
        return self._bar

    def _end_epoch(self, progress: Progress) -> None:
        last = progress.epoch + 1 == progress.epochs
        details = [_format_metrics(progress.metrics), *_pace(progress)]
        if self._notebook:
            bar = self._bar_of_epoch(progress)
            bar.set_postfix_str("  ".join(filter(None, details)), refresh=False)
            bar.update(progress.step - bar.n)
        else:
            self._end_bar()
            self._print("  ".join([f"{_title(progress)}  {progress.steps} steps", *details]))
        self._begin("saving the model" if last else f"after {_title(progress)}")

    def _print(self, line: str) -> None:
        with _lock:
            text = self._tag() + line
            if self._draws:  # where there may be bars, also of other runs
                tqdm.write(text, file=self._stream)
            else:
                self._stream.write(text + "\n")
            self._stream.flush()
            self._shown = self._clock()

    def _tag(self) -> str:
        if self._title:
            return f"{one_line(self.name)} ({self._title}): "
        others = any(other.name != self.name for other in _active)
        return f"{one_line(self.name)}: " if others and self.name else ""


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


@contextlib.contextmanager
def show_activity(activity: str, spark: SparkSession | None = None) -> Iterator[None]:
    """Show an activity outside of a run while the block runs, if it takes more than a moment.

    Args:
        activity: for display.
        spark: session of the Spark jobs that this thread starts inside, to show their progress in
            place of Spark's own bar.
    """
    with contextlib.closing(Console("")) as console, contextlib.ExitStack() as stack:
        progress = None if spark is None else stack.enter_context(watch_jobs(spark))
        stack.enter_context(console.during(activity, progress))
        stack.enter_context(mute_console_progress(spark))
        yield
