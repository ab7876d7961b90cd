"""Messages show no credentials."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_tensorizer._storage.redact import Scrubber, redact


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("s3://key:secret@bucket/a", "s3://bucket/a"),
        ("ftp://user@host/a", "ftp://host/a"),
        ("ftp://user:p@ss@host/a", "ftp://host/a"),
        ("ftp://user:p%40ss@host", "ftp://host"),
        ("sftp://user:my pass@host/a", "sftp://host/a"),
        ("simplecache::ftp://u:p@h/a and s3://k:s@b", "simplecache::ftp://h/a and s3://b"),
        ("s3://key:secret@bucket/x and ftp://u:p@h/y", "s3://bucket/x and ftp://h/y"),
        ("https://host/a@b", "https://host/a@b"),
        ("to sftp://user:pass/word@host/a: no", "to sftp://host/a: no"),
        ("sftp://user:pass@host:22/a@b", "sftp://host:22/a@b"),
        ("sftp://host:22/a@b", "sftp://host:22/a@b"),
        ("/local/a@b and user@host", "/local/a@b and user@host"),
        ("(s3+http://u:p@h/x)", "(s3+http://h/x)"),
        ("", ""),
    ],
)
def test_credentials_in_urls_are_removed(text: str, clean: str) -> None:
    """User and password are removed, even with an ``@`` in the password, and nothing else is."""
    assert redact(text) == clean


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("https://a/b?sv=1&sig=k%2Fx%3D&se=2: 403", "https://a/b?sv=1&sig=***&se=2: 403"),
        ("url: /b?X-Amz-Signature=0a9f (Caused by x)", "url: /b?X-Amz-Signature=*** (Caused by x)"),
        (
            "'s3://b/a?X-Amz-Credential=AKIA/eu&X-Amz-Security-Token=Fw+/a=='",
            "'s3://b/a?X-Amz-Credential=***&X-Amz-Security-Token=***=='",
        ),
        ("https://a/b?X-Goog-Signature=5c&access_token=e.y.J.", "https://a/b?X-Goog-Signature=***&access_token=***."),
        ("<Url>https://a/b?x=1&amp;sig=abc</Url>", "<Url>https://a/b?x=1&amp;sig=***</Url>"),
        ("https://a/b?TOKEN=abc\nhttps://a/c?design=d", "https://a/b?TOKEN=***\nhttps://a/c?design=d"),
        ("https://a/b?sig=***/.metadata", "https://a/b?sig=***/.metadata"),
        ("connect(token=token, sig=1) in /a?sign=2", "connect(token=token, sig=1) in /a?sign=2"),
    ],
)
def test_signatures_of_urls_are_removed(text: str, clean: str) -> None:
    """Values of a query that grant access to the URL are removed, and no other values are."""
    assert redact(text) == clean


secret = st.text("abcdefghijklmnopqrstuvwxyz0123456789!@:+=-_.", min_size=1, max_size=20)


@given(secret, secret)
def test_no_password_survives_in_a_url(user: str, password: str) -> None:
    """Any password is removed from a URL that can be parsed."""
    assert redact(f"error at ftp://{user}:{password}@host.name/path/x: 403") == "error at ftp://host.name/path/x: 403"


OPTIONS = {
    "key": "AKIA-123456",
    "client_kwargs": {
        "endpoint_url": "http://minio.local:9000",
        "region_name": "eu-central-1",
        "headers": [{"x": "Bearer t0ken-region"}],
    },
    "secret": "sup3r-s3cret",
    "anon": False,
    "short": "abc",
}


def test_options_are_removed() -> None:
    """Every longer string among the options is removed, at any depth, except endpoints and regions."""
    text = "key AKIA-123456 at http://minio.local:9000 in eu-central-1: Bearer t0ken-region sup3r-s3cret abc"
    clean = "key *** at http://minio.local:9000 in eu-central-1: *** *** abc"
    assert Scrubber(OPTIONS)(text) == clean


@pytest.mark.parametrize(
    ("options", "text", "clean"),
    [
        ({"account_url": "https://a.example/c?sv=2022-11-02&sig=s1gn%2Fature"}, "sig s1gn%2Fature", "sig ***"),
        ({"account_url": "https://a.example/c?sv=2022-11-02&sig=s1gn%2Fature"}, "sig s1gn/ature", "sig ***"),
        ({"connection_string": "AccountName=x;AccountKey=azure+k3y==;E=y"}, "with azure+k3y==", "with ***"),
        ({"password": 12345678, "port": 2222, "anon": True}, "12345678 at port 2222: True", "*** at port 2222: True"),
        ({"nested": {"pin": [987654321]}}, "pin 987654321", "pin ***"),
        ({"proxies": {"http": "http://user:pr0xy@host"}}, "by http://user:pr0xy@host", "by http://host"),
    ],
)
def test_parts_of_options_are_removed(options: dict[str, Any], text: str, clean: str) -> None:
    """Signed URLs and connection strings are removed, and so is each part of them, and numbers."""
    scrub = Scrubber(options)
    for secret in options.values():
        assert not isinstance(secret, str) or scrub(f"at {secret}") == "at ***"
    assert scrub(text) == clean


def test_a_secret_within_another_is_removed_whole() -> None:
    """If one secret contains another, the longer one is removed as a whole."""
    assert Scrubber({"a": "abcdef", "b": "abcdef-ghijkl"})("abcdef-ghijkl abcdef") == "*** ***"


PEM = "-----BEGIN PRIVATE KEY-----\nMII+x/9=\n-----END PRIVATE KEY-----\n"
FORMS: dict[str, Callable[[str], str]] = {
    "repr": lambda value: repr(value)[1:-1],
    "repr of repr": lambda value: repr(repr(value)[1:-1])[1:-1],
    "ascii": lambda value: ascii(value)[1:-1],
    "bytes": lambda value: repr(value.encode())[2:-1],
    "json": lambda value: json.dumps(value)[1:-1],
    "json in json": lambda value: json.dumps(json.dumps(value)[1:-1])[1:-1],
    "percent": lambda value: quote(value, safe=""),
    "percent, lower case": lambda value: quote(value).replace("%2F", "%2f"),
    "percent, twice": lambda value: quote(quote(value, safe=""), safe=""),
    "form": quote_plus,
    "base64": lambda value: base64.b64encode(value.encode()).decode(),
    "basic auth": lambda value: base64.b64encode(f"any user:{value}".encode()).decode(),
    "base64 for URLs": lambda value: base64.urlsafe_b64encode(value.encode()).decode().rstrip("="),
}


@pytest.mark.parametrize("secret", ["p@ss/w:rd x?y", "quo\"te\\back'sl\\", "caf\u00e9 \U0001f511", PEM])
@pytest.mark.parametrize("form", FORMS)
def test_secrets_are_removed_in_any_form(form: str, secret: str) -> None:
    """A value is removed as a whole also if the error escapes or encodes it, and whether it is a string or bytes."""
    for value in (secret, secret.encode(), bytearray(secret.encode())):
        scrub = Scrubber({"token": {"private_key": value}})
        assert scrub(f"denied to '{FORMS[form](secret)}', again") == "denied to '***', again"


def test_bytes_that_are_no_text_are_removed() -> None:
    """Bytes that are not valid UTF-8 are removed as ``repr`` shows them, and in base64."""
    key = bytes(range(128, 144))
    scrub = Scrubber({"sse_key": key})
    assert scrub(f"key {key!r} or {base64.b64encode(key).decode()}") == "key b'***' or ***"


@given(st.text(min_size=6).filter(lambda text: "*" not in text), st.text())
def test_any_text_can_be_a_secret(secret: str, text: str) -> None:
    """Whatever characters a value and a message have, the message keeps no ``repr`` and no JSON of the value."""
    scrub = Scrubber({"token": secret})
    for shown in (repr(secret)[1:-1], json.dumps(secret)[1:-1]):
        assert shown not in scrub(f"{text} {shown} {text}")


def test_other_words_stay() -> None:
    """Words in the alphabet of base64, and escaped text, stay if they contain no secret."""
    text = f"/tmp/abcdef/0123456789abcdef: {json.dumps('no key')} at %2Fx {base64.b64encode(b'a:bcdefghi').decode()}"
    assert Scrubber({"password": "hunter2-s3cret"})(text) == text
