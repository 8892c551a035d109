"""dev/bench/peers: what it makes of logs, the report, going on, and peers that fail. Needs no peer and no network."""
import json
import re
import subprocess
import sys

import pytest

from conftest import ROOT

sys.path.append(str(ROOT / "dev/bench/peers"))
import peers
import peers_report
from metrics import UserError

NEAR = next(iter(peers.LINES))


def record(name, line=NEAR, seed=1, killed=False, scale="quick", **more):
    values = {"failed": "no route"} if more.get("failed") else {"loss": 2.0 + seed / 10}
    values |= {"stall": 1.5} if killed else {"bytes": [1000, 3000], "waited": 0.25, "equal": True}
    return {"name": name, "line": line, "seed": seed, "killed": killed, "scale": scale, "machine": "2 cores of a CPU",
            "date": "2026-11-26", **values, **more}


def cells(text, title):
    """Of a table's row, by its program."""
    row = next(line for line in text.splitlines() if line.startswith(f"| {title}"))
    found = [cell.strip() for cell in row.strip("|").split("|")]
    return dict(zip([*peers.TITLES, "better"], found[1:], strict=True))


def log(worker_steps, **more):
    return [{"type": "step", "step": step, "seconds": seconds, **more} for step, seconds in worker_steps]


def test_jobs_are_told_apart_and_all_seeds_have_losses():
    for scale, own in peers.SCALES.items():
        jobs = peers.jobs_of(scale, list(peers.TITLES))
        assert len(jobs) == len(set(jobs))
        for name in peers.TITLES:
            near = [job.seed for job in jobs if job.name == name and job.line == NEAR and not job.killed]
            assert near == list(range(1, own.seeds + 1))
            assert {job.line for job in jobs if job.name == name} == set(peers.LINES)
            assert any(job.killed for job in jobs if job.name == name)


def test_measures_of_ours_and_of_a_peer():
    steps = [(step, 0.01 if step != 60 else 0.5) for step in range(1, 82)]
    end = [{"type": "end", "step": 81, "loss": 2.5, "hash": "a", "waited_seconds": 99}]
    waits = [{"type": "wait", "step": step, "waited_seconds": 0.1} for step in (9, 30, 60)]
    logs = [log(steps) + waits + end, log(steps) + end]
    found = peers.measures(logs, (27, [0, 100]), (54, [3000, 6100]), None, 27)
    assert found["bytes"] == [1000, 2000]
    assert found["turns"] == 6
    assert found["waited"] == pytest.approx(0.2 / 2 / 6)  # without the first H steps, and no sum of an end
    assert found["loss"] == 2.5 and found["equal"]

    sync = {"type": "sync", "sync": 3, "apply_step": 40, "waited_seconds": 0.6, "global_hash": "b"}
    trainer = [{"type": "eval", "step": 0, "loss": 5.5}, {"type": "eval", "step": 81, "loss": 2.4}]
    logs = [log(steps) + [sync] + trainer, log(steps) + [{**sync, "global_hash": "c"}]]
    found = peers.measures(logs, (27, [0, 0]), (54, [9, 9]), None, 27)
    assert found["waited"] == pytest.approx(0.6 / 6) and found["loss"] == 2.4 and not found["equal"]


def test_the_share_of_waiting_is_without_what_no_tau_hides():
    steps = [(step, 0.01) for step in range(1, 82)]
    syncs = [{"type": "sync", "sync": i, "apply_step": step, "waited_seconds": 0.054, "global_hash": "b"}
             for i, step in enumerate((27, 40, 81))]
    found = peers.measures([log(steps) + syncs + [{"type": "eval", "step": 81, "loss": 2.4}], log(steps)],
                           (27, [0, 0]), (54, [9, 9]), None, 27)
    assert found["waited"] == pytest.approx(0.054 / 6)
    assert found["share"] == pytest.approx(0.1 / 2)
    found = peers.measures([log(steps) + syncs + [{"type": "eval", "step": 81, "loss": 2.4}], log(steps)],
                           (39, [0, 0]), (54, [9, 9]), None, 39)
    assert found["turns"] == pytest.approx(42 * 3 / 39) and found["share"] == pytest.approx(0.054 / 0.42 / 2)


def test_waits_by_tau_are_ours_over_the_last_line(tmp_path, capsys, monkeypatch):
    data, ran = tmp_path / "peers.jsonl", []

    def run_job(arguments, number, one):
        ran.append(one)
        own = record(one.name, one.line, one.seed, one.killed, one.scale, waited=0.02, share=0.015)
        with open(arguments.data, "a") as file:
            print(json.dumps(own), file=file)
        return 0.0

    monkeypatch.setattr(peers, "run_job", run_job)
    monkeypatch.setattr(peers, "missing", lambda: "")
    words = ["--tau", "11", "--data", str(data), "--out", str(tmp_path / "out")]
    peers.main(words)
    assert [one.name for one in ran] == list(peers.OURS)
    assert {(one.line, one.killed) for one in ran} == {(list(peers.LINES)[-1], False)}
    assert {(peers.SCALES[one.scale].tau, peers.SCALES[one.scale].H) for one in ran} == {(11, 108)}
    assert "diloco.c, elastic, S3: 0.020 s a sync; without the last step 1.5% of the time" in capsys.readouterr().out
    del peers.SCALES["tau 11, H 108"]
    with pytest.raises(UserError, match="less than H"):
        peers.main([*words[:1], "108", *words[2:]])


def test_of_several_seeds_the_first_is_shown_in_whatever_order_they_finished():
    records = [record("redis", seed=2, waited=0.9), record("redis", seed=1, waited=0.1)]
    text = peers_report.text_of(records, "quick", {})
    assert cells(text, f"seconds waited a sync, {NEAR}")["redis"] == "0.100"


def test_a_stall_is_the_longest_step_after_the_kill():
    steps = [(step, 7.0 if step == 10 else 0.01 + 0.1 * (step == 50)) for step in range(1, 82)]
    found = peers.measures([log(steps) + [{"type": "end", "step": 81, "loss": 2.5}], []], None, None, 40, 27)
    assert found["stall"] == pytest.approx(0.11)


def test_workers_without_a_common_sync_are_not_equal():
    sync = {"type": "sync", "global_hash": "b"}
    assert not peers.are_equal([[{**sync, "sync": 1}], [{**sync, "sync": 2}]])


def test_half_a_line_of_a_log_is_not_read(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"type": "step", "step": 3}\n{"type": "st')
    assert peers.Progress(tmp_path).step() == 3
    assert peers.Progress(tmp_path, worker=1).step() == 0


def test_the_message_of_a_failed_worker(tmp_path):
    path = tmp_path / "worker0.txt"
    path.write_text("Traceback\n  File x\nRuntimeError: no gloo\nwarning\n")
    assert peers.last_words(path) == "RuntimeError: no gloo"
    path.write_text("")
    assert peers.last_words(path) == "no message"


def test_a_failed_peer_is_shown_with_its_message_and_never_averaged():
    records = [record("torchft", seed=seed) for seed in (1, 2)] + [record("torchft", seed=3, failed="no quorum")]
    text = peers_report.text_of(records, "quick", {})
    assert "FAILED: no quorum" in cells(text, "validation loss")["torchft"]
    assert "FAILED: no quorum" in cells(text, "both workers")["torchft"]


def test_a_loss_is_named_with_all_seeds_only():
    two = peers_report.text_of([record("redis", seed=seed) for seed in (1, 2)], "quick", {})
    assert cells(two, "validation loss")["redis"] == "2 of 3 runs"
    three = peers_report.text_of([record("redis", seed=seed) for seed in (1, 2, 3)], "quick", {})
    assert cells(three, "validation loss")["redis"] == "2.2000 ± 0.1000"
    assert "runs are missing: run it again" in three


def test_a_row_says_where_a_peer_is_better():
    records = [record("lock-step", waited=0.5), record("redis", waited=0.1), record("torchft", waited=0.3)]
    found = cells(peers_report.text_of(records, "quick", {}), f"seconds waited a sync, {NEAR}")["better"]
    assert found == "torchft 0.2.0 is better than diloco.c's lock-step"
    records = [record(name, waited=0.5) for name in peers.OURS] + [record("torchft", waited=0.3)]
    found = cells(peers_report.text_of(records, "quick", {}), f"seconds waited a sync, {NEAR}")["better"]
    assert found == "torchft 0.2.0 is better than all of diloco.c's ways"


def test_a_peer_that_goes_on_is_better_than_ours_that_fails():
    records = [record("lock-step", killed=True, failed="gone"), record("redis", killed=True), record("s3", killed=True),
               record("torchft", killed=True, stall=9.0)]
    text = peers_report.text_of(records, "quick", {})
    assert cells(text, "longest step")["better"] == "torchft 0.2.0 is better than diloco.c's lock-step"
    assert cells(text, "longest step")["lock-step"] == "FAILED: gone"


def test_workers_that_differ_are_named():
    text = peers_report.text_of([record("s3", equal=False)], "quick", {})
    assert cells(text, "both workers")["s3"] == "NOT EQUAL in 1 of 1 runs"


def test_a_users_lines_are_counted_from_the_programs():
    for program in ("torchft", "gradientmail"):
        assert 10 < peers_report.user_lines(peers.HERE / f"{program}_worker.py") < 40


def test_finished_and_failed_runs_are_not_run_again(tmp_path, monkeypatch):
    data, ran = tmp_path / "peers.jsonl", []

    def run_job(arguments, number, one):
        ran.append(one)
        with open(arguments.data, "a") as file:
            print(json.dumps(record(one.name, one.line, one.seed, one.killed, failed="x")), file=file)
        return 0.0

    monkeypatch.setattr(peers, "run_job", run_job)
    monkeypatch.setattr(peers, "missing", lambda: None)
    monkeypatch.setattr(peers_report, "sizes", dict)
    words = ["--quick", "--only", "redis", "--data", str(data), "--out", str(tmp_path / "out")]
    peers.main(words)
    assert ran == peers.jobs_of("quick", ["redis"])
    data.write_text("".join(data.read_text().splitlines(keepends=True)[1:]))
    peers.main(words)
    assert ran[-1] == ran[0] and len(ran) == 1 + len(peers.jobs_of("quick", ["redis"]))


def test_sizes_are_those_of_what_is_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    (tmp_path / ".venv-peers-torchft/bin").mkdir(parents=True)
    (tmp_path / ".venv-peers-torchft/bin/x").write_bytes(bytes(3000))
    (tmp_path / "train_gpt_cpu").write_bytes(bytes(2000))
    assert peers_report.sizes() == {**dict.fromkeys(peers.OURS, 0.002), "torchft": 0.003}


def test_the_report_and_its_figure_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(peers_report, "sizes", dict)
    data = tmp_path / "peers.jsonl"
    data.write_text("".join(json.dumps(record(name)) + "\n" for name in ("redis", "torchft")))
    peers.main(["--quick", "--minutes", "0", "--data", str(data), "--report", str(tmp_path / "peers.md")])
    assert "![waits and bytes](peers.png)" in (tmp_path / "peers.md").read_text()
    assert (tmp_path / "peers.png").stat().st_size > 1000


def test_without_runs_there_is_no_report(tmp_path):
    with pytest.raises(UserError, match="give it more --minutes"):
        peers.main(["--minutes", "0", "--data", str(tmp_path / "none.jsonl")])


def test_without_peers_make_says_what_it_would_install():
    result = subprocess.run(["make", "-s", "bench-peers", "PEERS="], cwd=ROOT, capture_output=True, text=True,
                            check=True)
    assert "PEERS=1 make bench-peers" in result.stdout
    for program in ("torchft", "gradientmail"):
        pinned = re.search(r"==([\d.]+)", (peers.HERE / f"{program}.txt").read_text())[1]
        assert pinned in result.stdout
        assert any(pinned in title for name, title in peers.PEERS.items() if name.startswith(program))
