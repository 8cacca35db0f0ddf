"""What killed processes leave is removed by the next; what living ones have stays."""

import subprocess
import sys
import tempfile

import pytest

from rlkit.engines.vllm.cleanup import mine, remove_left, remove_left_by_vllm, scratch_folder

PREFIX = "rlkit-test-"
GONE = 999_999_999  # above the largest process id that Linux gives


def of_process(number):
    """What the names of a process's files begin with, in this process's namespace."""
    start, _, _ = mine(PREFIX).rstrip("-").rpartition("-")
    return f"{start}-{number}-"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    if not sys.platform.startswith("linux"):
        pytest.skip("Linux only")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_files_and_folders_of_the_dead_go_and_all_others_stay(folder):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        (folder / f"{of_process(GONE)}a.safetensors").write_text("x")
        (folder / f"{of_process(GONE)}b").mkdir()
        (folder / f"{of_process(GONE)}b" / "vllm.log").write_text("x")
        stay = [f"{mine(PREFIX)}a", f"{of_process(other.pid)}a", f"other-{of_process(GONE)}a", f"{PREFIX}notes"]
        stay.append(f"{PREFIX}0-{GONE}-a")  # another container's, whose process may well live
        for name in stay:
            (folder / name).write_text("x")
        remove_left(folder, PREFIX)
        assert {entry.name for entry in folder.iterdir()} == set(stay)
        other.communicate(b"\n")


def test_a_scratch_folder_is_made_where_the_dead_have_left_theirs(folder):
    (folder / f"{of_process(GONE)}old").mkdir()
    with scratch_folder(PREFIX) as name:
        assert name.startswith(str(folder / mine(PREFIX)))
        assert len(list(folder.iterdir())) == 1
    assert list(folder.iterdir()) == []


@pytest.mark.integration
def test_a_process_that_is_killed_leaves_a_folder_that_the_next_one_removes(folder):
    code = (
        f"import sys, tempfile\ntempfile.tempdir = {str(folder)!r}\n"
        f"from rlkit.engines.vllm.cleanup import scratch_folder\nkept = scratch_folder({PREFIX!r})\n"
        "print('made', flush=True)\ninput()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"made\n"
        (left,) = folder.iterdir()
        remove_left(folder, PREFIX)
        assert left.exists()
        process.kill()
    assert left.exists()
    remove_left(folder, PREFIX)
    assert not left.exists()


def test_what_a_killed_engine_of_the_same_processes_has_shared_goes(tmp_path):
    """vLLM for CPUs names it by the ranks; the next engine could not make its own."""
    stay = {"-tp:1-[0-1-2-3]-cpushm_0", "-tp:1-[2-3]-cpushm_0", "psm_0-1"}
    for name in stay | {"-tp:1-[0-1]-cpushm_0", "-tp:2-[0-1]-cpushm_1"}:
        (tmp_path / name).write_text("x")
    remove_left_by_vllm(tmp_path, [0, 1])
    assert {file.name for file in tmp_path.iterdir()} == stay
