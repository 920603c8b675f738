"""Strangers at the ports of a run: what they cost, and that slots come in past them."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import resource
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from horovod_spark_runner.cluster.driver.control_server import ControlServer
from horovod_spark_runner.cluster.protocol.listener import MAX_UNPROVEN
from horovod_spark_runner.cluster.protocol.messages import Envelope, Hello, StartDaemon
from horovod_spark_runner.cluster.protocol.topology import Node
from horovod_spark_runner.cluster.slot.node_door import ShimDoor, send_to_node
from horovod_spark_runner.cluster.slot.slot_link import _DriverLink
from horovod_spark_runner.cluster.slot.workspace import Workspace

KEY = b"k" * 32
MEGABYTE = 2**20

# A port of a run, which tells on request how many descriptors and how much memory it takes, and
# whether it can write a file.
LISTENS = """
import os, resource, select, sys, threading
from horovod_spark_runner.cluster.protocol.processes import resident_bytes
from horovod_spark_runner.cluster.driver.control_server import ControlServer
from horovod_spark_runner.cluster.slot.node_door import NodeDoor

key = bytes.fromhex(sys.argv[2])
limit = int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
if sys.argv[1] == "driver":
    server = ControlServer("127.0.0.1", key)
    port = server.address[1]
else:
    ordered = []
    door = NodeDoor("127.0.0.1", key, ordered.append)
    port = door.port

    def serve():
        while not ordered:
            handlers = door.handlers()
            for descriptor in select.select(list(handlers), [], [], 0.2)[0]:
                handlers[descriptor]()
            door.drop_late()

    threading.Thread(target=serve, daemon=True).start()
before = resident_bytes(os.getpid())
print(port, flush=True)
for line in sys.stdin:
    with open("/dev/null", "w"):
        opened = len(os.listdir("/proc/self/fd"))
    print(opened, resident_bytes(os.getpid()) - before, flush=True)
"""


class Port:
    """A process that listens as a driver or a slot does."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        self.address = "127.0.0.1", int(process.stdout.readline())

    def measure(self) -> tuple[int, int]:
        """Return its open descriptors, and how many bytes its memory has grown by."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        opened, grown = map(int, self._process.stdout.readline().split())
        return opened, grown


@contextlib.contextmanager
def listening(kind: str, descriptors: int) -> Iterator[Port]:
    command = [sys.executable, "-c", LISTENS, kind, KEY.hex(), str(descriptors)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Port(process)
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def many_descriptors() -> Iterator[None]:
    """Give the strangers of this process the descriptors that they need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def strangers(address: tuple[str, int], count: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        sockets = []
        for _ in range(count):
            sockets.append(stack.enter_context(socket.create_connection(address, 60)))
            sockets[-1].setblocking(False)
        yield sockets


def comes_in(kind: str, address: tuple[str, int]) -> bool:
    """Connect as a slot does; return whether it was let in."""
    if kind == "driver":
        link = _DriverLink(address, KEY)
        link.send(Envelope(0, -1, "h", Hello()))
        is_in = link.fileno() is not None
        link.close()
        return is_in
    send_to_node(Node("n", "h1", *address, 1, (1,), ()), KEY, StartDaemon(("a",)))
    return True


@pytest.mark.parametrize("kind", ["driver", "slot"])
def test_what_strangers_announce_is_not_kept(kind: str) -> None:
    announced = os.urandom(32) + struct.pack("!I", 4 * MEGABYTE - 100) + bytes(2 * MEGABYTE)
    with listening(kind, 4096) as port, strangers(port.address, 100) as knocking:
        rest = dict.fromkeys(knocking, memoryview(announced))
        deadline = time.monotonic() + 2.0
        while rest and time.monotonic() < deadline:
            _, ready, _ = select.select([], list(rest), [], 0.1)
            for stranger in ready:
                try:
                    rest[stranger] = rest[stranger][stranger.send(rest[stranger]) :]
                except OSError:  # dropped
                    del rest[stranger]
        _, grown = port.measure()
        assert grown < 20 * MEGABYTE
        assert comes_in(kind, port.address)


@pytest.mark.parametrize("kind", ["driver", "slot"])
@pytest.mark.parametrize("descriptors", [1024, 64])
def test_strangers_that_say_nothing_leave_descriptors_for_files(
    kind: str, descriptors: int
) -> None:
    with listening(kind, descriptors) as port:
        before, _ = port.measure()
        with strangers(port.address, 1100):
            deadline = time.monotonic() + 60
            most = before + 1
            while most < before + 5 and time.monotonic() < deadline:
                most = port.measure()[0]
            for _ in range(100):
                most = max(most, port.measure()[0])
                time.sleep(0.01)
            assert most < before + min(MAX_UNPROVEN, descriptors) + 5
            assert comes_in(kind, port.address)


def test_strangers_have_a_few_seconds() -> None:
    with listening("slot", 1024) as port, strangers(port.address, 2) as (silent, slow):
        for stranger in (silent, slow):
            stranger.settimeout(60)
            assert len(stranger.recv(32, socket.MSG_WAITALL)) == 32
        sent = 0
        while sent < 60 and not select.select([slow], [], [], 0.2)[0]:
            sent += slow.send(b"x")
        assert sent < 60  # less than a whole handshake
        assert silent.recv(1) == b""


def test_all_slots_come_in_while_strangers_knock() -> None:
    over = threading.Event()

    def knock(address: tuple[str, int]) -> None:
        held: list[socket.socket] = []
        while not over.is_set():
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(address, 10))
            if len(held) > 250:
                held.pop(0).close()
            time.sleep(0.002)
        for connection in held:
            connection.close()

    with ControlServer("127.0.0.1", KEY, slots=512) as server:
        knocking = [threading.Thread(target=knock, args=(server.address,)) for _ in range(4)]
        links: list[_DriverLink] = []

        def join(number: int) -> None:
            link = _DriverLink(server.address, KEY)
            links.append(link)
            link.send(Envelope(number, -1, "h", Hello()))

        joining = [threading.Thread(target=join, args=(number,)) for number in range(512)]
        for thread in [*knocking, *joining]:
            thread.start()
        for thread in joining:
            thread.join()
        over.set()
        for thread in knocking:
            thread.join()
        for link in links:
            link.check()
        heard = {server.events.get(timeout=60).slot for _ in links}
        assert heard == set(range(512))
        for link in links:
            link.close()


def test_a_driver_with_too_few_descriptors_for_its_slots_says_so() -> None:
    code = f"""
import resource
from horovod_spark_runner.cluster.driver.control_server import ControlServer
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
ControlServer("127.0.0.1", {KEY!r}, slots=90)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert re.search(r"EnvironmentProblem: .*\b100\b.*ulimit.*\b90\b", done.stderr)


CONNECTS = """
import socket, sys
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[1])
except PermissionError:
    print("refused")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_other_users_do_not_reach_the_sockets_of_a_slot() -> None:
    workspace = Workspace("0badcafe")
    door = ShimDoor(workspace.folder("rank-0") / "shim", lambda *_: None)
    os.chmod(door.path, 0o777)
    for path in (Path(door.path).parent, workspace.path, workspace.shared_memory):
        assert path is not None
        assert path.stat().st_mode & 0o777 == 0o700
    run = subprocess.run(
        ["/usr/bin/python3", "-c", CONNECTS, door.path],
        stdout=subprocess.PIPE,
        text=True,
        user=pwd.getpwnam("nobody").pw_uid,
        check=True,
    )
    assert run.stdout == "refused\n"
    door.close()
    workspace.close()
