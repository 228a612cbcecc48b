"""Checks that the ranks of a run on this machine find each other."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress

from cifar_zero.core.errors import short
from cifar_zero.diagnosis.check import Finding, Options, failed, ok
from cifar_zero.diagnosis.machine import ranks_in_memory
from cifar_zero.launch import local_launcher

GRACE_SECONDS = 2.0
"""How long rank 0 may take to report after another rank has failed."""


def port(options: Options) -> Finding:
    """Whether MASTER_PORT is free, if it is set."""
    named = os.environ.get("MASTER_PORT")
    if named is None:
        return ok(f"MASTER_PORT is not set, {local_launcher.free_port()} is free")
    fix = f"unset MASTER_PORT, or export MASTER_PORT={local_launcher.free_port()}"
    if not named.isdecimal() or not 0 < int(named) < 2**16:
        return failed(f"MASTER_PORT={named} is not a port", fix)
    try:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
            listener.bind(("", int(named)))
            listener.listen()
    except OSError as error:
        return failed(f"MASTER_PORT={named}: {error.strerror}", fix)
    return ok(f"MASTER_PORT={named} is free")


def all_reduce(options: Options) -> Finding:
    """Whether real ranks on this machine meet and sum a tensor: starts `doctor.py --nodes` as each of them."""
    if options.ranks == 1:
        return ok("not needed: a single rank has no others to meet")
    if (fit := ranks_in_memory()) < options.ranks:
        return failed(f"not tried: there is no memory for {options.ranks} ranks", f"--ranks {max(1, fit)}")
    master = local_launcher.free_port()
    ranks = [_start(rank, options, master) for rank in range(options.ranks)]
    try:
        while any(rank.poll() is None for rank in ranks) and not any(rank.returncode for rank in ranks):
            time.sleep(0.1)
        with suppress(subprocess.TimeoutExpired):
            ranks[0].wait(GRACE_SECONDS)
    finally:
        for rank in ranks:
            rank.kill()
    printed = [rank.communicate() for rank in ranks]
    if report := printed[0][0]:
        (found,) = [check for check in json.loads(report)["checks"] if check.pop("name") == "all-reduce"]
        return Finding(**found)
    errors = [
        f"rank {rank}: {short(text.splitlines()[-1], 300)}" for rank, (_, text) in enumerate(printed) if text.strip()
    ]
    return failed(
        "; ".join(errors) or "a rank ended without an error message",
        "if the network interface is the cause: export GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo",
    )


def _start(rank: int, options: Options, master: int) -> subprocess.Popen[str]:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": options.ranks, "LOCAL_WORLD_SIZE": options.ranks}
    places |= {"MASTER_ADDR": local_launcher.ADDRESS, "MASTER_PORT": master, "OMP_NUM_THREADS": 1}
    return subprocess.Popen(
        [sys.executable, sys.argv[0], "--nodes", "--json", "--timeout", str(options.timeout), "--out", options.out],
        env={**os.environ, **{name: str(value) for name, value in places.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
