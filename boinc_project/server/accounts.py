"""Accounts: creating and looking them up as BOINC's web RPCs do.

Sources: BOINC `html/user/{create_account,lookup_account,am_get_info}.php`, `html/inc/{user_util,xml}.inc`,
`lib/error_numbers.h`. Clients never send a password, only H = MD5(password + lower-case e-mail address); of
that the database keeps a salted scrypt hash.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import escape

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from boinc_project import database
from boinc_project.server.scheduler import weak_key

#: BOINC's error numbers for web RPCs.
NOT_FOUND, NOT_UNIQUE, BAD_USER_NAME = -136, -137, -188
BAD_EMAIL, BAD_PASSWORD, CREATION_DISABLED = -205, -206, -208

_DECLARATION = '<?xml version="1.0" encoding="ISO-8859-1" ?>\n'
_EMAIL = re.compile(r"[^@\s\x00-\x1f]{1,64}@[^@\s\x00-\x1f]{1,120}")
_HASH = re.compile(r"[0-9a-f]{32}")

# About 50 ms and 16 MB each: slow enough for a guesser, quick enough for a volunteer.
_SCRYPT_N, _SCRYPT_R, _SCRYPT_P = 1 << 14, 8, 1

_USER = database.user


class AccountError(ValueError):
    """A web RPC's error; `number` is BOINC's."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


def password_hash(password: str, email: str) -> str:
    """What a client sends instead of the password."""
    return hashlib.md5((password + email.lower()).encode()).hexdigest()


def create_account(connection: Connection, *, email: str, passwd_hash: str, name: str, now: int) -> dict[str, Any]:
    """Insert a user and return the row; an existing account with the right hash is returned as it is.

    Raises AccountError.
    """
    email, name = email.strip(), name.strip()
    if not _EMAIL.fullmatch(email):
        raise AccountError(BAD_EMAIL, "Invalid email address")
    if not _HASH.fullmatch(passwd_hash):
        raise AccountError(BAD_PASSWORD, "Invalid password hash")
    existing = find_user(connection, email_addr=email)
    if existing is not None:
        if not check_password(existing, passwd_hash):
            raise AccountError(NOT_UNIQUE, "Name or email address is not unique")
        return existing
    if not name or len(name) > 60 or name != escape(name) or re.search(r"[\x00-\x1f\x7f]", name):
        raise AccountError(BAD_USER_NAME, "Invalid user name")
    if connection.scalar(sa.select(_USER.c.id).where(_USER.c.name == name)) is not None:
        raise AccountError(NOT_UNIQUE, "Name or email address is not unique")
    row = database.new_row(
        _USER,
        create_time=now,
        email_addr=email,
        name=name,
        authenticator=secrets.token_hex(16),
        cross_project_id=secrets.token_hex(16),
        passwd_hash=_protected(passwd_hash),
        country="International",
        expavg_time=float(now),
        send_email=1,
    )
    key = connection.execute(_USER.insert(), row).inserted_primary_key
    assert key is not None
    return {**row, "id": int(key[0])}


def lookup_account(connection: Connection, *, email: str, passwd_hash: str | None) -> dict[str, Any]:
    """The user with this e-mail address; the hash is checked unless None. Raises AccountError.

    MD5(authenticator + e-mail) is accepted as a hash, as on a stock server.
    """
    user = find_user(connection, email_addr=email.strip())
    if user is None:
        raise AccountError(NOT_FOUND, "Not found")
    if passwd_hash is not None and not check_password(user, passwd_hash):
        raise AccountError(BAD_PASSWORD, "Invalid password")
    return user


def find_user(connection: Connection, **column: str) -> dict[str, Any] | None:
    """The user row with this value in this column."""
    ((name, value),) = column.items()
    found = connection.execute(sa.select(_USER).where(_USER.c[name] == value)).mappings().first()
    return None if found is None else {str(key): each for key, each in found.items()}


def check_password(user: Mapping[str, Any], passwd_hash: str) -> bool:
    by_key = hashlib.md5((str(user["authenticator"]) + str(user["email_addr"])).encode()).hexdigest()
    if hmac.compare_digest(by_key.encode(), passwd_hash.encode("utf-8", "replace")):
        return True
    return _matches(str(user["passwd_hash"]), passwd_hash)


def _protected(secret: str) -> str:
    salt = secrets.token_bytes(16)
    return f"scrypt${_SCRYPT_N}${_SCRYPT_R}${_SCRYPT_P}${salt.hex()}${_scrypt(secret, salt).hex()}"


def _scrypt(secret: str, salt: bytes) -> bytes:
    return hashlib.scrypt(
        secret.encode("utf-8", "replace"),
        salt=salt,
        n=_SCRYPT_N,
        r=_SCRYPT_R,
        p=_SCRYPT_P,
        maxmem=64 << 20,
        dklen=32,
    )


def _matches(stored: str, secret: str) -> bool:
    fields = stored.split("$")
    if len(fields) != 6 or fields[:4] != ["scrypt", str(_SCRYPT_N), str(_SCRYPT_R), str(_SCRYPT_P)]:
        return False
    return hmac.compare_digest(_scrypt(secret, bytes.fromhex(fields[4])), bytes.fromhex(fields[5]))


# Replies.


def account_xml(user: Mapping[str, Any]) -> str:
    key = f"<authenticator>{user['authenticator']}</authenticator>"
    return f"{_DECLARATION}<account_out>\n{key}\n</account_out>\n"


def exists_xml() -> str:
    return f"{_DECLARATION}<account_out>\n<success/>\n</account_out>\n"


def error_xml(number: int, message: str) -> str:
    return (
        f"{_DECLARATION}<error>\n    <error_num>{number}</error_num>\n"
        f"    <error_msg>{escape(message)}</error_msg>\n</error>\n"
    )


def info_xml(user: Mapping[str, Any]) -> str:
    """The reply of am_get_info.php."""
    fields = {
        "id": user["id"],
        "name": quote(user["name"] or ""),
        "country": quote(user["country"] or ""),
        "weak_auth": weak_key(user),
        "cpid": user["cross_project_id"],
        "has_profile": user["has_profile"],
        "create_time": user["create_time"],
        "global_prefs": escape(user["global_prefs"] or ""),
        "project_prefs": escape(user["project_prefs"] or ""),
        "url": quote(user["url"] or ""),
        "send_email": user["send_email"],
        "show_hosts": user["show_hosts"],
        "teamid": user["teamid"],
        "venue": user["venue"],
    }
    lines = [f"    <{name}>{value}</{name}>" for name, value in fields.items()]
    return "\n".join([f"{_DECLARATION}<am_get_info_reply>", "    <success/>", *lines, "</am_get_info_reply>\n"])
