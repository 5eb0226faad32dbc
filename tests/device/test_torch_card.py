"""The torch backend on a real card."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from on_cards import EXAMPLE_NAMES, assert_operator_is_exact, assert_runs_are_alike, assert_step_agrees, step_of

from apps.gradient.backends import open_backend, torch_device
from apps.gradient.boinc_messages import InitData
from apps.gradient.executor import ExecutionError, apply
from boinc_project.contract.errors import TooLittleMemory
from boinc_project.contract.graph import GraphBuilder
from boinc_project.contract.opset import OPSET

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("op", OPSET)
def test_operator_is_as_exact_as_on_the_processor(op: str, torch_card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_operator_is_exact(op, torch_card, monkeypatch)


@pytest.mark.parametrize("name", EXAMPLE_NAMES)
def test_a_step_of_an_example_agrees_with_the_processors(name: str, torch_card: Any) -> None:
    assert_step_agrees(name, torch_card)


@pytest.mark.parametrize("name", EXAMPLE_NAMES)
def test_two_runs_give_the_same_bits(name: str, torch_card: Any) -> None:
    assert_runs_are_alike(name, torch_card)


@pytest.mark.parametrize("name", EXAMPLE_NAMES)
def test_nothing_in_a_run_waits_for_the_card(name: str, torch_card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, inputs = step_of(name)
    program = torch_card.program(graph)
    given = {key: torch_card.from_numpy(array) for key, array in inputs.items()}
    program.run(given)  # libraries start with the first
    torch_card.synchronize()
    settle = torch_card.checks.settle

    def late() -> Any:
        torch.cuda.set_sync_debug_mode("default")
        return settle()

    monkeypatch.setattr(torch_card.checks, "settle", late)
    torch.cuda.set_sync_debug_mode("error")
    try:
        program.run(given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_products_are_float32s(torch_card: Any) -> None:
    assert torch_device.wrong_answers(torch_card.device) == []
    about = torch_card.describe()
    assert (about["tf32"], about["reduced sums"], about["deterministic"]) == ("off", "off", "on")
    assert about["device"] == torch.cuda.get_device_name(torch_card.device) and about["architecture"]


def in_a_new_process(program: str) -> str:
    """What a program prints; it has a CUDA of its own, which it may break."""
    made = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr[-2000:]
    return made.stdout


def test_known_answers_find_tf32(torch_card: Any) -> None:
    if torch.version.hip or torch.cuda.get_device_capability(torch_card.device) < (8, 0):
        pytest.skip("this card has no TF32")
    found = in_a_new_process(
        "import os; os.environ.pop('NVIDIA_TF32_OVERRIDE', None)\n"
        "import torch\n"
        "from apps.gradient.backends import torch_device\n"
        "torch.backends.cuda.matmul.allow_tf32 = True\n"
        "print(torch_device.wrong_answers(torch.device('cuda:0')))\n"
    )
    assert "product of matrices" in found


def test_an_index_out_of_range_is_an_error_and_the_card_goes_on(torch_card: Any) -> None:
    builder = GraphBuilder()
    table = builder.input("table", "parameter", "float32", (3, 2))
    index = builder.input("index", "batch", "int64", (2,))
    builder.output("y", "metric", builder.node("embedding", [table, index])[0])
    program = torch_card.program(builder.build())
    given = {"table": torch_card.from_numpy(np.ones((3, 2), np.float32))}
    for wrong in (-1, 3, 2**62):
        with pytest.raises(ExecutionError, match=f"node 0 embedding.*index {wrong} is out of range"):
            program.run({**given, "index": torch_card.from_numpy(np.array([0, wrong]))})
        made = program.run({**given, "index": torch_card.from_numpy(np.array([0, 2]))})
        np.testing.assert_array_equal(torch_card.to_numpy(made["y"]), np.ones((2, 2)))


def test_an_error_inside_a_kernel_is_told_from_one_of_the_graph(torch_card: Any) -> None:
    """The error comes out of the next call that asks for something, and every later one fails as well."""
    found = in_a_new_process(
        "import torch\n"
        "from apps.gradient.backends import open_backend\n"
        "backend = open_backend('torch', 1, 'cuda')\n"
        "torch.zeros(3, device='cuda')[torch.tensor([9], device='cuda')]\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        backend.synchronize()\n"
        "    except Exception as error:\n"
        "        print(type(error).__name__)\n"
    )
    assert found.split() in (["WrongResults"] * 2, ["ContextLost"] * 2)


def test_memory_beyond_the_share_is_refused_and_the_reserve_stays_free(torch_card: Any) -> None:
    _, total = torch.cuda.mem_get_info(torch_card.device)
    shape = [total // 4 // 32]  # 32nds of the card
    held = []
    with pytest.raises(TooLittleMemory) as raised:
        for _ in range(40):
            held += apply(torch_card, "full", [], {"shape": shape, "value": 1.0, "dtype": "float32"})
    assert held and "\n" not in str(raised.value)
    left, _ = torch.cuda.mem_get_info(torch_card.device)
    assert left >= torch_device.RESERVE_BYTES // 2
    held.clear()
    del raised
    gc.collect()
    torch.cuda.empty_cache()
    (again,) = apply(torch_card, "full", [], {"shape": shape, "value": 1.0, "dtype": "float32"})
    assert float(again.sum(dtype=torch.float64)) == shape[0]


def test_a_task_gets_the_card_that_the_client_reserved(torch_card: Any) -> None:
    vendor = "ATI" if torch.version.hip else "NVIDIA"
    for number in range(torch.cuda.device_count()):
        init = InitData(gpu_type=vendor, gpu_device_num=number, gpu_opencl_dev_index=number)
        assert open_backend("torch", 1, init).device == torch.device("cuda", number)
