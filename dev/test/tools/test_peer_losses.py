"""dev/bench/peer_losses.py: both programs train on the same rows with the same rates, a trial of it finds them alike,
and runs that are not alike are noticed. Where PyTorch is missing, its half is skipped."""
import json

import numpy as np
import pytest

import peer_losses
import reference_diloco
from conftest import ROOT, TRAINER

try:
    import torch
except ImportError:
    torch = None
needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed: PEER=PYTHON make bench-losses runs "
                                                       "with another Python")
needs_trainer = pytest.mark.skipif(not TRAINER.exists(), reason="train_gpt_cpu is not built: run make")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A small text as bytes, with few of them likely."""
    folder = tmp_path_factory.mktemp("text")
    for part, count in (("train", 9000), ("val", 2200)):
        tokens = np.minimum(*np.random.default_rng(count).integers(0, 100, (2, count)))
        (folder / f"x_{part}_000000.bin").write_bytes(reference_diloco.token_shard(tokens))
    head = np.zeros(256, dtype="<i4")
    head[:4] = 20240328, 2, 257, 256
    (folder / "tokenizer.bin").write_bytes(head.tobytes() + b"\1x" * 257)
    return folder


def words(text, out, *more):
    return ["--quick", "--trainer", str(TRAINER), "--text", str(text), "--out", str(out), *more]


def test_rows_come_in_the_trainers_order():
    """The same numbers as in dev/test/unit/llmc/test_random.cpp."""
    assert reference_diloco.shuffled(10, 1337, 0) == [4, 8, 1, 7, 0, 2, 9, 5, 6, 3]
    assert reference_diloco.shuffled(17, 2**40 + 5, 3) == [
        13, 3, 2, 11, 15, 14, 4, 7, 8, 16, 10, 12, 6, 0, 9, 1, 5]
    for count in (1, 2, 4, 5, 16, 17, 1000):
        assert sorted(reference_diloco.shuffled(count, 7, 1)) == list(range(count))
    assert reference_diloco.shuffled(1000, 7, 1) != reference_diloco.shuffled(1000, 7, 2)


def test_all_methods_train_and_validate_on_the_same_rows(text):
    for method in peer_losses.METHODS:
        options = peer_losses.options_of(peer_losses.FULL, method, 2, text)
        ranks = options.get("--ranks", 1)
        assert options["-b"] * options["--workers"] * ranks == 16
        assert options["-b"] * ranks * options["-m"] == 640
        peers = peer_losses.options_of_pytorch(options, text)
        assert peers["-b"] * peers["--workers"] == 16 and peers["-d"] == peers["-b"] * 128
        assert (peers["--outer-optimizer"], peers["--vocab-size"]) == ("nesterov" if "m2" in method else "none", 257)


@needs_trainer
def test_the_trainers_half_is_read_from_its_log(text, tmp_path):
    arguments = peer_losses.parse_arguments(words(text, tmp_path, "--only", "adamw-m2"))
    one = peer_losses.jobs_of(arguments)[0]
    assert peer_losses.read_losses(arguments, one) is None
    peer_losses.run_job(arguments, 1, one)
    losses = peer_losses.read_losses(arguments, one)
    assert np.array(losses["losses"]).shape == (2, 40)
    assert [line["step"] for line in losses["evals"]] == [20, 40]
    assert losses["evals"][1]["loss"] < losses["evals"][0]["loss"] < losses["losses"][0][0]
    with pytest.raises(peer_losses.UserError, match="no pair of runs has finished"):
        peer_losses.main(words(text, tmp_path, "--only", "adamw-m2", "--minutes", "0"))


@needs_torch
@needs_trainer
def test_a_trial_finds_both_programs_alike(text, tmp_path, capsys):
    peer_losses.main(words(text, tmp_path / "out", "--report", str(tmp_path / "report.md")))
    report = (tmp_path / "report.md").read_text()
    assert report.count(": good.") == 4 and "NOT GOOD" not in report and "missing" not in report
    for folder in (tmp_path / "out").glob("*-pytorch"):
        ours = folder.with_name(folder.name.replace("pytorch", "trainer"))
        lines = [json.loads(line) for line in (ours / "metrics.jsonl").read_text().splitlines()]
        losses = [line["loss"] for line in lines if line["type"] == "step"]
        theirs = json.loads((folder / "losses.json").read_text())["losses"][0]
        assert losses == pytest.approx(theirs, rel=1e-3)  # to the last step
    capsys.readouterr()
    peer_losses.main(words(text, tmp_path / "out"))  # nothing is run again
    assert "-seed1-" not in capsys.readouterr().out


@needs_torch
@needs_trainer
@pytest.mark.parametrize("change", [{"--seed": 2}, {"--outer-lr": 0.1}, {"-H": 5}, {"-l": 0.003}])
def test_a_peer_that_trains_otherwise_is_noticed(change, text, tmp_path, monkeypatch):
    right = peer_losses.options_of_pytorch
    monkeypatch.setattr(peer_losses, "options_of_pytorch", lambda options, text: right({**options, **change}, text))
    with pytest.raises(SystemExit, match="do not train alike"):
        peer_losses.main(words(text, tmp_path, "--only", "adamw-m2"))


def pair(seed=1, loss=1.0, early=2.0):
    """PyTorch's losses are 2 in every step, and 1 at the end."""
    run = lambda first, last: {"losses": [[first] * 10 + [2.0] * 30], "evals": [{"step": 40, "loss": last}],
                               "parameters": 1000, "torch": "2"}
    return peer_losses.Pair("muon", seed, run(early, loss), run(2.0, 1.0))


def test_means_over_seeds_are_compared_and_early_losses_one_by_one():
    assert peer_losses.is_good([pair(1, 1.02), pair(2, 0.989), pair(3, 1.001)])
    assert not peer_losses.is_good([pair(1, 1.02), pair(2, 1.005), pair(3, 1.01)])
    assert not peer_losses.is_good([pair(1, 0.98)])
    assert not peer_losses.is_good([pair(1), pair(2, early=2.0004)])
    assert not peer_losses.is_good([pair(1, float("nan"))]) and not peer_losses.is_good([pair(1, early=float("nan"))])


def test_the_report_says_what_is_not_good_and_what_is_missing(tmp_path):
    arguments = peer_losses.parse_arguments(words("text", tmp_path, "--seeds", "3", "--only", "muon"))
    text = peer_losses.report(arguments, [pair(1, 1.03), pair(2, 1.01)])
    assert "| data-parallel, Muon | 1.0200       | 1.0000  | +2.00%              | +3.00 +1.00  | 2     |" in text
    assert "the means differ by 2.00% (allowed 1%)" in text and "NOT GOOD" in text
    assert "1 of 3 pairs of runs are missing" in text


@pytest.mark.parametrize("more, what", [
    (["--seeds", "0"], "0 is not above zero"), (["--only", "x"], "invalid choice"),
    (["--report", "nowhere/x.md"], "nowhere/x.md cannot be written"),
    (["--trainer", "nowhere"], "there is no nowhere")])
def test_wrong_options_are_the_users_mistake(more, what, text, tmp_path):
    with pytest.raises(peer_losses.UserError, match=what):
        peer_losses.main(words(text, tmp_path / "new", "--trainer", "/bin/false", *more))
    assert not (tmp_path / "new").exists()


def test_what_is_missing_is_said_before_any_run(text, tmp_path, monkeypatch):
    monkeypatch.setattr(peer_losses.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(peer_losses.UserError, match="has no PyTorch: PEERS=1 make bench-losses installs it"):
        peer_losses.main(words(text, tmp_path / "new", "--trainer", "/bin/false"))
    with pytest.raises(peer_losses.UserError, match="has 0 shards"):
        peer_losses.read_tokens(tmp_path, "train")
    assert not (tmp_path / "new").exists()
