"""An attack (dev/break/attack.py) finds no defect in the trainer; and its verdicts recognize every bad end."""
import signal
import subprocess
import sys
import time

import pytest

from conftest import ROOT, TRAINER

sys.path.insert(0, str(ROOT / "dev/break/attack"))
import ends as ends_of_processes  # noqa: E402
from ends import DEFECT, REFUSED, SAME, WAITED, Runs, ends, worst  # noqa: E402


@pytest.fixture
def runs(tmp_path):
    """start(script) starts a shell script instead of the trainer."""
    one = Runs(tmp_path / "trainer", tmp_path, tmp_path)

    def start(script, name="blow"):
        one.trainer.write_text("#!/bin/sh\nmkdir -p run\n" + script)
        one.trainer.chmod(0o755)
        return one.start(name, {})

    yield start
    one.close()


LINE = "echo 'error: no: do this' >&2\n"


@pytest.mark.parametrize("script,verdict", [
    ("exit 0", SAME), (LINE + "exit 2", REFUSED), (LINE + "exit 1", REFUSED), (LINE + "exit 75", WAITED),
    ("exit 1", DEFECT), ("exit 75", DEFECT), (LINE + LINE + "exit 2", DEFECT), (LINE + "exit 0", DEFECT),
    (LINE + "exit 3", DEFECT), ("kill -SEGV $$", DEFECT),
    (LINE + "echo 'terminate called after throwing' >&2; exit 1", DEFECT)])
def test_the_verdict_on_the_end_of_a_process(runs, script, verdict):
    assert ends([runs(script)])[0] == verdict


def test_a_process_that_hangs_is_a_defect_and_one_that_says_that_it_waits_is_not(runs, monkeypatch):
    monkeypatch.setattr(ends_of_processes, "STILL", 0.2)
    event = """echo '{"type":"event","kind":"too_few"}' > run/metrics.jsonl\n"""
    wait = "while :; do sleep 0.1; done"
    begin = time.monotonic()
    verdict, seen = ends([runs(wait)], 0.5)
    assert verdict == DEFECT and "hangs" in seen and time.monotonic() - begin < 10
    assert ends([runs(event + "trap 'exit 143' TERM\n" + wait, "says")], 20)[0] == WAITED
    assert ends([runs(event + "trap 'exit 5' TERM\n" + wait, "fails")], 20)[0] == DEFECT


def test_two_different_models_are_a_defect(runs):
    write = "mkdir -p run/worker_0 && echo {} > run/worker_0/model_00000005.bin"
    same = [runs(write.format("one"), "a"), runs(write.format("one"), "b")]
    assert ends(same)[0] == SAME
    assert ends([*same, runs(write.format("other"), "c")])[0] == DEFECT


def test_a_kind_of_blow_has_its_worst_verdict():
    assert worst([SAME, WAITED, REFUSED]) == WAITED and worst([WAITED, DEFECT, SAME]) == DEFECT and worst([]) == SAME


@pytest.mark.skipif(not TRAINER.exists(), reason="train_gpt_cpu is not built: run make")
@pytest.mark.parametrize("kind", ["strangers", "records in a folder", "twice"])
def test_one_blow_of_each_quick_kind_finds_no_defect(kind):
    words = [sys.executable, ROOT / "dev/break/attack.py", "--minutes", "0", "--seed", "4", "--only", kind]
    result = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 3 and lines[1].endswith((SAME, REFUSED, WAITED)) and lines[2].startswith(kind), lines


@pytest.mark.skipif(not TRAINER.exists(), reason="train_gpt_cpu is not built: run make")
def test_an_attack_that_finds_a_defect_has_status_1_and_keeps_the_files(tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nkill -SEGV $$\n")
    broken.chmod(0o755)
    words = [sys.executable, ROOT / "dev/break/attack.py", "--minutes", "0", "--only", "twice", "--trainer", broken]
    result = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=60)
    assert result.returncode == 1 and f"status {-signal.SIGSEGV}" in result.stdout, result.stdout + result.stderr
    assert list(tmp_path.glob("attack-*"))
