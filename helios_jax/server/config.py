"""What can a server be told: where to listen, whom to trust, how much to take on?"""

import math
from dataclasses import dataclass
from pathlib import Path

from helios_jax.config import require

# Entries of lists in SamplingParams: each wider list is another set of compiled programs.
MAX_STOP = 16
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
# Of a stop string or bad word, and token ids of one.
MAX_STRING_CHARS = 256
MAX_REQUEST_ID_CHARS = 128


@dataclass(frozen=True)
class ServerConfig:
    """Options of a server.

    Attributes:
      model_name: what clients and metrics are told.
      host: address to listen on; the loopback by default, since nothing is encrypted then.
      port: 0 takes a free one, which the log names.
      tls_cert, tls_key: PEM files of the server's certificate chain and its key; None for none.
      tls_client_ca: PEM file of who signs clients' certificates; they then need one (mutual TLS).
      auth_token_file: file of bearer tokens, one a line, of which a client must present one.
      metrics_port: serves Prometheus on `host` over HTTP; None does not; 0 takes a free one.
      max_message_bytes: of one message, either way.
      max_requests_per_client: calls at a time from one client: a certificate's name, a token, or
        else an address.
      grace_seconds: that accepted requests have to finish after SIGTERM.
      write_timeout_seconds: how long a client may leave the stream unread once buffers are full.
      keepalive_seconds: after so long without traffic a connection is probed, and closed if it
        does not answer; clients may not probe more often than every tenth of it.
      warm_up: compile what common requests need before the server says that it is ready.
      log_prompts: write prompts to the log.
      record: a new file for what arrives from when the server is ready, prompts included; see
        `helios_jax.engine.recording`.
    """

    model_name: str = ""
    host: str = "127.0.0.1"
    port: int = 50051
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    auth_token_file: Path | None = None
    metrics_port: int | None = None
    max_message_bytes: int = 4 << 20
    max_requests_per_client: int = 128
    grace_seconds: float = 30.0
    write_timeout_seconds: float = 60.0
    keepalive_seconds: float = 60.0
    warm_up: bool = True
    log_prompts: bool = False
    record: Path | None = None

    def __post_init__(self):
        for name in ("port", "metrics_port"):
            value = getattr(self, name)
            require(value is None or 0 <= value < 65536, f"{name}={value}: must be in 0..65535")
        require(
            (self.tls_cert is None) == (self.tls_key is None),
            f"tls_cert={_text(self.tls_cert)}, tls_key={_text(self.tls_key)}: must be given "
            "together",
        )
        require(
            self.tls_client_ca is None or self.tls_cert is not None,
            f"tls_client_ca={_text(self.tls_client_ca)}: needs tls_cert and tls_key too",
        )
        require(
            4096 <= self.max_message_bytes < 2**31,
            f"max_message_bytes={self.max_message_bytes}: must be in 4096..2147483647",
        )
        require(
            self.max_requests_per_client >= 1,
            f"max_requests_per_client={self.max_requests_per_client}: must be at least 1",
        )
        for name in ("grace_seconds", "write_timeout_seconds", "keepalive_seconds"):
            value = getattr(self, name)
            least = 0 if name == "grace_seconds" else 0.1
            require(
                math.isfinite(value) and value >= least,
                f"{name}={value}: must be a finite number, at least {least}",
            )

        # Said again when the file is made, which is after the model was loaded.
        require(
            self.record is None or not self.record.exists(),
            f"record={_text(self.record)}: exists already; give a new name, or remove it first",
        )

    @property
    def address(self) -> str:
        """For gRPC: host and port, an IPv6 host in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_open(self) -> bool:
        """Whether others than this machine can reach it without TLS."""
        return self.tls_cert is None and self.host not in ("127.0.0.1", "::1", "localhost")


def _text(path: Path | None) -> str:
    return "None" if path is None else repr(str(path))
