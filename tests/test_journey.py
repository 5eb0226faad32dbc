"""A gradient's journey through all seven stations, with real daemons, server and application.

    model -> graph -> microtask -> workunit -> result -> validated gradient -> model version

Only the client is scripted. What is asserted: the loss falls, the weights are those of plain PyTorch on the same
batches, the ledger replays to the same bytes, and the same training gives the same bytes again.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from assimilator.replay import replay
from boinc_project import database, store
from boinc_project.contract.microtask import Microtask
from boinc_project.gt_tables import gt_ledger, gt_microtask, gt_version
from boinc_project.states import ValidateState
from tests.tiny_project import TINY_JOB, TinyProject
from tests.training import train
from work_generator.job import Job, load_model


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Both jobs trained twice, each time in a project of its own: toml -> [project, project].

    The second diloco training computes in this process instead of the application's, to save time.
    """
    found: dict[str, list[TinyProject]] = {}
    for toml, turn in itertools.product(("job.toml", "diloco.toml"), range(2)):
        folder = tmp_path_factory.mktemp(f"{toml}-{turn}")
        project = TinyProject(folder / "project", toml)
        found.setdefault(toml, []).append(project)
        if (toml, turn) == ("diloco.toml", 1):
            for _ in range(VERSIONS):
                project.make_version()
        else:
            train(project, folder)
    yield found
    for projects in found.values():
        for project in projects:
            project.db.close()


VERSIONS = 4
BOTH = pytest.mark.parametrize("toml", ["job.toml", "diloco.toml"])


def losses(project: TinyProject) -> list[float]:
    return [row["loss"] for row in project.rows(gt_version) if row["loss"] is not None]


@BOTH
def test_the_loss_falls(trained: Any, toml: str) -> None:
    found = losses(trained[toml][0])
    assert len(found) == VERSIONS and all(math.isfinite(loss) for loss in found)
    assert found[-1] < 0.8 * found[0]


@BOTH
def test_replaying_the_ledger_gives_identical_bytes(trained: Any, toml: str) -> None:
    project = trained[toml][0]
    assert list(replay(project.db, project.job).values()) == project.version_digests()


@BOTH
def test_the_same_training_gives_identical_bytes_again(trained: Any, toml: str) -> None:
    one, two = trained[toml]
    assert one.version_digests() == two.version_digests()
    assert losses(one) == losses(two)


@BOTH
def test_every_gradient_was_computed_by_two_users_validated_credited_and_applied_once(trained: Any, toml: str) -> None:
    project = trained[toml][0]
    entries = project.rows(gt_ledger)
    assert len(entries) == 2 * VERSIONS and {entry["disposition"] for entry in entries} == {"applied"}
    places = [(v, s) for v in range(1, VERSIONS + 1) for s in (0, 1)]
    assert sorted((e["applied_version"], e["slot"]) for e in entries) == places
    for entry in entries:
        (unit,) = project.rows(database.workunit, name=entry["workunit_name"])
        results = project.rows(database.result, workunitid=unit["id"], validate_state=int(ValidateState.VALID))
        assert len({result["userid"] for result in results}) == 2
        assert {result["granted_credit"] for result in results} == {unit["canonical_credit"]}
    granted = sum(result["granted_credit"] for result in project.rows(database.result))
    assert sum(user["total_credit"] for user in project.rows(database.user)) == pytest.approx(granted)


def batch_of(project: TinyProject, microtask: Microtask, index: int, data: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The samples that a stored microtask names, taken from the admin's own arrays (a shard holds 100 samples)."""
    by_digest = {
        hashlib.sha256(project.job.folder.shard_path("train", k).read_bytes()).hexdigest(): k
        for k in range(len(project.job.facts.train))
    }
    batch = microtask.batches[index]
    rows = [
        100 * by_digest[microtask.files[f"shard_{shard}.safetensors"].sha256] + row
        for shard, row in zip(batch.shards, batch.rows, strict=True)
    ]
    return {name: tensor[rows] for name, tensor in data.items()}


def test_the_weights_equal_plain_pytorch_on_the_same_batches(trained: Any) -> None:
    project = trained["job.toml"][0]
    config = project.job.config
    job = Job.load(TINY_JOB / "job.toml")
    model = load_model(job.config)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=config.optimizer.lr,
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
        weight_decay=config.optimizer.weight_decay,
    )
    seen: set[tuple[int, ...]] = set()
    for version in range(VERSIONS):
        optimizer.param_groups[0]["lr"] = config.learning_rate(version)
        optimizer.zero_grad()
        total, samples = torch.zeros(()), 0
        for task in project.rows(gt_microtask, version=version):
            microtask = Microtask.from_json(task["document"].encode())
            for index in range(microtask.steps):
                batch = batch_of(project, microtask, index, dict(job.data["train"]))
                seen.add(tuple(microtask.batches[index].rows))
                total = total + job.loss(model, batch).sum()
                samples += len(batch["y"])
        (total / samples).backward()
        optimizer.step()
        (row,) = project.rows(gt_version, version=version + 1)
        assert row["samples"] == samples
        assert row["loss"] == pytest.approx(total.item() / samples, rel=1e-5)
        state = project.job.folder.read_state(version + 1, row["state_sha256"])
        expected = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
        found = np.concatenate([state[f"parameter/{name}"].ravel() for name, _ in model.named_parameters()])
        assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)
    assert len(seen) == 6 * VERSIONS, "every batch was another one"


def test_diloco_deltas_equal_plain_pytorch_s_local_steps(trained: Any) -> None:
    project = trained["diloco.toml"][0]
    config = project.job.config
    inner = config.inner_optimizer
    job = Job.load(TINY_JOB / "diloco.toml")
    deltas = []
    for task in project.rows(gt_microtask, version=0):
        microtask = Microtask.from_json(task["document"].encode())
        model = load_model(job.config)
        start = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=0.1, betas=inner.betas, eps=inner.eps, weight_decay=inner.weight_decay
        )
        for index in range(microtask.steps):
            optimizer.param_groups[0]["lr"] = microtask.learning_rates[index]
            optimizer.zero_grad()
            job.loss(model, batch_of(project, microtask, index, dict(job.data["train"]))).mean().backward()
            optimizer.step()
        end = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        deltas.append((microtask.samples, start - end))
    weight = sum(samples for samples, _ in deltas)
    mean = sum(samples * delta for samples, delta in deltas) / weight
    # The first outer Nesterov step from velocity 0: velocity = mean, step = lr * (mean + momentum * velocity).
    expected = (start - config.optimizer.lr * (1 + config.optimizer.momentum) * mean).numpy()
    with project.db.read() as connection:
        row = store.version_row(connection, project.job_id, 1)
    assert row is not None
    state = project.job.folder.read_state(1, row["state_sha256"])
    found = np.concatenate([state[f"parameter/{name}"].ravel() for name, _ in model.named_parameters()])
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)
