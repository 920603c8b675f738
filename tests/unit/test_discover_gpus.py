"""scripts/discover_gpus.sh, with a stand-in for nvidia-smi."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "discover_gpus.sh"

A = "GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f"
B = "GPU-5d0e1a2b-0000-1111-2222-333344445555"
MIG_1 = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"
MIG_2 = "MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb"
OLD_MIG = f"MIG-{A}/1/0"

TWO = f"GPU 0: NVIDIA H200 (UUID: {A})\nGPU 1: NVIDIA A100-SXM4-40GB (UUID: {B})\n"
WITH_MIG = (
    f"GPU 0: NVIDIA A100-SXM4-40GB (UUID: {A})\n"
    f"  MIG 3g.20gb     Device  0: (UUID: {MIG_1})\n"
    f"  MIG 1g.5gb+me   Device  1: (UUID: {MIG_2})\n"
    f"GPU 1: NVIDIA A100-SXM4-40GB (UUID: {B})\n"
)
MODES = "0, Enabled\n1, Disabled\n"


@dataclass
class Run:
    """What the script said."""

    code: int
    addresses: list[str]
    error: str


class Machine:
    """A folder with a stand-in nvidia-smi, and the script run with it on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def answers(self, listing: str, modes: str = "", code: int = 0, modes_code: int = 0) -> None:
        (self.folder / "listing").write_text(listing)
        (self.folder / "modes").write_text(modes)
        program = self.folder / "nvidia-smi"
        program.write_text(
            "#!/bin/sh\n"
            'here="$(dirname "$0")"\n'
            f'if [ "$1" = -L ]; then cat "$here/listing"; exit {code}; fi\n'
            'if [ "$*" = "--query-gpu=index,mig.mode.current --format=csv,noheader" ]; then\n'
            f'    cat "$here/modes"; exit {modes_code}; fi\n'
            'echo "unexpected: $*"; exit 99\n'
        )
        program.chmod(0o755)

    def run(self, **environment: str) -> Run:
        path = f"{self.folder}:/usr/bin:/bin"
        run = subprocess.run(
            [str(SCRIPT)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={"PATH": path, **environment},
            cwd=self.folder,
        )
        # One line of valid JSON, whatever happened.
        (line,) = run.stdout.splitlines()
        found = json.loads(line)
        assert list(found) == ["name", "addresses"]
        assert found["name"] == "gpu"
        return Run(run.returncode, found["addresses"], run.stderr)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    folder = tmp_path / "a folder; with 'odd' names"
    folder.mkdir()
    return Machine(folder)


@pytest.mark.parametrize(
    ("listing", "expected"),
    [
        (TWO, ["0", "1"]),
        (f"GPU 0: NVIDIA H200 (UUID: {A})", ["0"]),  # no end of line
        (f"GPU 0: Quadro (K4000, \"rev 'B'\") $HOME (UUID: {A})   \r\n", ["0"]),
        (
            "".join(f"GPU {i}: T4 (UUID: {A[:-2]}{i:02})\n" for i in range(12)),
            [*map(str, range(12))],
        ),
        ("No devices were found\n", []),
        ("", []),
    ],
)
def test_indices(machine: Machine, listing: str, expected: list[str]) -> None:
    machine.answers(listing)
    run = machine.run()
    assert (run.code, run.addresses, run.error) == (0, expected, "")


def test_uuids(machine: Machine) -> None:
    machine.answers(TWO)
    assert machine.run(HSR_GPU_ADDRESSES="uuid").addresses == [A, B]
    run = machine.run(HSR_GPU_ADDRESSES="name")
    assert run.code == 1
    assert re.search("HSR_GPU_ADDRESSES.*index.*uuid.*'name'", run.error)


def test_a_gpu_in_mig_mode_is_given_out_by_its_mig_devices(machine: Machine) -> None:
    machine.answers(WITH_MIG, MODES)
    assert machine.run().addresses == [MIG_1, MIG_2, "1"]
    assert machine.run(HSR_GPU_ADDRESSES="uuid").addresses == [MIG_1, MIG_2, B]


def test_mig_names_of_older_drivers(machine: Machine) -> None:
    machine.answers(f"GPU 0: A100 (UUID: {A})\n  MIG 1g.5gb Device 0: (UUID: {OLD_MIG})\n", MODES)
    assert machine.run().addresses == [OLD_MIG]
    assert machine.run(CUDA_VISIBLE_DEVICES=OLD_MIG).addresses == [OLD_MIG]


def test_a_gpu_in_mig_mode_without_mig_devices_is_of_no_use(machine: Machine) -> None:
    machine.answers(TWO, MODES)
    run = machine.run()
    assert (run.code, run.addresses) == (0, ["1"])
    assert re.search(r"GPU 0\b.*MIG", run.error)


@pytest.mark.parametrize("modes", ["0, [N/A]\n1, [N/A]\n", "0, Disabled\n1, Disabled\n"])
def test_gpus_out_of_mig_mode(machine: Machine, modes: str) -> None:
    machine.answers(TWO, modes)
    assert machine.run().addresses == ["0", "1"]


def test_the_mode_of_gpu_1_is_not_taken_for_that_of_gpu_11(machine: Machine) -> None:
    machine.answers(TWO, "0, Disabled\n1, Disabled\n10, Enabled\n11, Enabled\n")
    assert machine.run().addresses == ["0", "1"]


def test_a_driver_that_knows_no_mig(machine: Machine) -> None:
    machine.answers(TWO, 'Field "mig.mode.current" is not a valid field to query.\n', modes_code=2)
    run = machine.run()
    assert (run.code, run.addresses) == (0, ["0", "1"])


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("1", ["1"]),
        ("1,0", ["0", "1"]),
        (" 1 , 1 ", ["1"]),
        ("01", ["1"]),
        (B, ["1"]),
        (A[:8], ["0"]),
        (f"{A},1", ["0", "1"]),
        ("", []),
        ("-1", []),
        ("0,-1,1", ["0"]),  # as CUDA reads it
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices(machine: Machine, visible: str, expected: list[str]) -> None:
    machine.answers(TWO)
    run = machine.run(CUDA_VISIBLE_DEVICES=visible)
    assert (run.code, run.addresses, run.error) == (0, expected, "")


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("0", [MIG_1, MIG_2]), (A, [MIG_1, MIG_2]), (MIG_2, [MIG_2]), (f"{MIG_1},1", [MIG_1, "1"])],
)
def test_cuda_visible_devices_with_mig(machine: Machine, visible: str, expected: list[str]) -> None:
    machine.answers(WITH_MIG, MODES)
    assert machine.run(CUDA_VISIBLE_DEVICES=visible).addresses == expected


@pytest.mark.parametrize("visible", ["2", "0,7", "GPU-ffff", "MIG-x", "1abc", "$(id)", "*"])
def test_a_device_that_is_not_there(machine: Machine, visible: str) -> None:
    machine.answers(TWO)
    run = machine.run(CUDA_VISIBLE_DEVICES=visible)
    assert (run.code, run.addresses) == (1, [])
    setting, last = f"CUDA_VISIBLE_DEVICES={visible}", visible.rpartition(",")[2]
    words = rf"{re.escape(setting)}(?!\S).*(?<![\w-]){re.escape(last)}(?![\w-]).*{A} {B}"
    assert re.search(words, run.error)


def test_an_ambiguous_uuid(machine: Machine) -> None:
    machine.answers(TWO)
    run = machine.run(CUDA_VISIBLE_DEVICES="GPU-5")
    assert run.code == 1
    assert "UUIDs" in run.error


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("all", ["0", "1"]),
        ("", ["0", "1"]),
        ("none", []),
        ("void", []),
        (B, ["1"]),  # as Kubernetes' device plugin sets it
        (f"{A},{B}", ["0", "1"]),
        ("3", ["0", "1"]),  # the host's GPU 3, which is the container's 0
        ("/var/run/nvidia-container-devices", ["0", "1"]),
    ],
)
def test_nvidia_visible_devices(machine: Machine, visible: str, expected: list[str]) -> None:
    machine.answers(TWO)
    run = machine.run(NVIDIA_VISIBLE_DEVICES=visible)
    assert (run.code, run.addresses, run.error) == (0, expected, "")


def test_both_variables_limit(machine: Machine) -> None:
    machine.answers(WITH_MIG, MODES)
    run = machine.run(NVIDIA_VISIBLE_DEVICES=f"{MIG_2},{B}", CUDA_VISIBLE_DEVICES="0")
    assert (run.code, run.addresses) == (0, [MIG_2])
    run = machine.run(NVIDIA_VISIBLE_DEVICES=MIG_2, CUDA_VISIBLE_DEVICES="1")
    assert run.code == 1
    assert re.search(rf"CUDA_VISIBLE_DEVICES=1\b.*\b1\b.*{MIG_2}", run.error)


def test_no_nvidia_smi(machine: Machine) -> None:
    run = machine.run()
    assert (run.code, run.addresses) == (1, [])
    assert re.search("nvidia-smi.*PATH=", run.error)
    assert "nvidia.com/gpu" in run.error


def test_nvidia_smi_that_fails(machine: Machine) -> None:
    text = "Failed to initialize NVML: Driver/library version mismatch"
    machine.answers(f"{text}\n", code=18)
    run = machine.run()
    assert (run.code, run.addresses) == (1, [])
    assert re.search(rf"nvidia-smi -L.*\b18\b.*{text}", run.error)


def test_a_line_that_is_not_understood_is_told(machine: Machine) -> None:
    line = "Unable to determine the device handle for GPU 0000:0B:00.0: GPU is lost."
    machine.answers(f"{line}\nGPU 1: H200 (UUID: {B})\n")
    run = machine.run()
    assert (run.code, run.addresses) == (0, ["1"])
    assert line in run.error


def test_the_script_can_be_executed() -> None:
    assert os.access(SCRIPT, os.X_OK)
