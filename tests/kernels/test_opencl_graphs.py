"""Whole graphs on OpenCL: a step is as exact as eager float32's, and twenty AdamW steps stay with the numpy backend."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from opencl_devices import DEVICES, open_device
from torch import Tensor, nn

from apps.gradient.backends import Backend, open_backend
from tests.graph_oracle import assert_as_exact_as_eager, inputs_of
from tests.integration import test_hugging_face_models as hugging_face
from work_generator.export import ExportedJob, export_gradient, export_job
from work_generator.export.program import sample_batch
from work_generator.job import Job

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

#: Relative L2 difference of the change that 20 AdamW steps make: honest copies that round differently stay within
#: 6e-4 for up to 200 steps, and within 3e-5 where eps is 1e-6.
TWENTY_STEPS = 1e-3


class Convolutional(nn.Module):
    """Convolutions with stride, groups and batch norm, pooling, dropout and group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 16, 3, stride=2, groups=4, bias=False)
        self.groups = nn.GroupNorm(4, 16)
        self.last = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        x = F.gelu(self.groups(self.second(x)))
        return self.last(F.dropout(F.avg_pool2d(x, 2).mean((2, 3)), 0.2, self.training))


def classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["label"], reduction="none")


@pytest.mark.parametrize(
    "device", [pytest.param(device, marks=pytest.mark.long if device == "pocl" else ()) for device in DEVICES]
)
def test_a_convolutional_step_is_as_exact_as_eager_float32(device: str) -> None:
    torch.manual_seed(1)
    model, draws = Convolutional(), torch.Generator().manual_seed(2)
    batch = {"x": torch.randn(6, 3, 13, 13, generator=draws), "label": torch.tensor([0, 1, 2, 3, 4, 0])}
    exported = export_gradient(model, classify, batch)
    backends = [open_device(device)]
    assert_as_exact_as_eager(exported, model, classify, batch, seed=3, step=2, backends=backends)


@functools.cache
def example(name: str) -> tuple[Job, ExportedJob]:
    job = Job.load(EXAMPLES / name)
    return job, export_job(job)


@pytest.mark.parametrize("name", ["digits", "gpt_chars"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_step_of_an_example_is_as_exact_as_eager_float32(device: str, name: str) -> None:
    job, _ = example(name)
    batch = sample_batch(job.data["train"], 4)
    exported = export_gradient(job.model, job.loss, batch)
    assert_as_exact_as_eager(exported, job.model, job.loss, batch, backends=[open_device(device)])


#: What is tested with every run; the other models are, with the long ones: their kernels take a minute to build.
ALWAYS = {("pocl_gpu", "gpt2")}


@pytest.mark.filterwarnings("ignore")  # transformers warns about optional libraries and about itself
@pytest.mark.parametrize(
    ("device", "name"),
    [
        pytest.param(device, name, marks=[] if (device, name) in ALWAYS else pytest.mark.long)
        for device in ("pocl", "pocl_gpu")
        for name in hugging_face.MODELS
    ],
)
def test_a_step_of_a_hugging_face_model_is_as_exact_as_eager_float32(device: str, name: str) -> None:
    model = hugging_face.made(name)
    _, loss, batch = hugging_face.MODELS[name]
    exported = export_gradient(model, loss, batch())
    assert_as_exact_as_eager(exported, model, loss, batch(), seed=11, step=4, backends=[open_device(device)])


def change_of_twenty_steps(backend: Backend, exported: ExportedJob, inputs: dict[str, Any]) -> dict[str, Any]:
    """What 20 local steps do to the parameters."""
    assert exported.optimizer is not None
    gradient = backend.program(exported.gradient)
    optimizer = backend.program(exported.optimizer, consume=frozenset({"parameter", "optimizer"}))
    values = {name: backend.from_numpy(np.array(array)) for name, array in inputs.items()}
    for each in exported.optimizer.inputs_of_kind("optimizer"):
        values[each.name] = backend.from_numpy(np.zeros(each.shape, each.dtype))
    values["learning_rate"] = backend.from_numpy(np.array(1e-3, np.float32))
    for number in range(20):
        values["step"] = backend.from_numpy(np.array(number, np.int64))
        made = gradient.run({each.name: values[each.name] for each in exported.gradient.inputs})
        given = {**values, **made, "weight": made["metric/weight"]}
        values.update(optimizer.run({each.name: given[each.name] for each in exported.optimizer.inputs}))
    return {n: backend.to_numpy(t) - inputs[n] for n, t in values.items() if n.startswith("parameter/")}


@pytest.mark.parametrize("device", [pytest.param("pocl", marks=pytest.mark.long), "pocl_gpu"])
def test_twenty_steps_of_adamw_stay_with_the_numpy_backend(device: str) -> None:
    job, exported = example("gpt_chars")
    batch = sample_batch(job.data["train"], job.config.data.batch_size)
    made = export_gradient(job.model, job.loss, batch)
    inputs = inputs_of(made, job.model, batch)
    ours = change_of_twenty_steps(open_device(device), exported, inputs)
    reference = change_of_twenty_steps(open_backend("numpy", 2, "cpu"), exported, inputs)
    apart = sum(float(np.square(ours[name] - reference[name]).sum()) for name in ours)
    assert apart <= TWENTY_STEPS**2 * sum(float(np.square(each).sum()) for each in reference.values())
