"""What a save cost, for logs and for the users' own metrics."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SaveReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """One save, as one rank sees it. Seconds are wall-clock time; those of the writer process overlap.

    Attributes:
        path: Where it went, without credentials.
        save_id: Identifies the save; part of the names of its files.
        rank: The rank that reports.
        nbytes: Bytes of tensors and objects that this rank wrote.
        files: Data files that this rank wrote.
        attempts: 1, or 2 when the writer process died and a fresh one wrote everything once more.
        stage_seconds: In `stage`: what training waited for. 0 for a synchronous save.
        plan_seconds: In DCP's planning and its collectives.
        resolve_seconds: In this process, from the finished plan to the request and from the answer to the results.
        hash_seconds: In the writer process until all hashes were known; it writes meanwhile.
        write_seconds: Of that and after it, in write calls and fsync.
        commit_seconds: In publishing ``.metadata``; None on ranks that do not commit.
        durable_at: When this rank's data, and on the coordinator the checkpoint, was durable (``time.time()``).
    """

    path: str
    save_id: str
    rank: int
    nbytes: int
    files: int
    attempts: int
    stage_seconds: float
    plan_seconds: float
    resolve_seconds: float
    hash_seconds: float
    write_seconds: float
    commit_seconds: float | None
    durable_at: float

    def __str__(self) -> str:
        commit = "" if self.commit_seconds is None else f", commit {self.commit_seconds:.3f}"
        retried = "" if self.attempts == 1 else f", {self.attempts} attempts"
        return (
            f"{self.path}: rank {self.rank} wrote {self.nbytes / 1e6:,.1f} MB in {self.files} file(s){retried} "
            f"(seconds: stage {self.stage_seconds:.3f}, plan {self.plan_seconds:.3f}, resolve "
            f"{self.resolve_seconds:.3f}, hash {self.hash_seconds:.3f}, write {self.write_seconds:.3f}{commit})"
        )
