"""One rank of the all-reduce: python -m diagnosis.rank BACKEND SECONDS, with torchrun's variables."""

import os
import sys
from datetime import timedelta

STEPS = ("starting", "meeting the others", "adding up", "leaving")
"""What a rank does, one after the other; it prints a line after each but the last."""

PATIENCE = 3.0
"""A rank waits so many times longer than the doctor, who is to find out first; it ends by itself if he was killed."""


def main() -> int:
    """Adds up the ranks' numbers with the other ranks; returns the exit code, 1 where the sum is wrong."""
    backend, seconds = sys.argv[1], float(sys.argv[2])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    total = torch.tensor([float(rank)], device=device)
    print(STEPS[0], flush=True)
    dist.init_process_group(backend, timeout=timedelta(seconds=PATIENCE * seconds))
    print(STEPS[1], flush=True)
    dist.all_reduce(total)
    if total.item() != ranks * (ranks - 1) / 2:
        print(f"the sum over {ranks} ranks is {total.item():g}", file=sys.stderr)
        return 1
    print(STEPS[2], flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
