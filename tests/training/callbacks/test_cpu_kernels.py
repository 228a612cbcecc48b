"""The scheduling of gloo's threads, in a process of its own: it binds itself to a core."""

import subprocess
import sys

import pytest
import torch

from tests.support.helpers import HANG_SECONDS, ROOT

NAMELESS = 5  # exit code of the program: no thread has the name

PROGRAM = """
import os
import time
import torch.distributed as dist
from cifar_zero.training.callbacks.cpu_kernels import demote_network_threads

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def policies():
    tasks = {int(task): open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")}
    return {(name == "gloo_tcp_loop", os.sched_getscheduler(task)) for task, name in tasks.items()}
cores = os.sched_getaffinity(0)
over = time.monotonic() + PATIENCE
while len(before := policies()) < 2:  # a thread takes its name after it has started
    if time.monotonic() > over:
        raise SystemExit(NAMELESS)
if len(cores) > 1:
    demote_network_threads()
    assert policies() == before
os.sched_setaffinity(0, {min(cores)})
demote_network_threads()
assert before == {(True, os.SCHED_OTHER), (False, os.SCHED_OTHER)}, before
assert policies() == {(True, os.SCHED_BATCH), (False, os.SCHED_OTHER)}, policies()
dist.destroy_process_group()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's scheduler")
def test_only_network_threads_of_a_rank_with_one_core_are_demoted() -> None:
    may_be_nameless = torch.__version__ < "2.15"
    given = f"NAMELESS, PATIENCE = {NAMELESS}, {10 if may_be_nameless else HANG_SECONDS}"
    done = subprocess.run([sys.executable, "-c", given + PROGRAM], cwd=ROOT)
    if done.returncode == NAMELESS and may_be_nameless:
        pytest.skip("torch 2.11 does not name gloo's thread")
    assert done.returncode == 0
