"""Run the core tests, then the parts of the thorough ones that a change can affect.

    tests.py BEGAN

One rotating part follows. The change is what lies between ``$HSR_CI_BASE`` and HEAD, and without
that what was committed in the four hours before HEAD. A part begins only if it is likely to end
within 45 minutes of ``BEGAN`` (seconds since the epoch): the core tests show how fast this machine
is. What ran and what did not is printed at the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.affected import import_graph  # noqa: E402
from tests.tiers import (  # noqa: E402
    PARTS,
    estimate_seconds,
    load_durations,
    part_of,
    plan_parts,
    thorough_files,
)

MINUTES = 45
# After these a part hangs; it counts as failed.
LAST_MINUTE = 80
DAY = 24 * 3600


def git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def changed_files() -> list[str]:
    base = git("rev-parse", "--verify", f"{os.environ.get('HSR_CI_BASE', '')}^{{commit}}")
    if not base:
        committed = int(git("show", "--no-patch", "--format=%ct", "HEAD") or 0)
        base = git("rev-list", "-1", f"--before={committed - 4 * 3600}", "HEAD")
    changed = git("diff", "--name-only", base, "HEAD").splitlines() if base else []
    return changed or ["setup.cfg"]  # what has changed is not known: all can be affected


def passes(*arguments: str, until: float) -> bool:
    command = [str(ROOT / "scripts" / "test"), *arguments]
    try:
        return subprocess.run(command, timeout=until - time.time(), check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def main(began: float) -> int:
    lanes = int(os.environ.get("HSR_TEST_LANES", "3"))
    until = began + LAST_MINUTE * 60
    passed: list[str] = []
    failed: list[str] = []
    core_began = time.time()
    (passed if passes(until=until) else failed).append("core")
    slowness = (time.time() - core_began) / estimate_seconds(load_durations("core"), lanes)
    seconds = thorough_files(ROOT)
    planned = plan_parts(changed_files(), import_graph(ROOT), seconds, int(time.time() // DAY))
    left_out = [] if passed else planned
    for part in planned if passed else ():
        files = {file: each for file, each in seconds.items() if part_of(file) == part}
        expected = slowness * estimate_seconds(files, lanes)
        if time.time() + expected > began + MINUTES * 60:
            left_out.append(f"{part} (about {expected / 60:.0f} minutes)")
        else:
            ok = passes("--thorough", "--part", part, until=until)
            (passed if ok else failed).append(part)
    unaffected = [part for part in PARTS if part not in planned]
    for what, parts in (
        ("passed", passed),
        ("failed", failed),
        (f"not run, as core failed or CI has {MINUTES} minutes", left_out),
        ("not affected by the change", unaffected),
    ):
        print(f"==> {what}: {', '.join(parts) or 'none'}", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
