"""What a person carries from the coordinator to a new agent: one line of text, good for one enrolment.

It holds where the coordinator is, the fingerprint of its certificate authority, and a secret that is spent once. So the
agent knows whom it talks to before it says anything, and no certificate authority of the world takes part.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from nas.core.errors import InvalidInput

_PREFIX = "hilnas-enrol."
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Invitation:
    """A parsed line.

    Args:
        url: `https://host:port` of the coordinator.
        ca_sha256: fingerprint of its CA certificate: SHA-256 of the DER form, 64 hex digits.
        token: the one-time secret.
    """

    url: str
    ca_sha256: str
    token: str

    def format(self) -> str:
        """The line: three fields, base64url of UTF-8, without padding."""
        packed = "\n".join((self.url, self.ca_sha256, self.token)).encode()
        return _PREFIX + base64.urlsafe_b64encode(packed).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Invitation:
        """Reads what `format` wrote; white space around it does not matter.

        Raises:
            InvalidInput: it is damaged, or something else.
        """
        packed = text.strip().removeprefix(_PREFIX)
        try:
            url, ca_sha256, token = base64.b64decode(
                packed + "=" * (-len(packed) % 4), altchars=b"-_", validate=True
            ).decode().split("\n")  # fmt: skip
        except (binascii.Error, ValueError):
            raise InvalidInput(f"this is no whole enrolment line: it begins with {_PREFIX} and has no spaces") from None
        if urlsplit(url).scheme != "https" or not _SHA256.fullmatch(ca_sha256) or not token:
            raise InvalidInput("the enrolment line is damaged; get another one with 'nas agent token'")
        return cls(url, ca_sha256, token)
