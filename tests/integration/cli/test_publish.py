"""The commands that publish and apply versions: their output and exit codes."""

from __future__ import annotations

from pathlib import Path

from ...lab.models import first_state, next_state, weights_of, write_model
from .test_app import run, told


def test_a_model_is_published_and_followed(tmp_path: Path) -> None:
    """A copy follows a model from the first version to the second, until the first is removed."""
    published, copy = tmp_path / "published", tmp_path / "copy"
    state = first_state()
    write_model(tmp_path / "one", state)
    write_model(tmp_path / "two", next_state(state, 1))
    code, out, _ = run("publish", "add", tmp_path / "one", published, "--step", "10")
    assert (code, out.splitlines()[1]) == (0, "whole, because it is the first version")
    assert out.startswith("version 1: whole, 6 tensors, ")
    added = told("publish", "add", tmp_path / "two", published, "--previous", tmp_path / "one")
    assert (added["version"], added["is_delta"], added["tensors"]) == (2, True, 3)  # type: ignore[index]
    _, out, _ = run("publish", "ls", published)
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [["2", "delta"], ["1", "whole"]]
    assert [info["step"] for info in told("publish", "ls", published)] == [None, 10]  # type: ignore[attr-defined]
    code, out, _ = run("publish", "apply", published, copy, "--to", "1")
    assert (code, "updated to version 1 with a whole version" in out) == (0, True)
    code, out, _ = run("publish", "apply", published, copy)
    assert (code, "updated from version 1 to version 2 with 1 delta, in" in out) == (0, True)
    assert "already has version 2" in run("publish", "apply", published, copy)[1]
    assert weights_of(copy) == weights_of(tmp_path / "two")
    assert run("publish", "verify", published)[1].startswith("ok: version 2: 3 files")
    assert told("publish", "verify", copy)["ok"] is True  # type: ignore[index]
    assert run("publish", "gc", published, "--keep-latest", "1")[1] == "nothing removed\n"
    run("publish", "add", tmp_path / "one", published, "--max-deltas", "1")
    assert run("--json", "publish", "gc", published, "--keep-latest", "1", "--dry-run")[1].startswith("{")
    code, out, _ = run("publish", "gc", published, "--keep-latest", "1")
    assert (code, out.splitlines()[0].startswith("version 2: a delta")) == (0, True)
    assert out.splitlines()[-1].startswith("2 versions removed: ")


def test_the_directory_of_a_delta(tmp_path: Path) -> None:
    """`publish verify` verifies the version of an undamaged delta, and all commands for models refuse the delta."""
    state, published = first_state(), tmp_path / "published"
    for number in (1, 2):
        write_model(tmp_path / f"model-{number}", state)
        run("publish", "add", tmp_path / f"model-{number}", published)
        state = next_state(state, number)
    delta = published / "weight_v000002"
    code, out, _ = run("publish", "verify", delta)
    assert (code, out.startswith("ok: version 2: 3 files")) == (0, True)
    for command in (
        ["inspect", delta],
        ["verify", delta],
        ["diff", published / "weight_v000001", delta],
        ["convert", delta, tmp_path / "x", "--to", "safetensors"],
        ["publish", "add", delta, published],
    ):
        code, _, err = run(*command)
        assert (code, "it holds only the changes of version 2" in " ".join(err.split())) == (3, True)


def test_damage_and_mistakes_have_their_exit_codes(tmp_path: Path) -> None:
    """Damage has exit code 1, a failure or an undamaged model that is no version 2, a version of another program 3."""
    published = tmp_path / "published"
    write_model(tmp_path / "one", first_state())
    assert told("publish", "ls", tmp_path, code=2)["error"] == "NotCommitted"  # type: ignore[index]
    run("publish", "add", tmp_path / "one", published)
    assert run("publish", "apply", published, "memory://copy")[0] == 2
    assert run("publish", "verify", tmp_path / "one")[0] == 3
    write_model(tmp_path / "other", first_state(1))
    code, _, err = run("publish", "apply", published, tmp_path / "other")
    assert (code, "is not a version in" in err) == (2, True)
    run("publish", "apply", published, tmp_path / "verified")
    code, _, err = run("publish", "verify", tmp_path / "verified", "--version", "77")
    assert (code, "there is no version 77 in" in err) == (2, True)
    assert run("publish", "add", tmp_path / "one", published, "--step", "-1")[0] == 2
    path = sorted((published / "weight_v000001").glob("*.safetensors"))[0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    code, out, _ = run("publish", "verify", published)
    assert (code, "DAMAGED" in out, "version 1: " in out) == (1, True, True)
    assert told("publish", "apply", published, tmp_path / "copy", code=1)["error"] == "ChecksumMismatch"  # type: ignore[index]
