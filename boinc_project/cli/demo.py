"""`demo`: the whole path on one machine, with two volunteers, in a few minutes.

    project -> app version -> job -> server and daemons -> two clients -> versions until the job is finished
    -> report.json, loss.png, the weights

The volunteers are two stock BOINC clients with a data directory and a user each; where the stock client is
not installed, two scripted ones do the same work over the same protocol.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import requests
from rich.console import Console
from rich.live import Live

from boinc_project import report, store
from boinc_project.cli.errors import Mistake
from boinc_project.cli.jobs import create_job, load_job, write_weights
from boinc_project.cli.project import (
    Flag,
    Program,
    build_and_publish,
    port_of,
    prepare_project,
    project_processes,
    stop_on_signals,
    wait_until_listening,
)
from boinc_project.cli.status import render, result_counts
from boinc_project.database import Database
from boinc_project.gt_tables import JobState
from boinc_project.processes import Processes, gravest_words, only_starter
from boinc_project.project_tree import ProjectTree
from boinc_project.scripted_volunteer import ProtocolError, ScriptedVolunteer, create_account
from boinc_project.server.run import free_port
from boinc_project.stock_client import StockClient, stock_client_available

if TYPE_CHECKING:
    from work_generator.job import Job

REPOSITORY = Path(__file__).resolve().parents[2]
MARKER = ".boinc-train-demo"  # tells a folder of ours from somebody's own
USERS = (("alice", "alice@example.org"), ("bob", "bob@example.org"))
SLEEP_INTERVAL_S = 0.2
LAST_EVALUATION_PATIENCE_S = 30.0
SCRIPTED_PATIENCE_S = 30.0


class DemoFailed(Mistake):
    """The demo did not reach its end; the message says what failed and where the logs are."""


@dataclass(frozen=True)
class Plan:
    """What the demo was asked to do."""

    output: Path
    job_toml: Path
    clients: str
    minutes: float
    backend: str = "numpy"


@click.command()
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("demo-output"),
    show_default=True,
    help="Folder for project, clients, logs and results; an earlier demo's is replaced.",
)
@click.option(
    "--job",
    "job_toml",
    type=click.Path(path_type=Path),
    default=REPOSITORY / "examples" / "digits",
    help="Job to train (default: examples/digits).",
)
@click.option(
    "--clients",
    type=click.Choice(["auto", "stock", "scripted"]),
    default="auto",
    show_default=True,
    help="auto takes stock BOINC clients if they are installed.",
)
@click.option(
    "--backend",
    type=click.Choice(["numpy", "opencl"]),
    default="numpy",
    show_default=True,
    help="What the volunteers' program computes with; opencl needs an OpenCL driver for the processor (PoCL).",
)
@click.option("--minutes", default=20.0, show_default=True, help="Give up after so many minutes.")
def demo(output: Path, job_toml: Path, clients: str, backend: str, minutes: float) -> None:
    """Train a small model with two volunteers on this machine and show how it went."""
    console = Console()
    if clients == "stock" and not stock_client_available():
        raise Mistake(
            "the stock BOINC client is not installed (apt-get install boinc-client); or use --clients scripted"
        )
    kind = clients
    if clients == "auto":
        kind = "stock" if stock_client_available() else "scripted"
        if kind == "scripted":
            console.print("The stock BOINC client is not installed: two scripted volunteers do its work.")
    if minutes <= 0:
        raise Mistake("--minutes must be above 0: a version takes a minute or two")
    job = load_job(job_toml, console)  # first: a wrong one must not cost the results of an earlier demo
    plan = Plan(fresh_folder(output), job_toml, kind, minutes, backend)
    with stop_on_signals() as stopping:
        run_demo(plan, job, console, stopping)


def fresh_folder(path: Path) -> Path:
    """An empty folder; one that an earlier demo made is emptied, anything else is left alone."""
    path = path.resolve()
    if not path.parent.is_dir():
        raise Mistake(f"the folder {path.parent} does not exist; create it or choose another --output")
    if path.exists() and not path.is_dir():
        raise Mistake(f"{path} is a file; give a folder as --output")
    if path.exists() and any(path.iterdir()):
        if not (path / MARKER).exists():
            raise Mistake(f"{path} is not empty and not from an earlier demo; choose another --output")
        shutil.rmtree(path)
    path.mkdir(exist_ok=True)
    (path / MARKER).touch()
    return path


def run_demo(plan: Plan, job: Job, console: Console, stopping: Flag) -> None:
    """The demo's main path; prints `demo ok: ...` as its last line or raises DemoFailed."""
    start = time.monotonic()
    project_dir = plan.output / "project"
    tree = prepare_project(project_dir, free_port(), "boinc-train demo", {"gt_dry_rpc_delay": 3})
    console.print("Building the application that volunteers run (under a minute, or from the cache).", soft_wrap=True)
    build_and_publish(tree, "1.00", None, console, program=Program(plan.backend))
    console.print(f"Tracing the model of {plan.job_toml} and publishing it with its data.", soft_wrap=True)
    create_job(tree, job, console)
    with tree.database() as database, database.read() as connection:
        job_name = store.jobs(connection)[0].name
    installed = time.monotonic()
    processes = project_processes(project_dir, SLEEP_INTERVAL_S, "user")
    with only_starter(project_dir), contextlib.ExitStack() as stack:
        processes.start()
        stack.callback(processes.stop)
        wait_until_listening("127.0.0.1", port_of(tree), processes)
        console.print(f"Serving {tree.config.master_url}; logs in {project_dir / 'log'}", soft_wrap=True)
        stack.enter_context(volunteers(plan, tree))
        console.print(f"Two {plan.clients} volunteers are attached; first tasks start in about 20 seconds.")
        watch(plan, tree, job_name, processes, console, stopping)
    finish(plan, tree, job_name, console, time.monotonic() - installed, installed - start)


@contextlib.contextmanager
def volunteers(plan: Plan, tree: ProjectTree) -> Iterator[None]:
    """Two volunteers with an account each, attached and working until the end of the block."""
    url = tree.config.master_url
    with contextlib.ExitStack() as stack:
        for name, email in USERS:
            key = create_account(url, email, secrets.token_hex(16), name)
            folder = plan.output / f"client-{name}"
            if plan.clients == "stock":
                client = stack.enter_context(StockClient(folder, ncpus=2))
                client.attach(url, key)
            else:
                stack.enter_context(scripted(ScriptedVolunteer(url, key, folder, name=name)))
        yield


@contextlib.contextmanager
def scripted(volunteer: ScriptedVolunteer) -> Iterator[None]:
    """A scripted volunteer at work in a thread of its own; connection errors make it try again."""
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            with contextlib.suppress(requests.RequestException, ProtocolError):
                volunteer.run(ended.is_set)
            ended.wait(1.0)

    thread = threading.Thread(target=work, name=volunteer.name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(SCRIPTED_PATIENCE_S)


def watch(plan: Plan, tree: ProjectTree, job_name: str, processes: Processes, console: Console, stopping: Flag) -> None:
    """Show live progress until the job is finished and its last version evaluated."""
    deadline = time.monotonic() + 60 * plan.minutes
    last_line = ""
    last_evaluation = float("inf")
    with tree.database() as database, contextlib.ExitStack() as stack:
        live = stack.enter_context(Live(console=console, auto_refresh=False)) if console.is_terminal else None
        while True:
            for event in processes.watch():
                console.print(event)
            job = report.job_of(database, job_name)
            if live is not None:
                live.update(render(database), refresh=True)
            else:
                line = progress_line(database, job)
                if line != last_line:
                    console.print(line, highlight=False, soft_wrap=True)
                    last_line = line
            if job.state == JobState.FAILED:
                raise DemoFailed(f"the job stopped: {job.note}; logs are in {tree.project_dir / 'log'}")
            if job.state == JobState.FINISHED:
                last_evaluation = min(last_evaluation, time.monotonic() + LAST_EVALUATION_PATIENCE_S)
                if evaluated(database, job) or time.monotonic() > last_evaluation:
                    return
            if stopping.is_set:
                raise DemoFailed(f"stopped by a signal; what there is lies in {plan.output}")
            if time.monotonic() > deadline:
                words = gravest_words(tree.project_dir)
                raise DemoFailed(
                    f"version {job.current_version} of {job.config.train.max_versions} after {plan.minutes:g} minutes;"
                    f"{f' {words};' if words else ''}"
                    f" logs are in {tree.project_dir / 'log'} and {plan.output}/client-*"
                )
            time.sleep(1.0)


def progress_line(database: Database, job: store.JobRow) -> str:
    """One line of progress for consoles that are no terminal."""
    with database.read() as connection:
        newest = store.version_row(connection, job.id, job.current_version)
        counts = result_counts(connection, job.appid)
        evaluations = [row["evaluation"] for row in store.versions(connection, job.id) if row["evaluation"]]
    loss = newest["loss"] if newest else None
    shown = "" if loss is None else f" loss {loss:.4f}"
    if evaluations:
        means = json.loads(evaluations[-1])
        shown += "".join(f" {name} {value:.3f}" for name, value in sorted(means.items()) if name != "loss")
    return (
        f"version {job.current_version}/{job.config.train.max_versions}{shown} | results: {counts['valid']} valid,"
        f" {counts['sent']} in progress, {counts['unsent']} unsent, {counts['error'] + counts['invalid']} bad"
    )


def evaluated(database: Database, job: store.JobRow) -> bool:
    """Whether the newest version has been evaluated on held-out data, if the job does that at all."""
    if not job.config.train.evaluate_every:
        return True
    with database.read() as connection:
        newest = store.version_row(connection, job.id, job.current_version)
    return bool(newest and newest["evaluation"])


def finish(plan: Plan, tree: ProjectTree, job_name: str, console: Console, seconds: float, preparation: float) -> None:
    """Write report, picture and weights; print the summary."""
    with tree.database() as database:
        found = report.collect(database, job_name)
        job = report.job_of(database, job_name)
        with database.read() as connection:
            newest = store.version_row(connection, job.id, job.current_version)
    assert newest is not None, job_name
    found.update(
        clients=plan.clients, backend=plan.backend, seconds=round(seconds, 1), preparation_seconds=round(preparation, 1)
    )
    (plan.output / "report.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    report.draw(found, plan.output / "loss.png")
    write_weights(job, newest, plan.output / "weights.safetensors")
    losses = [v["loss"] for v in found["versions"] if v["loss"] is not None]
    held = [v["held_out"] for v in found["versions"] if v["held_out"]]
    accuracy = held[-1].get("accuracy") if held else None
    hosts = len(found["hosts"])
    if hosts < len(USERS):
        raise DemoFailed(f"only {hosts} of {len(USERS)} hosts returned valid results; see {plan.output}/client-*")
    console.print(
        f"Loss curve, report and weights: {plan.output}/loss.png, report.json, weights.safetensors", soft_wrap=True
    )
    parts = [
        f"first_loss={losses[0]:.4f}",
        f"last_loss={losses[-1]:.4f}",
        *([f"accuracy={accuracy:.4f}"] if accuracy is not None else []),
        f"versions={job.current_version}",
        f"results={found['valid_results']}",
        f"hosts={hosts}",
        f"clients={plan.clients}",
        f"backend={plan.backend}",
        f"seconds={seconds:.0f}",
    ]
    print("demo ok: " + " ".join(parts))
