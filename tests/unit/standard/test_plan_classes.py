"""Names of plan classes decide what BOINC's server and client take them for (field facts of plan_class_spec.xml)."""

from __future__ import annotations

import pytest
from lxml import etree

from boinc_project.standard.plan_classes import CLASSES, PlanClass, processor_of, special_words

# The client's rules (cs_scheduler.cpp): for a version that uses a GPU, the first of these words in its class's name.
CLIENT_WORDS = ("opencl", "cuda", "ati")


@pytest.mark.parametrize("plan_class", CLASSES, ids=lambda each: each.name)
def test_a_class_is_taken_for_the_processor_and_the_library_that_it_is_for(plan_class: PlanClass) -> None:
    assert processor_of(plan_class.name) == plan_class.processor
    assert special_words(plan_class.name) == []
    element = etree.fromstring("\n".join(plan_class.lines()))
    library = next(word for word in CLIENT_WORDS if word in plan_class.name)
    assert element.find(library) is not None, "the client asks for the library that the server asked for"
    assert {element.find(word) is not None for word in CLIENT_WORDS if word != library} == {False}
    gpu_types = {"amd": "ati", "cpu": None}
    assert element.findtext("gpu_type") == gpu_types.get(plan_class.processor, plan_class.processor)
    assert float(element.findtext("gpu_ram_used_mb") or 0) <= float(element.findtext("min_gpu_ram_mb") or 0)
    assert len(plan_class.name) <= 128


@pytest.mark.parametrize(
    ("name", "processor"),
    [
        ("simulation", "amd"), ("native", "amd"), ("station", "amd"), ("camden", "amd"), ("amdahl", "amd"),
        ("cuda_ati", "nvidia"), ("opencl_nvidia_gradient", "nvidia"), ("opencl_cpu", "cpu"), ("", "cpu"),
        ("intel_gpu", "intel_gpu"), ("opencl_ati_gt", "amd"),
    ],
)  # fmt: skip
def test_words_inside_words_count_as_they_do_for_boinc(name: str, processor: str) -> None:
    assert processor_of(name) == processor
