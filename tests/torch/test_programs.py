"""Programs of torch.export are read as graphs and tensors: a hostile file runs no code."""

from __future__ import annotations

import contextlib
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
from torch import Tensor, nn

from horovod_spark_runner import ModelError, TorchTransformer
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.engines.torch.binding import InputBinding
from horovod_spark_runner.engines.torch.loading import load_initial_weights
from horovod_spark_runner.engines.torch.model import output_leaves
from horovod_spark_runner.engines.torch.program import dump_program, load_program, make_program
from horovod_spark_runner.storage.checksums import compute_checksum, seal, unseal
from horovod_spark_runner.storage.contents import Contents
from horovod_spark_runner.storage.filesystem import Location
from horovod_spark_runner.training.spec import WarmStart

from .runs import save_run

pytestmark = pytest.mark.spark

GRAPH = "models/model.json"
WEIGHTS = "data/weights/model_weights_config.json"
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


def node(content: Any) -> Any:
    return content["graph_module"]["graph"]["nodes"][0]


def code(mark: Path) -> str:
    return f"__import__('pathlib').Path({str(mark)!r}).touch()"


def twice(name: str, entries: Entries, mark: Path) -> Entries:
    """Return entries of which one is there twice; PyTorch reads the first, Python the last."""
    clean = dict(entries)[name]
    if name == INPUTS:
        harm = (name, saved(Harmful(mark)))
        return [harm, harm, *replaced(entries, name, harm[1]), (name, clean)]
    entry = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True}
    config = json.dumps({"config": {"x": {**entry, "tensor_meta": None}}}).encode()
    planted = ("data/constants/opaque_obj_0", pickle.dumps(Harmful(mark)))
    return [*replaced(entries, name, config), planted, (name, clean)]


def shape(entries: Entries, mark: Path) -> Entries:
    def change(content: Any) -> None:
        values = content["graph_module"]["graph"]["tensor_values"]
        expression = {"as_expr": {"expr_str": code(mark), "hint": None}}
        for value in values.values():
            value["sizes"][0] = expression

    return edit(entries, GRAPH, change)


def function(entries: Entries, mark: Path) -> Entries:
    def change(content: Any) -> None:
        node(content)["target"] = "torch.os.system"
        text = {"as_string": f"touch {mark}"}
        node(content)["inputs"] = [{"name": "", "arg": text, "kind": 1}]

    return edit(entries, GRAPH, change)


def file_operator(entries: Entries, mark: Path) -> Entries:
    def change(content: Any) -> None:
        node(content)["target"] = "torch.ops.aten.from_file.default"
        given = {
            "filename": {"as_string": str(mark)},
            "shared": {"as_bool": True},
            "size": {"as_int": 3},
        }
        node(content)["inputs"] = [
            {"name": name, "arg": value, "kind": 1} for name, value in given.items()
        ]

    return edit(entries, GRAPH, change)


def guard(entries: Entries, mark: Path) -> Entries:
    return edit(entries, GRAPH, lambda content: content.update(guards_code=[code(mark)]))


def objects(entries: Entries, mark: Path) -> Entries:
    return twice(CONSTANTS, entries, mark)[:-1]


def example(entries: Entries, mark: Path) -> Entries:
    return replaced(entries, INPUTS, saved(Harmful(mark)))


HOSTILE: dict[str, Callable[[Entries, Path], Entries]] = {
    "inputs twice": lambda entries, mark: twice(INPUTS, entries, mark),
    "objects twice": lambda entries, mark: twice(CONSTANTS, entries, mark),
    "shape": shape,
    "function": function,
    "file operator": file_operator,
    "guard": guard,
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
    """Return a folder with a run directory and a saved transformer."""
    place = tmp_path_factory.mktemp("saved")
    save_run(place / "run", nn.Linear(3, 1), [Column("x", "float32", (3,))])
    TorchTransformer.from_run(place / "run").save(str(place / "stage"))
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


def readers(folder: Path, place: Path) -> Iterator[Callable[[], object]]:
    """Yield each way in which a user reads a program."""
    yield lambda: TorchTransformer.from_exported(place)
    data = place.read_bytes()
    started = WarmStart(str(place), "program", {place.name: Contents(data)})
    yield lambda: load_initial_weights(nn.Linear(3, 1), started)
    for name in ("run", "stage"):
        plant(RunDirectory(Location(folder / name)), data)
    values = torch.zeros(2, 3)
    yield lambda: TorchTransformer.from_run(folder / "run").getModel()(values)
    yield lambda: TorchTransformer.load(str(folder / "stage")).getModel()(values)


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_program_runs_no_code(kind: str, saved_twice: Path, tmp_path: Path) -> None:
    mark, place = tmp_path / "mark", tmp_path / "model.pt2"
    folder = tmp_path / "saved"
    shutil.copytree(saved_twice, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of entries that are there twice
        write(place, HOSTILE[kind](entries_of(place), mark))
    for number, read in enumerate(readers(folder, place)):
        with contextlib.suppress(ModelError):
            read()
        assert not mark.exists(), f"reader {number}"


class Recurrent(nn.Module):
    """Recurrent layers, buffers of both kinds, a constant, and outputs that are nested."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.LSTM(4, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.cell = nn.GRU(12, 3, batch_first=True)
        self.register_buffer("scale", torch.arange(3.0))
        self.register_buffer("shift", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> dict[str, Any]:
        with torch.enable_grad():
            values, (hidden, _) = self.rows(x)
        more, _ = self.cell(values)
        shifted = more[:, -1] * self.scale + self.shift + torch.tensor([1.0, 2.0, 3.0])
        return {"first": shifted, "rest": (hidden.transpose(0, 1), [values.argmax(-1)])}


class Attending(nn.Module):
    """A Transformer on tokens, which skips padding and ties its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, weight: Tensor) -> Tensor:
        hidden = self.body(self.embedding(tokens), src_key_padding_mask=tokens == 0)
        scores: Tensor = self.head(hidden.mean(1)) * weight[:, None]
        return scores


class Image(nn.Module):
    """Convolutions, normalisation and interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding="same"), nn.BatchNorm2d(4), nn.GELU(), nn.MaxPool2d(2)
        )
        self.end = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.LazyLinear(2))
        self(torch.zeros(2, 3, 8, 8))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        inner = self.body(image)
        wide = nn.functional.interpolate(inner, scale_factor=2, mode="bilinear")
        return self.end(wide), wide.to(torch.float64).clamp(min=-float("inf"), max=1)


class Branching(nn.Module):
    """Another branch for other rows, as torch.cond has it, and a type of autocast's."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            low = self.body(x)
        parts = x.reshape(x.shape[0] * 3, 1).reshape(-1, 3).chunk(3, 1)
        chosen = torch.cond(x.sum() > 0, lambda x: (x + 1, x), lambda x: (x - 1, x * 2), (x,))
        return low.float(), *parts, *chosen, torch.einsum("bi,bj->bij", x, x)


def batch(*shape: int, below: int = 0) -> Tensor:
    return torch.randint(0, below, shape) if below else torch.randn(shape)


@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (Recurrent, [{"shape": (5, 4)}]),
        (Attending, [{"shape": (6,), "below": 11}, {"shape": ()}]),
        (Image, [{"shape": (3, 8, 8)}]),
        (Branching, [{"shape": (3,)}]),
    ],
)
def test_programs_give_what_modules_give(make: Callable[[], nn.Module], shapes: Any) -> None:
    def rows(count: int) -> list[Tensor]:
        return [batch(count, *one["shape"], below=one.get("below", 0)) for one in shapes]

    torch.manual_seed(1)
    module = make().eval()
    feed = InputBinding(tuple((str(number),) for number in range(len(shapes))))
    read = load_program(dump_program(make_program(module, feed, rows(3))), "here")
    # Copied, sent, and exported once more.
    copies = [read, copy.deepcopy(read), pickle.loads(pickle.dumps(read))]
    copies.append(load_program(dump_program(make_program(read, feed, rows(3))), "here"))
    for count in (1, 2, 17):
        given = rows(count)
        with torch.inference_mode():
            expected = dict(output_leaves(module(*given)))
            for program in copies:
                found = dict(output_leaves(program(*given)))
                assert list(found) == list(expected)
                for path, value in expected.items():
                    torch.testing.assert_close(found[path], value, rtol=1e-6, atol=1e-6)
    assert sorted(read.state_dict()) == sorted(module.state_dict())
    for name, value in module.state_dict().items():
        assert torch.equal(read.state_dict()[name], value), name
    wrong = [value[..., None] for value in rows(2)]
    with pytest.raises(ModelError, match="input.*shape"):
        read(*wrong)


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
