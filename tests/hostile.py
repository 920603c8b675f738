"""A run directory in which a stranger has changed a file, and what a user calls on it.

As a program, it mutates a directory so many times and prints what went wrong as JSON. It runs as a
process of its own so that its memory can be bounded.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import random
import re
import resource
import shutil
import struct
import sys
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from horovod_spark_runner.checkpoint.files import (
    CheckpointInfo,
    load_checkpoint,
    newest_readable,
    save_checkpoint,
)
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.commands import cli
from horovod_spark_runner.config.training import InitialWeights
from horovod_spark_runner.data.manifest import Column, Manifest, RowGroup
from horovod_spark_runner.data.store import find_datasets, new_folder, publish
from horovod_spark_runner.engines.keras.saved import KerasFacts
from horovod_spark_runner.errors import HorovodSparkError
from horovod_spark_runner.frameworks import KERAS
from horovod_spark_runner.model.load import ModelHandle, read_finished_run
from horovod_spark_runner.storage import retries
from horovod_spark_runner.storage.arrays import dump_arrays
from horovod_spark_runner.storage.checksums import seal, unseal
from horovod_spark_runner.storage.filesystem import Location
from horovod_spark_runner.storage.folders import convert_save_errors
from horovod_spark_runner.storage.lease import identity
from horovod_spark_runner.training.engine import engine_named
from horovod_spark_runner.training.spec import Binding, OutputSpec
from horovod_spark_runner.training.trained_model import ModelWriter, Signature
from horovod_spark_runner.training.warm_start import read_warm_start
from tests.report.runs import leave_run

KEY = "0123456789abcdef"
# Memory that a mutation may take besides what the process has.
ROOM = 1536 * 1024 * 1024
# Calls of which a change of the files makes an error, where sums were not made to fit.
SILENT = {"from_run", "datasets"}
# What a terminal obeys.
ESCAPES = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")


def leave_whole_run(place: Path) -> RunDirectory:
    """Leave a run directory with a file of every kind, as the package's own writers leave it."""
    directory = leave_run(place, 3, ranks=2, sync={"sync": "allreduce"})
    directory.write_run_id("run-1")
    variables = [("model/00000", "dense/kernel", [3], "float32")]
    for epoch in (2, 3):
        history: list[dict[str, Any]] = [
            {"loss": 1.0 / (1 + e), "f1": [0.5, 0.25]} for e in range(epoch)
        ]
        info = CheckpointInfo(
            epoch * 10, epoch, history, "abc", variables, KERAS, world=2, run_id="run-1"
        )
        arrays = {"model/00000": np.arange(3, dtype=np.float32)}
        files = {"variables.npz": arrays, "ranks.npz": {"00000/seed/00000": np.zeros(2, "uint32")}}
        save_checkpoint(directory, info, files)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("config.json", json.dumps({"class_name": "Sequential", "config": {}}))
        file.writestr("model.weights.h5", os.urandom(2000))
    writer = ModelWriter(directory)
    writer.write("model.keras", archive.getvalue())
    writer.write("weights.npz", dump_arrays({"00000": np.arange(3, dtype=np.float32)}))
    writer.write("sample.npz", dump_arrays({"x": np.zeros((2, 3), np.float32)}))
    writer.finish(
        Signature(
            Binding(["x"]),
            (Column("x", "float32", (3,)),),
            (OutputSpec("out", (1,), "float32", (), "linear"),),
            weights=("dense/kernel",),
            own=KerasFacts(archive=True, self_contained=True).to_fields(),
        )
    )
    leave_dataset(directory)
    directory.write_mlflow_run("mlflow-1")
    lock = {**identity(), "pid": 2**22 + 1, "token": "t", "renewed": 1_800_000_000.0}
    directory.lock.write_text(json.dumps(lock))
    return directory


def leave_dataset(directory: RunDirectory) -> None:
    """Leave a dataset in a run directory."""
    rows = new_folder(directory.data, KEY)
    part = rows.join("rows", "part-0.parquet")
    part.parent.make_folder()
    pq.write_table(pa.table({"x": pa.array([[1.0, 2.0, 3.0]] * 4)}), str(part))
    (stat,) = [file for file in rows.files() if file.name.endswith("parquet")]
    publish(
        Manifest(
            str(rows),
            (stat.name,),
            (Column("x", "float32", (3,)),),
            (RowGroup(0, 0, 4, 100),),
            "sum",
            (stat.size,),
            footers=("f",),
        )
    )


class Mutator:
    """Changes one file of a run directory in one way.

    Args:
        run: the directory.
        outside: a folder and a file in it that names and links lead to.
        random: decides.

    Attributes:
        told: the change, for people.
        is_sealed: whether sums were made to fit what was changed.
    """

    def __init__(self, run: Path, outside: Path, chance: random.Random) -> None:
        self._run, self._outside, self._random = run, outside, chance
        self.told, self.is_sealed = "", False
        files = sorted(path for path in run.rglob("*") if path.is_file())
        self._file = chance.choice(files)

    def mutate(self) -> None:
        """Change it."""
        mutations: list[Callable[[], str]] = [self._bytes, self._place, self._link]
        if self._file.suffix in (".json", ".jsonl"):
            mutations += [self._structure] * 5 + [self._text]
        if self._file.suffix in (".keras", ".npz"):
            mutations += [self._archive] * 3
        mutation = self._random.choice(mutations)
        name = self._file.relative_to(self._run)
        self.told = f"{name}: {mutation.__name__}: {mutation()}"[:500]

    def _bytes(self) -> str:
        chance, data = self._random, bytearray(self._file.read_bytes())
        at, how = chance.randrange(len(data) + 1), chance.randrange(6)
        some = chance.randbytes(chance.choice([1, 8, 5000]))
        if how == 0 and data:
            data[at % len(data)] ^= 1 << chance.randrange(8)
        elif how == 1:
            del data[at:]
        elif how == 2:
            data[at:at] = some
        elif how == 3:
            data[at : at + len(some)] = some
        elif how == 4:
            data = bytearray(some)
        else:
            data = data * 2
        self._file.write_bytes(data)
        return f"bytes {how} at {at}"

    def _text(self) -> str:
        """JSON that is too much, of which no part may be taken into memory without limits."""
        how = self._random.randrange(5)
        if how == 0:
            text = "[" * 200_000 + "]" * 200_000
        elif how == 1:
            text = '{"a":' * 100_000 + "1" + "}" * 100_000
        elif how == 2:
            text = "[" + "[]," * 9_000_000 + "1]"
        elif how == 3:
            text = '{"format": ' + "9" * 5000 + "}"
        else:
            self._file.unlink()
            with self._file.open("wb") as file:
                file.truncate(8 * 1024**3)  # takes no room on the disk
            return "8 GiB"
        if self._random.random() < 0.5:
            self._write_sealed(text)
        else:
            self._file.write_text(text + "\n")
        return f"text {how}"

    def _write_sealed(self, text: str) -> None:
        self._file.write_text(seal(text))
        self.is_sealed = True

    def _structure(self) -> str:
        text = self._file.read_text()
        if text.startswith('{"sha256"'):
            value = unseal(text)
            change = self._change(value)
            self._write_sealed(json.dumps(value))
        elif self._file.suffix == ".jsonl":
            lines = [json.loads(line) for line in text.splitlines()]
            change = self._change(lines)
            self._file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        else:
            holder = [json.loads(text)]
            change = self._change(holder)
            self._file.write_text(json.dumps(holder[0]) if holder else "")
        return change

    def _change(self, value: Any) -> str:
        """Change a place within parsed JSON."""
        places: list[tuple[Any, Any]] = []

        def walk(inner: Any) -> None:
            for key, below in inner.items() if isinstance(inner, dict) else enumerate(inner):
                places.append((inner, key))
                if isinstance(below, (dict, list)):
                    walk(below)

        walk(value)
        if not places:
            return "nothing"
        inner, key = self._random.choice(places)
        before, how = inner[key], self._random.randrange(8)
        if how == 0:
            del inner[key]
        elif how == 1 and isinstance(inner, dict):
            inner[self._pick_name()] = inner.pop(key)
        elif how == 2 and isinstance(inner, list):
            inner += [before] * self._random.choice([1, 500])
        elif how == 3:
            inner[key] = [before]
        elif how == 4 and isinstance(inner, dict):
            inner[self._pick_name()] = before
        else:
            inner[key] = self._random.choice(self._values())
        return f"{how} at {key!r:.50}: {before!r:.80} -> {inner!r:.200}"

    def _pick_name(self) -> str:
        names = ["../planted.txt", "../../planted.txt", str(self._outside / "victim.txt"), "", "."]
        names += ["..", "a\0b", "\x1b[2Jname", "\u202egnp", "\ud800", "a\\..\\b", "signature.json"]
        return self._random.choice([*names, "model.keras/x", "x" * 5000, "weights.npz"])

    def _values(self) -> list[Any]:
        numbers = [0, 1, -1, 2**31, 2**63, 10**30, 1e308, -1e308, 0.5, float("nan"), float("inf")]
        names = [self._pick_name() for _ in range(6)]
        return [*numbers, *names, None, True, [], {}, [[]], [None] * 3, {"a": 1}, "x" * 10**6]

    def _place(self) -> str:
        how, file = self._random.randrange(4), self._file
        if how == 0:
            file.unlink()
        elif how == 1:
            file.unlink()
            file.mkdir()
        elif how == 2:
            other = file.with_name(self._random.choice(["\x1b[31mred", "a\nb", "\u202eb", "x"]))
            file.rename(other)
        else:
            folder = file.parent if file.parent != self._run else file
            folder.rename(folder.with_name("\x1b[2J" + folder.name))
        return f"place {how}"

    def _link(self) -> str:
        targets: list[Any] = ["/dev/zero", "/dev/full", "/nowhere", self._outside / "victim.txt"]
        targets += [self._outside, self._file.name, "/proc/self/mem", "/proc/kmsg"]
        target, place = self._random.choice(targets), self._file
        if self._random.random() < 0.2:
            place.unlink()
            os.mkfifo(place)
            return "a pipe"
        if target == self._outside and place.parent != self._run:
            place = place.parent
            shutil.rmtree(place)
        else:
            place.unlink()
        place.symlink_to(target)
        return f"a link to {target}"

    def _archive(self) -> str:
        how = self._random.randrange(6)
        with zipfile.ZipFile(self._file) as old:
            entries = {name: old.read(name) for name in old.namelist()}
        first = next(iter(entries))
        kind = zipfile.ZIP_STORED
        if how == 0:
            name = self._pick_name().replace("\0", "0").replace("\ud800", "8")
            entries[name or "/"] = b"x"
        elif how == 1:
            entries[first], kind = bytes(100_000_000), zipfile.ZIP_DEFLATED
        elif how == 2:
            entries[first] = array_header((10**12,))
        elif how == 3:
            entries[first] = array_header("()" * 1000)
        elif how == 4:
            entries[first] = self._random.randbytes(100)
        data = io.BytesIO()
        with zipfile.ZipFile(data, "w", kind, compresslevel=1) as new:
            for name, content in entries.items():
                new.writestr(name, content)
            if how == 5:
                new.writestr(first, b"a second one")
        self._file.write_bytes(data.getvalue())
        if self._random.random() < 0.8:
            self._fit_sums()
        return f"archive {how} at {first}"

    def _fit_sums(self) -> None:
        """Make the record of the file's sum fit, as whoever writes the file can."""
        for record in ("signature.json", "checkpoint.json"):
            place = self._file.with_name(record)
            if place.exists():
                facts = unseal(place.read_text())
                facts["sums"][self._file.name] = hashlib.sha256(self._file.read_bytes()).hexdigest()
                place.write_text(seal(json.dumps(facts)))
                self.is_sealed = True


def array_header(shape: Any) -> bytes:
    """Return the beginning of a file of an array of that shape."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header


def printed(*words: str) -> tuple[int, str]:
    """Return the exit code of a command, and what it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = cli.main([*words])
    return code, out.getvalue()


def look(run: Path, target: Path, chance: random.Random | None = None) -> dict[str, str]:
    """Call what a user calls on a run directory; return what came of each call.

    Args:
        run: the run directory.
        target: a folder to write to.
        chance: leaves out half of the calls.
    """
    directory = RunDirectory(str(run))

    def loads(checkpoint: int | None = None) -> str:
        trained = read_finished_run(directory, checkpoint=checkpoint)
        place = target / "stage"
        with convert_save_errors("the model", Location(str(place))):
            ModelHandle(trained).save(RunDirectory(str(place)))
        saved = place / "model" / ("model.keras" if checkpoint is None else "weights.npz")
        return f"{trained.stored.signature} {saved.read_bytes()!r}"

    def resumes() -> str:
        newest = newest_readable(directory, load_checkpoint, directory.run_id(), say=lambda _: None)
        return repr(newest and newest[1:])

    def warm_starts() -> str:
        formats = engine_named(KERAS).weights_formats
        return repr(read_warm_start(InitialWeights(str(run)), KERAS, formats))

    def command(*words: str) -> Callable[[], str]:
        def call() -> str:
            code, output = printed(*words)
            if obeyed := ESCAPES.search(output):
                raise AssertionError(f"{words} prints {obeyed[0]!r} raw")
            if words[:2] == ("runs", "list") and (code or not re.search("^good ", output, re.M)):
                raise AssertionError(f"the other run is hidden: {output:.500}")
            return f"{code} {output}"

        return call

    page = str(target / "page.html")
    calls: dict[str, Callable[[], str]] = {
        "from_run": loads,
        "from_run checkpoint": lambda: loads(20),
        "resume": resumes,
        "initial weights": warm_starts,
        "datasets": lambda: repr(list(find_datasets(directory.data, KEY))),
        "runs list": command("runs", "list", str(run.parent)),
        "runs show": command("runs", "show", str(run)),
        "runs show --json": command("runs", "show", "--json", str(run)),
        "report": command("report", str(run), "--output", page),
        "plan": command("plan", str(run)),
        "data list": command("data", "list", str(run)),
        "mlflow": lambda: repr(directory.mlflow_run()),
    }
    results = {}
    for name, call in calls.items():
        if chance and name not in (*SILENT, "runs list") and chance.random() < 0.5:
            continue
        try:
            results[name] = call()
        except HorovodSparkError as error:
            results[name] = f"refused: {error}"
            if obeyed := ESCAPES.search("".join(traceback.format_exception(error))):
                raise AssertionError(f"the traceback holds {obeyed[0]!r} raw") from error
    return results


def picture(folder: Path) -> dict[str, bytes]:
    """Return the names and contents of all files in a folder."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def mutate_all(pristine: Path, box: Path, seed: int, first: int, count: int) -> list[str]:
    """Return what went wrong with each of so many mutations of a run."""
    retries.PAUSES = ()  # type: ignore[assignment]
    cli.make_parser = functools.cache(cli.make_parser)  # takes longer than a command
    os.environ[retries.TIMEOUT_VARIABLE] = "20"
    outside, runs, target = box / "outside", box / "runs", box / "target"
    outside.mkdir(parents=True)
    (outside / "victim.txt").write_text("precious")
    (outside / "deeper").mkdir()
    (outside / "deeper" / "step-00000010").write_text("precious")
    run = runs / "run"
    shutil.copytree(pristine, run)
    shutil.copytree(pristine, runs / "good")
    target.mkdir()
    usual = look(run, target)
    assert not any(one.startswith("refused") for one in usual.values()), usual
    before = picture(outside)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, resource.RLIM_INFINITY))
    wrong = []
    for number in range(first, first + count):
        shutil.rmtree(run)
        shutil.rmtree(target)
        shutil.copytree(pristine, run)
        target.mkdir()
        mutator = Mutator(run, outside, random.Random(f"{seed}-{number}"))
        mutator.mutate()
        label = f"{seed}-{number}: {mutator.told}"
        try:
            results = look(run, target, random.Random(number))
        except BaseException:
            wrong.append(f"{label}\n{traceback.format_exc()[-3000:]}")
            continue
        for name in SILENT & results.keys() if not mutator.is_sealed else ():
            if results[name] != usual[name] and not results[name].startswith("refused"):
                wrong += [f"{label}\n{name} differs silently"] * (results[name] != "[]")
        expected = {"outside", "runs", "target"}
        if picture(outside) != before or {path.name for path in box.iterdir()} != expected:
            wrong.append(f"{label}\ntouches what lies outside")
        if {path.name for path in runs.iterdir()} - {"run", "good"}:
            wrong.append(f"{label}\nleaves {sorted(path.name for path in runs.iterdir())}")
    return wrong


if __name__ == "__main__":
    _, place, work, *numbers = sys.argv
    print(json.dumps(mutate_all(Path(place), Path(work), *map(int, numbers))))
