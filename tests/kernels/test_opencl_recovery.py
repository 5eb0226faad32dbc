"""Little memory, devices that are lost, and suspension, on real drivers behind limits: the update stays the same."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opencl_devices import open_device

pytest.importorskip("pyopencl", reason="pyopencl is not installed")

import pyopencl as cl

from apps.gradient.backends.numpy_backend import NumpyBackend
from apps.gradient.opencl import runtime
from apps.gradient.opencl.facts import DeviceFacts
from apps.gradient.opencl.opencl_backend import OpenclBackend
from apps.gradient.opencl.runtime import LONGEST_LAUNCH_S, QUEUED_S, Pace
from apps.gradient.recovery import Recovery
from apps.gradient.runner import Loaded, Run, Timings, load
from boinc_project.contract.errors import TooLittleMemory
from tests.tiny_microtask import microtask_files
from validator.agreement import distance

Array = np.ndarray[Any, Any]
AGREEMENT = 1e-5  # a tenth of what copies of a gradient may differ by

PLACES = ("pocl", "pocl_gpu")


def behind_limits(name: str, **limits: int) -> OpenclBackend:
    """A fresh backend on a device of opencl_devices with less memory."""
    known = open_device(name)
    (handle,) = known.context.devices
    facts: DeviceFacts = dataclasses.replace(known.facts, **limits)
    return OpenclBackend(handle, facts)


@pytest.fixture(params=["gradient", "local-steps"])
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> Loaded:
    """Four steps whose values are mostly the batch's: 1024 samples of 64 numbers, the last batch not full."""
    return loaded_from(tmp_path, mode=str(request.param), smaller=(512, 256), last=700)


def loaded_from(folder: Path, **settings: Any) -> Loaded:
    for name, data in microtask_files(4, batch=1024, features=64, **settings).items():
        (folder / name).write_bytes(data)
    return load(lambda name: folder / name)


def all_steps(run: Run) -> dict[str, Array]:
    while not run.done:
        run.step()
    return run.update()


def reference(loaded: Loaded) -> dict[str, Array]:
    """The update of whole batches on the CPU."""
    return all_steps(Run(loaded, NumpyBackend(1)))


def recovered(loaded: Loaded, backends: Any, lines: list[str]) -> tuple[dict[str, Array], int]:
    """The update, and the batch size with which it was made; every fault starts the task anew."""
    recovery = Recovery(loaded, lambda: next(backends), lambda run: None, lines.append, Timings())
    return recovery.complete(lambda run: (all_steps(run), run.form.batch_size))


def peak(loaded: Loaded, name: str, form: int) -> int:
    """Device memory that a run takes."""
    backend = behind_limits(name)
    all_steps(Run(loaded, backend, form=loaded.forms[form]))
    return backend.pool.peak


def assert_agrees(found: Mapping[str, Array], loaded: Loaded) -> None:
    assert distance(found, reference(loaded)) <= AGREEMENT


@pytest.mark.parametrize("name", PLACES)
def test_a_whole_batch_does_not_fit_and_half_of_it_does(name: str, loaded: Loaded) -> None:
    room = (peak(loaded, name, 0) + peak(loaded, name, 1)) // 2
    lines: list[str] = []
    found, size = recovered(loaded, iter([behind_limits(name, global_memory=room)]), lines)
    assert size == 512 and len(lines) == 1 and f"{room} bytes for us" in lines[0]
    assert_agrees(found, loaded)


@pytest.mark.parametrize("name", PLACES)
def test_a_buffer_that_would_be_too_large_is_made_for_a_quarter_of_the_batch(name: str, tmp_path: Path) -> None:
    loaded = loaded_from(tmp_path, smaller=(512, 256))
    lines: list[str] = []
    limit = 256 * 64 * 4  # a quarter of a batch's input
    found, size = recovered(loaded, iter([behind_limits(name, max_allocation=limit)]), lines)
    assert size == 256 and len(lines) == 2 and all(str(limit) in line for line in lines)
    assert_agrees(found, loaded)


def test_where_no_part_fits_both_sizes_are_named(tmp_path: Path) -> None:
    loaded = loaded_from(tmp_path, smaller=(512,))
    backend = behind_limits("pocl", max_allocation=8192)
    with pytest.raises(TooLittleMemory, match=r"16384 bytes; the largest buffer of .* is 8192 bytes"):
        recovered(loaded, iter([backend]), [])


def test_memory_that_was_advertised_and_is_refused_halves_the_batch(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = (peak(loaded, "pocl", 0) + peak(loaded, "pocl", 1)) // 2
    backend = behind_limits("pocl")
    real = runtime.Buffer
    refusal = type("Refusal", (cl.MemoryError,), {"code": cl.status_code.MEM_OBJECT_ALLOCATION_FAILURE})
    alive: list[Any] = []

    def refusing(context: Any, flags: Any, size: int) -> Any:
        alive[:] = [each for each in alive if each() is not None]
        if sum(each().size for each in alive) + size > limit:
            raise refusal("clCreateBuffer failed: MEM_OBJECT_ALLOCATION_FAILURE")
        made = real(context, flags, size)
        alive.append(runtime.weakref.ref(made))
        return made

    monkeypatch.setattr(runtime, "Buffer", refusing)
    lines: list[str] = []
    found, size = recovered(loaded, iter([backend]), lines)
    assert size == 512 and len(lines) == 1 and "refused a buffer" in lines[0]
    monkeypatch.undo()
    assert_agrees(found, loaded)


def test_what_a_run_held_is_free_for_the_next_one(tmp_path: Path) -> None:
    loaded = loaded_from(tmp_path, mode="local-steps", smaller=(512,))
    backend = behind_limits("pocl")
    peaks = []
    for _ in range(3):
        all_steps(Run(loaded, backend))
        peaks.append(backend.pool.peak)
    assert len(set(peaks)) == 1


def test_a_lost_device_is_opened_again_with_everything_on_it(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    real = cl.enqueue_nd_range_kernel
    launches = itertools.count()
    gone = type("Gone", (cl.RuntimeError,), {"code": cl.status_code.DEVICE_NOT_AVAILABLE})

    def failing(*given: Any, **named: Any) -> Any:
        if next(launches) in (2, 9):
            raise gone("the driver was reset")
        return real(*given, **named)

    monkeypatch.setattr(cl, "enqueue_nd_range_kernel", failing)
    lines: list[str] = []
    backends = iter([behind_limits("pocl") for _ in range(3)])
    found, size = recovered(loaded, backends, lines)
    assert size == 1024 and len(lines) == 2 and next(backends, None) is None
    monkeypatch.undo()
    assert_agrees(found, loaded)


# --- suspension ---


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("estimate", [0.01, 0.15, 1.9])
def test_check_is_called_before_more_than_half_a_second_of_work_is_queued(
    name: str, estimate: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = loaded_from(tmp_path, mode="local-steps")
    monkeypatch.setattr(runtime.Speed, "seconds", lambda self, launch: estimate)
    real_add = Pace.add
    ahead, longest, largest, checks = 0.0, 0.0, 0.0, 0

    def add(self: Pace, event: Any, seconds: float) -> bool:
        nonlocal ahead, longest, largest
        ahead += seconds
        longest, largest = max(longest, ahead), max(largest, seconds)
        return real_add(self, event, seconds)

    def check() -> None:
        nonlocal ahead, checks
        ahead, checks = 0.0, checks + 1

    monkeypatch.setattr(Pace, "add", add)
    run = Run(loaded, behind_limits(name))
    while not run.done:
        before = checks
        run.step(check)
        assert checks > before
    assert longest <= QUEUED_S / 2 + largest
    assert largest <= LONGEST_LAUNCH_S or estimate > 1, "what cannot be cut is queued alone"
    assert distance(run.update(), reference(loaded)) <= AGREEMENT


class Event:
    """A launch that is done when the clock of the test says so."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def wait(self) -> None:
        self.clock[0] += self.seconds


@pytest.mark.parametrize("factor", [0.2, 1.0, 8.0, 30.0])
def test_less_is_queued_on_a_device_that_is_slower_than_estimated(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(runtime.time, "monotonic", lambda: clock[0])
    pace, spans, chunk = Pace(), [], 0.0
    for _ in range(5000):
        chunk += 0.002
        if pace.add(Event(clock, 0.0), 0.002):
            # The chunk's last event stands for all of it.
            pace._chunks[-1] = (Event(clock, factor * chunk), chunk, pace._chunks[-1][2])
            spans.append(factor * chunk)
            pace.wait()
            chunk = 0.0
    assert all(span <= QUEUED_S for span in spans[20:]), spans
    assert pace.slowness == pytest.approx(max(1.0, factor), rel=0.2)


def test_a_pause_of_the_whole_process_is_forgotten_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(runtime.time, "monotonic", lambda: clock[0])
    pace = Pace()
    for pause in [3600.0] + [0.0] * 12:
        while not pace.add(Event(clock, 0.0), 0.01):
            clock[0] += 0.01
        clock[0] += pause
        pace.drained()
    assert pace.slowness < 1.5
