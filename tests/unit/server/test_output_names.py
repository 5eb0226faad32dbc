"""The name of an uploaded file is found in a result's XML, however the server that made the result wrote it."""

from __future__ import annotations

import pytest

from boinc_project.templates import output_name

INFO = "<file_info>\n    <name>wu_0_r1_0</name>\n    <max_nbytes>1e6</max_nbytes>\n</file_info>\n"


def document(*references: str) -> str:
    return f"{INFO}<result>\n{''.join(references)}</result>\n"


def reference(name: str, opened: str) -> str:
    return (
        f"    <file_ref>\n        <file_name>{name}</file_name>\n        <open_name>{opened}</open_name>\n"
        "    </file_ref>\n"
    )


@pytest.mark.parametrize(
    ("xml", "found"),
    [
        (document(reference("wu_0_r1_0", "update.safetensors")), "wu_0_r1_0"),
        (document(reference("log", "log.txt"), reference("wu_0_r1_1", "update.safetensors")), "wu_0_r1_1"),
        (document(reference("log", "log.txt")), None),
        (document("<file_ref><file_name> a_0 </file_name><copy_file/><open_name>update.safetensors</open_name>"
                  "</file_ref>"), "a_0"),
        (document("<file_ref><open_name>update.safetensors</open_name><file_name>b_0</file_name></file_ref>"), "b_0"),
        (document("<!-- ", reference("old_0", "update.safetensors"), "-->"), None),
        (document(reference("x&amp;y", "update.safetensors")), "x&y"),
        (document(reference("log", "log.txt"), "<file_ref><file_name>c_0</file_name><optional/>"
                  "<open_name>update.safetensors</open_name></file_ref>"), "c_0"),
        ("", None),
    ],
)  # fmt: skip
def test_an_output_is_found_by_the_name_that_the_app_opens(xml: str, found: str | None) -> None:
    assert output_name(xml, "update.safetensors") == found
