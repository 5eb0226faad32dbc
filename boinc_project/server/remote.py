"""The address that a request comes from, as BOINC's scheduler keeps it in host.external_ip_addr.

BOINC (`sched/handle_request.cpp`, get_remote_addr) writes, with every request, the header X-Forwarded-For where there
is one, as it stands, else the address of whoever connected. So does this server behind a proxy: the list, whose last
address is what the proxy nearest to the server has seen. Where there is no proxy the header is the volunteer's own
word; it is left aside, and so is whatever in it is no address.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

UNKNOWN = "?.?.?.?"  # BOINC's word for it
MOST_CHARACTERS = 254  # of the column


def remote_address(peer: str | None, forwarded: Sequence[str], master_url: str) -> str:
    """What to write. `peer`: who connected; `forwarded`: the request's headers X-Forwarded-For in their order.

    A proxy is in front if the project's URL is https, which this server does not speak, or if the peer is on this
    computer or in its network.
    """
    seen = _address(peer or "")
    if master_url.startswith("https:") or (seen is not None and not seen.is_global):
        named = [str(each) for each in map(_address, ",".join(forwarded).split(",")) if each is not None]
        while len(", ".join(named)) > MOST_CHARACTERS:
            del named[0]  # invented most likely
        if named:
            return ", ".join(named)
    return UNKNOWN if seen is None else str(seen)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text.strip())
    except ValueError:
        return None
