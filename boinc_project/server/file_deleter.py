"""The file deleter: removes inputs and outputs that the transitioner has released.

Source: BOINC `sched/file_deleter.cpp`. Files marked `<no_delete/>` stay, and so does everything of a workunit
or result whose own name contains `nodelete`. A file that is missing is no error; a missing root directory is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from boinc_project import database
from boinc_project.database import Database
from boinc_project.project_tree import ProjectTree
from boinc_project.server.uploads import UploadStore
from boinc_project.states import FileDeleteState
from boinc_project.templates import listed_files

log = logging.getLogger(__name__)

#: Rows of each kind handled in one pass.
BATCH_SIZE = 200

#: Seconds after which rows whose files could not be removed are tried again.
ERROR_RETRY_S = 3600


class FileDeleter:
    """Deletes for one project; run it in one place only."""

    def __init__(
        self,
        tree: ProjectTree,
        db: Database,
        uploads: UploadStore,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tree, self.db, self.clock = tree, db, clock
        self._uploads = uploads
        self._retry_at = clock() + ERROR_RETRY_S

    def run_once(self) -> int:
        """One pass over what is ready; returns the number of rows finished."""
        if self.clock() >= self._retry_at:
            self._retry_at = self.clock() + ERROR_RETRY_S
            self._rearm_errors()
        finished = self._pass(database.workunit, "xml_doc", self._delete_input)
        return finished + self._pass(database.result, "xml_doc_in", self._uploads.remove)

    def _pass(self, table: sa.Table, document: str, delete: Callable[[str], object]) -> int:
        query = (
            sa.select(table.c.id, table.c.name, table.c[document])
            .where(table.c.file_delete_state == int(FileDeleteState.READY))
            .limit(BATCH_SIZE)
        )
        with self.db.read() as connection:
            rows = connection.execute(query).all()
        states = {row.id: self._delete_files(row.name, row[2] or "", delete) for row in rows}
        if states:
            with self.db.transaction() as connection:
                for row_id, state in states.items():
                    self._set_state(connection, table, row_id, FileDeleteState.READY, state)
        return sum(1 for state in states.values() if state == FileDeleteState.DONE)

    def _delete_files(self, name: str, document: str, delete: Callable[[str], object]) -> FileDeleteState:
        if "nodelete" in name:
            return FileDeleteState.DONE
        try:
            for file in listed_files(document):
                if file.name and not file.no_delete:
                    delete(file.name)
        except (OSError, ValueError) as error:
            log.error("cannot delete the files of %s: %s", name, error)
            return FileDeleteState.ERROR
        return FileDeleteState.DONE

    def _delete_input(self, name: str) -> None:
        if not self.tree.config.download_dir.is_dir():
            raise FileNotFoundError(f"no download directory {self.tree.config.download_dir}")
        self.tree.delete_published(name)

    def _rearm_errors(self) -> None:
        with self.db.transaction() as connection:
            for table in (database.workunit, database.result):
                self._set_state(connection, table, None, FileDeleteState.ERROR, FileDeleteState.READY)

    def _set_state(
        self,
        connection: sa.Connection,
        table: sa.Table,
        row_id: Any,
        old: FileDeleteState,
        new: FileDeleteState,
    ) -> None:
        change = table.update().where(table.c.file_delete_state == int(old))
        if row_id is not None:
            change = change.where(table.c.id == row_id)
        connection.execute(change.values(file_delete_state=int(new)))
