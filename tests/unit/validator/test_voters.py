"""Independence of voters, host reliability, and draws that nobody can foresee."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from boinc_project.reliability import (
    HALF_LIFE_S,
    TRUSTED_AFTER,
    is_distrusted,
    is_trusted,
    lower_bound,
    member_weight,
    reliability,
)
from validator.agreement import Copy, judge
from validator.devices import cpu_family, device_of, gpus_of, reported_device
from validator.lottery import Lottery
from validator.replication import why_not_alone
from validator.voters import (
    Independence,
    Newcomers,
    Records,
    Witness,
    count_votes,
    network_of,
    witness_of,
)

NOW = 2_000_000_000.0
DAY = 86400


def votes(witnesses: dict[int, Witness], rules: Independence | None = None, files: dict[int, str] | None = None) -> int:
    """Voters of a group of all these copies."""
    return len(set(count_votes(witnesses, files or {}, rules or Independence()).voters.values()) - {None})


def test_copies_of_different_users_and_hosts_are_as_many_votes() -> None:
    assert votes({1: Witness(1, 1), 2: Witness(2, 2), 3: Witness(3, 3)}) == 3


def test_two_hosts_of_one_user_and_one_host_of_two_users_are_one_vote() -> None:
    assert votes({1: Witness(7, 1), 2: Witness(7, 2)}) == 1
    assert votes({1: Witness(7, 1), 2: Witness(8, 1)}) == 1


def test_in_a_private_lab_the_hosts_of_one_user_vote_and_one_host_still_votes_once() -> None:
    lab = Independence(one_vote_per_user=False)
    assert votes({1: Witness(7, 1), 2: Witness(7, 2)}, lab) == 2
    assert votes({1: Witness(7, 1), 2: Witness(7, 1)}, lab) == 1


def test_one_file_from_two_hosts_is_one_vote() -> None:
    assert votes({1: Witness(1, 1), 2: Witness(2, 2), 3: Witness(3, 3)}, files={1: "a", 2: "a"}) == 2


def test_newcomers_of_one_network_are_one_vote_and_members_of_long_standing_are_not() -> None:
    def pair(newcomer: bool, *networks: str) -> dict[int, Witness]:
        return {n: Witness(n, n, network=net, newcomer=newcomer) for n, net in enumerate(networks)}

    assert votes(pair(True, "192.0.2.0/24", "192.0.2.0/24")) == 1
    assert votes(pair(True, "192.0.2.0/24", "198.51.100.0/24")) == 2
    assert votes(pair(True, "", "")) == 2
    assert votes(pair(False, "192.0.2.0/24", "192.0.2.0/24")) == 2


def test_gpus_of_one_family_and_driver_are_one_vote_where_devices_must_be_independent() -> None:
    same = {n: Witness(n, n, devices=frozenset({"Radeon RX 5700 20.1"})) for n in (1, 2)}
    devices = Independence(devices=True)
    assert votes(same) == 2
    assert votes(same, devices) == 1
    assert votes({**same, 3: Witness(3, 3)}, devices) == 2
    assert votes({1: Witness(1, 1), 2: Witness(2, 2)}, devices) == 2, "processors are no family"


def test_members_of_a_suspect_group_confirm_one_another_no_more_and_those_of_a_blocked_one_have_no_vote() -> None:
    group = {n: Witness(n, n, groups=frozenset({"class:cuda_gt", f"host:{n}"})) for n in (1, 2)}
    assert votes(group, Independence(suspect=frozenset({"class:cuda_gt"}))) == 1
    assert votes(group, Independence(blocked=frozenset({"class:cuda_gt"}))) == 0
    assert votes(group, Independence(blocked=frozenset({"host:1"}))) == 1


@pytest.mark.parametrize("order", list(itertools.permutations([1, 2, 3])))
def test_labels_do_not_depend_on_the_order_and_ties_are_passed_on(order: tuple[int, ...]) -> None:
    chain = {1: Witness(1, 1), 2: Witness(1, 2), 3: Witness(3, 2)}
    assert count_votes({i: chain[i] for i in order}, {}, Independence()).voters == {1: 1, 2: 1, 3: 1}


# --- newcomers in a quorum --------------------------------------------------------------------------------------------


def canonical(*copies: Copy) -> int | None:
    ids = [copy.identifier for copy in copies]
    return judge(copies, dict.fromkeys(itertools.combinations(sorted(ids), 2), 0.0), 1.0, 2).canonical


def test_newcomers_alone_need_one_voter_more_than_members_do() -> None:
    assert canonical(Copy(1, "a", False), Copy(2, "b", False)) is None
    assert canonical(Copy(1, "a", False), Copy(2, "b", True)) is not None
    assert canonical(Copy(1, "a", False), Copy(2, "b", False), Copy(3, "c", False)) is not None


def test_copies_without_a_vote_do_not_make_a_quorum_and_carry_none() -> None:
    assert canonical(Copy(1, None), Copy(2, None), Copy(3, "c")) is None
    assert canonical(Copy(1, None, True), Copy(2, "b", False), Copy(3, "c", False)) is None
    assert canonical(Copy(1, None), Copy(2, "b"), Copy(3, "c")) is not None


# --- what rows say ----------------------------------------------------------------------------------------------------

RESULT = {"id": 5, "hostid": 3, "userid": 2, "app_version_id": 9}


def witness(host: dict[str, Any], user: dict[str, Any], newcomers: Newcomers, trust: Any = None) -> Witness:
    records = Records({3: host}, {2: user}, {9: {"plan_class": "cuda_gt"}}, {} if trust is None else {(3, "k"): trust})
    return witness_of(RESULT, "k", records, newcomers, NOW)


OLD, YOUNG = {"create_time": NOW - 30 * DAY}, {"create_time": NOW - DAY}


@pytest.mark.parametrize(
    ("host", "user", "newcomers", "valid", "expected"),
    [
        (OLD, OLD, Newcomers(), None, False),
        (YOUNG, YOUNG, Newcomers(), None, False),
        (OLD, OLD, Newcomers(days=7), None, False),
        (YOUNG, OLD, Newcomers(days=7), None, True),
        (OLD, YOUNG, Newcomers(days=7), None, True),
        (OLD, OLD, Newcomers(results=5), None, True),
        (OLD, OLD, Newcomers(results=5), 4, True),
        (OLD, OLD, Newcomers(results=5), 5, False),
    ],
)
def test_who_is_a_newcomer(
    host: dict[str, Any], user: dict[str, Any], newcomers: Newcomers, valid: int | None, expected: bool
) -> None:
    trust = None if valid is None else record(good=valid, valid=valid)
    assert witness(host, user, newcomers, trust).newcomer is expected


def test_groups_and_device_come_from_app_version_and_host() -> None:
    found = witness(
        {**OLD, "serialnum": "[BOINC|7.20.5][CUDA|GTX 1080|1|8192MB|53512|300]", "external_ip_addr": "203.0.114.9"},
        OLD,
        Newcomers(),
    )
    assert found.devices == {"GTX 1080 53512"} and found.network == "203.0.114.0/24"
    assert found.groups == {
        "host:3", "user:2", "version:9", "class:cuda_gt", "device:GTX 1080", "driver:GTX 1080 53512",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("plan_class", "version", "serial", "expected"),
    [
        ("", 9, "[CUDA|GTX 1080|1|8192MB|53512|300]", ("", "")),
        ("opencl_ati_vliw_gt", 9, "[CAL|AMD Cypress|1|1024MB|1.4.1848|120]", ("AMD Cypress", "1.4.1848")),
        ("opencl_ati_vliw_gt", 9, "[CUDA|GTX 1080|1|8192MB|53512|300]", ("amd", "")),
        ("cuda_gt", 9, "[NVIDIA|GTX 1080|1]", ("GTX 1080", "")),
        ("cuda_gt", 9, "[CUDA|", ("nvidia", "")),
        ("", -3, "[CUDA|GTX 1080|1|8192MB|53512|300]", ("GTX 1080", "53512")),
        ("", -2, "[CUDA|GTX 1080|1|8192MB|53512|300]", ("", "")),
    ],
)
def test_family_and_driver(plan_class: str, version: int, serial: str, expected: tuple[str, str]) -> None:
    assert device_of(plan_class, version, gpus_of(serial, "")) == expected


#: As BOINC 8.3 prints it (sched/sched_host.cpp), with a name that makes it no JSON.
MISC = """{
    "client_version": "8.2.4",
    "gpus": [
        {
            "type": "nvidia",
            "model": "NVIDIA GeForce GTX 1080",
            "count": 1,
            "ram_mb": 8191,
            "driver_version": "53512",
            "opencl_version": "300"
        },
        {
            "type": "amd",
            "model": "Radeon\\ RX 5700 <b>",
            "count": 1,
            "ram_mb": 8176,
            "driver_version": "3380.6",
            "opencl_version": "200"
        }
    ]
}"""


def test_newer_servers_keep_gpus_in_misc_and_a_cut_or_strange_text_gives_what_is_whole_in_it() -> None:
    assert device_of("cuda_gt", 9, gpus_of("", MISC)) == ("NVIDIA GeForce GTX 1080", "53512")
    assert device_of("opencl_ati_gcn_gt", 9, gpus_of("", MISC)) == ("Radeon\\ RX 5700 <b>", "3380.6")
    assert device_of("opencl_ati_gcn_gt", 9, gpus_of("", MISC[:400])) == ("amd", "")
    assert gpus_of("", "") == gpus_of("[vbox|7.1.6|1|1]", "[" * 10000) == []


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"device": {"device": "NVIDIA H200", "driver": "570.1", "backend": "torch"}}, ("NVIDIA H200", "570.1")),
        ({"device": {"device": " Cypress\n\x1b[2J ", "driver": 7}}, ("Cypress [2J", "")),
        ({"device": {"device": "cpu", "driver": "1"}}, ("", "")),
        ({"device": {"device": "x" * 10000}}, ("x" * 100, "")),
        ({"device": {"device": ["GTX"]}}, ("", "")),
        ({"device": "GTX"}, ("", "")),
        ({}, ("", "")),
    ],
)
def test_the_device_that_a_result_s_file_names_is_hostile_text(said: dict[str, Any], expected: tuple[str, str]) -> None:
    assert reported_device(said) == expected


def test_the_file_s_own_word_can_cost_a_vote_and_never_gains_one() -> None:
    def made(number: int, said: str, driver: str = "53512") -> Witness:
        host = {**OLD, "serialnum": f"[CUDA|GTX 1080|1|8192MB|{driver}|300]"}
        records = Records({number: host}, {number: OLD}, {9: {"plan_class": "cuda_gt"}})
        result = {"hostid": number, "userid": number, "app_version_id": 9}
        return witness_of(result, "k", records, Newcomers(), NOW, {"device": {"device": said, "driver": "535.12"}})

    rules = Independence(devices=True)
    assert votes({1: made(1, "A"), 2: made(2, "B")}, rules) == 1, "the client names the same card"
    assert votes({1: made(1, "A"), 2: made(2, "B", "60000")}, rules) == 2
    assert votes({1: made(1, "A"), 2: made(2, "A", "60000")}, rules) == 1, "the files do"
    assert votes({1: made(1, "A")}, Independence(blocked=frozenset({"device:A"}))) == 0
    assert votes({1: made(1, "A")}, Independence(blocked=frozenset({"driver:GTX 1080 53512"}))) == 0


@pytest.mark.parametrize("order", list(itertools.permutations([1, 2, 3])))
def test_a_file_that_names_a_second_device_takes_no_vote_from_others(order: tuple[int, ...]) -> None:
    """Or one copy, right or wrong, would keep two honest ones from confirming each other."""
    devices = {order[0]: {"X", "x"}, order[1]: {"Y", "y"}, order[2]: {"X", "y"}}
    made = {n: Witness(n, n, devices=frozenset(names)) for n, names in devices.items()}
    found = count_votes(made, {}, Independence(devices=True)).voters
    assert found[order[2]] is None and len({found[order[0]], found[order[1]]}) == 2
    for other in order[:2]:
        assert votes({n: made[n] for n in (other, order[2])}, Independence(devices=True)) == 1


@pytest.mark.parametrize(
    ("vendor", "model", "family"),
    [
        (
            "GenuineIntel",
            "Intel(R) Core(TM) i7-8550U CPU @ 1.80GHz [Family 6 Model 142 Stepping 10]",
            "GenuineIntel Family 6 Model 142",
        ),
        ("GenuineIntel", "Intel(R) Core(TM) i7-8550U CPU @ 1.80GHz", "GenuineIntel Intel(R) Core(TM) i7-8550U CPU"),
        ("ARM", "Cortex-A76 [Impl 0x41 Arch 8]", "ARM Cortex-A76"),
        ("", "", ""),
    ],
)
def test_families_of_processors(vendor: str, model: str, family: str) -> None:
    assert cpu_family(vendor, model) == family


def test_a_processor_s_family_is_a_group_that_can_be_blocked_and_ties_nobody() -> None:
    host = {**OLD, "p_vendor": "GenuineIntel", "p_model": "Core [Family 6 Model 142 Stepping 10]"}
    both = {
        n: witness_of({"hostid": n, "userid": n, "app_version_id": 9}, "k", Records({n: host}), Newcomers(), NOW)
        for n in (1, 2)
    }
    group = "cpu:GenuineIntel Family 6 Model 142"
    assert group in both[1].groups and votes(both, Independence(devices=True)) == 2
    assert votes(both, Independence(blocked=frozenset({group}))) == 0
    assert votes(both, Independence(suspect=frozenset({group}))) == 1


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("8.8.4.4", "8.8.4.0/24"),
        ("2001:4860:4860::8888", "2001:4860:4860::/48"),
        ("::ffff:8.8.4.4", "8.8.4.0/24"),
        ("192.168.1.7", ""),
        ("127.0.0.1", ""),
        ("fe80::1", ""),
        ("", ""),
        ("not an address", ""),
        ("8.8.8.8, 203.0.114.9", "203.0.114.0/24"),  # behind a proxy: the last is what that one has seen
        ("203.0.114.9, 10.0.0.1", ""),
        ("?.?.?.?", ""),
    ],
)
def test_networks_of_public_addresses(address: str, network: str) -> None:
    assert network_of(address) == network


# --- reliability ------------------------------------------------------------------------------------------------------


def record(**columns: Any) -> dict[str, Any]:
    return {
        "valid": 0,
        "good": 0.0,
        "bad": 0.0,
        "unlike": 0.0,
        "consecutive_valid": 0,
        "judge_time": NOW,
        "failed_check": 0.0,
        "alone": 0,
        **columns,
    }


@pytest.mark.parametrize(
    ("good", "bad", "expected"),
    [(0, 0, 0.0), (10, 0, 0.787), (25, 0, 0.902), (100, 0, 0.974), (99, 1, 0.956), (0, 5, 0.0), (50, 50, 0.419)],
)
def test_reliability_is_the_lower_end_of_wilson_s_interval(good: float, bad: float, expected: float) -> None:
    assert lower_bound(good, bad) == pytest.approx(expected, abs=0.001)
    assert reliability(record(good=good, bad=bad), NOW) == lower_bound(good, bad)


def test_more_evidence_and_fewer_faults_never_lower_it() -> None:
    for good, bad in itertools.product(range(0, 60, 7), range(0, 20, 3)):
        assert 0 <= lower_bound(good, bad + 1) <= lower_bound(good, bad) <= lower_bound(good + 1, bad) < 1


def test_evidence_halves_in_thirty_days_and_a_clock_set_back_changes_nothing() -> None:
    old = record(good=100, judge_time=NOW - HALF_LIFE_S)
    assert reliability(old, NOW) == pytest.approx(lower_bound(50, 0))
    assert reliability(record(good=100, judge_time=NOW + 5), NOW) == lower_bound(100, 0)


@pytest.mark.parametrize("word", ["bad", "unlike"])
def test_a_bad_or_differing_result_ends_the_trust_of_any_host_for_longer_each_time(word: str) -> None:
    for count in range(6):
        needed = TRUSTED_AFTER * 2**count
        assert is_trusted(record(good=1000, consecutive_valid=needed, **{word: count}), NOW)
        assert not is_trusted(record(good=1000, consecutive_valid=needed - 1, **{word: count}), NOW)
    assert not is_trusted(record(good=9e6, consecutive_valid=10**6, **{word: 1e5}), NOW)
    half = record(good=1000, judge_time=NOW - HALF_LIFE_S, **{word: 2})
    assert is_trusted({**half, "consecutive_valid": 2 * TRUSTED_AFTER}, NOW)
    assert not is_trusted({**half, "consecutive_valid": 2 * TRUSTED_AFTER - 1}, NOW)


def test_who_has_no_record_or_little_is_not_trusted_and_what_differed_costs_no_vote() -> None:
    assert not is_distrusted(record(unlike=50), NOW)
    assert not is_trusted(record(good=20, consecutive_valid=20), NOW)
    assert not is_trusted(None, NOW)


def test_an_unknown_member_counts_half_and_a_proven_one_nearly_whole() -> None:
    assert member_weight(None, NOW) == 0.5
    assert member_weight(record(good=100), NOW) == pytest.approx(0.987, abs=0.001)


# --- draws ------------------------------------------------------------------------------------------------------------

LOTTERY = Lottery(b"secret")


def test_draws_happen_at_their_rate_repeat_themselves_and_depend_on_the_secret_and_the_purpose() -> None:
    drawn = [LOTTERY.drawn(0.1, "audit", f"wu{n}", n) for n in range(5000)]
    assert 400 < sum(drawn) < 600
    assert drawn == [LOTTERY.drawn(0.1, "audit", f"wu{n}", n) for n in range(5000)]
    assert drawn != [Lottery(b"other").drawn(0.1, "audit", f"wu{n}", n) for n in range(5000)]
    assert drawn != [LOTTERY.drawn(0.1, "spot", f"wu{n}", n) for n in range(5000)]
    assert LOTTERY.drawn(1.0, "audit", "wu") and not LOTTERY.drawn(0.0, "audit", "wu")


PROVEN = Witness(1, 1, trusted=True, reliability=0.99)


def test_a_copy_stands_alone_only_if_its_host_is_trusted_nothing_is_strange_and_no_audit_falls_on_it() -> None:
    never, always = 1e-9, 1.0
    certain = Witness(1, 1, trusted=True, reliability=1.0)
    assert why_not_alone(certain, LOTTERY, never, "wu", 1, "") == ""
    assert "not trusted" in why_not_alone(Witness(1, 1, reliability=0.8), LOTTERY, never, "wu", 1, "")
    assert "newcomer" in why_not_alone(Witness(1, 1, newcomer=True, trusted=True), LOTTERY, never, "wu", 1, "")
    assert why_not_alone(certain, LOTTERY, never, "wu", 1, "its norm is odd") == "its norm is odd"
    assert "audit" in why_not_alone(certain, LOTTERY, always, "wu", 1, "")


def test_a_host_that_lies_in_a_tenth_of_its_work_after_long_good_conduct_is_found_soon() -> None:
    """O10: with the floor of 5 % an audit meets a lie after 200 results on the mean, whatever has gone before."""
    undetected = []
    for seed in range(20):
        draw = Lottery(bytes([seed]))
        for n in range(5000):
            lies = n % 10 == 0
            if lies and why_not_alone(PROVEN, draw, 0.05, f"wu{n}", n, ""):
                undetected.append(n // 10)
                break
    assert len(undetected) == 20 and sum(undetected) / 20 < 40


def test_a_host_with_more_bad_results_than_good_ones_has_no_vote_until_good_ones_outnumber_them() -> None:
    def voter(good: float, bad: float) -> object:
        made = witness(OLD, OLD, Newcomers(), record(good=good, bad=bad))
        return count_votes({1: made}, {}, Independence()).voters[1]

    assert voter(0, 2) is not None, "two accidents"
    assert voter(2, 3) is None
    assert voter(4, 3) is not None


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({}, False),
        ({"good": 5, "bad": 2}, False),
        ({"good": 2, "bad": 3}, True),
        ({"good": 0, "bad": 1, "failed_check": NOW}, True),
        ({"good": 9, "bad": 1, "failed_check": NOW, "consecutive_valid": 9}, True),
        ({"good": 10, "bad": 1, "failed_check": NOW, "consecutive_valid": 10}, False),
    ],
)
def test_who_has_no_vote(named: dict[str, float], expected: bool) -> None:
    row = {
        "good": 0.0,
        "bad": 0.0,
        "unlike": 0.0,
        "failed_check": 0.0,
        "consecutive_valid": 0,
        "judge_time": NOW,
        **named,
    }
    assert is_distrusted(row, NOW) is expected


@pytest.mark.parametrize(
    ("second", "files", "rules", "why"),
    [
        (Witness(1, 2), {}, Independence(), "is one vote with [RESULT#1] (one user)"),
        (Witness(2, 1), {}, Independence(), "is one vote with [RESULT#1] (one host)"),
        (Witness(2, 2), {1: "d", 2: "d"}, Independence(), "is one vote with [RESULT#1] (the same file)"),
        (Witness(2, 2, distrusted=True), {}, Independence(), "has no vote (its host has returned too much that"),
        (
            Witness(2, 2, groups=frozenset({"device:X"})),
            {},
            Independence(blocked=frozenset({"device:X"})),
            "has no vote (device:X is blocked)",
        ),
    ],
)
def test_why_a_copy_is_no_vote_of_its_own_is_told(
    second: Witness, files: dict[int, str], rules: Independence, why: str
) -> None:
    (reason,) = count_votes({1: Witness(1, 1), 2: second}, files, rules).reasons.values()
    assert reason.startswith(f"[RESULT#2] {why}")


def test_copies_that_are_votes_of_their_own_need_no_reason() -> None:
    made = {1: Witness(1, 1, reliability=0.5), 2: Witness(2, 2)}
    assert count_votes(made, {}, Independence()).reasons == {}
