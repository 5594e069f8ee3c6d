"""Configuration of access control and TLS: accounts with their permissions, certificates, and their checks.

Both are off unless their table is given. The permissions are those of RocketMQ's plain ACL (R: plain_acl.yml):
PUB and SUB by topic and by consumer group, a default for all others, admin accounts, and addresses
that need no key.
"""

from __future__ import annotations

import ipaddress
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from node.config_reader import ConfigError, ConfigReader, check_absolute_path, check_name, check_table, check_text

__all__ = [
    "PERM_DENY",
    "PERM_PUB",
    "PERM_SUB",
    "AccountConfig",
    "AclConfig",
    "AddressPattern",
    "TlsConfig",
    "read_acl",
    "read_tls",
]

PERM_DENY: Final = 0
PERM_PUB: Final = 1
PERM_SUB: Final = 2

MAX_ACCOUNTS: Final = 1000
"""Accounts of one broker: each is a few hundred bytes, looked up by its key."""
MAX_PERMISSIONS: Final = 10_000
"""Topics or groups that one account names, as many as a broker may have topics."""
MAX_WHITE_ADDRESSES: Final = 1000
"""Address patterns, tried one by one for a request without a valid key."""
MIN_ACCESS_KEY_LENGTH: Final = 7
MIN_SECRET_KEY_LENGTH: Final = 7
"""Both longer than 6 characters (R: PlainPermissionManager)."""

_OCTET_RANGE = re.compile(r"(\d{1,3})-(\d{1,3})")
_OCTET_CHOICE = re.compile(r"\{(\d{1,3}(?:,\d{1,3})*)\}")
_PERMISSIONS: Final = {"PUB": PERM_PUB, "SUB": PERM_SUB, "DENY": PERM_DENY, "ANY": PERM_PUB | PERM_SUB}


@dataclass(frozen=True, slots=True)
class AddressPattern:
    """Client addresses that need no key: "*", one address, a network ("10.0.0.0/8"), or IPv4 octets of which each
    is a number, "*", a range "1-20" or a choice "{1,7,9}" (R: RemoteAddressStrategyFactory)."""

    text: str

    def __post_init__(self) -> None:
        self.matches("0.0.0.0")

    def matches(self, host: str) -> bool:
        """Whether the address `host` (without port) matches. Raises ValueError if the pattern is invalid."""
        text = self.text.strip()
        if text in ("*", "*.*.*.*"):
            return True
        address = ipaddress.ip_address(host.partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        if ":" in text or "/" in text or not re.search(r"[*{-]", text):
            network = ipaddress.ip_network(text, strict=False)
            return network.version == address.version and address in network
        octets = _octets(text)
        if len(octets) != 4:
            raise ValueError(f"{text!r} has {len(octets)} octets, not 4")
        own = str(address).split(".") if address.version == 4 else []
        results = [_octet_matches(octet, number, text) for octet, number in zip(octets, own or "0000", strict=True)]
        return bool(own) and all(results)


def _octets(text: str) -> list[str]:
    """The parts between the dots."""
    return [part.strip() for part in text.split(".")]


def _octet_matches(octet: str, number_text: str, pattern: str) -> bool:
    number = int(number_text)
    if octet == "*":
        return True
    if choice := _OCTET_CHOICE.fullmatch(octet):
        return number in [int(each) for each in choice[1].split(",")]
    if between := _OCTET_RANGE.fullmatch(octet):
        low, high = int(between[1]), int(between[2])
        if low > high or high > 255:
            raise ValueError(f"{pattern!r}: {octet!r} is no range of octets")
        return low <= number <= high
    if octet.isascii() and octet.isdigit() and int(octet) <= 255:
        return number == int(octet)
    raise ValueError(f"{pattern!r}: {octet!r} is no octet, *, range or choice")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountConfig:
    """One access key and what it may do. Permissions are PERM_DENY, or PERM_PUB and PERM_SUB combined."""

    access_key: str
    secret_key: str = field(repr=False)
    admin: bool = False
    white_address: AddressPattern | None = None
    """Requests that name this key and come from here need no signature, and may do everything."""
    default_topic_perm: int = PERM_DENY
    default_group_perm: int = PERM_DENY
    topics: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AclConfig:
    """Who may do what at a broker. Clients from a white-listed address may do everything without a key."""

    accounts: tuple[AccountConfig, ...]
    white_addresses: tuple[AddressPattern, ...] = ()

    @property
    def own_account(self) -> AccountConfig | None:
        """The account with which brokers of this configuration talk to each other: the first admin."""
        return next((account for account in self.accounts if account.admin), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """TLS on the port for clients, and on the connections that this node opens itself."""

    certificate: str
    key: str
    client_ca: str | None = None
    """Certificates that must have signed those of clients; without it clients need none."""
    ca: str | None = None
    """Peers that this node dials (name servers, its group's master) are dialled with TLS and need a certificate signed
    by one of these; without it, they are dialled in plain text."""

    def server_context(self) -> ssl.SSLContext:
        """For listening. Raises ConfigError when a file cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load_certificate(context)
        if self.client_ca is not None:
            _load_ca(context, "client_ca", self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def dialling_context(self) -> ssl.SSLContext | None:
        """For dialling; None if that is done in plain text. Raises ConfigError.

        Addresses are bare IPs, so the signature is checked rather than a host name; this node presents its
        own certificate when asked for one.
        """
        if self.ca is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        _load_ca(context, "ca", self.ca)
        self._load_certificate(context)
        return context

    def _load_certificate(self, context: ssl.SSLContext) -> None:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
        except (OSError, ValueError) as error:
            reason = f"{self.certificate} and {self.key} are no certificate with its key: {error}"
            raise ConfigError([f"tls.certificate: {reason}"]) from error


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one that is not")


def _load_ca(context: ssl.SSLContext, key: str, path: str) -> None:
    try:
        context.load_verify_locations(path)
    except OSError as error:
        raise ConfigError([f"tls.{key}: {path} holds no certificates: {error}"]) from error


def read_tls(reader: ConfigReader | None, *, dials: bool) -> TlsConfig | None:
    """The table [tls]; None when it is absent, which means off. Problems go to the reader."""
    if reader is None:
        return None
    config = TlsConfig(
        certificate=reader.take("certificate", check_absolute_path),
        key=reader.take("key", check_absolute_path),
        client_ca=reader.take("client_ca", check_absolute_path, None),
        ca=reader.take("ca", check_absolute_path, None) if dials else None,
    )
    reader.finish()
    return config


def read_acl(reader: ConfigReader | None) -> AclConfig | None:
    """The table [acl]; None when it is absent, which means off. Problems go to the reader."""
    if reader is None:
        return None
    accounts: dict[str, AccountConfig] = {}
    for entry in reader.tables("accounts"):
        account = AccountConfig(
            access_key=entry.take("access_key", _access_key),
            secret_key=entry.take("secret_key", _secret_key),
            admin=entry.take("admin", _boolean, False),
            white_address=entry.take("white_address", _pattern, None),
            default_topic_perm=entry.take("default_topic_perm", _permission, PERM_DENY),
            default_group_perm=entry.take("default_group_perm", _permission, PERM_DENY),
            topics=entry.take("topics", _permissions, {}),
            groups=entry.take("groups", _permissions, {}),
        )
        entry.finish()
        if account.access_key in accounts:
            entry.problem("access_key", "is given twice")
        accounts[account.access_key] = account
    if not accounts:
        reader.problem("accounts", "there are none; leave the table out to switch access control off")
    if len(accounts) > MAX_ACCOUNTS:
        reader.problem("accounts", f"{len(accounts)} accounts, at most {MAX_ACCOUNTS} are supported")
    config = AclConfig(accounts=tuple(accounts.values()), white_addresses=reader.take("white_addresses", _patterns, ()))
    reader.finish()
    return config


def _access_key(value: Any) -> str:
    if len(check_name(value)) < MIN_ACCESS_KEY_LENGTH:
        raise ValueError(f"must have at least {MIN_ACCESS_KEY_LENGTH} characters")
    return str(value)


def _secret_key(value: Any) -> str:
    if not isinstance(value, str) or len(value) < MIN_SECRET_KEY_LENGTH:
        raise ValueError(f"must be a string of at least {MIN_SECRET_KEY_LENGTH} characters")
    return value


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {value!r}")
    return value


def _pattern(value: Any) -> AddressPattern:
    return AddressPattern(check_text(value))


def _patterns(value: Any) -> tuple[AddressPattern, ...]:
    if not isinstance(value, list):
        raise ValueError("must be an array of address patterns")
    if len(value) > MAX_WHITE_ADDRESSES:
        raise ValueError(f"has {len(value)} patterns, at most {MAX_WHITE_ADDRESSES} are supported")
    return tuple(_pattern(item) for item in value)


def _permission(value: Any) -> int:
    """One of "PUB", "SUB", "PUB|SUB", "ANY" or "DENY"."""
    perm = PERM_DENY
    for word in check_text(value).split("|"):
        if word.strip() not in _PERMISSIONS:
            raise ValueError(f"{value!r} is no permission; known are PUB, SUB, PUB|SUB, ANY and DENY")
        perm |= _PERMISSIONS[word.strip()]
    return perm


def _permissions(value: Any) -> dict[str, int]:
    table = check_table(value)
    if len(table) > MAX_PERMISSIONS:
        raise ValueError(f"has {len(table)} entries, at most {MAX_PERMISSIONS} are supported")
    return {str(name): _permission(perm) for name, perm in table.items()}
