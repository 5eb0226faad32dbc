"""Whose copies of a workunit confirm one another: votes are counted by independent voters, at judging time.

Two copies are one vote if they are from

    one host, or one user (unless the admin of a private lab with one account lets hosts vote: --votes host),
    one file: the same bytes, times of the run included (validator/copies.py),
    one network (IPv4 /24, IPv6 /48), both being newcomers,
    one family of GPUs with one driver, where the job asks for independent devices or the family is suspect
    (validator/devices.py: whose word that is).

Being one vote is passed on: A with B and B with C makes A, B and C one. That errs on the side of one copy more. But a
copy whose file names another device than its client does, and which so would make one vote of others that are not, is
no vote itself: a stranger's file takes nobody's vote away. Copies
of a blocked group, or of a host with more bad results than good ones, are no vote. What BOINC's scheduler checks when
it sends (one_result_per_user_per_wu) is checked again here, because hosts change users and reports come from where they
like.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from boinc_project.reliability import is_distrusted, is_trusted, reliability
from validator.devices import cpu_family, device_of, gpus_of, reported_device

Row = Mapping[str, Any]


class Witness(NamedTuple):
    """Who made a copy, from the server's own records.

    network    its address without the last part; '' where that says nothing (unknown, private, loopback)
    newcomer   account, host or record are too young to carry a quorum
    devices    family and driver of the GPU that computed, by each who says so; none for a processor
    groups     names of the groups that the copy belongs to (validator/drift.py)
    trusted    one copy of this host may be enough; distrusted: its copies confirm nobody
    reliability  from 0 to 1
    """

    user: int
    host: int
    network: str = ""
    newcomer: bool = False
    devices: frozenset[str] = frozenset()
    groups: frozenset[str] = frozenset()
    trusted: bool = False
    distrusted: bool = False
    reliability: float = 0.0


_NOTHING_KNOWN = Witness(0, 0)[2:]


@dataclass(frozen=True)
class Votes:
    """voters: by result id, None for no vote; established: those who may carry a quorum; reasons: of each copy that is
    no vote of its own, why."""

    voters: Mapping[int, Hashable]
    established: frozenset[int]
    reasons: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Independence:
    """What makes copies one vote, and whose are none."""

    one_vote_per_user: bool = True
    devices: bool = False
    suspect: frozenset[str] = frozenset()  # names of groups whose members confirm one another no more
    blocked: frozenset[str] = frozenset()


def count_votes(witnesses: Mapping[int, Witness], files: Mapping[int, str], rules: Independence) -> Votes:
    """Label the copies of a workunit by independent voters. `files`: digest of the copies that are one file."""
    if not files and _are_strangers(witnesses, rules):
        return Votes({i: i for i in witnesses}, frozenset(witnesses))
    ties = {i: tuple(_ties(witness, files.get(i, ""), rules)) for i, witness in witnesses.items()}
    roots = _roots(ties)
    bridges = {i for i, witness in witnesses.items() if rules.devices and len(witness.devices) > 1 and _joins(i, ties)}
    if bridges:
        roots = {**roots, **_roots({i: each for i, each in ties.items() if i not in bridges})}
    voters: dict[int, Hashable] = {
        i: None if i in bridges or witness.distrusted or witness.groups & rules.blocked else roots[i]
        for i, witness in witnesses.items()
    }
    established = frozenset(i for i, witness in witnesses.items() if not witness.newcomer)
    return Votes(voters, established, _reasons(voters, ties, witnesses, rules))


def _reasons(
    voters: Mapping[int, Hashable], ties: _Ties, witnesses: Mapping[int, Witness], rules: Independence
) -> dict[int, str]:
    """Why each copy that is no vote of its own is none, for the log."""
    found: dict[int, str] = {}
    for i, voter in voters.items():
        if voter is None:
            blocked = sorted(witnesses[i].groups & rules.blocked)
            if witnesses[i].distrusted:
                why = "its host has returned too much that was wrong"
            else:
                why = f"{blocked[0]} is blocked" if blocked else "its file names another device than its client does"
            found[i] = f"[RESULT#{i}] has no vote ({why})"
        elif voter != i:
            others = {tie for j in voters if j != i and voters[j] == voter for tie in ties[j]}
            shared = sorted({_ONE[kind] for kind, name in ties[i] if (kind, name) in others})
            found[i] = f"[RESULT#{i}] is one vote with [RESULT#{voter}] ({', '.join(shared)})"
    return found


#: What makes copies one vote, in words.
_ONE = {
    "host": "one host",
    "user": "one user",
    "file": "the same file",
    "network": "newcomers of one network",
    "device": "one family of devices",
    "suspect": "one suspect group",
}

_Ties = Mapping[int, tuple[tuple[str, Hashable], ...]]


def _roots(ties: _Ties) -> dict[int, int]:
    """Of each copy the smallest id of those that it is tied to: that does not depend on the order."""
    parent = {identifier: identifier for identifier in ties}

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    first: dict[tuple[str, Hashable], int] = {}
    for identifier in sorted(ties):
        for tie in ties[identifier]:
            a, b = root(identifier), root(first.setdefault(tie, identifier))
            parent[max(a, b)] = min(a, b)
    return {identifier: root(identifier) for identifier in ties}


def _joins(identifier: int, ties: _Ties) -> bool:
    """Whether a copy alone makes one vote of others that are more without it."""
    others = _roots({i: each for i, each in ties.items() if i != identifier})
    mine = set(ties[identifier])
    return len({root for i, root in others.items() if mine.intersection(ties[i])}) > 1


def _are_strangers(witnesses: Mapping[int, Witness], rules: Independence) -> bool:
    """The common case, told quickly: all users and hosts differ, and nothing else is known of them."""
    known = witnesses.values()
    return (
        len({witness.host for witness in known}) == len(witnesses)
        and (not rules.one_vote_per_user or len({witness.user for witness in known}) == len(witnesses))
        and all(witness[2:] == _NOTHING_KNOWN for witness in known)
    )


def _ties(witness: Witness, file: str, rules: Independence) -> Iterable[tuple[str, Hashable]]:
    yield "host", witness.host
    if rules.one_vote_per_user:
        yield "user", witness.user
    if file:
        yield "file", file
    if witness.newcomer and witness.network:
        yield "network", witness.network
    if rules.devices:
        for name in sorted(witness.devices):
            yield "device", name
    for name in sorted(witness.groups & rules.suspect):
        yield "suspect", name


# From BOINC's rows.


@dataclass(frozen=True)
class Records:
    """What the database says of the makers of some results, by id (gt_trust: by host and kind)."""

    hosts: Mapping[int, Row] = field(default_factory=dict)
    users: Mapping[int, Row] = field(default_factory=dict)
    versions: Mapping[int, Row] = field(default_factory=dict)
    trust: Mapping[tuple[int, str], Row] = field(default_factory=dict)


@dataclass(frozen=True)
class Newcomers:
    """Until when somebody is a newcomer: days since the account and the host were made, valid results."""

    days: float = 0.0
    results: int = 0


def witness_of(
    result: Row, kind: str, records: Records, newcomers: Newcomers, now: float, said: Mapping[str, Any] | None = None
) -> Witness:
    """The maker of a result. `said`: what the result's file says of itself."""
    host, user = records.hosts.get(int(result["hostid"]), {}), records.users.get(int(result["userid"]), {})
    record = records.trust.get((int(result["hostid"]), kind))
    youngest = max(float(host.get("create_time") or 0), float(user.get("create_time") or 0))
    young = newcomers.days > 0 and now - youngest < newcomers.days * 86400
    unproven = newcomers.results > 0 and (record is None or int(record["valid"]) < newcomers.results)
    plan_class = str(records.versions.get(int(result["app_version_id"]), {}).get("plan_class") or "")
    recorded, reported = recorded_device(result, plan_class, host), reported_device(said or {})
    groups = groups_of(result, plan_class, recorded, host) | _device_groups(reported)
    return Witness(
        user=int(result["userid"]),
        host=int(result["hostid"]),
        network=network_of(str(host.get("external_ip_addr") or "")),
        newcomer=young or unproven,
        devices=frozenset(" ".join(each).strip() for each in (recorded, reported) if each[0]),
        groups=groups,
        trusted=is_trusted(record, now),
        distrusted=is_distrusted(record, now),
        reliability=reliability(record, now),
    )


def recorded_device(result: Row, plan_class: str, host: Row) -> tuple[str, str]:
    """Family and driver of the GPU that a result was sent to, by the server's records."""
    gpus = gpus_of(str(host.get("serialnum") or ""), str(host.get("misc") or ""))
    return device_of(plan_class, int(result["app_version_id"]), gpus)


def groups_of(result: Row, plan_class: str, device: tuple[str, str], host: Row) -> frozenset[str]:
    """The groups of a result: by host, user, app version, plan class, device family, device family and driver; or by
    the family of the processor, where that computed."""
    names = {f"host:{result['hostid']}", f"user:{result['userid']}", f"version:{result['app_version_id']}"}
    if plan_class:
        names.add(f"class:{plan_class}")
    names |= _device_groups(device)
    if not device[0] and (family := cpu_family(str(host.get("p_vendor") or ""), str(host.get("p_model") or ""))):
        names.add(f"cpu:{family}")
    return frozenset(names)


def _device_groups(device: tuple[str, str]) -> frozenset[str]:
    family, driver = device
    if not family:
        return frozenset()
    return frozenset({f"device:{family}", *({f"driver:{family} {driver}"} if driver else ())})


def network_of(recorded: str) -> str:
    """The /24 of an IPv4 address or the /48 of an IPv6 one; '' for one that is none, or no public one.

    `recorded`: host.external_ip_addr. Behind a proxy that is a list (X-Forwarded-For), of which only the last address
    was written by the server's own proxy; a volunteer can send the others.
    """
    try:
        parsed = ipaddress.ip_address(recorded.rpartition(",")[2].strip())
    except ValueError:
        return ""
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    if parsed.is_private or parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified:
        return ""
    return str(ipaddress.ip_network((parsed, 24 if parsed.version == 4 else 48), strict=False))
