"""What it takes the driver to place and watch thousands of slots.

The real driver (`Coordinator`, `ControlServer`, `run_job`) and real connections over loopback; the
slots are light clients in a few processes that send what slots send: hello, their place, that their
ranks have started, a heartbeat every 5 seconds. No framework, no MPI. Measured on the driver:

* the time until every slot has been told its part of the world, and the driver's CPU for it;
* CPU per minute, messages and bytes while it watches;
* memory, threads and file descriptors that the slots cost it;
* how soon the failure of one slot ends the run with its name;
* the same with all slots printing as fast as they can;
* how often a large call leaves the driver;
* the time until all other hosts have the order for MPI's daemon, with the real mpirun, its agents
  and the hosts' doors; no daemon is started;
* a manifest of 100,000 row groups: to write, to read, and the plan of an epoch.

Run it with ``python benchmarks/scale.py``; ``--write`` puts the tables into ``docs/benchmarks.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import select
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from report import present, shown_command, table

from horovod_spark_runner.cluster.driver.control_server import ControlServer
from horovod_spark_runner.cluster.driver.coordinator import Coordinator
from horovod_spark_runner.cluster.driver.launch import run_job
from horovod_spark_runner.cluster.protocol.channel import Channel
from horovod_spark_runner.cluster.protocol.command import mpirun_command
from horovod_spark_runner.cluster.protocol.messages import (
    Assigned,
    Dropped,
    Envelope,
    Failed,
    Hello,
    Instruction,
    Located,
    Log,
    StartDaemon,
    Started,
    Stop,
)
from horovod_spark_runner.cluster.protocol.outcome import RAISED, Failure, RankOutcome
from horovod_spark_runner.cluster.protocol.processes import (
    find_mpirun,
    shim_environment,
    start_tethered,
)
from horovod_spark_runner.cluster.protocol.rendezvous import SlotPlan
from horovod_spark_runner.cluster.protocol.topology import SlotInfo, arrange
from horovod_spark_runner.cluster.slot.node_door import (
    Agent,
    NodeDoor,
    daemon_arguments,
    send_to_node,
)
from horovod_spark_runner.cluster.slot.slot_link import SlotLink
from horovod_spark_runner.config.launch import LaunchSettings, MpiOptions
from horovod_spark_runner.data.manifest import Column, Manifest, RowGroup
from horovod_spark_runner.data.read.sharding import plan_epoch
from horovod_spark_runner.errors import HorovodSparkError

KEY = os.urandom(32)
CLIENTS = 4
PER_HOST = 8
MEGABYTE = 1024 * 1024
# Most for mpirun to ask for all its daemons.
ASKING_SECONDS = 120


@dataclasses.dataclass(frozen=True)
class Conduct:
    """What the simulated slots do.

    Attributes:
        watch: seconds after the placement, of which the last slot fails.
        chatty: print as fast as the driver takes it.
    """

    watch: float
    chatty: bool = False


class Counting:
    """A channel that counts what passes."""

    def __init__(self, channel: Channel[Instruction], counts: list[int]) -> None:
        self._channel = channel
        self._counts = counts

    def encode(self, envelope: Envelope) -> bytes:
        frame = self._channel.encode(envelope)
        self._counts[0] += 1
        self._counts[1] += len(frame)
        return frame

    def feed(self, data: bytes) -> list[Any]:
        messages = self._channel.feed(data)
        self._counts[0] += len(messages)
        self._counts[1] += len(data)
        return messages


def be_slots(plan: SlotPlan, slots: Sequence[int], conduct: Conduct, tell: Any) -> None:
    """Be some slots of a run, in a process of its own."""
    counts = [0, 0]
    links = {}
    for slot in slots:
        node = slot // PER_HOST
        link: Any = SlotLink(plan, slot)
        link.host = f"host-{node}"
        link.check()
        link._channel = Counting(link._channel, counts)
        link.report(Hello())
        folder = f"/tmp/hsr-{slot:08d}"
        info = SlotInfo(
            slot,
            link.host,
            f"node-{node}",
            f"10.0.{node // 250}.{node % 250}",
            40000,
            folder,
            (f"{folder}/rank-0/shim",),
            ((str(slot % PER_HOST),),),
        )
        link.report(Located(info))
        links[link.fileno()] = link, slot
    ranks: dict[int, int] = {}
    poll = select.poll()
    for descriptor in links:
        poll.register(descriptor, select.POLLIN)
    while len(ranks) < len(slots):
        for descriptor, _ in poll.poll(100):
            link, slot = links[descriptor]
            for message in link.receive():
                assert isinstance(message, Assigned), message
                ranks[slot] = message.part.placements[0].rank
                link.report(Started(), ranks[slot])
        for link, _ in links.values():
            link.beat()
    tell.send(("placed", time.time()))
    failing, end = slots[-1] == plan.slots - 1, time.monotonic() + conduct.watch
    stopped = False
    while not stopped and time.monotonic() < end + 30:
        if failing and time.monotonic() > end:
            failing = False
            link, slot = list(links.values())[-1]
            failed = time.time()
            link.report(Failed.of(Failure(RAISED, failed, "gone wrong")), ranks[slot])
            tell.send(("failed", failed))
        if conduct.chatty:
            for link, slot in links.values():
                link.report_lines(["x" * 80] * 100, ranks[slot])
        for descriptor, _ in poll.poll(0 if conduct.chatty else 100):
            link, _ = links[descriptor]
            stopped |= any(isinstance(message, Stop) for message in link.receive())
            stopped |= link.fileno() is None
        for link, _ in links.values():
            link.beat()
    tell.send(("counts", tuple(counts)))


class Slots:
    """Stands in for the Spark job: the clients' processes."""

    error: BaseException | None = None
    cancelled_elsewhere = failed_by_itself = session_stopped = False

    def __init__(self, plan: SlotPlan, conduct: Conduct, observer: Recorder) -> None:
        context = multiprocessing.get_context("spawn")
        share = -(-plan.slots // CLIENTS)
        self._told: list[tuple[str, Any]] = []
        self._processes = []
        self._readers = []
        self._observer = observer
        for first in range(0, plan.slots, share):
            slots = range(first, min(first + share, plan.slots))
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=be_slots, args=(plan, slots, conduct, sender))
            reader = threading.Thread(target=self._listen, args=(receiver,))
            self._processes.append(process)
            self._readers.append((reader, sender))

    def _listen(self, receiver: Any) -> None:
        with contextlib.suppress(EOFError):
            while True:
                told = receiver.recv()
                self._told.append(told)
                if len(self.told("placed")) == len(self._processes) and told[0] == "placed":
                    self._observer.all_placed()

    def told(self, what: str) -> list[Any]:
        return [value for kind, value in self._told if kind == what]

    def start(self, on_end: Callable[[], object]) -> None:
        for process, (reader, sender) in zip(self._processes, self._readers, strict=True):
            process.start()
            sender.close()
            reader.start()

    def is_alive(self) -> bool:
        return any(process.is_alive() for process in self._processes)

    def join(self, timeout: float | None = None) -> None:
        for process in self._processes:
            process.join(timeout)
        for reader, _ in self._readers:
            reader.join(timeout)

    def cancel(self) -> None:
        for process in self._processes:
            process.kill()

    def outcomes(self) -> list[RankOutcome]:
        return []


class Recorder:
    """Notes what the driver needs, instead of showing messages."""

    def __init__(self) -> None:
        self.messages = 0
        self.lines = 0
        self.dropped = 0
        self.first: tuple[float, float] | None = None
        self.placed: tuple[float, float] | None = None
        self.last_cpu = self.failed = 0.0
        self.memory = self.threads = self.descriptors = 0

    def on_message(self, envelope: Envelope) -> None:
        self.messages += 1
        if self.first is None:  # the clients' own start is not the driver's
            self.first = time.monotonic(), time.process_time()
        match envelope.message:
            case Log(lines):
                self.lines += len(lines)
            case Dropped(lines):
                self.dropped += lines
            case Failed():
                self.failed = time.time()
                self.measure()

    def all_placed(self) -> None:
        self.placed = time.monotonic(), time.process_time()
        self.measure()

    def poll(self) -> None:
        pass

    def measure(self) -> None:
        process = psutil.Process()
        self.last_cpu = time.process_time()
        self.memory = max(self.memory, process.memory_info().rss)
        self.threads = threading.active_count()
        self.descriptors = process.num_fds()

    def close(self) -> None:
        pass


def watch_slots(slots: int, conduct: Conduct) -> dict[str, Any]:
    """Return what one run with so many slots costs the driver."""
    process = psutil.Process()
    memory, threads, descriptors = (
        process.memory_info().rss,
        threading.active_count(),
        process.num_fds(),
    )
    options = LaunchSettings(slots)
    recorder = Recorder()
    with ControlServer("127.0.0.1", KEY, slots=slots) as server:
        plan = SlotPlan("scale", KEY, server.address, options, slots, slots, b"", 0)
        job = Slots(plan, conduct, recorder)
        own_threads = 1 + len(job._processes)  # the server's, and the benchmark's own readers
        try:
            run_job(job, Coordinator(plan, server, recorder))
            raise RuntimeError("the failure of a slot was not seen")
        except HorovodSparkError as error:
            text = str(error)
    assert recorder.first is not None
    assert recorder.placed is not None
    failed = job.told("failed")[0]
    counts = job.told("counts")
    return {
        "slots": slots,
        "placed": recorder.placed[0] - recorder.first[0],
        "placing_cpu": recorder.placed[1] - recorder.first[1],
        "watching_cpu": (recorder.last_cpu - recorder.placed[1]) / conduct.watch * 60,
        "memory": recorder.memory - memory,
        "threads": recorder.threads - threads - own_threads + 1,
        "descriptors": recorder.descriptors - descriptors - len(job._processes),
        "messages": sum(count for count, _ in counts),
        "bytes": sum(size for _, size in counts),
        "named": "gone wrong" in text and f"host-{(slots - 1) // PER_HOST}" in text,
        "failure": recorder.failed - failed,
        "lines": recorder.lines,
        "dropped": recorder.dropped,
    }


def take_calls(hosts: int, per_host: int, megabytes: int) -> dict[str, Any]:
    """Return how a large call gets to the slots of several hosts."""
    payload = os.urandom(MEGABYTE) * megabytes
    slots = hosts * per_host
    with (
        tempfile.TemporaryDirectory() as folder,
        ControlServer("127.0.0.1", KEY, payload) as server,
    ):
        plan = SlotPlan(
            "scale", KEY, server.address, LaunchSettings(slots), slots, slots, None, len(payload)
        )
        links = [SlotLink(plan, slot) for slot in range(slots)]
        # One for each thread: adding up is not atomic.
        counts = [[0, 0] for _ in links]
        for slot, link in enumerate(links):
            Path(folder, str(slot)).mkdir()
            link._channel = Counting(link._channel, counts[slot])  # type: ignore[assignment]
        began, cpu = time.monotonic(), time.process_time()
        takers = [
            threading.Thread(
                target=link.fetch_call,
                args=(
                    Path(folder, str(slot), "payload"),
                    Path(folder, str(slot - slot % per_host)),
                ),
            )
            for slot, link in enumerate(links)
        ]
        for taker in takers:
            taker.start()
        for taker in takers:
            taker.join()
        sizes = {Path(folder, str(slot), "payload").stat().st_size for slot in range(slots)}
        assert sizes == {len(payload)}
        return {
            "seconds": time.monotonic() - began,
            "cpu": time.process_time() - cpu,
            "times": sum(size for _, size in counts) / len(payload),
        }


def be_hosts(addresses: Sequence[str], key: bytes, tell: Any) -> None:
    """Be the first slots of some hosts, in a process of its own, until all have their orders."""
    orders: list[StartDaemon] = []
    doors = [NodeDoor(address, key, orders.append) for address in addresses]
    tell.send([door.port for door in doors])
    handlers = {number: call for door in doors for number, call in door.handlers().items()}
    poll = select.poll()
    for descriptor in handlers:
        poll.register(descriptor, select.POLLIN)
    while len(orders) < len(doors):
        for descriptor, _ in poll.poll():
            handlers[descriptor]()
    tell.send(time.time())


def ask_for_daemons(hosts: int) -> float:
    """Return the seconds until each of so many other hosts has the order for its daemon."""
    addresses = [f"127.1.{number // 250}.{number % 250 + 1}" for number in range(hosts)]
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    others = context.Process(target=be_hosts, args=(addresses, KEY, sender), daemon=True)
    others.start()
    places = [("127.0.0.1", 1), *zip(addresses, receiver.recv(), strict=True)]
    nodes = arrange(
        [
            SlotInfo(slot, f"host-{slot}", f"node-{slot}", *place, "/", ("/",), ((),))
            for slot, place in enumerate(places)
        ]
    ).nodes
    by_name = {node.name: node for node in nodes[1:]}

    def order(host: str, command: str) -> None:
        # Its own host is one of them: the name is not this machine's.
        if host in by_name:
            arguments = (by_name[host], KEY, StartDaemon(tuple(daemon_arguments(command))))
            threading.Thread(target=send_to_node, args=arguments, daemon=True).start()

    root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as folder:
        agent = Agent(Path(folder), order)
        command = mpirun_command(
            find_mpirun(), nodes, MpiOptions(), agent=agent.COMMAND, as_root=root
        )
        began = time.time()
        environment = {**os.environ, **shim_environment()}
        mpirun = start_tethered(command, environment, directory=folder)
        try:
            while not receiver.poll() and time.time() < began + ASKING_SECONDS:
                for descriptor in select.select([*agent.handlers()], [], [], 0.1)[0]:
                    agent.handlers()[descriptor]()
        finally:
            mpirun.kill()
            mpirun.communicate()
            agent.close()
    if not receiver.poll():
        raise RuntimeError(f"not all hosts have their orders after {ASKING_SECONDS} s")
    seconds: float = receiver.recv() - began
    return seconds


def plan_large_data(files: int, row_groups: int) -> list[list[Any]]:
    """Return what a dataset of so many row groups takes on the driver, and on one rank of several.

    Returns:
        Rows of a table: what is done, its seconds, and the most memory it takes meanwhile.
    """
    per_file = row_groups // files
    groups = tuple(
        RowGroup(number // per_file, number % per_file, 1000, 1000 * 264)
        for number in range(row_groups)
    )
    columns = (Column("features", "float32", (64,)), Column("label", "int64", ()))
    names = tuple(f"part-{number:05d}.parquet" for number in range(files))
    sizes = (1000 * 264 * per_file,) * files
    manifest = Manifest("/data", names, columns, groups, file_sizes=sizes, checksum="0" * 16)
    rows = []

    def measure(what: str, action: Any) -> Any:
        began = time.monotonic()
        result = action()
        seconds = time.monotonic() - began
        del result
        tracemalloc.start()  # apart: it slows what it watches
        result = action()
        memory = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        rows.append([what, f"{seconds:.2f} s", f"{memory / MEGABYTE:.0f} MB"])
        return result

    text = measure("write the manifest", manifest.to_json)
    read = measure("read it", lambda: Manifest.from_json(text))
    shapes = [(group.rows, group.size) for group in read.row_groups]
    for world in (8, 512):

        def plan(world: int = world) -> Any:
            plan = plan_epoch(
                shapes, global_batch=64 * world, seed=1, epoch=0, window_bytes=256 * MEGABYTE
            )
            return plan, plan.pieces(plan.steps // 2, world // 2, world)

        measure(f"plan an epoch and find a rank's place in the middle of it, {world} ranks", plan)
    return rows


def show(found: dict[str, Any]) -> list[Any]:
    """Return the row of one run of `watch_slots`."""
    slots = found["slots"]
    return [
        slots,
        f"{found['placed']:.2f} s",
        f"{found['placing_cpu']:.2f} s",
        f"{found['watching_cpu']:.1f} s",
        f"{found['memory'] / MEGABYTE:.0f} MB",
        found["threads"],
        found["descriptors"],
        f"{found['messages'] / slots:.1f}",
        f"{found['bytes'] / slots / 1024:.1f} KB",
        f"{found['failure']:.2f} s" if found["named"] else "not named",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 512, 1024, 4096])
    parser.add_argument("--watch", type=float, default=20.0, help="seconds watched (20)")
    parser.add_argument("--call", type=int, default=500, help="megabytes of the large call (500)")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    rows = []
    for slots in arguments.slots:
        rows.append(show(watch_slots(slots, Conduct(arguments.watch))))
        print(rows[-1], flush=True)
    head = ["slots", "placed in", "driver CPU for it", "CPU per minute of watching", "memory"]
    head += ["threads", "descriptors", "messages per slot", "bytes per slot"]
    head += ["a failure is known in"]
    parts = [
        f"Driver and slots on one machine; {PER_HOST} slots per host, "
        f"{arguments.watch:g} seconds of watching. CPU, memory, threads and descriptors are the "
        "driver's, above what it has without slots; messages and bytes are both ways, all in all.",
        table(head, rows),
    ]
    slots = max(arguments.slots)
    chatty = watch_slots(slots, Conduct(arguments.watch, chatty=True))
    print(chatty, flush=True)
    parts.append(
        f"With all {slots:,} slots printing as fast as they can: {chatty['lines']:,} lines were "
        f"shown and {chatty['dropped']:,} left out by slots and driver, which took "
        f"{chatty['memory'] / MEGABYTE:.0f} MB; the failure of one was known in "
        f"{chatty['failure']:.2f} s."
    )
    call = take_calls(hosts=4, per_host=PER_HOST, megabytes=arguments.call)
    parts.append(
        f"A call of {arguments.call} MB for {4 * PER_HOST} slots on 4 hosts left the driver "
        f"{call['times']:.2f} times, in {call['seconds']:.1f} s, driver and slots together with "
        f"{call['cpu']:.1f} s of CPU."
    )
    hosts = [slots // PER_HOST for slots in arguments.slots]
    rows = [[f"{count:,}", f"{ask_for_daemons(count):.2f} s"] for count in hosts]
    parts += [
        "Until all other hosts have mpirun's order for a daemon:",
        table(["other hosts", "seconds"], rows),
    ]
    parts.append("A dataset of 100,000 row groups in 10,000 files:")
    parts.append(table(["what", "seconds", "memory, peak"], plan_large_data(10_000, 100_000)))
    present("Scale", shown_command(), "\n\n".join(parts), arguments.write)


if __name__ == "__main__":
    main()
