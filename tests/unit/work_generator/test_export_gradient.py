"""Gradient and evaluation graphs of the examples: exact, padded, shared, stateful."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from boinc_project.contract.graph import Graph
from tests.graph_oracle import BACKENDS, assert_as_exact_as_eager, distance, eager, inputs_of, run
from work_generator.export import ExportedJob, export_evaluation, export_gradient, export_job
from work_generator.export.program import sample_batch
from work_generator.job import Job

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
NAMES = ("digits", "digits_cnn", "gpt_chars")


@pytest.fixture(scope="module")
def jobs() -> dict[str, Job]:
    return {name: Job.load(EXAMPLES / name) for name in NAMES}


@pytest.fixture(scope="module")
def exported(jobs: dict[str, Job]) -> dict[str, ExportedJob]:
    return {name: export_job(job) for name, job in jobs.items()}


def classify(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def points(count: int, features: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, features, generator=generator)
    return {"x": x, "y": torch.randint(0, 3, (count,), generator=generator)}


@pytest.mark.parametrize("name", NAMES)
def test_exported_step_of_an_example_is_as_exact_as_eager_float32(name: str, jobs: dict[str, Job]) -> None:
    job = jobs[name]
    batch = sample_batch(job.data["train"], 12)
    graph = export_gradient(job.model, job.loss, batch, job.folder)
    assert_as_exact_as_eager(graph, job.model, job.loss, batch, seed=7, step=2)


@pytest.mark.parametrize("name", NAMES)
def test_exported_graph_survives_its_file(name: str, exported: dict[str, ExportedJob]) -> None:
    for graph in (exported[name].gradient, exported[name].evaluation):
        assert Graph.from_bytes(graph.to_bytes()).to_json() == graph.to_json()


@pytest.mark.parametrize("name", NAMES)
def test_exporting_twice_gives_the_same_bytes(
    name: str, exported: dict[str, ExportedJob], jobs: dict[str, Job]
) -> None:
    again = export_job(jobs[name])
    assert again.gradient.digest() == exported[name].gradient.digest()
    assert again.evaluation.digest() == exported[name].evaluation.digest()


@pytest.mark.parametrize("name", NAMES)
def test_state_and_constants_are_what_the_graphs_ask_for(name: str, exported: dict[str, ExportedJob]) -> None:
    job = exported[name]
    given = {**job.state, **job.constants}
    for graph in (job.gradient, job.evaluation):
        for each in graph.inputs_of_kind("parameter", "buffer", "constant"):
            assert given[each.name].shape == each.shape
            assert given[each.name].dtype.name == each.dtype


def test_state_dict_names_lead_to_the_models_weights(exported: dict[str, ExportedJob], jobs: dict[str, Job]) -> None:
    for name in NAMES:
        given = {**exported[name].state, **exported[name].constants}
        weights = jobs[name].model.state_dict()
        assert exported[name].state_dict.keys() == weights.keys()
        for key, home in exported[name].state_dict.items():
            assert np.array_equal(given[home], weights[key].numpy())
    assert exported["gpt_chars"].state_dict["head.weight"] == "parameter/characters.weight"


def test_local_steps_have_an_optimizer_graph_and_gradients_have_none(exported: dict[str, ExportedJob]) -> None:
    assert exported["digits"].optimizer is None
    optimizer = exported["gpt_chars"].optimizer
    assert optimizer is not None
    gradients = {each.name for each in exported["gpt_chars"].gradient.outputs_of_kind("gradient")}
    assert gradients == {each.name for each in optimizer.inputs_of_kind("gradient")}


def test_evaluation_sums_loss_and_metrics_over_real_samples(
    exported: dict[str, ExportedJob], jobs: dict[str, Job]
) -> None:
    job, held_out = exported["digits"], jobs["digits"].data["test"]
    model = jobs["digits"].model.eval()
    batch = sample_batch(held_out, 180)
    mask = np.zeros(180, np.float32)
    mask[:100] = 1
    inputs = {**job.state, **{f"batch/{n}": t.numpy() for n, t in batch.items()}, "mask": mask}
    with torch.no_grad():
        logits = model(batch["x"][:100])
    correct = int((logits.argmax(1) == batch["y"][:100]).sum())
    for backend in BACKENDS:
        made = run(job.evaluation, inputs, backend)
        assert made["metric/weight"] == 100
        assert made["metric/accuracy"] == correct
        assert made["metric/loss"] == pytest.approx(
            float(F.cross_entropy(logits, batch["y"][:100], reduction="sum")), rel=1e-5
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_padded_batch_gives_the_gradient_of_its_real_samples(backend: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 3))
    real = points(5)
    padded = {name: torch.cat([t, torch.zeros_like(t[:3])]) for name, t in real.items()}
    graph = export_gradient(model, classify, padded)
    assert not graph.needs_full_batches
    mask = np.array([1] * 5 + [0] * 3, np.float32)
    made = run(graph.graph, inputs_of(graph, model, padded, mask=mask), backend)
    assert made["metric/weight"] == 5
    assert distance(made, eager(model, classify, real, torch.float64)) < 1e-6


def test_batch_norm_and_a_scalar_loss_need_full_batches(exported: dict[str, ExportedJob]) -> None:
    assert exported["digits_cnn"].needs_full_batches
    assert not exported["digits_cnn"].evaluation_needs_full_batches  # running statistics mix nothing

    def mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return classify(model, batch).mean()

    model = nn.Linear(6, 3)
    graph = export_gradient(model, mean, points(4))
    assert graph.needs_full_batches
    assert export_evaluation(model, mean, None, points(4)).needs_full_batches
    assert_as_exact_as_eager(graph, model, mean, points(4))


def test_running_statistics_are_state_and_counters_stay_integers(exported: dict[str, ExportedJob]) -> None:
    outputs = exported["digits_cnn"].gradient.output_types()
    assert outputs["buffer/2.running_mean"].dtype == "float32"
    assert outputs["buffer/2.num_batches_tracked"].dtype == "int64"


class Scaled(nn.Module):
    """A frozen layer and a buffer that training leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(6, 3)
        self.register_buffer("scale", torch.arange(1.0, 7.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.frozen(x * self.scale)))


def test_frozen_parameters_and_unchanging_buffers_are_constants_not_state() -> None:
    torch.manual_seed(0)
    model = Scaled()
    graph = export_gradient(model, classify, points(5))
    names = {each.name for each in graph.graph.inputs_of_kind("constant")}
    assert names == {"constant/frozen.weight", "constant/frozen.bias", "constant/scale"}
    assert {o.name for o in graph.graph.outputs_of_kind("gradient")} == {"gradient/head.weight", "gradient/head.bias"}
    assert not graph.graph.outputs_of_kind("buffer")
    assert_as_exact_as_eager(graph, model, classify, points(5))


def test_tied_weights_get_the_sum_of_their_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    model[2].weight = model[0].weight
    graph = export_gradient(model, classify, points(5))
    assert "gradient/2.weight" not in graph.graph.output_types()
    assert_as_exact_as_eager(graph, model, classify, points(5))


def test_an_unused_parameter_has_a_gradient_of_zeros() -> None:
    model = nn.ModuleDict({"used": nn.Linear(6, 3), "idle": nn.Linear(2, 2)})
    graph = export_gradient(model, lambda m, b: classify(m["used"], b), points(4))
    for backend in BACKENDS:
        made = run(graph.graph, inputs_of(graph, model, points(4)), backend)
        assert not made["gradient/idle.weight"].any()
        assert made["gradient/idle.weight"].shape == (2, 2)


def test_dropout_differs_by_step_and_seed_and_repeats_for_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 3))
    graph = export_gradient(model, classify, points(4))

    def loss(seed: int, step: int) -> float:
        return float(run(graph.graph, inputs_of(graph, model, points(4), seed=seed, step=step), "numpy")["metric/loss"])

    assert loss(1, 0) == loss(1, 0)
    assert len({loss(1, 0), loss(1, 1), loss(2, 0)}) == 3


def test_nodes_name_the_models_line_and_module(exported: dict[str, ExportedJob]) -> None:
    places = {node.where for node in exported["gpt_chars"].gradient.nodes}
    assert any(where.startswith("gpt.py:") and where.endswith("blocks.0.qkv") for where in places)
    assert any(where.startswith("backward of gpt.py:") for where in places)
    assert not any("/" in where for where in places), "no folder of the admin's machine travels"


def test_an_exported_job_does_not_depend_on_the_folder_it_lies_in(
    tmp_path: Path, exported: dict[str, ExportedJob]
) -> None:
    folder = tmp_path / "with blanks and ä"
    shutil.copytree(EXAMPLES / "digits", folder)
    again = export_job(Job.load(folder))
    assert again.gradient.digest() == exported["digits"].gradient.digest()


def test_functions_may_import_their_neighbours_when_they_are_called(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    shutil.copytree(EXAMPLES / "digits", folder)
    (folder / "helper.py").write_text("FACTOR = 2.0\n")
    text = (folder / "digits.py").read_text()
    (folder / "digits.py").write_text(
        text.replace("    return F.cross", "    import helper\n    return helper.FACTOR * F.cross")
    )
    assert export_job(Job.load(folder)).gradient.operators()
