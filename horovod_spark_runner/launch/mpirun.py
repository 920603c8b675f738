"""Slot 0's handle on mpirun."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ..config import LaunchOptions
from .command import mpirun_command, mpirun_environment
from .outcome import LOG_TAIL_LINES
from .processes import (
    ChildOutput,
    describe_exit,
    end_group,
    find_mpirun,
    shim_command,
    start_tethered,
)
from .topology import World

# How long mpirun gets to take its daemons and files away when it is ended.
END_GRACE = 2.0


class Mpirun:
    """The running mpirun; its output is kept for the case that it fails.

    Args:
        world: ranks to start.
        options: the run's settings.
        directory: private directory, for mpirun's session files.

    Raises:
        EnvironmentProblem: mpirun was not found.
    """

    def __init__(self, world: World, options: LaunchOptions, directory: Path) -> None:
        command = mpirun_command(
            find_mpirun(),
            world,
            options,
            shim_command(world.sockets),
            as_root=os.geteuid() == 0,
        )
        environment = mpirun_environment(os.environ, str(directory))
        self._process = start_tethered(command, environment, directory=str(directory))
        self._output = ChildOutput(self._process, LOG_TAIL_LINES, None)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def log_tail(self) -> tuple[str, ...]:
        return self._output.tail

    def handlers(self) -> dict[int, Callable[[], None]]:
        """Return what to call when which descriptor can be read."""
        return self._output.handlers()

    def describe_end(self) -> str:
        """Say how mpirun ended; all of its output is then in `log_tail`."""
        code = self._process.wait()
        self._output.drain()
        return f"mpirun {describe_exit(code)}"

    def end(self) -> None:
        """End mpirun and with it all shims; safe to call again."""
        end_group(self._process, grace=END_GRACE)

    def close(self) -> None:
        self.end()
        self._output.close()
