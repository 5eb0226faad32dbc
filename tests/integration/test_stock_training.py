"""A whole training through two stock BOINC clients, with kills on the way, against plain PyTorch.

One run serves several claims, because each version takes the client some ten seconds: the weights are those
of plain PyTorch on the same batches; a killed client, server or daemon changes nothing; a data directory
with blanks and accents works; the client's disk holds no more model files than it needs.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.numpy import load_file
from sqlalchemy import select

from apps.packaging.build import CACHE, build_app
from boinc_project import report, store
from boinc_project.app_versions import update_versions
from boinc_project.cli.jobs import write_weights
from boinc_project.cli.project import port_of, prepare_project, project_processes, wait_until_listening
from boinc_project.contract.microtask import Microtask
from boinc_project.database import host, user
from boinc_project.gt_tables import JobState, gt_microtask
from boinc_project.processes import Processes
from boinc_project.project_tree import ProjectTree
from boinc_project.scripted_volunteer import create_account
from boinc_project.server.run import free_port
from boinc_project.stock_client import StockClient, stock_client_available
from work_generator.export import export_job
from work_generator.job import Job
from work_generator.publish import publish_job

VERSIONS = 21
PATIENCE_S = 900.0

JOB_TOML = f"""
[job]
name = "truth"
description = "A tiny classifier for a test of the whole path."
seed = 7

[model]
factory = "truth:model"
loss = "truth:loss"

[data]
source = "truth:data"
license = "made up for a test"
batch_size = 32

[train]
policy = "sync"
microtasks_per_version = 2
batches_per_microtask = 2
max_versions = {VERSIONS}
evaluate_every = 0

[optimizer]
kind = "sgd"
lr = 0.2
momentum = 0.9

[workunit]
min_quorum = 2
delay_bound_s = 3600

[supply]
straggler_after_s = 3000
"""

JOB_PY = """
import numpy as np
import torch.nn.functional as F
from torch import nn


def model():
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 4))


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def data():
    generator = np.random.default_rng(5)
    x = generator.normal(size=(300, 12)).astype(np.float32)
    y = (x @ generator.normal(size=(12, 4))).argmax(1).astype(np.int64)
    return {"train": {"x": x, "y": y}}
"""

pytestmark = [
    pytest.mark.client,
    pytest.mark.skipif(not stock_client_available(), reason="the stock BOINC client (boinc-client) is not installed"),
    pytest.mark.timeout(int(PATIENCE_S) + 300),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("stock")
    jobs = folder / "job"
    jobs.mkdir()
    (jobs / "job.toml").write_text(JOB_TOML)
    (jobs / "truth.py").write_text(JOB_PY)
    tree = prepare_project(folder / "project", free_port(), "test", {"gt_dry_rpc_delay": 2})
    build_app(tree.project_dir, cache_dir=CACHE)
    with tree.database() as database:
        update_versions(tree, database)
        job = Job.load(jobs)
        publish_job(tree, database, job, export_job(job), "gradient", lambda text: None)
    processes = project_processes(tree.project_dir, 0.2, "user")
    clients = [
        StockClient(folder / "client a", ncpus=2),
        StockClient(folder / "Žofia Nuñez 模型" / "client b", ncpus=2),
    ]
    run = Trained(folder, tree, job, processes, clients)
    try:
        run.train()
        yield run
    finally:
        for client in clients:
            client.quit()
        processes.stop()


class Trained:
    """The training, and what was seen on the way."""

    def __init__(
        self, folder: Path, tree: ProjectTree, job: Job, processes: Processes, clients: list[StockClient]
    ) -> None:
        self.folder, self.tree, self.job = folder, tree, job
        self.processes, self.clients = processes, clients
        self.seconds_until_gone = 0.0
        self.killed: list[str] = []

    def train(self) -> None:
        self.processes.start()
        wait_until_listening("127.0.0.1", port_of(self.tree), self.processes)
        for number, client in enumerate(self.clients):
            key = create_account(self.tree.config.master_url, f"v{number}@example.org", "secret!", f"v{number}")
            client.start()
            client.attach(self.tree.config.master_url, key)
        # (version, what gets SIGKILL when the job has reached it)
        plan = [(3, "client"), (5, "validator"), (7, "server"), (9, "work_generator"), (11, "assimilator")]
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.processes.watch()
            with self.tree.database() as database:
                row = report.job_of(database, "truth")
            if row.state == JobState.FINISHED:
                return
            assert row.state == JobState.RUNNING, row.note
            assert time.monotonic() < deadline, f"version {row.current_version} after {PATIENCE_S} s in {self.folder}"
            if plan and row.current_version >= plan[0][0]:
                self.kill(plan.pop(0)[1])
            time.sleep(0.25)

    def kill(self, what: str) -> None:
        self.killed.append(what)
        if what != "client":
            pid = self.processes.pid(what)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            return
        client = self.clients[1]
        tasks = self.wait_for_tasks(client)
        client.kill()
        start = time.monotonic()
        while any(psutil.pid_exists(pid) and is_live(pid) for pid in tasks) and time.monotonic() - start < 60:
            time.sleep(0.1)
        self.seconds_until_gone = time.monotonic() - start
        client.start()

    def wait_for_tasks(self, client: StockClient) -> list[int]:
        """Process ids of the client's running tasks and all their descendants."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            children = psutil.Process(client.pid).children(recursive=True)
            if children:
                return [child.pid for child in children]
            time.sleep(0.05)
        return []


def is_live(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def test_weights_equal_those_of_plain_pytorch_on_the_same_batches(trained: Trained) -> None:
    with trained.tree.database() as database, database.read() as connection:
        row = store.job_named(connection, "truth")
        assert row is not None and row.current_version == VERSIONS
        newest = store.version_row(connection, row.id, VERSIONS)
        documents = connection.execute(
            select(gt_microtask.c.version, gt_microtask.c.slot, gt_microtask.c.document).where(
                gt_microtask.c.job_id == row.id, gt_microtask.c.attempt == 0
            )
        ).all()
    assert newest is not None
    path = trained.folder / "weights.safetensors"
    write_weights(row, newest, path)
    ours = load_file(path)
    expected = plain_pytorch(trained.job, {(v, s): Microtask.from_json(d.encode()) for v, s, d in documents})
    difference = np.sqrt(sum(float(((ours[n] - t) ** 2).sum()) for n, t in expected.items()))
    norm = np.sqrt(sum(float((t**2).sum()) for t in expected.values()))
    assert difference / norm <= 1e-5


def plain_pytorch(job: Job, microtasks: dict[tuple[int, int], Microtask]) -> dict[str, np.ndarray]:
    """The same training in a dozen lines of PyTorch: mean gradient over the round's samples, SGD with momentum."""
    model = Job.load(job.folder).model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    x, y = job.data["train"]["x"], job.data["train"]["y"]
    for version in range(VERSIONS):
        batches = [batch for slot in range(2) for batch in microtasks[version, slot].batches]
        rows = [row for batch in batches for row in batch.rows]
        loss = torch.nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}


def test_kills_left_no_result_unjudged_and_no_credit_missing(trained: Trained) -> None:
    assert trained.killed == ["client", "validator", "server", "work_generator", "assimilator"]
    with trained.tree.database() as database:
        found = report.collect(database, "truth")
        with database.read() as connection:
            hosts = {int(i): float(c) for i, c in connection.execute(select(host.c.id, host.c.total_credit))}
            users = [float(c) for c in connection.execute(select(user.c.total_credit)).scalars()]
    assert len(found["hosts"]) == 2
    assert found["valid_results"] == 2 * 2 * VERSIONS
    for entry in found["hosts"]:
        assert hosts[entry["host"]] == pytest.approx(entry["credit"])
    assert sum(users) == pytest.approx(sum(hosts.values()))


def test_the_application_ends_soon_after_the_client_is_killed(trained: Trained) -> None:
    assert trained.seconds_until_gone < 35


def test_the_clients_disk_holds_no_more_model_files_than_it_needs(trained: Trained) -> None:
    time.sleep(3)  # the client removes files that no task names within a second or two
    for client in trained.clients:
        names = [p.name for p in client.project_dir(trained.tree.config.master_url).iterdir()]
        states = [name for name in names if name.startswith("gt_truth_v") and name.endswith(".safetensors")]
        tasks = [name for name in names if name.startswith("gt_truth_v") and name.endswith(".json")]
        assert len(states) <= 2, names
        assert len(tasks) <= 4, names


def test_the_server_retires_states_of_old_versions(trained: Trained) -> None:
    published = [p.name for p in trained.tree.config.download_dir.rglob("gt_truth_v*.safetensors")]
    assert len(published) <= 2, published
