"""Commands and environments as values."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod_spark_runner.cluster.protocol.command import (
    SHIM,
    clean_environment,
    daemon_environment,
    mpirun_command,
    worker_environment,
)
from horovod_spark_runner.cluster.protocol.topology import Node, SlotInfo, arrange
from horovod_spark_runner.config.launch import LaunchSettings, MpiOptions


def nodes_of(*nodes: str) -> tuple[Node, ...]:
    infos = [
        SlotInfo(i, f"h{n}", n, f"10.0.0.{n}", 7000, f"/s/{i}", (f"/s/{i}/door",), ((),))
        for i, n in enumerate(nodes)
    ]
    return arrange(infos).nodes


def command(options: MpiOptions, *nodes: str, as_root: bool = False) -> list[str]:
    agent = "/t/agent" if len(set(nodes)) > 1 else None
    return mpirun_command("/bin/mpirun", nodes_of(*nodes), options, agent=agent, as_root=as_root)


def test_one_host() -> None:
    argv = command(MpiOptions(), "1", "1")
    assert argv[:5] == ["/bin/mpirun", "--host", "localhost:2", "-n", "2"]
    assert tuple(argv[-3:]) == SHIM
    assert "plm_ssh_agent" not in argv
    assert "--allow-run-as-root" not in argv
    assert "--mca btl self,sm --mca pml ob1" in " ".join(argv)
    assert "coll" not in " ".join(argv)


def test_several_hosts_are_reached_through_the_agent() -> None:
    argv = command(MpiOptions(), "2", "1", "2")
    assert argv[argv.index("--host") + 1] == "h2:2,hsr-node-1:1"
    assert argv[argv.index("plm_ssh_agent") + 1] == "/t/agent"
    assert "--mca btl ^ofi --mca btl_tcp_links 2" in " ".join(argv)
    assert "coll" not in " ".join(argv)


def test_three_hosts_go_by_rules_that_each_has_a_file_of() -> None:
    text = " ".join(command(MpiOptions(), "1", "2", "2", "3"))
    assert "--mca coll_tuned_use_dynamic_rules 1" in text
    assert "--mca coll_han_use_allreduce_algorithm simple" in text
    name = "OMPI_MCA_coll_tuned_dynamic_rules_filename"
    rules = Path(environment(LaunchSettings(4), {})[name]).read_text()
    rows = [line.partition("#")[0].split() for line in rules.splitlines()]
    assert [words for words in rows if words][:3] == [["1"], ["2"], ["15"]]
    # Open MPI follows a file rather than what is forced.
    parameters = {"coll_tuned_use_dynamic_rules": "1", "coll_tuned_allreduce_algorithm": "4"}
    for forced in (MpiOptions(algorithm="ring"), MpiOptions(parameters=parameters)):
        assert name not in environment(LaunchSettings(4, mpi=forced), {})
    user = LaunchSettings(4, env={name: "/own"})
    assert environment(user, {})[name] == "/own"


def test_root_is_allowed_only_as_root() -> None:
    assert "--allow-run-as-root" in command(MpiOptions(), "1", as_root=True)


def test_forced_ring() -> None:
    options = MpiOptions(algorithm="segmented_ring", segment_bytes=65536)
    text = " ".join(command(options, "1", "1"))
    assert "--mca coll ^han" in text
    assert "--mca coll_tuned_use_dynamic_rules 1" in text
    assert "--mca coll_tuned_allreduce_algorithm 5" in text
    assert "--mca coll_tuned_allreduce_algorithm_segmentsize 65536" in text


def test_own_mpi_parameters_win() -> None:
    options = MpiOptions(algorithm="ring", parameters={"coll": "^han,sm"})
    text = " ".join(command(options, "1", "1"))
    assert "--mca coll ^han,sm" in text
    assert text.count("--mca coll ") == 1


def test_outer_jobs_and_schedulers_leave_no_trace() -> None:
    outer = {"PATH": "/bin", "OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "1", "SLURM_JOB_ID": "1"}
    outer |= dict.fromkeys(("HOROVOD_LOCAL_RANK", "HOROVOD_SIZE", "HOROVOD_CONTROLLER"), "7")
    outer |= dict.fromkeys(("HOROVOD_CPU_OPERATIONS", "HOROVOD_GLOO_IFACE"), "gloo")
    outer |= dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "7")
    assert Path(clean_environment(outer)["HOME"]).is_absolute()  # mpirun needs one
    outer["HOME"] = "/h"
    user = {"PATH": "/bin", "HOME": "/h", "HOROVOD_TIMELINE": "t.json"}
    assert clean_environment({**outer, **user}) == user
    assert daemon_environment(outer, ["/d/0"], "/t", {"PRTE_MCA_x": "1"}) == {
        "PATH": "/bin",
        "HOME": "/t",  # no files of parameters are there
        "TMPDIR": "/t",
        "HSR_DOORS": '["/d/0"]',
        "PRTE_MCA_x": "1",
    }


def environment(options: LaunchSettings, base: dict[str, str], **other: object) -> dict[str, str]:
    arguments = {
        "gpus": (),
        "cpus": 2,
        "python_path": ["", "/a", "/b"],
        "temporary": "/t",
        **other,
    }
    return worker_environment(base, options, **arguments)  # type: ignore[arg-type]


def test_worker_threads_are_the_tasks_cores_unless_set() -> None:
    result = environment(LaunchSettings(1), {})
    assert result["OMP_NUM_THREADS"] == result["TF_NUM_INTRAOP_THREADS"] == "2"
    assert environment(LaunchSettings(1), {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"


def test_waiting_never_takes_the_only_core() -> None:
    result = environment(LaunchSettings(1), {}, cpus=1)
    assert result["TF_NUM_INTEROP_THREADS"] == "2"
    assert result["OMPI_MCA_mpi_yield_when_idle"] == "1"
    chosen = LaunchSettings(1, env={"OMPI_MCA_mpi_yield_when_idle": "0"})
    assert environment(chosen, {})["OMPI_MCA_mpi_yield_when_idle"] == "0"


def test_large_tensors_come_in_large_pages_unless_set() -> None:
    name = "GLIBC_TUNABLES"
    assert environment(LaunchSettings(1), {})[name] == "glibc.malloc.hugetlb=1"
    own = "glibc.malloc.arena_max=2"
    assert environment(LaunchSettings(1), {name: own})[name] == own


def test_worker_sees_its_gpus_only() -> None:
    seen = environment(LaunchSettings(1, gpus_per_worker=2), {}, gpus=("3", "GPU-a"))
    assert seen["CUDA_VISIBLE_DEVICES"] == "3,GPU-a"
    assert (
        environment(LaunchSettings(1), {"CUDA_VISIBLE_DEVICES": "0"})["CUDA_VISIBLE_DEVICES"] == ""
    )


def test_worker_gets_the_python_path_and_the_users_variables() -> None:
    result = environment(LaunchSettings(1, env={"A": "1", "HOROVOD_CYCLE_TIME": "5"}), {"A": "0"})
    assert result["PYTHONPATH"] == "/a:/b"
    assert result["A"] == "1"
    assert result["HOROVOD_CYCLE_TIME"] == "5"


@pytest.mark.parametrize("name", ["PMIX_X", "OMPI_X"])
def test_worker_is_not_born_into_another_mpi_world(name: str) -> None:
    assert name not in environment(LaunchSettings(1), {name: "1"})
