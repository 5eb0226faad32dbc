"""Database, configuration, project tree, signatures, templates, app versions, accounts, file deleter."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from lxml import etree
from sqlalchemy.dialects import mysql
from sqlalchemy.schema import CreateTable

from boinc_project import app_versions, database, signing, templates
from boinc_project.config import ConfigError, ProjectConfig, find_project_dir
from boinc_project.database import Database, new_row
from boinc_project.project_tree import (
    ImmutableNameError,
    ProjectTree,
    PublishedFile,
    check_file_name,
    create_project,
    fan_out,
)
from boinc_project.server import accounts
from boinc_project.server.file_deleter import FileDeleter
from boinc_project.server.uploads import UploadStore
from boinc_project.signing import KeyFormatError, PrivateKey, PublicKey
from boinc_project.states import FileDeleteState
from boinc_project.templates import InputReference, OutputReference, TemplateError
from tests.server_project import add_workunits, make_project, publish_app, rows, wire_body


@pytest.fixture
def tree(tmp_path: Path) -> ProjectTree:
    return make_project(tmp_path / "project é")


# Database.


def test_blank_rows_are_complete_for_every_table(tree: ProjectTree) -> None:
    with tree.database() as db, db.transaction() as connection:
        for table in database.metadata.sorted_tables:
            if table.name != "platform":
                connection.execute(table.insert(), new_row(table))
    with pytest.raises(TypeError, match="no column nonsense"):
        new_row(database.result, nonsense=1)
    assert new_row(database.workunit)["size_class"] == -1
    assert "id" not in new_row(database.workunit)


def test_tables_have_boincs_types_on_mysql() -> None:
    ddl = str(CreateTable(database.workunit).compile(dialect=mysql.dialect()))
    for line in ("xml_doc BLOB", "result_template_file VARCHAR(63) NOT NULL", "name VARCHAR(191) NOT NULL"):
        assert line in ddl
    assert "xml_doc MEDIUMBLOB" in str(CreateTable(database.app_version).compile(dialect=mysql.dialect()))


def test_blob_text_is_bounded_and_tolerates_bytes(tree: ProjectTree) -> None:
    table = database.result
    with tree.database() as db:
        with db.transaction() as connection:
            connection.execute(table.insert(), new_row(table, name="a", xml_doc_in="é" * 32767))
            connection.execute(table.insert(), new_row(table, name="b", stderr_out=b"\xff\xfe ok"))
        with pytest.raises(sa.exc.StatementError, match="65536 bytes"), db.transaction() as connection:
            connection.execute(table.insert(), new_row(table, name="c", xml_doc_in="é" * 32768))
        first, second = rows(db, table)
    assert first["xml_doc_in"] == "é" * 32767
    assert second["stderr_out"].endswith(" ok")


def test_failed_transaction_leaves_nothing_and_writers_wait_their_turn(tree: ProjectTree) -> None:
    table = database.platform
    with tree.database() as db:
        before = len(rows(db, table))
        with pytest.raises(RuntimeError), db.transaction() as connection:
            connection.execute(table.insert(), new_row(table, name="x"))
            raise RuntimeError
        assert len(rows(db, table)) == before

        def add_one(_number: int) -> None:
            with db.transaction() as connection:
                count = connection.scalar(sa.select(sa.func.count()).select_from(table))
                connection.execute(table.insert(), new_row(table, name=f"p{count}"))

        threads = [threading.Thread(target=add_one, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(rows(db, table)) == before + 8, "each counted what the others had committed"


def test_database_in_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a file"):
        Database("sqlite://")


# Configuration.


def test_config_of_a_standard_project_is_read(tmp_path: Path) -> None:
    text = b"""<boinc><config><master_url>http://example.org/p/</master_url><db_name>p</db_name>
      <db_user>boincadm</db_user><db_passwd>a:b@c/d</db_passwd><db_host>db.example.org:3307</db_host>
      <upload_url>http://example.org/p_cgi/file_upload_handler</upload_url>
      <upload_dir>/srv/upload</upload_dir><uldl_dir_fanout> 1024 </uldl_dir_fanout><send_result_abort/>
      <resend_lost_results>0</resend_lost_results><delete_delay_hours>2</delete_delay_hours>
      <fuh_set_completed_permission>0444</fuh_set_completed_permission><unknown>5</unknown>
      </config><daemons><daemon><cmd>feeder</cmd></daemon></daemons></boinc>"""
    config = ProjectConfig.parse(text, tmp_path)
    url = config.database_url
    assert (url.drivername, url.password, url.host, url.port) == (
        "mysql+pymysql",
        "a:b@c/d",
        "db.example.org",
        3307,
    )
    assert config.scheduler_url == "http://example.org/p_cgi/cgi"
    assert (config.send_result_abort, config.resend_lost_results) == (True, False)
    assert (config.delete_delay, config.fuh_set_completed_permission) == (7200, 0o444)
    assert config.key_dir == tmp_path / "keys" and config.upload_dir == Path("/srv/upload")
    assert config.elements["unknown"] == "5"
    assert "a:b@c/d" not in repr(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"<boinc", "not well-formed"),
        (b"<boinc></boinc>", "no <boinc><config>"),
        (b"<boinc><config><max_wus_to_send>x</max_wus_to_send></config></boinc>", "max_wus_to_send"),
        (b"<boinc><config><max_ncpus>inf</max_ncpus></config></boinc>", "max_ncpus> must be a number, not 'inf'"),
        (b"<boinc><config><max_ncpus>nan</max_ncpus></config></boinc>", "max_ncpus> must be a number, not 'nan'"),
    ],
)
def test_wrong_config_is_one_sentence(tmp_path: Path, text: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ProjectConfig.parse(text, tmp_path)
    with pytest.raises(ConfigError, match="names no database"):
        _ = ProjectConfig.parse(b"<boinc><config/></boinc>", tmp_path).database_url


def test_project_is_found_by_boincs_rules(tree: ProjectTree, tmp_path: Path) -> None:
    here = tree.project_dir
    assert find_project_dir(here, {}) == here
    assert find_project_dir(here / "apps", {}) == here
    assert find_project_dir(tmp_path / "elsewhere", {"BOINC_PROJECT_DIR": str(here)}) == here
    for start, environment in ((tmp_path / "a" / "b", {}), (here, {"BOINC_PROJECT_DIR": str(tmp_path)})):
        with pytest.raises(ConfigError):
            find_project_dir(start, environment)
    shutil.rmtree(here / "cgi-bin")
    with pytest.raises(ConfigError):
        find_project_dir(here, {})


# Project tree.


@pytest.mark.parametrize(
    ("name", "fanout", "directory"),
    [
        ("in_wu_0", 1024, "3ec"),
        ("in_wu_0", 1000, "24c"),
        ("wu_0_0_r123_0", 1024, "343"),
        ("uppercase", 1024, "40"),
        ("in_w_1", 1024, "1e8"),
        ("anything", 0, ""),
    ],
)
def test_fan_out_is_boincs(name: str, fanout: int, directory: str) -> None:
    assert fan_out(name, fanout) == directory


def test_published_file_has_its_companion_and_is_for_ever(tree: ProjectTree) -> None:
    file = tree.stage_file(b"abc", "data_1.bin")
    assert file.path.read_bytes() == b"abc"
    companion = file.path.with_name("data_1.bin.md5")
    assert companion.read_text() == f"{hashlib.md5(b'abc').hexdigest()} 3\n"
    assert companion.stat().st_mtime >= file.path.stat().st_mtime
    assert tree.stage_file(file.path, "data_1.bin") == file
    with pytest.raises(ImmutableNameError, match="for ever"):
        tree.stage_file(b"abd", "data_1.bin")
    assert file.path.read_bytes() == b"abc"
    assert sorted(path.name for path in file.path.parent.iterdir()) == ["data_1.bin", "data_1.bin.md5"]
    assert tree.delete_published("data_1.bin") and not tree.delete_published("data_1.bin")
    assert not list(file.path.parent.iterdir())


@pytest.mark.parametrize("name", ["", "a/b", "..", "a..b", ".hidden", "a b", "a%b", "é", "a\n", "x" * 192])
def test_unsafe_file_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError):
        check_file_name(name)


def test_project_is_made_once_and_only_with_a_usable_url(tree: ProjectTree, tmp_path: Path) -> None:
    assert (tree.config.key_dir / "code_sign_private").stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigError, match="already holds a project"):
        create_project(tree.project_dir, master_url=tree.config.master_url, long_name="x")
    for url in ("http://localhost:8080/x/", "http://127.0.0.1:8080/x", "ftp://a.b/", "x"):
        with pytest.raises(ConfigError, match="master URL"):
            create_project(tmp_path / "other", master_url=url, long_name="x")
    assert not (tmp_path / "other" / "config.xml").exists()


# Signatures.


def test_keys_and_signatures_round_trip_in_boincs_format() -> None:
    key = PrivateKey.generate()
    assert PrivateKey.parse(key.text()) == key
    assert PublicKey.parse(key.public.text()) == key.public
    assert key.public.text().splitlines()[0] == "1024"
    signature = key.sign(b"hello")
    assert [len(line) for line in signature.splitlines()] == [64, 64, 64, 64, 1]
    assert key.public.verify(b"hello", signature)
    assert key.public.verify(b"hello", " ".join(signature.split()))
    for wrong in ("", "zz", signature[:100], signature.replace("a", "b"), "f" * 256):
        assert not key.public.verify(b"hello", wrong)
    assert not key.public.verify(b"hallo", signature)


def test_arithmetic_signs_as_the_library_does(monkeypatch: pytest.MonkeyPatch) -> None:
    key = PrivateKey.generate()
    signature = key.sign(b"hello")

    def forbidden(*_: object) -> bytes:
        raise ValueError("key too short for this policy")

    monkeypatch.setattr(signing, "_sign_with_library", forbidden)
    assert key.sign(b"hello") == signature


def test_signature_of_a_real_server_verifies() -> None:
    root = etree.fromstring(
        wire_body("scheduler-first-contact.reply"), etree.XMLParser(recover=True, resolve_entities=False)
    )
    key = PublicKey.parse(root.findtext("code_sign_key") or "")
    signature = root.findtext("file_info/file_signature") or ""
    # The application itself is not here, but what was signed is its MD5, and that can be read back.
    value = pow(int("".join(signature.split())[:256], 16), key.exponent, key.modulus)
    md5 = value.to_bytes(128, "big")[-32:].decode()
    assert key.verify_digest(md5, signature)
    assert not key.verify_digest("0" * 32, signature)


@pytest.mark.parametrize("text", ["", "1024", "512\nab\n.\n", "1024\nxyz\n.\n", "2048\n" + "0" * 512 + "\n.\n"])
def test_wrong_key_files_are_refused(text: str) -> None:
    with pytest.raises(KeyFormatError):
        PublicKey.parse(text)


# Templates.

FILE = PublishedFile(name="in_1", url="http://h.x/in_1?a&b", md5="0" * 32, nbytes=3, path=Path("in_1"))


def test_workunit_document_has_boincs_shape() -> None:
    template = templates.input_template(
        [InputReference(open_name="data", sticky=True, no_delete=True)], min_quorum=2, target_nresults=3
    )
    document = templates.workunit_document(template, [FILE], command_line="--note 'a&b <c> é 模'")
    assert document.xml_doc == (
        "<file_info>\n    <sticky/>\n    <no_delete/>\n    <name>in_1</name>\n"
        "    <url>http://h.x/in_1?a&amp;b</url>\n"
        f"    <md5_cksum>{'0' * 32}</md5_cksum>\n    <nbytes>3</nbytes>\n</file_info>\n"
        "<workunit>\n<command_line>\n--note 'a&amp;b &lt;c&gt; é 模'\n</command_line>\n"
        "<file_ref>\n    <file_name>in_1</file_name>\n    <open_name>data</open_name>\n</file_ref>\n"
        "</workunit>"
    )
    etree.fromstring(f"<x>{document.xml_doc}</x>")
    assert document.columns["min_quorum"] == 2
    assert document.columns["max_total_results"] == 3, "raised to the target"
    row = templates.new_workunit(document, name="w", appid=4, result_template_file="templates/o", now=9)
    assert (row["transition_time"], row["size_class"], row["rsc_fpops_est"]) == (9, -1, 3.6e12)


WRONG_INPUT: list[tuple[str, dict[str, Any], str]] = [
    ("<input_template", {}, "not well-formed"),
    ("<file_info/>", {}, "no <workunit>"),
    ("<file_info/><workunit/>", {}, "1 <file_info> but 0"),
    ("<workunit/>", {"files": [FILE]}, "needs 0 files, 1 were given"),
    ("<workunit><command_line>a</command_line></workunit>", {"command_line": "b"}, "both"),
    ("<workunit/>", {"command_line": "a\nb"}, "line breaks"),
    ("<workunit/>", {"command_line": "a\x07"}, "control characters"),
    ("<workunit><min_quorum>two</min_quorum></workunit>", {}, "min_quorum"),
    ("<workunit/>", {"command_line": "x" * 65536}, "65"),
]


@pytest.mark.parametrize(("template", "arguments", "message"), WRONG_INPUT)
def test_wrong_input_templates_are_one_sentence(template: str, arguments: dict[str, Any], message: str) -> None:
    files = arguments.pop("files", [])
    with pytest.raises(TemplateError, match=message):
        templates.workunit_document(template, files, **arguments)


def test_names_and_paths_that_boinc_would_cut_are_refused() -> None:
    document = templates.workunit_document("<workunit/>", [])

    def make(name: str = "w", path: str = "templates/o", **columns: Any) -> dict[str, Any]:
        return templates.new_workunit(document, name=name, appid=1, result_template_file=path, now=1, **columns)

    make(path="t" * 63)
    for arguments in (
        {"path": "t" * 64},
        {"name": "w" * 181},
        {"name": ""},
        {"name": "my_upload_1"},
        {"name": "download"},
        {"name": "nodelete_1"},
        {"name": "a b"},
        {"name": "a&b"},
        {"target_nresults": 0},
        {"max_total_results": 0},
        {"min_quorum": 2},
    ):
        with pytest.raises(TemplateError):
            make(**arguments)


def test_result_document_is_named_and_certified() -> None:
    key = PrivateKey.generate()
    template = templates.output_template(
        [OutputReference(open_name="out", max_nbytes=500), OutputReference(open_name="log", max_nbytes=9)]
    )
    templates.check_output_template(template)
    text = templates.result_document(
        template, result_name="w_0", random=12, upload_url="http://h.x/file_upload_handler", key=key
    )
    assert "<result>\n" in text and text.endswith("</result>") and "OUTFILE" not in text
    assert "<report_immediately/>" in text
    first, second = templates.output_files(text)
    assert (first.name, first.open_name, first.max_nbytes) == ("w_0_r12_0", "out", 500)
    assert second.name == "w_0_r12_1"
    signatures = [text.split("<xml_signature>\n")[n].partition("</xml_signature>")[0] for n in (1, 2)]
    assert key.public.verify(b"<name>w_0_r12_0</name><max_nbytes>500</max_nbytes>", signatures[0])
    assert key.public.verify(b"<name>w_0_r12_1</name><max_nbytes>9</max_nbytes>", signatures[1])


@pytest.mark.parametrize("missing", ["<max_nbytes>500</max_nbytes>", "<result>\n", "<UPLOAD_URL/>"])
def test_output_template_that_fails_every_task_is_refused(missing: str) -> None:
    template = templates.output_template([OutputReference(open_name="out", max_nbytes=500)])
    with pytest.raises(TemplateError):
        templates.check_output_template(template.replace(missing, ""))


# App versions.


def test_app_version_is_signed_published_and_inserted_once(tree: ProjectTree) -> None:
    with tree.database() as db:
        publish_app(tree, db)
        assert app_versions.update_versions(tree, db) == []
        (row,) = rows(db, database.app_version)
    assert (row["version_num"], row["plan_class"]) == (100, "")
    root = etree.fromstring(f"<x>{row['xml_doc']}</x>")
    content = tree.app_file_path("uppercase_1.0").read_bytes()
    assert tree.code_sign_public().verify(content, root.findtext("file_info/file_signature") or "")
    assert root.find("file_info/executable") is not None
    assert root.findtext("app_version/api_version") == "7.20.5"
    assert "</app_version>\n" in row["xml_doc"]
    assert (tree.project_dir / "reread_db").exists()


MAIN = "<file><physical_name>a_1</physical_name><main_program/></file>"
WRONG_VERSION = [
    ("", "not well-formed"),
    ("<x/>", "root element"),
    ("<version/>", "exactly one file"),
    (f"<version>{MAIN}</version>", "api_version"),
    (f"<version>{MAIN}{MAIN}<api_version>7.20.5</api_version></version>", "exactly one file"),
    ("<version><file><physical_name>../a</physical_name><main_program/></file></version>", "not a file"),
    ("<version><file><main_program/></file></version>", "no <physical_name>"),
]


@pytest.mark.parametrize(("xml", "message"), WRONG_VERSION)
def test_wrong_app_version_is_one_sentence_naming_the_folder(tree: ProjectTree, xml: str, message: str) -> None:
    leaf = tree.project_dir / "apps" / "a" / "1.0" / "x86_64-pc-linux-gnu__cuda_12"
    leaf.mkdir(parents=True)
    (leaf / "a_1").write_text("#!/bin/sh\n")
    (leaf / "version.xml").write_text(xml)
    with tree.database() as db, pytest.raises(app_versions.AppVersionError, match=message) as error:
        app_versions.update_versions(tree, db)
    assert str(leaf) in str(error.value)


def test_changed_app_file_needs_a_new_name(tree: ProjectTree) -> None:
    with tree.database() as db:
        publish_app(tree, db)
        old = tree.project_dir / "apps" / "uppercase" / "1.0"
        new = shutil.copytree(old, old.parent / "1.1")
        (new / "x86_64-pc-linux-gnu" / "uppercase_1.0").write_text("#!/bin/sh\nexit 1\n")
        with pytest.raises(app_versions.AppVersionError, match="for ever"):
            app_versions.update_versions(tree, db)
        assert len(rows(db, database.app_version)) == 1


# Accounts.


def account(db: Database, **changes: str) -> dict[str, Any]:
    values = {"email": "a@example.org", "passwd_hash": "0" * 32, "name": "alice", **changes}
    with db.transaction() as connection:
        return accounts.create_account(connection, now=5, **values)


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ({"email": "x"}, accounts.BAD_EMAIL),
        ({"email": "a b@c"}, accounts.BAD_EMAIL),
        ({"passwd_hash": "short"}, accounts.BAD_PASSWORD),
        ({"email": "b@example.org", "name": ""}, accounts.BAD_USER_NAME),
        ({"email": "b@example.org", "name": "<b>"}, accounts.BAD_USER_NAME),
        ({"email": "b@example.org"}, accounts.NOT_UNIQUE),
        ({"passwd_hash": "1" * 32}, accounts.NOT_UNIQUE),
    ],
)
def test_wrong_accounts_are_refused_with_boincs_number(tree: ProjectTree, changes: dict[str, str], number: int) -> None:
    with tree.database() as db:
        account(db)
        with pytest.raises(accounts.AccountError) as error:
            account(db, **changes)
    assert error.value.number == number


def test_password_is_kept_salted_and_the_key_opens_the_account(tree: ProjectTree) -> None:
    with tree.database() as db:
        one, two = account(db), account(db, email="b@example.org", name="bob")
    assert one["passwd_hash"] != two["passwd_hash"]
    assert len(one["passwd_hash"]) <= 254
    assert accounts.check_password(one, "0" * 32) and not accounts.check_password(one, "1" * 32)
    by_key = hashlib.md5((one["authenticator"] + one["email_addr"]).encode()).hexdigest()
    assert accounts.check_password(one, by_key)
    assert not accounts.check_password({**one, "passwd_hash": "x"}, "0" * 32)


# File deleter.


def test_file_deleter_removes_what_is_ready_and_keeps_the_rest(tree: ProjectTree) -> None:
    with tree.database() as db:
        appid = publish_app(tree, db)
        add_workunits(tree, db, appid, 3)
        store = UploadStore(tree)
        output = templates.output_template([OutputReference(open_name="out", max_nbytes=5)])
        xml = templates.result_document(output, result_name="w_0_0", random=1, upload_url="u", key=None)
        upload = tree.upload_path("w_0_0_r1_0")
        upload.parent.mkdir(parents=True)
        upload.write_bytes(b"x")
        wu, result = database.workunit, database.result
        with db.transaction() as connection:
            connection.execute(wu.update().where(wu.c.name == "w_0").values(file_delete_state=1))
            kept = sa.func.replace(sa.cast(wu.c.xml_doc, sa.Text), "<name>", "<no_delete/><name>")
            connection.execute(wu.update().where(wu.c.name == "w_1").values(file_delete_state=1, xml_doc=kept))
            row = new_row(result, name="w_0_0", xml_doc_in=xml, file_delete_state=1)
            connection.execute(result.insert(), row)
        deleter = FileDeleter(tree, db, store)
        assert deleter.run_once() == 3
        assert deleter.run_once() == 0
        states = [row["file_delete_state"] for row in rows(db, wu)]
        assert states == [FileDeleteState.DONE, FileDeleteState.DONE, FileDeleteState.INIT]
        present = [tree.download_path(f"in_w_{number}").exists() for number in range(3)]
        assert present == [False, True, True]
        assert not upload.exists()


def test_unreadable_storage_is_an_error_that_is_tried_again(tree: ProjectTree) -> None:
    now = [0.0]
    with tree.database() as db:
        add_workunits(tree, db, publish_app(tree, db), 1)
        with db.transaction() as connection:
            connection.execute(database.workunit.update().values(file_delete_state=1))
        deleter = FileDeleter(tree, db, UploadStore(tree), clock=lambda: now[0])
        away = tree.config.download_dir.with_name("away")
        os.rename(tree.config.download_dir, away)
        assert deleter.run_once() == 0
        assert rows(db, database.workunit)[0]["file_delete_state"] == FileDeleteState.ERROR
        os.rename(away, tree.config.download_dir)
        assert deleter.run_once() == 0
        now[0] = 3601.0
        assert deleter.run_once() == 1
        assert rows(db, database.workunit)[0]["file_delete_state"] == FileDeleteState.DONE
