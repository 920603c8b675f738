"""How long a distributed function takes from the call to the results, against the alternatives.

Two ranks, a function with one allreduce, several times each, one contender after the other in
turns, so that all of them see the same machine:

* bare ``mpirun`` with our transport settings and binding, and a script that does the same, as the
  limit;
* bare ``mpirun`` as it comes;
* `HorovodRunner`, in a Spark session that is there already;
* ``TorchDistributor`` with one all_reduce of PyTorch (gloo);
* ``horovod.spark.run``, with a Horovod built with Gloo: its way over MPI does not start with
  Open MPI 5.

*Cold* is the first call of a session, *warm* the median of the further ones. Run it with
``python benchmarks/launch.py``; ``--write`` puts the tables into ``docs/benchmarks.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from report import GOAL_HEAD, goal, present, shown_command, table

HERE = Path(__file__).resolve().parent
PEERS = HERE / "peers"
# What only the alternatives need is put aside for this benchmark, outside the checkout.
ASIDE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "horovod_spark_bench"
NEEDS = {"torch_distributor": ASIDE / "torch", "horovod_spark": ASIDE / "horovod-gloo"}
TORCH_PACKAGES = ["torch==2.13.0", "typing-extensions", "sympy", "mpmath", "networkx", "jinja2"]
TORCH_PACKAGES += ["fsspec", "filelock", "markupsafe"]
# Calls by number of ranks, after the first.
WARM_CALLS = 3
LIMIT = "bare mpirun, our transport settings"
CONTENDERS = {
    LIMIT: "mpirun",
    "bare mpirun, as it comes": "mpirun as-it-comes",
    "HorovodRunner": "ours",
    "TorchDistributor": "torch_distributor",
    "horovod.spark.run": "horovod_spark",
}


def measure(contender: str, ranks: int, calls: int) -> dict[str, Any]:
    """Return ``{"seconds": [...], "timings": [...]}`` of a process of its own, or an error."""
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "TF_CPP_MIN_LOG_LEVEL": "2"}
    if contender in NEEDS:
        environment["PYTHONPATH"] = str(NEEDS[contender])
    script, *options = contender.split()
    done = subprocess.run(
        [sys.executable, str(PEERS / f"{script}.py"), str(ranks), str(calls), *options],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=environment,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        words = [line for line in done.stderr.splitlines() if line.strip()]
        return {"error": words[-1][:160] if words else f"exit code {done.returncode}"}
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def gloo_horovod() -> str:
    """Build a Horovod with Gloo, once, and return its wheel."""
    build = [sys.executable, "-m", "horovod_spark_runner.commands.build_horovod", "--gloo"]
    return subprocess.run(build, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def install_aside(folder: Path, *packages: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*command, str(folder), *packages], check=True)


def install_alternatives() -> None:
    """Put PyTorch's CPU build and a Horovod with Gloo where the benchmark finds them, once."""
    torch, gloo = NEEDS["torch_distributor"], NEEDS["horovod_spark"]
    if not torch.exists():
        install_aside(torch, *TORCH_PACKAGES)
    if not gloo.exists():
        install_aside(gloo, gloo_horovod())


def compare(calls: int, rounds: int) -> str:
    """Return the tables of all contenders and of the goals."""
    cold: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    warm: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    errors: dict[str, str] = {}
    for _ in range(rounds):
        for name, script in CONTENDERS.items():
            if name in errors:
                continue
            answer = measure(script, 2, calls)
            if "error" in answer:
                errors[name] = answer["error"]
                continue
            cold[name].append(answer["seconds"][0])
            warm[name] += answer["seconds"][1:]
            print(f"{name}: {' '.join(f'{s:.2f}' for s in answer['seconds'])} s", flush=True)
    medians = {name: statistics.median(values) for name, values in warm.items() if values}
    limit = medians[LIMIT]
    rows = [
        [
            name,
            f"{statistics.median(cold[name]):.2f} s",
            f"{medians[name]:.2f} s",
            f"{medians[name] / limit:.2f}",
            f"{medians[name] - limit:+.2f} s",
            f"{len(cold[name])}, {len(warm[name])}",
        ]
        if name in medians
        else [name, f"cannot run: {errors[name]}", "", "", "", ""]
        for name in CONTENDERS
    ]
    head = ["two ranks, one allreduce", "cold", "warm", "warm ÷ first row", "warm − first row"]
    ours = "HorovodRunner"
    peers = [medians[name] for name in list(CONTENDERS)[3:] if name in medians]
    goals = [
        goal("warm / bare mpirun", medians[ours] / limit, at_most=0.25),
        goal("warm, in seconds", medians[ours], at_most=1.0),
        goal(
            "cold / bare mpirun",
            statistics.median(cold[ours]) / statistics.median(cold[LIMIT]),
            at_most=1.2,
        ),
        *(
            [["warm / the faster other launcher", f"{medians[ours] / min(peers):.2f}", "", ""]]
            if peers
            else []
        ),
    ]
    tables = [table([*head, "n, cold and warm"], rows), table(GOAL_HEAD, goals)]
    return "\n\n".join(tables)


def grow(calls: int) -> str:
    """Return the table of our start by number of ranks, and of its phases."""
    rows = []
    phases = ["check", "tasks", "rendezvous", "start", "function", "results", "total"]
    for ranks in (2, 4, 8):
        answer = measure("ours", ranks, calls)
        bare = measure("mpirun", ranks, calls)
        if "error" in answer:
            rows.append([ranks, f"cannot run: {answer['error']}", *["-"] * (2 + len(phases))])
            continue
        own = statistics.median(answer["seconds"][1:])
        ratio, limit = "-", "-"
        if "seconds" in bare:
            median = statistics.median(bare["seconds"][1:])
            ratio, limit = f"{own / median:.2f}", f"{median:.2f}"
        warm = answer["timings"][1:]
        cells = [f"{statistics.median(t[phase] for t in warm):.2f}" for phase in phases]
        rows.append([ranks, f"{own:.2f}", limit, ratio, *cells])
        print(f"{ranks} ranks: {rows[-1]}", flush=True)
    head = ["ranks", "HorovodRunner, warm", "bare mpirun, our settings", "÷", *phases]
    return table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=4, help="calls per session (4)")
    parser.add_argument("--rounds", type=int, default=2, help="sessions of each contender (2)")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    install_alternatives()
    comparison = compare(arguments.calls, arguments.rounds)
    growth = grow(calls=1 + WARM_CALLS)
    text = (
        f"{comparison}\n\nProcesses that have imported the framework wait for the next run of the "
        "session; in a session's first run the import begins while Spark starts its tasks.\n\nBy "
        "the number of ranks, oversubscribed on these cores (seconds, medians of "
        f"n = {WARM_CALLS} warm calls, and where they go):\n\n{growth}"
    )
    present("Launch", shown_command(), text, arguments.write)


if __name__ == "__main__":
    main()
