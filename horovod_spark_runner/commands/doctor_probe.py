"""Collect facts that need a loaded framework, in a separate process.

``python -m horovod_spark_runner.commands.doctor_probe facts`` prints one JSON object per line and
step, so that a step that crashes the process takes nothing of the earlier ones with it.
``allreduce`` is started by mpirun and prints one JSON object per rank.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from typing import Any


def main() -> None:
    """Run the probe named on the command line."""
    {"facts": _print_facts, "allreduce": _allreduce}[sys.argv[1]]()


def _print_facts() -> None:
    for name, probe in _PROBES:
        try:
            facts = probe()
        except Exception as error:  # a broken installation raises anything; it is what we report
            facts = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"probe": name, **facts}), flush=True)


def _mpi4py() -> dict[str, Any]:
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    return {"library": MPI.Get_library_version().rstrip("\0").strip()}


def _petastorm() -> dict[str, Any]:
    from ..data.prepare.petastorm_compat import check_import

    check_import()
    return {}


def _tensorflow() -> dict[str, Any]:
    import tensorflow as tf

    return {"gpu_build": bool(tf.test.is_built_with_cuda())}


def _keras() -> dict[str, Any]:
    import keras

    return {"backend": keras.backend.backend()}


def _horovod(module: str) -> dict[str, Any]:
    horovod = importlib.import_module(module)
    return {
        "mpi": bool(horovod.mpi_built()),
        "gloo": bool(horovod.gloo_built()),
        "nccl": int(horovod.nccl_built()),
        "cuda": getattr(importlib.import_module("horovod"), "BUILT_WITH_CUDA", ""),
    }


def _horovod_tensorflow() -> dict[str, Any]:
    facts = _horovod("horovod.tensorflow")
    return {**facts, "keras3": importlib.util.find_spec("horovod.tensorflow.keras3") is not None}


def _horovod_torch() -> dict[str, Any]:
    return _horovod("horovod.torch")


_PROBES = (
    ("mpi4py", _mpi4py),
    ("petastorm", _petastorm),
    ("tensorflow", _tensorflow),
    ("keras", _keras),
    ("horovod.tensorflow", _horovod_tensorflow),
    ("horovod.torch", _horovod_torch),
)


def _allreduce() -> None:
    """Add up ``rank + 1`` over all ranks with Horovod, and print the sum."""
    _mpi4py()  # first, as in a rank's process: Horovod takes the MPI that is loaded
    hvd, sums = _added_up()
    print(json.dumps({"rank": hvd.rank(), "size": hvd.size(), "sums": sorted(sums)}), flush=True)
    hvd.shutdown()


def _added_up() -> tuple[Any, set[float]]:
    """Return Horovod of the installed framework, TensorFlow first, and the sums."""
    if importlib.util.find_spec("tensorflow") is None:
        import horovod.torch as hvd
        import torch

        hvd.init()
        summed = hvd.allreduce(torch.full((1000,), float(hvd.rank() + 1)), op=hvd.Sum, name="sum")
    else:
        import horovod.tensorflow as hvd
        import tensorflow as tf

        hvd.init()
        summed = hvd.allreduce(tf.fill((1000,), float(hvd.rank() + 1)), op=hvd.Sum)
    return hvd, {float(value) for value in summed.numpy()}


if __name__ == "__main__":
    main()
