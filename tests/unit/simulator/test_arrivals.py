"""The staleness benchmark's replay of an arrival trace, against plain PyTorch."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from boinc_project.plan import DataPlan
from scripts.benchmarks.arrivals import Arrivals, replay
from scripts.benchmarks.next_character import characters
from scripts.benchmarks.staleness import FOLDER
from work_generator.export import ExportedJob, export_job
from work_generator.job import Job

TRAIN = """
[train]
policy = "buffered"
microtasks_per_version = 2
local_steps = 2
max_versions = 3

[aggregation]
age_weight = "constant"

[optimizer]
lr = 0.5

[inner_optimizer]
kind = "sgd"
lr = 0.2
momentum = 0.9
max_norm = {max_norm}
"""

#: Of gradients whose norms are about 0.8: none is clipped, all are.
MAX_NORMS = (0, 0.3)


@pytest.fixture(scope="module", params=MAX_NORMS)
def job(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Job, ExportedJob]:
    folder: Path = tmp_path_factory.mktemp("job") / "next"
    shutil.copytree(FOLDER, folder)
    (folder / "job.toml").write_text((FOLDER / "job.toml").read_text() + TRAIN.format(max_norm=request.param))
    made = Job.load(folder)
    data = {split: {"text": fields["text"][:64]} for split, fields in made.data.items()}
    made = dataclasses.replace(made, data=data)
    return made, export_job(made)


def test_losses_of_many_models_are_those_of_each() -> None:
    torch.manual_seed(0)
    models = [characters.model() for _ in range(3)]
    text = torch.randint(0, 128, (3, 4, characters.CONTEXT + characters.TARGETS), dtype=torch.uint8)
    stacked = {
        name: torch.stack([dict(each.named_parameters())[name].detach() for each in models])
        for name, _ in models[0].named_parameters()
    }
    alone = [characters.loss(model, {"text": piece}).mean() for model, piece in zip(models, text, strict=True)]
    torch.testing.assert_close(characters.losses(stacked, text), torch.stack(alone))


def test_a_trace_is_replayed_as_pytorch_trains(job: tuple[Job, ExportedJob]) -> None:
    rounds = (((0, 0), (0, 2)), ((0, 1), (1, 3)))  # version 2 is made of one late contribution and one over version 1
    made, exported = job
    slower = dataclasses.replace(
        made.config, inner_optimizer=dataclasses.replace(made.config.inner_optimizer, lr=0.05)  # type: ignore[type-var]
    )  # fmt: skip
    curves = replay(made, exported, characters.losses, [made.config, slower], Arrivals(rounds, (1.0, 2.0)), 1)
    assert [hours for hours, _ in curves[1]] == [1.0, 2.0]
    for rate, curve in zip((0.2, 0.05), curves, strict=True):
        assert [loss for _, loss in curve] == pytest.approx(_trained(made, exported, rounds, rate), rel=1e-5)


def test_a_trace_that_is_looked_at_only_at_its_end_is_replayed_to_it(job: tuple[Job, ExportedJob]) -> None:
    rounds = tuple(((version, 2 * version), (version, 2 * version + 1)) for version in range(5))
    hours = (1.0, 2.0, 3.0, 4.0, 5.0)
    made, exported = job
    (curve,) = replay(made, exported, characters.losses, [made.config], Arrivals(rounds, hours), 5, margin=1.1)
    assert [hour for hour, _ in curve] == [5.0]


def _trained(
    job: Job, exported: ExportedJob, rounds: tuple[tuple[tuple[int, int], ...], ...], rate: float
) -> list[float]:
    plan = DataPlan(job.config.job.seed, (64,), job.config.data.batch_size, False)
    inner = job.config.inner_optimizer
    assert inner is not None
    start = {name: torch.from_numpy(exported.state[ours].copy()) for name, ours in exported.state_dict.items()}
    versions, losses = [start], []
    for round in rounds:
        deltas = []
        for base, slot in round:
            job.model.load_state_dict(versions[base])
            optimizer = torch.optim.SGD(job.model.parameters(), lr=rate, momentum=0.9)
            for step in range(2):
                rows = torch.from_numpy(plan.samples_of(2 * slot + step)[1])
                optimizer.zero_grad()
                job.loss(job.model, {"text": job.data["train"]["text"][rows]}).mean().backward()
                if inner.max_norm:
                    norm = torch.nn.utils.clip_grad_norm_(job.model.parameters(), inner.max_norm)
                    assert norm > inner.max_norm
                optimizer.step()
            deltas.append({n: versions[base][n] - p.detach() for n, p in job.model.named_parameters()})
        versions.append({n: x - 0.5 * (deltas[0][n] + deltas[1][n]) / 2 for n, x in versions[-1].items()})
        job.model.load_state_dict(versions[-1])
        with torch.no_grad():
            losses.append(float(job.loss(job.model, {"text": job.data["test"]["text"]}).mean()))
    return losses
