"""Certificates of a swarm: an authority of its own, TLS 1.3 on both sides, and a list of what is revoked."""

import contextlib
import datetime
import ipaddress
import json
import os
import re
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from torchtitan.refusal import Refusal
from torchtitan.whole_file import write_whole

AUTHORITY, CERTIFICATE, KEY = "authority.pem", "own.pem", "own.key"
REVOKED, SITES = "revoked.json", "sites.json"  # at the syncer


def make(folder: Path, syncer: Sequence[str], sites: Sequence[str], days: int = 365) -> list[str]:
    """What is there stays; an authority is made once."""
    for name in sites:
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,62}", name) or name in ("authority", "syncer"):
            raise Refusal(f"site {name!r}: use small letters, digits and hyphens, and neither authority nor syncer")
    wanted = [*(["syncer"] if syncer else []), *sites]
    if there := [name for name in wanted if (folder / name).exists()]:
        raise Refusal(f"{folder / there[0]} exists; remove it to make new keys, or name another --out")
    authority = folder / "authority"
    if not authority.exists():
        key = ec.generate_private_key(ec.SECP256R1())
        own_name = _name("swarm authority")
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        extensions = [x509.BasicConstraints(True, 0), usage]
        _write(authority, key, _sign(own_name, key.public_key(), own_name, key, extensions, 10 * days), None)
    issuer = x509.load_pem_x509_certificate((authority / CERTIFICATE).read_bytes())
    signer: Any = serialization.load_pem_private_key((authority / KEY).read_bytes(), None)
    lines = []
    for name in wanted:
        key, is_syncer = ec.generate_private_key(ec.SECP256R1()), name == "syncer"
        use = ExtendedKeyUsageOID.SERVER_AUTH if is_syncer else ExtendedKeyUsageOID.CLIENT_AUTH
        named = x509.SubjectAlternativeName([_address(each) for each in (syncer if is_syncer else [name])])
        own = _sign(_name(name), key.public_key(), issuer.subject, signer, [x509.ExtendedKeyUsage([use]), named], days)
        _write(folder / name, key, own, issuer)
        _note(folder, name)
        lines.append(f"{folder / name}: for the {'syncer' if is_syncer else f'site {name}'}, valid for {days} days")
    return lines


def _note(folder: Path, name: str) -> None:
    """The syncer gives each site the part of the data that its place in this list says."""
    file = folder / "syncer" / SITES
    if name != "syncer" and file.parent.exists():
        write_whole(file, json.dumps(list(dict.fromkeys([*sites_of(file.parent), name])), indent=1))


def sites_of(syncer: Path) -> list[str]:
    file = syncer / SITES
    return list(json.loads(file.read_text())) if file.exists() else []


def revoke(folder: Path, site: str) -> str:
    file = folder / site / CERTIFICATE
    if not file.exists():
        raise Refusal(f"{file} is not there, so there is nothing to revoke; give the --out of the keys")
    serial = x509.load_pem_x509_certificate(file.read_bytes()).serial_number
    target = folder / "syncer" / REVOKED
    known = json.loads(target.read_text()) if target.exists() else {}
    write_whole(target, json.dumps(known | {f"{serial:x}": site}, indent=1))
    return f"{site} is in {target}; copy that file to the syncer's keys, it is read at each request"


def revoked(keys: Path, known: dict[str, str]) -> dict[str, str]:
    """Serial number -> name. If half of a new list is there, what was known stands."""
    file = keys / REVOKED
    with contextlib.suppress(OSError, TypeError, ValueError):
        return dict(json.loads(file.read_text())) if file.exists() else {}
    return known


def named(peer: Any) -> tuple[str, str]:
    """The name in a certificate, as a TLS connection shows it, and its serial number."""
    names = [value for part in peer["subject"] for key, value in part if key == "commonName"]
    return "".join(names[:1]), f"{int(peer['serialNumber'], 16):x}"


def context(folder: Path, is_server: bool) -> ssl.SSLContext:
    """TLS 1.3 alone, with certificates of this authority on both sides."""
    missing = [name for name in (AUTHORITY, CERTIFICATE, KEY) if not (folder / name).is_file()]
    if missing:
        raise Refusal(f"{folder} lacks {', '.join(missing)}; make it with python -m torchtitan swarm keys")
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(folder / AUTHORITY)
    made.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    return made


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _address(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _sign(name: x509.Name, public: Any, issuer: x509.Name, signer: Any, extensions: Any, days: int) -> x509.Certificate:
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(issuer).public_key(public)
    builder = builder.serial_number(x509.random_serial_number())
    # A day earlier, for clocks that are behind.
    builder = builder.not_valid_before(now - datetime.timedelta(days=1))
    builder = builder.not_valid_after(now + datetime.timedelta(days=days))
    identified = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    for extension in (*extensions, x509.SubjectKeyIdentifier.from_public_key(public), identified):
        builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
    return builder.sign(signer, hashes.SHA256())


def _write(folder: Path, key: Any, own: x509.Certificate, issuer: x509.Certificate | None) -> None:
    folder.mkdir(parents=True)
    pem = serialization.Encoding.PEM
    text = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    with os.fdopen(os.open(folder / KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(text)
    (folder / CERTIFICATE).write_bytes(own.public_bytes(pem))
    (folder / AUTHORITY).write_bytes((issuer or own).public_bytes(pem))
