"""Mistakes of an admin: each one sentence that says what to do, exit status 2, no traceback, nothing lost."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import sqlalchemy as sa
from click.testing import CliRunner, Result

from boinc_project.app_versions import update_versions
from boinc_project.cli.demo import MARKER
from boinc_project.cli.main import main
from boinc_project.contract.opset import OPSET
from boinc_project.database import app_version
from boinc_project.processes import PID_FILE
from boinc_project.project_tree import ProjectTree
from boinc_project.server.run import LOCK_NAME, EmbeddedServer, free_port
from tests.tiny_project import TINY_JOB, TinyProject, tiny_project, volunteer_environment


@pytest.fixture
def project() -> Iterator[TinyProject]:
    with tiny_project() as made:
        yield made


@pytest.fixture
def job_folder(tmp_path: Path) -> Path:
    """A copy of the tiny job's folder, under another name."""
    folder = tmp_path / "job"
    shutil.copytree(TINY_JOB, folder)
    edit(folder / "job.toml", 'name = "tiny"', 'name = "second"')
    return folder


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def boinc_train(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


def mistake(found: Result, *parts: str) -> None:
    """Exit status 2 and one sentence that contains all the parts."""
    assert found.exit_code == 2, (found.output, found.exception)
    lines = [line for line in found.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("boinc-train: "), found.stderr
    for part in parts:
        assert part in lines[0]
    assert "Traceback" not in found.output


def create(project: TinyProject, job_folder: Path) -> Result:
    return boinc_train("job", "create", job_folder / "job.toml", "--project", project.tree.project_dir)


def test_bad_toml_names_file_and_line(project: TinyProject, job_folder: Path) -> None:
    edit(job_folder / "job.toml", "batch_size = 16", "batch_size = = 16")
    mistake(create(project, job_folder), "job.toml line 14", "correct that line")


def test_unknown_key_names_the_line_and_what_was_meant(project: TinyProject, job_folder: Path) -> None:
    edit(job_folder / "job.toml", "batch_size = 16", "batchsize = 16")
    mistake(create(project, job_folder), "line 14", "batchsize", "batch_size")


def test_missing_data_say_which_file_to_create(project: TinyProject, job_folder: Path) -> None:
    edit(job_folder / "job.toml", 'source = "tiny:data"', 'source = "nowhere:data"')
    mistake(create(project, job_folder), "nowhere.py", "does not exist")


def test_data_source_that_cannot_read_its_file_names_the_admin_s_line(project: TinyProject, job_folder: Path) -> None:
    edit(job_folder / "tiny.py", "    generator = ", '    np.load("missing.npy")\n    generator = ')
    mistake(create(project, job_folder), "tiny.py:25", "missing.npy")


def test_missing_job_file_is_named(project: TinyProject, tmp_path: Path) -> None:
    found = boinc_train("job", "create", tmp_path / "none.toml", "--project", project.tree.project_dir)
    mistake(found, "none.toml")


def test_model_that_raises_names_the_admin_s_line(project: TinyProject, job_folder: Path) -> None:
    edit(job_folder / "tiny.py", "    return nn.Sequential", "    1 / 0\n    return nn.Sequential")
    mistake(create(project, job_folder), "tiny.py:10", "ZeroDivisionError")


def test_loss_that_raises_names_the_admin_s_line(project: TinyProject, job_folder: Path) -> None:
    edit(job_folder / "tiny.py", 'batch["y"], reduction', 'batch["z"], reduction')
    mistake(create(project, job_folder), "tiny.py:15", "KeyError")


def test_unsupported_operator_is_named_with_the_model_s_line(project: TinyProject, job_folder: Path) -> None:
    edit(job_folder / "tiny.py", 'F.cross_entropy(model(batch["x"])', 'F.cross_entropy(model(batch["x"].erfinv())')
    mistake(create(project, job_folder), "erfinv", "tiny.py:15")
    assert [job.name for job in _jobs(project)] == ["tiny"], "no half-made job is left"


def test_job_name_that_exists_asks_for_another(project: TinyProject, job_folder: Path) -> None:
    edit(job_folder / "job.toml", 'name = "second"', 'name = "tiny"')
    mistake(create(project, job_folder), "already has a job 'tiny'", "choose another name")


def _jobs(project: TinyProject) -> list[Any]:
    from boinc_project import store

    with project.db.read() as connection:
        return store.jobs(connection)


def test_port_taken_says_to_choose_another(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        mistake(boinc_train("serve", tmp_path / "project", "--port", port), f"port {port}", "--port")
    assert not (tmp_path / "project").exists()


def test_port_of_an_existing_project_taken_stops_at_once(project: TinyProject) -> None:
    port = int(project.tree.config.master_url.split(":")[2].split("/")[0])
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        mistake(serve(project), str(port))


def serve(project: TinyProject) -> Result:
    url = project.tree.config.master_url
    port = url.split(":")[2].split("/")[0]
    return boinc_train("serve", project.tree.project_dir, "--port", port, "--url", url, "--no-daemons")


def test_disk_path_missing_says_to_create_it(tmp_path: Path, project: TinyProject) -> None:
    mistake(boinc_train("serve", tmp_path / "no" / "such" / "project"), "does not exist", "create it")
    mistake(boinc_train("job", "list", "--project", tmp_path / "no"), "no BOINC project")
    output = tmp_path / "no" / "weights.safetensors"
    mistake(boinc_train("weights", "tiny", "--output", output, "--project", project.tree.project_dir), "does not exist")
    mistake(boinc_train("demo", "--output", tmp_path / "no" / "demo"), "does not exist")
    mistake(boinc_train("export", TINY_JOB / "job.toml", "--output", tmp_path / "no" / "graphs"), "does not exist")


def test_demo_does_not_empty_a_folder_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    mistake(boinc_train("demo", "--output", tmp_path), "not from an earlier demo")
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(("options", "words"), [(["--job", "nowhere"], "no job file"), (["--minutes", "0"], "minutes")])
def test_a_mistyped_demo_costs_nothing_of_an_earlier_one(tmp_path: Path, options: list[str], words: str) -> None:
    output = tmp_path / "demo"
    output.mkdir()
    (output / MARKER).touch()
    (output / "weights.safetensors").write_text("of an earlier demo")
    mistake(boinc_train("demo", "--output", output, "--clients", "scripted", *options), words)
    assert (output / "weights.safetensors").read_text() == "of an earlier demo"


@pytest.mark.parametrize("name", ["nonsense", "opencl_nvida_gt"])
def test_a_plan_class_that_nothing_defines_is_refused_before_anything_is_built(project: TinyProject, name: str) -> None:
    found = boinc_train("build-app", "--project", project.tree.project_dir, "--plan-class", name)
    mistake(found, f"no plan class '{name}'", "opencl_nvidia_gt")


def test_a_target_that_no_evaluation_tells_is_refused(project: TinyProject, job_folder: Path) -> None:
    edit(
        job_folder / "job.toml",
        "evaluate_every = 0",
        'evaluate_every = 1\ntarget_metric = "recall"\ntarget_value = 0.9',
    )
    mistake(create(project, job_folder), 'target_metric "recall"', "accuracy", "loss")


def test_two_servers_on_one_database_name_the_first_one(project: TinyProject) -> None:
    with EmbeddedServer(project.tree.project_dir):
        found = serve(project)
        mistake(found, "server", str(os.getpid()))


def test_a_second_starter_names_the_process_to_stop(project: TinyProject) -> None:
    port = project.tree.config.master_url.split(":")[2].split("/")[0]
    url = project.tree.config.master_url
    command = [sys.executable, "-m", "boinc_project.cli", "serve", str(project.tree.project_dir)]
    command += ["--port", port, "--url", url]
    first = subprocess.Popen(
        [*command, "--no-daemons"], env=volunteer_environment(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    assert first.stderr is not None
    try:
        deadline = time.monotonic() + 60
        while not (project.tree.project_dir / PID_FILE).exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        second = subprocess.run(command, env=volunteer_environment(), capture_output=True, text=True, timeout=60)
        assert second.returncode == 2
        assert second.stderr.strip() == (
            f"boinc-train: process {first.pid} already serves {project.tree.project_dir};"
            f" stop it first (kill {first.pid})"
        )
    finally:
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=60)
    assert first.returncode == 0
    assert not (project.tree.project_dir / PID_FILE).exists()


def test_stale_locks_of_dead_processes_are_taken_over(project: TinyProject) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (project.tree.project_dir / PID_FILE).write_text(f"{dead.pid} 1.0\n")
    (project.tree.project_dir / LOCK_NAME).write_text(f"{dead.pid}\n")
    with EmbeddedServer(project.tree.project_dir):
        pass
    from boinc_project.processes import only_starter

    with only_starter(project.tree.project_dir):
        assert (project.tree.project_dir / PID_FILE).read_text().split()[0] == str(os.getpid())


def test_lock_file_with_a_reused_process_id_is_stale(project: TinyProject) -> None:
    from boinc_project.processes import only_starter

    path = project.tree.project_dir / PID_FILE
    for text in (f"{os.getppid()} 1.0\n", "garbage", "", f"{2**40} 5\n"):
        path.write_text(text)
        with only_starter(project.tree.project_dir):
            pass


def test_bad_app_file_names_the_folder_and_what_to_change(tmp_path: Path) -> None:
    from boinc_project.app_versions import AppVersionError

    with tiny_project() as project:
        leaf = project.tree.project_dir / "apps" / "gradient" / "2.0" / "x86_64-pc-linux-gnu"
        leaf.mkdir(parents=True)
        (leaf / "version.xml").write_text("<version><file>")
        with pytest.raises(AppVersionError, match=r"version\.xml"):
            update_versions(project.tree, project.db)


def test_damaged_list_of_operators_of_an_app_version_is_named(project: TinyProject, job_folder: Path) -> None:
    path = project.tree.project_dir / "apps" / "gradient" / "1.0" / "x86_64-pc-linux-gnu" / ".operators.json"
    path.write_text("[")
    mistake(create(project, job_folder), "operators.json", "build-app again")


def test_operator_that_a_deployed_app_version_lacks_is_named_before_any_workunit_exists(
    project: TinyProject, job_folder: Path
) -> None:
    path = project.tree.project_dir / "apps" / "gradient" / "1.0" / "x86_64-pc-linux-gnu" / ".operators.json"
    path.write_text('["mm", "add"]')
    mistake(create(project, job_folder), "operator", "newer app version")


@pytest.mark.parametrize(
    ("known", "codec", "refused"),
    [
        (sorted(OPSET), "fp4", True),  # a list: written before there were more than two codecs
        (sorted(OPSET), "int8", False),
        ({"operators": sorted(OPSET), "codecs": ["dense", "int8", "fp4"]}, "fp4", False),
        ({"operators": sorted(OPSET), "codecs": ["dense", "int8", "fp4"]}, "top-k", True),
    ],
)
def test_codec_that_a_deployed_app_version_lacks_is_named_before_any_workunit_exists(
    project: TinyProject, job_folder: Path, known: object, codec: str, refused: bool
) -> None:
    path = project.tree.project_dir / "apps" / "gradient" / "1.0" / "x86_64-pc-linux-gnu" / ".operators.json"
    path.write_text(json.dumps(known))
    edit(job_folder / "job.toml", "[optimizer]", f'[codec]\nkind = "{codec}"\n\n[optimizer]')
    if refused:
        mistake(create(project, job_folder), f"the codec '{codec}'", "newer app version")
    else:
        assert create(project, job_folder).exit_code == 0


def test_deltas_that_a_deployed_app_version_lacks_are_named_before_any_workunit_exists(
    project: TinyProject, job_folder: Path
) -> None:
    path = project.tree.project_dir / "apps" / "gradient" / "1.0" / "x86_64-pc-linux-gnu" / ".operators.json"
    known = {"operators": sorted(OPSET), "codecs": ["dense"]}
    path.write_text(json.dumps(known))
    edit(job_folder / "job.toml", "[optimizer]", "[supply]\nkeyframe_every = 4\n\n[optimizer]")
    mistake(create(project, job_folder), "deltas of versions", "keyframe_every in [supply]")
    path.write_text(json.dumps({**known, "deltas": True}))
    assert create(project, job_folder).exit_code == 0


def publish_newer(project: TinyProject, plan_class: str = "") -> None:
    """Version 1.1 with all operators, for the platform of version 1.0."""
    leaf = project.tree.project_dir / "apps" / "gradient" / "1.1" / f"x86_64-pc-linux-gnu{plan_class}"
    shutil.copytree(leaf.parents[1] / "1.0" / "x86_64-pc-linux-gnu", leaf)
    (leaf / "gradient_stub_1.0").rename(leaf / "gradient_stub_1.1")
    edit(leaf / "version.xml", "gradient_stub_1.0", "gradient_stub_1.1")
    (leaf / ".operators.json").write_text(json.dumps(sorted(OPSET)))
    assert update_versions(project.tree, project.db)


def test_only_app_versions_that_are_sent_must_know_the_operators_of_a_new_job(
    project: TinyProject, job_folder: Path
) -> None:
    path = project.tree.project_dir / "apps" / "gradient" / "1.0" / "x86_64-pc-linux-gnu" / ".operators.json"
    path.write_text('["mm", "add"]')
    publish_newer(project, "__opencl_ati_gt")
    mistake(create(project, job_folder), "operator", "plan class")
    shutil.rmtree(path.parents[2] / "1.1")
    publish_newer(project)
    with project.db.transaction() as connection:
        newest = app_version.c.version_num == 101
        connection.execute(sa.update(app_version).where(newest).values(deprecated=1))
    mistake(create(project, job_folder), "operator")
    with project.db.transaction() as connection:
        connection.execute(sa.update(app_version).where(newest).values(deprecated=0))
    assert create(project, job_folder).exit_code == 0


@pytest.mark.parametrize("command", [["show"], ["pause"], ["resume"], ["rollback"]])
def test_unknown_job_lists_those_there_are(project: TinyProject, command: list[str]) -> None:
    arguments = ["nobody", *(["1"] if command == ["rollback"] else [])]
    found = boinc_train("job", *command, *arguments, "--project", project.tree.project_dir)
    mistake(found, "no job 'nobody'", "tiny")


def test_unknown_version_says_which_there_are(project: TinyProject) -> None:
    where = ("--project", project.tree.project_dir)
    mistake(boinc_train("weights", "tiny", "--version", "9", *where), "no version 9", "versions 0 to 0")
    mistake(boinc_train("job", "rollback", "tiny", "9", *where), "no version 9")


def test_damaged_config_xml_is_one_sentence(project: TinyProject) -> None:
    (project.tree.project_dir / "config.xml").write_text("<boinc><config>")
    mistake(boinc_train("job", "list", "--project", project.tree.project_dir), "config.xml")


def test_commands_on_a_project_whose_database_is_gone_say_so(project: TinyProject) -> None:
    for path in project.tree.project_dir.glob("project.sqlite*"):
        path.unlink()
    mistake(boinc_train("job", "show", "tiny", "--project", project.tree.project_dir), "no jobs yet")


def test_plan_of_a_wrong_slot_says_which_there_are() -> None:
    mistake(boinc_train("run", TINY_JOB / "job.toml", "--slot", "7"), "slot 7", "0 to 1")


def test_the_command_runs_as_a_module_and_ends_with_status_2(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "boinc_project.cli", "job", "list", "--project", str(tmp_path)],
        env=volunteer_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "no BOINC project" in done.stderr


def test_a_project_without_jobs_is_opened_and_says_so(tmp_path: Path) -> None:
    from boinc_project.project_tree import create_project

    tree: ProjectTree = create_project(
        tmp_path / "project", master_url="http://127.0.0.1:8080/train/", long_name="Empty"
    )
    found = boinc_train("status", "--project", tree.project_dir)
    assert found.exit_code == 0 and "no jobs yet" in found.output


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--address", "0.0.0.0"], ["reachable from other computers", "--allow-plain-http"]),
        (["--address", "0.0.0.0", "--allow-plain-http"], ["--url"]),
        (["--address", "999.1.1.1"], ["not an IP address"]),
        (["--address", "localhost"], ["not an IP address"]),
    ],
)
def test_an_unusable_address_is_refused_before_a_project_is_made(
    tmp_path: Path, arguments: list[str], parts: list[str]
) -> None:
    folder = tmp_path / "project"
    mistake(boinc_train("serve", folder, "--port", "8999", *arguments), *parts)
    assert not folder.exists()


def test_a_project_is_not_made_in_a_folder_of_other_things(tmp_path: Path, job_folder: Path) -> None:
    before = sorted(path.name for path in job_folder.iterdir())
    mistake(boinc_train("serve", job_folder), "is not empty", "folder of its own")
    assert sorted(path.name for path in job_folder.iterdir()) == before
    file = tmp_path / "file"
    file.touch()
    mistake(boinc_train("serve", file), "is a file")
    mistake(boinc_train("demo", "--output", file), "is a file")


def test_output_paths_that_cannot_be_written_are_named(project: TinyProject, tmp_path: Path) -> None:
    where = ["--project", project.tree.project_dir]
    mistake(boinc_train("weights", "tiny", "--output", tmp_path, *where), str(tmp_path), "cannot be written")
    file = tmp_path / "file"
    file.touch()
    mistake(boinc_train("export", TINY_JOB, "--output", file), str(file))
    mistake(boinc_train("run", TINY_JOB, "--keep", file), str(file))


def test_replay_notices_a_damaged_version_and_a_missing_gradient(project: TinyProject) -> None:
    project.make_version()
    project.make_version()
    where = ["--project", project.tree.project_dir]
    assert boinc_train("job", "replay", "tiny", *where).exit_code == 0
    (path,) = (path for version, path in project.job.folder.version_files() if version == 1 and "state" in path.name)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    mistake(boinc_train("job", "replay", "tiny", *where), "is damaged")
    data[-1] ^= 1
    path.write_bytes(data)
    _, payload = project.job.folder.payload_files()[0]
    payload.unlink()
    mistake(boinc_train("job", "replay", "tiny", *where), payload.name, "is missing")


def test_the_processes_of_a_killed_starter_end_with_it(project: TinyProject) -> None:
    directory = project.tree.project_dir
    port = project.tree.config.master_url.split(":")[2].split("/")[0]
    command = [sys.executable, "-m", "boinc_project.cli", "serve", str(directory), "--port", port]
    starter = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=volunteer_environment())
    children: list[psutil.Process] = []
    try:
        assert starter.stderr is not None
        assert b"Serving" in starter.stderr.readline()
        children = psutil.Process(starter.pid).children()
        assert len(children) == 4
        starter.kill()
        starter.wait()
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive
    finally:
        for process in children:
            with contextlib.suppress(psutil.Error):
                process.kill()
        starter.kill()
        starter.wait()
        assert starter.stderr is not None
        starter.stderr.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_takes_no_more_is_one_sentence_with_the_place(
    project: TinyProject, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(source: Any, target: Any, *_arguments: Any) -> None:
        raise OSError(number, os.strerror(number), "some source", None, "/the/full/disk")

    monkeypatch.setattr("boinc_project.store.job_named", full)
    found = boinc_train("weights", "tiny", "--project", project.tree.project_dir, "--output", "x.safetensors")
    assert found.exit_code == 1
    assert found.stderr.count("\n") == 1 and "/the/full/disk" in found.stderr and "make room" in found.stderr


def test_a_database_that_does_not_answer_is_one_sentence(project: TinyProject) -> None:
    path = project.tree.project_dir / "config.xml"
    url = f"mysql+pymysql://somebody:secret@127.0.0.1:{free_port()}/nothing"
    path.write_text(re.sub("(<gt_database_url>).*(</gt_database_url>)", rf"\g<1>{url}\g<2>", path.read_text()))
    found = boinc_train("status", "--project", project.tree.project_dir)
    assert found.exit_code == 1
    assert found.stderr.count("\n") == 1 and "database" in found.stderr and "secret" not in found.stderr
