"""The page that volunteers see at the project's address."""

from __future__ import annotations

import json

import requests
import sqlalchemy as sa

from boinc_project.gt_tables import gt_job
from boinc_project.server.run import EmbeddedServer, free_port
from tests.tiny_project import tiny_project


def test_volunteers_read_what_is_learned_and_under_which_licence() -> None:
    with tiny_project() as project:
        with project.db.transaction() as connection:
            settings = json.loads(connection.execute(sa.select(gt_job.c.config)).scalar_one())
            settings["job"]["description"] = "Learns to tell <script> tags from sentences."
            connection.execute(sa.update(gt_job).values(config=json.dumps(settings)))
        port = free_port()
        with EmbeddedServer(project.tree.project_dir, port=port) as server:
            path = "/" + server.tree.config.master_url.split("/", 3)[3]
            page = requests.get(f"http://127.0.0.1:{port}{path}", timeout=10)
    assert page.status_code == 200
    assert "Learns to tell &lt;script&gt; tags" in page.text
    assert settings["data"]["license"] in page.text
    first = page.text.split("<h1>")[0]
    assert '<link rel="boinc_scheduler" href="' in first and all(len(line) < 255 for line in first.splitlines())
