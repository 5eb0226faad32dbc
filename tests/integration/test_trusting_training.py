"""A whole training with one copy from proven hosts, audits and spot checks, by real servers, daemons and volunteers."""

from __future__ import annotations

import json
from pathlib import Path

import sqlalchemy as sa

from boinc_project.gt_tables import Judgement, gt_fingerprint, gt_job, gt_trust
from tests.tiny_project import TinyProject
from tests.training import train


def test_a_training_with_adaptive_replication_and_spot_checks_reaches_its_end(tmp_path: Path) -> None:
    with TinyProject(tmp_path / "project") as project:
        settings = json.loads(project.job.config.canonical_json())
        settings["trust"].update(adaptive_replication=True, audit_floor=0.3, spot_check_share=0.3, replay_disputes=True)
        with project.db.transaction() as connection:
            connection.execute(sa.update(gt_job).values(config=json.dumps(settings)))
        digests = train(project, tmp_path)
        assert len(digests) == 5
        verdicts = {row["verdict"] for row in project.rows(gt_fingerprint)}
        assert verdicts <= {str(Judgement.CANONICAL), str(Judgement.VALID), str(Judgement.ALONE)}
        assert all(row["good"] > 0 and row["bad"] == 0 for row in project.rows(gt_trust))
