"""The mpirun command and the environments of started processes, as values. Pure."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...config.launch import LaunchSettings, MpiOptions
from .topology import Node

# Prefixes of the variables that Open MPI, PMIx and PRRTE set for a process they start.
_MPI_PREFIXES = ("PMIX_", "OMPI_", "PRTE_", "OPAL_")
# An outer scheduler's variables would make mpirun ask that scheduler for hosts.
_SCHEDULER_PREFIXES = ("SLURM_", "PBS_", "LSB_", "LSF_", "SGE_", "PMI_", "FLUX_", "HYDRA_")
# Variable with the cores of each rank, for `bind_to_cores`.
CPUS = "HSR_CPUS"
# Number of the rank's attempt.
ATTEMPT = "HSR_ATTEMPT"
# Folder in which Spark has put the files that were added to it.
SPARK_FILES = "HSR_SPARK_FILES"
# Variables of an outer Horovod job: with another controller than MPI, Horovod crashes.
_HOROVOD_JOB = re.compile(
    r"HOROVOD_((LOCAL_|CROSS_)?(RANK|SIZE)|CONTROLLER|CPU_OPERATIONS|ELASTIC|HOSTNAME|GLOO_.*)"
)
# Variables by which torch.distributed finds the other ranks: with those of an outer job, it would
# look for that job's.
TORCH_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
# Set for functions that are to get them. Not for trainings: libraries such as torchmetrics and
# Accelerate would take a model that this package synchronises for one of torch.distributed.
SET_TORCH_VARIABLES = "HSR_TORCH_VARIABLES"
# Set for rank 0 of a function that has it tried in a side process.
SIDE_PROCESS = "HSR_SIDE_PROCESS"
# Command that mpirun starts for every rank. Its paths differ from host to host (in an unpacked
# archive, say), so each host's daemon has them in its environment.
SHIM = ("/bin/sh", "-c", 'exec "$HSR_PYTHON" -S -E "$HSR_SHIM"')
# From so many hosts on, Open MPI's default allreduce moves more bytes than a ring.
_DYNAMIC_RULES_FROM = 3
_RULES = "coll_tuned_use_dynamic_rules"
_ALLREDUCE_RULES = Path(__file__).parent.parent / "programs" / "allreduce.rules"
_ALGORITHM_NUMBERS = {"recursive_doubling": "3", "ring": "4", "segmented_ring": "5"}


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` without the traces of an outer MPI or Horovod job or scheduler.

    Open MPI does not start without a home folder, which containers may not name.
    """
    dropped = _MPI_PREFIXES + _SCHEDULER_PREFIXES
    remaining = {
        name: value
        for name, value in environment.items()
        if not name.startswith(dropped)
        and not _HOROVOD_JOB.fullmatch(name)
        and name not in TORCH_VARIABLES
    }
    home = os.path.expanduser("~")  # the account's, where the variable is not set
    return {"HOME": home if os.path.isabs(home) else "/", **remaining}


def _allreduce_parameters(options: MpiOptions, nodes: int) -> dict[str, str]:
    """Return the Open MPI parameters that choose an allreduce; none where its default is best.

    Open MPI's ``han`` component, preferred for several ranks on one host, has no choice such as
    ``options.algorithm``; where one is forced, ``han`` is disabled so that ``tuned``, which has, is
    used. By default, hosts reduce part by part to one of them, which broadcasts the sum: between
    two hosts nothing is faster; among more of them, most links are idle most of the time. There,
    ``han`` reduces within each host first and leaves the exchange between hosts to ``tuned``, which
    follows the rules that `worker_environment` names.
    """
    if options.algorithm == "auto":
        if nodes < _DYNAMIC_RULES_FROM:
            return {}
        return {_RULES: "1", "coll_han_use_allreduce_algorithm": "simple"}
    parameters = {
        "coll": "^han",
        _RULES: "1",
        "coll_tuned_allreduce_algorithm": _ALGORITHM_NUMBERS[options.algorithm],
    }
    if options.segment_bytes:
        parameters["coll_tuned_allreduce_algorithm_segmentsize"] = str(options.segment_bytes)
    return parameters


def transport_parameters(nodes: int) -> dict[str, str]:
    """Return the Open MPI parameters for a world on ``nodes`` hosts.

    Probing for libfabric devices takes Open MPI a second of every start, for one-sided messages,
    which are not used. On one host only shared memory is needed. On a single TCP connection,
    two ranks that send each other large messages take turns (benchmarks/exchange.py).
    """
    if nodes == 1:
        return {"pml": "ob1", "btl": "self,sm"}
    return {"btl": "^ofi", "btl_tcp_links": "2"}


def mpirun_command(
    mpirun: str,
    nodes: Sequence[Node],
    options: MpiOptions,
    *,
    agent: str | None,
    as_root: bool,
) -> list[str]:
    """Return the argv that starts one shim per rank.

    Args:
        mpirun: path of the program.
        nodes: of the world; the first is the one this command runs on.
        options: the run's settings of MPI.
        agent: program that starts MPI's daemons on the other hosts; none on one host.
        as_root: whether the user is root, whom Open MPI refuses without this flag.
    """
    size = sum(len(node.ranks) for node in nodes)
    if len(nodes) == 1:
        # The literal name: no name look-up, and no network interface needs to be up.
        hosts = f"localhost:{size}"
    else:
        hosts = ",".join(f"{node.name}:{len(node.ranks)}" for node in nodes)
    command = [mpirun, "--host", hosts, "-n", str(size)]
    # Spark's scheduling, not core numbers, limits the cores of a rank.
    command += ["--bind-to", "none", "--map-by", "slot", "--leave-session-attached"]
    if as_root:
        command.append("--allow-run-as-root")
    if agent is not None:
        # All daemons are asked for here: on the other hosts there is no agent.
        command += ["--prtemca", "plm_ssh_agent", agent, "--prtemca", "plm_ssh_no_tree_spawn", "1"]
        command += ["--prtemca", "prte_do_not_resolve", "1"]
        # By default, mpirun refuses more than 128 hosts, as if agents ran as long as daemons.
        command += ["--prtemca", "plm_ssh_num_concurrent", str(len(nodes))]
    parameters = {
        **transport_parameters(len(nodes)),
        **_allreduce_parameters(options, len(nodes)),
        **options.parameters,
    }
    for name, value in sorted(parameters.items()):
        command += ["--mca", name, value]
    return [*command, *SHIM]


def daemon_environment(
    base: Mapping[str, str],
    doors: Sequence[str],
    temporary: str,
    network: Mapping[str, str],
) -> dict[str, str]:
    """Return the environment of mpirun or of its daemon on another host.

    Their home is a folder without the user's files of parameters for Open MPI, PRRTE and PMIx.

    Args:
        base: the slot's environment.
        doors: socket paths for the shims of this host's ranks, by local rank.
        temporary: folder for its session files.
        network: variables that keep it on the chosen interface.
    """
    return {
        **clean_environment(base),
        **network,
        "TMPDIR": temporary,
        "HOME": temporary,
        "HSR_DOORS": json.dumps(doors),
    }


def worker_environment(
    base: Mapping[str, str],
    options: LaunchSettings,
    *,
    gpus: Sequence[str],
    cpus: int,
    python_path: Sequence[str],
    temporary: str,
) -> dict[str, str]:
    """Return the environment a rank's process starts with, before MPI's part is known.

    Threads default to the task's cores: ranks that share a host would fight for them otherwise.
    """
    threads = str(max(1, cpus))
    environment = {
        "OMP_NUM_THREADS": threads,
        "TF_NUM_INTRAOP_THREADS": threads,
        # One that waits for the exchange, one that computes meanwhile (benchmarks/training.py).
        "TF_NUM_INTEROP_THREADS": str(max(2, cpus)),
        # Horovod's thread waits inside MPI, which polls: the threads that compute need the core.
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        # Pages of 2 MB for large tensors (benchmarks/checkpoint.py: dense); from glibc 2.35 on.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        **clean_environment(base),
        CPUS: threads,
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": ":".join(path for path in python_path if path),
        # Files that frameworks leave in the temporary folder are removed with the rank's.
        "TMPDIR": temporary,
        "HOROVOD_FUSION_THRESHOLD": str(options.mpi.fusion_bytes),
        "HOROVOD_CYCLE_TIME": str(options.mpi.cycle_ms),
    }
    has_rules = _RULES in options.mpi.parameters or f"OMPI_MCA_{_RULES}" in options.env
    if options.mpi.algorithm == "auto" and not has_rules:
        # The path on this host. Open MPI reads the file only if `_allreduce_parameters` enables it.
        environment["OMPI_MCA_coll_tuned_dynamic_rules_filename"] = str(_ALLREDUCE_RULES)
    if options.gpus_per_worker:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        # Indices as nvidia-smi and the schedulers count them; CUDA's own order is by speed.
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    else:
        # A CPU rank on a GPU machine must not take memory on its devices.
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return {**environment, **options.env}
