"""A run's output lines and progress on the driver's terminal."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from tqdm import tqdm

from ..shared.channel import Message

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
        self._bar: tqdm[Any] | None = None

    def on_message(self, message: Message) -> None:
        """Show one message of a slot; unknown kinds are for others."""
        kind = message.get("type")
        if self._quiet or message.get("warn"):  # of warnings the log tells
            return
        if kind == "notice":
            self._print(str(message["text"]))
        elif kind == "log":
            for line in message["lines"]:
                self._print(self._prefix(message) + line)
        elif kind == "dropped":
            self._print(f"({message['lines']:,} lines of output came too fast, and are not shown)")
        elif kind == "queued":
            self._print("waiting for another run of this process to end")
        elif kind == "placed":
            ranks = "1 rank" if message["size"] == 1 else f"{message['size']} ranks"
            self._print(f"{ranks} on {message['placement']}")
        elif kind == "progress":
            self._progress(message)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _prefix(self, message: Message) -> str:
        rank = message.get("rank", -1)
        prefix = f"[{rank}/{message.get('host', '?')}]"
        if self._terminal:
            prefix = f"\033[{_COLOURS[rank % len(_COLOURS)]}m{prefix}\033[0m"
        return prefix + " "

    def _progress(self, message: Message) -> None:
        if message["step"] == message["steps"]:
            self._end_epoch(message)
        elif self._terminal:
            bar = self._bar or self._new_bar(message)
            bar.update(message["step"] - bar.n)
            bar.set_postfix_str(_format_metrics(message["metrics"]))

    def _new_bar(self, message: Message) -> tqdm[Any]:
        title = f"epoch {message['epoch'] + 1}/{message['epochs']}"
        self._bar = tqdm(
            total=message["steps"], desc=title, unit="step", file=self._stream, leave=False
        )
        return self._bar

    def _end_epoch(self, message: Message) -> None:
        self.close()
        line = f"epoch {message['epoch'] + 1}/{message['epochs']}"
        line += f"  {message['steps']} steps  {_format_metrics(message['metrics'])}"
        if message.get("samples_per_second"):
            line += f"  {message['samples_per_second']:,.0f} samples/s"
        self._print(line)

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line, file=self._stream)
        else:
            print(line, file=self._stream, flush=True)


def _format_metrics(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
