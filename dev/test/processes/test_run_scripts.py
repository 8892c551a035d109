"""The scripts in scripts/, started by the real launchers on this machine, with a tiny model on the CPU: they
train the same bits as the program's own launcher. A launcher that is not installed is skipped."""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from conftest import ROOT, TINY, TRAINER, Run, children, is_running, take_signals
from slurm_cluster import SlurmCluster, free_ports, missing_programs

from torture import Written, compare, state_sections  # noqa: E402

SCRIPTS = ROOT / "scripts"
MULTI_NODE = SCRIPTS / "multi_node"
MODELS = ["gpt2_124M", "gpt2_350M", "gpt2_774M", "gpt2_1558M", "gpt3_125M"]
STARTS = sorted([SCRIPTS / "run.sh", *MULTI_NODE.glob("run_*")])  # each starts any model
RUN_SCRIPTS = sorted([*STARTS, *SCRIPTS.glob("run_gpt*.sh")])
SHARED = [SCRIPTS / "training.sh", MULTI_NODE / "slurm_step.sh"]
PASSWORD = "0123456789abcdef" * 2
PATIENCE = 240  # seconds until something hangs: other programs may keep the machine busy
# What makes the run of the scripts small; batches and processes are theirs to set.
OPTIONS = {**TINY, "-H": 6, "--fragment-layers": 1, "-x": 24, "-h": 0, "-b": None}
SMALL = [str(word) for name, value in OPTIONS.items() if value is not None for word in (name, value)]


def plain_environment():
    """Without what a launcher that this test may run under has set, and the scripts' own names."""
    kept = ("PATH", "HOME", "USER", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH")
    return {name: os.environ[name] for name in kept if name in os.environ}


def environment_of_scripts(tokens, folder, **variables):
    return {
        **plain_environment(),
        "PROGRAM": str(TRAINER),
        "TRAIN_DATA": f"{tokens}/x_train_*.bin",
        "VAL_DATA": f"{tokens}/x_val_*.bin",
        "OUT": str(folder),
        "BATCH": "2",
        "TOKENS": "128",  # 2 workers x 2 ranks x 2 sequences of 16 tokens
        "OMP_NUM_THREADS": "1",
        **{name: str(value) for name, value in variables.items()},
    }


def two_by_two(environment):
    """Arguments of the program for the run that the tests compare."""
    arguments = ["-i", environment["TRAIN_DATA"], "-j", environment["VAL_DATA"], "-o", environment["OUT"]]
    arguments += ["--config", SCRIPTS / "gpt2_124M.toml", "--workers", "2", "--ranks", "2"]
    arguments += ["-b", "2", "-d", "64"]
    return [*map(str, arguments), *SMALL]


def run_script(script, environment, arguments=SMALL, status=0):
    result = subprocess.run(
        [script, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert result.returncode == status, f"status {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result


def start_script(script, environment, arguments=SMALL, start_new_session=False):
    return subprocess.Popen(
        [script, *arguments],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=take_signals,
        start_new_session=start_new_session,
    )


def finish(processes, statuses):
    outputs = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    assert [process.returncode for process in processes] == statuses, "\n".join(outputs)
    return outputs


def run_in(folder):
    return Run(folder, subprocess.CompletedProcess([], 0, "", ""))


def wait_until(condition, seconds=PATIENCE):
    end = time.time() + seconds
    while time.time() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def steps_logged(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().count('"type":"step"') if path.exists() else 0


def arguments_of(pid):
    return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().decode()


def environment_of(pid):
    text = pathlib.Path(f"/proc/{pid}/environ").read_bytes().decode()
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def processes_of(folder):
    """Trainers that write to this folder."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().decode().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if words[0] == str(TRAINER) and str(folder) in words:
            found.append(int(path.name))
    return found


@pytest.fixture(scope="module")
def reference(tokens, tmp_path_factory):
    """Two workers of two ranks, started by the program itself."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    environment = environment_of_scripts(tokens, folder)
    run_script(TRAINER, environment, two_by_two(environment))
    return run_in(folder)


def expect_the_same(folder, reference, processes=(0, 1, 2, 3), model=True):
    run = run_in(folder)
    for process in processes:
        assert len(run.losses(process)) == 24
        assert run.losses(process) == reference.losses(process), f"process {process}"
    if model:
        assert run.model() == reference.model()


# What can be checked where no launcher is installed

VALUES = {  # parameters of the models, with the vocabulary's padding to 128
    "gpt2_124M": (12, 768, 1024),
    "gpt2_350M": (24, 1024, 1024),
    "gpt2_774M": (36, 1280, 1024),
    "gpt2_1558M": (48, 1600, 1024),
    "gpt3_125M": (12, 768, 2048),
}
UNITS = {"MB": 1e6, "GB": 1e9, "TB": 1e12}


def values_of(model):
    layers, channels, positions = VALUES[model]
    return (50304 + positions) * channels + layers * (12 * channels**2 + 13 * channels) + 2 * channels


@pytest.mark.parametrize("model", VALUES)
def test_the_bytes_that_a_script_promises_are_those_of_four_bits_and_a_scale_for_128_values(model):
    layers, channels, _ = VALUES[model]
    values = values_of(model)
    text = (SCRIPTS / f"run_{model}.sh").read_text()
    steps = int(re.search(r"([\d,]+) steps", text)[1].replace(",", ""))
    number = r"([\d.]+) (MB|GB|TB)"
    rows = re.findall(rf"^# +(\d) +{number} +{number} +{number} +{number}, {number}$", text, re.M)
    assert [int(row[0]) for row in rows] == [2, 4, 8]
    for workers, *words in rows:
        numbers = [float(size) * UNITS[unit] for size, unit in zip(words[::2], words[1::2])]
        a_step, at_most, whole, data_parallel, data_parallel_whole = numbers
        shares = 1 if workers == "2" else 2 * (int(workers) - 1) / int(workers)  # all-gather; all-to-all
        assert a_step == pytest.approx(shares * values * 4.125 / 8 / 100, rel=0.005)
        layer = 3 * (12 * channels**2 + 13 * channels)
        assert at_most == pytest.approx(shares * layer * 4.125 / 8, rel=0.005)
        assert whole == pytest.approx(a_step * steps, rel=0.01)
        ring = 2 * (int(workers) - 1) / int(workers) * 2 * values
        assert (data_parallel, data_parallel_whole) == pytest.approx((ring, ring * steps), rel=0.006)


@pytest.mark.parametrize("model", VALUES)
def test_the_host_memory_that_a_script_promises_is_that_of_initial_values_and_snapshots(model):
    text = (SCRIPTS / f"run_{model}.sh").read_text()
    paragraph = re.search(r"^#     host memory(.*\n(?:#                       .*\n)+)", text, re.M)[1]
    promised = [float(number) * 1e9 for number in re.findall(r"([\d.]+) GB", paragraph)]
    # fp32 in eight processes; fp32 parameters, moments, global and momentum, bf16 parameters; the fp32 model
    expected = [bytes_a_value * values_of(model) for bytes_a_value in (8 * 4, 5 * 4 + 2, 4)]
    assert promised == pytest.approx(expected, abs=0.05e9)


def stand_in(path, text="exit 99"):
    """A program of that path, in sh."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def says_its_words(tmp_path):
    """A program that prints its arguments, for the scripts to start, alone or in the place of a launcher."""
    return stand_in(tmp_path / "bin" / "program", 'printf "%s\\n" "$@"')


def run_by_stand_ins(script, environment, says_its_words, *arguments):
    """A script with a program and launchers that print their arguments."""
    for launcher in ("srun", "mpirun", "torchrun"):
        shutil.copy(says_its_words, says_its_words.parent / launcher)
    path = f"{says_its_words.parent}:{os.environ['PATH']}"
    places = {"NODE": 0, "MASTER": "node0:29500", "WORKER": 0, "INTERFACE": "lo", "DILOCO_STORE": "file:store",
              "SLURM_JOB_ID": 1, "SLURM_JOB_NUM_NODES": 2}
    places["SLURM_NTASKS"] = 8 if "site" in script.name else 16
    places = {name: str(value) for name, value in places.items()}
    environment = {**places, **environment, "PATH": path, "PROGRAM": str(says_its_words)}
    return run_script(shutil.which("bash"), environment, [script, *arguments])


def words_of_the_program(*arguments):
    """The words that a script gives to the program, through whatever starts it."""
    words = run_by_stand_ins(*arguments).stdout.splitlines()
    return words[words.index("--config") :]


STORE = ("--outer-transport", "store")  # elastic workers


@pytest.mark.parametrize("script", STARTS, ids=lambda script: script.name)
def test_a_script_whose_launcher_ends_all_workers_says_so_if_they_are_elastic(
    script, tokens, tmp_path, says_its_words
):
    ends_all = script.name in ("run_slurm.sbatch", "run_mpi.sh", "run_torchrun.sh")
    environment = environment_of_scripts(tokens, tmp_path / "run")
    for arguments in (STORE, ["=".join(STORE)], ["--outer-transport", "tcp"], []):
        says = run_by_stand_ins(script, environment, says_its_words, *arguments).stderr
        expected = r"warning: \w+ ends all workers .*\n" if ends_all and "store" in str(arguments) else ""
        assert re.fullmatch(expected, says), (arguments, says)
    config = tmp_path / "x.toml"
    config.write_text((SCRIPTS / "gpt2_124M.toml").read_text() + 'outer-transport = "store"\n')
    says = run_by_stand_ins(script, {**environment, "CONFIG": str(config)}, says_its_words).stderr
    assert says.startswith("warning: ") == ends_all


@pytest.mark.parametrize("script", [MULTI_NODE / "run_site.sh", MULTI_NODE / "run_slurm_site.sbatch"])
@pytest.mark.parametrize("named, given", [(None, "tcp"), ('"nccl"', "tcp"), ('"store"', "store"), ("'store'", "store")])
def test_a_site_exchanges_over_tcp_unless_the_toml_wants_elastic_workers(
    script, named, given, tokens, tmp_path, says_its_words
):
    config = tmp_path / "x.toml"
    line = f"outer-transport = {named}  # TOML has two kinds of quotes\n" if named else ""
    config.write_text((SCRIPTS / "gpt2_124M.toml").read_text() + line)
    environment = environment_of_scripts(tokens, tmp_path / "run", CONFIG=str(config))
    words = words_of_the_program(script, environment, says_its_words)
    assert words[words.index("--outer-transport") + 1] == given


@pytest.mark.parametrize("script", [SCRIPTS / "run.sh", MULTI_NODE / "run_site.sh",
                                    MULTI_NODE / "run_slurm_site.sbatch"], ids=lambda script: script.name)
def test_a_run_of_a_users_own_toml_is_named_after_it(script, tokens, tmp_path, says_its_words):
    """Else it would go on from the checkpoints of gpt2_124M."""
    config = tmp_path / "mine.toml"
    config.write_text((SCRIPTS / "gpt2_124M.toml").read_text())
    environment = environment_of_scripts(tokens, "", CONFIG=config)
    words = words_of_the_program(script, environment, says_its_words)
    given = dict(zip(words[::2], words[1::2]))
    assert given["-o"].startswith("log/mine") and given.get("--run-name", "mine") == "mine"


def test_the_loop_that_the_readme_shows_restarts_a_site_until_it_is_done(tmp_path):
    loop, = re.findall(r"^    (for start .*)$", (MULTI_NODE / "README.md").read_text(), re.M)
    assert "sleep 30" in loop
    site = tmp_path / "scripts/multi_node/run_site.sh"
    site.parent.mkdir(parents=True)
    site.write_text('#!/bin/bash\nread -r status <statuses\nsed -i 1d statuses\nexit "$status"\n')
    site.chmod(0o755)
    for last in (0, 2, 76, 143):
        (tmp_path / "statuses").write_text(f"1\n75\n1\n{last}\n99\n")
        subprocess.run(["bash", "-c", loop.replace("sleep 30", "true")], cwd=tmp_path, timeout=60)
        assert (tmp_path / "statuses").read_text() == "99\n"
    (tmp_path / "statuses").write_text("1\n" * 150)
    subprocess.run(["bash", "-c", loop.replace("sleep 30", "true")], cwd=tmp_path, timeout=60)
    assert (tmp_path / "statuses").read_text() == "1\n" * 50


def test_a_toml_is_read_with_comments_another_system_s_line_ends_and_an_unended_last_line(
    tmp_path, says_its_words
):
    (tmp_path / "a#b_0.bin").touch()
    config = tmp_path / "x.toml"
    lines = ["batch = 4  # sequences", 'val-data = "val.bin" # none', f'  train-data="{tmp_path}/a#b_*.bin"']
    config.write_bytes("\r\n".join([*lines, "total-batch = 1024"]).encode())
    environment = {**plain_environment(), "CONFIG": str(config), "OUT": str(tmp_path / "run")}
    words = words_of_the_program(SCRIPTS / "run.sh", environment, says_its_words)
    given = dict(zip(words[::2], words[1::2]))
    assert [given[name] for name in ("-i", "-j", "-b", "-d")] == [f"{tmp_path}/a#b_*.bin", "val.bin", "4", "512"]


@pytest.mark.parametrize("script", [MULTI_NODE / "run_site.sh", MULTI_NODE / "run_slurm_site.sbatch"])
def test_a_script_needs_no_home(script, tokens, tmp_path, says_its_words):
    environment = environment_of_scripts(tokens, tmp_path / "run")
    del environment["HOME"]
    assert "-i" in words_of_the_program(script, environment, says_its_words)


@pytest.mark.parametrize("script", RUN_SCRIPTS, ids=lambda script: script.name)
def test_every_option_that_a_script_gives_is_in_the_table(script, tokens, tmp_path, says_its_words):
    table = subprocess.run([TRAINER, "--options-table"], capture_output=True, text=True, check=True).stdout
    words = words_of_the_program(script, environment_of_scripts(tokens, tmp_path / "run"), says_its_words)
    options = [word for word in words if re.match("--?[A-Za-z]", word)]
    assert {"--config", "-i", "-j", "-o", "--workers", "--ranks", "-b", "-d"} <= set(options)
    assert [option for option in options if f"`{option}`" not in table] == []


def settings(model):
    """{name: text} of a model's file of options."""
    text = (SCRIPTS / f"{model}.toml").read_text()
    return dict(re.findall(r'^([a-z-]+) = "?([^"\n]*)"?$', text, flags=re.MULTILINE))


@pytest.mark.parametrize("model", MODELS)
def test_the_program_takes_every_line_of_a_toml(model, tmp_path):
    assert {"model", "lr", "inner-steps", "train-data", "total-batch", "batch"} <= set(settings(model))
    none = tmp_path / "none.bin"
    command = [TRAINER, "--config", SCRIPTS / f"{model}.toml", "-i", none, "-j", none, "-o", tmp_path]
    result = subprocess.run([*command, "--hellaswag-data", none], capture_output=True, text=True)
    assert result.returncode == 2 and result.stderr.startswith("error: no file matches"), result.stderr


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("script", STARTS, ids=lambda script: script.name)
def test_every_way_to_start_trains_every_model_on_its_tokens(script, model, tmp_path, says_its_words):
    of_model = settings(model)
    shard = tmp_path / "x_000000.bin"
    shard.touch()
    environment = {**plain_environment(), "RUN": model, "TRAIN_DATA": str(shard)}
    words = words_of_the_program(script, environment, says_its_words, "-x", "7")
    given = dict(zip(words[::2], words[1::2]))
    assert given["--config"] == f"scripts/{model}.toml" and given["-j"] == of_model["val-data"]
    workers, ranks, batch = (int(given[name]) for name in ("--workers", "--ranks", "-b"))
    assert workers == 2 and batch == int(of_model["batch"]) and words[-2:] == ["-x", "7"]
    assert int(given["-d"]) * workers == int(of_model["total-batch"])
    assert int(given["-d"]) % (ranks * batch * int(of_model["seq-len"])) == 0
    assert given["-o"].startswith(f"log/{model}")


@pytest.mark.parametrize("model", MODELS)
def test_the_script_of_a_model_is_run_sh_with_its_name(model, tokens, tmp_path, says_its_words):
    environment = environment_of_scripts(tokens, tmp_path / "run")
    alone = words_of_the_program(SCRIPTS / f"run_{model}.sh", environment, says_its_words, "-x", "7")
    named = words_of_the_program(SCRIPTS / "run.sh", {**environment, "RUN": model}, says_its_words, "-x", "7")
    assert alone == named and f"scripts/{model}.toml" in alone


def test_the_scripts_pass_shellcheck():
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed")
    scripts = [*RUN_SCRIPTS, MULTI_NODE / "redis_server.sh"]
    command = ["shellcheck", "--external-sources", *scripts]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_every_script_that_a_page_or_a_script_names_exists():
    pages = [MULTI_NODE / "README.md", *RUN_SCRIPTS, *SHARED, MULTI_NODE / "redis_server.sh"]
    pages += [SCRIPTS / f"{model}.toml" for model in MODELS]
    script = re.compile(r"(?<![$\w])\w+\.(?:sh|sbatch|toml)\b")
    names = {name for page in pages for name in script.findall(page.read_text())}
    assert {"redis_server.sh", "run_site.sh", "gpt2_124M.toml", "slurm_step.sh"} <= names
    assert [name for name in names if not list(SCRIPTS.rglob(name))] == []


# One node


def test_one_node_trains_as_the_program_alone_does(tokens, tmp_path, reference):
    run_script(SCRIPTS / "run_gpt2_124M.sh", environment_of_scripts(tokens, tmp_path / "run", RANKS=2))
    expect_the_same(tmp_path / "run", reference)


def test_one_worker_of_two_ranks_is_plain_data_parallel(tokens, tmp_path):
    environment = environment_of_scripts(tokens, tmp_path / "run", WORKERS=1, RANKS=2)
    run_script(SCRIPTS / "run_gpt2_124M.sh", environment)
    run = run_in(tmp_path / "run")
    assert run.lines("run")[0]["options"]["outer-optimizer"] == "none"
    assert run.lines("step")[0]["loss"] == run.lines("step", 1)[0]["loss"]


# SLURM


@pytest.fixture(scope="module")
def cluster():
    """Two nodes, which are this machine."""
    if missing_programs():
        pytest.skip(f"SLURM's {', '.join(missing_programs())} not installed (Debian: slurm-wlm, munge)")
    with SlurmCluster(nodes=2, cpus=4) as cluster:
        yield cluster


# For a cluster without GPUs.
SBATCH = ["sbatch", "--parsable", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1"]


def slurm_environment(cluster, tokens, folder, **variables):
    environment = environment_of_scripts(tokens, folder, **variables)
    return {**environment, **{name: cluster.environment[name] for name in ("PATH", "SLURM_CONF")}}


def submit(script, environment, log, arguments=SMALL, options=()):
    """The job's number."""
    options = [*SBATCH[1:], f"--output={log}", *options]
    return run_script(SBATCH[0], environment, [*options, script, *arguments]).stdout.strip()


def test_a_slurm_job_of_two_nodes_holds_two_workers(cluster, tokens, tmp_path, reference):
    environment = slurm_environment(cluster, tokens, tmp_path / "run")
    job = submit(MULTI_NODE / "run_slurm.sbatch", environment, tmp_path / "log")
    assert cluster.wait(job) == ("COMPLETED", "0:0"), (tmp_path / "log").read_text()
    expect_the_same(tmp_path / "run", reference)


def test_slurm_jobs_of_two_sites_meet_through_redis(cluster, tokens, tmp_path, reference, redis):
    jobs = []
    for worker in (0, 1):
        variables = {"WORKER": worker, "INTERFACE": "lo", **redis}
        environment = slurm_environment(cluster, tokens, tmp_path / f"run{worker}", **variables)
        jobs.append(submit(MULTI_NODE / "run_slurm_site.sbatch", environment, tmp_path / f"log{worker}"))
    for worker, job in enumerate(jobs):
        assert cluster.wait(job) == ("COMPLETED", "0:0"), (tmp_path / f"log{worker}").read_text()
    expect_the_same(tmp_path / "run0", reference, [0, 1])
    expect_the_same(tmp_path / "run1", reference, [2, 3], model=False)


def test_the_jobs_of_a_slurm_array_are_the_workers(cluster, tokens, tmp_path, reference, redis):
    environment = slurm_environment(cluster, tokens, tmp_path / "run", **redis)
    script = MULTI_NODE / "run_slurm_site.sbatch"
    array = submit(script, environment, tmp_path / "log%a", options=["--array=0-1"])
    for worker in (0, 1):
        assert cluster.wait(f"{array}_{worker}") == ("COMPLETED", "0:0"), (
            tmp_path / f"log{worker}"
        ).read_text()
    expect_the_same(tmp_path / "run", reference)


@pytest.fixture
def long_job(cluster, tokens, tmp_path):
    """A job that trains, and its processes by SLURM's number."""
    environment = slurm_environment(cluster, tokens, tmp_path / "run")
    job = submit(MULTI_NODE / "run_slurm.sbatch", environment, tmp_path / "log", [*SMALL, "-x", "1000000"])
    try:
        assert wait_until(lambda: steps_logged(tmp_path / "run") > 5), (tmp_path / "log").read_text()
        environments = {pid: environment_of(pid) for pid in processes_of(tmp_path / "run")}
        places = [
            (e["SLURM_PROCID"], e["SLURMD_NODENAME"], e["SLURM_LOCALID"]) for e in environments.values()
        ]
        assert sorted(places) == [("0", "n0", "0"), ("1", "n0", "1"), ("2", "n1", "0"), ("3", "n1", "1")]
        yield job, {e["SLURM_PROCID"]: pid for pid, e in environments.items()}
    finally:
        cluster.query("scancel", job)
        cluster.wait(job)


def test_a_task_that_dies_ends_the_slurm_job_and_is_named(cluster, tmp_path, long_job):
    job, trainers = long_job
    os.kill(trainers["3"], 9)
    assert cluster.wait(job) == ("FAILED", "137:0")
    assert "worker 1 rank 1" in (tmp_path / "log").read_text()
    assert wait_until(lambda: not any(map(is_running, trainers.values())))


def test_a_slurm_job_that_is_cancelled_leaves_no_process(cluster, long_job):
    job, trainers = long_job
    cluster.query("scancel", job)
    assert cluster.wait(job)[0] == "CANCELLED"
    assert wait_until(lambda: not any(map(is_running, trainers.values())))


def run_by_slurm_stand_ins(tokens, tmp_path, srun, scontrol, status, script="run_slurm.sbatch", arguments=(),
                           **variables):
    """What the script says, with texts in sh for SLURM's programs."""
    stand_in(tmp_path / "bin" / "srun", srun)
    stand_in(tmp_path / "bin" / "scontrol", scontrol)
    variables = {"SLURM_JOB_ID": 7, "SLURM_JOB_NUM_NODES": 1, "SLURM_NTASKS": 1, "PROGRAM": "sh", **variables}
    variables["PATH"] = f"{tmp_path}/bin:{os.environ['PATH']}"
    environment = environment_of_scripts(tokens, tmp_path / "run", **variables)
    return run_script(shutil.which("bash"), environment, [MULTI_NODE / script, *arguments], status).stderr


# Of a job that SLURM has restarted `starts` times: what OUT/restarts contains before and after it, at its checkpoint
# 99 or at an older one.
STOPPED = {
    "gains": (True, 9, "2 DONE_00000099", None, "2 DONE_00000099"),
    "first restart": (False, 0, None, "restart 1", "1 DONE_00000099"),
    "last restart": (False, 9, "1 DONE_00000099", "restart 2", "2 DONE_00000099"),
    "no restart is left": (False, 9, "2 DONE_00000099", "after 2 restarts", "3 DONE_00000099"),
    "has gained since": (False, 9, "2 DONE_00000050", "restart 1", "1 DONE_00000099"),
    "a new job": (False, 0, "2 DONE_00000099", "restart 1", "1 DONE_00000099"),
}


@pytest.mark.parametrize("case", STOPPED)
def test_a_stopped_job_that_gained_no_step_requeues_itself_a_few_times(tokens, tmp_path, case):
    gains, starts, before, words, after = STOPPED[case]
    folder, log = tmp_path / "run" / "worker_0", tmp_path / "requeued"
    folder.mkdir(parents=True)
    (folder / "DONE_00000099").touch()
    count = tmp_path / "run" / "restarts"
    if before:
        count.write_text(before + "\n")
    srun = f"touch {folder}/DONE_00000{100 if gains else '099'}; exit 143"
    variables = {"RESTARTS": 2, "SLURM_RESTART_COUNT": starts}
    says = run_by_slurm_stand_ins(tokens, tmp_path, srun, f"touch {log}", 143, **variables)
    assert log.exists() == (words is None or words.startswith("restart")), says
    assert ("RESTARTS=2" in says) == (not gains) and (words is None or words in says), says
    assert count.read_text() == after + "\n"


@pytest.mark.parametrize("starts, requeued", [(1, True), (2, False)])
def test_where_the_count_cannot_be_written_slurms_is_the_limit(tokens, tmp_path, starts, requeued):
    (tmp_path / "run" / "restarts.new").mkdir(parents=True)
    log, variables = tmp_path / "requeued", {"RESTARTS": 2, "SLURM_RESTART_COUNT": starts}
    run_by_slurm_stand_ins(tokens, tmp_path, "exit 143", f"touch {log}", 143, **variables)
    assert log.exists() == requeued


def test_other_workers_checkpoints_are_no_progress(tokens, tmp_path):
    (tmp_path / "run" / "worker_1").mkdir(parents=True)
    (tmp_path / "run" / "worker_1" / "DONE_00000099").touch()
    run_by_slurm_stand_ins(tokens, tmp_path, "exit 1", "true", 1, script="run_slurm_site.sbatch", WORKER=0,
                           DILOCO_STORE=f"file:{tmp_path}/store", arguments=STORE)
    assert (tmp_path / "run" / "restarts_0").read_text() == "1 \n"


def test_a_mistake_ends_an_elastic_job_only_at_its_first_start(tokens, tmp_path):
    log = tmp_path / "requeued"
    for starts in (0, 1):
        assert not log.exists()
        run_by_slurm_stand_ins(tokens, tmp_path, "exit 2", f"touch {log}", 2, script="run_slurm_site.sbatch", WORKER=0,
                               SLURM_RESTART_COUNT=starts, DILOCO_STORE=f"file:{tmp_path}/store", arguments=STORE)
    assert log.exists()


@pytest.mark.parametrize("status, requeued", [(75, True), (1, False), (2, False)])
def test_a_job_of_all_workers_is_requeued_if_it_may_be_tried_again(tokens, tmp_path, status, requeued):
    log = tmp_path / "requeued"
    run_by_slurm_stand_ins(tokens, tmp_path, f"exit {status}", f"touch {log}", status)
    assert log.exists() == requeued


def test_a_requeue_is_tried_again_while_slurms_controller_is_away(tokens, tmp_path):
    tries = tmp_path / "tries"
    stand_in(tmp_path / "bin" / "sleep", "exit 0")
    scontrol = f"echo >>{tries}; [ $(wc -l <{tries}) -ge 3 ]"
    srun = f"mkdir {tmp_path}/run; touch {tmp_path}/run/DONE_00000001; exit 143"
    run_by_slurm_stand_ins(tokens, tmp_path, srun, scontrol, 143, ENVIRONMENT="BATCH")
    assert tries.read_text() == "\n\n\n"


def test_a_slurm_script_survives_the_signal_before_and_after_the_training(tokens, tmp_path):
    before = tmp_path / "before"  # bash reads it first
    before.write_text("trap 'case $BASH_COMMAND in OUT=*) kill -USR1 $$ ;; esac' DEBUG\n")
    srun = f"mkdir {tmp_path}/run; touch {tmp_path}/run/DONE_00000001; exit 143"
    run_by_slurm_stand_ins(tokens, tmp_path, srun, "kill -USR1 $PPID", 143, BASH_ENV=before)


# SLURM: jobs that are requeued

# Several fragments are always on the wire: one is sent every other step, and merged five steps later.
REQUEUED = [*SMALL, "--overlap", "5", "-x", "900", "-n", "150", "-nk", "0"]


@pytest.fixture(scope="module")
def undisturbed(tokens, tmp_path_factory):
    """The run that is requeued elsewhere, from its beginning to its end."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    environment = environment_of_scripts(tokens, folder, RANKS=2)
    run_script(SCRIPTS / "run.sh", environment, REQUEUED)
    return Written([folder, folder], 2)


def wait_for_steps(folder, count, log):
    assert wait_until(lambda: steps_logged(folder) > count), log.read_text()


def expect_an_undisturbed_end(cluster, job, folder, log, undisturbed):
    """Of a job that was requeued."""
    cluster.wait_until_requeued(job)
    assert cluster.wait(job) == ("COMPLETED", "0:0"), log.read_text()
    compare(Written([folder, folder], 2), undisturbed)
    assert (folder / "DONE_00000900").exists()


def checkpoint_in_flight(folder, step):
    """Means that were on the wire when the checkpoint was taken, in the state of each process."""
    states = [folder / f"state_{step:08d}_{process:05d}.bin" for process in range(4)]
    mean = re.compile(r"in_flight\.\d+\.mean")
    return [[name for name in state_sections(path) if mean.fullmatch(name)] for path in states]


def stopped_after(log):
    """The steps after which the run in a job has stopped."""
    return [int(step) for step in re.findall(r"stopped by request after step (\d+) of 900", log.read_text())]


def test_a_job_requeued_in_mid_exchange_ends_with_the_bits_of_one_that_was_not(
    cluster, tokens, tmp_path, undisturbed
):
    folder, log = tmp_path / "run", tmp_path / "log"
    environment = slurm_environment(cluster, tokens, folder)
    job = submit(MULTI_NODE / "run_slurm.sbatch", environment, log, REQUEUED)
    wait_for_steps(folder, 40, log)
    cluster.query("scontrol", "requeue", job)
    expect_an_undisturbed_end(cluster, job, folder, log, undisturbed)
    (step,) = stopped_after(log)
    assert all(len(means) >= 2 for means in checkpoint_in_flight(folder, step))
    assert f"resumed after step {step}" in log.read_text()


def test_a_job_killed_between_checkpoints_and_requeued_ends_with_the_same_bits(
    cluster, tokens, tmp_path, undisturbed
):
    folder, log = tmp_path / "run", tmp_path / "log"
    # Deaf to SIGTERM, as one that is not through with its checkpoint when KillWait is over: SIGKILL follows.
    deaf = stand_in(tmp_path / "deaf", f'[ -n "$SLURM_RESTART_COUNT" ] || trap "" TERM\nexec {TRAINER} "$@"')
    environment = slurm_environment(cluster, tokens, folder, PROGRAM=deaf)
    job = submit(MULTI_NODE / "run_slurm.sbatch", environment, log, REQUEUED)
    wait_for_steps(folder, 200, log)
    assert wait_until(lambda: (folder / "DONE_00000150").exists()), log.read_text()  # a slow disk may be behind
    cluster.query("scontrol", "requeue", job)
    for pid in processes_of(folder):  # without the wait
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
    expect_an_undisturbed_end(cluster, job, folder, log, undisturbed)
    assert stopped_after(log) == []
    assert re.search(r"^resumed after step (150|300|450|600|750)$", log.read_text(), re.M)
    assert all(len(means) >= 2 for means in checkpoint_in_flight(folder, 150))


# As --signal=B:USR1@300 does when the time is nearly up, and a preemption with a time of grace.
SIGNALS = {"batch script": ["--batch", "--signal=USR1"], "tasks": ["--signal=TERM"]}


@pytest.mark.parametrize("to", SIGNALS)
def test_a_job_that_is_asked_to_stop_requeues_itself(cluster, tokens, tmp_path, undisturbed, to):
    folder, log = tmp_path / "run", tmp_path / "log"
    environment = slurm_environment(cluster, tokens, folder)
    job = submit(MULTI_NODE / "run_slurm.sbatch", environment, log, REQUEUED)
    wait_for_steps(folder, 40, log)
    cluster.query("scancel", *SIGNALS[to], job)
    expect_an_undisturbed_end(cluster, job, folder, log, undisturbed)
    assert len(stopped_after(log)) == 1


def test_a_site_that_is_preempted_takes_the_others_along(cluster, tokens, tmp_path, undisturbed, redis):
    jobs, folders = [], [tmp_path / f"run{worker}" for worker in (0, 1)]
    logs = [tmp_path / f"log{worker}" for worker in (0, 1)]
    for worker, folder in enumerate(folders):
        variables = {"WORKER": worker, "INTERFACE": "lo", **redis}
        environment = slurm_environment(cluster, tokens, folder, **variables)
        jobs.append(submit(MULTI_NODE / "run_slurm_site.sbatch", environment, logs[worker], REQUEUED))
    wait_for_steps(folders[0], 40, logs[0])
    cluster.query("scontrol", "requeue", jobs[1])
    for job in jobs:
        cluster.wait_until_requeued(job)
    for job, log in zip(jobs, logs):
        assert cluster.wait(job) == ("COMPLETED", "0:0"), log.read_text()
    compare(Written(folders, 2), undisturbed)
    assert len(stopped_after(logs[0])) == 1


def submit_stand_in(cluster, tokens, tmp_path, text, arguments=(), options=(), **variables):
    """The number of a site's job whose program is `text`, in sh."""
    program = stand_in(tmp_path / "bin" / "program", text)
    variables = {"PROGRAM": program, "DILOCO_STORE": f"file:{tmp_path}/store", **variables}
    environment = slurm_environment(cluster, tokens, tmp_path / "run", **variables)
    script = MULTI_NODE / "run_slurm_site.sbatch"
    return submit(script, environment, tmp_path / "log%a", arguments, options)


# Statuses of the program, with its options: the others have not come; an elastic worker has failed
TRIED_AGAIN = [(75, ()), (1, STORE), (137, STORE)]


@pytest.mark.parametrize("status, arguments", TRIED_AGAIN)
def test_a_site_that_may_do_better_later_requeues_itself_a_few_times(
    cluster, tokens, tmp_path, status, arguments
):
    job = submit_stand_in(cluster, tokens, tmp_path, f"exit {status}", arguments, WORKER=0, RESTARTS=1)
    cluster.wait_until_requeued(job)
    assert cluster.wait(job) == ("FAILED", f"{status}:0")
    assert cluster.state(job)["Restarts"] == "1"
    (log,) = tmp_path.glob("log*")
    first, last = [line for line in log.read_text().splitlines() if "RESTARTS=1" in line]
    assert "requeues itself (restart 1" in first and "after 1 restarts" in last


@pytest.mark.parametrize("status, arguments", [(1, ()), (2, STORE), (0, STORE)])
def test_a_site_that_would_do_no_better_later_stays_ended(cluster, tokens, tmp_path, status, arguments):
    job = submit_stand_in(cluster, tokens, tmp_path, f"exit {status}", arguments, WORKER=0)
    assert cluster.wait(job) == ("FAILED" if status else "COMPLETED", f"{status}:0")
    assert cluster.state(job)["Restarts"] == "0"


def test_a_task_of_an_array_requeues_itself_alone(cluster, tokens, tmp_path):
    # The one that has the array's number is asked to stop, once the other has begun.
    text = f"""[ -z "$SLURM_RESTART_COUNT" ] || exit 0
if [ "$SLURM_JOB_ID" = "$SLURM_ARRAY_JOB_ID" ]; then
    until [ -e {tmp_path}/begun ]; do sleep 0.1; done
    exit 143
fi
touch {tmp_path}/begun
until [ -e {tmp_path}/end ]; do sleep 0.1; done"""
    array = submit_stand_in(cluster, tokens, tmp_path, text, options=["--array=0-1"])
    tasks = [f"{array}_{worker}" for worker in (0, 1)]
    assert wait_until(lambda: (tmp_path / "begun").exists())
    other, stopped = sorted(tasks, key=lambda task: cluster.state(task)["JobId"] == array)
    cluster.wait_until_requeued(stopped)
    assert cluster.state(other)["JobState"] == "RUNNING"
    (tmp_path / "end").touch()
    assert [cluster.wait(task)[0] for task in tasks] == ["COMPLETED", "COMPLETED"]
    assert cluster.state(other)["Restarts"] == "0"


def test_a_cancelled_job_that_has_time_for_a_checkpoint_stays_cancelled(cluster, tmp_path, long_job):
    job, _ = long_job
    cluster.query("scancel", job)
    assert cluster.wait(job)[0] == "CANCELLED"
    assert "-y 1 resumes there" in (tmp_path / "log").read_text()
    assert cluster.state(job)["Restarts"] == "0"


def test_the_workers_of_a_heterogeneous_slurm_job_are_one_run(cluster, tokens, tmp_path, reference):
    store = f"file:{tmp_path}/store"
    environment = slurm_environment(cluster, tokens, tmp_path / "run", DILOCO_STORE=store)
    component = ["-n2", TRAINER, *two_by_two(environment)]
    run_script("srun", environment, [*component, ":", *component])
    expect_the_same(tmp_path / "run", reference)


@pytest.mark.parametrize("where", ["sbatch", "salloc"])
def test_without_srun_a_slurm_job_starts_its_processes_itself(cluster, tokens, tmp_path, reference, where):
    environment = slurm_environment(cluster, tokens, tmp_path / "run", RANKS=2)
    script = SCRIPTS / "run_gpt2_124M.sh"
    if where == "sbatch":
        job = submit(script, environment, tmp_path / "log")
        assert cluster.wait(job) == ("COMPLETED", "0:0"), (tmp_path / "log").read_text()
    else:
        run_script("salloc", environment, ["-N2", "--ntasks-per-node=2", script, *SMALL])
    expect_the_same(tmp_path / "run", reference)


def test_srun_without_a_store_is_refused_in_one_line(cluster, tokens, tmp_path):
    environment = slurm_environment(cluster, tokens, tmp_path / "run")
    result = run_script("srun", environment, ["-N2", "-n4", TRAINER, *two_by_two(environment)], status=2)
    errors = {line for line in result.stderr.splitlines() if line.startswith("error: ")}
    assert errors == {
        "error: processes that srun starts need a place to meet: give --store file:DIR "
        "(a folder that all see) or redis://HOST:PORT"
    }


# mpirun

# Open MPI asks before it runs as root, as containers do, and before it starts more processes than there are
# cores. With no remote shell it does not look for one.
MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_plm_rsh_agent": "false",
}


def open_mpi():
    installed = shutil.which("mpirun")
    if not installed or "Open MPI" not in subprocess.check_output(["mpirun", "--version"], text=True):
        pytest.skip("Open MPI's mpirun is not installed (Debian: openmpi-bin)")


def test_mpirun_starts_two_workers_of_two_ranks(tokens, tmp_path, reference):
    open_mpi()
    environment = environment_of_scripts(tokens, tmp_path / "run", RANKS=2, **MPI)
    result = run_script(MULTI_NODE / "run_mpi.sh", environment)
    expect_the_same(tmp_path / "run", reference)
    assert "\033" not in result.stdout, "lines are redrawn, though this is no terminal"


def test_mpirun_takes_variables_to_other_nodes_and_does_not_show_the_password(tokens, tmp_path):
    script = tmp_path / "bin" / "mpirun"
    script.parent.mkdir()
    script.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    script.chmod(0o755)
    store = f"redis://:{PASSWORD}@127.0.0.1:6379"
    variables = {"PATH": f"{script.parent}:{os.environ['PATH']}", "NCCL_SOCKET_IFNAME": "eth0"}
    variables.update(DILOCO_CA="ca.crt", CUDA_LAUNCH_BLOCKING=1, CUDA_VISIBLE_DEVICES=0, AWS_REGION="x")
    environment = environment_of_scripts(tokens, tmp_path / "run", DILOCO_STORE=store, **variables)
    names = {"DILOCO_STORE", "DILOCO_CA", "OMP_NUM_THREADS", "NCCL_SOCKET_IFNAME", "CUDA_LAUNCH_BLOCKING", "AWS_REGION"}
    # In a SLURM job each node has its own GPUs.
    for job, expected in (({}, {*names, "CUDA_VISIBLE_DEVICES"}), ({"SLURM_JOB_ID": "1"}, names)):
        words = run_script(MULTI_NODE / "run_mpi.sh", {**environment, **job}, []).stdout.splitlines()
        passed_on = {words[i + 1] for i, word in enumerate(words) if word == "-x"}
        assert passed_on - {"LD_LIBRARY_PATH"} == expected
        assert not any(PASSWORD in word for word in words)


@pytest.mark.parametrize("to", ["the script", "its group"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP], ids=lambda number: number.name)
def test_a_run_that_mpirun_has_started_has_the_time_to_stop(tokens, tmp_path, number, to):
    open_mpi()
    # Longer than the two seconds that Open MPI leaves. As the program's, none leaves before all have written.
    slow = stand_in(tmp_path / "bin" / "slow", f"""own=$OMPI_COMM_WORLD_RANK
stop() {{
    trap "" TERM USR1
    sleep 5
    touch {tmp_path}/written$own
    until [ -e {tmp_path}/written0 ] && [ -e {tmp_path}/written1 ]; do sleep 0.1; done
    exit 143
}}
trap stop TERM USR1
touch {tmp_path}/begun$own
while :; do sleep 0.1; done""")
    environment = environment_of_scripts(tokens, tmp_path / "run", PROGRAM=slow, RANKS=1, **MPI)
    run = start_script(MULTI_NODE / "run_mpi.sh", environment, [], start_new_session=True)
    assert wait_until(lambda: all((tmp_path / f"begun{process}").exists() for process in (0, 1)))
    (os.kill if to == "the script" else os.killpg)(run.pid, number)
    finish([run], [143])
    assert (tmp_path / "written0").exists() and (tmp_path / "written1").exists()


def test_ctrl_c_ends_a_run_that_mpirun_has_started(tokens, tmp_path):
    open_mpi()
    environment = environment_of_scripts(tokens, tmp_path / "run", RANKS=1, **MPI)
    long = [*SMALL, "-x", "1000000"]
    run = start_script(MULTI_NODE / "run_mpi.sh", environment, long, start_new_session=True)
    assert wait_until(lambda: steps_logged(tmp_path / "run") > 5)
    trainers = processes_of(tmp_path / "run")
    os.killpg(run.pid, signal.SIGINT)
    run.communicate(timeout=PATIENCE)
    assert run.returncode != 0 and len(trainers) == 2
    assert wait_until(lambda: not any(map(is_running, trainers)))


def test_mpirun_in_a_slurm_job_starts_on_its_nodes(cluster, tokens, tmp_path, reference):
    open_mpi()
    environment = slurm_environment(cluster, tokens, tmp_path / "run", RANKS=2, **MPI)
    run_script("salloc", environment, ["-N2", "--ntasks-per-node=2", MULTI_NODE / "run_mpi.sh", *SMALL])
    expect_the_same(tmp_path / "run", reference)


def test_mpirun_of_mpich_numbers_the_processes_too(tokens, tmp_path, reference):
    hydra = shutil.which("mpiexec.hydra")
    if not hydra:
        pytest.skip("MPICH's mpirun is not installed (Debian: mpich)")
    store = f"file:{tmp_path}/store"
    environment = environment_of_scripts(tokens, tmp_path / "run", DILOCO_STORE=store)
    run_script(hydra, environment, ["-n", "4", TRAINER, *two_by_two(environment)])
    expect_the_same(tmp_path / "run", reference)


# torchrun

# What torchrun does with --no_python, where PyTorch is not installed: the documented environment.
TORCHRUN = """#!{python}
import argparse, os, subprocess, sys
parser = argparse.ArgumentParser(allow_abbrev=False)
for name in ("nnodes", "node_rank", "nproc_per_node", "max_restarts", "master_port"):
    parser.add_argument("--" + name, type=int, required=True)
parser.add_argument("--master_addr", required=True)
parser.add_argument("--no_python", action="store_true", required=True)
parser.add_argument("command", nargs=argparse.REMAINDER)
o = parser.parse_args()
size = o.nnodes * o.nproc_per_node
numbers = [dict(LOCAL_RANK=i, RANK=o.node_rank * o.nproc_per_node + i) for i in range(o.nproc_per_node)]
shared = dict(WORLD_SIZE=size, LOCAL_WORLD_SIZE=o.nproc_per_node, GROUP_RANK=o.node_rank, ROLE_NAME="default",
              GROUP_WORLD_SIZE=o.nnodes, ROLE_WORLD_SIZE=size, MASTER_ADDR=o.master_addr,
              MASTER_PORT=o.master_port, TORCHELASTIC_RESTART_COUNT=0, TORCHELASTIC_MAX_RESTARTS=0,
              TORCHELASTIC_RUN_ID="none")
started = [subprocess.Popen(o.command, env={{**os.environ, **{{k: str(v) for k, v in dict(
    shared, ROLE_RANK=own["RANK"], **own).items()}}}}) for own in numbers]
sys.exit(max(abs(process.wait()) for process in started))
"""


@pytest.fixture
def torchrun_path(tmp_path):
    """PATH with a torchrun: PyTorch's where it is installed."""
    if shutil.which("torchrun"):
        return os.environ["PATH"]
    stand_in = tmp_path / "bin" / "torchrun"
    stand_in.parent.mkdir()
    stand_in.write_text(TORCHRUN.format(python=sys.executable))
    stand_in.chmod(0o755)
    return f"{stand_in.parent}:{os.environ['PATH']}"


@pytest.mark.parametrize("nodes, gpus, workers", [(1, 4, 2), (2, 2, 2)])
def test_torchrun_starts_two_workers_of_two_ranks(
    tokens, tmp_path, reference, torchrun_path, nodes, gpus, workers
):
    variables = dict(PATH=torchrun_path, NODES=nodes, GPUS=gpus, WORKERS=workers)
    variables["MASTER"] = f"127.0.0.1:{free_ports(1)[0]}"
    environment = environment_of_scripts(tokens, tmp_path / "run", **variables)
    agents = [
        start_script(MULTI_NODE / "run_torchrun.sh", {**environment, "NODE": str(node)})
        for node in range(nodes)
    ]
    finish(agents, [0] * nodes)
    expect_the_same(tmp_path / "run", reference)


# Sites


@pytest.fixture
def redis(tmp_path):
    """Variables of the scripts for a server that redis_server.sh has started."""
    if not shutil.which("redis-server"):
        pytest.skip("redis-server is not installed")
    (tmp_path / "password").write_text(PASSWORD + "\n")
    variables = {"PASSWORD_FILE": tmp_path / "password", "PORT": free_ports(1)[0], "DATA": tmp_path / "redis"}
    environment = {**plain_environment(), **{name: str(value) for name, value in variables.items()}}
    server = start_script(MULTI_NODE / "redis_server.sh", environment, [])
    try:
        assert wait_until(lambda: answers(variables["PORT"]) or server.poll() is not None)
        assert server.poll() is None, server.communicate()[0]
        yield {"REDIS": f"127.0.0.1:{variables['PORT']}", "PASSWORD_FILE": tmp_path / "password"}
        assert PASSWORD not in arguments_of(server.pid)
        assert (tmp_path / "redis").stat().st_mode & 0o77 == 0
        assert list((tmp_path / "redis").rglob("*.aof")), "nothing is written to the disk"
    finally:
        server.terminate()
        server.communicate(timeout=PATIENCE)


def answers(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def site(tokens, tmp_path, redis, worker, **variables):
    variables = {"RANKS": 2, "WORKER": worker, "INTERFACE": "lo", **redis, **variables}
    return environment_of_scripts(tokens, tmp_path / f"run{worker}", **variables)


def test_two_sites_meet_through_redis(tokens, tmp_path, reference, redis):
    sites = [
        start_script(MULTI_NODE / "run_site.sh", site(tokens, tmp_path, redis, worker)) for worker in (0, 1)
    ]
    finish(sites, [0, 0])
    expect_the_same(tmp_path / "run0", reference, [0, 1])
    expect_the_same(tmp_path / "run1", reference, [2, 3], model=False)


def test_a_site_that_dies_is_named_at_the_other_and_both_can_begin_anew(tokens, tmp_path, reference, redis):
    long = [*SMALL, "-x", "1000000"]
    sites = [
        start_script(MULTI_NODE / "run_site.sh", site(tokens, tmp_path, redis, worker), long)
        for worker in (0, 1)
    ]
    assert wait_until(lambda: steps_logged(tmp_path / "run0") > 5)
    for pid in [sites[1].pid, *children(sites[1].pid)]:
        assert PASSWORD not in arguments_of(pid)
    sites[1].kill()
    output = finish(sites, [1, -9])[0]
    assert "worker 1" in output.strip().splitlines()[-1], output
    test_two_sites_meet_through_redis(tokens, tmp_path, reference, redis)


def test_the_server_asks_for_the_password(tokens, tmp_path, redis):
    (tmp_path / "other").write_text("wrong\n")
    environment = site(tokens, tmp_path, redis, 0, PASSWORD_FILE=tmp_path / "other")
    result = run_script(MULTI_NODE / "run_site.sh", environment, status=2)
    assert "password" in result.stderr and result.stderr.count("\n") == 1


def test_the_server_leaves_a_folder_that_is_there_as_it_is_and_keeps_its_files_to_itself(tmp_path):
    folder = tmp_path / "redis"
    folder.mkdir()
    folder.chmod(0o755)
    server = stand_in(tmp_path / "server", f"touch {folder}/file")
    variables = {"SERVER": str(server), "REDIS_PASSWORD": PASSWORD, "DATA": str(folder)}
    run_script(MULTI_NODE / "redis_server.sh", {**plain_environment(), **variables}, [])
    assert folder.stat().st_mode & 0o777 == 0o755
    assert (folder / "file").stat().st_mode & 0o777 == 0o600


# Mistakes: one line, status 2, before anything is started or written

MISTAKES = {
    "run_gpt2_124M.sh, no program": ({"PROGRAM": "./nowhere"}, "there is no ./nowhere"),
    "run_gpt2_124M.sh, no data": ({"TRAIN_DATA": "none/*.bin", "RANKS": 2}, "no file matches none/*.bin"),
    "run_gpt2_124M.sh, no number": ({"WORKERS": "two"}, "WORKERS is 'two'"),
    "run_slurm.sbatch, no job": ({"SLURM_NTASKS": "", "SLURM_JOB_ID": ""}, "start this with sbatch"),
    "run_slurm.sbatch, no workers": ({"WORKERS": 0}, "WORKERS is '0'"),
    "run_slurm.sbatch, no data": ({"TRAIN_DATA": "none/*.bin"}, "no file matches none/*.bin"),
    "run_slurm.sbatch, odd workers": ({"WORKERS": 3}, "4 tasks do not divide into 3 workers"),
    "run_slurm_site.sbatch, no job": ({"WORKER": 0, "SLURM_NTASKS": ""}, "start this with sbatch"),
    "run_slurm_site.sbatch, no number": ({"WORKER": 0, "TOKENS": "0.5M"}, "TOKENS is '0.5M'"),
    "run_slurm_site.sbatch, no worker": ({}, "this job is worker '' of 2"),
    "run_slurm_site.sbatch, worker too large": ({"WORKER": 2}, "this job is worker '2' of 2"),
    "run_slurm_site.sbatch, no password": (
        {"WORKER": 0, "PASSWORD_FILE": "/nowhere/x"},
        "no password in /nowhere/x",
    ),
    "run_mpi.sh, no mpirun": ({"PATH": "/nowhere"}, "there is no mpirun"),
    "run_mpi.sh, no ranks": ({"RANKS": 0}, "RANKS is '0'"),
    "run_mpi.sh, no data": ({"TRAIN_DATA": "none/*.bin"}, "no file matches none/*.bin"),
    "run_torchrun.sh, no torchrun": ({"PATH": "/nowhere"}, "there is no torchrun"),
    "run_torchrun.sh, no number": ({"NODE": 0, "GPUS": "all"}, "GPUS is 'all'"),
    "run_torchrun.sh, no node": ({}, "this is node '' of 2"),
    "run_torchrun.sh, no decimal number": ({"NODE": "08"}, "this is node '08' of 2"),
    "run_torchrun.sh, node too large": ({"NODE": 2}, "this is node '2' of 2"),
    "run_torchrun.sh, no master": ({"NODE": 0}, "MASTER is ''"),
    "run_torchrun.sh, no port": ({"NODE": 0, "MASTER": "node0"}, "MASTER is 'node0'"),
    "run_torchrun.sh, odd workers": (
        {"NODE": 0, "MASTER": "a:1", "GPUS": 3, "WORKERS": 4},
        "2 x 3 processes do not divide",
    ),
    "run_site.sh, no number": ({"WORKER": 0, "BATCH": "-1"}, "BATCH is '-1'"),
    "run_site.sh, no worker": ({}, "this site is worker '' of 2"),
    "run_site.sh, no decimal number": ({"WORKER": "08"}, "this site is worker '08' of 2"),
    "run_site.sh, worker too large": ({"WORKER": 2}, "this site is worker '2' of 2"),
    "run_site.sh, no interface": ({"WORKER": 0, "INTERFACE": "none0"}, "no network interface none0"),
    "run_site.sh, no password": (
        {"WORKER": 0, "INTERFACE": "lo", "PASSWORD_FILE": "/nowhere/x"},
        "no password in /nowhere/x",
    ),
    "redis_server.sh, no server": ({"SERVER": "nowhere"}, "there is no nowhere"),
    "redis_server.sh, no password": ({"PASSWORD_FILE": "/nowhere/x"}, "no password in /nowhere/x"),
    "redis_server.sh, short password": ({"REDIS_PASSWORD": "hello"}, "not 16 or more letters and digits"),
    "redis_server.sh, every network": (
        {"REDIS_PASSWORD": PASSWORD, "ADDRESS": "0.0.0.0"},
        "ADDRESS 0.0.0.0 means every network",
    ),
    "redis_server.sh, every network but in Redis' way": (
        {"REDIS_PASSWORD": PASSWORD, "ADDRESS": "* -::*"},
        "means every network",
    ),
    "redis_server.sh, every network in short": (
        {"REDIS_PASSWORD": PASSWORD, "ADDRESS": "0"},
        "ADDRESS 0 means every network",
    ),
    "redis_server.sh, every network beside another": (
        {"REDIS_PASSWORD": PASSWORD, "ADDRESS": "127.0.0.1 0.0.0.0"},
        "means every network",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(tokens, tmp_path, torchrun_path, mistake):
    variables, expected = MISTAKES[mistake]
    if "interface" in expected and not pathlib.Path("/sys/class/net").is_dir():
        pytest.skip("there is no sysfs here, in which the script looks for network interfaces")
    script = next(SCRIPTS.rglob(mistake.split(",")[0]))
    stand_ins = tmp_path / "programs"
    stand_ins.mkdir()
    for program in ("mpirun", "redis-server"):  # whether they are installed matters to other mistakes
        (stand_ins / program).write_text("#!/bin/sh\nexit 99\n")
        (stand_ins / program).chmod(0o755)
    defaults = {"PATH": f"{torchrun_path}:{stand_ins}", "DATA": tmp_path / "redis"}
    slurm = {"SLURM_JOB_ID": 1, "SLURM_JOB_NUM_NODES": 2, "SLURM_NTASKS": 4}
    environment = environment_of_scripts(tokens, tmp_path / "run", **{**defaults, **slurm, **variables})
    result = run_script(shutil.which("bash"), environment, [script, *SMALL], status=2)
    assert re.fullmatch(r"error: .*: .*\n", result.stderr) and expected in result.stderr, result.stderr
    assert not (tmp_path / "run").exists() and not (tmp_path / "redis").exists()
