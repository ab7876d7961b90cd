"""A short run of the soak benchmark: saves with faults, one after the other over one path."""

from benchmarks.soak import FAILED, FATAL, soak


def test_a_dozen_saves_with_faults(tmp_path):
    """Nothing is lost, wrong, hung or left over; what should fail fails, and everything else is committed."""
    tally = soak(12, 3, tmp_path)
    assert (tally.wrong, tally.lost, tally.hangs, tally.leaks) == (0, 0, 0, 0)
    assert sum(tally.saves.values()) == 13
    assert tally.loads >= 13 - sum(tally.saves[fault] for fault in FATAL)
    assert tally.saves["none"] == tally.committed["none"] > 0
    assert tally.saves["writer killed once"] == tally.committed["writer killed once"] > 0
    assert sum(tally.saves[fault] for fault in FATAL) > 0
    assert sum(tally.saves[fault] for fault in FAILED) > 0
    assert tally.committed["data refused"] == tally.committed[".metadata refused"] == 0
