"""Trains rows of a table on all ranks, in one launch: `torchrun --nproc_per_node 2 -m tests.stepcheck.table ROWS OUT`.

A row is a dictionary with the options of loop.py and perhaps a `fault` of faults.py. The first rank writes the verdict
of each row, with the weights after the training.
"""

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stepcheck.attach import AutoAudit
from tests.stepcheck import faults, loop


def train(row: dict[str, Any], out: Path) -> dict[str, Any]:
    """Trains a row with the audit, and without it if it has no fault. Returns the verdict and the weights' sums."""
    row = dict(row)
    fault = row.pop("fault", "")
    weights_every = row.pop("weights_every", 4)
    options = loop.parse([])
    vars(options).update(steps=4, **row)
    result: dict[str, Any] = {}
    for audited in (True, False):
        if fault and not audited:
            continue
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.optim.Optimizer, "__init__", torch.optim.Optimizer.__init__)
            auto_audit = AutoAudit(str(out.parent), weights_every=weights_every, keep_going=True)
            if fault:
                getattr(faults, fault)(patch)
            if audited:
                auto_audit.patch_torch(torch)
                if options.engine.startswith("zero"):
                    import deepspeed

                    patch.setattr(deepspeed, "initialize", deepspeed.initialize)
                    auto_audit.patch_deepspeed(deepspeed)
            engine: Any = loop.train(options)
            key = "audited" if audited else "alone"
            result[key] = [float(each.detach().double().sum()) for each in engine.parameters() if each.numel()]
            for verdict in auto_audit.verdicts:
                result |= verdict.as_dict()
            if hasattr(engine, "destroy"):
                engine.destroy()
    return result


def main() -> None:
    """Trains all rows."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from stepcheck.engines.deepspeed import compile_no_collective

    compile_no_collective()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    results = {}
    for name, row in rows.items():
        results[name] = train(row, out)
        if dist.get_rank() == 0:
            out.write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
