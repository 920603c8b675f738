"""Programs of torch.export, which hold code: from storage, they are read only where trusted."""

from __future__ import annotations

import copy
import io
import json
import pickle
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pyspark.ml import PipelineModel
from torch import Tensor, nn

from horovod_spark_runner import (
    InitialWeights,
    InvalidInputError,
    ModelError,
    RunDirectoryError,
    TorchTransformer,
)
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.engines.torch.binding import InputBinding
from horovod_spark_runner.engines.torch.engine import ENGINE
from horovod_spark_runner.engines.torch.model import output_leaves
from horovod_spark_runner.engines.torch.program import (
    describe_inputs,
    dump_program,
    load_program,
    make_program,
    read_program,
)
from horovod_spark_runner.frameworks import TORCH
from horovod_spark_runner.storage.checksums import compute_checksum, seal, unseal
from horovod_spark_runner.storage.filesystem import Location
from horovod_spark_runner.training.warm_start import read_warm_start

from .runs import save_run

pytestmark = pytest.mark.spark

GRAPH = "models/model.json"
CONSTANTS = "data/constants/model_constants_config.json"
INPUTS = "data/sample_inputs/model.pt"

Entries = list[tuple[str, bytes]]


class Harmful:
    """Leaves a file where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return open, (str(self.mark), "w")


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def edit(entries: Entries, name: str, change: Callable[[Any], object]) -> Entries:
    """Return the entries with the JSON of one changed in place."""
    content = json.loads(dict(entries)[name])
    change(content)
    return [(n, json.dumps(content).encode() if n == name else d) for n, d in entries]


def replaced(entries: Entries, name: str, data: bytes) -> Entries:
    return [(n, data if n == name else d) for n, d in entries]


def shape(entries: Entries, mark: Path) -> Entries:
    def change(content: Any) -> None:
        code = f"__import__('pathlib').Path({str(mark)!r}).touch()"
        for value in content["graph_module"]["graph"]["tensor_values"].values():
            value["sizes"][0] = {"as_expr": {"expr_str": code, "hint": None}}

    return edit(entries, GRAPH, change)


def objects(entries: Entries, mark: Path) -> Entries:
    entry = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True}
    config = json.dumps({"config": {"x": {**entry, "tensor_meta": None}}}).encode()
    planted = ("data/constants/opaque_obj_0", pickle.dumps(Harmful(mark)))
    return [*replaced(entries, CONSTANTS, config), planted]


def example(entries: Entries, mark: Path) -> Entries:
    return replaced(entries, INPUTS, saved(Harmful(mark)))


HOSTILE: dict[str, Callable[[Entries, Path], Entries]] = {
    "shape": shape,
    "objects": objects,
    "example": example,
}


def entries_of(place: Path) -> Entries:
    """Return the entries of a program of `nn.Linear`, by their names in the archive."""
    module, values = nn.Linear(3, 1).eval(), torch.zeros(3, 3)
    rows = ({0: torch.export.Dim.DYNAMIC},)
    torch.export.save(torch.export.export(module, (values,), dynamic_shapes=rows), place)
    with zipfile.ZipFile(place) as archive:
        return [(n.partition("/")[2], archive.read(n)) for n in archive.namelist()]


def write(place: Path, entries: Entries) -> None:
    with zipfile.ZipFile(place, "w") as archive:
        for name, data in entries:
            archive.writestr(f"model/{name}", data)


@pytest.fixture(scope="module")
def saved_twice(tmp_path_factory: pytest.TempPathFactory, spark: Any) -> Path:
    """Return a folder with a run directory and a saved pipeline."""
    place = tmp_path_factory.mktemp("saved")
    torch.manual_seed(7)
    save_run(place / "run", made(), [Column("x", "float32", (3,))])
    PipelineModel([TorchTransformer.from_run(place / "run", trusted=True)]).save(str(place / "all"))
    return place


def plant(directory: RunDirectory, data: bytes) -> None:
    """Put a program into a run directory, with its sum."""
    directory.model.join("module.pt2").write_bytes(data)
    facts = unseal(directory.signature.read_text())
    facts["sums"]["module.pt2"] = compute_checksum(data)
    after = seal(json.dumps(facts))
    directory.signature.write_text(after)
    place = directory.location.join("metadata", "part-00000")
    if place.exists():
        metadata = json.loads(place.read_text())
        own = metadata["horovod_spark_runner"]
        own["signature"] = compute_checksum(after.encode())
        del own["metadata"]
        own["metadata"] = compute_checksum(json.dumps(metadata, sort_keys=True).encode())
        place.write_text(json.dumps(metadata))


def stage_in(folder: Path) -> Path:
    (stage,) = (folder / "all" / "stages").iterdir()
    return stage


def made() -> nn.Module:
    return nn.Linear(3, 1)


VALUES = torch.arange(6.0).reshape(2, 3)


def readers(folder: Path, **how: Any) -> Iterator[Callable[[], Any]]:
    """Yield each way in which a user reads the model of a run, and of a stage in a pipeline."""
    yield lambda: TorchTransformer.from_run(folder / "run", **how)

    def load(path: Path) -> Any:
        reader = TorchTransformer.read()
        reader = reader.modelFn(how["model_fn"]) if "model_fn" in how else reader
        reader = reader.trusted() if "trusted" in how else reader
        return reader.load(str(path))

    yield lambda: load(stage_in(folder))

    def load_all() -> Any:
        with TorchTransformer.loading(**how):
            return PipelineModel.load(str(folder / "all")).stages[0]

    yield load_all


@pytest.mark.parametrize("kind", HOSTILE)
def test_nothing_from_storage_is_run(kind: str, saved_twice: Path, tmp_path: Path) -> None:
    mark, place = tmp_path / "mark", tmp_path / "model.pt2"
    folder = tmp_path / "saved"
    shutil.copytree(saved_twice, folder)
    write(place, HOSTILE[kind](entries_of(place), mark))
    for one in (folder / "run", stage_in(folder)):
        plant(RunDirectory(Location(one)), place.read_bytes())
    for read in readers(folder):
        with pytest.raises(RunDirectoryError, match=r"code.*model_fn=.*trusted=True"):
            read()
    with pytest.raises(InvalidInputError, match=r"code.*trusted=True.*from_module\("):
        TorchTransformer.from_exported(place)
    with pytest.raises(InvalidInputError, match="trusted.*True or False.*'no'"):
        TorchTransformer.from_run(folder / "run", trusted="no")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"torch\.export\.load\(path\)\.state_dict"):
        read_warm_start(InitialWeights(place), TORCH, ENGINE.weights_formats)
    found = [read().getModel()(VALUES) for read in readers(folder, model_fn=made)]
    assert not mark.exists()
    torch.manual_seed(7)
    expected = made()(VALUES)
    assert all(torch.equal(one, expected) for one in found)
    # What has not happened above.
    with pytest.raises(ModelError):
        TorchTransformer.from_exported(place, trusted=True)
    assert mark.exists()


def test_what_is_trusted_predicts_the_same(saved_twice: Path, spark: Any) -> None:
    torch.manual_seed(7)
    expected = made()(VALUES)
    frame = spark.createDataFrame([(row.tolist(),) for row in VALUES], "x array<float>")
    for read in readers(saved_twice, trusted=True):
        transformer = read()
        assert torch.equal(transformer.getModel()(VALUES), expected)
    predicted = [row.prediction for row in transformer.transform(frame.coalesce(1)).collect()]
    assert predicted == pytest.approx(expected[:, 0].tolist(), rel=1e-6)


class Nested(nn.Module):
    """Buffers of both kinds, tied weights, a branch of torch.cond, and outputs that are nested."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, padding_idx=0)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.arange(8.0))
        self.register_buffer("shift", torch.ones(8), persistent=False)

    def forward(self, tokens: Tensor, weight: Tensor) -> dict[str, Any]:
        hidden = self.embedding(tokens).mean(1) * self.scale + self.shift
        scores = self.head(hidden) * weight[:, None]
        chosen = torch.cond(weight.sum() > 0, lambda x: x + 1, lambda x: x - 1, (scores,))
        return {"first": chosen, "rest": (hidden, [scores.argmax(-1)])}


class Within(nn.Module):
    """Calls a program, as exports do."""

    def __init__(self, program: nn.Module) -> None:
        super().__init__()
        self.program = program

    def forward(self, weight: Tensor, tokens: Tensor) -> Any:
        return self.program(weight=weight, tokens=tokens)


def given(count: int) -> dict[str, Tensor]:
    return {"tokens": torch.randint(0, 11, (count, 6)), "weight": torch.randn(count)}


def test_programs_give_what_modules_give() -> None:
    module = Nested().eval()
    rows = {"tokens": {0: torch.export.Dim.DYNAMIC}, "weight": {0: torch.export.Dim.DYNAMIC}}
    few = given(3)
    mixed = torch.export.export(
        module, (few["tokens"],), {"weight": few["weight"]}, dynamic_shapes=rows
    )
    read = load_program(dump_program(mixed), "here")
    feed = InputBinding((("a",), ("b",)), ("weight", "tokens"))
    values = [few["weight"], few["tokens"]]
    # Copied, and exported once more.
    programs = [read, copy.deepcopy(read)]
    programs.append(load_program(dump_program(make_program(Within(read), feed, values)), "here"))
    for count in (1, 2, 17):
        batch = given(count)
        calls: list[Callable[[nn.Module], Any]] = [
            lambda program, batch=batch: program(*batch.values()),  # type: ignore[misc]
            lambda program, batch=batch: program(**batch),  # type: ignore[misc]
            lambda program, batch=batch: program(  # type: ignore[misc]
                weight=batch["weight"], tokens=batch["tokens"]
            ),
        ]
        with torch.inference_mode():
            expected = dict(output_leaves(module(**batch)))
            for program in programs:
                for call in calls if program is read else calls[1:]:
                    found = dict(output_leaves(call(program)))
                    assert list(found) == list(expected)
                    for path, value in expected.items():
                        torch.testing.assert_close(found[path], value, rtol=1e-6, atol=1e-6)
    assert sorted(read.state_dict()) == sorted(module.state_dict())
    for name, value in module.state_dict().items():
        assert torch.equal(read.state_dict()[name], value), name


def described(shapes: Any, *sizes: tuple[int, ...]) -> Any:
    class Adding(nn.Module):
        def forward(self, *values: Tensor) -> Tensor:
            return sum(value.sum(-1) for value in values)  # type: ignore[return-value]

    values = tuple(torch.zeros(size) for size in sizes)
    program = torch.export.export(Adding(), values, dynamic_shapes=(shapes,))
    return describe_inputs(read_program(dump_program(program), "here"))


def test_inputs_of_programs() -> None:
    rows, some = torch.export.Dim.DYNAMIC, torch.export.Dim("some", min=3, max=8)
    inputs, fixed = described(({0: rows}, {0: rows}), (3, 4), (3, 5))
    assert fixed is None
    assert [*inputs.values()] == [((4,), torch.float32), ((5,), torch.float32)]
    assert described((None,), (3, 4))[1] == 3
    refused: list[tuple[Any, tuple[tuple[int, ...], ...], str]] = [
        (({0: some},), ((4, 4),), "some.*rows.*DYNAMIC|rows.*DYNAMIC"),
        (({0: rows, 1: rows},), ((4, 5),), "any size"),
    ]
    for shapes, sizes, message in refused:
        with pytest.raises(ModelError, match=message):
            described(shapes, *sizes)


class Writing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.save(x, "MARK")
        return x


def test_torchscript_that_writes_files_is_refused(tmp_path: Path) -> None:
    place, mark = tmp_path / "model.pt", tmp_path / "mark"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(Writing()), place)
    with zipfile.ZipFile(place) as archive:
        entries = [
            (name, archive.read(name).replace(b"MARK", str(mark).encode()))
            for name in archive.namelist()
        ]
    (source,) = (n for n, data in entries if n.endswith(".py") and b"save" in data)
    harmless = dict(entries)[source].replace(b"torch.save(x", b"print(x")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for written in (entries, [*entries, (source, harmless)], [(source.upper(), b""), *entries]):
            with zipfile.ZipFile(place, "w") as archive:
                for name, data in written:
                    archive.writestr(name, data)
            with pytest.raises(ModelError, match="save|twice|names"):
                TorchTransformer.from_torchscript(place, example=torch.zeros(2, 3))
            assert not mark.exists()
