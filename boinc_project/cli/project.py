"""`serve` and `build-app`: a project of one's own on this machine."""

from __future__ import annotations

import ipaddress
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from boinc_project import store
from boinc_project.app_versions import AppVersionFolder, add_app, update_versions
from boinc_project.cli.errors import Mistake
from boinc_project.config import find_project_dir
from boinc_project.processes import Processes, daemon_commands, only_starter, refuse_second_starter
from boinc_project.project_tree import ProjectTree, create_project
from boinc_project.server.run import ProjectLock
from boinc_project.server.versions import read_plan_classes
from boinc_project.standard import plan_classes
from boinc_project.standard.install import is_standard
from boinc_project.standard.plan_classes import processor_of
from boinc_project.standard.record import Record

APP_NAME = "gradient"
APP_TITLE = "Gradient training"
DEFAULT_PORT = 8080
# What an interrupted start may have left in a new project's folder.
PROJECT_ENTRIES = ("apps", "cgi-bin", "download", "keys", "templates", "upload", "project.sqlite", "log", ".")
DEFAULT_SLEEP_S = 0.25

project_option = click.option(
    "--project",
    "project_dir",
    type=click.Path(path_type=Path),
    default=None,
    help="The project's folder (default: BOINC_PROJECT_DIR, or the folder you are in).",
)


app_option = click.option(
    "--app", "app_name", default=None, help="BOINC's name of our app (default: the one that is installed)."
)


def open_project(project_dir: Path | None) -> ProjectTree:
    """The project that the user means."""
    if project_dir is None:
        return ProjectTree(find_project_dir())
    if not (project_dir / "config.xml").is_file():
        raise Mistake(f"there is no BOINC project in {project_dir} (no config.xml); make one with boinc-train serve")
    return ProjectTree(project_dir)


@click.command()
@click.argument("project_dir", type=click.Path(path_type=Path))
@click.option("--port", default=DEFAULT_PORT, show_default=True, help="TCP port to listen on.")
@click.option("--address", default="127.0.0.1", show_default=True, help="IP address to listen on.")
@click.option(
    "--url",
    default=None,
    help="Master URL that volunteers attach to, fixed when the project is made (default: http://ADDRESS:PORT/train/).",
)
@click.option(
    "--allow-plain-http",
    is_flag=True,
    help="Listen beyond this machine without TLS; anybody on the way can then read and change what is sent.",
)
@click.option("--name", default="boinc-train", show_default=True, help="The project's name, shown to volunteers.")
@click.option(
    "--sleep-interval",
    type=click.FloatRange(0.01, 3600),
    default=DEFAULT_SLEEP_S,
    show_default=True,
    help="Seconds between the daemons' passes.",
)
@click.option(
    "--votes",
    type=click.Choice(["user", "host"]),
    default="user",
    show_default=True,
    help="Whose copies count as independent: host is for a private lab with one account.",
)
@click.option("--no-daemons", is_flag=True, help="Start the server alone.")
def serve(
    project_dir: Path,
    port: int,
    address: str,
    url: str | None,
    allow_plain_http: bool,
    name: str,
    sleep_interval: float,
    votes: str,
    no_daemons: bool,
) -> None:
    """Serve the project in PROJECT_DIR, made new if the folder holds none, until Ctrl-C.

    Starts the embedded BOINC server and the three daemons; their logs are in PROJECT_DIR/log.
    """
    console = Console(stderr=True)
    check_address(address, url, allow_plain_http)
    # One account's two computers can only both be sent a microtask if the scheduler lets them.
    options = {"one_result_per_user_per_wu": 0} if votes == "host" else {}
    tree = prepare_project(project_dir, port, name, options, url, address)
    if votes == "host" and tree.config.one_result_per_user_per_wu:
        raise Mistake(
            f"--votes host needs <one_result_per_user_per_wu>0 in {tree.project_dir / 'config.xml'}; otherwise one"
            " account's second computer is never sent the second copy"
        )
    where = ["--host", address, "--port", str(port), *(["--allow-plain-http"] if allow_plain_http else [])]
    with only_starter(tree.project_dir), stop_on_signals() as stopping:
        processes = project_processes(tree.project_dir, sleep_interval, votes, where, daemons=not no_daemons)
        processes.start()
        try:
            wait_until_listening(address, port, processes)
            console.print(
                f"Serving {tree.config.master_url} from {tree.project_dir}; logs in {tree.project_dir}/log;"
                " Ctrl-C stops.",
                soft_wrap=True,
            )
            while not stopping.is_set and not tree.is_triggered("stop_daemons"):
                for event in processes.watch():
                    console.print(event, soft_wrap=True)
                time.sleep(0.5)
        finally:
            processes.stop()
    console.print("Stopped.")


def prepare_project(
    project_dir: Path,
    port: int,
    name: str,
    options: Mapping[str, str | int | float] | None = None,
    url: str | None = None,
    address: str = "127.0.0.1",
) -> ProjectTree:
    """Open the embedded project in a folder, or make one there; an existing one keeps its URL and port."""
    if not 1 <= port <= 65535:
        raise Mistake(f"port {port} does not exist; choose one from 1024 to 65535")
    if (project_dir / "config.xml").is_file():
        tree = ProjectTree(project_dir)
        if (url is not None and url != tree.config.master_url) or (url is None and port != port_of(tree)):
            raise Mistake(
                f"the project in {project_dir} has the address {tree.config.master_url}, which clients remember;"
                f" serve it there (--url, --address, --port), or make a new project in another folder"
            )
        if tree.is_triggered("stop_daemons"):
            raise Mistake(f"{project_dir / 'stop_daemons'} exists, so nothing may run; remove it to serve the project")
        # The server is a process of its own: without this look, whoever answers on its port would pass for it.
        check_not_served(project_dir)
        check_port(port)
    else:
        check_new_folder(project_dir)
        check_port(port)
        tree = create_project(
            project_dir, master_url=url or f"http://{address}:{port}/train/", long_name=name, options=options
        )
    with tree.database() as database:
        store.create_own_tables(database)
        add_app(database, APP_NAME, APP_TITLE)
    return tree


def check_not_served(project_dir: Path) -> None:
    """ConfigError or ServerError with the process id if another starter or server has this project."""
    refuse_second_starter(project_dir.resolve())
    lock = ProjectLock(project_dir)
    lock.acquire()
    lock.release()


def check_new_folder(folder: Path) -> None:
    """Refuse a place where no project can or should be made: a project fills a folder of its own."""
    if not folder.exists():
        if not folder.parent.is_dir():
            raise Mistake(f"the folder {folder.parent} does not exist; create it or choose another place")
        return
    if not folder.is_dir():
        raise Mistake(f"{folder} is a file; give a folder for the project")
    others = sorted(path.name for path in folder.iterdir() if not path.name.startswith(PROJECT_ENTRIES))
    if others:
        raise Mistake(f"{folder} is not empty (it holds {others[0]}) and is no project; choose a folder of its own")


def check_address(address: str, url: str | None, allow_plain_http: bool) -> None:
    """Refuse an address that cannot be listened on, or that would carry volunteers' traffic unprotected unasked."""
    try:
        loopback = ipaddress.ip_address(address).is_loopback
    except ValueError as error:
        raise Mistake(f"{address!r} is not an IP address; give one of this machine's, such as 127.0.0.1") from error
    if not loopback and not allow_plain_http and not (url or "").startswith("https://"):
        raise Mistake(
            f"{address} is reachable from other computers and plain HTTP protects nothing on the way; put a proxy with"
            " TLS in front and give its --url, or add --allow-plain-http"
        )
    if url is None and ipaddress.ip_address(address).is_unspecified:
        raise Mistake(f"volunteers cannot attach to {address}; give the address that they use with --url")


def check_port(port: int) -> None:
    """Refuse a port that something else listens on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise Mistake(f"port {port} cannot be used ({error.strerror}); choose another with --port") from error


def project_processes(
    project_dir: Path, sleep_interval: float, votes: str, server_options: Sequence[str] = (), daemons: bool = True
) -> Processes:
    """The server and the daemons of a project, not started yet."""
    processes = Processes(project_dir)
    processes.add("server", [sys.executable, "-m", "boinc_project.server.run", str(project_dir), *server_options])
    if daemons:
        for name, command in daemon_commands(sleep_interval, votes).items():
            processes.add(name, command)
    return processes


def wait_until_listening(address: str, port: int, processes: Processes, patience_s: float = 30.0) -> None:
    """Wait for the server's port; Mistake with the end of its log if it does not come up."""
    host = "127.0.0.1" if address == "0.0.0.0" else address
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and processes.pid("server") is not None:
        try:
            socket.create_connection((host, port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    log = processes.log_path("server")
    text = log.read_text(errors="replace").strip() if log.exists() else ""
    last = text.splitlines()[-1] if text else "nothing was logged"
    raise Mistake(f"the server does not start: {last} (log: {log})")


def port_of(tree: ProjectTree) -> int:
    """The port in the project's master URL."""
    return urlsplit(tree.config.master_url).port or 80


class Flag:
    """Set by a signal handler."""

    is_set = False


@contextmanager
def stop_on_signals() -> Iterator[Flag]:
    """Turn SIGINT and SIGTERM into a flag while the block runs."""
    flag = Flag()

    def on_signal(number: int, frame: FrameType | None) -> None:
        flag.is_set = True

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@click.command("build-app")
@project_option
@click.option("--version", default="1.00", show_default=True, help="BOINC's MAJOR.MINOR.")
@click.option(
    "--cache",
    type=click.Path(path_type=Path),
    default=None,
    help="Folder that keeps finished builds (default: .cache/app-builds in the repository, or in ~/.cache).",
)
@click.option(
    "--backend",
    type=click.Choice(["numpy", "opencl", "torch"]),
    default="numpy",
    show_default=True,
    help="What the program computes with: numpy on any processor, OpenCL on GPUs, or the PyTorch installed here.",
)
@click.option(
    "--plan-class",
    "hosts",
    multiple=True,
    help="For which hosts; may be repeated (default: all for numpy, ours of that name for opencl, cuda_gt for torch).",
)
@click.option("--no-publish", is_flag=True, help="Only build; publish later with BOINC's update_versions.")
@app_option
def build_app(
    project_dir: Path | None,
    version: str,
    cache: Path | None,
    backend: str,
    hosts: tuple[str, ...],
    no_publish: bool,
    app_name: str | None,
) -> None:
    """Build the volunteers' application (one file, no Python needed) and publish it in the project.

    In a project of a standard server it is left for BOINC's own bin/update_versions to sign and publish.
    """
    tree = open_project(project_dir)
    app_name = app_of(tree, app_name)
    console = Console(stderr=True)
    standard = is_standard(tree.config)
    for name in hosts:
        check_plan_class(tree, name)
    program = Program(backend, hosts or classes_of(backend))
    folders = build_and_publish(
        tree, version, cache, console, publish=not (no_publish or standard), app_name=app_name, program=program
    )
    for folder in folders:
        console.print(f"The app version is in {folder}.", soft_wrap=True)
    if standard:
        console.print(f"Publish it: cd {tree.project_dir} && bin/update_versions", soft_wrap=True)


@dataclass(frozen=True)
class Program:
    """What is built: a backend's program, for the hosts of some plan classes ('': all)."""

    backend: str = "numpy"
    plan_classes: tuple[str, ...] = ("",)


def classes_of(backend: str) -> tuple[str, ...]:
    """The plan classes that a backend's program is for unless somebody says otherwise."""
    if backend == "numpy":
        return ("",)
    if backend == "torch":
        return ("cuda_gt",)
    return tuple(each.name for each in plan_classes.CLASSES if each.name.startswith(f"{backend}_"))


def _tell(console: Console, made: Sequence[Path], published: Sequence[AppVersionFolder]) -> None:
    """Say what volunteers get from now on: as update_versions does, everything that lay under apps/ unpublished."""
    for each in published:
        text = store.version_text(each.version_num, each.platform, each.plan_class)
        console.print(f"Published: {each.app_name} {text}", highlight=False, soft_wrap=True)
    folders = {each.folder for each in published}
    for folder in made:
        if folder not in folders:
            console.print(f"{folder} was published before; nothing changed.", highlight=False, soft_wrap=True)


def check_plan_class(tree: ProjectTree, name: str) -> None:
    """Refuse a plan class that nothing defines: no host of a standard server would get such a version."""
    known = {each.name for each in plan_classes.CLASSES}
    specification = tree.project_dir / "plan_class_spec.xml"
    try:
        known |= set(read_plan_classes(specification))
    except ValueError as error:
        raise Mistake(str(error)) from error
    if name not in known:
        raise Mistake(
            f"there is no plan class {name!r}; choose one of {', '.join(sorted(known))}, "
            f"or define it in {specification}"
        )


def app_of(tree: ProjectTree, app_name: str | None) -> str:
    """The app that the user means: the one named, or the only one there is."""
    if app_name is not None:
        return app_name
    installed = list(Record.load(tree.project_dir).apps)
    if len(installed) > 1:
        raise Mistake(f"the project has the apps {', '.join(installed)}; say which with --app")
    return installed[0] if installed else APP_NAME


def build_and_publish(
    tree: ProjectTree,
    version: str,
    cache: Path | None,
    console: Console,
    publish: bool = True,
    app_name: str = APP_NAME,
    program: Program = Program(),
) -> list[Path]:
    """Build the app into the project's apps/ folder and publish it as update_versions does; returns its folders."""
    from apps.packaging.build import CACHE, KINDS, unpacked_bytes
    from apps.packaging.build import build_app as build

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("building the application", total=1.0)

        def report(stage: str, share: float) -> None:
            bars.update(task, completed=share, description=f"building the application: {stage}")

        kind = KINDS[program.backend]
        made = [
            build(tree.project_dir, version, cache or CACHE, report, app_name, kind, name, processor_of(name))
            for name in program.plan_classes
        ]
    if program.backend == "torch":
        size, room = made[0].size, unpacked_bytes(made[0].program)
        console.print(f"The program has {size / 1e6:.0f} MB, and needs {room / 1e6:.0f} MB in each task's slot.")
    if publish:
        specification = tree.project_dir / "plan_class_spec.xml"
        if any(program.plan_classes) and not specification.exists():
            specification.write_text(plan_classes.specification(), encoding="ascii")
        with tree.database() as database:
            add_app(database, app_name, APP_TITLE)
            published = update_versions(tree, database)
        _tell(console, [each.folder for each in made], published)
    return [each.folder for each in made]
