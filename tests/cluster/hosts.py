"""Hosts for tests: network namespaces with names, addresses and cables of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest


def _why_not() -> str | None:
    """Return why no hosts can be made here, or ``None`` if they can."""
    for program in ("ip", "unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"{program} is not installed (Debian: apt-get install iproute2 util-linux)"
    name = f"hsrprobe{os.getpid()}"
    probe = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if probe.returncode:
        return f"network namespaces are not permitted here: {probe.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return None


class Hosts:
    """Hosts joined by a bridge; the n-th has address ``10.77.0.n``, or ``fd77::n`` only.

    Use as a context manager, which skips the test where no hosts can be made.

    Args:
        folder: a private folder.
        names: host names.
        ipv6: give them IPv6 addresses only.
        strangers: a host knows its own name only, not those of the others.
    """

    def __init__(
        self, folder: Path, names: Sequence[str], *, ipv6: bool = False, strangers: bool = False
    ) -> None:
        self._strangers = strangers
        self._folder = folder
        self._names = list(names)
        self._there: list[str] = []
        self._ipv6 = ipv6
        self._prefix = f"hsr{os.getpid()}"

    def __enter__(self) -> Hosts:
        if (reason := _why_not()) is not None:
            pytest.skip(reason)
        # A host that is switched off cannot clear up: what it leaves goes with this folder.
        self._temporary = tempfile.mkdtemp(prefix="h-", dir="/tmp")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._switch = f"{self._prefix}s"
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        ip("-n", self._switch, "link", "set", "br0", "up")
        for name in list(self._names):
            self._add(name)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for name in list(self._there):
            self.remove(name)
        ip("netns", "delete", self._switch)
        shutil.rmtree(self._temporary, ignore_errors=True)

    def add(self, name: str) -> None:
        """Add a host."""
        self._names.append(name)
        self._add(name)

    def _add(self, name: str) -> None:
        number = self._names.index(name)
        space = self.space(name)
        cable = f"{self._prefix[-8:]}c{number}"
        ip("netns", "add", space)
        ip("link", "add", cable, "netns", self._switch, "type", "veth",
           "peer", "name", "eth0", "netns", space)  # fmt: skip
        ip("-n", self._switch, "link", "set", cable, "master", "br0", "up")
        length, extra = (64, ["nodad"]) if self._ipv6 else (24, [])
        ip("-n", space, "addr", "add", f"{self.address(name)}/{length}", "dev", "eth0", *extra)
        ip("-n", space, "link", "set", "eth0", "up")
        ip("-n", space, "link", "set", "lo", "up")
        config = Path("/etc/netns", space)
        config.mkdir(parents=True, exist_ok=True)
        known = [name] if self._strangers else self._names
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        lines += [f"{self.address(host)} {host}" for host in known]
        (config / "hosts").write_text("\n".join(lines) + "\n")
        if self._strangers:  # nobody to ask, either
            (config / "resolv.conf").write_text("")
        uts = self._folder / f"{name}.uts"
        uts.touch()
        subprocess.run(["unshare", f"--uts={uts}", "hostname", name], check=True)
        self._there.append(name)

    def remove(self, name: str) -> None:
        """Remove a host and what runs on it; its address is not used again."""
        space = self.space(name)
        self._end_processes(space)
        subprocess.run(["umount", str(self._folder / f"{name}.uts")], check=False)
        ip("netns", "delete", space)
        shutil.rmtree(Path("/etc/netns", space), ignore_errors=True)
        self._there.remove(name)

    def address(self, name: str) -> str:
        number = self._names.index(name) + 1
        return f"fd77::{number}" if self._ipv6 else f"10.77.0.{number}"

    def spark_address(self, name: str) -> str:
        """Return the address as Spark wants it."""
        address = self.address(name)
        return f"[{address}]" if self._ipv6 else address

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        """Return the argv that runs ``command`` on a host."""
        uts = self._folder / f"{name}.uts"
        return [*self.network(name), "nsenter", f"--uts={uts}", *command]

    def network(self, name: str) -> list[str]:
        """Return the argv before a command that has only the network of a host."""
        return ["ip", "netns", "exec", self.space(name)]

    def run(
        self, name: str, command: Sequence[str], env: Mapping[str, str], timeout: float = 240
    ) -> subprocess.CompletedProcess[str]:
        """Run ``command`` on a host, with its address as Spark's."""
        return subprocess.run(
            self.command(name, command),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env=self.environment(name, env),
        )

    def environment(self, name: str, env: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a host's processes."""
        own = {"SPARK_LOCAL_IP": self.spark_address(name), "TMPDIR": self._temporary}
        if self._ipv6:
            java = os.environ.get("JDK_JAVA_OPTIONS", "")
            own["JDK_JAVA_OPTIONS"] = f"{java} -Djava.net.preferIPv6Addresses=true"
            own["SPARK_PREFER_IPV6"] = "true"
        return {**os.environ, **own, **env}

    def unplug(self, name: str) -> None:
        """Cut a host off without a word: nothing it sends arrives any more, nor the reverse."""
        ip("-n", self.space(name), "link", "set", "eth0", "down")

    def plug_in(self, name: str) -> None:
        """Put an unplugged host back."""
        ip("-n", self.space(name), "link", "set", "eth0", "up")

    def slow_down(self, name: str, rate: str) -> None:
        """Let a host send no more than so much, such as ``"1mbit"`` per second."""
        shape = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate]
        shape += ["burst", "32kbit", "latency", "400ms"]
        subprocess.run(["ip", "netns", "exec", self.space(name), *shape], check=True)

    def pin(self, name: str, core: int) -> None:
        """Let a host's processes, and those they start, run on one core of this machine only."""
        for pid in self._pids(self.space(name)):
            pinned = ["taskset", "--all-tasks", "--cpu-list", "--pid", str(core), pid]
            subprocess.run(pinned, check=True, capture_output=True)

    def processes(self, name: str) -> list[str]:
        """Return the names and command lines of the host's processes."""
        found = []
        for pid in self._pids(self.space(name)):
            with contextlib.suppress(OSError):
                own = Path("/proc", pid, "comm").read_text().strip()
                command = Path("/proc", pid, "cmdline").read_text().replace("\0", " ")
                found.append(f"{own}: {command}")
        return found

    def space(self, name: str) -> str:
        """Return the name of a host's network namespace."""
        return f"{self._prefix}{name}"

    @staticmethod
    def _pids(space: str) -> list[str]:
        done = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True)
        return done.stdout.split()

    def _end_processes(self, space: str) -> None:
        deadline = time.monotonic() + 60
        while (pids := self._pids(space)) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            time.sleep(0.1)


def ip(*arguments: Any) -> None:
    """Run ``ip``."""
    subprocess.run(["ip", *map(str, arguments)], check=True, capture_output=True)
