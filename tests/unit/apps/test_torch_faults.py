"""What PyTorch does on a card that fails or is full, wherever it comes out, and what a task makes of it: by stubs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apps.gradient import __main__ as application
from apps.gradient.backends import torch_device
from apps.gradient.backends.backend import ContextLost, WrongResults
from apps.gradient.backends.numpy_backend import NumpyBackend
from apps.gradient.backends.torch_backend import TorchBackend
from apps.gradient.boinc_api import Boinc
from apps.gradient.boinc_messages import InitData
from apps.gradient.boinc_supervisor import Block
from apps.gradient.executor import ExecutionError
from apps.gradient.recovery import Recovery
from apps.gradient.runner import Run, Timings, load
from boinc_project.contract.errors import TooLittleMemory, UnfitHost
from tests.tiny_microtask import least_squares, microtask_files

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore of it")
FAULTS: list[tuple[Exception, type[Exception]]] = [
    (FULL, TooLittleMemory),
    (RuntimeError("CUDA error: unspecified launch failure\nCompile with ..."), ContextLost),
    (RuntimeError("HIP error: unspecified launch failure"), ContextLost),
    (RuntimeError("CUDA error: no kernel image is available for execution on the device"), UnfitHost),
    (RuntimeError("CUDA error: device-side assert triggered"), WrongResults),
]


@pytest.fixture(params=[False, True], ids=["checks before", "checks after"])
def backend(request: pytest.FixtureRequest) -> Iterator[TorchBackend]:
    threads = torch.get_num_threads()
    yield TorchBackend(torch.device("cpu"), 1, request.param)
    torch.set_num_threads(threads)


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def of_graph(backend: TorchBackend) -> dict[str, Any]:
    graph = least_squares(2, 2)
    inputs = {each.name: backend.from_numpy(np.ones(each.shape, each.dtype)) for each in graph.inputs}
    return backend.program(graph).run(inputs)


@pytest.mark.parametrize(("error", "kind"), FAULTS, ids=lambda value: str(value)[:40])
def test_a_fault_of_the_card_is_told_wherever_it_comes_out(
    backend: TorchBackend, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception]
) -> None:
    tensor = backend.from_numpy(np.ones(3, np.float32))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", raising(error))
        with pytest.raises(kind):
            backend.from_numpy(np.ones(3, np.float32))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "cpu", raising(error))
        with pytest.raises(kind):
            backend.to_numpy(tensor)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", raising(error))
        patch.setattr(backend, "device", torch.device("cuda:0"))
        with pytest.raises(kind):
            backend.synchronize()
    with monkeypatch.context() as patch:
        patch.setattr(backend.checks, "settle", raising(error))  # the end of a run, where checks come after
        if backend.checks.deferred:
            with pytest.raises(kind):
                of_graph(backend)
    monkeypatch.setattr(backend, "ops", {**backend.ops, "mm": lambda call: raising(error)})
    with pytest.raises(kind):
        of_graph(backend)


@pytest.mark.parametrize("text", ["shapes cannot be multiplied", "CUDA error: invalid configuration argument"])
def test_a_fault_of_the_graph_stays_one_of_its_node(
    backend: TorchBackend, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(backend, "ops", {**backend.ops, "mm": lambda call: raising(RuntimeError(text))})
    with pytest.raises(ExecutionError, match=rf"node \d+ mm.*{text}"):
        of_graph(backend)


def update_of(backend: Any, folder: Path, lines: list[str]) -> dict[str, Any]:
    """The update of a microtask with graphs for halves and quarters of its batch, after recoveries."""
    for name, data in microtask_files(3, smaller=(32, 16)).items():
        (folder / name).write_bytes(data)
    loaded = load(lambda name: folder / name)

    def work(run: Run) -> dict[str, Any]:
        while not run.done:
            run.step()
        return run.update()

    return Recovery(loaded, lambda: backend, lambda run: None, lines.append, Timings()).complete(work)


@pytest.mark.parametrize("where", ["in a node", "copying to the card"])
def test_on_a_full_card_the_batch_is_computed_in_smaller_parts(
    backend: TorchBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    def mm(call: Any) -> Callable[..., Any]:
        return raising(FULL) if call.input(0).shape[0] == 64 else torch.mm

    move = torch.Tensor.to

    def to(tensor: torch.Tensor, *rest: Any, **more: Any) -> Any:
        if tensor.dim() == 2 and tensor.shape[0] == 64:
            raise FULL
        return move(tensor, *rest, **more)

    expected = update_of(NumpyBackend(1), tmp_path, [])
    if where == "in a node":
        monkeypatch.setattr(backend, "ops", {**backend.ops, "mm": mm})
    else:
        monkeypatch.setattr(torch.Tensor, "to", to)
    lines: list[str] = []
    found = update_of(backend, tmp_path, lines)
    assert len(lines) == 1 and lines[0].startswith("batches are computed in parts of 32 samples instead of 64")
    assert "more of it" not in lines[0]
    for name, wanted in expected.items():
        np.testing.assert_allclose(found[name], wanted, rtol=1e-4, atol=1e-3)


def test_a_card_that_is_too_small_for_the_smallest_parts_is_refused_in_one_sentence(
    backend: TorchBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(backend, "ops", {**backend.ops, "mm": lambda call: raising(FULL)})
    with pytest.raises(TooLittleMemory, match="CUDA out of memory") as raised:
        update_of(backend, tmp_path, [])
    assert "\n" not in str(raised.value)


class Ended(BaseException):
    """How a task ended: (status, text), or (delay, reason) of a temporary exit."""


class Client(Boinc):
    """A client that reserved the first NVIDIA card."""

    def __init__(self) -> None:
        super().__init__(InitData(gpu_type="NVIDIA", gpu_device_num=0), Block(), standalone=True, process=False)

    def finish(self, status: int, text: str = "", *more: Any) -> Any:
        raise Ended("finish", status, text)

    def temporary_exit(self, delay_s: int, reason: str) -> Any:
        raise Ended("temporary exit", delay_s, reason)


@pytest.mark.parametrize(
    ("cuda", "said", "ended", "text"),
    [
        (None, "", ("finish", application.EXIT_UNFIT_HOST), "for an NVIDIA card, and the PyTorch"),
        ("12.6", "Found no NVIDIA driver on your system.", ("finish", application.EXIT_UNFIT_HOST), "no driver"),
        (
            "12.6",
            "The NVIDIA driver on your system is too old (found version 11040).",
            ("finish", application.EXIT_UNFIT_HOST),
            "too old",
        ),
        (
            "12.6",
            "No CUDA GPUs are available",
            ("temporary exit", application.DEVICE_LOST_DELAY_S),
            "no card on this computer now",
        ),
    ],
)
def test_a_card_that_cannot_be_used_ends_the_task_once_and_one_that_is_away_postpones_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cuda: str | None,
    said: str,
    ended: tuple[str, int],
    text: str,
) -> None:
    for name, data in microtask_files(1).items():
        (tmp_path / name).write_bytes(data)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["gradient", "--backend", "torch"])
    for variable in (*application.THREAD_VARIABLES, "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(torch_device, "installed", lambda: torch_device.Build("2.9", cuda=cuda or ""))
    monkeypatch.setattr(torch.cuda, "init", raising(RuntimeError(said)))
    with pytest.raises(Ended) as raised:
        application.compute(Client())
    assert raised.value.args[:2] == ended and text in raised.value.args[2] and "\n" not in raised.value.args[2]
    assert not (tmp_path / "update.safetensors").exists()
