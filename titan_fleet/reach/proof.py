"""A node signs its WireGuard key with its swarm certificate, so no serving machine can put its own in the place."""

import base64
import datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from titan_fleet.swarm.certificates import AUTHORITY, CERTIFICATE, KEY
from torchtitan.refusal import Refusal

_KIND = ec.ECDSA(hashes.SHA256())


def sign(keys: Path, public: str) -> dict[str, str]:
    key: Any = serialization.load_pem_private_key((keys / KEY).read_bytes(), None)
    return {
        "public": public,
        "signature": key.sign(_text(public), _KIND).hex(),
        "certificate": (keys / CERTIFICATE).read_text(),
    }


def check(keys: Path, name: str, said: dict[str, Any]) -> tuple[str, str]:
    """The WireGuard key of this node, and the serial number of its certificate, which must be the authority's."""
    authority = x509.load_pem_x509_certificate((keys / AUTHORITY).read_bytes())
    try:
        own = x509.load_pem_x509_certificate(str(said["certificate"]).encode())
        own.verify_directly_issued_by(authority)
        (named,) = own.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        key, now = own.public_key(), datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None)
        uses = own.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        is_site = ExtendedKeyUsageOID.CLIENT_AUTH in uses  # the serving machine's own has another use
        if named.value != name or not is_site or not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError("the certificate is another's")
        if not own.not_valid_before_utc.replace(tzinfo=None) <= now <= own.not_valid_after_utc.replace(tzinfo=None):
            raise ValueError("the certificate is out of date")
        public = str(said["public"])
        key.verify(bytes.fromhex(said["signature"]), _text(public), _KIND)
        plain = base64.b64decode(public, validate=True)
        if len(plain) != 32 or base64.b64encode(plain).decode() != public:
            raise ValueError("it is no key of WireGuard's")
    except (KeyError, TypeError, ValueError, InvalidSignature, x509.ExtensionNotFound) as error:
        raise Refusal(
            f"{name!r} shows a key that is not signed by its certificate ({error or type(error).__name__}); "
            "do not trust this serving machine"
        ) from None
    return public, f"{own.serial_number:x}"


def _text(public: str) -> bytes:
    return b"torchtitan reach\0" + public.encode()
