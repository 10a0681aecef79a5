"""A device's record is found where its weights or its profiles are."""

from __future__ import annotations

from pathlib import Path

import pytest

from learned_cost import choose
from learned_cost.devices.device import record


def test_records_lie_beside_weights_and_in_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = record("cpu-core").model_copy(update={"name": "mine"})
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices" / "mine.yaml").write_text(own.to_yaml())
    monkeypatch.chdir(tmp_path)
    for choice in ("mine.safetensors", str(tmp_path / "mine.safetensors"), str(tmp_path)):
        records = choose._records(choice)
        described = choose.Described("mine", "cpu", own.memory_bytes, (("float32", 1e11),), 2e10)
        place = choose._place(described, records)
        assert (place.record, place.known) == (own, True)
    place = choose._place(described, choose._records("learned"))
    assert not place.known
    assert place.record.l2_bytes is None
