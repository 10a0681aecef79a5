"""When links are measured long enough."""

from __future__ import annotations

from learned_cost.profile.links import LinkRow, tell_rates


def test_calls_that_take_longer_than_bytes_tell_no_rate() -> None:
    small = [LinkRow("core", name, 2, 1024, 1e-3) for name in ("all_reduce", "all_to_all")]
    grown, flat = LinkRow("core", "all_reduce", 2, 2**22, 5e-3), LinkRow("core", "all_to_all", 2, 2**22, 1.1e-3)
    assert not tell_rates([])
    assert not tell_rates(small)
    assert not tell_rates([*small, grown, flat])
    assert tell_rates([*small, grown, flat, LinkRow("core", "all_to_all", 2, 2**24, 4e-3)])
