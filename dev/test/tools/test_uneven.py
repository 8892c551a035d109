"""dev/bench/uneven.py: its bars are computed from the logs of its runs and can be missed, what is missing is
said, and what was run is not run again. Most logs are made here; one of a worker that is killed and starts
again is a real run's."""
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT, TINY, TRAINER

import quota
import redis_server
import uneven
import uneven_jobs as jobs
import uneven_report
from fleet import Fleet
from metrics import read_lines
from sites import relay_options


@pytest.fixture
def arguments(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for split in ("train", "val"):
        (text / f"x_{split}_000000.bin").touch()
    words = ["--out", str(tmp_path), "--text", str(text), "--trainer", "/bin/false", "--seeds", "2"]
    return uneven.parse_arguments(words)


# ------------------------------------------------------------------------------------------------ made logs

def step_lines(seconds, tokens, steps=None):
    """seconds: of each step"""
    numbers = steps or range(1, len(seconds) + 1)
    return [{"type": "step", "step": step, "seconds": one, "tokens": tokens * n, "loss": 3.0}
            for n, (step, one) in enumerate(zip(numbers, seconds), 1)]


def sync_lines(contributors, every=10, overlap=5, waited=0.0, sent=1000):
    """contributors: of each sync"""
    return [{"type": "sync", "sync": n, "send_step": every * (n + 1), "apply_step": every * (n + 1) + overlap,
             "contributors": counted, "waited_seconds": waited, "bytes_sent": sent, "global_hash": f"{n:016x}"}
            for n, counted in enumerate(contributors)]


def write_run(arguments, job, lines, devices=()):
    """lines: by worker"""
    folder = arguments.out / job.name
    folder.mkdir()
    for worker, own in lines.items():
        head = {"type": "run", "version": 2, "worker": worker, "rank": 0, "workers": job.workers, "ranks": 1,
                "parameters": 1000, "options": {}}
        end = {"type": "end", "time": 660.0, "train_seconds": 100.0, "log_turn_seconds": 0.01,
               "log_thread_seconds": 0.02, "waited_seconds": 0.5}
        given = [line for line in own if line["type"] == "end"]
        text = "".join(json.dumps(line) + "\n" for line in [head, *own, *([] if given else [end])])
        (folder / jobs.log_name(worker)).write_text(text)
    how = {"options": job.record(), "seconds": 60, "program": "a", "cores": 1.2, "wall_seconds": 60,
           "devices": [{"bytes_received": count} for count in devices], "tcp": ["cubic", "1"]}
    (folder / "made_by.json").write_text(json.dumps(how))


def learning_run(arguments, job, loss, busy=1.0, counted=100, tokens=jobs.STEP_TOKENS):
    """A run of 200 steps whose fourth worker is counted in `counted` of 100 syncs; 15 of the syncs are applied after
    the first 48 steps."""
    waited = (1 - busy) * 0.1 * (200 - 48) / 15
    lines = {}
    for worker in range(job.workers):
        if worker not in job.absent:
            everybody = [0, 1, 2, 3]
            lines[worker] = [*step_lines([0.1] * 200, tokens if worker == 3 else jobs.STEP_TOKENS),
                             *sync_lines([everybody if n < counted else everybody[:3] for n in range(100)],
                                         waited=waited),
                             {"type": "eval", "step": 200, "loss": loss}]
    write_run(arguments, job, lines)


def uneven_runs(arguments, half=2.0, tenth=2.0, kept=1.0, counted=95):
    for seed in (1, 2):
        for name, loss in (("half", half), ("tenth", tenth)):
            learning_run(arguments, jobs.without_job(arguments, name, seed), 2.0)
            job = jobs.slower_job(arguments, name, seed)
            learning_run(arguments, job, loss, kept, counted, jobs.STEP_TOKENS // jobs.SLOWER[name])
            learning_run(arguments, jobs.as_many_tokens(arguments, name, seed), 2.0)


def verdicts(section):
    return [bar.text().split("**")[1] for bar in section.bars]


# ------------------------------------------------------------------------------------------------- the bars

def test_an_uneven_run_that_keeps_its_speed_and_its_loss_meets_its_bars(arguments):
    uneven_runs(arguments)
    section = uneven_report.uneven_section(arguments)
    assert verdicts(section) == ["met"] * 5
    rows = [[cell.strip() for cell in line.split("|")[1:-1]]
            for line in section.text.splitlines() if "|" in line]
    assert rows[2] == ["1/2", "100.0%", "100.0%", "95.0%", "50.0%", "2.0000", "2.0000", "+0.00% ± 0.00", "2"]
    assert rows[3][0] == "1/10" and rows[3][4] == "10.0%"


@pytest.mark.parametrize("change, missed", [
    ({"kept": 0.96}, [0, 3]), ({"counted": 89}, [1]), ({"half": 2.03}, [2]), ({"half": 1.97}, []),
    ({"tenth": 2.03}, [4])])
def test_a_bar_that_is_missed_is_called_so(arguments, change, missed):
    uneven_runs(arguments, **change)
    found = verdicts(uneven_report.uneven_section(arguments))
    assert found == ["MISSED" if number in missed else "met" for number in range(5)]


def test_what_others_wait_is_part_of_their_speed_where_the_median_window_does_not_show_it(arguments):
    seconds = [0.1] * 199 + [10.0]
    logs = {worker: {"step": step_lines(seconds, 512)} for worker in range(3)}
    of_all, of_windows = uneven_report.steps_per_second(logs, logs, 50)
    assert of_all == pytest.approx(150 / 24.9) and of_windows == pytest.approx(10)


def test_an_even_run_has_the_tokens_of_the_uneven_one_and_waits_for_it(arguments):
    assert jobs.as_many_tokens(arguments, "half", 1) is None
    names = [job.name for job in jobs.all_jobs(arguments)]
    assert "half-seed1" in names and "even-as-half-seed1" not in names
    learning_run(arguments, jobs.slower_job(arguments, "half", 1), 2.0, tokens=jobs.STEP_TOKENS // 2)
    job = jobs.as_many_tokens(arguments, "half", 1)
    assert job.options["-x"] == 175 and job.shares == (jobs.SHARE,) * 4  # 3.5 times 200 steps, by four
    assert job in jobs.all_jobs(arguments)


def test_a_worker_that_is_lost_may_cost_half_a_percent(arguments):
    for seed in (1, 2):
        learning_run(arguments, jobs.even_job(arguments, seed), 2.0)
        learning_run(arguments, jobs.lost_job(arguments, seed), 2.008, counted=66)
    section = uneven_report.lost_section(arguments)
    assert verdicts(section) == ["met"] and "+0.40% ± 0.00" in section.text and "66.0%" in section.text
    folder = arguments.out / "even-seed2"
    (folder / "metrics.jsonl").write_text((folder / "metrics.jsonl").read_text().replace("2.0}", "1.9}"))
    assert verdicts(uneven_report.lost_section(arguments)) == ["MISSED"]


def costs(arguments, threads):
    for job in jobs.costs_jobs(arguments):
        end = {"type": "end", "time": 100.0, "train_seconds": 100.0, "log_turn_seconds": 0.01,
               "waited_seconds": 0.5}
        lines = [*step_lines([0.5] * 200, 512), *sync_lines([[0, 1]] * 20)]
        write_run(arguments, job, {worker: [*lines, {**end, "log_thread_seconds": one}]
                                   for worker, one in enumerate(threads)})


@pytest.mark.parametrize("threads, verdict", [((0.01, 0.08), "met"), ((0.01, 0.1), "MISSED")])
def test_what_the_store_costs_is_of_the_worker_that_spends_most(arguments, threads, verdict):
    costs(arguments, threads)
    section = uneven_report.costs_section(arguments)
    assert verdicts(section) == [verdict] * 2 and section.text.count("500 ms") == 3


def bits(arguments, change=None):
    for number, job in enumerate(jobs.bits_jobs(arguments)):
        lines = {worker: [*step_lines([0.1] * 200, 64), *sync_lines([[0, 1]] * 20)] for worker in (0, 1)}
        if change is not None and number == 2:
            change(lines[1])
        write_run(arguments, job, lines)
    return uneven_report.bits_section(arguments)


def test_runs_with_the_same_losses_and_hashes_are_the_same(arguments):
    section = bits(arguments)
    assert verdicts(section) == ["met"] and "400 losses and 40 hashes" in section.bars[0].text()


@pytest.mark.parametrize("change", [lambda lines: lines[7].update(loss=3.0000001),
                                    lambda lines: lines[-1].update(global_hash="0")])
def test_one_loss_or_one_hash_that_differs_is_seen(arguments, change):
    section = bits(arguments, change)
    assert verdicts(section) == ["MISSED"] and "over redis" in section.bars[0].text()


def links(arguments, minutes=11, events=(), contributors=(0, 1, 2, 3)):
    (job,) = jobs.links_jobs(arguments)
    end = {"type": "end", "time": 60.0 * minutes, "train_seconds": 600.0, "waited_seconds": 0.0}
    lines = {worker: [*step_lines([0.1] * 300, 32), *sync_lines([list(contributors)] * 28), end]
             for worker in range(4)}
    lines[1] += [{"type": "event", "step": 7, **event} for event in events]
    write_run(arguments, job, lines, devices=[60e6] * 4 + [0])
    return uneven_report.links_section(arguments)


def test_ten_minutes_without_an_absence_meet_the_bar_and_fewer_do_not_measure_it(arguments):
    section = links(arguments)
    assert verdicts(section) == ["met"] and "80% to 80%" in section.text


def test_a_short_run_does_not_measure_absences(arguments):
    assert verdicts(links(arguments, minutes=9)) == ["not measured"]


@pytest.mark.parametrize("more", [{"events": [{"kind": "late", "worker": 2, "text": "worker 2 is late"}]},
                                  {"events": [{"kind": "gone", "worker": 2, "text": "worker 2 is gone"}]},
                                  {"contributors": (0, 1, 3)}])
def test_one_worker_that_is_taken_for_late_or_gone_or_not_counted_misses_the_bar(arguments, more):
    section = links(arguments, **more)
    assert verdicts(section) == ["MISSED"]
    for event in more.get("events", []):
        assert f"worker 1 at step 7: {event['text']}" in section.text
    (job,) = jobs.links_jobs(arguments)
    (arguments.out / job.name / "made_by.json").unlink()
    (arguments.out / job.name).rename(arguments.out / "before")
    assert verdicts(links(arguments, minutes=1, **more)) == ["MISSED"]  # however short


def far_run(arguments, job, seconds, waited):
    """Three periods of 100 steps after a first one; the workers wait for each sync."""
    period = [seconds] * 99 + [seconds + 5 * waited]
    lines = [*step_lines(period * 4, 32), *sync_lines([[0]] * 19, every=20, overlap=1, waited=waited)]
    write_run(arguments, job, {worker: lines for worker in range(job.workers)})


@pytest.mark.parametrize("waited, verdict", [(1.0, "met"), (1.3, "MISSED")])
def test_utilization_is_compared_with_what_is_predicted(arguments, monkeypatch, waited, verdict):
    monkeypatch.setattr(uneven_report, "read_measured", lambda folder: type("Run", (), {"step_seconds": 0.1}))
    monkeypatch.setattr(uneven_report, "predict",
                        lambda run, rate, *_, **line: 1.0 if rate == math.inf else 10 / 15)
    for job in jobs.far_jobs(arguments):
        far_run(arguments, job, 0.1, 0 if job.name.endswith("near") else waited)
    section = uneven_report.far_section(arguments)
    assert verdicts(section) == [verdict]
    assert section.text.count(f"{100 * 10 / (10 + 5 * waited):.1f}%") >= 6


# --------------------------------------------------------------------------------------------- what is run

def test_what_is_missing_is_said_and_what_is_there_is_not_run_again(arguments, capsys):
    text = uneven_report.report(arguments)
    assert "met**" not in text and "MISSED" not in text and "runs are missing" in text
    uneven_runs(arguments)
    assert "at most 1.20 cores were in use" in uneven_report.report(arguments)
    bits(arguments)
    costs(arguments, (0.01, 0.02))
    arguments.only = ["bits", "costs"]
    uneven.run_all(arguments)  # the trainer is /bin/false
    text = uneven_report.report(arguments)
    assert "missing" not in text and "not measured" not in text and "different builds" not in text
    assert "cores were in use" not in text
    assert text.count("**met**") == 3
    (arguments.out / "costs-file").rename(arguments.out / "costs-file.part")
    assert "1 of 6 runs are missing" in uneven_report.report(arguments)
    with pytest.raises(uneven.UserError, match="worker . failed .no message."):
        uneven.run_all(arguments)
    arguments.minutes = 0
    uneven.run_all(arguments)
    assert "0 minutes are over" in capsys.readouterr().out


def test_runs_with_other_options_are_not_taken_for_these(arguments):
    bits(arguments)
    arguments.text = arguments.text.with_name("other")
    with pytest.raises(uneven.UserError, match="was run with other options"):
        uneven.run_all(arguments)


def test_quotas_leave_some_of_two_cores_idle():
    for shares in ([jobs.SHARE] * 4, [jobs.FAR_SHARE] * max(jobs.FAR_WORKERS), [jobs.LINKS_SHARE] * 4):
        assert sum(shares) <= 1.2
    for share in (jobs.SHARE, *(jobs.SHARE / times for times in jobs.SLOWER.values()), jobs.FAR_SHARE):
        period, part = quota.period_and_quota(share)
        assert part / period == pytest.approx(share, rel=1e-3) and part >= 1000 and period <= 50000


def test_quick_runs_are_of_every_kind_and_in_a_folder_of_their_own(arguments):
    words = ["--text", str(arguments.text), "--trainer", "/bin/false"]
    quick, full = uneven.parse_arguments([*words, "--quick"]), uneven.parse_arguments(words)
    assert quick.out != full.out and quick.out.parent == full.out
    quick.out, full.out = arguments.out / "quick", arguments.out  # where nothing has been run
    kinds = [{job.name.partition("-")[0] for job in jobs.all_jobs(one)} for one in (quick, full)]
    assert kinds[0] == kinds[1] == {"bits", "costs", "far", "links", "without", *jobs.SLOWER, "even", "lost"}


@pytest.mark.parametrize("words, what", [
    (["--text", "nowhere"], "nowhere holds no tokens"), (["--trainer", "nowhere"], "there is no nowhere"),
    (["--report", "nowhere/report.md"], "nowhere/report.md cannot be written"),
    (["--only", "x"], "invalid choice"), (["--seeds", "0"], "0 is not above zero"),
    (["--minutes", "nan"], "nan is not above zero")])
def test_wrong_options_are_the_users_mistake(arguments, words, what):
    given = ["--text", str(arguments.text), "--out", str(arguments.out / "new"), "--trainer", "/bin/false"]
    with pytest.raises(uneven.UserError, match=what):
        uneven.main([*given, *words])
    assert not (arguments.out / "new").exists()


# ------------------------------------------------------------------------------------------------ processes

def test_sites_may_have_lines_of_their_own():
    words = relay_options([jobs.SLOW_LINE, jobs.SLOW_LINE, jobs.STORES_LINE])
    options = dict(zip(words[::2], words[1::2]))
    assert options["--up"] == options["--down"] == "10,10,0" and options["--delay"] == "5.0,5.0,5.0"
    assert dict(zip(words[::2], words[1::2]))["--mtu"] == "1500"
    assert relay_options([jobs.FAR_LINE])[:2] == ["--up", "1000"]


def test_cores_are_shared_out_by_either_version_of_control_groups(tmp_path):
    mounts = "x / ext4 rw 0 0\ncgroup /a cgroup rw,cpuacct 0 0\ncgroup /b cgroup rw,cpu 0 0\n"
    first = quota.find_hierarchy(mounts)
    assert first == quota.Hierarchy(Path("/b"), 1)
    mounts = f"cgroup2 {tmp_path} cgroup2 rw 0 0\n"
    assert quota.find_hierarchy(mounts) is None
    (tmp_path / "cgroup.controllers").write_text("memory pids\n")
    assert quota.find_hierarchy(mounts) is None
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    second = quota.find_hierarchy(mounts)
    assert second == quota.Hierarchy(tmp_path, 2)
    second.limit(tmp_path, 10000, 3000)
    assert (tmp_path / "cpu.max").read_text() == "3000 10000"


def test_a_process_is_in_the_group_that_has_its_share_and_nothing_is_left(tmp_path):
    if lack := quota.missing():
        pytest.skip(lack)
    with quota.Quotas() as quotas:
        words = quotas.inside("x", 0.5)
        (group,) = quotas.groups
        found = subprocess.run([*words, "cat", "/proc/self/cgroup"], capture_output=True, text=True)
        assert group.name in found.stdout and group.exists()
    assert not group.exists()


def test_groups_of_a_program_that_was_killed_are_removed_and_no_others(tmp_path):
    killed = subprocess.Popen(["true"])
    killed.wait()
    names = {f"diloco-{killed.pid}-worker0", f"diloco-{os.getpid()}-worker0", "system.slice"}
    for name in names:
        (tmp_path / name).mkdir()
    quota.remove_abandoned(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == names - {f"diloco-{killed.pid}-worker0"}


def fleet_options(tokens, **more):
    return {**TINY, "-i": f"{tokens}/x_train_*.bin", "-j": f"{tokens}/x_val_*.bin", "--workers": 3,
            "--min-workers": 2, "--outer-transport": "store", "--grace": 1, "-H": 8, "--fragment-layers": 1,
            "--overlap": 4, "-n": 10, "-x": 200, **more}


def test_a_worker_that_is_killed_comes_back_and_all_end(tokens, tmp_path):
    if lack := redis_server.missing():
        pytest.skip(lack)
    # The steps that are left when it comes back must take longer than its start.
    job = jobs.Job("run", fleet_options(tokens, **{"-x": 600, "-b": 32}), 3, loses=2)
    with Fleet(TRAINER, job.options, tmp_path / "run", 3) as fleet:
        jobs.play(fleet, job)
    logs = {worker: read_lines(tmp_path / "run" / jobs.log_name(worker)) for worker in range(3)}
    assert all(log["end"] for log in logs.values())
    assert 0 < uneven_report.counted_share(logs, 2) < 1
    assert uneven_report.happened(logs, ["back"])
    assert not (tmp_path / "run/redis").exists() and fleet.cores > 0


def test_a_worker_that_ends_is_named(tokens, tmp_path):
    with pytest.raises(uneven.UserError, match="worker 1 failed .error: an overlap"):
        with Fleet(TRAINER, fleet_options(tokens, **{"--overlap": 9}), tmp_path / "run", 2,
                   store="file") as fleet:
            fleet.start(1)
            fleet.wait()
    with pytest.raises(uneven.UserError, match="worker 0 ended before step 20"):
        with Fleet(TRAINER, fleet_options(tokens, **{"--workers": 1, "--min-workers": 1, "-x": 10}),
                   tmp_path / "other", 1, store="file") as fleet:
            fleet.start(0)
            fleet.wait_for_step(0, 20)
