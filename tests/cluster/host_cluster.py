"""A Spark cluster on hosts of its own, see `Hosts`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .hosts import Hosts

ROOT = Path(__file__).parents[2]
STANDALONE = str(ROOT / "scripts" / "standalone")


class HostCluster:
    """A master and a worker of two cores on the first host, a worker on each of the others.

    Args:
        hosts: where; the first is the driver's, too.
        names: of the hosts.
        folder: a private folder.
        env: what the workers of some hosts have in their environment.
    """

    def __init__(
        self,
        hosts: Hosts,
        names: Sequence[str],
        folder: Path,
        env: Mapping[str, Mapping[str, str]] | None = None,
        *,
        cores: int = 2,
    ) -> None:
        self.hosts = hosts
        self.driver = names[0]
        self.env = {"HSR_VENV": sys.prefix, "PYSPARK_PYTHON": sys.executable}
        self._more = env or {}
        size = (str(cores), "1g")
        self.master = self._start(self.driver, "start", str(folder / self.driver), "1", *size)
        for name in names[1:]:
            self._start(name, "join", str(folder / name), self.master, "1", *size)

    def _start(self, name: str, *arguments: str) -> str:
        env = {**self.env, "HSR_HOST": self.hosts.spark_address(name), **self._more.get(name, {})}
        done = self.hosts.run(name, [STANDALONE, *arguments], env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def popen(self, arguments: Sequence[str]) -> subprocess.Popen[str]:
        """Start a command on the driver's host."""
        return subprocess.Popen(
            self.hosts.command(self.driver, arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.hosts.environment(self.driver, self.env),
            cwd=ROOT,
        )
