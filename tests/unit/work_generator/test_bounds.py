"""What BOINC is told of a microtask's needs, from the smallest to the largest job (field case O19)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest
from lxml import etree

from boinc_project import store, templates
from boinc_project.database import workunit
from boinc_project.job_folder import JobFacts, Published
from boinc_project.project_tree import PublishedFile
from tests.tiny_project import PROGRAM_PEAK_BYTES, TinyProject, tiny_project
from work_generator.workunits import Forms, make_content

HOST_SPEEDS = (1e6, 1e9, 2.7e12, 1e14, 1e15)  # FLOP/s that a host may claim; 2.7e12: an HD 5870
LEAST_LIMIT_S = 1800.0


@pytest.fixture(scope="module")
def project() -> Iterator[TinyProject]:
    with tiny_project() as made:
        yield made


def row_of(project: TinyProject, program_disk_mb: int = 500, **facts: float) -> dict[str, Any]:
    """The workunit row of slot 0 if the job's facts were these."""
    job = project.job
    workunit_section = dataclasses.replace(job.config.workunit, program_disk_mb=program_disk_mb)
    config = dataclasses.replace(job.config, workunit=workunit_section)
    changed: JobFacts = dataclasses.replace(
        job.facts, **{name: type(getattr(job.facts, name))(value) for name, value in facts.items()}
    )
    state = Published("gt_tiny_state", "0" * 64, "0" * 32, 1000)
    content = make_content(config, changed, 0, 0, state)
    document = PublishedFile(
        name="m.json", url="http://h.x/m.json?a&b", md5="0" * 32, nbytes=500, path=project.tree.project_dir / "m.json"
    )
    return Forms(project.tree, config, changed, 1).row(content, document, name="gt_w", now=1_700_000_000)


def test_the_address_of_every_file_is_escaped(project: TinyProject) -> None:
    document = etree.fromstring(f"<x>{row_of(project)['xml_doc']}</x>")
    assert document.findtext("file_info/url") == "http://h.x/m.json?a&b"


@pytest.mark.parametrize("flops", [1.0, 1e6, 1e12, 1e15, 1e18])
@pytest.mark.parametrize("speed", HOST_SPEEDS)
def test_no_claimed_speed_makes_the_limit_short(project: TinyProject, flops: float, speed: float) -> None:
    row = row_of(project, step_flops=flops)
    limit, expected = row["rsc_fpops_bound"] / speed, row["rsc_fpops_est"] / speed
    assert row["rsc_fpops_est"] >= flops
    assert limit >= LEAST_LIMIT_S and limit >= 10 * expected


@pytest.mark.parametrize("memory", [0, 10**6, 10**9, 10**11])
def test_memory_and_disk_leave_half_as_much_again(project: TinyProject, memory: int) -> None:
    row = row_of(project, memory_bytes=memory, max_update_bytes=memory // 4)
    assert row["rsc_memory_bound"] >= 1.5 * (memory + PROGRAM_PEAK_BYTES)
    checkpoints_and_output = 2 * memory + memory // 4
    assert row["rsc_disk_bound"] >= 1.5 * checkpoints_and_output


def test_a_larger_program_is_given_more_disk(project: TinyProject) -> None:
    usual, large = (row_of(project, program_disk_mb=megabytes)["rsc_disk_bound"] for megabytes in (500, 3000))
    assert large - usual == 2.5e9


def test_numbers_of_any_size_are_written_so_that_boinc_reads_them_back(project: TinyProject) -> None:
    template = templates.input_template([], rsc_fpops_est=1.2345e21, rsc_fpops_bound=1e24, rsc_disk_bound=1e12)
    columns = templates.workunit_document(template, []).columns
    assert columns["rsc_fpops_est"] == 1.2345e21 and columns["rsc_fpops_bound"] == 1e24
    assert "e" not in "".join(re.findall(r"<rsc_\w+>([^<]*)<", template)).lower()


@pytest.mark.parametrize("name", ["rsc_fpops_est", "rsc_fpops_bound", "rsc_disk_bound", "delay_bound"])
def test_a_bound_of_nothing_is_refused_and_named(name: str) -> None:
    document = templates.workunit_document("<workunit/>", [])
    with pytest.raises(templates.TemplateError, match=name):
        templates.new_workunit(document, name="w", appid=1, result_template_file="templates/o", now=1, **{name: 0})


def test_the_output_limit_of_the_job_is_in_the_template_that_results_are_made_from(project: TinyProject) -> None:
    with project.db.read() as connection:
        (job,) = store.jobs(connection)
    text = (project.tree.project_dir / job.facts.output_template).read_text()
    (limit,) = re.findall(r"<max_nbytes>(\d+)</max_nbytes>", text)
    assert int(limit) >= job.facts.max_update_bytes > 0
    assert len(job.facts.output_template) <= workunit.c.result_template_file.type.length
