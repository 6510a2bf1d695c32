"""This module keeps CURVE keys on disk, for tcp:// endpoints, and makes a first set.

DIR/server.key_secret   the server's key pair; it stays on the server's machine
DIR/server.key          the server's public key; every client needs a copy
DIR/clients/*.key       public keys of the admitted clients
DIR/client.key_secret   a first client's key pair; move it to that client's machine
"""

import os
from pathlib import Path

import zmq
import zmq.auth

from lowlat.errors import ConfigError
from lowlat.ipc.client.curve import ClientCurve
from lowlat.ipc.server.admission import Curve

__all__ = ["client_curve", "make_curve_keys", "server_curve"]

CLIENT = "client"


def make_curve_keys(directory: Path) -> list[Path]:
    """Write a server's and a first client's keys, for their owner alone (mode 600); returns the files.

    Raises ConfigError if one of the files exists already; then nothing is written.
    """
    if not zmq.has("curve"):
        raise ConfigError("this libzmq was built without CURVE; install pyzmq's wheel")
    clients = directory / "clients"
    before = os.umask(0o077)
    try:
        clients.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("server.key", "server.key_secret", f"{CLIENT}.key_secret", f"clients/{CLIENT}.key"):
            if (directory / name).exists():
                raise ConfigError(f"{directory / name} exists already; choose another folder, or remove it")
        directory.chmod(0o700)
        files = [Path(file) for file in zmq.auth.create_certificates(directory, "server")]
        public, secret = (Path(file) for file in zmq.auth.create_certificates(directory, CLIENT))
        admitted = public.rename(clients / public.name)
    except OSError as error:
        raise ConfigError(f"{error.filename or directory}: {error.strerror}") from error
    finally:
        os.umask(before)
    return [*files, secret, admitted]


def server_curve(directory: Path) -> Curve:
    """Return the server's keys in a folder of `make_curve_keys`. Raises ConfigError if others can read the secret."""
    secret = directory / "server.key_secret"
    try:
        mode = secret.stat().st_mode
    except OSError as error:
        raise ConfigError(f"{secret}: {error.strerror}; `lowlat serve --make-curve-keys DIR` writes it") from error
    if mode & 0o077:
        raise ConfigError(f"{secret} is open to others (mode {mode & 0o777:04o}); run `chmod 600 {secret}`")
    return Curve(secret, directory / "clients")


def client_curve(directory: Path) -> ClientCurve:
    """Return a client's keys: `server.key`, and its own `client.key_secret`. Raises ConfigError."""
    server, _ = _load(directory / "server.key")
    public, secret = _load(directory / f"{CLIENT}.key_secret")
    if secret is None:
        raise ConfigError(f"{directory / f'{CLIENT}.key_secret'} holds no secret key")
    return ClientCurve(server, public, secret)


def _load(path: Path) -> tuple[str, str | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read the CURVE key {path}; `lowlat serve --make-curve-keys DIR` writes one"
        ) from error
    return public.decode("ascii", "replace"), None if secret is None else secret.decode("ascii", "replace")
