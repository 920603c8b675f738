"""Defaults of paths where a process has no home, and its working directory is gone."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from horovod_spark_runner.cluster.protocol.processes import working_directory
from horovod_spark_runner.commands.build_horovod import default_cache
from horovod_spark_runner.commands.cli import main
from horovod_spark_runner.errors import EnvironmentProblem


def test_a_user_without_a_home_has_a_cache_and_a_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "HSR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as without an account
    assert default_cache().is_relative_to(tempfile.gettempdir())
    with pytest.raises(SystemExit) as ended:
        main(["install-horovod", "--help"])
    assert not ended.value.code


def test_a_working_directory_that_was_deleted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "gone"
    place.mkdir()
    monkeypatch.chdir(place)
    assert working_directory() == str(place)
    os.rmdir(place)
    with pytest.raises(EnvironmentProblem, match=r"gone.*deleted|deleted.*gone"):
        working_directory()
