"""The packaged OpenCL program: what it holds, and a training by two stock BOINC clients on PoCL.

The client sees no GPU here and PoCL's device is the processor, so the version is one for any processor; all else is
as on a volunteer's computer with an old card.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

pytest.importorskip("pyopencl", reason="pyopencl is not installed")

from apps.gradient.backends.backend import DeviceNotFound
from apps.gradient.opencl import device as devices
from apps.packaging.build import CACHE, OPENCL, BuiltApp, build_app
from boinc_project import database
from boinc_project.project_tree import ProjectTree
from boinc_project.states import Outcome
from boinc_project.stock_client import stock_client_available

LARGEST = 60e6  # bytes
MINUTES = 15

JOB_TOML = """
[job]
name = "opencl"
description = "A tiny classifier for a test of the OpenCL program."
seed = 7

[model]
factory = "tiny_opencl:model"
loss = "tiny_opencl:loss"

[data]
source = "tiny_opencl:data"
license = "made up for a test"
batch_size = 32

[train]
policy = "sync"
microtasks_per_version = 2
max_versions = 3
evaluate_every = 0

[optimizer]
lr = 0.05
"""

JOB_PY = """
import numpy as np
import torch
from torch import nn


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def data():
    generator = np.random.default_rng(5)
    x = generator.normal(size=(300, 12)).astype(np.float32)
    y = (x @ generator.normal(size=(12, 4))).argmax(1).astype(np.int64)
    return {"train": {"x": x, "y": y}}
"""


def has_processor_device() -> bool:
    try:
        devices.choose(devices.find_devices(), devices.request_of_text("cpu"))
    except (devices.OpenCLMissing, DeviceNotFound):
        return False
    return True


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuiltApp:
    return build_app(
        tmp_path_factory.mktemp("opencl app"), cache_dir=CACHE, kind=OPENCL, plan_class="opencl_ati_vliw_gt"
    )


def test_the_program_is_small_and_holds_no_pytorch(built: BuiltApp) -> None:
    from PyInstaller.archive.readers import CArchiveReader

    assert built.size < LARGEST
    assert built.folder.name == "x86_64-pc-linux-gnu__opencl_ati_vliw_gt"
    archive = CArchiveReader(str(built.program))
    packed = {*archive.toc, *archive.open_embedded_archive("PYZ.pyz").toc}
    assert not [name for name in packed if name.partition("/")[0].partition(".")[0] in ("torch", "libtorch")]
    assert {"apps.gradient.opencl.opencl_backend", "pyopencl"} <= packed
    assert "libstdc++.so.6" not in packed, "drivers need the system's own"
    kernels = {path.name for path in (Path(__file__).resolve().parents[2] / "kernels").glob("*.cl")}
    assert {f"apps/gradient/kernels/{name}" for name in kernels} <= packed


def test_the_program_lists_the_devices_of_the_computer(built: BuiltApp, tmp_path: Path) -> None:
    made = subprocess.run([built.program, "--devices"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert list(tmp_path.iterdir()) == [], "it has removed what it unpacked"
    if has_processor_device():
        assert made.returncode == 0 and "  cpu  " in made.stdout, made
    nothing = {**os.environ, "OCL_ICD_VENDORS": str(tmp_path)}
    made = subprocess.run(
        [built.program, "--devices"], cwd=tmp_path, env=nothing, capture_output=True, text=True, timeout=120
    )
    assert made.returncode == 1 and "no OpenCL driver is installed" in made.stdout, made


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a finished `boinc-train demo --backend opencl`."""
    folder = tmp_path_factory.mktemp("demo")
    job = folder / "job"
    job.mkdir()
    (job / "job.toml").write_text(JOB_TOML)
    (job / "tiny_opencl.py").write_text(JOB_PY)
    command = [sys.executable, "-m", "boinc_project.cli", "demo", "--backend", "opencl", "--clients", "stock"]
    command += ["--job", str(job), "--output", str(folder / "output"), "--minutes", str(MINUTES)]
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_CACHE_DIR")}
    made = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60 * MINUTES + 200)
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    assert "demo ok:" in made.stdout and "backend=opencl" in made.stdout
    yield folder / "output"


needs_client = [
    pytest.mark.client,
    pytest.mark.skipif(not stock_client_available(), reason="the stock BOINC client (boinc-client) is not installed"),
    pytest.mark.skipif(not has_processor_device(), reason="no OpenCL driver for processors (Debian: pocl-opencl-icd)"),
    pytest.mark.timeout(60 * MINUTES + 400),
]


class TestTrainedByStockClients:
    pytestmark = needs_client

    def test_every_result_was_computed_with_opencl_and_is_valid(self, demo: Path) -> None:
        with ProjectTree(demo / "project").database() as db, db.read() as connection:
            rows = connection.execute(sa.select(database.result)).mappings().all()
        finished = [row for row in rows if row["outcome"] == int(Outcome.SUCCESS)]
        assert len(finished) >= 2 * 2 * 3
        assert all("backend opencl" in row["stderr_out"] for row in finished)
        assert {row["outcome"] for row in rows} <= {int(Outcome.INIT), int(Outcome.SUCCESS), int(Outcome.DIDNT_NEED)}

    def test_the_loss_falls(self, demo: Path) -> None:
        report = json.loads((demo / "report.json").read_text(encoding="utf-8"))
        losses = [version["loss"] for version in report["versions"] if version["loss"] is not None]
        assert len(losses) == 3 and losses[-1] < losses[0]

    def test_what_was_built_lies_in_the_projects_folder_alone(self, demo: Path) -> None:
        for client in ("client-alice", "client-bob"):
            (cache,) = (demo / client / "projects").glob("*/opencl_cache")
            assert list(cache.glob("selftest-*"))
            assert list((cache / "drivers").iterdir())
            assert not list((demo / client).rglob("slots/*/_MEI*")), "nothing is left in a slot"
