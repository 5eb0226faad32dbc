"""Runs on computers with little memory and with devices that fail: the update stays the same."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apps.gradient import __main__ as application
from apps.gradient import losses
from apps.gradient.backends import numpy_backend
from apps.gradient.backends.backend import Call, ContextLost, DeviceLost, Kernel
from apps.gradient.backends.numpy_backend import NumpyBackend
from apps.gradient.boinc_api import Boinc
from apps.gradient.boinc_messages import InitData
from apps.gradient.boinc_supervisor import Block
from apps.gradient.checkpoint import Checkpoint
from apps.gradient.executor import Executor
from apps.gradient.recovery import MOST_LOSSES, Recovery
from apps.gradient.runner import Loaded, Run, Timings, load
from boinc_project.contract.errors import ContractError, TooLittleMemory, UnfitHost
from boinc_project.contract.graph import Graph
from boinc_project.contract.microtask import MICROTASK_FILE, UPDATE_FILE, FileRef, Microtask, smaller_graph_file
from tests.tiny_microtask import least_squares, microtask_files, read_result

Array = np.ndarray[Any, Any]
Check = Callable[[], None]


def loaded_from(folder: Path, files: Mapping[str, bytes], limit: float | None = None) -> Loaded:
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return load(lambda name: folder / name, limit)


@dataclass
class Weak(NumpyBackend):
    """A device with so many bytes for a graph, which fails at chosen runs of the gradient graph."""

    memory: float = 1e18
    faults: Iterator[Exception | None] = field(default_factory=lambda: iter(()))

    def __post_init__(self) -> None:
        super().__init__(1)

    def program(self, graph: Graph, verify: bool = False, consume: Any = frozenset()) -> Any:
        if graph.peak_bytes() > self.memory:
            raise TooLittleMemory(f"{graph.peak_bytes()} bytes do not fit in {self.memory:.0f}")
        made = Executor(graph, self, verify)
        if not graph.inputs_of_kind("batch"):
            return made
        run = made.run

        def faulty(inputs: Mapping[str, Any], check: Check | None = None) -> dict[str, Any]:
            fault = next(self.faults, None)
            if fault is not None:
                raise fault
            return run(inputs, check)

        made.run = faulty  # type: ignore[method-assign]
        return made


@dataclass
class Task:
    """A recovery whose checkpoints are kept in memory after every step."""

    loaded: Loaded
    opened: Callable[[], Any]
    saved: Checkpoint | None = None
    lines: list[str] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    forms: list[int] = field(default_factory=list)

    def complete(self) -> dict[str, Array]:
        recovery = Recovery(self.loaded, self.opened, self._restore, self.lines.append, Timings())
        return recovery.complete(self._work)

    def _restore(self, run: Run) -> None:
        if self.saved is not None:
            run.restore(self.saved)

    def _work(self, run: Run) -> dict[str, Array]:
        self.begun.append(run.step_number)
        self.forms.append(run.form.batch_size)
        while not run.done:
            run.step()
            if not run.done:
                self.saved = run.progress()
        return run.update()


def whole(loaded: Loaded) -> dict[str, Array]:
    """The update of an undisturbed run on whole batches."""
    run = Run(loaded, NumpyBackend(1))
    while not run.done:
        run.step()
    return run.update()


def assert_same(found: Mapping[str, Array], expected: Mapping[str, Array], tolerance: float = 2e-6) -> None:
    assert set(found) == set(expected)
    for name, wanted in expected.items():
        assert found[name].shape == wanted.shape and found[name].dtype == wanted.dtype, name
        assert np.linalg.norm(found[name] - wanted) <= tolerance * np.linalg.norm(wanted), name


@pytest.mark.parametrize("mode", ["gradient", "local-steps", "evaluation"])
@pytest.mark.parametrize("size", [32, 16])
@pytest.mark.parametrize("last", [None, 40, 1])
def test_batches_in_parts_give_the_sums_of_whole_ones(tmp_path: Path, mode: str, size: int, last: int | None) -> None:
    loaded = loaded_from(tmp_path, microtask_files(3, mode=mode, smaller=(32, 16), last=last))
    form = next(form for form in loaded.forms if form.batch_size == size)
    run = Run(loaded, NumpyBackend(1), form=form)
    while not run.done:
        run.step()
    expected = whole(loaded)
    assert_same(run.update(), expected)
    np.testing.assert_array_equal(run.update()["metric/weight"], [64, 64, last or 64])


def test_parts_that_hold_nothing_but_padding_are_left_out(tmp_path: Path) -> None:
    loaded = loaded_from(tmp_path, microtask_files(1, smaller=(16,), last=17))
    runs: list[None] = []
    backend = Weak(faults=(runs.append(None) for _ in range(9)))
    Run(loaded, backend, form=loaded.forms[1]).step()
    assert len(runs) == 2


def test_a_graph_that_does_not_fit_is_replaced_by_the_next_smaller_one_that_does(tmp_path: Path) -> None:
    loaded = loaded_from(tmp_path, microtask_files(3, smaller=(32, 16)))
    peaks = [form.graph.peak_bytes() for form in loaded.forms]
    task = Task(loaded, lambda: Weak(memory=(peaks[1] + peaks[2]) / 2))
    assert_same(task.complete(), whole(loaded))
    assert task.forms == [16] and len(task.lines) == 2
    assert "parts of 16 samples instead of 32" in task.lines[1] and str(peaks[1]) in task.lines[1]


@pytest.mark.parametrize("fault", [TooLittleMemory("full"), MemoryError()])
@pytest.mark.parametrize("mode", ["gradient", "local-steps"])
def test_memory_that_runs_out_during_a_step_costs_that_step_only(tmp_path: Path, mode: str, fault: Exception) -> None:
    loaded = loaded_from(tmp_path, microtask_files(4, mode=mode, smaller=(32, 16)))
    backend = Weak(faults=iter([None, None, fault]))
    task = Task(loaded, lambda: backend)
    assert_same(task.complete(), whole(loaded))
    assert (task.begun, task.forms) == ([0, 2], [64, 32])


def test_a_task_whose_smallest_parts_do_not_fit_is_refused_with_both_sizes(tmp_path: Path) -> None:
    loaded = loaded_from(tmp_path, microtask_files(1, smaller=(32,)))
    with pytest.raises(TooLittleMemory, match=f"{loaded.forms[1].graph.peak_bytes()} bytes do not fit in 5000"):
        Task(loaded, lambda: Weak(memory=5000)).complete()


def test_a_memory_limit_decides_in_what_parts_a_batch_is_computed(tmp_path: Path) -> None:
    files = microtask_files(2, batch=1024, features=8, smaller=(512, 256))
    every = loaded_from(tmp_path, files)
    needs = [every.memory_estimate(form) for form in every.forms]
    assert needs == sorted(needs, reverse=True)
    task = Task(load(lambda name: tmp_path / name, needs[1] + 1), lambda: NumpyBackend(1))
    assert_same(task.complete(), whole(every))
    assert task.forms == [512] and task.lines == [
        "batches of 1024 are computed in parts of 512: more would not fit in this task's memory"
    ]
    with pytest.raises(TooLittleMemory, match=f"needs {needs[2]} bytes of memory; it may use {needs[2] - 1}"):
        load(lambda name: tmp_path / name, needs[2] - 1)


def test_a_smaller_graph_of_other_shapes_is_refused(tmp_path: Path) -> None:
    files = microtask_files(1, smaller=(32,))
    name, wrong = smaller_graph_file(32), least_squares(32, 31).to_bytes()
    with pytest.raises(ContractError, match=f"input file {name}"):
        loaded_from(tmp_path, {**files, name: wrong})
    microtask = Microtask.from_json(files[MICROTASK_FILE])
    named = {**microtask.files, name: FileRef(hashlib.sha256(wrong).hexdigest(), len(wrong))}
    document = dataclasses.replace(microtask, files=named).to_json()
    with pytest.raises(ContractError, match="other inputs"):
        loaded_from(tmp_path, {**files, name: wrong, MICROTASK_FILE: document})


@pytest.mark.parametrize("losses", [1, MOST_LOSSES])
@pytest.mark.parametrize("mode", ["gradient", "local-steps"])
def test_a_lost_device_is_opened_again_and_the_task_goes_on(tmp_path: Path, mode: str, losses: int) -> None:
    loaded = loaded_from(tmp_path, microtask_files(8, mode=mode))
    faults = iter([None, None, *([DeviceLost("the driver was reset"), None] * losses)])
    backends: list[Weak] = []

    def opened() -> Weak:
        backends.append(Weak(faults=faults))
        return backends[-1]

    task = Task(loaded, opened)
    found = task.complete()
    expected = whole(loaded)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert len(backends) == 1 + losses and task.begun == [0, *range(2, 2 + losses)]
    assert task.lines[0] == f"the driver was reset; it is opened again (1 of {MOST_LOSSES} times)"


def test_a_device_lost_too_often_is_left_alone(tmp_path: Path) -> None:
    loaded = loaded_from(tmp_path, microtask_files(2))
    faults = iter([DeviceLost("gone")] * 9)
    task = Task(loaded, lambda: Weak(faults=faults))
    with pytest.raises(DeviceLost, match="the device was lost 4 times, at last: gone"):
        task.complete()
    assert len(task.lines) == MOST_LOSSES


def test_a_device_that_does_not_come_back_was_lost_and_is_not_unfit(tmp_path: Path) -> None:
    loaded = loaded_from(tmp_path, microtask_files(2))
    opened = iter([Weak(faults=iter([DeviceLost("gone")]))])

    def again() -> Weak:
        for backend in opened:
            return backend
        raise UnfitHost("there is no such device")

    with pytest.raises(DeviceLost, match="no such device"):
        Task(loaded, again).complete()
    with pytest.raises(UnfitHost, match="no such device"):
        Task(loaded, again).complete()


def test_a_node_without_memory_is_no_fault_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(call: Call) -> Kernel:
        def kernel(*_: Any) -> None:
            raise MemoryError("Unable to allocate 9 TiB")

        return kernel

    monkeypatch.setattr(numpy_backend.NumpyBackend, "ops", {**numpy_backend.OPS, "sub": greedy})
    inputs = {each.name: np.ones(each.shape, each.dtype) for each in least_squares(2, 2).inputs}
    with pytest.raises(MemoryError, match="9 TiB"):
        Executor(least_squares(2, 2), NumpyBackend(1)).run(inputs)


class Left(BaseException):
    """The task ended by a temporary exit."""


class Finished(BaseException):
    """The task ended for good, with a status and a text."""


class Client(Boinc):
    """A client that wants a checkpoint after every step."""

    def __init__(self) -> None:
        super().__init__(InitData(), Block(), standalone=True, process=False)
        self.lines: list[str] = []

    def log(self, text: str) -> None:
        self.lines.append(text)

    def time_to_checkpoint(self) -> bool:
        return True

    def temporary_exit(self, delay_s: int, reason: str) -> Any:
        raise Left(delay_s, reason)

    def finish(self, status: int, text: str = "", *more: Any) -> Any:
        raise Finished(status, text)


@pytest.fixture
def slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["gradient", "--nthreads", "1"])
    for variable in application.THREAD_VARIABLES:
        monkeypatch.setenv(variable, "1")
    return tmp_path


def test_the_application_says_how_large_the_parts_were(slot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = microtask_files(4, smaller=(32,))
    loaded = loaded_from(slot, files)
    backend = Weak(memory=loaded.forms[1].graph.peak_bytes())
    monkeypatch.setattr("apps.gradient.backends.open_backend", lambda *_, **__: backend)
    client = Client()
    assert application.compute(client) == 0
    update = read_result(slot / UPDATE_FILE, files)
    assert_same(update.tensors, whole(loaded))
    assert update.metadata["batch_size"] == 32
    assert sum("parts of 32 samples instead of 64" in line for line in client.lines) == 1


def test_the_application_goes_on_from_its_checkpoint_and_then_asks_for_a_later_start(
    slot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded_from(slot, microtask_files(9))
    faults = iter([None, DeviceLost("reset")] * 9)
    monkeypatch.setattr("apps.gradient.backends.open_backend", lambda *_, **__: Weak(faults=faults))
    client = Client()
    with pytest.raises(Left) as left:
        application.compute(client)
    assert left.value.args == (application.DEVICE_LOST_DELAY_S, "the device was lost 4 times, at last: reset")
    begun = [int(line.split(" steps from ")[1].split(",")[0]) for line in client.lines if " steps from " in line]
    assert begun == [0, 1, 2, 3]


@pytest.mark.parametrize("mode", ["gradient", "local-steps"])
def test_a_device_that_took_the_process_along_is_not_opened_again_in_it(tmp_path: Path, mode: str) -> None:
    loaded = loaded_from(tmp_path, microtask_files(8, mode=mode))
    opened: list[Weak] = []

    def once() -> Weak:
        assert not opened, "CUDA does not start again in the same process"
        opened.append(Weak(faults=iter([None, ContextLost("the card stopped working")])))
        return opened[-1]

    task = Task(loaded, once)
    with pytest.raises(ContextLost, match=r"^the card stopped working$"):
        task.complete()
    assert task.begun == [0] and task.lines == []


def test_after_a_lost_process_the_next_one_goes_on_from_the_checkpoint(
    slot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = microtask_files(4)
    loaded = loaded_from(slot, files)
    begun, delays = [], []
    while True:  # each turn is a process
        weak = Weak(faults=iter([None, ContextLost("launch failed")]))
        monkeypatch.setattr("apps.gradient.backends.open_backend", lambda *_, weak=weak, **__: weak)
        client = Client()
        try:
            assert application.compute(client) == 0
        except Left as left:
            delays.append(left.args[0])
            assert left.args[1] == "launch failed"
            continue
        finally:
            begun += [int(line.split(" steps from ")[1].split(",")[0]) for line in client.lines if " from " in line]
        break
    assert begun == [0, 1, 2, 3] and delays == [losses.FIRST_DELAY_S] * 3
    assert_same(read_result(slot / UPDATE_FILE, files).tensors, whole(loaded))


def test_a_device_that_is_lost_again_and_again_without_progress_is_given_up(
    slot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client alone would start it a hundred times."""
    loaded_from(slot, microtask_files(4))
    delays: list[int] = []
    with pytest.raises(Finished) as finished:
        for _ in range(100):
            faults = iter([ContextLost("launch failed")] * 2)
            monkeypatch.setattr(
                "apps.gradient.backends.open_backend", lambda *_, faults=faults, **__: Weak(faults=faults)
            )
            try:
                application.compute(Client())
            except Left as left:
                delays.append(left.args[0])
    assert finished.value.args[0] == application.EXIT_UNFIT_HOST
    assert "lost 10 times after step 0, at last: launch failed" in finished.value.args[1]
    assert delays == [60, 120, 240, 480, *[losses.LONGEST_DELAY_S] * 5]


def test_a_process_that_is_lost_while_the_device_is_opened_counts_too(
    slot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: Any, **__: Any) -> Any:
        raise ContextLost("ECC error")

    loaded_from(slot, microtask_files(2))
    monkeypatch.setattr("apps.gradient.backends.open_backend", opened)
    for delay in (60, 120):
        with pytest.raises(Left) as left:
            application.compute(Client())
        assert left.value.args == (delay, "ECC error")


@pytest.mark.parametrize("record", ["", "{}", "[1]", '{"binding": {"task": "other"}, "step": 3, "count": 9}', "null"])
def test_a_record_of_losses_that_is_not_this_tasks_does_not_count(tmp_path: Path, record: str) -> None:
    (tmp_path / losses.FILE).write_text(record)
    assert losses.count_one({"task": "mine"}, 3, tmp_path) == losses.Losses(3, 1)
    assert losses.count_one({"task": "mine"}, 3, tmp_path) == losses.Losses(3, 2)
    assert losses.count_one({"task": "mine"}, 4, tmp_path) == losses.Losses(4, 1)
