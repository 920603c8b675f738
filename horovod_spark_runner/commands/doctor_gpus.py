"""What `doctor` says of GPUs: the machine's, and what Horovod's NCCL build needs. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from .doctor_rules import OK, PROBLEM, WARNING, Finding

# Oldest driver by CUDA's major version (CUDA's release notes, minor version compatibility).
DRIVERS = {12: 525, 13: 580}
QUERY = ("nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader")


def check_gpus(end: str, output: str) -> tuple[Finding, str]:
    """Judge what nvidia-smi says.

    Args:
        end: how it failed; ``""`` if it did not.
        output: of `QUERY`.

    Returns:
        What there is, and the driver's version; ``""`` if it is not known.
    """
    rows = re.findall(r"^([\d.]+|\[N/A\]), (.+)$", output, flags=re.MULTILINE)
    if end or not rows:
        said = " ".join(output.split())[:200]
        text = f"nvidia-smi is installed, but finds no GPU ({end or 'it names none'}: {said})"
        return Finding(WARNING, text, "see that NVIDIA's driver is loaded"), ""
    driver = rows[0][0]
    names = Counter(name.strip() for _, name in rows)
    shown = ", ".join(f"{count} x {name}" for name, count in names.items())
    return Finding(OK, f"GPUs: {shown}; NVIDIA's driver {driver}"), driver


def describe_nccl(facts: Mapping[str, Any]) -> str:
    """Return "NCCL 2.32.3 for CUDA 13.0, which needs NVIDIA's driver 580 or newer"."""
    number = int(facts["nccl"])
    text = f"NCCL {number // 10000}.{number // 100 % 100}.{number % 100}"
    if not facts.get("cuda"):
        return text
    needed = needed_driver(facts["cuda"])
    needs = f", which needs NVIDIA's driver {needed} or newer" if needed else ""
    return f"{text} for CUDA {facts['cuda']}{needs}"


def needed_driver(cuda: str) -> int | None:
    """Return the oldest driver's major version for a version of CUDA, if it is known."""
    return DRIVERS.get(int(cuda.partition(".")[0]))


def check_driver(facts: Mapping[str, Any], driver: str) -> Finding | None:
    """Judge the machine's driver next to what Horovod was built with."""
    needed = needed_driver(facts["cuda"]) if facts.get("cuda") else None
    major = driver.partition(".")[0]
    if not major.isdigit() or needed is None or int(major) >= needed:
        return None
    return Finding(
        PROBLEM,
        f"Horovod is built for CUDA {facts['cuda']}, which needs NVIDIA's driver {needed} or "
        f"newer, but this machine's is {driver}",
        "install a newer driver, or build Horovod with a CUDA 12 toolkit named in "
        "HOROVOD_CUDA_HOME: horovod-spark-runner install-horovod --gpu",
    )
