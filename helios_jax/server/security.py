"""Who may connect, and how is it kept from others: TLS, mutual TLS, bearer tokens."""

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from helios_jax.config import require
from helios_jax.server.config import ServerConfig

_AUTHORIZATION = "authorization"
_SCHEME = "bearer "


def server_credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    """What `add_secure_port` takes; None for a port in clear.

    Raises:
      ValueError: a file that cannot be read.
    """
    if config.tls_cert is None or config.tls_key is None:
        return None
    pair = (_read("tls_key", config.tls_key), _read("tls_cert", config.tls_cert))
    authority = None
    if config.tls_client_ca is not None:
        authority = _read("tls_client_ca", config.tls_client_ca)
    return grpc.ssl_server_credentials(
        [pair], root_certificates=authority, require_client_auth=authority is not None
    )


class Tokens:
    """The bearer tokens of whom the server trusts; only their sums are kept."""

    def __init__(self, tokens: Sequence[str]):
        self._digests = [_digest(token.encode()) for token in tokens]

    @classmethod
    def read(cls, path: Path) -> "Tokens":
        """Of a file with a token a line; blank lines and those that begin with # are left out.

        Raises:
          ValueError: it cannot be read, or holds no token.
        """
        lines = _read("auth_token_file", path).decode(errors="replace").splitlines()
        tokens = [
            line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")
        ]
        require(bool(tokens), f"auth_token_file={str(path)!r}: holds no token; write one a line")
        return cls(tokens)

    def find(self, metadata: Any) -> int | None:
        """Which token a call's metadata presents; None for none of them.

        Every token is compared in constant time, whatever was presented.
        """
        presented = b""
        for key, value in metadata or ():
            if key == _AUTHORIZATION:
                text = value.decode(errors="replace") if isinstance(value, bytes) else value
                if text[: len(_SCHEME)].lower() == _SCHEME:
                    presented = text[len(_SCHEME) :].strip().encode(errors="replace")
        digest, found = _digest(presented), None
        for index, known in enumerate(self._digests):
            if hmac.compare_digest(digest, known):
                found = index
        return found


def client_of(context: Any, token: int | None) -> str:
    """Names the client of a call: by its certificate, its token, or else its address."""
    identities = context.peer_identities()
    if identities:
        return "certificate:" + b",".join(identities).decode(errors="replace")
    if token is not None:
        return f"token:{token}"
    # ipv4:127.0.0.1:50000, ipv6:%5B::1%5D:50000, unix:
    return context.peer().rpartition(":")[0]


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{name}={str(path)!r}: cannot be read: {error.strerror}") from error
