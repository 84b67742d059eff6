"""Which of this host's addresses the other hosts are told: the one on the way to them, unless the user names one.

EPRUNTIME_HOST_IP (an address, or a network that one of the host's addresses is in) > GLOO_SOCKET_IFNAME (an interface)
> a rank: the address on the route to the coordinator; the coordinator: the address by which the hosts found each other

Nothing is sent: routes are asked of the kernel.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from epruntime import envs
from epruntime.errors import ConfigError

HOST_IP, INTERFACE = "EPRUNTIME_HOST_IP", "GLOO_SOCKET_IFNAME"

_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
#: addresses that are nobody's (RFC 5737, RFC 3849): the route to them is the one to the rest of the world.
_FAR_AWAY = ("203.0.113.1", "2001:db8::1")

_IP = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, kw_only=True)
class HostAddress:
    """An address of this host.

    Attributes:
        address: IPv4 or IPv6, without a scope; interface: name of the network interface that has it.
        chosen_by: why this one, in words.
    """

    address: str
    interface: str
    chosen_by: str

    def __str__(self) -> str:
        return f"{self.address} on {self.interface}, by {self.chosen_by}"


@dataclass(frozen=True, kw_only=True)
class OwnAddress:
    """An address of an interface that is up."""

    interface: str
    ip: _IP
    loopback: bool


def rank_address(store_host: str, store_port: int) -> HostAddress:
    """The address at which the other ranks reach a rank of this host.

    It is on loopback where the coordinator is there, that is, where all ranks share this host, unless the user names
    another one.

    Args:
        store_host, store_port: of the coordinator, as this host reaches it.

    Raises:
        ConfigError: no route to the coordinator, or a variable that names no such address of this host.
    """
    target = _resolve(store_host, store_port)[0]
    several_hosts = not target.is_loopback
    named = _named(target.version if several_hosts else None, several_hosts=several_hosts)
    if named is not None:
        return named
    return _of(_route(target, store_host), f"the route to {store_host}")


def coordinator_address(meeting_points: Iterable[str] = ()) -> HostAddress:
    """The address at which ranks on other hosts reach the coordinator on this one; never loopback.

    Args:
        meeting_points: host names or addresses by which the hosts found each other; the first that helps is used.
            One that is this host's is known to be reachable.

    Raises:
        ConfigError: none can be told from the others, or a variable that names no such address of this host.
    """
    named = _named(None, several_hosts=True)
    if named is not None:
        return named
    own = {item.ip: item for item in own_addresses()}
    for point in meeting_points:
        for target in _try_resolve(point):
            if target.is_loopback:
                continue  # a name of this host that its own table gives a loopback address, as Debian does
            if target in own:
                return _of(target, f"the meeting point {point}")
            if (source := _try_route(target)) is not None:
                return _of(source, f"the route to {point}")
    for far in _FAR_AWAY:
        source = _try_route(ipaddress.ip_address(far))
        if source is not None and not source.is_loopback:
            return _of(source, "the default route")
    usable = [item for item in own.values() if not item.loopback and not item.ip.is_link_local]
    if len(usable) == 1:
        return HostAddress(address=str(usable[0].ip), interface=usable[0].interface, chosen_by="having no other")
    raise ConfigError(
        f"host {socket.gethostname()} has {'several addresses' if usable else 'no address'} that other hosts may "
        f"reach, and no route tells which: {_list(own.values())}. Set {HOST_IP} to the one that they reach"
    )


def own_addresses() -> list[OwnAddress]:
    """All IPv4 and IPv6 addresses of this host's interfaces that are up, in the system's order.

    Raises:
        OSError: the system does not tell.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Ifaddrs)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), f"getifaddrs: {os.strerror(ctypes.get_errno())}")
    found, node = [], first
    try:
        while node:
            entry = node.contents
            ip = _ip(entry.address) if entry.address and entry.flags & _IFF_UP else None
            if ip is not None:
                loopback = bool(entry.flags & _IFF_LOOPBACK) or ip.is_loopback
                found.append(OwnAddress(interface=entry.name.decode(), ip=ip, loopback=loopback))
            node = entry.next
    finally:
        libc.freeifaddrs(first)
    return found


def _named(version: int | None, *, several_hosts: bool) -> HostAddress | None:
    """The address that the user names; None if none is named.

    Args:
        version: 4 or 6, of the coordinator's address, which all ranks must share; None: either.
    """
    host_ip = str(envs.get(HOST_IP))
    interface = os.environ.get(INTERFACE, "").split(",")[0].strip()
    every = own_addresses()
    if host_ip:
        network = _network(host_ip)
        found = [item for item in every if item.ip in network]
        words = f"{HOST_IP}={host_ip}"
        remedy = "Each host has its own; a network that one address of each is in, as 10.0.0.0/8, does for all"
    elif interface:
        found = [item for item in every if item.interface == interface and not item.ip.is_link_local]
        words, remedy = f"{INTERFACE}={interface}", f"Name one of these interfaces, or set {HOST_IP} instead"
    else:
        return None
    place = f"host {socket.gethostname()}, which has {_list(every)}"
    if version is not None and found and not any(item.ip.version == version for item in found):
        raise ConfigError(f"{words}: the coordinator is reached by IPv{version}, and this is none: {place}. {remedy}")
    found = [item for item in found if version in (None, item.ip.version)]
    if not found:
        raise ConfigError(f"{words}: there is no such address on {place}. {remedy}")
    chosen = min(found, key=lambda item: (item.loopback, item.ip.version))  # of equals the first in the system's order
    if several_hosts and chosen.loopback:
        raise ConfigError(f"{words}: other hosts do not reach the loopback address of {place}. {remedy}")
    if chosen.ip.is_link_local:
        raise ConfigError(f"{words}: a link-local address means something on its own link only: {place}. {remedy}")
    return HostAddress(address=str(chosen.ip), interface=chosen.interface, chosen_by=words)


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text.strip("[]"), strict=False)
    except ValueError as error:
        raise ConfigError(
            f"environment variable {HOST_IP}={text!r}: must be an address of this host, as 10.0.0.5, or a network that "
            "one of its addresses is in, as 10.0.0.0/24"
        ) from error


def _resolve(host: str, port: int) -> list[_IP]:
    """Raises ConfigError: the name does not resolve."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ConfigError(
            f"store_host={host!r}: unknown on host {socket.gethostname()} ({error}); give every host a name for it, or "
            "the coordinator an address that this host reaches"
        ) from error
    return [ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found]


def _try_resolve(host: str) -> list[_IP]:
    try:
        return _resolve(host, 0)
    except ConfigError:
        return []  # the next meeting point may help


def _route(target: _IP, host: str) -> _IP:
    """Raises ConfigError: no route."""
    try:
        return _source(target)
    except OSError as error:
        raise ConfigError(
            f"store_host={host!r}: no route to it from host {socket.gethostname()} ({error}), which has "
            f"{_list(own_addresses())}; set {HOST_IP} on the coordinator's host to an address that this host reaches"
        ) from error


def _try_route(target: _IP) -> _IP | None:
    try:
        return _source(target)
    except OSError:
        return None  # no route there


def _source(target: _IP) -> _IP:
    """The address that packets of this host to `target` come from."""
    family = socket.AF_INET6 if target.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((str(target), 9))
        return ipaddress.ip_address(str(probe.getsockname()[0]).partition("%")[0])


def _of(ip: _IP, chosen_by: str) -> HostAddress:
    if ip.is_link_local:
        raise ConfigError(
            f"{ip} on host {socket.gethostname()} (by {chosen_by}) is link-local: it means something on its own "
            f"link only. Set {HOST_IP} to another of {_list(own_addresses())}"
        )
    interface = next((item.interface for item in own_addresses() if item.ip == ip), "?")
    return HostAddress(address=str(ip), interface=interface, chosen_by=chosen_by)


def _list(addresses: Iterable[OwnAddress]) -> str:
    return ", ".join(f"{item.ip} ({item.interface})" for item in addresses) or "no address"


class _Sockaddr(ctypes.Structure):
    _fields_: ClassVar = [("head", ctypes.c_ubyte * 2), ("data", ctypes.c_ubyte * 26)]


class _Ifaddrs(ctypes.Structure):
    pass


_Ifaddrs._fields_ = [
    ("next", ctypes.POINTER(_Ifaddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_Sockaddr)),  # what follows is of no interest here
]


def _ip(address: ctypes._Pointer[_Sockaddr]) -> _IP | None:
    """None for an address of another family."""
    head, data = bytes(address.contents.head), address.contents.data
    family = head[1] if sys.platform == "darwin" else int.from_bytes(head, sys.byteorder)
    if family == socket.AF_INET:
        return ipaddress.IPv4Address(bytes(data[2:6]))  # after the port
    if family == socket.AF_INET6:
        return ipaddress.IPv6Address(bytes(data[6:22]))  # after port and flow
    return None
