"""The MPI runtime's process on one host: mpirun on the first, its daemon on the others."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ...config.launch import MpiOptions
from ...machine import environment_at_start, is_stopped
from ..protocol.command import daemon_environment, mpirun_command
from ..protocol.network import Interface, daemon_network
from ..protocol.outcome import LOG_TAIL_LINES
from ..protocol.processes import (
    ChildOutput,
    describe_exit,
    end_descriptors,
    end_group,
    find_mpirun,
    remote_launch_script,
    shim_environment,
    start_tethered,
)
from ..protocol.topology import Node, Part
from .workspace import Workspace

# How long it gets to take its processes and files away when it is ended.
END_GRACE = 2.0
AGENT_SOCKET = "agent"


class Daemon:
    """A running mpirun or prted; its output is kept for the case that it fails.

    Args:
        command: its argv.
        environment: its environment.
        workspace: of its slot.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], workspace: Workspace
    ) -> None:
        self._name = Path(command[0]).name
        self._workspace = workspace
        self._process = start_tethered(command, environment, directory=str(workspace.path))
        assert self._process.stdout is not None
        self._output = ChildOutput(self._process.stdout, LOG_TAIL_LINES, None)
        workspace.watch(self._process.pid)
        # Its output ends a moment before it does.
        self._watched = end_descriptors(self._process.pid)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it; it ends by itself when a rank has failed."""
        code = self._process.poll()
        return code is not None and code < 0

    @property
    def log_tail(self) -> tuple[str, ...]:
        return self._output.tail

    def handlers(self) -> dict[int, Callable[[], None]]:
        """Return what to call when which descriptor can be read."""
        handlers = self._output.handlers()
        if not self.ended:
            handlers.update(dict.fromkeys(self._watched, _look))
        return handlers

    def describe_stop(self) -> str:
        """Say that it has been stopped; ``""`` if it has not."""
        if not is_stopped(self._process.pid):
            return ""
        return f"{self._name} (process {self._process.pid}) is stopped (by SIGSTOP or a debugger)"

    def describe_end(self) -> str:
        """Say how it ended; all of its output is then in `log_tail`."""
        code = self._process.wait()
        self._output.drain()
        end = f"{self._name} {describe_exit(code)}"
        # PMIx maps a file there, whose pages are taken when they are written.
        lacking = self._workspace.lacking_room() if code == -signal.SIGBUS else ""
        return f"{end}: {lacking} (TMPDIR)" if lacking else end

    def end(self) -> None:
        """End it and with it all shims of its host; safe to call again."""
        end_group(self._process, grace=END_GRACE)
        self._workspace.forget(self._process.pid)

    def close(self) -> None:
        self.end()
        self._output.close()
        for descriptor in self._watched:
            os.close(descriptor)
        self._watched = ()


def _look() -> None:
    """Do nothing: after any event, its slot looks at whether it has ended."""


def start_mpirun(
    part: Part, options: MpiOptions, interface: Interface, workspace: Workspace
) -> Daemon:
    """Start the ranks of the world; other hosts' daemons are asked for at `AGENT_SOCKET`.

    Raises:
        EnvironmentProblem: mpirun was not found.
    """
    agent = _write_agent(workspace.path) if part.hosts > 1 else None
    as_root = os.geteuid() == 0
    command = mpirun_command(find_mpirun(), part.nodes, options, agent=agent, as_root=as_root)
    environment = _environment(part.nodes[0], part.hosts, interface, workspace)
    environment["HSR_AGENT"] = str(workspace.path / AGENT_SOCKET)
    return Daemon(command, environment, workspace)


def start_prted(
    arguments: Sequence[str], node: Node, hosts: int, interface: Interface, workspace: Workspace
) -> Daemon:
    """Start the daemon of ``node``, this host, one of so many, as mpirun asked.

    Raises:
        EnvironmentProblem: it was not found.
    """
    program = str(Path(find_mpirun()).with_name("prted"))
    environment = _environment(node, hosts, interface, workspace)
    return Daemon([program, *arguments], environment, workspace)


def _environment(
    node: Node, hosts: int, interface: Interface, workspace: Workspace
) -> dict[str, str]:
    network = daemon_network(interface) if hosts > 1 else {}
    environment = daemon_environment(
        environment_at_start(), node.doors, str(workspace.path), network
    )
    own = Path(find_mpirun()).parents[1] / "lib"
    if others := environment.get("LD_LIBRARY_PATH"):  # perhaps those of another Open MPI
        environment["LD_LIBRARY_PATH"] = f"{own}:{own}/openmpi:{others}"
    return {**environment, **shim_environment()}


def _write_agent(directory: Path) -> str:
    # mpirun splits an agent's command at blanks, and the paths in it may hold some.
    path = directory / "agent.sh"
    path.write_text(remote_launch_script())
    path.chmod(0o700)
    # By way of the shell also where nothing in a temporary folder may be executed (noexec).
    return str(path) if " " in str(path) else f"/bin/sh {path}"
