"""The documentation is true: commands, options, files, keys and links exist, and the walk-through runs.

Blocks of docs/journey.md: `sh run` is typed by the reader, `sh background` in a second terminal, and
`text expect` are lines of the output of the block before, in order; `...` stands for anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from apps.gradient import __main__ as application
from assimilator.__main__ import main as assimilator
from boinc_project.cli.main import main as boinc_train
from boinc_project.job_config import SECTIONS
from tests.ports import kept_port
from validator.__main__ import main as validator
from work_generator.__main__ import main as work_generator

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
COMMANDS = ROOT / "docs" / "commands.md"
DAEMONS = {"gt_work_generator": work_generator, "gt_validator": validator, "gt_assimilator": assimilator}

# Options of other programs that the docs mention, and those of our scripts and of the application.
OTHER_OPTIONS = {
    "--long",  # scripts/test
    "--nthreads",  # the application
    "--devices",
    "--allow_multiple_clients",  # boinc
    "--gui_rpc_port",
    "--host",  # boinccmd
    "--passwd",
    "--create_account",
    "--lookup_account",
    "--project_attach",
    "--constraint",  # pip
    "--editable",
    "--cron",  # bin/start
    "--app_name",  # size_regulator
    "--lo",
    "--hi",
    "--sleep_time",
    "--priority_order_create_time",
    "--random_order",
    "--strict",  # mypy
}
TOP_FOLDERS = "apps|assimilator|boinc_project|docs|examples|kernels|scripts|tests|validator|work_generator"
FILE_NAME = re.compile(rf"(?:{TOP_FOLDERS})/[\w./*-]*|[\w-]+\.(?:md|toml)")
PLACEHOLDERS = {"model.py", "weights.safetensors"}


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


# --- commands and options ---------------------------------------------------------------------------------------------


def commands() -> dict[str, click.Command]:
    """`boinc-train job create` -> the command, for every command that does something."""

    def walk(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
        if isinstance(command, click.Group):
            for child, each in sorted(command.commands.items()):
                yield from walk(f"{name} {child}", each)
        else:
            yield name, command

    return dict(walk("boinc-train", boinc_train))


def options_of(command: click.Command) -> set[str]:
    return {name for p in command.params if isinstance(p, click.Option) for name in p.opts if name.startswith("--")}


def usage_of(daemon: str) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), pytest.raises(SystemExit):
        DAEMONS[daemon](["--help"])
    return text.getvalue()


def daemon_options(daemon: str) -> set[str]:
    return set(re.findall(r"--\w+", usage_of(daemon)))


def sections(path: Path) -> dict[str, str]:
    """Heading without its `#` and back-quotes -> the text below it, up to the next heading."""
    parts = re.split(r"^#+ +(.+)$", text_of(path), flags=re.MULTILINE)
    return {title.strip().replace("`", ""): body for title, body in zip(parts[1::2], parts[2::2], strict=True)}


@pytest.mark.parametrize("name", commands())
def test_every_command_and_each_of_its_options_is_described(name: str) -> None:
    command = commands()[name]
    usage = " ".join([name, *(p.make_metavar(click.Context(command)) for p in command.params if p.opts[0][0] != "-")])
    described = sections(COMMANDS)
    assert usage in described, f"docs/commands.md has no heading {usage!r}"
    assert set(re.findall(r"^- `(--[\w-]+)", described[usage], re.MULTILINE)) == options_of(command)


@pytest.mark.parametrize("daemon", DAEMONS)
def test_every_option_of_a_daemon_is_described(daemon: str) -> None:
    described = sections(COMMANDS)
    listed = set(re.findall(r"^- `(?:-\w [A-Z]+, |-\w, )?(--\w+)", described["Options of all three"], re.MULTILINE))
    own = set(re.findall(r"^- `(--\w+)", described[daemon], re.MULTILINE))
    assert listed | own == daemon_options(daemon)


def test_every_installation_from_the_repository_takes_the_tested_versions_and_extras_that_exist() -> None:
    """Without them NumPy is too new for the volunteers' program, and `build-app` refuses it."""
    extras = set(tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]["optional-dependencies"])
    lines = [line for page in DOCS for line in text_of(page).splitlines() if re.search(r"pip install .*\.\[", line)]
    assert len(lines) == 2
    for line in lines:
        (named,) = re.findall(r"\.\[([\w,]+)\]", line)
        assert set(named.split(",")) <= extras, line
        assert "--constraint constraints.txt" in line


def test_no_page_names_an_option_that_does_not_exist() -> None:
    known = OTHER_OPTIONS | {"--help", "--version"}
    known |= {option for command in commands().values() for option in options_of(command)}
    known |= {option for daemon in DAEMONS for option in daemon_options(daemon)}
    found = [
        f"{path.name}: {option}"
        for path in DOCS
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", re.sub(r"-->|<!--", "", text_of(path)))
        if option not in known
    ]
    assert found == []


def command_lines() -> list[tuple[str, str]]:
    """(page, line) of every line in the docs that runs boinc-train or a daemon, in blocks and in back-quotes."""
    programs = "|".join(("boinc-train", *DAEMONS))
    pattern = re.compile(rf"`((?:{programs})(?: [^`\n]*)?)`|^ *((?:{programs}) [^`\n]*)$", re.MULTILINE)
    return [(p.name, (m[1] or m[2]).strip()) for p in DOCS for m in pattern.finditer(text_of(p))]


@pytest.mark.parametrize(("page", "line"), command_lines(), ids=lambda value: str(value)[:60])
def test_command_lines_of_the_docs_are_accepted(page: str, line: str) -> None:
    program, *words = re.split(r"[;#&|]", line)[0].split()
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    if program in DAEMONS:
        assert given <= daemon_options(program)
        return
    command: click.Command = boinc_train
    for word in words:
        if isinstance(command, click.Group) and word in command.commands:
            command = command.commands[word]
        elif isinstance(command, click.Group) and word.islower() and not word.startswith("-"):
            pytest.fail(f"{page}: {line!r}: boinc-train has no command {word}")
    assert given <= options_of(command) | {"--help", "--version"}


def test_the_programs_name_no_command_that_is_not_there() -> None:
    """In what they print: `boinc-train job stop` would send its reader astray."""
    groups = {name: each for name, each in boinc_train.commands.items() if isinstance(each, click.Group)}
    pattern = re.compile(rf"boinc-train ({'|'.join(groups)}) ([a-z-]+)")
    packages = ("boinc_project", "apps", "work_generator", "validator", "assimilator")
    sources = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    named = [(path.name, *match.groups()) for path in sources for match in pattern.finditer(text_of(path))]
    assert named
    assert [each for each in named if each[2] not in groups[each[1]].commands] == []


def test_the_programs_of_the_docs_are_those_that_are_installed() -> None:
    scripts = re.search(r"\[project\.scripts\]\n((?:.+\n)+)", text_of(ROOT / "pyproject.toml"))
    assert scripts is not None
    assert {line.split(" = ")[0] for line in scripts[1].splitlines()} == {"boinc-train", *DAEMONS}


# --- files, links, keys -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    page: Path
    target: str


def links() -> list[Link]:
    found = []
    for page in DOCS:
        text = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
        found += [Link(page, target) for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    return found


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in sections(page)}


def test_every_link_within_the_docs_leads_somewhere() -> None:
    broken = []
    for link in links():
        if re.match(r"https?:", link.target):
            continue
        file, _, anchor = link.target.partition("#")
        path = (link.page.parent / file).resolve() if file else link.page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(f"{link.page.name}: {link.target}")
    assert broken == []


def test_every_file_that_the_docs_name_exists() -> None:
    missing = []
    for page in DOCS:
        for span in re.findall(r"`([^`\n]+)`", text_of(page)):
            name = span.rstrip("/")
            if not FILE_NAME.fullmatch(span) or name in PLACEHOLDERS:
                continue
            places = (ROOT, page.parent, ROOT / "docs", ROOT / "examples" / "digits")
            if not any(list(place.glob(name)) for place in places):
                missing.append(f"{page.name}: {span}")
    assert missing == []


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_of_job_toml_is_described(section: str) -> None:
    described = sections(ROOT / "docs" / "job.md")
    body = described[f"[{section}]"]
    keys = {field.name for field in dataclasses.fields(SECTIONS[section])}
    if section == "inner_optimizer":  # its own keys only; the others are those of [optimizer]
        keys -= {field.name for field in dataclasses.fields(SECTIONS["optimizer"])}
    assert set(re.findall(r"^\| `(\w+)` ", body, re.MULTILINE)) == keys


def test_every_exit_code_of_the_application_is_explained_to_volunteers() -> None:
    codes = {value for name, value in vars(application).items() if name.startswith("EXIT_")}
    explained = set(re.findall(r"^\| (\d+) \|", text_of(ROOT / "docs" / "volunteer.md"), re.MULTILINE))
    assert {str(code) for code in codes} <= explained


def test_every_page_is_reached_from_the_readme() -> None:
    reached = {
        (link.page.parent / link.target.partition("#")[0]).resolve()
        for link in links()
        if link.page.name == "README.md"
    }
    assert {page.resolve() for page in (ROOT / "docs").glob("*.md")} <= reached


# --- the walk-through -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A block of the walk-through and the lines that it should print."""

    kind: str  # run | background
    source: str
    expected: tuple[str, ...]


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    for kind, body in re.findall(r"^```(sh run|sh background|text expect)\n(.*?)^```", text_of(page), re.M | re.S):
        if kind == "text expect":
            found[-1] = dataclasses.replace(found[-1], expected=tuple(body.splitlines()))
        else:
            found.append(Block(kind.split()[1], body, ()))
    return found


def assert_printed(output: str, block: Block) -> None:
    """The expected lines appear in the output in their order."""
    position = 0
    for line in block.expected:
        pattern = ".*".join(re.escape(part.strip()) for part in line.split("..."))
        match = re.compile(f"^{pattern}", re.M).search(output, position)
        assert match is not None, f"no line {line!r} in the output of\n{block.source}\n{output[-3000:]}"
        position = match.end()


class Reader:
    """Types the blocks of a page into a shell, one after the other, in a folder with the examples."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = kept_port()
        self.history = ["set -eu"]
        self.servers: list[subprocess.Popen[bytes]] = []
        self.environment = dict(os.environ, COLUMNS="200", TERM="dumb")
        self.environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environment.pop("BOINC_PROJECT_DIR", None)
        (folder / "examples").symlink_to(ROOT / "examples")

    def type(self, block: Block) -> None:
        source = block.source.replace("8123", str(self.port))
        expected = tuple(line.replace("8123", str(self.port)) for line in block.expected)
        block = dataclasses.replace(block, source=source, expected=expected)
        log = self.folder / "output"
        state = self.folder / "shell-state"  # folder and variables are carried from block to block
        before = f"if [ -e {state} ]; then source {state}; fi\n"
        after = f"\n{{ printf 'cd %q\\n' \"$PWD\"; export -p; }} > {state}\n"
        if block.kind == "background":
            self._serve(before + "exec " + source.strip(), block)
            return
        with open(log, "wb") as stream:
            done = subprocess.run(
                ["bash", "-eu", "-c", before + source + after],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=500,
            )
        output = log.read_text(encoding="utf-8", errors="replace")
        assert done.returncode == 0, f"{source}\nended with {done.returncode}:\n{output[-3000:]}"
        assert_printed(output, block)

    def _serve(self, source: str, block: Block) -> None:
        log = self.folder / f"output-{len(self.servers)}"
        with open(log, "wb") as stream:
            server = subprocess.Popen(
                ["bash", "-c", source], cwd=self.folder, env=self.environment, stdout=stream, stderr=subprocess.STDOUT
            )
        self.servers.append(server)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and server.poll() is None:
            with contextlib.suppress(OSError, AssertionError):
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                assert_printed(log.read_text(), block)
                return
            time.sleep(0.1)
        pytest.fail(f"{source}\ndid not come up:\n{log.read_text()[-3000:]}")

    def stop(self) -> None:
        for server in self.servers:
            server.send_signal(signal.SIGINT)
            server.wait(60)


def test_the_walk_through_runs_as_written(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    try:
        for block in blocks(ROOT / "docs" / "journey.md"):
            reader.type(block)
    finally:
        reader.stop()


def test_the_walk_through_is_read_whole() -> None:
    text = text_of(ROOT / "docs" / "journey.md")
    assert text.count("```") == 2 * (len(blocks(ROOT / "docs" / "journey.md")) + text.count("```text expect"))
