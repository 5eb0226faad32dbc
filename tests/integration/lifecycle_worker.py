"""A small task under the BOINC interface, for the life-cycle tests: deterministic steps, checkpoints, one
output.

Its options make it behave in the ways that real tasks do on volunteers' computers: long calls, helpers,
crashes.
"""

from __future__ import annotations

import argparse
import errno
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

from apps.gradient.boinc_api import Boinc, Timing, run

STEPS_A_SECOND = 50


def spin() -> None:
    """A data-loader process that never rests."""
    while True:
        sum(range(10_000))


def work(boinc: Boinc) -> int:
    import numpy as np

    from apps.gradient.checkpoint import Checkpoint, CheckpointStore
    from boinc_project.contract import whole_file

    for _ in range(options.helpers):
        multiprocessing.get_context("fork").Process(target=spin, daemon=True).start()
    if options.end == "early-exception":
        raise ValueError("bad input: a naïve “模型” in " + os.getcwd())
    if options.end == "disk-full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if options.end == "temporary":
        boinc.temporary_exit(77, "the GPU is busy")
    out = boinc.resolve("out.bin")
    store = CheckpointStore({"workunit": boinc.init.wu_name, "microtask": "0" * 64}, boinc.log)
    if store.outputs_complete({"out.bin": out}):
        boinc.log("the outputs are complete already")
        return 0
    rng = np.random.default_rng(5)
    matrix = rng.standard_normal((options.size, options.size)).astype(np.float32) / options.size**0.5
    state = np.ones(options.size, np.float32)
    start = 0
    found = store.load()
    if found is not None:
        state, start = found.tensors["state"], found.step
    boinc.log(f"starts at step {start} of {options.steps}")
    for step in range(start, options.steps):
        boinc.check()
        if options.call == "blas":
            np.matmul(matrix, matrix)  # one call of seconds, on all threads of the BLAS pool
        elif options.call == "sleepless":
            end = time.monotonic() + 0.02
            while time.monotonic() < end:
                pass
        elif options.call == "sleep":
            time.sleep(1 / STEPS_A_SECOND)
        state = np.tanh(matrix @ state + np.float32(step % 7))
        boinc.fraction_done((step + 1) / options.steps)
        if boinc.time_to_checkpoint():
            with boinc.critical_section():
                if store.save(Checkpoint(step + 1, {"state": state})):
                    boinc.checkpoint_completed()
                time.sleep(options.slow_checkpoint)
    if options.end == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if options.end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if options.end == "sys-exit-0":
        sys.exit(0)
    if options.end == "hard-exit-0":
        os._exit(0)
    with boinc.critical_section():
        whole_file.write_bytes(Path(out), state.tobytes())
        store.outputs_written({"out.bin": out})
    if options.end == "stay-after-output":
        while True:
            boinc.check()
            time.sleep(0.1)
    if options.end == "hang":
        boinc.finish(0)
        time.sleep(1000)
    return options.status


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--size", type=int, default=64)
parser.add_argument("--call", choices=["sleep", "sleepless", "blas", "none"], default="sleep")
parser.add_argument("--helpers", type=int, default=0)
parser.add_argument("--slow-checkpoint", type=float, default=0.0)
parser.add_argument("--status", type=int, default=0)
parser.add_argument("--end", default="")
parser.add_argument("--lock-wait", type=float, default=35.0)
parser.add_argument("--heartbeat-timeout", type=float, default=30.0)
options = parser.parse_args()

if __name__ == "__main__":
    run(work, Timing(lock_wait=options.lock_wait, heartbeat_timeout=options.heartbeat_timeout))
