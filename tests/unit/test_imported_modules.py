"""Modules that functions import in their bodies travel with them."""

from __future__ import annotations

import shutil
import sys
import zipfile
from collections.abc import Iterator, Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner.serialize import dumps
from tests.unit.test_serialize import loaded_elsewhere

RANK = "import os; os.environ['OMPI_COMM_WORLD_RANK'] = '0'; "
FILES = {
    "hsr_project/__init__.py": "from .rates import RATE",
    "hsr_project/rates.py": "RATE = 0.1\nHALVES = [RATE / 2]",
    "hsr_project/models/build.py": "from ..rates import RATE\n"
    "def build():\n    import hsr_layers, json\n    return hsr_layers.width() * RATE",
    "hsr_layers.py": "try:\n    import hsr_missing\nexcept ImportError:\n    hsr_missing = None\n"
    "def width():\n    return 8",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The script's folder, with modules beside it."""
    write(tmp_path / "driver", FILES)
    monkeypatch.syspath_prepend(str(tmp_path / "driver"))
    before = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - before:
        if name.startswith("hsr_"):
            del sys.modules[name]


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def of_script(text: str) -> Any:
    """Return function ``f`` of a script."""
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(text, space)
    return space["f"]


BUILD = of_script("def f():\n    from hsr_project.models.build import build\n    return build()")


def test_an_import_in_a_body_works_elsewhere(folder: Path) -> None:
    """Also through packages, relative imports, nested functions and caught import errors."""
    inner = "    def g():\n        import hsr_layers as layers\n        return layers.width()\n"
    nested = of_script(f"def f():\n{inner}    return g()")
    payload = dumps((BUILD, nested))
    assert "hsr_project" not in sys.modules  # nothing is imported to find it
    shutil.rmtree(folder / "driver")
    assert loaded_elsewhere(payload, "print(it[0](), it[1]())", folder) == "0.8 8"
    # What was received travels on, as with a model that is saved on a rank.
    again = "from horovod_spark_runner.serialize import dumps\nimport hsr_layers\n"
    again += "open(sys.argv[1], 'wb').write(dumps((it[0], hsr_layers.width)))"
    loaded_elsewhere(payload, again, folder)
    show = "import inspect; print(it[0](), inspect.getsource(it[1]))"
    sent_on = (folder / "payload").read_bytes()
    assert loaded_elsewhere(sent_on, show, folder) == "0.8 def width():\n    return 8"


@pytest.mark.parametrize("process", ["rank", "other"])
def test_values_that_the_script_has_set_travel(folder: Path, process: str) -> None:
    from hsr_project import rates  # type: ignore[import-not-found]

    rates.RATE = 0.5
    show = "import hsr_project.rates as r; print(it(), r.RATE, r.HALVES)"
    show = RANK + show if process == "rank" else show
    assert loaded_elsewhere(dumps(BUILD), show, folder) == "4.0 0.5 [0.05]"


def test_the_sent_module_comes_before_another_of_its_name_on_workers(folder: Path) -> None:
    write(folder / "worker", {"hsr_layers.py": "def width():\n    return 99"})
    path = f"sys.path.insert(0, {str(folder / 'worker')!r}); "
    payload = dumps(of_script("def f():\n    import hsr_layers\n    return hsr_layers.width()"))
    assert loaded_elsewhere(payload, f"{path}{RANK}print(it())", folder) == "8"
    # A program that loads somebody's model keeps its own modules.
    assert loaded_elsewhere(payload, f"{path}print(it())", folder) == "99"


def test_a_worker_that_is_used_again_gets_what_changed(folder: Path) -> None:
    from hsr_project import rates

    first, later = dumps(BUILD), folder / "later"
    rates.RATE = 0.5
    second = dumps(BUILD)
    write(folder / "driver", {"hsr_layers.py": "def width():\n    return 16"})
    later.write_bytes(second + dumps(BUILD))
    code = f"{RANK}f = open({str(later)!r}, 'rb')\nprint(it(), *(pickle.load(f)() for _ in '12'))"
    assert loaded_elsewhere(first, code, folder) == "0.8 4.0 8.0"


@pytest.mark.parametrize("kind", ["extension", "zip"])
def test_what_cannot_be_sent_is_named(
    folder: Path, kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "zip":
        file = folder / "hsr_fast.zip"
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("hsr_fast.py", "")
        monkeypatch.syspath_prepend(str(file))
    else:
        file = folder / "driver" / f"hsr_fast{EXTENSION_SUFFIXES[0]}"
        file.touch()
    payload = dumps(of_script("def f():\n    import hsr_fast"))
    if kind == "extension":
        assert "hsr_fast" in caplog.text
        assert str(file) in caplog.text
    show = "try:\n    it()\nexcept ImportError as e:\n    print(e.name, e)"
    said = loaded_elsewhere(payload, show, folder)
    assert said.startswith("hsr_fast ")
    assert str(file) in said
    assert "sc.addPyFile" in said
