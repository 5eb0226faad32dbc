"""Texts of an admin in BOINC's XML (field case O08): strict parsers and the application see what was given."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lxml import etree

from boinc_project import templates
from boinc_project.project_tree import PublishedFile
from boinc_project.templates import InputReference, OutputReference, TemplateError

COMMAND_LINE = """--note "a&b <c> 'd' é 模" --lr 1e-3"""
FILE = PublishedFile(name="in_1", url="http://h.x/in_1?a&b", md5="0" * 32, nbytes=3, path=Path("in_1"))
PRINTABLE = st.text(st.characters(exclude_categories=["Cc", "Cs", "Cn", "Zl", "Zp"]), max_size=40)


def command_line_of(document: str) -> str:
    """As a strict reader finds it; the client strips the line breaks around it."""
    return (etree.fromstring(f"<x>{document}</x>").findtext("workunit/command_line") or "").strip("\n")


def test_a_command_line_with_everything_in_it_reaches_the_application() -> None:
    document = templates.workunit_document("<workunit/>", [], command_line=COMMAND_LINE).xml_doc
    assert shlex.split(command_line_of(document)) == ["--note", "a&b <c> 'd' é 模", "--lr", "1e-3"]
    in_template = f"<workunit><command_line>{templates.escape(COMMAND_LINE)}</command_line></workunit>"
    assert templates.workunit_document(in_template, []).xml_doc == document


@given(PRINTABLE)
def test_any_printable_command_line_survives(text: str) -> None:
    document = templates.workunit_document("<workunit/>", [], command_line=text).xml_doc
    assert command_line_of(document) == text.strip()
    assert "<workunit>\n" in document, "the scheduler looks for this literally"


@pytest.mark.parametrize(
    "bad", ["\x00", "\x07", "\t", "\n", "\r", "\x1b", "\x7f", "\x85", "\u2028", "\ud800", "\uffff"]
)
def test_characters_that_no_xml_or_command_line_can_hold_are_refused_and_named(bad: str) -> None:
    with pytest.raises(TemplateError) as refused:
        templates.workunit_document("<workunit/>", [], command_line=f"--a {bad} --b")
    assert ascii(bad) in str(refused.value)
    str(refused.value).encode("ascii")


@pytest.mark.parametrize("bad", ["&", "<", ">", '"', "'", " ", "é", "模", "\n", "%", "/", "\ud800"])
def test_a_workunit_name_says_which_character_is_bad(bad: str) -> None:
    with pytest.raises(TemplateError) as refused:
        templates.check_workunit_name(f"gt_a{bad}b")
    assert f"has {bad!a}" in str(refused.value)


@given(PRINTABLE.filter(lambda text: text.strip() and ".." not in text and "%" not in text))
def test_names_of_files_in_templates_are_escaped(name: str) -> None:
    reference = InputReference(open_name=name)
    document = templates.workunit_document(templates.input_template([reference]), [FILE]).xml_doc
    assert (etree.fromstring(f"<x>{document}</x>").findtext("workunit/file_ref/open_name")) == name.strip()
    text = templates.output_template([OutputReference(open_name=name, max_nbytes=1)])
    templates.check_output_template(text)
    found = etree.fromstring(text.encode()).findtext("result/file_ref/open_name")
    assert found == name
