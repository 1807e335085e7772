"""A coordinator's users' API over TLS, in a thread, with a certificate authority of its own."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from api_lab import Lab
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from fastapi.responses import PlainTextResponse

from nas.core.wire import CA_PATH


class Certificates:
    """A CA and a server certificate for 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        ca_key, key = generate_private_key(SECP256R1()), generate_private_key(SECP256R1())
        authority = _certificate("a CA", ca_key, "a CA", ca_key, ca=True)
        server = _certificate("a server", key, "a CA", ca_key, ca=False)
        self.ca_pem = authority.public_bytes(Encoding.PEM).decode()
        self.fingerprint = hashlib.sha256(authority.public_bytes(Encoding.DER)).hexdigest()
        self.certificate, self.key = folder / "server.pem", folder / "server.key"
        self.certificate.write_bytes(server.public_bytes(Encoding.PEM))
        self.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


@contextmanager
def serve(lab: Lab, certificates: Certificates, port: int = 0) -> Iterator[str]:
    """The URL of the API, for as long as the context is open."""

    @lab.app.get(CA_PATH)
    def authority() -> PlainTextResponse:
        return PlainTextResponse(certificates.ca_pem)

    config = uvicorn.Config(
        lab.app, host="127.0.0.1", port=port, log_config=None, lifespan="off",
        ssl_certfile=certificates.certificate, ssl_keyfile=certificates.key,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"https://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


def _certificate(
    subject: str, key: EllipticCurvePrivateKey, issuer: str, issuer_key: EllipticCurvePrivateKey, *, ca: bool
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(signer, critical=False)
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
    )
    return builder.sign(issuer_key, hashes.SHA256())
