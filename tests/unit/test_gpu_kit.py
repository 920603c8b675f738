"""The logic of the kit and the checks for machines with a GPU; what they find there, they tell."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from tests.gpu import kit
from tests.gpu.table import MET, NEEDS_GPU, NOT_MET, Table, judge, write_section

ROOT = Path(__file__).parents[2]


def test_parts_have_the_size_and_the_second_install_does_nothing(tmp_path: Path) -> None:
    source, folder, installed = (tmp_path / name for name in ("source", "kit", "installed"))
    (source / "env").mkdir(parents=True)
    content = bytes(i * i % 251 for i in range(70_000))
    (source / "env" / "file").write_bytes(content)
    (source / "link").symlink_to("env/file")
    parts = kit.pack(source, folder, 100, {"python": "3.12"})
    sizes = [part.stat().st_size for part in parts]
    assert len(sizes) > 2
    assert set(sizes[:-1]) == {100}
    assert 0 < sizes[-1] <= 100
    assert kit.unpack(folder, installed)
    assert (installed / "link").read_bytes() == content
    assert not kit.unpack(folder, installed)
    # An older kit's parts are not left beside a newer one's.
    assert len(kit.pack(source, folder, 1 << 20, {"python": "3.12"})) == 1
    assert [path.name for path in sorted(folder.iterdir())] == [kit.INDEX, "part-00"]
    assert kit.unpack(folder, installed) == (len(parts) > 1)


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_text("content")
    [part] = kit.pack(tmp_path / "source", tmp_path / "kit", 1 << 20, {})
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(SystemExit, match="part-00"):
        kit.unpack(tmp_path / "kit", tmp_path / "installed")
    assert not (tmp_path / "installed").exists()


@pytest.mark.parametrize(("text", "size"), [("60M", 60 << 20), ("1G", 1 << 30), ("7", 7)])
def test_sizes(text: str, size: int) -> None:
    assert kit.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "M", "0M", "-1M", "60MB"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="number"):
        kit.parse_size(text)


def test_jars_that_a_log_of_java_names() -> None:
    lines = [
        "[0.1s][info][class,load] java.lang.Object source: jrt:/java.base",
        "[1s] a.B source: file:/opt/jars/spark-core_2.13-4.3.0.jar",
        "[1s] a.C source: jar:file:/opt/jars/hive-exec-2.3.10-core.jar!/",
        "[1s] a.D source: shared objects file",
    ]
    assert kit.loaded_jars(lines) == {"spark-core", "hive-exec"}
    assert {"spark-core", "spark-sql", "py4j", "scala-library"} <= {*kit.JARS.read_text().split()}


@pytest.mark.parametrize(
    ("met", "needs_gpu", "has_gpu", "verdict"),
    [
        (True, True, True, MET),
        (False, True, True, NOT_MET),
        (True, True, False, NEEDS_GPU),
        (False, False, False, NOT_MET),
        (True, False, False, MET),
    ],
)
def test_verdicts(met: bool, needs_gpu: bool, has_gpu: bool, verdict: str) -> None:
    assert judge(met, needs_gpu=needs_gpu, has_gpu=has_gpu) == verdict


def test_every_row_is_printed_and_written_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "new" / "gpu.json"
    table = Table(place, ["GPU 0: one"])
    assert json.loads(place.read_text())["rows"] == []
    table.add("a", "1 | 2", "1", MET)
    assert json.loads(place.read_text())["rows"] == [
        {"check": "a", "figure": "1 | 2", "goal": "1", "verdict": MET}
    ]
    assert "| a | 1 \\| 2 | 1 | met |" in capsys.readouterr().out
    assert table.finish() == 0
    table.add("b", "", "1", NOT_MET)
    assert table.finish() == 1
    assert "2 rows: 1 met, 1 NOT MET" in capsys.readouterr().out


def test_the_section_is_replaced_and_others_are_kept(tmp_path: Path) -> None:
    document = tmp_path / "benchmarks.md"
    document.write_text("# Benchmarks\n\n## GPU\n\nold\n\n## Set-up\n\nkept\n")
    row = {"check": "a", "figure": "1\\2 | 3", "goal": "1", "verdict": MET}
    result = {"gpus": ["GPU 0: H100"], "date": "2026-11-28", "seconds": 61.2, "rows": [row]}
    for _ in range(2):
        write_section(document, result)
        text = document.read_text()
        assert "GPU 0: H100; 61 s" in text
        assert "| a | 1\\2 \\| 3 | 1 | met |\n\n## Set-up\n\nkept\n" in text
        assert "old" not in text
        assert text.count("## GPU\n") == 1
