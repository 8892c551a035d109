"""--optimizer muon: its ranks compute what one rank computes, for so many bytes; checkpoints are Muon's own; elastic
workers train with it. (Resuming: the cover of test_resume.py has Muon as a factor.)"""
import re

import pytest

from conftest import TRAINER

pytestmark = pytest.mark.skipif(not TRAINER.exists(), reason="train_gpt_cpu is not built: run make")

LAYERS, CHANNELS = 3, 16
MUON = {"--optimizer": "muon", "--layers": LAYERS, "--channels": CHANNELS, "--heads": 2, "-x": 20, "-l": 3e-3,
        "-c": 0.1, "-u": 4, "-q": 0.1, "-k": "cosine", "-v": 10, "--matmul-precision": "highest"}


def test_losses_do_not_depend_on_the_number_of_ranks(train):
    one = train("one", {**MUON, "-b": 12})
    for ranks in [2, 3, 4]:
        run = train(f"ranks{ranks}", {**MUON, "-b": 12 // ranks, "--ranks": ranks})
        assert run.losses() == pytest.approx(one.losses(), rel=1e-5)
    assert "optimizer  Muon at 0.01 for the layers' matrices, AdamW at 0.003 for the rest" in one.stdout
    assert one.losses()[-1] < 0.95 * one.losses()[0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_step_sends_two_shards_of_a_layer_more_for_each_group_of_layers(train, ranks):
    def sent(name, options):
        return train(name, {**MUON, **options, "--ranks": ranks}).lines("step")[-1]["inner_bytes_sent"]

    values = 12 * CHANNELS**2 + 13 * CHANNELS
    shard = -(-values // (128 * ranks)) * 128 * 4
    groups = -(-LAYERS // ranks)
    more = sent("muon", {}) - sent("adamw", {"--optimizer": "adamw"})
    assert more == 19 * 2 * groups * (ranks - 1) * shard  # what was sent when step 20 began its update


def test_a_step_that_is_skipped_leaves_all_as_it_was(train):
    """From the 129th step on, updates of a norm above the mean are skipped."""
    options = {**MUON, "-x": 140, "-v": 1, "-k": "constant", "-u": 0, "-q": 1, "--skip-norm-zscore": 1e-6}
    run = train("skipping", options)
    losses = {row["step"]: row["loss"] for row in run.lines("eval")}
    skipped = [row["step"] for row in run.lines("step") if row["skipped"]]
    assert skipped
    for step in range(1, 141):
        assert (losses[step] == losses[step - 1]) == (step in skipped), step


def test_a_checkpoint_of_the_other_optimizer_is_refused_and_its_model_taken(train):
    train("run", {**MUON, "-n": 10})
    other = {**MUON, "--optimizer": "adamw", "-n": 10, "-y": 1, "-x": 30}
    refused = train("run", other, status=2)
    assert re.fullmatch(r"error: the checkpoint in \S+ was made with --optimizer muon: resume it with that, or "
                        r"start from its model \(-e \S+/model_00000020.bin\)\n", refused.stderr)
    sizes = {name: None for name in ("--layers", "--heads", "--channels", "--vocab-size")}
    started = train("started", {**other, **sizes, "-e": refused.folder / "model_00000020.bin", "-x": 2})
    assert started.losses()[0] == pytest.approx(refused.losses()[-1], rel=0.2)
    train("adamw", {**other, "-y": 0})
    assert "was made with --optimizer adamw" in train("adamw", {**MUON, "-n": 10, "-y": 1, "-x": 40},
                                                         status=2).stderr


def test_a_resumed_run_takes_the_momentum_to_another_number_of_ranks(train):
    options = {**MUON, "-b": 4, "-n": 10, "-y": 1}
    whole = train("whole", options)
    train("cut", {**options, "-x": 10, "-k": "constant"})
    expected = train("constant", {**options, "-k": "constant"})
    cut = train("cut", {**options, "-k": "constant", "--ranks": 2, "-b": 2})
    assert "the inner optimizer's moments" in cut.stdout
    assert cut.losses() == pytest.approx(expected.losses(), rel=1e-5)
    assert cut.losses() != pytest.approx(whole.losses(), rel=1e-5)  # the schedule of both rates


def test_the_schedule_is_that_of_both_rates(train):
    """A run whose rates are zero moves nothing, and one of them alone moves its own parameters."""
    def moved(name, options):
        run = train(name, {**MUON, "-c": 0, "-v": 20, **options})
        first, *_, last = [row["loss"] for row in run.lines("eval")]
        return abs(last - first)

    assert moved("none", {"-l": 0, "--muon-lr": 0}) == 0
    assert moved("muon", {"-l": 0}) > 1e-4 and moved("adamw", {"--muon-lr": 0}) > 1e-4
    assert moved("warm-up", {"-u": 10**6}) < 1e-4


def test_elastic_workers_train_with_muon(train, tmp_path):
    options = {**MUON, "--workers": 2, "-H": 6, "--overlap": 1, "-x": 24, "--outer-transport": "store",
               "--store": f"file:{tmp_path}/store", "--grace": 60}
    run = train("elastic", options)
    hashes = [[(row["sync"], row["global_hash"]) for row in run.lines("sync", worker)] for worker in range(2)]
    assert hashes[0] == hashes[1] != []
    assert run.losses()[-1] < run.losses()[0]


def test_workers_with_different_optimizers_are_refused(start_worker, tmp_path):
    options = {**MUON, "--workers": 2, "-H": 6, "--store": f"file:{tmp_path}/store"}
    runs = [start_worker(0, options), start_worker(1, {**options, "--optimizer": "adamw"})]
    assert [run.wait() for run in runs] == [2, 2]
    for run in runs:
        assert "worker 0 has --optimizer muon, which worker 1 does not use" in run.output()
