"""The disk's benchmark moves what it says, and writes what it found: no figure is tested."""

import json
import os
import sys

import pytest

from benchmarks.disk import __main__ as disk


@pytest.mark.parametrize("by_fio", [False, pytest.param(True, marks=pytest.mark.long("starts processes"))])
def test_runs(by_fio, tmp_path, monkeypatch):
    try:
        os.close(os.open(tmp_path / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"a file here cannot be opened with O_DIRECT: {error}")
    (tmp_path / "direct").unlink()
    monkeypatch.setattr(disk, "has_fio", lambda: by_fio)
    monkeypatch.setattr(disk, "fio", disk.ours)
    options = ["--mib", "64", "--group", "16", "--leaf", "8", "--pairs", "2", "--json", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", ["disk", "--directory", str(tmp_path), *options])
    disk.main()
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["kind"] for row in found["rows"]] == ["both", "read", "write", "device longer"]
    ways = {"store", "plain", "fio"} if by_fio else {"store", "plain"}
    for row in found["rows"][:3]:
        assert {name: len(rates) for name, rates in row["bytes_per_second"].items()} == dict.fromkeys(ways, 2)
    assert 0 < found["bytes_of_buffers"] <= found["bound"]
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
