"""The scheduler's messages: a client's request as records, and the reply as the XML that clients parse.

Sources: BOINC `client/cs_scheduler.cpp` (what 7.20.5 sends and reads), `sched/sched_types.cpp` (what the
stock scheduler reads and writes). Requests come from strangers: the parser expands no entity, opens no file
or URL, bounds every list and text, clamps every number, and takes broken XML as far as it can be understood.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from lxml import etree

#: Largest request that is read. Usual ones have 6 to 15 kB; sixty results, each with the longest stderr, 4 MB.
MAX_REQUEST_BYTES = 4 << 20

#: Most `<` and `&` in a request that is parsed. Each can cost the parser some hundred bytes, before anybody
#: knows whose request it is; a client sends some hundreds, and about 30 more for each result that it reports.
MAX_REQUEST_MARKUP = 100_000

#: Most elements of one kind that are taken from a request; the rest is ignored (and reported again).
MAX_REPORTED_RESULTS = 1000
MAX_OTHER_RESULTS = 10000
MAX_PLATFORMS = 16
MAX_COPROCS = 8
MAX_FILES = 10000
MAX_MESSAGES = 100

#: BOINC's columns hold 254 characters of host text, and 65,535 bytes of XML.
_TEXT_LIMIT = 254
_BLOB_LIMIT = 65535

#: Where the end tag must stand: within this many bytes of the end.
_END_BYTES = 256

#: The `<scheduler_version>` sent: that of the source whose behaviour is followed.
SCHEDULER_VERSION = 803

_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
_CONTROL_BYTES = bytes(code for code in range(32) if code not in b"\t\n\r")
_DOCTYPE = re.compile(r"<!(?:DOCTYPE|ENTITY)[^>]*>?", re.IGNORECASE)


class RequestError(ValueError):
    """A request that cannot be understood at all; the message goes into the reply."""


@dataclass(frozen=True, kw_only=True)
class OpenclVersion:
    """What a driver says of an OpenCL device, in the numbers of plan classes; 0 if unknown."""

    version: int = 0  # 100 * major + minor
    revision: int = 0  # AMD's drivers: 100 times the number in parentheses of the version's text


@dataclass(frozen=True, kw_only=True)
class Coprocessor:
    """A GPU type of the host and the work it wants."""

    type: str  # BOINC's name in app versions: NVIDIA, ATI, intel_gpu or another
    count: int = 0
    name: str = ""
    driver: str = ""
    request_seconds: float = 0.0
    request_instances: float = 0.0
    peak_flops: float = 0.0  # as claimed; clamp before use
    memory_bytes: float = 0.0
    has_opencl: bool = False
    has_cuda: bool = False
    has_cal: bool = False
    opencl: OpenclVersion = field(default_factory=lambda: OpenclVersion())
    cal_target: int = 0  # AMD: the chip's number in CAL, 0 if the driver has no CAL
    cuda_version: int = 0  # 1000 * major + 10 * minor, as the driver says
    compute_capability: int = 0  # NVIDIA: 100 * major + minor


@dataclass(frozen=True, kw_only=True)
class HostInfo:
    """The host as it describes itself; field names are the columns of BOINC's `host` table."""

    timezone: int = 0
    domain_name: str = ""
    host_cpid: str = ""
    p_ncpus: int = 1
    p_vendor: str = ""
    p_model: str = ""
    p_fpops: float = 0.0
    p_iops: float = 0.0
    p_membw: float = 0.0
    os_name: str = ""
    os_version: str = ""
    m_nbytes: float = 0.0
    m_cache: float = 0.0
    m_swap: float = 0.0
    d_total: float = 0.0
    d_free: float = 0.0
    product_name: str = ""
    on_frac: float = 1.0
    connected_frac: float = 0.0
    active_frac: float = 1.0
    gpu_active_frac: float = 1.0
    n_bwup: float = 0.0
    n_bwdown: float = 0.0
    d_boinc_used_total: float = 0.0
    d_boinc_used_project: float = 0.0
    d_boinc_max: float = 0.0
    duration_correction_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ReportedResult:
    """A completed result in a request."""

    name: str
    client_state: int = 0
    exit_status: int = 0
    cpu_time: float = 0.0
    elapsed_time: float = 0.0
    app_version_num: int = 0
    peak_working_set_size: float = 0.0
    peak_swap_size: float = 0.0
    peak_disk_usage: float = 0.0
    stderr_out: str = ""
    xml_doc_out: str = ""  # the client's <file_info> elements, verbatim


@dataclass(frozen=True, kw_only=True)
class MessageFromHost:
    """A trickle-up message."""

    result_name: str
    time: int
    variety: str
    text: str


@dataclass(frozen=True, kw_only=True)
class SchedulerRequest:
    """One scheduler RPC, as far as this server uses it."""

    authenticator: str = ""
    hostid: int = 0
    rpc_seqno: int = 0
    core_client_version: int = 0  # 10000 * major + 100 * minor + release
    allow_multiple_clients: bool = False
    dont_send_work: bool = False
    work_req_seconds: float = 0.0
    cpu_req_secs: float = 0.0
    cpu_req_instances: float = 0.0
    platforms: tuple[str, ...] = ()
    code_sign_key: str = ""
    cross_project_id: str = ""
    ram_fraction: float = 1.0  # largest share of the host's RAM that its preferences allow
    host: HostInfo = field(default_factory=HostInfo)
    coprocs: tuple[Coprocessor, ...] = ()
    opencl_cpus: tuple[OpenclVersion, ...] = ()  # OpenCL drivers for the host's processor
    results: tuple[ReportedResult, ...] = ()
    messages: tuple[MessageFromHost, ...] = ()
    other_results: frozenset[str] = frozenset()  # what the client still has, reported ones excluded
    other_results_complete: bool = False  # False: no list was sent, or it was too long to be trusted
    files: tuple[str, ...] = ()  # sticky files on the host
    remote_address: str = ""  # that it came from, as the server saw it (server/remote.py)
    is_repeat: bool = False  # the server itself asks again for work, for a client whose reply is held

    @property
    def wants_work(self) -> bool:
        """Whether the client asks for work for any kind of processor."""
        return not self.dont_send_work and (
            self.work_req_seconds > 0
            or self.cpu_req_secs > 0
            or self.cpu_req_instances > 0
            or any(coproc.request_seconds > 0 or coproc.request_instances > 0 for coproc in self.coprocs)
        )


# Reading requests.


def parse_request(body: bytes) -> SchedulerRequest:
    """Read a scheduler request. Raises RequestError if it is too long or too intricate, or no request at all."""
    if len(body) > MAX_REQUEST_BYTES:
        raise RequestError(f"request of {len(body)} bytes is longer than {MAX_REQUEST_BYTES}")
    if body.count(b"<") + body.count(b"&") > MAX_REQUEST_MARKUP:
        raise RequestError("too many elements")
    if b"</scheduler_request>" not in body[-_END_BYTES:]:
        # The parser would make do with half a request, and work would be given to a client that has gone.
        raise RequestError("no </scheduler_request> at the end")
    root = _parse(body)
    if root is None or root.tag != "scheduler_request":
        raise RequestError("no <scheduler_request> found")
    others = root.find("other_results")
    other_names = _names(others, "other_result", MAX_OTHER_RESULTS + 1) if others is not None else []
    fields = _fields(root)
    return SchedulerRequest(
        authenticator=_text(fields, "authenticator"),
        hostid=_integer(fields, "hostid"),
        rpc_seqno=_integer(fields, "rpc_seqno"),
        core_client_version=_integer(fields, "core_client_major_version", high=1000) * 10000
        + _integer(fields, "core_client_minor_version", high=99) * 100
        + _integer(fields, "core_client_release", high=99),
        allow_multiple_clients=_integer(fields, "allow_multiple_clients") != 0,
        dont_send_work=_integer(fields, "dont_send_work") != 0,
        work_req_seconds=_seconds(fields, "work_req_seconds"),
        cpu_req_secs=_seconds(fields, "cpu_req_secs"),
        cpu_req_instances=_number(fields, "cpu_req_instances", high=10000),
        platforms=_platforms(root, fields),
        code_sign_key=_text(fields, "code_sign_key", 4096),
        cross_project_id=_text(fields, "cross_project_id", 64),
        ram_fraction=_ram_fraction(root),
        host=_host_info(root, fields),
        coprocs=_coprocs(root.find("coprocs")),
        opencl_cpus=_opencl_cpus(root.find("host_info")),
        results=tuple(_reported(each) for each in _first(root, "result", MAX_REPORTED_RESULTS)),
        messages=tuple(_message(each) for each in _first(root, "msg_from_host", MAX_MESSAGES)),
        other_results=frozenset(other_names),
        other_results_complete=others is not None and len(other_names) <= MAX_OTHER_RESULTS,
        files=tuple(_names(root, "file_info", MAX_FILES)),
    )


def _parse(body: bytes) -> etree._Element | None:
    try:
        root: etree._Element | None = etree.fromstring(_decoded(body).encode(), _parsers.parser)
    except etree.XMLSyntaxError:
        return None
    return root


class _Parsers(threading.local):
    """A parser for each thread: making one takes as long as parsing a request."""

    def __init__(self) -> None:
        self.parser = etree.XMLParser(
            resolve_entities=False,
            no_network=True,
            load_dtd=False,
            recover=True,
            remove_comments=True,
            remove_pis=True,
        )


_parsers = _Parsers()


def _decoded(body: bytes) -> str:
    """Clients send UTF-8, Latin-1 or a mixture, and broken apps' stderr: anything becomes clean text."""
    body = body.translate(None, _CONTROL_BYTES)
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        text = body.decode("latin-1")
    # An encoding declaration would contradict the re-encoded text; a document type has no place here.
    text = re.sub(r"^\s*<\?xml[^>]*\?>", "", text[:200], count=1) + text[200:]
    if "<!" in text:
        text = _DOCTYPE.sub("", text)
    return text if text.isascii() else _FORBIDDEN.sub("?", text)


def _first(parent: etree._Element, tag: str, limit: int) -> Iterator[etree._Element]:
    for count, child in enumerate(parent.iterchildren(tag)):
        if count == limit:
            return
        yield child


def _names(parent: etree._Element, tag: str, limit: int) -> list[str]:
    names = (_text(_fields(child), "name") for child in _first(parent, tag, limit))
    return [name for name in names if name]


#: The text of an element's children by tag; of a repeated tag the first counts.
_Fields = Mapping[str, str | None]


def _fields(element: etree._Element) -> _Fields:
    return {str(child.tag): child.text for child in element.iterchildren(reversed=True)}


def _text(fields: _Fields, name: str, limit: int = _TEXT_LIMIT) -> str:
    return (fields.get(name) or "").strip()[:limit]


def _number(fields: _Fields, name: str, default: float = 0.0, low: float = 0.0, high: float = 1e18) -> float:
    return clamped(fields.get(name), default, low, high)


def clamped(text: str | None, default: float = 0.0, low: float = 0.0, high: float = 1e18) -> float:
    """A client's number: `default` if absent, unreadable or NaN, else forced into [low, high]."""
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        return default
    return default if math.isnan(value) else min(max(value, low), high)


def _integer(fields: _Fields, name: str, default: int = 0, low: int = 0, high: int = 2147483647) -> int:
    return int(_number(fields, name, default, low, high))


def _seconds(fields: _Fields, name: str) -> float:
    return _number(fields, name, high=1e9)


def _platforms(root: etree._Element, fields: _Fields) -> tuple[str, ...]:
    names = [_text(fields, "platform_name"), *_names(root, "alt_platform", MAX_PLATFORMS)]
    return tuple(dict.fromkeys(name for name in names if name))


def _ram_fraction(root: etree._Element) -> float:
    path = "working_global_preferences/global_preferences/ram_max_used_"
    return max(clamped(root.findtext(f"{path}{when}_pct"), 100, 0, 100) for when in ("busy", "idle")) / 100


def _host_info(root: etree._Element, fields: _Fields) -> HostInfo:
    """The `<host_info>`, with what the host table keeps of the time, network and disk statistics."""

    def section(name: str) -> _Fields:
        found = root.find(name)
        return {} if found is None else _fields(found)

    info, times = section("host_info"), section("time_stats")
    net, disk = section("net_stats"), section("disk_usage")
    return HostInfo(
        timezone=_integer(info, "timezone", low=-86400, high=86400),
        domain_name=_text(info, "domain_name"),
        host_cpid=_text(info, "host_cpid"),
        p_ncpus=_integer(info, "p_ncpus", 1, 1, 4096),
        p_vendor=_text(info, "p_vendor"),
        p_model=_text(info, "p_model"),
        p_fpops=_number(info, "p_fpops"),
        p_iops=_number(info, "p_iops"),
        p_membw=_number(info, "p_membw"),
        os_name=_text(info, "os_name"),
        os_version=_text(info, "os_version"),
        m_nbytes=_number(info, "m_nbytes"),
        m_cache=_number(info, "m_cache"),
        m_swap=_number(info, "m_swap"),
        d_total=_number(info, "d_total"),
        d_free=_number(info, "d_free"),
        product_name=_text(info, "product_name"),
        on_frac=_number(times, "on_frac", 1.0, 0.0, 1.0),
        connected_frac=_number(times, "connected_frac", 0.0, -1.0, 1.0),
        active_frac=_number(times, "active_frac", 1.0, 0.0, 1.0),
        gpu_active_frac=_number(times, "gpu_active_frac", 1.0, 0.0, 1.0),
        n_bwup=_number(net, "bwup"),
        n_bwdown=_number(net, "bwdown"),
        d_boinc_used_total=_number(disk, "d_boinc_used_total"),
        d_boinc_used_project=_number(disk, "d_boinc_used_project"),
        d_boinc_max=_number(disk, "d_project_share"),
        duration_correction_factor=_number(fields, "duration_correction_factor", 1.0, 0.01, 100.0),
    )


_COPROC_TYPES = {"coproc_cuda": "NVIDIA", "coproc_ati": "ATI", "coproc_intel_gpu": "intel_gpu"}


def _coprocs(parent: etree._Element | None) -> tuple[Coprocessor, ...]:
    if parent is None:
        return ()
    found: dict[str, Coprocessor] = {}
    for element in list(parent.iterchildren(*_COPROC_TYPES, "coproc"))[:MAX_COPROCS]:
        kind = _COPROC_TYPES.get(str(element.tag)) or _text(_fields(element), "type", 64)
        if kind:
            found.setdefault(kind, _coproc(kind, element))
    return tuple(found.values())


def _coproc(kind: str, element: etree._Element) -> Coprocessor:
    fields = _fields(element)
    opencl = element.find("coproc_opencl")
    memory = max(
        _number(fields, "totalGlobalMem"),
        _number(fields, "localRAM") * (1 << 20),  # AMD: in MB
        _number(_fields(opencl), "global_mem_size") if opencl is not None else 0.0,
    )
    return Coprocessor(
        type=kind,
        count=_integer(fields, "count", 0, 0, 1024),
        name=_text(fields, "name"),
        driver=_driver(fields, opencl),
        request_seconds=_seconds(fields, "req_secs"),
        request_instances=_number(fields, "req_instances", high=1024),
        peak_flops=_number(fields, "peak_flops"),
        memory_bytes=memory,
        has_opencl=_integer(fields, "have_opencl") != 0 or opencl is not None,
        has_cuda=_integer(fields, "have_cuda") != 0,
        has_cal=_integer(fields, "have_cal") != 0,
        opencl=_opencl_version(opencl),
        cal_target=_integer(fields, "target"),
        cuda_version=_integer(fields, "cudaVersion"),
        compute_capability=100 * _integer(fields, "major", high=1000) + _integer(fields, "minor", high=99),
    )


def _driver(fields: _Fields, opencl: etree._Element | None) -> str:
    """The driver's version, as BOINC's lib/coproc.cpp (summary_string_json) chooses it."""
    own = _text(fields, "drvVersion", 64) or _text(fields, "CALVersion", 64)
    return own or ("" if opencl is None else _text(_fields(opencl), "opencl_driver_version", 64))


def _opencl_cpus(host_info: etree._Element | None) -> tuple[OpenclVersion, ...]:
    if host_info is None:
        return ()
    found = (each.find("opencl_cpu_info") for each in _first(host_info, "opencl_cpu_prop", MAX_COPROCS))
    return tuple(_opencl_version(each) for each in found if each is not None)


def _opencl_version(element: etree._Element | None) -> OpenclVersion:
    """From texts such as `OpenCL 1.2 AMD-APP (1084.4)`, as BOINC's lib/opencl_boinc.cpp reads them."""
    text = "" if element is None else _text(_fields(element), "opencl_device_version")
    version = re.match(r"OpenCL (\d{1,3})\.(\d{1,3})", text)
    revision = re.search(r"\((\d{1,7}(?:\.\d{1,7})?)[^(]*$", text)
    return OpenclVersion(
        version=100 * int(version[1]) + int(version[2]) if version else 0,
        revision=round(100 * float(revision[1])) if revision else 0,
    )


def _reported(element: etree._Element) -> ReportedResult:
    files = "".join(
        etree.tostring(info, encoding="unicode", with_tail=False).strip() + "\n"
        for info in _first(element, "file_info", 1000)
    )
    fields = _fields(element)
    return ReportedResult(
        name=_text(fields, "name"),
        client_state=_integer(fields, "state", high=100),
        exit_status=_integer(fields, "exit_status", low=-2147483648),
        cpu_time=_number(fields, "final_cpu_time", high=1e10),
        elapsed_time=_number(fields, "final_elapsed_time", high=1e10),
        app_version_num=_integer(fields, "app_version_num"),
        peak_working_set_size=_number(fields, "final_peak_working_set_size"),
        peak_swap_size=_number(fields, "final_peak_swap_size"),
        peak_disk_usage=_number(fields, "final_peak_disk_usage"),
        stderr_out=cut_bytes(_inner(element.find("stderr_out"))),
        xml_doc_out=cut_bytes(files),
    )


def _inner(element: etree._Element | None) -> str:
    """The text and markup inside an element (stderr_out has a version element, then a CDATA section)."""
    if element is None:
        return ""
    pieces = [element.text or ""]
    for child in element:
        pieces.append(etree.tostring(child, encoding="unicode", with_tail=False))
        pieces.append(child.tail or "")
    return "".join(pieces).strip()


def cut_bytes(text: str, limit: int = _BLOB_LIMIT) -> str:
    """The beginning of `text` that fits in a blob column."""
    data = text.encode()
    return text if len(data) <= limit else data[:limit].decode("utf-8", "ignore")


def _message(element: etree._Element) -> MessageFromHost:
    fields = _fields(element)
    return MessageFromHost(
        result_name=_text(fields, "result_name"),
        time=_integer(fields, "time"),
        variety=_text(fields, "variety"),
        text=cut_bytes(_inner(element.find("text"))),
    )


# Writing replies.


@dataclass(frozen=True, kw_only=True)
class Message:
    """A line for the volunteer's event log; `notice` ones also show in the Manager."""

    text: str
    priority: str = "low"  # or "notice"


@dataclass(frozen=True, kw_only=True)
class UserPart:
    """What a reply tells about the account."""

    id: int
    name: str
    total_credit: float
    expavg_credit: float
    create_time: int
    email_hash: str
    cross_project_id: str
    external_cpid: str
    team_name: str = ""


@dataclass(frozen=True, kw_only=True)
class HostPart:
    """What a reply tells about the host. `id` only when it is new to the client: the client then starts its
    request numbers again and may give itself a new identity."""

    id: int | None
    total_credit: float
    expavg_credit: float
    venue: str
    create_time: int


@dataclass(frozen=True, kw_only=True)
class AppPart:
    name: str
    user_friendly_name: str
    non_cpu_intensive: int = 0
    fraction_done_exact: int = 0


@dataclass(frozen=True, kw_only=True)
class SchedulerReply:
    """One scheduler reply; XML fragments (`app_versions`, `workunits`, `results`) are complete elements."""

    project_name: str
    master_url: str
    request_delay: float
    next_rpc_delay: float = 0.0
    messages: tuple[Message, ...] = ()
    project_is_down: bool = False
    user: UserPart | None = None
    host: HostPart | None = None
    acks: tuple[str, ...] = ()
    aborts: tuple[str, ...] = ()
    aborts_if_not_started: tuple[str, ...] = ()
    message_ack: bool = False
    apps: tuple[AppPart, ...] = ()
    app_versions: tuple[str, ...] = ()
    workunits: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    code_sign_key: str = ""


def format_reply(reply: SchedulerReply) -> bytes:
    """The reply's bytes, one element a line, as the stock scheduler writes them."""
    lines = [
        "<scheduler_reply>",
        f"<scheduler_version>{SCHEDULER_VERSION}</scheduler_version>",
        "<dont_use_dcf/>",
        f"<master_url>{escape(reply.master_url)}</master_url>",
        f"<request_delay>{reply.request_delay:f}</request_delay>",
    ]
    if reply.next_rpc_delay > 0:
        lines.append(f"<next_rpc_delay>{reply.next_rpc_delay:f}</next_rpc_delay>")
    for message in reply.messages:
        lines.append(f'<message priority="{message.priority}">{_line(message.text)}</message>')
    lines.append(f"<project_name>{escape(reply.project_name)}</project_name>")
    if reply.project_is_down:
        lines.append("<project_is_down/>")
    if reply.user is not None:
        lines += _user_lines(reply.user)
    if reply.host is not None:
        lines += _host_lines(reply.host)
    if reply.user is not None:
        lines.append(f"<team_name>{escape(reply.user.team_name)}</team_name>")
    lines += _named("result_ack", reply.acks)
    lines += _named("result_abort", reply.aborts)
    lines += _named("result_abort_if_not_started", reply.aborts_if_not_started)
    for app in reply.apps:
        lines += _app_lines(app)
    lines += [fragment.rstrip("\n") for fragment in (*reply.app_versions, *reply.workunits, *reply.results)]
    if reply.code_sign_key:
        lines.append(f"<code_sign_key>\n{reply.code_sign_key.strip()}\n</code_sign_key>")
    if reply.message_ack:
        lines.append("<message_ack/>")
    lines += ["</scheduler_reply>", ""]
    return "\n".join(lines).encode("utf-8", "replace")


def _line(text: str) -> str:
    return escape(" ".join(_FORBIDDEN.sub("?", text).split()))


def _user_lines(user: UserPart) -> list[str]:
    return [
        f"<userid>{user.id}</userid>",
        f"<user_name>{escape(user.name)}</user_name>",
        f"<user_total_credit>{user.total_credit:f}</user_total_credit>",
        f"<user_expavg_credit>{user.expavg_credit:f}</user_expavg_credit>",
        f"<user_create_time>{user.create_time}</user_create_time>",
        f"<email_hash>{user.email_hash}</email_hash>",
        f"<cross_project_id>{escape(user.cross_project_id)}</cross_project_id>",
        f"<external_cpid>{user.external_cpid}</external_cpid>",
    ]


def _host_lines(host: HostPart) -> list[str]:
    lines = [] if host.id is None else [f"<hostid>{host.id}</hostid>"]
    return [
        *lines,
        f"<host_total_credit>{host.total_credit:f}</host_total_credit>",
        f"<host_expavg_credit>{host.expavg_credit:f}</host_expavg_credit>",
        f"<host_venue>{escape(host.venue)}</host_venue>",
        f"<host_create_time>{host.create_time}</host_create_time>",
    ]


def _named(tag: str, names: Sequence[str]) -> list[str]:
    return [f"<{tag}>\n    <name>{escape(name)}</name>\n</{tag}>" for name in names]


def _app_lines(app: AppPart) -> list[str]:
    return [
        "<app>",
        f"    <name>{escape(app.name)}</name>",
        f"    <user_friendly_name>{escape(app.user_friendly_name)}</user_friendly_name>",
        f"    <non_cpu_intensive>{app.non_cpu_intensive}</non_cpu_intensive>",
        f"    <fraction_done_exact>{app.fraction_done_exact}</fraction_done_exact>",
        "</app>",
    ]
