"""A slot's part in the MPI runtime of its host."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ...config.launch import MpiOptions
from ..protocol.command import daemon_environment, mpirun_command
from ..protocol.messages import StartDaemon
from ..protocol.network import Interface, daemon_network, mpi_network
from ..protocol.outcome import LOG_TAIL_LINES
from ..protocol.processes import (
    ChildOutput,
    describe_exit,
    end_descriptors,
    end_group,
    environment_at_start,
    find_mpirun,
    is_stopped,
    shim_environment,
    start_tethered,
)
from ..protocol.topology import Node, Part
from .node_door import Agent, NodeDoor, daemon_arguments, send_to_node
from .workspace import Workspace

# How long it gets to take its processes and files away when it is ended.
_END_GRACE = 2.0
# Seconds between checks for a stopped process.
CHECK_SECONDS = 2.0
BACKING_DIRECTORY = "OMPI_MCA_btl_sm_backing_directory"


class NodeRuntime:
    """Runs mpirun in slot 0, MPI's daemon in the first slot of each other host, else nothing.

    Args:
        interface: the chosen network interface.
        key: the run's secret.
        workspace: of the slot.

    Attributes:
        problem: why a daemon on another host cannot be started; ``""`` if nothing is wrong.
        stopped: text for people if it was stopped at the last check; ``""`` if it was not.
    """

    def __init__(self, interface: Interface, key: bytes, workspace: Workspace) -> None:
        self.interface = interface
        self.problem = ""
        self.stopped = ""
        self._last_check = 0.0
        self._key = key
        self._workspace = workspace
        self._part: Part | None = None
        self._daemon: _Daemon | None = None
        self._closing = contextlib.ExitStack()
        self._door = NodeDoor(interface.address, key, self._on_order)
        self._closing.callback(self._door.close)
        self._agent = Agent(workspace.path, self._on_remote_launch)
        self._closing.callback(self._agent.close)

    @property
    def port(self) -> int:
        """Port at the interface's address where the command of this host's daemon is taken."""
        return self._door.port

    @property
    def is_over(self) -> bool:
        """True if no daemon runs here, any more or at all."""
        return self._daemon is None or self._daemon.ended

    @property
    def has_ended(self) -> bool:
        """True if a daemon ran here and has ended."""
        return self._daemon is not None and self._daemon.ended

    @property
    def was_killed(self) -> bool:
        """True if a signal ended it; it ends by itself when a rank has failed."""
        return self._daemon is not None and self._daemon.was_killed

    @property
    def log_tail(self) -> tuple[str, ...]:
        return () if self._daemon is None else self._daemon.log_tail

    def join(self, part: Part, options: MpiOptions) -> None:
        """Prepare the host's daemon for ``part``; start mpirun if that falls to it.

        Raises:
            EnvironmentProblem: mpirun was not found.
        """
        self._part = part
        if part.starts_mpirun or part.led is None:
            self._door.close()
        if part.starts_mpirun:
            self._take(_start_mpirun(part, options, self.interface, self._workspace))

    def rank_environment(self) -> dict[str, str]:
        """Return the variables for ranks: the chosen interface, the folder for shared memory."""
        assert self._part is not None
        network = mpi_network(self.interface) if self._part.hosts > 1 else {}
        folder = self._workspace.shared_memory
        return network if folder is None else {**network, BACKING_DIRECTORY: str(folder)}

    def handlers(self) -> dict[int, Callable[[], None]]:
        """Return the handlers to call, by readable descriptor."""
        handlers = {**self._door.handlers(), **self._agent.handlers()}
        if self._daemon is not None:
            handlers.update(self._daemon.handlers())
        return handlers

    def check_stopped(self, now: float) -> str:
        """Check, now and then, for a stopped process; return a warning when it has been stopped."""
        self._door.drop_late()
        if self.is_over or now - self._last_check < CHECK_SECONDS:
            return ""
        assert self._daemon is not None
        self._last_check, before = now, self.stopped
        self.stopped = self._daemon.describe_stop()
        if not self.stopped or before:
            return ""
        return f"{self.stopped}: until it continues, ranks can neither end nor join"

    def describe_end(self) -> str:
        """Return how it ended, as text; all of its output is then in `log_tail`."""
        assert self._daemon is not None
        return self._daemon.describe_end()

    def end(self) -> None:
        """End it and with it this host's shims; safe to call again."""
        if self._daemon is not None:
            self._daemon.end()

    def close(self) -> None:
        self._closing.close()

    def _take(self, daemon: _Daemon) -> None:
        self._daemon = daemon
        self._closing.callback(daemon.close)

    def _on_remote_launch(self, host: str, command: str) -> None:
        """Send mpirun's order for a daemon on another host to the slot that leads that host."""
        # On a thread: one host that does not answer must not keep the others waiting.
        arguments = (host, command)
        threading.Thread(
            target=self._order_daemon, args=arguments, name="hsr-node", daemon=True
        ).start()

    def _order_daemon(self, host: str, command: str) -> None:
        assert self._part is not None
        try:
            node = next(node for node in self._part.nodes if node.name == host)
            order = StartDaemon(tuple(daemon_arguments(command)))
            send_to_node(node, self._key, order)
        except Exception as error:
            self.problem = self.problem or str(error) or repr(error)

    def _on_order(self, order: StartDaemon) -> None:
        """Start this host's daemon, as mpirun on slot 0 ordered."""
        self._door.close()
        part = self._part
        if part is None or part.led is None or self._daemon is not None:
            return
        self._take(
            _start_prted(order.arguments, part.led, part.hosts, self.interface, self._workspace)
        )


class _Daemon:
    """A running mpirun or prted; the end of its output explains its failure.

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
        self._killed = False
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
        """True if a signal ended it; it ends by itself when a rank has failed."""
        code = self._process.poll()
        return code is not None and code < 0

    @property
    def log_tail(self) -> tuple[str, ...]:
        return self._output.tail

    def handlers(self) -> dict[int, Callable[[], None]]:
        """Return the handlers to call, by readable descriptor."""
        handlers = self._output.handlers()
        if not self.ended:
            handlers.update(dict.fromkeys(self._watched, _wake_up))
        return handlers

    def describe_stop(self) -> str:
        """Return a text for people if it has been stopped, else ``""``."""
        if not is_stopped(self._process.pid):
            return ""
        return f"{self._name} (process {self._process.pid}) is stopped (by SIGSTOP or a debugger)"

    def describe_end(self) -> str:
        """Return how it ended, as text; all of its output is then in `log_tail`."""
        code = self._process.wait()
        self._output.drain()
        end = f"{self._name} {describe_exit(code)}"
        # PMIx maps a file there, whose pages are taken when they are written.
        lacking = self._workspace.lacking_room() if code == -signal.SIGBUS else ""
        return f"{end}: {lacking} (TMPDIR)" if lacking else end

    def end(self) -> None:
        """End it and with it all shims of its host; safe to call again."""
        if self._killed:  # its number may be another process's by now
            return
        self._killed = True
        end_group(self._process, grace=_END_GRACE)
        self._workspace.forget(self._process.pid)

    def close(self) -> None:
        self.end()
        self._output.close()
        for descriptor in self._watched:
            os.close(descriptor)
        self._watched = ()


def _wake_up() -> None:
    """Do nothing: after any event, the slot checks whether its daemon has ended."""


def _start_mpirun(
    part: Part, options: MpiOptions, interface: Interface, workspace: Workspace
) -> _Daemon:
    """Start mpirun; it calls the agent for the daemons of other hosts.

    Raises:
        EnvironmentProblem: mpirun was not found.
    """
    agent = Agent.COMMAND if part.hosts > 1 else None
    as_root = os.geteuid() == 0
    command = mpirun_command(find_mpirun(), part.nodes, options, agent=agent, as_root=as_root)
    environment = _environment(part.nodes[0], part.hosts, interface, workspace)
    return _Daemon(command, environment, workspace)


def _start_prted(
    arguments: Sequence[str], node: Node, hosts: int, interface: Interface, workspace: Workspace
) -> _Daemon:
    """Start the daemon of ``node``, this host, as mpirun ordered.

    Raises:
        EnvironmentProblem: it was not found.
    """
    program = str(Path(find_mpirun()).with_name("prted"))
    environment = _environment(node, hosts, interface, workspace)
    return _Daemon([program, *arguments], environment, workspace)


def _environment(
    node: Node, hosts: int, interface: Interface, workspace: Workspace
) -> dict[str, str]:
    network = daemon_network(interface) if hosts > 1 else {}
    environment = daemon_environment(
        environment_at_start(), node.doors, str(workspace.path), network
    )
    libraries = Path(find_mpirun()).parents[1] / "lib"
    if others := environment.get("LD_LIBRARY_PATH"):  # perhaps those of another Open MPI
        environment["LD_LIBRARY_PATH"] = f"{libraries}:{libraries}/openmpi:{others}"
    return {**environment, **shim_environment()}
