"""Codecs through the whole product: the application encodes, the server decodes, validator and assimilator go on."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assimilator.replay import replay
from boinc_project import local_run
from boinc_project.contract.codecs import KINDS, CodecSeed
from boinc_project.contract.microtask import Microtask
from boinc_project.contract.update import ENCODED_PREFIXES, Update, read_update, update_types
from boinc_project.job_config import CodecSection
from tests.tiny_project import tiny_project
from work_generator.export import ExportedJob, export_job
from work_generator.job import Job
from work_generator.publish import local_content

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits"
SECTIONS = [CodecSection(kind=kind) for kind in KINDS] + [
    CodecSection(kind="random-k", share=0.1, values="fp4"),
    CodecSection(kind="top-k", share=0.1, values="int8"),
    CodecSection(kind="low-rank", iterations=0),
]


@functools.cache
def digits() -> tuple[Job, ExportedJob]:
    job = Job.load(DIGITS / "job.toml")
    return job, export_job(job)


def ran(section: CodecSection, folder: Path) -> tuple[Microtask, Update]:
    """The second microtask of the example with this codec, run in a process of its own as `boinc-train run` does."""
    job, made = digits()
    job = replace(job, config=replace(job.config, codec=section))
    microtask, files = local_content(job, made, 1, folder / "published")
    types = update_types(made.gradient, microtask.mode, microtask.steps)
    return microtask, local_run.start(folder / "slot", microtask, files).update(types)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Update:
    pytest.importorskip("sklearn")
    return ran(CodecSection(), tmp_path_factory.mktemp("dense"))[1]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda each: f"{each.kind}-{each.values}-{each.iterations}")
def test_the_example_runs_with_each_codec_and_the_server_decodes_what_the_volunteer_encoded(
    section: CodecSection, exact: Update, tmp_path: Path
) -> None:
    microtask, update = ran(section, tmp_path)
    coded = {name: a for name, a in exact.tensors.items() if name.startswith(ENCODED_PREFIXES)}
    types = {n: t for n, t in update_types(digits()[1].gradient, "gradient", 4).items() if n in coded}
    codec = section.codec().seeded(CodecSeed(microtask.seed, microtask.base_version, microtask.slot))
    expected = codec.decode(codec.encode(coded), types)
    for name, array in exact.tensors.items():
        np.testing.assert_allclose(update.tensors[name], expected.get(name, array), rtol=1e-4, atol=1e-6, err_msg=name)


def test_versions_are_made_of_masked_updates_and_replayed_to_the_same_bytes() -> None:
    with tiny_project("random_k.toml") as project:
        project.make_version()
        project.make_version()
        assert list(replay(project.db, project.job).values()) == project.version_digests()


def test_each_slot_of_a_round_has_a_mask_of_its_own_which_all_its_copies_share() -> None:
    with tiny_project("random_k.toml") as project:
        masks: dict[str, Any] = {}
        for result in project.issue():
            unit = project.unit_of(result)
            microtask = project.microtask_of(str(unit["name"]))
            types = update_types(project.job.folder.gradient_graph, microtask.mode, microtask.steps)
            found = read_update(project.honest_update(unit), types, microtask.codec, microtask.digest()).tensors
            largest = max((n for n in found if n.startswith("delta/")), key=lambda name: found[name].size)
            masks.setdefault(str(unit["name"]), []).append((found[largest] != 0).tobytes())
        assert [len(set(each)) for each in masks.values()] == [1, 1]
        assert len({each[0] for each in masks.values()}) == 2
