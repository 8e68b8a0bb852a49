"""TLS: the gateway's certificate for callers, and those by which a cluster's services trust each other.

A service has a folder with three files, named as Kubernetes names those of a Secret: `ca.crt`, the cluster's
authority; `tls.crt` and `tls.key`, its own certificate and key. All services of a cluster have the one name
`eyas.internal`: what counts is that the cluster's authority signed it, at whatever address. Both ends of a
connection show a certificate.

Connections of callers are bounded in time and number until the end of the handshake. One that is still
shaking hands belongs to no request: when there are too many, the oldest one goes.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from eyas.common.config import CertificateFiles
from eyas.common.errors import ConfigError
from eyas.common.logging import RateLimitedLogger

NAME = "eyas.internal"
AUTHORITY, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
HANDSHAKE_S = 10.0
PAUSE_S = 0.2  # when no connection can be accepted, because too many files are open
_log = logging.getLogger("eyas.gateway")
Protocol = Callable[[], asyncio.Protocol]
"""Makes the protocol of a connection whose handshake has ended."""


@dataclass(frozen=True)
class ChannelTls:
    """How a channel is secured. `name`: what the server's certificate says; "": the host that is dialled."""

    credentials: grpc.ChannelCredentials
    name: str = ""


def client_tls(ca: str | None) -> ChannelTls:
    """Returns the credentials of a gateway's client. `ca`: a file of authorities; None: those that come with
    gRPC.

    Raises ConfigError for a file that has none.
    """
    client_context(ca)  # gRPC would say nothing of a bad file
    return ChannelTls(grpc.ssl_channel_credentials(None if ca is None else _read(ca, "ca")))


def client_context(ca: str | None, flag: str = "ca") -> ssl.SSLContext:
    """Returns the TLS context of an HTTP client. `ca` None: the system's authorities. `flag`: what named the
    file.
    """
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise ConfigError(f"--{flag}: {ca} names no authorities: {_reason(error)}", param=flag) from error


# --- for the gateway's callers -----------------------------------------------------------------------------


def caller_context(files: CertificateFiles, speaks: str = "http/1.1") -> ssl.SSLContext:
    """`speaks`: as ALPN names it. Raises ConfigError for files that are no certificate, or not its key."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols([speaks])
    try:
        context.load_cert_chain(files.certfile, files.keyfile, password=_no_password)
    except (OSError, ValueError) as error:
        names = f"{files.certfile} and {files.keyfile} are no certificate and its key"
        raise ConfigError(f"--ssl-certfile: {names}: {_reason(error)}", param="ssl-certfile") from error
    return context


def _no_password() -> str:
    raise ValueError("the key has a password, which a server cannot be asked for")


# --- between services --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServiceTls:
    """One service's certificate and key, and its cluster's authority, in PEM."""

    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)

    @classmethod
    def load(cls, folder: str) -> ServiceTls:
        """Loads a folder. Raises ConfigError, which names the file, unless peers would accept it now."""
        files = [str(Path(folder) / name) for name in (AUTHORITY, CERTIFICATE, KEY)]
        authority, certificate, key = (_read(file, "tls-dir") for file in files)
        _shake_hands(*files)
        return cls(authority, certificate, key)

    @property
    def channel(self) -> ChannelTls:
        """The credentials of channels to other services."""
        credentials = grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)
        return ChannelTls(credentials, NAME)

    @property
    def server(self) -> grpc.ServerCredentials:
        """The credentials of a server that other services dial."""
        pair = self.key, self.certificate
        return grpc.ssl_server_credentials([pair], self.authority, require_client_auth=True)


def service_tls(folder: str | None) -> ServiceTls | None:
    """Loads the folder of `--tls-dir`; None without it. Raises ConfigError as `ServiceTls.load` does."""
    return None if folder is None else ServiceTls.load(folder)


@dataclass(frozen=True)
class TlsAdvice:
    """Advice to one end of a connection where only one of the two speaks TLS."""

    needed: str
    unasked: str


AMONG_SERVICES = TlsAdvice("--tls-dir", "it has no --tls-dir, or no --ssl-certfile")
TO_CALLERS = TlsAdvice(
    "https:// in front of its address, and ca=FILE where the authority is your own",
    "leave out https://",
)
_SAID = (  # gRPC's words for a connection that did not come about, and ours
    (re.compile(r"CERTIFICATE_VERIFY_FAILED: ([a-z -]+)"), r"its certificate is refused: \1"),
    (
        re.compile(r"Hostname Verification Check failed"),
        f"its certificate is not for {NAME}, or the name that was dialled",
    ),
    (re.compile(r"WRONG_VERSION_NUMBER"), "it does not speak TLS ({unasked})"),
    (re.compile(r"ALERT"), "it refuses the certificate it gets"),
    (
        re.compile(r"failed to connect.*(Socket closed|Connection reset)"),
        "it closes connections at once: perhaps it wants TLS ({needed}), or refuses the certificate it gets",
    ),
)
_ADDRESS = re.compile(r"ipv[46]:(?:%5B)?([^ ]*:\d+)")


def explained(details: str, advice: TlsAdvice = AMONG_SERVICES) -> str:
    """Explains gRPC's error of a connection if TLS was in the way. `advice`: to the end that dialled."""
    for pattern, words in _SAID:
        if match := pattern.search(details):
            where = _ADDRESS.search(details)
            sentence = match.expand(words).format(needed=advice.needed, unasked=advice.unasked)
            return f"no connection to {where[1] if where else 'it'}: {sentence}"
    return details


def _shake_hands(authority: str, certificate: str, key: str) -> None:
    """Connects to itself, in memory: what a peer would refuse is refused here, with a reason."""
    context: dict[bool, ssl.SSLContext] = {}
    for serving in (False, True):
        protocol = ssl.PROTOCOL_TLS_SERVER if serving else ssl.PROTOCOL_TLS_CLIENT
        context[serving] = ssl.SSLContext(protocol)
        context[serving].verify_mode = ssl.CERT_REQUIRED
        try:
            context[serving].load_verify_locations(authority)
        except OSError as error:
            raise _refused(authority, "it is no authority's certificate", error) from error
        try:
            context[serving].load_cert_chain(certificate, key, password=_no_password)
        except (OSError, ValueError) as error:
            raise _refused(certificate, f"it is no certificate with the key {key}", error) from error
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context[True].wrap_bio(up, down, server_side=True)
    client = context[False].wrap_bio(down, up, server_hostname=NAME)
    try:
        for end in (client, server, client, server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass  # the other end's turn
    except ssl.SSLCertVerificationError as error:
        said = error.verify_message
        raise ConfigError(
            f"--tls-dir: no peer would accept {certificate}: {said}", param="tls-dir"
        ) from error
    except ssl.SSLError as error:
        raise _refused(certificate, "no peer would accept it", error) from error


def _refused(file: str, problem: str, error: Exception) -> ConfigError:
    return ConfigError(f"--tls-dir: {file}: {problem}: {_reason(error)}", param="tls-dir")


def _read(file: str, flag: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"--{flag}: {file} cannot be read: {_reason(error)}", param=flag) from error


def _reason(error: Exception) -> str:
    """The words of an error of OpenSSL or the system, without their numbers."""
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)


class TlsListener:
    """Accepts connections from a listening socket, which stays its owner's. `limit`: of open handshakes."""

    def __init__(self, listener: socket.socket, context: ssl.SSLContext, limit: int) -> None:
        self._listener = listener
        self._context = context
        self._limit = limit
        self._open: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._alarm = RateLimitedLogger(_log)

    async def accept(self, protocol: Protocol) -> None:
        """Accepts connections until it is cancelled; then open handshakes end too."""
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        try:
            while True:
                try:
                    connection, _ = await loop.sock_accept(self._listener)
                except OSError as error:
                    self._alarm.warning("no connection can be accepted: %s", error)
                    await asyncio.sleep(PAUSE_S)
                    continue
                self._begin(loop.create_task(self._shake(connection, protocol), name="tls handshake"))
        finally:
            for handshake in self._open:
                handshake.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)

    def _begin(self, handshake: asyncio.Task[None]) -> None:
        if len(self._open) >= self._limit:
            self._alarm.warning("%d TLS handshakes are open: new ones replace old ones", len(self._open))
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.cancel()
        self._open[handshake] = None
        handshake.add_done_callback(lambda done: self._open.pop(done, None))

    async def _shake(self, connection: socket.socket, protocol: Protocol) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                protocol, connection, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_S
            )
        except OSError as error:  # no TLS, no common version, a client that leaves or is late
            _log.debug("a TLS handshake failed: %s", error)
            connection.close()
        except BaseException:
            connection.close()
            raise
