"""Graphs for parts of a batch: offered only where they are right and useful, and published like the whole one."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tests.tiny_project as tiny
from boinc_project import database
from boinc_project.contract.graph import Graph
from boinc_project.contract.microtask import smaller_graph_file
from boinc_project.gt_tables import gt_file
from boinc_project.job_folder import JobFacts, JobFolder
from tests.tiny_project import TinyProject
from work_generator.export import export_gradient, export_job, smaller
from work_generator.export.program import kept_constants, to_array
from work_generator.job import Job
from work_generator.publish import Publisher, local_content, prepare

FEATURES = 6
Loss = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]


@pytest.fixture
def eager_to_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small jobs count as large, and every saving as useful."""
    monkeypatch.setattr(smaller, "LEAST_PEAK_BYTES", 0)
    monkeypatch.setattr(smaller, "LARGEST_RATIO", 1.0)


def per_sample(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def offered(model: nn.Module, loss: Loss = per_sample, size: int = 16) -> tuple[dict[int, Graph], str]:
    """What is offered for a model of points [N, 6], and the note."""
    generator = torch.Generator().manual_seed(1)
    batch = {"x": torch.randn(size, FEATURES, generator=generator), "y": torch.arange(size) % 3}
    whole = export_gradient(model, loss, batch)
    state = {f"parameter/{name}": to_array(p) for name, p in model.named_parameters()}
    changing = {each.name for each in whole.graph.inputs_of_kind("buffer")}
    state.update({name: to_array(dict(model.named_buffers())[name[7:]]) for name in changing})
    return smaller.smaller_graphs(
        whole.graph,
        {f"batch/{name}": to_array(tensor) for name, tensor in batch.items()},
        (state, {**kept_constants(model, changing), **whole.constants}),
        whole.needs_full_batches,
        lambda part: export_gradient(model, loss, {name: t[:part] for name, t in batch.items()}).graph,
    )


def network(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), *layers, nn.Tanh(), nn.Linear(8, 3))


def test_a_small_job_has_one_graph_and_no_note() -> None:
    assert offered(network()) == ({}, "")


@pytest.mark.usefixtures("eager_to_split")
def test_halves_and_quarters_of_a_batch_are_offered_where_their_sums_are_those_of_the_whole() -> None:
    graphs, note = offered(network())
    assert (list(graphs), note) == ([8, 4], "")
    assert [each.shape for each in graphs[4].inputs_of_kind("batch")] == [(4, FEATURES), (4,)]


@pytest.mark.usefixtures("eager_to_split")
def test_an_even_batch_that_is_no_multiple_of_four_has_halves_only() -> None:
    graphs, note = offered(network(), size=6)
    assert (list(graphs), note) == ([3], "")


def less_its_mean(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    x = batch["x"]
    return F.cross_entropy(model(x - x.mean(0)), batch["y"], reduction="none")


def for_sixteen_only(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return per_sample(model, {"x": batch["x"].reshape(16, FEATURES), "y": batch["y"]})


def with_a_table_of_the_batch(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    rows = len(batch["x"])
    table = torch.tensor([(i * i) % 7 / 7 for i in range(rows)])
    return per_sample(model, batch) * table


@pytest.mark.usefixtures("eager_to_split")
@pytest.mark.parametrize(
    ("model", "loss", "size", "reason"),
    [
        (network(nn.Dropout(0.5)), per_sample, 16, "draws random numbers"),
        (network(nn.BatchNorm1d(8)), per_sample, 16, "samples are mixed"),
        (network(), lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), 16, "samples are mixed"),
        (network(), per_sample, 15, "batch_size 15 is odd"),
        (network(), less_its_mean, 16, r"the sum of \S+ over parts of 8 samples differs by"),
        (network(), for_sixteen_only, 16, "failed at"),
        (network(), with_a_table_of_the_batch, 16, "other inputs"),
    ],
)
def test_a_batch_that_may_not_be_split_is_left_whole_with_a_reason(
    model: nn.Module, loss: Loss, size: int, reason: str
) -> None:
    graphs, note = offered(model, loss, size)
    assert graphs == {} and "no smaller batch is offered" in note
    assert re.search(reason, note), note


def test_parts_that_need_as_much_memory_as_the_whole_are_of_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smaller, "LEAST_PEAK_BYTES", 0)
    graphs, note = offered(nn.Sequential(nn.Linear(FEATURES, 500), nn.Linear(500, 3)), size=2)
    assert (graphs, note) == ({}, "")


def test_the_floor_of_the_comparison_is_for_gradients_that_are_noise() -> None:
    whole = {"gradient/a": np.ones(100, np.float32), "gradient/b": np.full(100, 1e-7, np.float32)}
    noisy = {**whole, "gradient/b": np.full(100, -1e-7, np.float32)}
    assert smaller._farthest(whole, noisy)[1] < smaller.TOLERANCE
    wrong = {**whole, "gradient/b": np.full(100, 1e-3, np.float32)}
    name, distance = smaller._farthest(whole, wrong)
    assert name == "gradient/b" and distance > smaller.TOLERANCE
    assert smaller._farthest({"metric/loss": np.zeros(())}, {"metric/loss": np.ones(())}) == ("metric/loss", np.inf)


@functools.cache
def split_job() -> tuple[Job, Any]:
    """The tiny job with graphs for half of its batch."""
    job = Job.load(tiny.TINY_JOB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(smaller, "LEAST_PEAK_BYTES", 0)
        patch.setattr(smaller, "LARGEST_RATIO", 1.0)
        patch.setattr(smaller, "DIVISORS", (2,))
        return job, export_job(job)


def test_smaller_graphs_are_published_named_by_every_workunit_and_stay_on_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "exported", lambda toml, changes: split_job())
    graph = split_job()[1].smaller[8]
    with TinyProject(tmp_path / "project") as project:
        project.issue()
        (file,) = project.job.facts.smaller.values()
        assert project.tree.download_path(file.name).read_bytes() == graph.to_bytes()
        assert [row["kind"] for row in project.rows(gt_file, name=file.name)] == ["graph"]
        for unit in project.rows(database.workunit):
            assert project.microtask_of(unit["name"]).smaller_batches == (8,)
            (about,) = (part for part in str(unit["xml_doc"]).split("<file_info>") if f"<name>{file.name}<" in part)
            assert "<sticky/>" in about and "<no_delete/>" in about
            assert f"<open_name>{smaller_graph_file(8)}</open_name>" in str(unit["xml_doc"])
        project.make_version()
        assert project.tree.download_path(file.name).exists(), "every round needs it"


def test_a_job_without_a_project_has_its_smaller_graphs_too(tmp_path: Path) -> None:
    job, made = split_job()
    microtask, files = local_content(job, made, 0, tmp_path)
    assert microtask.smaller_batches == (8,)
    assert Graph.from_bytes(files[smaller_graph_file(8)].read_bytes()) == made.smaller[8]


def test_jobs_made_before_there_were_smaller_graphs_are_read(tmp_path: Path) -> None:
    job, made = split_job()
    facts = prepare(job, made, JobFolder(tmp_path), Publisher(None, job.config.job.name))
    assert JobFacts.from_json(facts.to_json()) == facts
    old = re.sub(r'"smaller":\{.*?\}\},', "", facts.to_json())
    assert old != facts.to_json()
    assert JobFacts.from_json(old) == dataclasses.replace(facts, smaller={})
