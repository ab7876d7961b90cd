"""Real servers on loopback: SeaweedFS for S3, asyncssh for SFTP. Each is a process with a separate folder."""

from __future__ import annotations

import functools
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import botocore.config
import botocore.exceptions
import botocore.session

_START_SECONDS = 60.0
_PORTS = range(15000, 32000)

KEY = "tests-access-key"
SECRET = "tests-secret-key-0123456789"
OTHER_KEY = "tests-other-access-key"  # of the same user, with the same secret
USER, PASSWORD = "tests-user", "tests-password-0123456789"

_running: set[int] = set()


def pids() -> set[int]:
    """The process ids of the servers that run now. Servers outlive the tests that use them."""
    return set(_running)


@dataclass(frozen=True)
class S3Server:
    """An S3 server."""

    endpoint: str
    bucket: str

    def options(self, endpoint: str | None = None, **others: Any) -> dict[str, Any]:
        """``storage_options`` for s3fs, at the server itself or at a proxy in front of it."""
        return {"key": KEY, "secret": SECRET, "client_kwargs": {"endpoint_url": endpoint or self.endpoint}, **others}

    def client(self) -> Any:
        """A client of botocore, to check what the server has without this package."""
        session = botocore.session.Session()
        session.register_component("data_loader", _models())
        return session.create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=self.endpoint,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            config=botocore.config.Config(retries={"max_attempts": 1}, connect_timeout=5, read_timeout=30),
        )

    def objects(self, prefix: str) -> list[str]:
        """The keys below a prefix, without it."""
        page = self.client().list_objects_v2(Bucket=self.bucket, Prefix=prefix)
        return sorted(entry["Key"].removeprefix(prefix).lstrip("/") for entry in page.get("Contents", []))

    def uploads(self, prefix: str = "") -> list[str]:
        """The keys of multipart uploads that are neither complete nor aborted."""
        page = self.client().list_multipart_uploads(Bucket=self.bucket)
        return [entry["Key"] for entry in page.get("Uploads", []) if entry["Key"].startswith(prefix)]


@dataclass(frozen=True)
class SftpServer:
    """An SFTP server whose root is a local folder."""

    port: int
    folder: Path

    def options(self, port: int | None = None) -> dict[str, Any]:
        """``storage_options`` for fsspec's SFTP, at the server itself or at a proxy in front of it."""
        return {"username": USER, "password": PASSWORD, "port": port or self.port, "look_for_keys": False}

    def synced(self) -> list[str]:
        """The names of the files that the server has synced, in order."""
        return (self.folder.parent / "synced").read_text().splitlines()


@functools.cache
def _models() -> Any:
    """botocore's descriptions of S3's interface, read once because that takes long."""
    return botocore.session.Session().get_component("data_loader")


@contextmanager
def s3_server(folder: Path, address: str = "127.0.0.1") -> Iterator[S3Server]:
    """SeaweedFS with one bucket, at an address of this machine."""
    with free_ports(8) as (master, master_grpc, volume, volume_grpc, filer, filer_grpc, s3, s3_grpc):
        config = folder / "s3.json"
        credentials = [{"accessKey": key, "secretKey": SECRET} for key in (KEY, OTHER_KEY)]
        identity = {
            "name": "tests",
            "credentials": credentials,
            "actions": ["Admin", "Read", "List", "Tagging", "Write"],
        }
        config.write_text(json.dumps({"identities": [identity]}))
        config.chmod(0o600)
        (folder / "data").mkdir()
    options = {
        "ip": address,
        "ip.bind": address,
        "dir": folder / "data",
        "master.peers": "none",
        "master.port": master,
        "master.port.grpc": master_grpc,
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 1024,
        "volume.port": volume,
        "volume.port.grpc": volume_grpc,
        "volume.max": 100,
        "volume.preStopSeconds": 0,
        "filer.port": filer,
        "filer.port.grpc": filer_grpc,
        "filer.localSocket": folder / "filer.sock",
        "s3.port": s3,
        "s3.port.grpc": s3_grpc,
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.localSocket": folder / "s3.sock",
        "s3.config": config,
        "s3.autoCreateBucket": "false",
    }
    weed = Path(sys.executable).with_name("weed")
    command = [str(weed), "-logtostderr", "server", "-s3", *(f"-{name}={value}" for name, value in options.items())]
    server = S3Server(f"http://{address}:{s3}", "tests-bucket")

    def ready() -> bool:
        try:
            server.client().create_bucket(Bucket=server.bucket)
            server.client().put_object(Bucket=server.bucket, Key="ready", Body=b"ready")
        except (botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError):
            return False
        return True

    try:
        with process(command, folder, ready):
            yield server
    finally:  # it makes these in a directory of its own, and leaves them when it is killed
        for kind, port in (("master", master_grpc), ("volume", volume_grpc), ("filer", filer_grpc), ("s3", s3_grpc)):
            Path(f"/tmp/seaweedfs-{kind}-grpc-{port}.sock").unlink(missing_ok=True)


@contextmanager
def sftp_server(folder: Path) -> Iterator[SftpServer]:
    """asyncssh's server. Its clients see ``folder / "root"`` as ``/``."""
    with free_ports(1) as (port,):
        root, synced = folder / "root", folder / "synced"
        root.mkdir()
        synced.touch()
    command = [sys.executable, "-m", f"{__package__}.sftp_server", str(port), str(root)]

    def ready() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            return False
        return True

    with process(command, folder, ready, {"SFTP_USER": USER, "SFTP_PASSWORD": PASSWORD, "SFTP_SYNCED": str(synced)}):
        yield SftpServer(port, root)


@contextmanager
def process(command: list[str], folder: Path, ready: Any, environment: dict[str, str] | None = None) -> Iterator[None]:
    """Runs a server, waits until it is ready, and ends it after the block."""
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=Path(__file__).parents[2],
            env=os.environ | (environment or {}),
        )
    _running.add(process.pid)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline:
                words = (folder / "log").read_text(errors="replace")[-4000:]
                raise RuntimeError(f"{command[0]} did not start ({process.poll()}):\n{words}")
            time.sleep(0.05)
        yield
    finally:
        process.kill()  # no test needs its data any more
        process.wait()
        _running.discard(process.pid)


@contextmanager
def free_ports(count: int) -> Iterator[list[int]]:
    """Ports on which no process listens. They are held until the end of the block, so that they differ.

    They lie below the ports that the system gives to outgoing connections: it could give such a port away between the
    end of the block and the start of the server.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        yield [_bind_to_any(held) for held in sockets]


def _bind_to_any(held: socket.socket) -> int:
    """Binds a socket to a free port and returns it."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with suppress(OSError):
            held.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"no free port between {_PORTS.start} and {_PORTS.stop}")
