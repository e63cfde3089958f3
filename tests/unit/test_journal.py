"""The journal gives back what was appended, whatever happened to the process that wrote it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.disk import file_size_limit
from tests.samples import completion, request
from tlt_pipeline.bus.journal import Journal, read_journal
from tlt_pipeline.rundir import StorageError

NUMBERS = range(20)


def write_some(folder: Path) -> Path:
    with Journal(folder) as journal:
        for number in NUMBERS:
            journal.append(request(number))
    (path,) = folder.glob("requests-*.bin")
    return path


def numbers_in(folder: Path) -> list[int]:
    return [found.index for found in read_journal(folder, "requests")]


def test_reads_requests_and_completions_apart(tmp_path: Path):
    with Journal(tmp_path) as journal:
        for number in NUMBERS:
            journal.append(request(number))
            journal.append(completion(request(number)))
    assert list(read_journal(tmp_path, "requests")) == [request(number) for number in NUMBERS]
    assert list(read_journal(tmp_path, "completions")) == [completion(request(number)) for number in NUMBERS]


def test_empty_run_has_empty_journal(tmp_path: Path):
    assert list(read_journal(tmp_path / "none", "requests")) == []


def test_each_request_once_over_restarts(tmp_path: Path):
    write_some(tmp_path)
    with Journal(tmp_path) as journal:
        journal.append(request(3, policy_version=9))
        journal.append(request(77))
    found = list(read_journal(tmp_path, "requests"))
    assert [item.index for item in found] == [*NUMBERS, 77]
    assert found[3].policy_version == 0


def test_reads_while_another_process_writes(tmp_path: Path):
    with Journal(tmp_path) as journal:
        journal.append(request(1))
        assert numbers_in(tmp_path) == [1]
        journal.append(request(2))
        assert numbers_in(tmp_path) == [1, 2]


def test_every_torn_tail_keeps_what_is_before_it(tmp_path: Path):
    path = write_some(tmp_path)
    whole = path.read_bytes()
    frame = (len(whole) - 8) // len(NUMBERS)
    for cut in range(len(whole) - frame + 1, len(whole)):
        path.write_bytes(whole[:cut])
        with capture_logs() as logs:
            assert numbers_in(tmp_path) == list(NUMBERS)[:-1]
        assert any("torn tail" in line["event"] for line in logs)


def test_a_damaged_frame_costs_only_itself_and_is_said(tmp_path: Path):
    path = write_some(tmp_path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with capture_logs() as logs:
        found = numbers_in(tmp_path)
    assert len(found) == len(NUMBERS) - 1
    assert [line["event"] for line in logs] == ["journal: skipped a damaged frame"]


def test_a_file_that_is_no_journal_is_said(tmp_path: Path):
    (tmp_path / "requests-1-1.bin").write_bytes(b"hello world")
    with capture_logs() as logs:
        assert numbers_in(tmp_path) == []
    assert "header" in logs[0]["event"]


def test_nothing_is_lost_when_the_writer_is_killed(tmp_path: Path):
    program = (
        "import os, signal, sys; from pathlib import Path; from tests.samples import request\n"
        "from tlt_pipeline.bus.journal import Journal\n"
        f"journal = Journal(Path({str(tmp_path)!r}))\n"
        "for number in range(50): journal.append(request(number))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], timeout=60)
    assert ran.returncode == -signal.SIGKILL
    assert numbers_in(tmp_path) == list(range(50))


def test_full_disk_is_one_line_and_the_rest_stays_readable(tmp_path: Path):
    with Journal(tmp_path) as journal:
        journal.append(request(1))
        size = next(tmp_path.glob("requests-*.bin")).stat().st_size
        with file_size_limit(size + 100), pytest.raises(StorageError, match=r"no space left for .*--resume"):
            journal.append(request(2, entry="x" * 1000))
        journal.append(request(3))  # space was freed
    with capture_logs() as logs:
        assert numbers_in(tmp_path) == [1, 3]
    assert logs == []


def test_a_folder_that_can_not_be_made_is_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        Journal(tmp_path / "file" / "journal")


def test_long_journals_are_several_files(tmp_path: Path):
    with Journal(tmp_path, rotate_bytes=1000) as journal:
        for number in NUMBERS:
            journal.append(request(number))
    assert len(list(tmp_path.glob("requests-*.bin"))) > 2
    assert numbers_in(tmp_path) == list(NUMBERS)


def test_synced_before_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with Journal(tmp_path) as journal:
        journal.append(request(1))
        assert synced == []
        journal.sync()
        assert len(synced) == 1
    assert len(synced) == 2
