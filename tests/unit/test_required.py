"""What is skipped counts as failed where all tests are to run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.required import MAY_BE_SKIPPED

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

def test_passes(): pass
def test_says_so_itself(): pytest.skip("no disk")
@pytest.mark.skipif(True, reason="no network")
def test_is_marked(): pass
@pytest.fixture
def host(): pytest.skip("no host")
def test_has_a_fixture(host): pass
@pytest.mark.xfail
def test_is_known_to_fail(): assert False
"""


def run_them(folder: Path, environment: dict[str, str], *options: str) -> str:
    """Run the tests above and a module that lacks a package; return what pytest says."""
    (folder / "conftest.py").write_text(
        "from tests.conftest import pytest_addoption, pytest_configure\n"
    )
    (folder / "test_some.py").write_text(TESTS)
    (folder / "test_module.py").write_text("import pytest; pytest.importorskip('no_such_package')")
    arguments = ["-rA", "-p", "no:cacheprovider", "--continue-on-collection-errors", ".", *options]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout


@pytest.mark.thorough
def test_skips_are_failures_where_all_is_required(tmp_path: Path) -> None:
    output = run_them(tmp_path, {"HSR_REQUIRE_ALL": "1"})
    assert re.search(r"= 1 failed, 1 passed, 1 xfailed, 3 errors in", output), output
    for reason in ("no disk", "no network", "no host", "could not import 'no_such_package'.*"):
        pattern = rf"Skipped: {reason}\. HSR_REQUIRE_ALL wants .* \(.*test_\w+\.py:\d+\)"
        assert re.search(pattern, output), reason


def test_skips_are_skips_elsewhere(tmp_path: Path) -> None:
    output = run_them(tmp_path, {})
    assert re.search(r"= 1 passed, 4 skipped, 1 xfailed in", output), output


@pytest.mark.parametrize("name", MAY_BE_SKIPPED)
def test_the_exceptions_are_tests(name: str) -> None:
    file, _, case = name.partition("::")
    function = case.partition("[")[0]  # without its parameters
    assert f"def {function or 'test_'}" in (ROOT / file).read_text()
    assert MAY_BE_SKIPPED[name]
