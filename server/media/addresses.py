"""Which addresses a server may fetch from: public ones only, so that no request reaches what is inside its network."""

from __future__ import annotations

import ipaddress

NOT_PUBLIC_4 = tuple(
    map(
        ipaddress.IPv4Network,
        (
            "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24 "
            "192.31.196.0/24 192.52.193.0/24 192.88.99.0/24 192.168.0.0/16 192.175.48.0/24 198.18.0.0/15 "
            "198.51.100.0/24 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4"
        ).split(),
    )
)
GLOBAL_6 = ipaddress.IPv6Network("2000::/3")  # all else is mapped, translated, local, multicast or not assigned
NOT_PUBLIC_6 = tuple(  # of these: Teredo, benchmarks, ORCHID, documentation, 6to4, segment routing
    map(
        ipaddress.IPv6Network,
        "2001::/23 2001:db8::/32 2002::/16 2620:4f:8000::/48 3fff::/20".split(),
    )
)


def is_public(text: str) -> bool:
    """Whether this is the text of a public unicast address. Addresses that hold another one (IPv4-mapped, 6to4, NAT64,
    Teredo) are not public, whichever they hold.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in NOT_PUBLIC_4)
    return address.scope_id is None and address in GLOBAL_6 and not any(address in network for network in NOT_PUBLIC_6)
