"""BOINC's input and output templates, and the XML documents made from them.

Sources: BOINC `tools/process_input_template.cpp` (workunit.xml_doc), `tools/process_result_template.cpp`
and `tools/backend_lib.cpp` (result.xml_doc_in, upload certificates), `tools/create_work.cpp` (defaults and
rules). The scheduler inserts into these documents by plain string search, so their line breaks are part of
the format.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.sax.saxutils import escape

from lxml import etree

from boinc_project import database, signing, states
from boinc_project.project_tree import PublishedFile, check_file_name

#: Bytes that workunit.xml_doc and result.xml_doc_in can hold.
XML_LIMIT = database.BLOB_LIMIT

#: Bytes that workunit.result_template_file, and BOINC's programs, can hold.
TEMPLATE_PATH_LIMIT = 63

#: Characters of a workunit name: result names (191) add `_` and a number.
WORKUNIT_NAME_LIMIT = 180

#: Words with a meaning to BOINC: its scheduler files reported results named after transfers elsewhere, and
#: its file deleter keeps the files of a workunit whose name contains `nodelete`.
_RESERVED_WORDS = ("download", "upload", "nodelete")

_SAFE_WORKUNIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=@~-]*")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
#: Characters that XML cannot hold, or that one line must not: control characters, surrogates, U+FFFE, U+FFFF.
_NOT_IN_A_LINE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]")

#: What create_work uses where neither template nor option gives a value.
_DEFAULTS: Mapping[str, float] = {
    "rsc_fpops_est": 3.6e12,
    "rsc_fpops_bound": 8.64e13,
    "rsc_memory_bound": 5e8,
    "rsc_disk_bound": 1e9,
    "rsc_bandwidth_bound": 0.0,
    "batch": 0,
    "delay_bound": 7 * 86400,
    "min_quorum": 1,
    "target_nresults": 1,
    "max_error_results": 1,
    "max_total_results": 1,
    "max_success_results": 1,
    "size_class": -1,
}
_INTEGER_FIELDS = frozenset(name for name in _DEFAULTS if not name.startswith("rsc_"))


class TemplateError(ValueError):
    """A template, name or value that cannot become a workunit; the message says what to change."""


@dataclass(frozen=True, kw_only=True)
class InputReference:
    """One input file as the template of a workunit names it."""

    open_name: str
    sticky: bool = False  # keep it on the client after the job
    sticky_lifetime: int = 0  # seconds after which a client drops it; 0: no limit
    no_delete: bool = False  # the server's file deleter must leave it (shared inputs)
    copy_file: bool = False  # copied into the slot instead of linked


@dataclass(frozen=True, kw_only=True)
class OutputReference:
    """One output file of a result."""

    open_name: str
    max_nbytes: int
    optional: bool = False
    gzip_when_done: bool = False


@dataclass(frozen=True)
class WorkunitDocument:
    """workunit.xml_doc and the columns that the template sets (resources, deadlines, replication)."""

    xml_doc: str
    columns: Mapping[str, float] = field(default_factory=dict)


# Writing templates.


def input_template(inputs: Sequence[InputReference], **columns: float) -> str:
    """The text of an input template for these files; `columns` as in `_DEFAULTS`, such as `min_quorum`."""
    unknown = sorted(set(columns) - set(_DEFAULTS))
    if unknown:
        raise TemplateError(f"an input template has no element <{unknown[0]}>")
    lines = ["<input_template>"]
    for reference in inputs:
        lines.append("    <file_info>")
        if reference.sticky:
            lines.append("        <sticky/>")
        if reference.sticky_lifetime:
            lines.append(f"        <sticky_lifetime>{reference.sticky_lifetime}</sticky_lifetime>")
        if reference.no_delete:
            lines.append("        <no_delete/>")
        lines.append("    </file_info>")
    lines.append("    <workunit>")
    for reference in inputs:
        lines += ["        <file_ref>", f"            <open_name>{escape(reference.open_name)}</open_name>"]
        if reference.copy_file:
            lines.append("            <copy_file/>")
        lines.append("        </file_ref>")
    for name, value in columns.items():
        text = str(int(value)) if name in _INTEGER_FIELDS else f"{value:f}"
        lines.append(f"        <{name}>{text}</{name}>")
    lines += ["    </workunit>", "</input_template>", ""]
    return "\n".join(lines)


def output_template(outputs: Sequence[OutputReference], *, report_immediately: bool = True) -> str:
    """The text of an output template for these files."""
    lines = ["<output_template>"]
    for number, reference in enumerate(outputs):
        lines += [
            "<file_info>",
            f"    <name><OUTFILE_{number}/></name>",
            "    <generated_locally/>",
            "    <upload_when_present/>",
            f"    <max_nbytes>{reference.max_nbytes}</max_nbytes>",
            "    <url><UPLOAD_URL/></url>",
        ]
        if reference.gzip_when_done:
            lines.append("    <gzip_when_done/>")
        lines.append("</file_info>")
    lines.append("<result>")
    for number, reference in enumerate(outputs):
        lines += [
            "    <file_ref>",
            f"        <file_name><OUTFILE_{number}/></file_name>",
            f"        <open_name>{escape(reference.open_name)}</open_name>",
        ]
        if reference.optional:
            lines.append("        <optional/>")
        lines.append("    </file_ref>")
    if report_immediately:
        lines.append("    <report_immediately/>")
    lines += ["</result>", "</output_template>", ""]
    return "\n".join(lines)


# Input template -> workunit.xml_doc.


def workunit_document(
    template: str,
    files: Sequence[PublishedFile],
    *,
    command_line: str = "",
    lookup: Callable[[str], PublishedFile] | None = None,
) -> WorkunitDocument:
    """Build workunit.xml_doc from an input template and the published files, in the template's order.

    A `<file_info>` with a `<physical_name>` takes its file from `lookup` instead of `files`. The command line
    is XML-escaped here. Raises TemplateError: malformed template, counts that do not match, or a document
    over 65,535 bytes (the message names size and limit).
    """
    root = _parse_template(template)
    infos = root.findall("file_info")
    workunit = root.find("workunit")
    if workunit is None:
        raise TemplateError("the input template has no <workunit> element")
    references = workunit.findall("file_ref")
    if len(infos) != len(references):
        raise TemplateError(
            f"the input template has {len(infos)} <file_info> but {len(references)} <file_ref> elements"
        )
    chosen = _choose_files(infos, files, lookup)
    pieces = [_file_info_xml(info, file) for info, file in zip(infos, chosen, strict=True)]
    pieces.append(_workunit_xml(workunit, references, chosen, command_line))
    xml_doc = "".join(pieces)
    size = len(xml_doc.encode())
    _check_size(size)
    return WorkunitDocument(xml_doc, _columns(workunit))


def _check_size(size: int) -> None:
    if size > XML_LIMIT:
        raise TemplateError(
            f"the workunit's XML would have {size} bytes, but BOINC's database holds {XML_LIMIT}; "
            "use fewer or shorter file names"
        )


def new_workunit(
    document: WorkunitDocument, *, name: str, appid: int, result_template_file: str, now: int, **columns: Any
) -> dict[str, Any]:
    """A complete workunit row to INSERT; the transitioner will make its results from the output template.

    `result_template_file` is relative to the project directory. `columns` override or add (`priority`,
    `batch`, ...). Raises TemplateError for a name or path that BOINC would cut or misread.
    """
    check_workunit_name(name)
    if (size := len(result_template_file.encode())) > TEMPLATE_PATH_LIMIT:
        raise TemplateError(
            f"the output template's path {result_template_file!r} has {size} bytes, "
            f"but BOINC's database holds {TEMPLATE_PATH_LIMIT}; shorten it"
        )
    _check_size(len(document.xml_doc.encode()))
    values = {**document.columns, **columns}
    _check_replication(values)
    return database.new_row(
        database.workunit,
        **{
            **values,
            "name": name,
            "appid": appid,
            "xml_doc": document.xml_doc,
            "result_template_file": result_template_file,
            "create_time": now,
            "transition_time": now,
        },
    )


def check_workunit_name(name: str) -> None:
    """Refuse a workunit name that BOINC or an XML document would mistreat; TemplateError says why."""
    if not name or len(name) > WORKUNIT_NAME_LIMIT:
        raise TemplateError(f"a workunit name needs 1 to {WORKUNIT_NAME_LIMIT} characters, this has {len(name)}")
    if not _SAFE_WORKUNIT_NAME.fullmatch(name) or ".." in name:
        bad = sorted({character for character in name if not _SAFE_WORKUNIT_NAME.fullmatch(f"a{character}")})
        listed = " ".join(ascii(character) for character in bad) or ("'..'" if ".." in name else repr(name[0]))
        raise TemplateError(f"workunit name {name!a} has {listed}: use letters, digits and . _ + = @ ~ - only")
    for word in _RESERVED_WORDS:
        if word in name:
            raise TemplateError(f"workunit name {name!r} must not contain {word!r}: BOINC gives it a meaning")


def _parse_template(template: str) -> etree._Element:
    text = template.strip()
    if not text.startswith("<input_template>"):
        text = f"<input_template>{text}</input_template>"
    parser = etree.XMLParser(resolve_entities=False, no_network=True, remove_comments=True)
    try:
        return etree.fromstring(text.encode(), parser)
    except etree.XMLSyntaxError as error:
        raise TemplateError(f"the input template is not well-formed XML: {error.msg}") from error


def _choose_files(
    infos: Sequence[etree._Element],
    files: Sequence[PublishedFile],
    lookup: Callable[[str], PublishedFile] | None,
) -> list[PublishedFile]:
    constants = [info.findtext("physical_name") for info in infos]
    wanted = sum(1 for constant in constants if not constant)
    if wanted != len(files):
        raise TemplateError(f"the input template needs {wanted} files, {len(files)} were given")
    given = iter(files)
    chosen = []
    for constant in constants:
        if constant and lookup is None:
            raise TemplateError(f"the input template names the constant file {constant}, which is not known here")
        chosen.append(lookup(constant.strip()) if constant and lookup else next(given))
    return chosen


_FILE_INFO_OWN = frozenset({"number", "physical_name", "gzip", "url", "md5_cksum", "nbytes", "gzipped_nbytes"})
_FILE_REF_OWN = frozenset({"open_name", "file_number", "copy_file"})


def _file_info_xml(info: etree._Element, file: PublishedFile) -> str:
    check_file_name(file.name)
    extra = "".join(f"    {_copied(child)}\n" for child in info if child.tag not in _FILE_INFO_OWN)
    return (
        f"<file_info>\n{extra}"
        f"    <name>{file.name}</name>\n"
        f"    <url>{escape(file.url)}</url>\n"
        f"    <md5_cksum>{file.md5}</md5_cksum>\n"
        f"    <nbytes>{file.nbytes}</nbytes>\n"
        "</file_info>\n"
    )


def _workunit_xml(
    workunit: etree._Element,
    references: Sequence[etree._Element],
    files: Sequence[PublishedFile],
    command_line: str,
) -> str:
    in_template = workunit.findtext("command_line")
    if in_template is not None and command_line:
        raise TemplateError("both the input template and the caller give a command line")
    text = (in_template or command_line).strip()
    if bad := _NOT_IN_A_LINE.search(text):
        raise TemplateError(f"a command line must not contain control characters or line breaks, such as {bad[0]!a}")
    lines = ["<workunit>\n"]
    if text:
        lines.append(f"<command_line>\n{escape(text)}\n</command_line>\n")
    for reference, file in zip(references, files, strict=True):
        copy_file = reference.find("copy_file") is not None
        open_name = (reference.findtext("open_name") or "").strip() or (file.name if copy_file else "")
        if not open_name or ".." in open_name or "%" in open_name:
            raise TemplateError(f"file {file.name}: <open_name> {open_name!r} is empty or contains '..' or '%'")
        lines.append(
            f"<file_ref>\n    <file_name>{file.name}</file_name>\n    <open_name>{escape(open_name)}</open_name>\n"
        )
        if copy_file:
            lines.append("    <copy_file/>\n")
        lines += [f"    {_copied(child)}\n" for child in reference if child.tag not in _FILE_REF_OWN]
        lines.append("</file_ref>\n")
    known = {"command_line", "file_ref", "credit", *_DEFAULTS}
    lines += [f"{_copied(child)}\n" for child in workunit if child.tag not in known]
    return "".join(lines) + "</workunit>"


def _copied(element: etree._Element) -> str:
    return etree.tostring(element, encoding="unicode", with_tail=False).strip()


def _columns(workunit: etree._Element) -> dict[str, float]:
    columns: dict[str, float] = {}
    for name, default in _DEFAULTS.items():
        text = (workunit.findtext(name) or "").strip()
        try:
            value = float(text) if text else float(default)
        except ValueError:
            raise TemplateError(f"<{name}> in the input template must be a number, not {text!r}") from None
        columns[name] = int(value) if name in _INTEGER_FIELDS else value
    columns["max_success_results"] = max(columns["max_success_results"], columns["target_nresults"])
    columns["max_total_results"] = max(columns["max_total_results"], columns["target_nresults"])
    return columns


def _check_replication(values: Mapping[str, Any]) -> None:
    for name in ("rsc_fpops_est", "rsc_fpops_bound", "rsc_disk_bound", "target_nresults", "delay_bound"):
        if not values.get(name, 0) > 0:
            raise TemplateError(f"<{name}> must be larger than 0")
    target, success = values["target_nresults"], values["max_success_results"]
    error, total = values["max_error_results"], values["max_total_results"]
    if not (values["min_quorum"] <= target <= success <= total and 0 < error <= total):
        raise TemplateError(
            "replication must satisfy min_quorum <= target_nresults <= max_success_results <= "
            f"max_total_results and max_error_results <= max_total_results, not {values['min_quorum']}, "
            f"{target}, {success}, {total} and {error}"
        )


# Output template -> result.xml_doc_in.

_OUTFILE = re.compile(r"<OUTFILE_(\d+)/>")
_FILE_INFO = re.compile(r"<file_info>.*?</file_info>", re.DOTALL)


def check_output_template(text: str) -> None:
    """Refuse an output template that would break the scheduler or fail every task; TemplateError says how."""
    for literal in ("<file_info>\n", "<result>\n", "</result>", "<OUTFILE_0/>", "<UPLOAD_URL/>"):
        if literal not in text:
            raise TemplateError(f"the output template lacks {literal.strip()} on a line of its own")
    for block in _FILE_INFO.findall(text):
        if not re.search(r"<max_nbytes>\s*[\d.eE+]+\s*</max_nbytes>", block):
            raise TemplateError("a <file_info> of the output template lacks <max_nbytes>: any output is too big")


def result_document(
    template: str, *, result_name: str, random: int, upload_url: str, key: signing.PrivateKey | None
) -> str:
    """result.xml_doc_in from an output template: names and upload URL put in, certificates added with `key`.

    The k-th output file is called `RESULTNAME_r<random>_k`. Raises TemplateError.
    """
    text = template.replace("<output_template>", "").replace("</output_template>", "").strip()
    text = _OUTFILE.sub(lambda match: f"{result_name}_r{random}_{match[1]}", text)
    text = text.replace("<UPLOAD_URL/>", escape(upload_url))
    if key is not None:
        signer = key
        text = _FILE_INFO.sub(lambda match: _certified(match[0], signer), text)
    size = len(text.encode())
    if size > XML_LIMIT:
        raise TemplateError(f"the result's XML would have {size} bytes, BOINC's database holds {XML_LIMIT}")
    return text


def _certified(block: str, key: signing.PrivateKey) -> str:
    name = re.search(r"<name>(.*?)</name>", block, re.DOTALL)
    max_nbytes = re.search(r"<max_nbytes>(.*?)</max_nbytes>", block, re.DOTALL)
    if not name or not max_nbytes:
        raise TemplateError("a <file_info> of the output template lacks <name> or <max_nbytes>")
    certificate = signing.upload_certificate_text(name[1].strip(), float(max_nbytes[1]))
    return block.replace("</file_info>", f"<xml_signature>\n{key.sign(certificate)}</xml_signature>\n</file_info>")


@dataclass(frozen=True)
class OutputFile:
    """An output file as result.xml_doc_in names it."""

    name: str  # physical name, as uploaded
    open_name: str
    optional: bool
    no_validate: bool
    max_nbytes: float
    no_delete: bool


def output_files(xml_doc_in: str) -> tuple[OutputFile, ...]:
    """The output files of a result, in the order of its `<file_ref>` elements."""
    root = _fragment(xml_doc_in)
    infos = {_text(info, "name"): info for info in root.iterfind("file_info")}
    files = []
    for reference in root.iterfind("result/file_ref"):
        name = _text(reference, "file_name")
        info = infos.get(name)
        limit = _text(info, "max_nbytes") if info is not None else ""
        files.append(
            OutputFile(
                name=name,
                open_name=_text(reference, "open_name"),
                optional=reference.find("optional") is not None,
                no_validate=reference.find("no_validate") is not None,
                max_nbytes=float(limit or 0),
                no_delete=info is not None and info.find("no_delete") is not None,
            )
        )
    return tuple(files)


#: A reference as the transitioner writes it: nothing in it needs an XML parser to be understood.
_PLAIN_REFERENCE = re.compile(r"<file_name>([\w.+=@~-]+)</file_name>\s*<open_name>([\w.+=@~-]+)</open_name>", re.ASCII)


def output_name(xml_doc_in: str, open_name: str) -> str | None:
    """Physical name of the output file that the app opens as `open_name`, or None if the result has none."""
    plain = _PLAIN_REFERENCE.findall(xml_doc_in)
    if plain and len(plain) == xml_doc_in.count("<open_name") and "<!" not in xml_doc_in:
        return next((name for name, opened in plain if opened == open_name), None)
    for reference in _fragment(xml_doc_in).iterfind("result/file_ref"):
        if _text(reference, "open_name") == open_name:
            return _text(reference, "file_name")
    return None


@dataclass(frozen=True)
class NamedFile:
    """A file of a workunit's or result's XML, for the file deleter."""

    name: str
    no_delete: bool


def listed_files(xml_doc: str) -> tuple[NamedFile, ...]:
    """Every `<file_info>` of a workunit.xml_doc or result.xml_doc_in."""
    infos = _fragment(xml_doc).iterfind("file_info")
    return tuple(NamedFile(_text(info, "name"), info.find("no_delete") is not None) for info in infos)


class _Parsers(threading.local):
    """A parser for each thread: making one takes longer than reading a result's XML."""

    def __init__(self) -> None:
        self.parser = etree.XMLParser(resolve_entities=False, no_network=True, recover=True)


_parsers = _Parsers()


def _fragment(xml: str) -> etree._Element:
    return etree.fromstring(f"<fragment>{_CONTROL.sub('', xml)}</fragment>".encode(), _parsers.parser)


def _text(element: etree._Element, name: str) -> str:
    return (element.findtext(name) or "").strip()


def unfinished_result(workunit: Mapping[str, Any], *, name: str, now: int, **columns: Any) -> dict[str, Any]:
    """A new UNSENT result row of a workunit (BOINC `tools/backend_lib.cpp`, create_result)."""
    copied = {field: workunit[field] for field in ("appid", "batch", "priority", "size_class")}
    state = states.ServerState.UNSENT if workunit["size_class"] < 0 else states.ServerState.INACTIVE
    return database.new_row(
        database.result,
        **{
            **copied,
            "name": name,
            "workunitid": workunit["id"],
            "server_state": int(state),
            "create_time": now,
        },
        **columns,
    )
