"""The `gradient` application: what BOINC's client starts on a volunteer's computer.

    main -> boinc_api.run -> compute: load the microtask -> steps, with checkpoints -> write the update

Options come from the application version or the workunit: `--backend NAME` (numpy, torch, opencl),
`--nthreads N`. No option is a path. Without init_data.xml the program runs standalone in the current
directory, as tests and the server's own checks do. By hand, `--devices` lists what OpenCL (or PyTorch) shows.

This module imports neither numpy nor torch at its top: the number of threads must stand in the environment
before a BLAS library is loaded, and the computing process is forked before that.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from apps.gradient import boinc_api
from apps.gradient.boinc_api import Boinc

if TYPE_CHECKING:
    from apps.gradient.backends import Backend
    from apps.gradient.checkpoint import CheckpointStore
    from apps.gradient.runner import Loaded, Run

BACKENDS = ("numpy", "torch", "opencl")

# Our own exit codes (BOINC leaves 1-127 to applications); docs/volunteer.md lists them.
EXIT_BAD_INPUT = 10  # an input file is not what the microtask names, or breaks the contract
EXIT_UNFIT_HOST = 11  # this computer cannot do this task; another one can
EXIT_NOT_FINITE = 12  # the loss became NaN or infinite
EXIT_COMPUTE = 13  # an operator failed
EXIT_USAGE = 14  # unknown option
EXIT_WRONG_DEVICE = 15  # the device computes wrong numbers

DEVICE_LOST_DELAY_S = 600  # before the next start of a task whose device is not there, or was lost again and again

# Environment variables that BLAS and OpenMP libraries, and OpenCL drivers for processors, read when they are loaded.
THREAD_VARIABLES = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"),
    *("POCL_MAX_PTHREAD_COUNT", "POCL_CPU_MAX_CU_COUNT", "LP_NUM_THREADS"),
)


def main(backend: str = "numpy") -> None:
    """Entry of the packaged application; `backend` is the one that it was packaged for."""
    if sys.argv[1:] == ["--devices"]:
        sys.exit(show_devices(backend))
    boinc_api.run(lambda boinc: compute(boinc, backend))


def show_devices(backend: str = "opencl") -> int:
    """`--devices`: print what the program's library shows on this computer; returns the exit status."""
    library = "PyTorch" if backend == "torch" else "OpenCL"
    try:
        if backend == "torch":
            from apps.gradient.backends import torch_device

            lines = torch_device.listing()
        else:
            from apps.gradient.opencl import device

            lines = device.listing(device.find_devices())
        print("\n".join(lines) or f"{library} shows no device on this computer")
    except Exception as error:  # whatever a driver or a missing library comes up with, its owner wants to read it
        print(f"{library} does not work on this computer: {error}")
        return 1
    return 0


def options(arguments: list[str]) -> dict[str, str]:
    """`--backend X --nthreads N` as a dictionary; ValueError for anything else."""
    found: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        name = rest.pop(0)
        if name not in ("--backend", "--nthreads") or not rest:
            raise ValueError(f"unknown or incomplete option {name!r}; known are --backend NAME and --nthreads N")
        found[name[2:]] = rest.pop(0)
    if found.get("backend", "numpy") not in BACKENDS:
        raise ValueError(f"unknown backend {found['backend']!r}; known are {', '.join(BACKENDS)}")
    if not found.get("nthreads", "1").isdigit() or int(found.get("nthreads", "1")) < 1:
        raise ValueError(f"--nthreads needs a positive number, not {found['nthreads']!r}")
    return found


def compute(boinc: Boinc, backend: str = "numpy") -> int:
    """Do the whole task; returns the exit status."""
    try:
        chosen = options(sys.argv[1:])
    except ValueError as error:
        boinc.finish(EXIT_USAGE, str(error))
    threads = int(chosen.get("nthreads", boinc.threads))
    for variable in THREAD_VARIABLES:
        os.environ[variable] = str(threads)

    from apps.gradient.backends.backend import DeviceLost, DeviceNotFound, WrongResults
    from apps.gradient.executor import ExecutionError
    from apps.gradient.runner import NotFinite
    from boinc_project.contract.errors import ContractError, UnfitHost

    try:
        return _compute(boinc, chosen.get("backend", backend), threads)
    except NotFinite as error:
        boinc.finish(EXIT_NOT_FINITE, f"the loss is not a number: {error}")
    except (UnfitHost, MemoryError) as error:
        text = f"this computer cannot do this task: {error or 'out of memory'}"
        first, _, rest = text.partition("\n")
        if rest:  # a compiler's words
            boinc.log(text)
        boinc.finish(EXIT_UNFIT_HOST, first)
    except (DeviceLost, DeviceNotFound) as error:
        boinc.temporary_exit(DEVICE_LOST_DELAY_S, str(error))
    except WrongResults as error:
        boinc.finish(EXIT_WRONG_DEVICE, str(error))
    except ExecutionError as error:
        boinc.finish(EXIT_COMPUTE, f"computing failed: {error}")
    except ContractError as error:
        boinc.finish(EXIT_BAD_INPUT, f"the task's files are wrong: {error}")


def _compute(boinc: Boinc, backend_name: str, threads: int) -> int:
    from apps.gradient import runner
    from apps.gradient.backends.backend import ContextLost
    from apps.gradient.checkpoint import CheckpointStore
    from apps.gradient.recovery import Recovery
    from boinc_project.contract.microtask import UPDATE_FILE
    from boinc_project.contract.update import write_update

    timings = runner.Timings()
    start = time.monotonic()
    loaded = runner.load(lambda name: Path(boinc.resolve(name)), memory_limit(boinc.init.rsc_memory_bound))
    timings.load = time.monotonic() - start
    output = Path(boinc.resolve(UPDATE_FILE))
    binding = {
        "workunit": boinc.init.wu_name,
        "result": boinc.init.result_name,
        "microtask": loaded.digest,
    }
    store = CheckpointStore(binding, boinc.log)
    if store.outputs_complete({UPDATE_FILE: output}):
        boinc.log("the update was written before; nothing is left to do")
        return 0

    def work(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
        _take_steps(boinc, store, run, threads)
        start = time.monotonic()
        tensors = run.update()
        timings.encode = time.monotonic() - start
        return tensors, describe(boinc, run, run.backend, threads)

    recovery = Recovery(
        loaded=loaded,
        opened=lambda: _open(boinc, loaded, backend_name, threads),
        restore=lambda run: _restore(boinc, store, run),
        log=boinc.log,
        timings=timings,
    )
    try:
        tensors, metadata = recovery.complete(work)
    except ContextLost as error:
        _start_again(boinc, store, binding, error)
    data = write_update(tensors, loaded.types, metadata, loaded.microtask.codec)
    with boinc.critical_section():
        with open(output, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        store.outputs_written({UPDATE_FILE: output})
    boinc.fraction_done(1.0)
    return 0


def _start_again(boinc: Boinc, store: CheckpointStore, binding: dict[str, str], error: Exception) -> NoReturn:
    """The device was lost, and this process with it: another goes on from the checkpoint, unless that is hopeless."""
    from apps.gradient import losses

    checkpoint = store.load()
    counted = losses.count_one(binding, checkpoint.step if checkpoint is not None else 0)
    if counted.hopeless:
        text = f"the device was lost {counted.count} times after step {counted.step}, at last: {error}"
        boinc.finish(EXIT_UNFIT_HOST, f"this computer cannot do this task: {text}")
    boinc.temporary_exit(counted.delay_s, str(error))


def _open(boinc: Boinc, loaded: Loaded, name: str, threads: int) -> Backend:
    """The backend on the task's device; an OpenCL device has to show first that it computes the task's operators."""
    from apps.gradient.backends import open_backend

    backend = open_backend(name, threads, boinc.init)
    if name != "opencl":
        return backend
    from apps.gradient.opencl import selftest
    from apps.gradient.opencl.opencl_backend import OpenclBackend

    assert isinstance(backend, OpenclBackend)
    return selftest.trusted(backend, loaded.operators, boinc.log, boinc.check)


def _take_steps(boinc: Boinc, store: CheckpointStore, run: Run, threads: int) -> None:
    """The steps that are left, with checkpoints between them."""
    microtask = run.loaded.microtask
    boinc.log(
        f"{microtask.job}: version {microtask.base_version}, slot {microtask.slot},"
        f" {microtask.steps} steps from {run.step_number}, backend {run.backend.name}, {threads} threads"
    )
    while not run.done:
        boinc.check()
        run.step(boinc.check)
        boinc.fraction_done(0.99 * run.step_number / microtask.steps)
        if not run.done and boinc.time_to_checkpoint():
            with boinc.critical_section():
                if store.save(run.progress()):
                    boinc.checkpoint_completed()


def _restore(boinc: Boinc, store: CheckpointStore, run: Run) -> None:
    """Continue from the slot's checkpoint if there is a good one."""
    from boinc_project.contract.errors import ContractError

    checkpoint = store.load()
    if checkpoint is None:
        return
    try:
        run.restore(checkpoint)
    except ContractError as error:
        boinc.log(f"the checkpoint is not used: {error}")
        return
    boinc.log(f"continuing after step {run.step_number}")


def describe(boinc: Boinc, run: Run, backend: Any, threads: int) -> dict[str, Any]:
    """The update's metadata: what was done, by what, how long it took. Nothing here is secret or trusted."""
    microtask = run.loaded.microtask
    timings = run.timings
    return {
        "workunit": boinc.init.wu_name[:200],
        "microtask": run.loaded.digest,
        "base_version": microtask.base_version,
        "steps": run.step_number,
        "batch_size": run.form.batch_size,
        "losses": [float(f"{loss:.6g}") for loss in run.losses()[-100:]],
        "backend": backend.name,
        "device": {str(key)[:40]: str(value)[:200] for key, value in backend.describe().items()},
        "platform": platform.platform()[:200],
        "threads": threads,
        "seconds": {
            "load": round(timings.load, 3),
            "compile": round(timings.compile, 3),
            "compute": round(timings.compute, 3),
            "encode": round(timings.encode, 3),
        },
        "peak_memory": peak_memory(),
    }


def peak_memory() -> int:
    """Largest resident size of this process so far, bytes (0 where it cannot be known)."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            # Not getrusage: its figure is inherited from the process that started this one.
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:")), 0)
    except (OSError, ValueError, IndexError):
        return 0


def memory_limit(bound: float) -> float:
    """Bytes this task may use: the workunit's bound, and never more than 90 % of the computer's memory."""
    try:
        physical = 0.9 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        physical = 0.9 * (4 << 30)
    return min(physical, bound) if bound > 0 else physical


if __name__ == "__main__":
    main()
