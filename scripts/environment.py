#!/usr/bin/env python3
"""Set up the virtual environment of a checkout: locked packages, and a Horovod built for them.

    environment.py demo|tests --venv DIR [--locks DIR] [--gpu] [--check]

``demo`` installs ``locks/demo.txt``, ``tests`` adds ``locks/tests.txt`` to the same environment. A
lock names every package with its version, so nothing is resolved here. uv installs; pip does where
the index has no uv, and for PyTorch, whose build for CPUs may lie on a disk that only pip knows.
Horovod is compiled while the packages that its build does not need are still being installed.

An interrupted set-up starts again: what was downloaded and built is in the caches.

Standard library only: this runs before anything is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

UV = "uv==0.13.9"
ROOT = Path(__file__).resolve().parent.parent
BUILD_HOROVOD = ROOT / "horovod_spark_runner" / "commands" / "build_horovod.py"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
LEVELS = ("demo", "tests")
# Large packages that `import tensorflow` works without, so that the build need not wait for them.
AFTER_BUILD = {"pyspark", "pyarrow", "pandas", "scikit-learn", "scipy", "pillow", "pyzmq"}
# Settings of pip's that would install elsewhere than asked for, or from source.
PIP_ELSEWHERE = ("PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_DRY_RUN", "PIP_NO_BINARY")
# Options of uv's that pip calls otherwise.
PIP_NAMES = {"--reinstall": "--force-reinstall"}
# What `import torch` needs beside TensorFlow's packages.
OF_TORCH = {"filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "sympy"}


def say(text: str) -> None:
    print(f"\033[1m==> {text}\033[0m", file=sys.stderr, flush=True)


def package_in(line: str) -> str:
    """Return the package that a line of a lock names; nothing for a comment."""
    return re.split(r"[=\s]", line, maxsplit=1)[0] if line[:1].isalnum() else ""


class Progress:
    """Progress line: rewritten on a terminal, else printed every 15 seconds."""

    def __init__(self, site: Path) -> None:
        self._site = site
        self._began = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)
        self.horovod = ""

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _line(self) -> str:
        installed = sum(1 for _ in self._site.glob("*.dist-info"))
        horovod = f", {self.horovod}" if self.horovod else ""
        return f"    {time.monotonic() - self._began:4.0f} s: {installed} packages{horovod}"

    def _show(self) -> None:
        terminal = sys.stderr.isatty()
        before, after = ("\r\033[K", "") if terminal else ("", "\n")
        while not self._over.wait(0.5 if terminal else 15):
            print(f"{before}{self._line()}", end=after, file=sys.stderr, flush=True)
        if terminal:
            print(before, end="", file=sys.stderr, flush=True)


class Environment:
    """The virtual environment in a folder.

    Args:
        venv: its folder.
        locks: folder of the lock files.
        gpu: with CUDA's packages, and a Horovod with NCCL.
    """

    def __init__(self, venv: Path, locks: Path, gpu: bool) -> None:
        self.venv = venv
        self.python = venv / "bin" / "python"
        self._locks = locks
        self._gpu = gpu
        self._state_file = venv / ".set-up.json"
        self._log = venv / "set-up.log"
        self._seconds: dict[str, float] = {}
        self._uv = False
        # Inherited by all that is started, so that another set-up waits for its end, too.
        self.folder_lock: int | None = None

    def is_ready(self, level: str) -> bool:
        """Return whether ``level`` has been set up, for these locks and this checkout."""
        ready = self._state().get("levels", {})
        return self.python.exists() and ready.get(level) == self._digest(level)

    def mark_ready(self, level: str) -> None:
        """Note that ``level``, and what it includes, has been set up."""
        levels = {name: self._digest(name) for name in LEVELS[: LEVELS.index(level) + 1]}
        self._write_state(levels=levels, seconds=self._seconds)

    def set_up(self, level: str) -> None:
        """Install what ``level`` needs; what is there already stays.

        Raises:
            SystemExit: something failed; the message says what, and what to do.
        """
        began = time.monotonic()
        if re.search(r"[\s:]", str(self.venv)):
            raise SystemExit(
                f"error: Horovod cannot be built in {self.venv}: CMake and search paths take no "
                "blanks and colons; name a folder without them: HSR_VENV=DIR"
            )
        # What has been set up once, with PyTorch, say, is not to lose that.
        level = max([level, *self._state().get("levels", {})], key=LEVELS.index)
        self._make_room()
        if not self.python.exists():
            with self._timed("environment"):
                # A virtual environment's own Python would make one that depends on it.
                base = getattr(sys, "_base_executable", sys.executable)
                self.venv.mkdir(parents=True, exist_ok=True)
                self._write_state()
                self._run(base, "-m", "venv", str(self.venv))
        self._log.write_text("")
        with self._timed("uv"):
            self._uv = self._get_uv()
        self._write_state()
        site = next((self.venv / "lib").glob("python3*")) / "site-packages"
        with Progress(site) as progress:
            self._install_all(level, progress)
        self._seconds["total"] = round(time.monotonic() - began, 1)
        self.mark_ready(level)

    def _make_room(self) -> None:
        """Delete an environment that this script has left unfinished or that no longer works."""
        if not self.venv.exists() or not any(self.venv.iterdir()):
            return
        if not self._state_file.exists():
            raise SystemExit(
                f"error: {self.venv} was not made by this script; delete it, or name another "
                "folder for the environment: HSR_VENV=DIR"
            )
        state = self._state()
        fits = all(state.get(name) == value for name, value in self._kind().items())
        if not state.get("levels") or not self.python.exists() or not fits:
            say(f"{self.venv} was not finished or does not fit: starting again from the caches")
            for path in self.venv.iterdir():  # a link to a folder stays one
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path != self._state_file:
                    path.unlink()

    def _state(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            state = json.loads(self._state_file.read_text())
            if isinstance(state, dict):
                return state
        return {}

    def _kind(self) -> dict[str, Any]:
        return {"gpu": self._gpu, "python": f"{sys.version_info[0]}.{sys.version_info[1]}"}

    def _write_state(self, **state: Any) -> None:
        """Note how far the set-up is; without levels it is unfinished."""
        self._state_file.write_text(json.dumps({**self._kind(), **state}))

    def _inherited(self) -> list[int]:
        return [] if self.folder_lock is None else [self.folder_lock]

    def _locked_packages(self, level: str) -> list[str]:
        name = "gpu" if self._gpu else level
        return (self._locks / f"{name}.txt").read_text().splitlines()

    def _digest(self, level: str) -> str:
        own_files = sorted(BUILD_HOROVOD.parent.glob("horovod_files/*/*.py"))
        files = (ROOT / "setup.cfg", BUILD_HOROVOD, *own_files, Path(__file__))
        parts = [
            str(ROOT),
            str(self._kind()),
            *self._locked_packages(level),
            *(file.read_text() for file in files),
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._seconds[what] = round(time.monotonic() - began, 1)

    @functools.cached_property
    def _index(self) -> str:
        """The package index that pip is configured for, if it is not PyPI."""
        listed = subprocess.run(
            [str(self.python), "-m", "pip", "config", "list"],
            capture_output=True, text=True, check=False,
        ).stdout  # fmt: skip
        # The last one wins: variables of the environment follow files.
        indexes = re.findall(r"^(?:global|install|:env:)\.index-url='(.+)'$", listed, re.M)
        return indexes[-1] if indexes else ""

    def _get_uv(self) -> bool:
        """Install uv; return whether the index has it for this machine."""
        pip = [str(self.python), "-m", "pip", "install", "--quiet", "--retries", "2"]
        done = subprocess.run(
            [*pip, "--timeout", "20", UV], capture_output=True, text=True, check=False,
            pass_fds=self._inherited(),
        )  # fmt: skip
        if done.returncode == 0:
            return True
        # pip retries where nothing answers, and does not where the answer is no.
        if broken := re.search(r"Retrying .* connection broken by '(.*)'", done.stderr):
            raise SystemExit(
                f"error: the package index {self._index or 'PyPI'} does not answer: "
                f"{broken[1]}\nCheck the network and HTTPS_PROXY, or name a mirror: "
                "PIP_INDEX_URL=https://... (pip's configuration is read, too). Then run the same "
                "command again."
            )
        say(f"{UV} cannot be installed here: pip installs the packages, which takes longer")
        return False

    def _install_all(self, level: str, progress: Progress) -> None:
        lines = [line for line in self._locked_packages(level) if package_in(line)]
        demo = {package_in(line) for line in self._locked_packages("demo")}
        builds = (demo | OF_TORCH) - AFTER_BUILD
        first, rest = [], []
        for line in lines:
            if package_in(line) != "torch" or self._gpu:
                (first if self._gpu or package_in(line) in builds else rest).append(line)
        torch = [
            line for line in lines if package_in(line) == "torch"
        ]  # one for each kind of Python
        say(f"Installing packages with {'uv' if self._uv else 'pip'}")
        if torch and not self._gpu:
            with self._timed("PyTorch"):
                self._install_torch(torch)
        with self._timed("packages for Horovod's build"):
            self._install(first, "before-build")
        frameworks = ["tensorflow", *(["torch"] if torch else [])]
        with self._horovod(frameworks, progress) as wheel:
            with self._timed("other packages"):
                self._install(rest, "after-build")
                self._installer("--no-deps", "--no-build-isolation", "--editable", str(ROOT))
            with self._timed("waiting for Horovod"):
                path = wheel()
        self._installer("--no-deps", "--reinstall", path)

    def _install(self, lines: list[str], name: str) -> None:
        """Install packages of a lock, as they are named there."""
        file = self.venv / f"{name}.txt"
        file.write_text("\n".join(lines))
        self._installer("--no-deps", "--requirement", str(file))
        file.unlink()

    def _installer(self, *arguments: str) -> None:
        """Install by uv, and by pip where there is no uv or it fails."""
        if self._uv:
            # Packages without a wheel are built with the locked setuptools, too.
            lock = self._locks / f"{'gpu' if self._gpu else 'tests'}.txt"
            has_index = os.environ.keys() & {"UV_DEFAULT_INDEX", "UV_INDEX_URL"}
            variables = {"UV_SYSTEM_CERTS": "1"}  # certificates of the machine's, as pip is told
            if self._index and not has_index:
                variables["UV_DEFAULT_INDEX"] = self._index
            try:
                self._run(
                    str(self.python), "-m", "uv", "pip", "install", "--python", str(self.python),
                    "--build-constraints", str(lock), *arguments, **variables,
                )  # fmt: skip
                return
            except SystemExit as error:
                # uv reads nothing of pip's configuration but what is handed on to it.
                say(f"{error}\nTrying pip")
                self._uv = False
        self._pip(*(PIP_NAMES.get(argument, argument) for argument in arguments))

    def _pip(self, *arguments: str) -> None:
        self._run(
            str(self.python), "-m", "pip", "--disable-pip-version-check", "install", *arguments
        )

    def _install_torch(self, lines: list[str]) -> None:
        """Install PyTorch for CPUs, or, where there is no such build, with CUDA (gigabytes)."""
        index = []
        # Asked first: pip would try an index that does not answer for minutes.
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{TORCH_INDEX}/torch/", timeout=5).close()
            index = ["--extra-index-url", TORCH_INDEX]
        try:
            # pip takes the one whose condition holds.
            builds = [re.sub(r"(==[\w.]+)", r"\1+cpu", line) for line in lines]
            self._pip("--no-deps", *index, *builds)
        except SystemExit:
            if "No matching distribution" not in self._log.read_text():
                raise
            say("There is no PyTorch for CPUs here: installing the one with CUDA (gigabytes)")
            locked = self._locks / "gpu.txt"
            if not locked.exists():  # as of the lowest versions
                self._installer(*lines)
                return
            others = re.compile(r"(nvidia|cuda|triton)(?!.*-cu12)")
            self._install([*lines, *filter(others.match, locked.read_text().splitlines())], "torch")

    @contextlib.contextmanager
    def _horovod(self, frameworks: list[str], progress: Progress) -> Iterator[Callable[[], str]]:
        """Build Horovod meanwhile; give a function that waits for the wheel's path."""
        build = subprocess.Popen(
            [str(self.python), str(BUILD_HOROVOD), "--print", "--frameworks", *frameworks,
             *(["--gpu"] if self._gpu else [])],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            pass_fds=self._inherited(),
        )  # fmt: skip
        others: list[str] = []

        def follow() -> None:
            assert build.stderr is not None
            for line in build.stderr:
                if line.startswith("Horovod for "):
                    progress.horovod = line.strip()
                else:
                    others.append(line)

        began = time.monotonic()
        reader = threading.Thread(target=follow, daemon=True)
        reader.start()

        def wait() -> str:
            assert build.stdout is not None
            path = build.stdout.read().strip()
            reader.join()
            self._seconds["Horovod"] = round(time.monotonic() - began, 1)
            if build.wait():
                raise SystemExit("".join(others) or f"error: {BUILD_HOROVOD} failed")
            return path

        try:
            yield wait
        finally:  # also where something else has failed
            if build.poll() is None:
                os.killpg(build.pid, signal.SIGTERM)
                build.wait()

    def _run(self, *command: str, **variables: str) -> None:
        with self._log.open("a") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            status = subprocess.run(
                command, stdout=log, stderr=log, env={**os.environ, **variables}, check=False,
                pass_fds=self._inherited(),
            ).returncode  # fmt: skip
        if status:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
            raise SystemExit(
                f"{tail}\nerror: {' '.join(command[1:4])} failed with exit code {status}; log: "
                f"{self._log}. What was downloaded is kept: run the same command again. If packages"
                " could not be downloaded, set PIP_INDEX_URL or HTTPS_PROXY."
            )


@contextlib.contextmanager
def lock_folder(venv: Path) -> Iterator[int]:
    """Wait for another set-up of the same folder. The lock ends with its process."""
    venv.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(venv.parent, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"Another set-up is under way in {venv.parent}: waiting for it")
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("level", choices=LEVELS)
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--locks", type=Path, default=ROOT / "scripts" / "locks")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument(
        "--check", action="store_true", help="only tell, by the exit code, if ready"
    )
    arguments = parser.parse_args()
    for name in PIP_ELSEWHERE:
        os.environ.pop(name, None)
    environment = Environment(arguments.venv.absolute(), arguments.locks, arguments.gpu)
    if arguments.check:
        sys.exit(not environment.is_ready(arguments.level))
    # Ends by an exception, so that what was started is ended, too.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit("\nEnded; the same command starts again."))
    try:
        with lock_folder(environment.venv) as environment.folder_lock:
            if not environment.is_ready(arguments.level):
                environment.set_up(arguments.level)
    except OSError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("\nInterrupted; the same command starts again from the caches.") from None


if __name__ == "__main__":
    main()
