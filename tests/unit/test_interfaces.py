"""Which address a host gives to the others: by route, by name, and never loopback where hosts differ."""

from __future__ import annotations

import ipaddress
import socket
import subprocess

import pytest

from epruntime.comm import interfaces
from epruntime.comm.interfaces import OwnAddress, coordinator_address, own_addresses, rank_address
from epruntime.errors import ConfigError


def own(interface: str, address: str) -> OwnAddress:
    ip = ipaddress.ip_address(address)
    return OwnAddress(interface=interface, ip=ip, loopback=ip.is_loopback)


#: a host with two networks, one of them with both kinds of addresses
HOST = [
    own("lo", "127.0.0.1"),
    own("eth0", "10.0.0.5"),
    own("ib0", "10.9.0.5"),
    own("lo", "::1"),
    own("eth0", "fd00::5"),
    own("ib0", "fe80::9"),
]


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in (interfaces.HOST_IP, interfaces.INTERFACE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def host(monkeypatch):
    """This host has the addresses of HOST; routes go where `routes` says, by target."""
    routes: dict[str, str] = {}

    def source(target):
        if str(target) not in routes:
            raise OSError(101, "Network is unreachable")
        return ipaddress.ip_address(routes[str(target)])

    monkeypatch.setattr(interfaces, "own_addresses", lambda: list(HOST))
    monkeypatch.setattr(interfaces, "_source", source)
    return routes


def test_own_addresses_are_those_that_the_system_tools_list():
    listed = set()
    try:
        output = subprocess.run(["ip", "-oneline", "addr"], capture_output=True, text=True, check=True).stdout
    except OSError:
        pytest.skip("no ip tool")
    for line in output.splitlines():
        fields = line.split()
        if fields[2] in ("inet", "inet6"):
            listed.add((fields[1], fields[3].partition("/")[0]))
    ours = {(item.interface, str(item.ip)) for item in own_addresses()}
    assert ("lo", "127.0.0.1") in ours
    assert ours <= listed
    assert all(item.loopback == item.ip.is_loopback for item in own_addresses())


def test_by_route(host):
    host |= {"127.0.0.1": "127.0.0.1", "10.9.0.1": "10.9.0.5", "10.0.0.5": "10.0.0.5"}
    assert (rank_address("127.0.0.1", 1).address, rank_address("127.0.0.1", 1).interface) == ("127.0.0.1", "lo")
    chosen = rank_address("10.9.0.1", 1)
    assert (chosen.address, chosen.interface, chosen.chosen_by) == ("10.9.0.5", "ib0", "the route to 10.9.0.1")
    assert rank_address("10.0.0.5", 1).interface == "eth0"  # the coordinator's own host
    with pytest.raises(ConfigError, match=r"store_host='10\.8\.0\.1': no route to it .* 10\.0\.0\.5 \(eth0\)"):
        rank_address("10.8.0.1", 1)


def test_real_routes_and_names():
    assert rank_address("127.0.0.1", 1).address == "127.0.0.1"
    assert rank_address("localhost", 1).interface == "lo"
    with pytest.raises(ConfigError, match=r"store_host='no-such-host\.invalid'"):
        rank_address("no-such-host.invalid", 9)


def test_the_user_names_an_address(host, monkeypatch):
    host |= {"10.0.0.1": "10.0.0.5", "127.0.0.1": "127.0.0.1", "fd00::1": "fd00::5"}
    for value, address in (("10.9.0.5", "10.9.0.5"), ("10.9.0.0/16", "10.9.0.5"), ("0.0.0.0/0", "10.0.0.5")):
        monkeypatch.setenv("EPRUNTIME_HOST_IP", value)
        assert rank_address("10.0.0.1", 1).address == address
        assert rank_address("127.0.0.1", 1).address == address
        assert coordinator_address(["10.0.0.1"]).address == address
    assert rank_address("10.0.0.1", 1).chosen_by == "EPRUNTIME_HOST_IP=0.0.0.0/0"
    monkeypatch.setenv("EPRUNTIME_HOST_IP", "fd00::/16")
    assert rank_address("fd00::1", 1).address == "fd00::5"


def test_the_user_names_an_interface(host, monkeypatch):
    host |= {"10.0.0.1": "10.0.0.5", "fd00::1": "fd00::5"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert rank_address("10.0.0.1", 1).address == coordinator_address().address == "10.9.0.5"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0,ib0")
    assert rank_address("10.0.0.1", 1).address == coordinator_address().address == "10.0.0.5"
    assert rank_address("fd00::1", 1).address == "fd00::5"  # of the coordinator's kind
    monkeypatch.setenv("EPRUNTIME_HOST_IP", "10.9.0.5")  # the more exact one wins
    assert rank_address("10.0.0.1", 1).address == "10.9.0.5"


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("EPRUNTIME_HOST_IP", "10.0.0.6", r"EPRUNTIME_HOST_IP=10\.0\.0\.6: there is no such address on host .*ib0"),
        ("EPRUNTIME_HOST_IP", "10.7.0.0/16", "no such address"),
        ("EPRUNTIME_HOST_IP", "eth0", "must be an address of this host"),
        ("EPRUNTIME_HOST_IP", "127.0.0.1", "other hosts do not reach the loopback address"),
        ("EPRUNTIME_HOST_IP", "fd00::5", "the coordinator is reached by IPv4"),
        ("GLOO_SOCKET_IFNAME", "eth1", r"GLOO_SOCKET_IFNAME=eth1: .*\(lo\).*\(eth0\).*\(ib0\).* Name one of these"),
        ("GLOO_SOCKET_IFNAME", "lo", "other hosts do not reach the loopback address"),
    ],
)
def test_a_wrong_name_is_an_error_that_lists_what_there_is(host, monkeypatch, variable, value, words):
    host["10.0.0.1"] = "10.0.0.5"
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=words):
        rank_address("10.0.0.1", 1)


def test_link_local_addresses_are_refused(host, monkeypatch):
    monkeypatch.setenv("EPRUNTIME_HOST_IP", "fe80::9")
    with pytest.raises(ConfigError, match="link-local"):
        coordinator_address()
    monkeypatch.delenv("EPRUNTIME_HOST_IP")
    host["fe80::1"] = "fe80::9"
    with pytest.raises(ConfigError, match=r"link-local.* EPRUNTIME_HOST_IP"):
        rank_address("fe80::1", 1)


class TestCoordinator:
    def test_the_meeting_point_on_this_host(self, host):
        assert coordinator_address(["10.9.0.5"]).address == "10.9.0.5"
        assert coordinator_address(["[fd00::5]"]).address == "fd00::5"

    def test_the_meeting_point_elsewhere(self, host):
        host["10.9.0.1"] = "10.9.0.5"
        assert coordinator_address(["10.9.0.1"]).chosen_by == "the route to 10.9.0.1"

    def test_a_name_on_loopback_says_nothing(self, host, monkeypatch):
        """As Debian's /etc/hosts has it: 127.0.1.1 is the machine's own name."""
        answer = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 0))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: answer)
        with pytest.raises(ConfigError, match=r"several addresses .* 10\.9\.0\.5 \(ib0\).*Set EPRUNTIME_HOST_IP"):
            coordinator_address(["my-host"])
        host["203.0.113.1"] = "10.0.0.5"
        assert coordinator_address(["my-host"]).chosen_by == "the default route"

    def test_the_only_address(self, host, monkeypatch):
        monkeypatch.setattr(interfaces, "own_addresses", lambda: [HOST[0], HOST[2], HOST[5]])
        assert coordinator_address(["127.0.0.1", "no-such-host.invalid"]).address == "10.9.0.5"
        monkeypatch.setattr(interfaces, "own_addresses", lambda: [HOST[0]])
        with pytest.raises(ConfigError, match="no address that other hosts may reach"):
            coordinator_address()
