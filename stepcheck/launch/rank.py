"""The program of a rank: trains the cases of a file, one after the other."""

import json
import os
import sys
import time
import traceback
from pathlib import Path
from pkgutil import resolve_name

import torch
import torch.distributed as dist

from stepcheck.engines.plain import watch
from stepcheck.hooks import watch_autograd
from stepcheck.strategies import ZERO, uses_gpus


def main(verdicts: Path) -> None:
    """Trains the cases in work.json, in the folder of the file `verdicts`. The first rank writes JSON values to
    `verdicts`, one a line: "ready" after its imports, and the verdict of each case. An exception ends the rank."""
    folder = verdicts.parent
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    work = json.loads((folder / "work.json").read_text())
    torch.set_num_threads(1)
    on_gpus = uses_gpus(ranks)
    if not on_gpus:
        os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}  # frameworks use each GPU that they see
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpus else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    if any(case["strategy"] in ZERO or case["config"] for case in work["cases"]):
        import deepspeed

        from stepcheck.engines.deepspeed import compile_no_collective

        compile_no_collective()
        deepspeed.init_distributed()
    watch()
    watch_autograd()
    train = resolve_name(work["train"])

    with open(verdicts if rank == 0 else os.devnull, "a") as lines:
        print(json.dumps("ready"), file=lines, flush=True)
        dist.barrier()  # a rank that fails from now on has failed in a case
        for case in work["cases"]:
            began = time.perf_counter()
            result = train(case, device, folder, **work["settings"])
            print(json.dumps({**result, "took": time.perf_counter() - began}), file=lines, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except Exception:
        traceback.print_exc()
        os._exit(1)  # a usual exit may wait for other ranks
