"""Shows the four collectives of lab 4: `torchrun --standalone --nproc_per_node 2 docs/course/collectives.py`."""

import torch
from torch import distributed

distributed.init_process_group("gloo")
rank, ranks = distributed.get_rank(), distributed.get_world_size()
own = torch.arange(4.0) + 10 * rank  # rank 1 has 10, 11, 12, 13

one = own.clone()
distributed.broadcast(one, src=0)

total = own.clone()
distributed.all_reduce(total)

part = torch.empty(4 // ranks)
distributed.reduce_scatter_tensor(part, own)

full = torch.empty(4)
distributed.all_gather_into_tensor(full, part)

results = {"broadcast": one, "all-reduce": total, "reduce-scatter": part, "all-gather": full}
lines = [f"        {name:<14} {values.int().tolist()}" for name, values in results.items()]
shown: list[str] = [""] * ranks
distributed.all_gather_object(shown, "\n".join([f"rank {rank}: own {own.int().tolist()}", *lines]))
if rank == 0:
    print("\n".join(shown))
distributed.destroy_process_group()
