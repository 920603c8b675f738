"""Driver, slots and the programs beside them talk over real sockets and pipes."""

from __future__ import annotations

import os
import queue
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from horovod_spark_runner.cluster.driver import control_server
from horovod_spark_runner.cluster.driver import launch as driver
from horovod_spark_runner.cluster.driver.control_server import ControlServer, _Mailbox
from horovod_spark_runner.cluster.programs import shim
from horovod_spark_runner.cluster.protocol import listener
from horovod_spark_runner.cluster.protocol.channel import NONCE_BYTES, Channel, connect
from horovod_spark_runner.cluster.protocol.messages import (
    INSTRUCTIONS,
    Back,
    CallWanted,
    CannotJoin,
    Disconnected,
    Dropped,
    Ended,
    Envelope,
    Gather,
    Heartbeat,
    Hello,
    Instruction,
    Log,
    RankReport,
    Refused,
    ResultFollows,
    Resumed,
    Silent,
    SlotReport,
    StartDaemon,
    Started,
    Stop,
)
from horovod_spark_runner.cluster.protocol.processes import ChildOutput
from horovod_spark_runner.cluster.protocol.rendezvous import SlotPlan
from horovod_spark_runner.cluster.protocol.topology import Node
from horovod_spark_runner.cluster.slot import slot_link
from horovod_spark_runner.cluster.slot.node_door import (
    Agent,
    MpiIdentity,
    NodeDoor,
    ShimDoor,
    send_to_node,
)
from horovod_spark_runner.cluster.slot.slot_link import SlotLink, StoppedError, _DriverLink
from horovod_spark_runner.cluster.slot.workspace import Workspace
from horovod_spark_runner.config.launch import LaunchSettings
from horovod_spark_runner.errors import EnvironmentProblem, InvalidInputError, LaunchError
from horovod_spark_runner.typed_json import MessageError, to_json
from tests.connections import cut

KEY = b"k" * 32


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def next_of(link: _DriverLink) -> list[Any]:
    """Wait for what the driver says next."""
    messages: list[Any] = []

    def came() -> bool:
        messages.extend(link.receive())
        return bool(messages)

    until(came)
    return messages


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None


def serve(door: Any, until_true: Callable[[], Any], seconds: float = 60.0) -> None:
    """Handle a door's events, as a slot's loop does."""
    deadline = time.monotonic() + seconds
    while not until_true():
        assert time.monotonic() < deadline
        handlers = door.handlers()
        ready, _, _ = select.select(list(handlers), [], [], 0.05)
        for descriptor in ready:
            handlers[descriptor]()


def envelope(slot: int, message: SlotReport | RankReport, rank: int = -1) -> Envelope:
    return Envelope(slot, rank, "h", message)


def test_a_slot_that_leaves_without_a_word_is_gone() -> None:
    with ControlServer("127.0.0.1", KEY) as server:
        link = _DriverLink(server.address, KEY)
        hello = envelope(3, Hello(), rank=1)
        link.send(hello)
        assert server.events.get(timeout=20) == hello
        link.close()
        disconnected = server.events.get(timeout=20)
        assert isinstance(disconnected.message, Disconnected)
        assert (disconnected.slot, disconnected.rank, disconnected.host) == (3, 1, "h")


def test_a_slot_that_says_good_bye_is_not() -> None:
    with ControlServer("127.0.0.1", KEY) as server:
        link = _DriverLink(server.address, KEY)
        link.send(envelope(3, Hello()))
        link.send(envelope(3, Ended()))
        link.drain(1.0)
        assert server.events.get(timeout=20) == envelope(3, Hello())
        time.sleep(0.2)
        assert server.events.empty()


def test_a_stranger_without_the_key_is_not_heard() -> None:
    with ControlServer("127.0.0.1", KEY) as server:
        link = _DriverLink(server.address, b"x" * 32, pauses=())
        link.send(envelope(0, Hello()))
        with socket.create_connection(server.address) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
            time.sleep(0.3)
        link.close()
        assert server.events.empty()


def test_a_lost_connection_is_mended() -> None:
    with ControlServer("127.0.0.1", KEY) as server:
        link = _DriverLink(server.address, KEY)
        assert not link.reconnect()  # nothing to mend
        link.close()
        assert link.reconnect()
        link.send(envelope(0, Back()))
        assert server.events.get(timeout=20) == envelope(0, Back())
    link.close()
    assert not link.reconnect()  # the driver is gone


def test_large_calls_and_results_pass(tmp_path: Path) -> None:
    call, result = os.urandom(9_000_001), os.urandom(11_000_003)
    with ControlServer("127.0.0.1", KEY, call) as server:
        link = _DriverLink(server.address, KEY)
        link.fetch(envelope(2, CallWanted()), tmp_path / "call", len(call))
        assert (tmp_path / "call").read_bytes() == call
        (tmp_path / "result").write_bytes(result)
        header = envelope(2, ResultFollows(len(result)), rank=5)
        assert link.send_file(header, tmp_path / "result")
        until(lambda: server.result(5))
        stream = server.result(5)
        assert stream is not None
        assert stream.read() == result
        link.close()


@pytest.mark.thorough
def test_a_call_that_cannot_be_fetched_says_from_where(tmp_path: Path) -> None:
    with ControlServer("127.0.0.1", KEY) as server:
        address = server.address
    link = _DriverLink(address, KEY)
    with pytest.raises(LaunchError, match=f"driver.*127.0.0.1.*{address[1]}"):
        link.fetch(envelope(2, CallWanted()), tmp_path / "call", 10)


def test_a_driver_that_cannot_be_reached_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    link = _DriverLink(address, KEY, pauses=())
    with pytest.raises(LaunchError, match=f"driver.*127.0.0.1.*{address[1]}"):
        link.check()


def test_a_single_lost_connection_at_the_start_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connect = socket.create_connection
    failures = iter([TimeoutError("lost")])

    def flaky(*args: Any, **more: Any) -> socket.socket:
        for failure in failures:
            raise failure
        return connect(*args, **more)

    monkeypatch.setattr(socket, "create_connection", flaky)
    with ControlServer("127.0.0.1", KEY) as server:
        link = _DriverLink(server.address, KEY, pauses=(0.0,))
        link.check()
        link.close()


def test_the_driver_listens_where_it_is_told(free_port: int) -> None:
    with ControlServer("127.0.0.1", KEY, host="driver.example", port=free_port) as server:
        assert server.address == ("driver.example", free_port)
        with socket.create_connection(("127.0.0.1", free_port), timeout=5):
            pass
        with pytest.raises(EnvironmentProblem, match=f"127.0.0.1.*{free_port}"):
            ControlServer("127.0.0.1", KEY, port=free_port)
    with pytest.raises(EnvironmentProblem, match=r"192.0.2.1.*\b0.*bindAddress"):
        ControlServer("192.0.2.1", KEY)


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Settings:
    """Stands in for a session's settings."""

    def __init__(self, **values: str) -> None:
        self.values = {name.replace("_", "."): text for name, text in values.items()}

    def get(self, name: str, default: str | None = None) -> str | None:
        return self.values.get(name, default)


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({"spark_driver_host": "10.0.0.5"}, ("10.0.0.5", "10.0.0.5", 0)),
        (
            {"spark_driver_host": "nat.example", "spark_driver_bindAddress": "0.0.0.0"},
            ("0.0.0.0", "nat.example", 0),
        ),
        ({"spark_driver_host": "[fd00::5]"}, ("fd00::5", "fd00::5", 0)),
        (
            {"spark_driver_host": "10.0.0.5", "spark_horovod_controlPort": "7077"},
            ("10.0.0.5", "10.0.0.5", 7077),
        ),
    ],
)
def test_where_the_driver_listens(
    settings: dict[str, str], place: tuple[str, str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "connect_host", lambda spark: None)
    monkeypatch.setattr(driver, "runs_on_this_machine", lambda spark: False)
    spark: Any = SimpleNamespace(conf=Settings(**settings))
    assert driver._control_address(spark) == place


def test_a_control_port_that_is_none() -> None:
    spark: Any = SimpleNamespace(conf=Settings(spark_horovod_controlPort="http"))
    with pytest.raises(InvalidInputError, match="controlPort.*'http'"):
        driver._control_address(spark)


def test_a_slot_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_server, "SEND_TIMEOUT", 1.0)
    with ControlServer("127.0.0.1", KEY, bytes(64 * 1024 * 1024)) as server:
        stuck, other = _DriverLink(server.address, KEY), _DriverLink(server.address, KEY)
        for number, link in enumerate((stuck, other)):
            link.send(envelope(number, Hello()))
            server.events.get(timeout=20)
        stuck.send(envelope(0, CallWanted()))  # and takes nothing of it
        time.sleep(0.2)
        began = time.monotonic()
        server.broadcast(Stop("enough"))
        assert time.monotonic() - began < 10  # no matter in which order they are told
        assert server.events.get(timeout=20).slot == 0
        assert next_of(other) == [Stop("enough")]
        stuck.close()
        other.close()


def plan_for(server: ControlServer, payload: bytes | None = None, size: int = 0) -> SlotPlan:
    return SlotPlan(
        run_id="unit",
        key=KEY,
        driver=server.address,
        options=LaunchSettings(2),
        workers=2,
        slots=2,
        payload=payload,
        payload_bytes=size,
    )


def test_a_slot_shows_life_while_it_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_link, "HEARTBEAT_SECONDS", 0.02)
    with ControlServer("127.0.0.1", KEY) as server:
        link = SlotLink(plan_for(server), 4)
        with link.keep_alive():
            for _ in range(3):
                assert server.events.get(timeout=20) == Envelope(4, -1, link.host, Heartbeat())
        link.close()


def test_a_slot_that_waits_for_its_answer_asks_again_on_a_new_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slot_link, "HEARTBEAT_SECONDS", 0.1)
    with ControlServer("127.0.0.1", KEY) as server:
        link, answers = SlotLink(plan_for(server), 4), []
        asking = CannotJoin(4, "its disk is full")
        waiting = threading.Thread(target=lambda: answers.append(link.await_answer(asking)))
        waiting.start()
        heard: list[Any] = []

        def asks() -> bool:
            heard.append(server.events.get(timeout=20).message)
            return bool(heard[-1] == asking)

        until(asks)
        cut(server)
        until(asks)
        assert heard.count(Back()) == 1
        server.send({4: Refused("slot 4")})
        waiting.join(5)
        assert answers == [Refused("slot 4")]
        link.close()


def test_a_slot_that_waits_hears_that_the_run_has_ended() -> None:
    with ControlServer("127.0.0.1", KEY) as server:
        link = SlotLink(plan_for(server), 4)
        threading.Timer(0.3, server.broadcast, [Stop("enough")]).start()
        with pytest.raises(StoppedError, match="enough"):
            link.await_answer(CannotJoin(4, "its disk is full"))
        link.close()


def test_a_large_call_leaves_the_driver_once_per_host(tmp_path: Path) -> None:
    call = os.urandom(9_000_001)
    leader, other = tmp_path / "leader", tmp_path / "other"
    leader.mkdir()
    other.mkdir()
    with ControlServer("127.0.0.1", KEY, call) as server:
        plan = plan_for(server, size=len(call))
        first, second = SlotLink(plan, 0), SlotLink(plan, 1)
        waiting = threading.Thread(target=second.fetch_call, args=(other / "payload", leader))
        waiting.start()
        first.fetch_call(leader / "payload", leader)
        waiting.join(5)
        assert (other / "payload").read_bytes() == call
        assert (other / "payload").samefile(leader / "payload")
        # Where the leader has gone, each fetches it for itself.
        (other / "payload").unlink()
        second.fetch_call(other / "payload", tmp_path / "gone")
        assert (other / "payload").read_bytes() == call
        first.close()
        second.close()


def test_a_result_that_ends_too_early_is_none(tmp_path: Path) -> None:
    (tmp_path / "result").write_bytes(b"only a part")
    with ControlServer("127.0.0.1", KEY) as server:
        link = _DriverLink(server.address, KEY)
        header = envelope(0, ResultFollows(100), rank=5)
        assert link.send_file(header, tmp_path / "result")
        link.close()
        assert isinstance(server.events.get(timeout=20).message, Disconnected)
        assert server.result(5) is None
        assert server.result(6) is None


def test_a_result_that_spark_was_faster_than_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "result").write_bytes(b"all of it")
    with ControlServer("127.0.0.1", KEY) as server:
        link = _DriverLink(server.address, KEY)
        link.send(envelope(0, Hello()))
        assert server.events.get(timeout=20) == envelope(0, Hello())
        header = envelope(0, ResultFollows(9), rank=5)
        threading.Timer(0.3, link.send_file, [header, tmp_path / "result"]).start()
        stream = server.result(5)
        assert stream is not None
        assert stream.read() == b"all of it"
        link.close()


def test_a_slot_that_has_connected_again_is_not_gone() -> None:
    with ControlServer("127.0.0.1", KEY) as server:
        lost, link = _DriverLink(server.address, KEY), _DriverLink(server.address, KEY)
        lost.send(envelope(3, Hello()))
        assert server.events.get(timeout=20) == envelope(3, Hello())
        # The driver has not heard that the first connection is lost.
        link.send(envelope(3, Back()))
        assert server.events.get(timeout=20) == envelope(3, Back())
        server.send({3: Gather()})
        assert next_of(link) == [Gather()]
        until(lambda: lost.receive() or lost.fileno() is None)
        assert server.events.empty()
        link.close()


def test_a_stranger_that_says_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "PROOF_TIMEOUT", 0.2)
    with (
        ControlServer("127.0.0.1", KEY) as server,
        socket.create_connection(server.address) as silent,
        socket.create_connection(server.address) as half,
    ):
        half.sendall(bytes(NONCE_BYTES))  # and no proof
        for stranger in (silent, half):
            stranger.settimeout(10)
            assert len(stranger.recv(NONCE_BYTES, socket.MSG_WAITALL)) == NONCE_BYTES
            assert stranger.recv(1) == b""
        assert server.events.empty()


def test_all_slots_are_served_by_one_thread() -> None:
    with ControlServer("127.0.0.1", KEY, bytes(1_000_000), slots=60) as server:
        before = threading.active_count()
        links = [_DriverLink(server.address, KEY) for _ in range(60)]
        for number, link in enumerate(links):
            link.send(envelope(number, Hello()))
        heard = {server.events.get(timeout=20).slot for _ in links}
        assert heard == set(range(60))
        assert threading.active_count() == before
        server.send({7: Stop("a"), 9: Stop("b")})
        for number, reason in ((7, "a"), (9, "b")):
            assert next_of(links[number]) == [Stop(reason)]
        for link in links:
            link.close()


EXHAUSTED_DRIVER = """
import errno, os, resource, socket, sys, time
from horovod_spark_runner.cluster.driver.control_server import ControlServer

refused, accept = [], socket.socket.accept

def counted(listener):
    try:
        return accept(listener)
    except OSError as error:
        refused.append(error.errno)
        raise

socket.socket.accept = counted
with ControlServer("127.0.0.1", bytes.fromhex(sys.argv[1])) as server:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError as error:
        assert error.errno == errno.EMFILE
    print(server.address[1], flush=True)
    deadline = time.monotonic() + 30
    while len(refused) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    for descriptor in held:
        os.close(descriptor)
    said = type(server.events.get(timeout=30).message).__name__
    print(said, set(refused) == {errno.EMFILE}, len(refused), flush=True)
"""


@pytest.mark.thorough
def test_a_driver_without_descriptors_accepts_again_when_it_has_some() -> None:
    command = [sys.executable, "-c", EXHAUSTED_DRIVER, KEY.hex()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        link = _DriverLink(("127.0.0.1", int(process.stdout.readline())), KEY)
        link.send(envelope(3, Hello()))
        received, exhausted, refused = process.stdout.readline().split()
        link.close()
    assert (received, exhausted) == ("Hello", "True")
    assert int(refused) < 50  # asked now and then, not round and round


def test_lines_that_nobody_takes_are_dropped_and_counted() -> None:
    mailbox = _Mailbox(limit=100)
    for number in range(30):
        mailbox.put(envelope(0, Log(("x" * 20, "y" * 20))))
        mailbox.put(envelope(0, Resumed(number)))
    messages = [event.message for event in mailbox.drain()]
    assert [m for m in messages if isinstance(m, Resumed)] == [Resumed(n) for n in range(30)]
    assert sum(isinstance(m, Log) for m in messages) == 2
    assert messages[-1] == Dropped(56)
    there_is_room_again = envelope(0, Log(("there is room again",)))
    mailbox.put(there_is_room_again)
    assert mailbox.get(timeout=1) == there_is_room_again
    mailbox.wake()
    began = time.monotonic()
    with pytest.raises(queue.Empty):
        mailbox.get(timeout=20)
    assert time.monotonic() - began < 4
    mailbox.wake()
    assert mailbox.drain() == []


def test_a_silent_slot_is_noticed() -> None:
    with ControlServer("127.0.0.1", KEY) as server:
        link = _DriverLink(server.address, KEY)
        link.send(envelope(2, Started(), rank=5))
        link.send(envelope(2, Heartbeat()))
        for _ in range(2):
            server.events.get(timeout=20)
        assert server.silent_slots(5.0) == []
        time.sleep(0.15)
        assert server.silent_slots(0.1) == [Envelope(2, 5, "h", Silent(0.1))]
        link.close()


def test_a_driver_that_did_not_listen_meanwhile_judges_no_silence() -> None:
    with ControlServer("127.0.0.1", KEY) as server:
        link = _DriverLink(server.address, KEY)
        link.send(envelope(3, Hello()))
        server.events.get(timeout=20)
        time.sleep(0.2)
        assert server.silent_slots(0.1)
        server.reset_silence()
        assert not server.silent_slots(0.1)
        link.close()


def node_of(door: NodeDoor) -> Node:
    return Node("hsr-node-1", "h1", "127.0.0.1", door.port, 1, (1,), ("/d",))


def test_a_nodes_door_believes_slot_0_only() -> None:
    heard: list[Any] = []
    door = NodeDoor("127.0.0.1", KEY, heard.append)
    sender = "import sys\nfrom tests.unit.test_connections import *\n"
    sender += "send_to_node(Node('n','h1','127.0.0.1',int(sys.argv[1]),1,(1,),()), "
    good = sender + "KEY, StartDaemon(('a',)))"
    bad = sender + "b'x' * 32, StartDaemon(('b',)))"
    with socket.create_connection(("127.0.0.1", door.port)) as idle:  # says nothing, ever
        for code in (bad, good):
            process = subprocess.Popen([sys.executable, "-c", code, str(door.port)])
            serve(door, partial(has_ended, process), 20)
        serve(door, lambda: heard)
        assert heard == [StartDaemon(("a",))]
        idle.close()
    door.close()
    assert door.handlers() == {}


def test_a_daemon_that_cannot_be_started_is_no_lost_connection() -> None:
    def fail(order: StartDaemon) -> None:
        raise BlockingIOError(11, "no more processes")

    door = NodeDoor("127.0.0.1", KEY, fail)
    order = threading.Thread(target=send_to_node, args=(node_of(door), KEY, StartDaemon(())))
    order.start()
    with pytest.raises(BlockingIOError):
        serve(door, lambda: False)
    order.join(5)
    door.close()


def test_an_order_that_is_none_is_named() -> None:
    door = NodeDoor("127.0.0.1", KEY, print)
    connecting = threading.Thread(target=lambda: ended.append(order_of_nothing(door)))
    ended: list[Any] = []
    connecting.start()
    with pytest.raises(MessageError, match="'Stop'.*StartDaemon"):
        serve(door, lambda: False)
    door.close()
    connecting.join(5)
    assert ended == [b""]


def order_of_nothing(door: NodeDoor) -> bytes:
    connection, channel = connect(("127.0.0.1", door.port), 5, KEY, *INSTRUCTIONS)
    with connection:
        connection.sendall(channel.encode(Stop("enough")))
        return connection.recv(1)


def test_a_host_that_cannot_be_reached_is_named() -> None:
    door = NodeDoor("127.0.0.1", KEY, print)
    door.close()
    with pytest.raises(LaunchError, match=r"\bh1\b.*127.0.0.1\D+\d"):
        send_to_node(node_of(door), KEY, StartDaemon(()))


def test_a_small_program_is_released_with_the_code_it_is_told(tmp_path: Path) -> None:
    brought: list[Any] = []
    door = ShimDoor(tmp_path / "door", lambda *call: brought.append(call))
    program = shim.__file__
    environment = {
        "HSR_DOORS": f'["/none", "{door.path}"]',
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "PMIX_RANK": "7",
        "SECRET": "kept",
    }
    process = subprocess.Popen([sys.executable, "-S", "-E", program], env=environment)
    serve(door, lambda: brought)
    caller, identity = brought[0]
    assert identity == MpiIdentity({"OMPI_COMM_WORLD_LOCAL_RANK": "1", "PMIX_RANK": "7"})
    caller.release(9)
    assert process.wait(60) == 9
    door.close()


def test_what_mpirun_gives_its_agent_arrives(tmp_path: Path) -> None:
    calls: list[Any] = []
    agent = Agent(tmp_path, lambda *call: calls.append(call))
    words = ["PATH=/a:$PATH", ";", "'prted'", "-x", '"ä b"', "%s", "\\n", "y" * 100_000]
    argv = agent.COMMAND.split()
    agents = [subprocess.Popen([*argv, host, *words], cwd=tmp_path) for host in ("hsr-1", "hsr-2")]
    serve(agent, lambda: len(calls) == 2)
    assert sorted(calls) == [("hsr-1", " ".join(words)), ("hsr-2", " ".join(words))]
    assert [each.wait(60) for each in agents] == [0, 0]
    agent.close()
    # A slot that is gone is not waited for.
    subprocess.run([*argv, "hsr-3", "x"], cwd=tmp_path, timeout=60, check=True)


def test_an_agent_that_cannot_write_its_order_fails(tmp_path: Path) -> None:
    agent = Agent(tmp_path, print)
    (tmp_path / "agent" / "command-h1").mkdir()
    done = subprocess.run([*agent.COMMAND.split(), "h1", "x"], cwd=tmp_path, check=False)
    assert done.returncode
    agent.close()


OWNER = """
import subprocess, sys, time
from horovod_spark_runner.cluster.slot.workspace import Workspace
workspace = Workspace("unit")
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
child = subprocess.Popen(sleep, start_new_session=True)
workspace.watch(child.pid)
print(workspace.path, child.pid, flush=True)
time.sleep(60)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_a_killed_slot_leaves_is_swept_up() -> None:
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        path, child = owner.stdout.readline().split()
        assert Path(path).stat().st_mode & 0o777 == 0o700
        owner.kill()
    until(lambda: not Path(path).exists() and not is_running(int(child)))


def test_a_closed_workspace_is_gone() -> None:
    workspace = Workspace("unit")
    (workspace.folder("rank-0") / "file").write_text("x")
    workspace.close()
    assert not workspace.path.exists()
    workspace.close()


def holder_of_the_key(server: ControlServer) -> tuple[socket.socket, Channel[Instruction]]:
    return connect(server.address, 5, KEY, *INSTRUCTIONS)


def test_data_nobody_announced_ends_the_connection() -> None:
    with ControlServer("127.0.0.1", KEY) as server:
        client, channel = holder_of_the_key(server)
        with client:
            client.sendall(channel.encode_data(b"surprise"))
            assert client.recv(1) == b""


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"no JSON", "JSON"),
        (to_json(Hello()).encode(), "'Hello'.*Envelope"),
        (b'{"kind":"Envelope","slot":0}', "Envelope.*host, message, rank"),
    ],
)
def test_what_is_no_message_ends_its_connection_and_no_other(
    body: bytes, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    with ControlServer("127.0.0.1", KEY) as server:
        client, channel = holder_of_the_key(server)
        with client:
            client.sendall(channel._frame(body))
            assert client.recv(1) == b""
        (warning,) = caplog.messages
        assert re.search(error, warning)
        link = _DriverLink(server.address, KEY)
        link.send(envelope(3, Hello()))
        assert server.events.get(timeout=20) == envelope(3, Hello())
        link.close()


def test_a_program_that_brings_something_else_is_named(tmp_path: Path) -> None:
    door = ShimDoor(tmp_path / "door", lambda *_: None)
    with socket.socket(socket.AF_UNIX) as program:
        program.connect(door.path)
        program.sendall(b'{"rank": 1}\n')
        with pytest.raises(MessageError, match="MpiIdentity.*environment"):
            serve(door, lambda: False)
    door.close()


def test_what_a_process_left_behind_writes_is_not_read_to_the_end() -> None:
    process = subprocess.Popen(
        ["sh", "-c", "yes & exit"], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    try:
        process.wait()
        select.select([process.stdout], [], [])
        output = ChildOutput(process.stdout, 5, None)
        output.drain()
        assert output.tail
        assert not output.handlers()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
