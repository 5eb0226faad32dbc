"""Scheduler requests: what real clients send, and what nobody should."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lxml import etree

from boinc_project.server import messages
from boinc_project.server.messages import (
    MAX_OTHER_RESULTS,
    MAX_REQUEST_BYTES,
    MAX_REQUEST_MARKUP,
    HostPart,
    Message,
    RequestError,
    SchedulerReply,
    UserPart,
    clamped,
    format_reply,
    parse_request,
)
from tests.server_project import WIRE, wire_body

RECORDED = sorted(path.name for path in WIRE.glob("scheduler-*.request"))


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_request_is_understood(name: str) -> None:
    request = parse_request(wire_body(name))
    assert request.core_client_version == 72005
    assert request.platforms == ("x86_64-pc-linux-gnu", "i686-pc-linux-gnu")
    assert re.fullmatch(r"[0-9a-f]{32}", request.authenticator)
    assert request.host.domain_name == "host-a"
    assert request.host.m_nbytes == 25276059648
    assert request.other_results_complete
    assert request.ram_fraction == 0.9
    assert request.wants_work


def test_reported_results_carry_times_files_and_stderr() -> None:
    request = parse_request(wire_body("scheduler-two-reported.request"))
    assert [result.name for result in request.results] == ["x_3_0", "x_1_0"]
    assert request.other_results == {"x_2_0", "x_4_0", "e_1_0"}
    without_peaks, with_peaks = request.results
    assert without_peaks.peak_working_set_size == 0
    assert with_peaks.peak_working_set_size == 3399680
    assert with_peaks.client_state == 5 and with_peaks.exit_status == 0
    assert "called boinc_finish(0)" in with_peaks.stderr_out
    assert "<md5_cksum>209d4bcf19a032f5fb9cad6c98092c52</md5_cksum>" in with_peaks.xml_doc_out


@pytest.mark.parametrize(
    "body",
    [b"", b"garbage", b"<scheduler_request", b"<a/>", b"\xff\xfe", b"<scheduler_request></scheduler_request"],
)
def test_what_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        parse_request(body)


def test_request_cut_anywhere_is_refused() -> None:
    body = wire_body("scheduler-two-reported.request").rstrip()
    for end in range(0, len(body) - 1, 97):
        with pytest.raises(RequestError):
            parse_request(body[:end])


def test_too_long_request_is_refused_before_parsing() -> None:
    with pytest.raises(RequestError, match="longer than"):
        parse_request(b" " * (MAX_REQUEST_BYTES + 1))


def wrapped(inner: str | bytes) -> bytes:
    inner = inner.encode() if isinstance(inner, str) else inner
    return b"<scheduler_request>\n" + inner + b"\n</scheduler_request>\n"


@pytest.mark.parametrize("piece", ["<a/>", "&a;", "<![CDATA[]]>", "<!--->", "<"])
def test_request_of_too_many_elements_is_refused_before_parsing(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = wrapped(piece * (MAX_REQUEST_MARKUP - 1))
    monkeypatch.setattr(messages, "_parse", lambda _body: pytest.fail("was parsed"))
    with pytest.raises(RequestError, match="too many elements"):
        parse_request(body)


def test_report_of_a_thousand_results_with_stderr_is_within_the_bounds() -> None:
    body = wire_body("scheduler-many-reported.request")
    start = body.index(b"<result>")
    end = body.index(b"</result>") + len(b"</result>\n")
    results = b"".join(
        re.sub(rb"<name>.*?</name>", b"<name>x_%d</name>" % n, body[start:end], count=1) for n in range(1000)
    )
    request = parse_request(body[:start] + results + body[end:])
    assert {f"x_{n}" for n in range(900)} <= {result.name for result in request.results}


def test_numbers_are_clamped_and_nan_is_nothing() -> None:
    request = parse_request(
        wrapped(
            "<hostid>-5</hostid><rpc_seqno>1e400</rpc_seqno><work_req_seconds>nan</work_req_seconds>"
            "<cpu_req_secs>inf</cpu_req_secs><host_info><p_ncpus>1e9</p_ncpus><p_fpops>4.3e19</p_fpops>"
            "<m_nbytes>-1</m_nbytes><d_free>x</d_free></host_info>"
            "<result><name>a</name><final_elapsed_time>-5</final_elapsed_time>"
            "<final_cpu_time>nan</final_cpu_time><exit_status>-185</exit_status></result>"
        )
    )
    assert (request.hostid, request.rpc_seqno, request.work_req_seconds) == (0, 2147483647, 0)
    assert request.cpu_req_secs == 1e9
    assert (request.host.p_ncpus, request.host.m_nbytes, request.host.d_free) == (4096, 0, 0)
    (result,) = request.results
    assert (result.elapsed_time, result.cpu_time, result.exit_status) == (0, 0, -185)


def test_entities_are_not_expanded_and_nothing_is_opened() -> None:
    secret = wrapped("<authenticator>&x;</authenticator>")
    for doctype in (
        b'<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]>',
        b'<!DOCTYPE a [<!ENTITY y "yyyyyyyyyy"><!ENTITY x "&y;&y;&y;&y;&y;&y;&y;&y;">]>',
        b'<!DOCTYPE a SYSTEM "http://127.0.0.1:1/x.dtd">',
    ):
        with contextlib.suppress(RequestError):
            assert parse_request(doctype + secret).authenticator == ""


@pytest.mark.parametrize(
    "junk", [b"\x00\x01\x1b", b"\xff\xfe\xe9", "é模\ufffe".encode(), b"a & b < c", b"&#0;&nosuch;", b"]]>"]
)
def test_broken_text_does_not_spoil_the_rest(junk: bytes) -> None:
    body = wrapped(
        b"<authenticator>key</authenticator><host_info><p_model>" + junk + b"</p_model></host_info>"
        b"<result><name>w_0</name><exit_status>1</exit_status><stderr_out><![CDATA[x"
        + junk.replace(b"]]>", b"")
        + b"]]></stderr_out></result>"
    )
    request = parse_request(body)
    assert request.authenticator == "key"
    assert [result.name for result in request.results] == ["w_0"]
    request.results[0].stderr_out.encode()
    assert "\x00" not in request.results[0].stderr_out


def test_texts_and_lists_are_bounded() -> None:
    many = "".join(f"<other_result><name>n{n}</name></other_result>" for n in range(MAX_OTHER_RESULTS + 5))
    request = parse_request(
        wrapped(
            f"<other_results>{many}</other_results><host_info><os_name>{'x' * 9999}</os_name></host_info>"
            f"<result><name>r</name><stderr_out>{'é' * 90000}</stderr_out></result>"
        )
    )
    assert not request.other_results_complete
    assert len(request.host.os_name) == 254
    assert len(request.results[0].stderr_out.encode()) <= 65535


def test_gpus_are_read_with_their_wishes() -> None:
    request = parse_request(
        wrapped(
            "<coprocs><coproc_ati><count>1</count><name>Radeon HD 5800 (Cypress)</name>"
            "<have_cal>1</have_cal><have_opencl>1</have_opencl><req_secs>10</req_secs>"
            "<req_instances>1</req_instances><peak_flops>5.44e12</peak_flops><localRAM>1024</localRAM>"
            "<coproc_opencl><global_mem_size>1073741824</global_mem_size></coproc_opencl></coproc_ati>"
            "<coproc_cuda><count>2</count><have_cuda>1</have_cuda><totalGlobalMem>8e9</totalGlobalMem>"
            "</coproc_cuda><coproc><type>fpga</type><count>3</count></coproc></coprocs>"
        )
    )
    ati, nvidia, other = request.coprocs
    assert (ati.type, ati.memory_bytes, ati.has_opencl, ati.peak_flops) == ("ATI", 1 << 30, True, 5.44e12)
    assert (nvidia.type, nvidia.count, nvidia.has_cuda, nvidia.has_opencl) == ("NVIDIA", 2, True, False)
    assert (other.type, other.count) == ("fpga", 3)
    assert request.wants_work


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_are_answered_or_refused(noise: bytes) -> None:
    for body in (noise, wrapped(noise), wire_body(RECORDED[0])[:500] + noise + b"</scheduler_request>"):
        with contextlib.suppress(RequestError):
            parse_request(body)


@given(st.text(max_size=20))
def test_any_number_text_gives_a_number_in_range(text: str) -> None:
    assert 0 <= clamped(text, 3, 0, 10) <= 10


REPLY = SchedulerReply(
    project_name="D & G",
    master_url="http://127.0.0.1/p/",
    request_delay=7,
    messages=(Message(text='a <b> & "c"\nd\x00'),),
)


def test_reply_is_well_formed_whatever_the_texts() -> None:
    reply = replace(
        REPLY,
        next_rpc_delay=10,
        acks=("w_0", "<&>"),
        user=UserPart(
            id=1,
            name="A & <B>",
            total_credit=0,
            expavg_credit=0,
            create_time=5,
            email_hash="e",
            cross_project_id="c",
            external_cpid="x",
        ),
        host=HostPart(id=3, total_credit=0, expavg_credit=0, venue="", create_time=5),
    )
    root = etree.fromstring(format_reply(reply))
    assert root.findtext("message") == 'a <b> & "c" d?'
    assert [each.text for each in root.iterfind("result_ack/name")] == ["w_0", "<&>"]
    assert (root.findtext("hostid"), root.findtext("user_name")) == ("3", "A & <B>")
    assert root.findtext("next_rpc_delay") == "10.000000"


def test_reply_begins_and_ends_as_the_stock_one() -> None:
    text = format_reply(REPLY).decode()
    stock = wire_body("scheduler-no-work.reply").decode()
    assert text.splitlines()[:2] == stock.splitlines()[:2]
    assert text.endswith("</scheduler_reply>\n")
