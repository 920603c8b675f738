"""A run's output lines and progress on the driver's terminal."""

from __future__ import annotations

import sys
from typing import NoReturn, TextIO

from tqdm import tqdm

from ..shared.messages import Dropped, Log, Notice, Placed, Progress, Queued, Told
from ..shared.topology import in_words

_COLOURS = (36, 33, 32, 35, 34, 31)


class Console:
    """Prints the ranks' lines with a ``[rank/host]`` prefix and draws a progress bar.

    The bar appears on a terminal; elsewhere (a log file, CI) one line is printed per epoch.
    Warnings are left to the log.

    Args:
        stream: where to print; standard error by default.
        quiet: print nothing.
    """

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._quiet = quiet
        self._terminal = self._stream.isatty()
        self._bar: tqdm[NoReturn] | None = None

    def on_message(self, told: Told) -> None:
        """Show one message; most kinds are for others."""
        if self._quiet:
            return
        match told.message:
            case Notice(text, warn=False):  # of warnings the log tells
                self._print(text)
            case Log(lines):
                for line in lines:
                    self._print(self._prefix(told) + line)
            case Dropped(lines):
                self._print(f"({lines:,} lines of output came too fast, and are not shown)")
            case Queued():
                self._print("waiting for another run of this process to end")
            case Placed(size, placement):
                self._print(f"{in_words(size)} on {placement}")
            case Progress() as progress:
                self._progress(progress)

    def say(self, text: str) -> None:
        """Show a line of the driver's own."""
        if not self._quiet:
            self._print(text)

    def close(self) -> None:
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
            bar.set_postfix_str(_format_metrics(progress.metrics), refresh=False)
            bar.update(progress.step - bar.n)

    def _new_bar(self, progress: Progress) -> tqdm[NoReturn]:
        # The steps before the bar took time that it has not seen: its rate is that of those after.
        self._bar = tqdm(
            total=progress.steps,
            initial=progress.step,
            desc=_title(progress),
            unit="step",
            file=self._stream,
            leave=False,
        )
        return self._bar

    def _end_epoch(self, progress: Progress) -> None:
        self.close()
        line = f"{_title(progress)}  {progress.steps} steps  {_format_metrics(progress.metrics)}"
        if progress.samples_per_second:
            line += f"  {progress.samples_per_second:,.0f} samples/s"
        self._print(line)

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line, file=self._stream)
        else:
            print(line, file=self._stream, flush=True)


def _title(progress: Progress) -> str:
    return f"epoch {progress.epoch + 1}/{progress.epochs}"


def _format_metrics(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
