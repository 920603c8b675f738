"""Hostile storage: names, links, sizes and bytes of all kinds."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import traceback
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from horovod_spark_runner import DataError, InvalidInputError, RunDirectoryError
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.commands.cli import main
from horovod_spark_runner.data.manifest import Column, Manifest, RowGroup
from horovod_spark_runner.data.store import delete_dataset, find_datasets, mark_used
from horovod_spark_runner.errors import printable
from horovod_spark_runner.model import persistence
from horovod_spark_runner.model.load import ModelHandle, read_finished_run
from horovod_spark_runner.model.transformer import TFTransformer
from horovod_spark_runner.storage.arrays import dump_arrays, load_arrays
from horovod_spark_runner.storage.checksums import compute_checksum, seal, unseal
from horovod_spark_runner.storage.contents import MAX_TEXT_BYTES, convert_parse_errors, unpack
from horovod_spark_runner.storage.filesystem import Location
from horovod_spark_runner.typed_json import MAX_DEPTH, load_json

from .. import hostile

ROOT = Path(__file__).resolve().parents[2]
LEADING_OUT = [
    "../planted",
    "a/../../planted",
    "/planted",
    "",
    ".",
    "..",
    "a//b",
    "a\0",
    "..\\a",
    "\u202ea",
]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return hostile.leave_whole_run(tmp_path / "run")


def edit(record: Location, change: Callable[[Any], object]) -> None:
    """Change what a sealed record holds, as whoever can write it can."""
    facts = unseal(record.read_text())
    change(facts)
    record.write_text(seal(json.dumps(facts)))


@pytest.mark.parametrize("name", LEADING_OUT)
def test_a_name_does_not_lead_out_of_its_folder(
    run: RunDirectory, tmp_path: Path, name: str
) -> None:
    with pytest.raises(InvalidInputError, match="name of a file"):
        run.location.join(name)
    edit(run.signature, lambda facts: facts["sums"].update({name: "0" * 64}))
    with pytest.raises(RunDirectoryError, match="signature.json"):
        read_finished_run(run)
    edit(run.checkpoint(30).join("checkpoint.json"), lambda facts: facts["sums"].update({name: ""}))
    assert "step-00000030" in shown("runs", "show", str(run.location))
    with pytest.raises(InvalidInputError, match="name of a file"):
        Manifest.from_json(Manifest("/a", (name,), (), (), "c", (5,)).to_json())


def test_saving_a_hostile_run_writes_and_deletes_nothing_elsewhere(
    run: RunDirectory, tmp_path: Path
) -> None:
    victim = tmp_path / "victim.txt"
    victim.write_text("precious")
    trained = read_finished_run(run)  # before the names are refused
    sums = cast("dict[str, str]", trained.stored.sums)
    for name in (str(victim), "../../planted.txt"):
        sums[name] = "0" * 64
        ModelHandle(trained).save(RunDirectory(str(tmp_path / "a" / "b")))
    assert victim.read_text() == "precious"
    assert list(tmp_path.rglob("planted*")) == []


def test_a_file_that_has_changed_is_not_written_anywhere(run: RunDirectory, tmp_path: Path) -> None:
    trained = read_finished_run(run)
    run.model.join("sample.npz").write_bytes(b"changed")
    ModelHandle(trained).save(RunDirectory(str(tmp_path / "saved")))
    names = {path.name for path in (tmp_path / "saved" / "model").iterdir()}
    assert names == {"model.keras", "weights.npz", "signature.json"}


def shown(*words: str) -> str:
    return hostile.printed(*words)[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 200_000 + "]" * 200_000, f"{MAX_DEPTH} deep"),
        ("[" * MAX_DEPTH + "[" + "]" * MAX_DEPTH + "]", f"{MAX_DEPTH} deep"),
        ("[" + "[]," * 9_000_000 + "1]", "values"),
        ("[" + "9" * 5000 + "]", "1000 bits"),
        ('{"a":', "JSON"),
    ],
)
def test_json_is_read_within_limits(text: str, message: str) -> None:
    for data in (text, text.encode()):
        with pytest.raises(InvalidInputError, match=message):
            load_json(data)
    assert load_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)


def test_what_has_no_end_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        place = Location(tmp_path / name)
        for read in (place.read_bytes, place.read_text, place.open_input):
            with pytest.raises(InvalidInputError, match=name):
                read()
        with pytest.raises(InvalidInputError, match=name):
            place.spool(lambda part: None)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(MAX_TEXT_BYTES + 1)
    with pytest.raises(InvalidInputError, match=r"large has more than 67,108,864 bytes"):
        Location(tmp_path / "large").read_text()


def test_a_link_in_place_of_a_file_is_not_written_through(
    run: RunDirectory, tmp_path: Path
) -> None:
    for name in ("lock.json", ".lock", "metrics.jsonl", "log"):
        place = tmp_path / "run" / name
        place.unlink(missing_ok=True)
        place.symlink_to(tmp_path / f"planted-{name}")
    with pytest.raises(OSError, match="log"):
        run.location.join("log").append_bytes(b"x")
    with run.lease():
        run.write_metrics([{"loss": 1.0}])
    assert list(tmp_path.glob("planted*")) == []


def packed(*entries: tuple[str, bytes]) -> io.BytesIO:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a name that is there twice
        for name, content in entries:
            archive.writestr(name, content)
    return data


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([("a", b"1"), ("a", b"2")], "2 entries of 1 names"),
        ([("../planted", b"1")], r"\.\./planted"),
        ([("/planted", b"1")], "/planted"),
        ([("a", bytes(200_000_000))], "unpack to 200,000,000"),
    ],
)
def test_an_archive_is_measured_before_it_is_unpacked(
    entries: list[tuple[str, bytes]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        unpack(packed(*entries), tmp_path / "into", "an archive")
    assert not list(tmp_path.rglob("*"))
    with pytest.raises(InvalidInputError, match="not an archive"):
        unpack(io.BytesIO(b"PK"), tmp_path / "into", "an archive")


def test_an_array_takes_no_more_memory_than_its_file_has() -> None:
    kinds = dump_arrays({"a": np.zeros(3, np.float32)})
    with zipfile.ZipFile(io.BytesIO(kinds)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    entries["a.npy"] = hostile.array_header((10**12,))
    with pytest.raises(InvalidInputError, match="1000000000000"):
        load_arrays(packed(*entries.items()).getvalue())


@pytest.mark.parametrize(
    "column",
    [("x", "object"), ("x", "no_such"), ("x", "float32", (-1,)), ("x", "float64", (2**31,))],
)
def test_a_column_that_spark_cannot_have_is_refused(column: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=f"column.*{column[1]}"):
        Column(*column)


@pytest.mark.parametrize(
    "changes",
    [
        {"file_sizes": ()},
        {"file_sizes": (5, 5)},
        {"footers": ("a", "b")},
        {"row_groups": (RowGroup(1, 0, 3, 5),)},
        {"row_groups": (RowGroup(0, 0, -3, 5),)},
    ],
)
def test_a_manifest_whose_lists_do_not_fit_hides_no_dataset(
    run: RunDirectory, changes: dict[str, Any]
) -> None:
    hostile.leave_dataset(run)
    first = next(iter(run.data.list()))
    edit(
        first.join("manifest.json"),
        lambda facts: facts.update(json.loads(json.dumps(changes, default=vars))),
    )
    output = shown("data", "list", str(run.location))
    assert "incomplete" in output
    assert "4 rows of x" in output


def test_a_manifest_does_not_say_where_its_dataset_lies(run: RunDirectory, tmp_path: Path) -> None:
    """What is found there is marked as used, and deleted in the end."""
    (place,) = run.data.list()
    other = tmp_path / "data-0123456789abcdef-0123456789ab"
    other.mkdir()
    edit(place.join("manifest.json"), lambda facts: facts.update(url=str(other)))
    (dataset,) = find_datasets(run.data, hostile.KEY)
    mark_used(dataset)
    delete_dataset(dataset)
    assert list(other.iterdir()) == []
    assert run.data.list() == []


def test_a_bad_run_hides_no_other(run: RunDirectory, tmp_path: Path) -> None:
    hostile.leave_whole_run(tmp_path / "good")
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            path.unlink()
            path.symlink_to("/dev/zero")
    output = shown("runs", "list", str(tmp_path))
    assert "\ngood  finished" in output
    assert "\nrun " in output
    assert [one["place"] for one in json.loads(shown("runs", "list", "--json", str(tmp_path)))] == [
        str(tmp_path / "good"),
        str(tmp_path / "run"),
    ]


def test_a_terminal_obeys_nothing_that_storage_holds(run: RunDirectory, tmp_path: Path) -> None:
    text = "a\x1b[2J\x9b\u202eb\ud800\r\nc\td"
    assert printable(text) == "a\\x1b[2J\\x9b\\u202eb\\ud800\\r\nc\td"
    assert str(RunDirectoryError(text)) == printable(text)
    run.write_attempts([{**run.read_attempts()[0], "cause": text}])
    (tmp_path / "run").rename(tmp_path / text.replace("\ud800", "").replace("\n", ""))
    output = shown("runs", "list", str(tmp_path))
    assert "\\x1b[2J" in output
    assert not hostile.ESCAPES.search(output)
    assert main(["runs", "show", str(tmp_path / "\x1b[2J")]) == 1


def test_a_cause_that_a_traceback_shows_holds_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"\\x1b\[2J") as caught:
        Location(tmp_path / "\x1b[2J").delete_file()
    with pytest.raises(InvalidInputError) as wrapped, convert_parse_errors("a file"):
        raise ValueError("\x1b[2J")
    for error in (caught.value, wrapped.value):
        assert not hostile.ESCAPES.search("".join(traceback.format_exception(error)))


def test_a_name_forges_no_line_of_a_listing(run: RunDirectory, tmp_path: Path) -> None:
    forged = "x\nrun-2  finished"
    edit(
        run.checkpoint(30).join("checkpoint.json"),
        lambda facts: facts["history"][-1].update({forged: 1.0}),
    )
    run.write_attempts([{**run.read_attempts()[0], "cause": forged}])
    hostile.leave_dataset(run)
    first = next(iter(run.data.list()))
    edit(first.join("manifest.json"), lambda facts: facts["columns"][0].update(name=forged))
    (tmp_path / "run").rename(tmp_path / forged)
    place = str(tmp_path / forged)
    for words in (
        ["runs", "list", str(tmp_path)],
        ["runs", "show", place],
        ["data", "list", place],
    ):
        output = shown(*words)
        assert "x\\nrun-2" in output
        assert not [line for line in output.splitlines() if line.startswith("run-2")]


def mutate(tmp_path: Path, pristine: Path, seed: int, count: int) -> list[str]:
    """Return what goes wrong with so many mutations, in a process of bounded memory."""
    numbers = [str(seed), "0", str(count)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.hostile", pristine, tmp_path / "b", *numbers],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return list(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture
def stage(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """Loads what a transformer may be that is saved in a run's directory, without Spark."""
    monkeypatch.setattr(persistence, "_location_of", lambda spark, path: Location(path))
    name = f"{TFTransformer.__module__}.{TFTransformer.__name__}"

    def load(**metadata: object) -> object:
        facts: dict[str, Any] = {"class": name, "uid": "T_1", "horovod_spark_runner": metadata}
        metadata["metadata"] = compute_checksum(json.dumps(facts, sort_keys=True).encode())
        part = run.location.join("metadata", "part-00000")
        if not part.exists():
            part.parent.make_folder()
            part.write_text(json.dumps(facts))
        reader = persistence.KerasStageReader(TFTransformer)
        reader._sparkSession = object()
        return reader.load(str(run.location))

    return load


@pytest.mark.parametrize(
    "metadata",
    [
        {"format": 1, "version": "1"},
        {"format": float("inf"), "version": "1", "signature": ""},
        {"format": 1, "version": 1, "signature": ""},
        {"format": 1, "version": "1", "signature": 3},
        {"format": 1, "version": "1", "signature": "", "summary": []},
    ],
)
def test_metadata_of_a_stage_are_checked_by_type(
    stage: Callable[..., object], metadata: dict[str, object]
) -> None:
    with pytest.raises(RunDirectoryError, match="metadata"):
        stage(**metadata)


def test_metadata_of_a_stage_may_be_a_folder(
    stage: Callable[..., object], run: RunDirectory
) -> None:
    run.location.join("metadata", "part-00000").make_folder()
    with pytest.raises(RunDirectoryError, match="metadata"):
        stage()


def test_a_transform_that_a_stage_lacks_is_given_as_such(
    stage: Callable[..., object], run: RunDirectory
) -> None:
    edit(run.signature, lambda facts: facts["signature"].update(transforms=["x"]))
    with pytest.raises(DataError, match=r"'x'.*loading\(transforms=") as caught:
        stage(format=1, version="1", signature="")
    assert "custom_objects" not in str(caught.value)


def test_a_changed_file_ends_in_an_error_of_this_package(tmp_path: Path) -> None:
    hostile.leave_whole_run(tmp_path / "run")
    wrong = mutate(tmp_path, tmp_path / "run", 7, 30)
    assert wrong == [], "\n\n".join(wrong)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [1, 2])
def test_no_change_of_many_is_trusted(tmp_path: Path, seed: int) -> None:
    hostile.leave_whole_run(tmp_path / "run")
    wrong = mutate(tmp_path, tmp_path / "run", seed, 100)
    assert wrong == [], "\n\n".join(wrong)
