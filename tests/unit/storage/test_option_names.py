"""A storage option whose name is wrong is an error that says which ones there are."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_tensorizer import WriteError
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._storage.urls import check_names, names_of


class Base:
    def __init__(self, token: str = "", **options: Any) -> None:
        """As gcsfs's: it passes over what it does not know."""


class FileSystem(Base):
    def __init__(self, *args: Any, endpoint_url: str = "", **options: Any) -> None:
        """It knows what its base does, too."""


@pytest.mark.parametrize("protocol", ["s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"])
def test_names_of_the_class_and_its_bases_are_known(protocol: str) -> None:
    """So are those of fsspec; anything else is an error with the known ones, and with the nearest of them."""
    check_names(protocol, FileSystem, {"token": "", "endpoint_url": "", "skip_instance_cache": True})
    with pytest.raises(
        ValueError, match=r"unknown storage option 'tokne': did you mean 'token'\? .*endpoint_url.*token"
    ):
        check_names(protocol, FileSystem, {"tokne": "secret-7"})
    with pytest.raises(ValueError, match="options '1', 'tokne'"):
        check_names(protocol, FileSystem, {"tokne": "", 1: ""})  # type: ignore[dict-item]


def test_what_is_passed_on_is_known() -> None:
    """A library's constructor hands these to another library."""
    check_names("s3", FileSystem, {"profile": "p"})
    check_names("az", FileSystem, {"exclude_cli_credential": True})
    with pytest.raises(ValueError, match="'profile'"):
        check_names("az", FileSystem, {"profile": "p"})


def test_other_filesystems_are_left_alone() -> None:
    """Their options are for them to check."""
    check_names("http", FileSystem, {"anything": 1})


@pytest.mark.parametrize("url", ["s3://bucket/x", "sftp://127.0.0.1/x"])
def test_a_wrong_name_is_an_error_before_anything_is_sent(url: str) -> None:
    """It names the option, and does not show its value."""
    with pytest.raises(WriteError, match="unknown storage option 'pasword': did you mean 'password'") as caught:
        open_storage(url, {"pasword": "hunter2-hunter2"})
    assert "hunter2" not in str(caught.value)


def test_names_of_functions() -> None:
    """They are those that may be given by name, without self."""
    assert names_of(Base.__init__, FileSystem.__init__) == {"token", "endpoint_url"}
