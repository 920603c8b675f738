"""Packing an environment: what goes in, what is refused, and that it works elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from horovod_spark_runner import EnvironmentProblem, InvalidInputError
from horovod_spark_runner.commands import cli, pack
from horovod_spark_runner.commands.pack import (
    _Editable,
    _find_editable,
    _follow_foreign_link,
    _module_files,
)

ROOT = Path(__file__).parents[2]


def distribution(folder: Path, editable: bool, top_level: str) -> metadata.Distribution:
    info = folder / "thing-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
    (info / "top_level.txt").write_text(top_level)
    names = ["__editable__.thing-1.0.pth", "__editable___thing_1_0_finder.py"]
    names += [f"{info.name}/METADATA", f"{info.name}/direct_url.json", "../../../bin/thing"]
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in names))
    origin = {"url": "file:///src/thing", "dir_info": {"editable": editable}}
    (info / "direct_url.json").write_text(json.dumps(origin))
    for name in names[:2]:  # newer Pythons name those only that are there
        (folder / name).touch()
    return metadata.Distribution.at(info)


def test_an_editable_install_is_found_by_what_pip_wrote(tmp_path: Path) -> None:
    found = _find_editable(distribution(tmp_path, True, "thing\nthing_tools\n"))
    assert found == _Editable(
        "thing",
        (
            "__editable__.thing-1.0.pth",
            "__editable___thing_1_0_finder.py",
            "thing-1.0.dist-info/direct_url.json",
        ),
        ("thing", "thing_tools"),
    )


def test_an_ordinary_install_is_left_alone(tmp_path: Path) -> None:
    assert _find_editable(distribution(tmp_path, False, "thing\n")) is None
    assert _find_editable(metadata.distribution("pytest")) is None


def test_an_editable_install_that_tells_no_modules_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="thing.*file:///src/thing"):
        _find_editable(distribution(tmp_path, True, ""))


def test_the_files_of_an_editable_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("packaged/__init__.py", "packaged/deep/data.json", "alone.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "packaged" / "__pycache__").mkdir()
    (tmp_path / "packaged" / "__pycache__" / "x.pyc").touch()
    monkeypatch.syspath_prepend(tmp_path)
    found = {
        target: source
        for source, target in _module_files(_Editable("thing", (), ("packaged", "alone")))
    }
    assert found == {
        name: tmp_path / name
        for name in ("packaged/__init__.py", "packaged/deep/data.json", "alone.py")
    }


def test_a_module_that_is_gone() -> None:
    with pytest.raises(EnvironmentProblem, match="'not_here'.*thing"):
        list(_module_files(_Editable("thing", (), ("not_here",))))


class File(NamedTuple):
    """As venv-pack's."""

    source: str
    target: str


def test_links_out_of_the_environment_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, outside = tmp_path / "env", tmp_path / "outside"
    for folder in (prefix / "bin", outside):
        folder.mkdir(parents=True)
    (outside / "python3").touch()
    (prefix / "bin" / "tool").touch()
    (prefix / "bin" / "python3").symlink_to(outside / "python3")
    (prefix / "bin" / "python").symlink_to("python3")
    (prefix / "bin" / "alias").symlink_to("tool")
    (prefix / "share").symlink_to(outside)
    (prefix / "gone").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(sys, "prefix", str(prefix))
    for name, source in [
        ("bin/python", outside / "python3"),
        ("bin/python3", outside / "python3"),
        ("bin/alias", prefix / "bin" / "alias"),
        ("bin/tool", prefix / "bin" / "tool"),
    ]:
        assert _follow_foreign_link(File(str(prefix / name), name)) == File(str(source), name)
    for name in ("share", "gone"):
        with pytest.raises(EnvironmentProblem, match=f"--exclude '{name}'"):
            _follow_foreign_link(File(str(prefix / name), name))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("x.tar", {}, ".tar.gz.*.tgz"),
        ("no/x.tgz", {}, "folder"),
        ("there.tgz", {}, "--force"),
        ("x.tgz", {"compress_level": 10}, r"\b0\b.*\b9\b.*\b10"),
    ],
)
def test_wrong_arguments(
    tmp_path: Path, name: str, arguments: dict[str, Any], message: str
) -> None:
    (tmp_path / "there.tgz").write_text("precious")
    with pytest.raises(InvalidInputError, match=message):
        pack.pack(tmp_path / name, **arguments)
    assert (tmp_path / "there.tgz").read_text() == "precious"


def test_no_virtual_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    with pytest.raises(EnvironmentProblem, match="virtual environment"):
        pack.pack(tmp_path / "x.tgz")


def test_a_conda_environment_is_for_conda_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conda-meta").mkdir()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert cli.main(["pack", str(tmp_path / "x.tgz")]) == 1
    assert "conda pack -o OUT.tar.gz" in capsys.readouterr().err


def test_a_small_environment_works_elsewhere(tmp_path: Path) -> None:
    """With this package installed as the tests have it, and without what --exclude names."""
    here, there = tmp_path / "here", tmp_path / "unpacked elsewhere"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(here)], check=True)
    site = here / sysconfig.get_path("purelib", vars={"base": ""}).lstrip("/")
    info = distribution(site, True, "horovod_spark_runner\n")
    for hook in ("__editable__.thing-1.0.pth", "__editable___thing_1_0_finder.py"):
        (site / hook).touch()
    (site / "useless.py").touch()
    script = here / "bin" / "script"
    script.write_text(f"#!{here}/bin/python\nimport sys\nprint(sys.prefix)\n")
    script.chmod(0o755)
    archive = tmp_path / "env.tar.gz"
    # venv-pack itself is not in that environment.
    paths = [str(ROOT), str(metadata.distribution("venv-pack2").locate_file(""))]
    made = subprocess.run(
        [
            str(here / "bin" / "python"),
            *("-m", cli.__name__, "pack", str(archive), "--exclude", "*/useless.py"),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert f"spark-submit --archives {archive.name}#environment" in made.stdout
    assert sys.base_prefix in made.stdout
    with tarfile.open(archive) as packed:
        names = packed.getnames()
        assert [m.name for m in packed if m.issym() and m.linkname.startswith("/")] == []
        packed.extractall(there)
    assert not [n for n in names if "__pycache__" in n or "__editable__" in n or "useless" in n]
    assert info.metadata["Name"] == "thing"
    here.rename(tmp_path / "gone")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    code = "import horovod_spark_runner as h, sys; print(h.__file__); print(sys.prefix)"
    run = subprocess.run(
        [str(there / "bin" / "python"), "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    module, prefix = run.stdout.splitlines()
    assert module.startswith(str(there))
    assert prefix == str(there)
    moved = tmp_path / "moved"
    there.rename(moved)
    output = subprocess.run(
        [str(moved / "bin" / "script")], capture_output=True, text=True, check=True
    ).stdout
    assert output.strip() == str(moved)
