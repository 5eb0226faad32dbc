"""What `install` has done to a project, so that `uninstall` undoes exactly that.

A folder `gt_install` in the project, readable by its owner only (its backups of config.xml hold the database
password): `record.json`, and `backups/TIME/FILE` as each file was before. A change is recorded before it is
made; undoing one that was never made finds nothing to do.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from boinc_project.standard.editing import Piece

FOLDER = "gt_install"
FORMAT = 1
_TEMPORARY_SUFFIX = ".boinc-train.tmp"


class InstallError(ValueError):
    """The project cannot be changed as asked; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change that can be undone.

    kind    edit (a Piece put into a file), create (a file), census (one that BOINC writes anew), link (in bin/),
            app (the row), classes (its n_size_classes), tables (ours)
    app     the app it was made for; '' where all our apps share it
    path    relative to the project; for `app` the app's name
    before  link: its earlier target; app: `deprecated` as it was, or '' where we made the row
    """

    kind: str
    path: str
    app: str = ""
    piece: Piece | None = None
    content: str = ""
    before: str = ""

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        return {key: value for key, value in found.items() if value not in ("", None)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Change:
        given = dict(values)
        piece = given.pop("piece", None)
        return cls(**given, piece=None if piece is None else Piece(**piece))


@dataclass
class Record:
    """The record of one project, kept in its file."""

    project_dir: Path
    apps: dict[str, str] = field(default_factory=dict)  # name -> title
    changes: list[Change] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.project_dir / FOLDER

    @property
    def path(self) -> Path:
        return self.folder / "record.json"

    @classmethod
    def load(cls, project_dir: Path) -> Record:
        """The project's record; an empty one if nothing was installed. Raises InstallError if it is damaged."""
        record = cls(project_dir)
        try:
            found = json.loads(record.path.read_text(encoding="ascii"))
            if found["format"] != FORMAT:
                raise InstallError(f"{record.path} was written by another version of boinc-train; use that one")
            record.apps = {str(name): str(title) for name, title in found["apps"].items()}
            record.changes = [Change.from_dict(each) for each in found["changes"]]
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, InstallError):
                raise
            raise InstallError(
                f"{record.path} is damaged ({error}); restore it, or the files from {record.folder / 'backups'}"
            ) from error
        return record

    def add(self, change: Change) -> None:
        """Note a change that is about to be made."""
        if change not in self.changes:
            self.changes.append(change)
            self.save()

    def remove(self, change: Change) -> None:
        """Forget a change that was undone."""
        if change in self.changes:
            self.changes.remove(change)
            self.save()

    def save(self) -> None:
        """Write the record, whole or not at all; without apps and changes it is removed."""
        if not self.apps and not self.changes:
            self.path.unlink(missing_ok=True)
            return
        self.folder.mkdir(mode=0o700, exist_ok=True)
        document = {"format": FORMAT, "apps": self.apps, "changes": [change.to_dict() for change in self.changes]}
        replace_file(self.path, (json.dumps(document, indent=1) + "\n").encode(), mode=0o600)

    def back_up(self, path: Path, moment: str) -> None:
        """Keep a copy of a project's file as it is now; the first of one moment counts."""
        folder = self.folder / "backups" / moment
        for each in (self.folder, self.folder / "backups", folder):
            each.mkdir(mode=0o700, exist_ok=True)
        target = folder / path.name
        if not target.exists():
            shutil.copy2(path, target)


def temporary_of(path: Path) -> Path:
    """Under which name a file or link is made before it takes its place."""
    return path.with_name(f".{path.name}{_TEMPORARY_SUFFIX}")


def remove_half_made(folders: Iterable[Path]) -> None:
    """Remove what a killed process has left under such names. Only who has locked the project may do that."""
    for folder in folders:
        for path in folder.glob(f".*{_TEMPORARY_SUFFIX}"):
            path.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes, mode: int | None = None) -> None:
    """Write a file, whole or not at all, through a link if it is one; mode and owner stay as they were."""
    path = path.resolve()
    temporary = temporary_of(path)
    before = path.stat() if path.exists() else None
    try:
        with temporary.open("wb") as stream:
            if before is not None and mode is None:
                os.fchmod(stream.fileno(), before.st_mode & 0o7777)
            elif mode is not None:
                os.fchmod(stream.fileno(), mode)
            if before is not None and os.geteuid() == 0:
                os.fchown(stream.fileno(), before.st_uid, before.st_gid)
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
