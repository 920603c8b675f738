"""A DistributedDataParallel loop as one writes it by hand, on arrays in memory; run by torchrun.

Usage: torch_loop.py ARRAYS.npz EPOCHS BATCH_SIZE NETWORK RESULT.json; rank 0 writes samples per
second of all ranks in each epoch, from its first step to its results, and of the whole training
with a checkpoint of weights and optimizer on the disk after each epoch, from the moment the module
is made. With ``HSR_BENCHMARK_BIND`` each rank takes a core for itself.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from model import make_torch_network


def main() -> None:
    distributed.init_process_group("gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    if os.environ.get("HSR_BENCHMARK_BIND"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    arrays = np.load(sys.argv[1])
    epochs, batch_size, result = int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[5])
    images = torch.from_numpy(arrays["images"][rank::size]).permute(0, 3, 1, 2).contiguous()
    labels = torch.from_numpy(arrays["labels"][rank::size]).long()
    module = make_torch_network(sys.argv[4])
    started = time.perf_counter()
    parallel = DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(parallel.parameters())
    loss_function = nn.CrossEntropyLoss()
    generator = torch.Generator().manual_seed(rank)
    steps = len(images) // batch_size
    rates = []
    for epoch in range(epochs):
        began = time.perf_counter()
        order = torch.randperm(len(images), generator=generator)
        total, right = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for rows in order.split(batch_size)[:steps]:
            x, y = images[rows], labels[rows]
            optimizer.zero_grad()
            output = parallel(x)
            loss = loss_function(output, y)
            loss.backward()
            optimizer.step()
            total += loss.detach()
            right += (output.detach().argmax(1) == y).sum()
        sums = torch.stack([total, right])
        distributed.all_reduce(sums)
        assert bool(sums.isfinite().all())
        rates.append(steps * batch_size * size / (time.perf_counter() - began))
        if rank == 0:
            place = result.with_name(f"checkpoint-{epoch}.pt")
            with place.open("wb") as stream:
                torch.save([module.state_dict(), optimizer.state_dict()], stream)
                stream.flush()
                os.fsync(stream.fileno())
    whole = epochs * steps * batch_size * size / (time.perf_counter() - started)
    if rank == 0:
        result.write_text(json.dumps({"steps": rates, "whole": whole}))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
