"""The settings in conf/ are what Spark reads them as."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CONF = Path(__file__).parents[2] / "conf"
FILES = sorted(CONF.glob("*.conf"))


def settings(file: Path) -> dict[str, str]:
    lines = [line.strip() for line in file.read_text().splitlines()]
    pairs = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    # A comment behind a value would be part of it.
    assert all(len(pair) == 2 and "#" not in pair[1].split("#environment")[0] for pair in pairs)
    assert len({key for key, _ in pairs}) == len(pairs)
    return dict(pairs)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_line_is_a_setting_of_spark(file: Path) -> None:
    found = settings(file)
    assert all(re.fullmatch(r"spark(\.[A-Za-z_]\w*)+", key) for key in found)


@pytest.mark.parametrize("name", ["standalone", "yarn", "kubernetes"])
def test_applications_ask_for_gpus_and_for_a_fixed_set_of_executors(name: str) -> None:
    found = settings(CONF / f"{name}-gpu.conf")
    assert found["spark.dynamicAllocation.enabled"] == "false"
    assert found["spark.executor.resource.gpu.amount"] == found["spark.task.resource.gpu.amount"]
    assert found["spark.task.cpus"] == found["spark.executor.cores"]


def test_the_readme_names_every_file() -> None:
    text = (CONF / "README.md").read_text()
    assert FILES
    assert all(f"`{file.name}`" in text for file in FILES)
