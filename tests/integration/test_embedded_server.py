"""The embedded server over HTTP: accounts, work, uploads, downloads, and its process."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests

from boinc_project import database
from boinc_project.project_tree import ProjectTree
from boinc_project.scripted_volunteer import (
    Behaviour,
    FileInfo,
    ProtocolError,
    ScriptedVolunteer,
    VolunteerTask,
    create_account,
    lookup_account,
    upload_body,
)
from boinc_project.server import uploads
from boinc_project.server.messages import MAX_REQUEST_BYTES
from boinc_project.server.run import LOCK_NAME, EmbeddedServer, ServerError, main
from boinc_project.states import ClientState, Outcome, ServerState, ValidateState
from tests.server_project import add_user, add_workunits, as_host, make_project, publish_app, rows, wire_body


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(make_project(tmp_path / "project").project_dir) as running:
        yield running


@pytest.fixture
def appid(server: EmbeddedServer) -> int:
    return publish_app(server.tree, server.db)


def volunteer(server: EmbeddedServer, folder: Path, name: str, **options: Any) -> ScriptedVolunteer:
    key = add_user(server.db, name)
    return ScriptedVolunteer(server.config.master_url, key, folder / name, name=name, **options)


def wait_for_results(server: EmbeddedServer, count: int) -> list[dict[str, Any]]:
    """The transitioner makes results some tenths of a second after the workunits were inserted."""
    deadline = time.monotonic() + 20
    while len(found := rows(server.db, database.result)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def upper_case(task: VolunteerTask, _slot: Path) -> int:
    task.output_path("out").write_bytes(task.input_path("in").read_bytes().upper())
    return 0


# Work.


@pytest.mark.usefixtures("each_database")
def test_two_volunteers_complete_a_quorum_with_the_downloaded_signed_app(
    server: EmbeddedServer, appid: int, tmp_path: Path
) -> None:
    add_workunits(server.tree, server.db, appid, 1, min_quorum=2, target_nresults=2)
    wait_for_results(server, 2)
    one, two = volunteer(server, tmp_path, "one"), volunteer(server, tmp_path, "two")
    assert one.run_once() == 1
    assert one.run_once() == 0, "the second copy must go to another user"
    assert two.run_once() == 1
    results = rows(server.db, database.result)
    assert [result["outcome"] for result in results] == [Outcome.SUCCESS] * 2
    assert {result["userid"] for result in results} == {1, 2}
    assert all(result["flops_estimate"] == 4e9 for result in results)
    (workunit,) = rows(server.db, database.workunit)
    assert workunit["need_validate"] == 1
    (path,) = server.config.upload_dir.glob(f"*/{results[0]['name']}_r*_0")
    assert path.read_text() == "INPUT 0\n"
    assert path.stat().st_mode & 0o222 == 0, "a complete upload is read-only"


@pytest.mark.usefixtures("each_database")
def test_error_frees_the_workunit_for_the_same_host(server: EmbeddedServer, appid: int, tmp_path: Path) -> None:
    add_workunits(server.tree, server.db, appid, 1)
    wait_for_results(server, 1)
    host = volunteer(server, tmp_path, "one", compute=upper_case, behaviour=Behaviour(exit_status=7))
    assert host.run_once() == 1
    host.behaviour = Behaviour()
    assert host.run_once() == 1
    first, second = rows(server.db, database.result)
    assert (first["outcome"], first["validate_state"]) == (Outcome.CLIENT_ERROR, ValidateState.INVALID)
    assert (first["exit_status"], first["client_state"]) == (7, ClientState.COMPUTE_ERROR)
    assert second["outcome"] == Outcome.SUCCESS


@pytest.mark.usefixtures("each_database")
def test_lost_result_is_sent_again_and_unknown_one_is_aborted(
    server: EmbeddedServer, appid: int, tmp_path: Path
) -> None:
    add_workunits(server.tree, server.db, appid, 1)
    wait_for_results(server, 1)
    host = volunteer(server, tmp_path, "one", compute=upper_case)
    (task,) = host.scheduler_rpc(1, 1).tasks
    again = host.scheduler_rpc(1, 1)  # the client has forgotten it
    assert [each.name for each in again.tasks] == [task.name]
    assert any("Resent lost task" in message for message in again.messages)
    host.queue = [task, replace(task, name="w_0_99")]
    assert host.scheduler_rpc().aborts == ("w_0_99",)
    assert [each.name for each in host.queue] == [task.name]


def test_dry_server_says_when_to_come_again(server: EmbeddedServer, appid: int, tmp_path: Path) -> None:
    reply = volunteer(server, tmp_path, "one").scheduler_rpc(1, 1)
    assert reply.next_rpc_delay == 10
    assert reply.messages == ("Project has no tasks available",)


@pytest.mark.usefixtures("each_database")
def test_in_progress_limit_is_two_per_processor(server: EmbeddedServer, appid: int, tmp_path: Path) -> None:
    add_workunits(server.tree, server.db, appid, 9)
    wait_for_results(server, 9)
    host = volunteer(server, tmp_path, "one", ncpus=3)
    host.queue = list(host.scheduler_rpc(1e6, 0).tasks)
    assert len(host.queue) == 6
    reply = host.scheduler_rpc(1e6, 0)
    assert not reply.tasks
    assert "This computer has reached a limit on tasks in progress" in reply.messages


@pytest.mark.usefixtures("each_database")
def test_one_unsent_result_goes_to_exactly_one_of_twenty_simultaneous_hosts(tmp_path: Path) -> None:
    rounds = 10
    tree = make_project(tmp_path / "project", one_result_per_user_per_wu=0)
    with EmbeddedServer(tree.project_dir) as server:
        appid = publish_app(server.tree, server.db)
        key = add_user(server.db, "one")
        url = server.config.master_url
        hosts = [ScriptedVolunteer(url, key, tmp_path / "data", name=f"host {n}") for n in range(20)]
        for host in hosts:
            host.scheduler_rpc()
        for number in range(rounds):
            add_workunits(server.tree, server.db, appid, 1, prefix=f"r{number}")
            wait_for_results(server, number + 1)
            barrier = threading.Barrier(len(hosts))
            replies: list[Any] = []

            def ask(
                host: ScriptedVolunteer, barrier: threading.Barrier = barrier, replies: list[Any] = replies
            ) -> None:
                barrier.wait()
                replies.append(host.scheduler_rpc(1, 1))

            threads = [threading.Thread(target=ask, args=(host,)) for host in hosts]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            with_work = [reply for reply in replies if reply.tasks]
            assert (len(replies), len(with_work)) == (20, 1)
            for reply in replies:
                if not reply.tasks:
                    assert reply.next_rpc_delay > 0
            (host,) = [host for host in hosts if _holds(server, host, number)]
            host.finished = [host.perform(with_work[0].tasks[0])]
            host.scheduler_rpc()
        assert all(result["outcome"] == Outcome.SUCCESS for result in rows(server.db, database.result))


def _holds(server: EmbeddedServer, host: ScriptedVolunteer, number: int) -> bool:
    (result,) = rows(server.db, database.result, name=f"r{number}_0_0")
    return bool(result["hostid"] == host.hostid and result["server_state"] == ServerState.IN_PROGRESS)


@pytest.mark.usefixtures("each_database")
def test_recorded_requests_of_the_stock_client_are_answered(server: EmbeddedServer, appid: int) -> None:
    key = add_user(server.db, "one")
    add_workunits(server.tree, server.db, appid, 1)
    wait_for_results(server, 1)
    reply = _post(server, as_host(wire_body("scheduler-first-contact.request"), key=key, hostid=0))
    assert "<hostid>1</hostid>" in reply
    assert reply.count("<result>") == 1
    assert "<code_sign_key>\n1024\n" in reply
    for name in ("ten-tasks", "no-work", "two-reported", "many-reported", "compute-error"):
        recorded = f"scheduler-{'reply-' if name == 'ten-tasks' else ''}{name}.request"
        body = as_host(wire_body(recorded), key=key, hostid=1)
        reply = _post(server, body)
        assert reply.startswith("<scheduler_reply>\n") and reply.endswith("</scheduler_reply>\n")
        reported = re.findall(rb"<result>\s*<name>(.*?)</name>", body)
        assert re.findall(r"<result_ack>\s*<name>(.*?)</name>", reply) == [each.decode() for each in reported]
    (result,) = rows(server.db, database.result)
    assert result["server_state"] == ServerState.IN_PROGRESS


def test_wrong_key_garbage_and_stopped_project_are_answered_politely(server: EmbeddedServer) -> None:
    body = as_host(wire_body("scheduler-first-contact.request"), key="0" * 32, hostid=0)
    assert "Invalid or missing account key" in _post(server, body)
    assert "Error in request message" in _post(server, b"garbage")
    (server.tree.project_dir / "stop_sched").touch()
    assert "<project_is_down/>" in _post(server, body)


def test_request_that_is_too_large_is_refused_with_413(server: EmbeddedServer) -> None:
    url = urlsplit(server.config.scheduler_url)
    head = f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: {MAX_REQUEST_BYTES + 1}\r\n\r\n"
    with socket.create_connection((url.hostname, url.port), timeout=30) as link:
        link.sendall(head.encode())
        assert link.recv(100).startswith(b"HTTP/1.1 413")


def test_request_of_too_many_elements_is_told_so(server: EmbeddedServer) -> None:
    body = b"<scheduler_request>\n" + b"<a/>" * 500_000 + b"\n</scheduler_request>\n"
    assert "Error in request message: too many elements" in _post(server, body)


def _post(server: EmbeddedServer, body: bytes) -> str:
    return requests.post(server.config.scheduler_url, data=body, timeout=60).text


# Accounts.


@pytest.mark.usefixtures("each_database")
def test_account_is_created_found_and_protected(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("boinc_project.server.http_rim.BAD_PASSWORD_DELAY_S", 0.01)
    url = server.config.master_url
    key = create_account(url, "a@example.org", "secret", "alice")
    assert lookup_account(url, "a@example.org", "secret") == key
    assert create_account(url, "a@example.org", "secret", "alice") == key
    with pytest.raises(ProtocolError, match="not unique"):
        create_account(url, "a@example.org", "other password", "alice")
    with pytest.raises(ProtocolError, match="Invalid password"):
        lookup_account(url, "a@example.org", "wrong")
    with pytest.raises(ProtocolError, match="Not found"):
        lookup_account(url, "nobody@example.org", "secret")
    (user,) = rows(server.db, database.user)
    assert "secret" not in str(user)
    info = requests.get(url + "am_get_info.php", params={"account_key": key}, timeout=60).text
    assert "<name>alice</name>" in info


# Uploads (field case O15).

CONTENT = hashlib.shake_256(b"upload").digest(1_000_000)


@pytest.fixture
def output(server: EmbeddedServer, appid: int, tmp_path: Path) -> tuple[ScriptedVolunteer, FileInfo]:
    """A volunteer with a task in progress, and the task's output file."""
    add_workunits(server.tree, server.db, appid, 1)
    wait_for_results(server, 1)
    host = volunteer(server, tmp_path, "one")
    (task,) = host.scheduler_rpc(1, 1).tasks
    return host, task.outputs[0].file


def raw_upload(server: EmbeddedServer, body: bytes, declared: int, *, expect: bool = False) -> bytes:
    """Send a POST with this body and Content-Length; returns what was answered."""
    url = urlsplit(server.config.upload_url)
    head = f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: {declared}\r\n"
    head += "Connection: close\r\n"
    if expect:
        head += "Expect: 100-continue\r\n"
    with socket.create_connection((url.hostname, url.port), timeout=30) as link:
        link.sendall(head.encode() + b"\r\n")
        if expect:
            assert link.recv(1000).startswith(b"HTTP/1.1 100")
        link.sendall(body)
        answer = b""
        while piece := link.recv(65536):
            answer += piece
    return answer


def cut_upload(server: EmbeddedServer, file: FileInfo, content: bytes, sent: int) -> None:
    """Upload but break the connection after `sent` bytes of the file; returns when the server noticed."""
    body = upload_body(file, content)
    url = urlsplit(server.config.upload_url)
    head = f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((url.hostname, url.port), timeout=30) as link:
        link.sendall(head.encode() + body[: len(body) - len(content) + sent])
    deadline, folder = time.monotonic() + 20, target(server, file).parent
    while not list(folder.glob("*.part")) or b"<status>0</status>" not in _size_query(server, file.name):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _size_query(server: EmbeddedServer, name: str) -> bytes:
    query = f"<data_server_request>\n<get_file_size>{name}</get_file_size>\n</data_server_request>\n"
    return requests.post(server.config.upload_url, data=query.encode(), timeout=60).content


def target(server: EmbeddedServer, file: FileInfo) -> Path:
    return server.tree.upload_path(file.name)


@pytest.mark.usefixtures("each_database")
def test_cut_upload_resumes_where_it_stopped(
    server: EmbeddedServer, output: tuple[ScriptedVolunteer, FileInfo]
) -> None:
    host, file = output
    cut_upload(server, file, CONTENT, 400_123)
    assert host._uploaded_size(file) == 400_123
    assert not target(server, file).exists()
    assert host.upload_request(file, CONTENT, 500_000)[0] == 1, "an offset beyond what is there must wait"
    assert host._uploaded_size(file) == 400_123
    assert host.upload_request(file, CONTENT, 400_123) == (0, "")
    assert hashlib.sha256(target(server, file).read_bytes()).digest() == hashlib.sha256(CONTENT).digest()
    assert host._uploaded_size(file) == len(CONTENT)


def test_different_bytes_at_a_lower_offset_never_splice(
    server: EmbeddedServer, output: tuple[ScriptedVolunteer, FileInfo]
) -> None:
    host, file = output
    other = CONTENT[::-1]
    cut_upload(server, file, CONTENT, 400_123)
    assert host.upload_request(file, CONTENT, 300_000)[0] == 1
    assert host._uploaded_size(file) == 400_123
    assert host.upload_request(file, other, 300_000)[0] == 1
    host.upload(file, other)
    assert target(server, file).read_bytes() == other


def test_wrong_digest_starts_the_upload_again(
    server: EmbeddedServer, output: tuple[ScriptedVolunteer, FileInfo]
) -> None:
    host, file = output
    body = bytearray(upload_body(file, CONTENT))
    body[-1] ^= 1
    assert _status(raw_upload(server, bytes(body), len(body))) == uploads.Status.TRANSIENT
    assert host._uploaded_size(file) == 0
    host.upload(file, CONTENT)
    assert target(server, file).read_bytes() == CONTENT


def test_second_simultaneous_upload_of_a_name_is_told_to_retry(
    server: EmbeddedServer, output: tuple[ScriptedVolunteer, FileInfo]
) -> None:
    host, file = output
    body = upload_body(file, CONTENT)
    url = urlsplit(server.config.upload_url)
    with socket.create_connection((url.hostname, url.port), timeout=30) as link:
        head = f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
        link.sendall(head.encode() + body[:-1])
        deadline = time.monotonic() + 20
        while not list(target(server, file).parent.glob("*.part")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert host.upload_request(file, CONTENT)[0] == 1
        link.sendall(body[-1:])
        assert _status(link.recv(65536)) == uploads.Status.OK
    assert target(server, file).read_bytes() == CONTENT


@pytest.mark.parametrize("same", [True, False], ids=["one content", "eight contents"])
def test_simultaneous_uploads_of_a_name_leave_one_whole_file(
    server: EmbeddedServer, output: tuple[ScriptedVolunteer, FileInfo], same: bool
) -> None:
    _, file = output
    senders = 8
    contents = [CONTENT[:20_000] if same else CONTENT[each : each + 20_000 + each] for each in range(senders)]
    for number in range(30):
        barrier, answers = threading.Barrier(senders), [b""] * senders

        def work(each: int, barrier: threading.Barrier = barrier, answers: list[bytes] = answers) -> None:
            body = upload_body(file, contents[each])
            cut = len(body) - len(contents[each]) + 2000
            barrier.wait()
            with _connection(server, len(body)) as link:
                link.sendall(body[:cut])
                if each % 3 == 0:
                    time.sleep(0.02)
                link.sendall(body[cut:])
                while piece := link.recv(65536):
                    answers[each] += piece

        threads = [threading.Thread(target=work, args=(each,)) for each in range(senders)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        told = [_status(answer) for answer in answers]
        assert uploads.Status.OK in told, number
        for status, answer in zip(told, answers, strict=True):
            assert status == uploads.Status.OK or b"is being uploaded by another connection" in answer
        path = target(server, file)
        stored = path.read_bytes()
        assert stored in [content for content, status in zip(contents, told, strict=True) if status == 0]
        assert b"<file_size>%d</file_size>" % len(stored) in _size_query(server, file.name)
        assert [each.name for each in path.parent.iterdir()] == [file.name]
        path.unlink()


def _connection(server: EmbeddedServer, declared: int) -> socket.socket:
    """A connection on which an upload of this length has begun."""
    url = urlsplit(server.config.upload_url)
    link = socket.create_connection((url.hostname, url.port), timeout=30)
    link.sendall(
        f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: {declared}\r\n"
        "Connection: close\r\n\r\n".encode()
    )
    return link


def test_short_body_is_not_taken_for_complete(
    server: EmbeddedServer, output: tuple[ScriptedVolunteer, FileInfo]
) -> None:
    host, file = output
    body = upload_body(file, CONTENT)[:-10]
    assert _status(raw_upload(server, body, len(body))) == uploads.Status.TRANSIENT
    assert not target(server, file).exists()
    assert host._uploaded_size(file) == len(CONTENT) - 10


def test_full_part_left_by_a_crash_is_finished_by_the_size_query(
    server: EmbeddedServer, output: tuple[ScriptedVolunteer, FileInfo]
) -> None:
    host, file = output
    cut_upload(server, file, CONTENT, 400_123)
    (part,) = target(server, file).parent.glob("*.part")
    part.write_bytes(CONTENT)  # everything arrived, then the server died before the rename
    assert host._uploaded_size(file) == len(CONTENT)
    assert target(server, file).read_bytes() == CONTENT
    assert not part.exists()


def test_complete_file_is_never_overwritten(server: EmbeddedServer, output: tuple[ScriptedVolunteer, FileInfo]) -> None:
    host, file = output
    host.upload(file, CONTENT)
    assert host.upload_request(file, b"something else")[0] == 0
    assert target(server, file).read_bytes() == CONTENT


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a\0b", "x" * 300, "a%2fb", ""])
def test_bad_names_are_refused_in_upload_and_size_query(
    server: EmbeddedServer, output: tuple[ScriptedVolunteer, FileInfo], name: str
) -> None:
    host, file = output
    assert host.upload_request(replace(file, name=name), b"x")[0] == -1
    assert b"<status>-1</status>" in _size_query(server, name)
    assert not [path for path in server.config.upload_dir.rglob("*") if path.is_file()]


def test_more_bytes_than_signed_are_refused_for_ever(
    server: EmbeddedServer, output: tuple[ScriptedVolunteer, FileInfo]
) -> None:
    host, file = output
    status, message = host.upload_request(file, bytes(2_000_001))
    assert (status, "exceeds the limit" in message) == (-1, True)
    forged = replace(file, max_nbytes=1e12)
    assert host.upload_request(forged, bytes(2_000_001)) == (-1, "invalid signature")
    assert host.upload_request(replace(file, certificate=""), b"x") == (-1, "missing signature")


def test_huge_announced_size_is_refused_without_reading_it(
    server: EmbeddedServer, output: tuple[ScriptedVolunteer, FileInfo]
) -> None:
    _, file = output
    body = upload_body(file, b"x").replace(b"<nbytes>1<", b"<nbytes>4611686018427387904<")
    assert _status(raw_upload(server, body, 1 << 62)) == uploads.Status.PERMANENT


def test_full_disk_is_told_at_the_size_query(
    server: EmbeddedServer,
    output: tuple[ScriptedVolunteer, FileInfo],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host, file = output
    monkeypatch.setattr(uploads.UploadStore, "_free_bytes", lambda _self: 1000)
    with pytest.raises(ProtocolError, match="no disk space"):
        host._uploaded_size(file)


def test_upload_that_waits_for_100_continue_is_accepted(
    server: EmbeddedServer, output: tuple[ScriptedVolunteer, FileInfo]
) -> None:
    _, file = output
    body = upload_body(file, CONTENT)
    assert _status(raw_upload(server, body, len(body), expect=True)) == uploads.Status.OK


def test_stopped_uploads_wait(server: EmbeddedServer, output: tuple[ScriptedVolunteer, FileInfo]) -> None:
    host, file = output
    (server.tree.project_dir / "stop_upload").touch()
    assert host.upload_request(file, CONTENT)[0] == 1


def test_empty_file_is_uploaded(server: EmbeddedServer, output: tuple[ScriptedVolunteer, FileInfo]) -> None:
    host, file = output
    assert host.upload_request(file, b"")[0] == 0
    assert target(server, file).stat().st_size == 0


def test_recorded_upload_of_a_foreign_file_is_refused(server: EmbeddedServer) -> None:
    reply = requests.post(server.config.upload_url, data=wire_body("upload.request"), timeout=60).content
    assert b"<status>-1</status>" in reply


def _status(answer: bytes) -> int:
    found = re.search(rb"<status>(-?\d+)</status>", answer)
    assert found is not None, answer
    return int(found[1])


# Downloads.


def test_downloads_resume_by_range_and_stay_inside_the_folder(server: EmbeddedServer) -> None:
    file = server.tree.stage_file(b"0123456789", "data_1.zst")
    assert requests.get(file.url, timeout=60).content == b"0123456789"
    part = requests.get(file.url, headers={"Range": "bytes=7-"}, timeout=60)
    assert (part.status_code, part.content) == (206, b"789")
    assert "Content-Encoding" not in part.headers
    assert requests.get(file.url, headers={"Range": "bytes=10-"}, timeout=60).status_code == 416
    base = server.config.download_url
    secret = server.tree.project_dir / "config.xml"
    assert secret.exists()
    for path in ("/..%2fconfig.xml", "/%2e%2e/config.xml", "/", "/0/data_1.zst", "/nothing", "/3e%00/x"):
        assert requests.get(base + path, timeout=60).status_code == 404


# The process.


def start_process(tree: ProjectTree) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "boinc_project.server.run", str(tree.project_dir)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while process.poll() is None:
        try:
            requests.get(tree.config.master_url, timeout=5)
            return process
        except requests.ConnectionError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    raise AssertionError(f"the server ended with status {process.returncode}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_server_process_stops_cleanly_on_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    process = start_process(make_project(tmp_path / "project"))
    process.send_signal(number)
    assert process.wait(30) == 0


def test_server_process_stops_on_stop_daemons_and_does_not_start_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = make_project(tmp_path / "project")
    process = start_process(tree)
    (tree.project_dir / "stop_daemons").touch()
    assert process.wait(30) == 0
    assert main([str(tree.project_dir)]) == 2
    assert "stop_daemons" in capsys.readouterr().err


@pytest.mark.usefixtures("each_database")
def test_killed_server_leaves_no_lock_and_no_lost_work(tmp_path: Path) -> None:
    tree = make_project(tmp_path / "project")
    process = start_process(tree)
    with pytest.raises(ServerError, match=f"process {process.pid}"):
        EmbeddedServer(tree.project_dir).start()
    process.kill()
    process.wait(30)
    assert (tree.project_dir / LOCK_NAME).exists()
    with EmbeddedServer(tree.project_dir) as server:
        assert (tree.project_dir / LOCK_NAME).read_text() == f"{os.getpid()}\n"
        assert requests.get(server.config.master_url, timeout=30).status_code == 200


def test_taken_port_is_one_clear_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = make_project(tmp_path / "project")
    port = urlsplit(tree.config.master_url).port
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        assert main([str(tree.project_dir)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: cannot listen on 127.0.0.1 port") and error.count("\n") == 1


def test_folder_without_a_project_is_one_clear_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "config.xml" in capsys.readouterr().err


def test_plain_http_beyond_loopback_needs_an_explicit_word(tmp_path: Path) -> None:
    tree = make_project(tmp_path / "project")
    with pytest.raises(ServerError, match="not encrypted"):
        EmbeddedServer(tree.project_dir, host="0.0.0.0")
