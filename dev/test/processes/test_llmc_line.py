"""A user of llm.c changes only the binary's name: the commands of its run_gpt2_124M.sh, run_gpt2_350M.sh and
run_gpt3_125M.sh, as they are published, start, train, evaluate, and log what its dev/vislog.ipynb reads. They run in a
folder laid out like llm.c's, with corpora that are made here. Further options after a command make the run small: of
an option that is given twice, the last one counts.
(Facts: github.com/karpathy/llm.c, scripts/, dev/vislog.ipynb, dev/data/data_common.py.)"""

import os
import re
import shlex
import shutil
import subprocess

import numpy
import pytest
from conftest import TRAINER, Run, write_shard
from llmc_files import header_bytes
from token_files import write_tokenizer

pytestmark = pytest.mark.skipif(not TRAINER.exists(), reason="train_gpt_cpu is not built: run make")

VOCABULARY = 50257  # GPT-2's, the end of a text last
PATIENCE = 500

GPT2_124M = """
    -i "dev/data/fineweb10B/fineweb_train_*.bin" -j "dev/data/fineweb10B/fineweb_val_*.bin" -o log_gpt2_124M
    -v 250 -s 20000 -g 144 -h 1 -b 64 -t 1024 -d 524288 -r 0 -z 1 -c 0.1 -l 0.0006 -q 0.0 -u 700 -n 5000 -y 1
    -e "d12"
"""
GPT2_350M = """
    -i 'dev/data/fineweb100B/fineweb_train_*.bin' -j 'dev/data/fineweb100B/fineweb_val_*.bin' -o log_gpt2_350M
    -v 250 -s 100000 -g 144 -h 1 -b 64 -t 1024 -d 524288 -r 0 -z 1 -c 0.1 -l 0.0003 -q 0.0 -u 700 -n 2000
    -x 60000 -y 1 -e d24 -pn 8 -pr $OMPI_COMM_WORLD_RANK
"""
GPT3_125M = """
    -i "dev/data/fineweb100B/fineweb_train_*.bin" -j "dev/data/fineweb100B/fineweb_val_*.bin" -o log_gpt3_125M
    -v 250 -s 20000 -g 144 -h 1 -b 32 -t 2048 -d 524288 -r 0 -z 1 -c 0.1 -l 0.0006 -q 0.1 -u 700 -n 10000
    -nk 5 -nm 50000 -ge 1 -sl 7.0 -sg 7.0 -y 1 -x 572204 -e "gpt3:c768"
"""
# Six steps of 128 tokens, validated after every third, and a short sample at the end.
SHORT = "-b 1 -t 64 -d 128 -x 6 -v 3 -m 2 -g 4"
SMALL = f"{SHORT} --channels 64"

# Open MPI asks before it runs as root, as containers do, and before it starts more processes than there are
# cores. With no remote shell it does not look for one.
MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_plm_rsh_agent": "false",
}


def eval_set_bytes(examples):
    """llm.c's file of questions: [(context, [ending, ...], number of the right one), ...], all in tokens."""
    parts, longest = [], 0
    for index, (context, endings, label) in enumerate(examples):
        body = [word for tokens in (context, *endings) for word in (len(tokens), *tokens)]
        size = 2 * (5 + len(body))
        longest = max(longest, size)
        parts.append(numpy.array([65535, size, index, label, len(endings), *body], "<u2").tobytes())
    return header_bytes(20240522, 1, len(examples), longest) + b"".join(parts)


@pytest.fixture
def home(tmp_path):
    """A folder as llm.c's after its data scripts and `make`, with texts in which few tokens follow one."""
    random = numpy.random.default_rng(1)
    steps = random.integers(1, 4, size=12000)
    text = numpy.cumsum(steps) * 97 % (VOCABULARY - 1)
    for corpus in ("fineweb10B", "fineweb100B"):
        folder = tmp_path / "dev" / "data" / corpus
        folder.mkdir(parents=True)
        write_shard(folder / "fineweb_train_000001.bin", text[:8000])
        write_shard(folder / "fineweb_val_000000.bin", text[8000:])
    questions = [(text[i : i + 9], [random.integers(0, VOCABULARY - 1, 5) for _ in range(4)], i % 4)
                 for i in range(0, 70, 10)]
    (tmp_path / "dev" / "data" / "hellaswag").mkdir()
    (tmp_path / "dev" / "data" / "hellaswag" / "hellaswag_val.bin").write_bytes(eval_set_bytes(questions))
    write_tokenizer(tmp_path / "gpt2_tokenizer.bin", VOCABULARY)
    (tmp_path / "train_gpt2cu").symlink_to(TRAINER)
    return tmp_path


def start(home, launcher, line, quoted=False):
    """What a shell in that folder prints for the line, its backslashes and newlines taken out.
    quoted: the launcher takes it as one word"""
    program = f"./train_gpt2cu {' '.join(line.split())}"
    command = f"{launcher} {shlex.quote(program) if quoted else program}"
    environment = {**os.environ, **MPI, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        ["bash", "-c", command], cwd=home, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert result.returncode == 0, f"status {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result


def streams_of(log):
    """{stream: {step: value}} of a main.log, by the notebook's rules: the first word of a line is s:STEP, the
    second STREAM:VALUE; a line of trl has four words and others have two; what comes later counts."""
    streams = {}
    for line in log.read_text().splitlines():
        words = line.split()
        step, (stream, value) = words[0].split(":")[1], words[1].split(":")[:2]
        assert len(words) == (4 if stream == "trl" else 2), line
        streams.setdefault(stream, {})[int(step)] = float(value)
    return streams


def run_line(folder):
    """The first line of metrics.jsonl."""
    return Run(folder, subprocess.CompletedProcess([], 0, "", "")).lines("run")[0]


def expect_the_log_of_six_steps(folder):
    streams = streams_of(folder / "main.log")
    assert set(streams) == {"trl", "tel", "eval"}
    assert sorted(streams["trl"]) == [1, 2, 3, 4, 5, 6] and sorted(streams["tel"]) == [0, 3, 6]
    assert sorted(streams["eval"]) == [3, 6]
    untrained = numpy.log(VOCABULARY)
    assert streams["tel"][0] == pytest.approx(untrained, rel=0.02)
    assert all(0 < loss < 1.1 * untrained for loss in [*streams["trl"].values(), *streams["tel"].values()])
    assert all(accuracy * 7 == pytest.approx(round(accuracy * 7), abs=0.01)
               for accuracy in streams["eval"].values())  # of seven questions


def by_mpirun():
    """llm.c's launcher, for two processes in the place of its eight, which would not fit here."""
    installed = shutil.which("mpirun")
    if not installed or "Open MPI" not in subprocess.check_output(["mpirun", "--version"], text=True):
        pytest.skip("Open MPI's mpirun is not installed (Debian: openmpi-bin)")
    return "mpirun -np 2"


@pytest.mark.parametrize("line", [GPT2_124M, GPT3_125M], ids=["gpt2_124M", "gpt3_125M"])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_line_of_llm_c_trains_evaluates_and_logs_as_there(home, line, processes):
    folder = home / re.search(r"-o (\S+)", line)[1]
    start(home, by_mpirun() if processes == 2 else "", f"{line} {SMALL}")
    expect_the_log_of_six_steps(folder)
    assert (folder / "DONE_00000006").exists()


@pytest.mark.long  # a minute or two, and 2.5 GB of checkpoint
def test_the_124M_line_of_llm_c_trains_124M_parameters(home):
    result = start(home, "", f"{GPT2_124M} {SHORT}")
    assert "123.74M parameters" in result.stdout  # with 64 positions in the place of 1024
    expect_the_log_of_six_steps(home / "log_gpt2_124M")
    assert (home / "log_gpt2_124M" / "DONE_00000006").exists()


@pytest.mark.parametrize("line", [GPT2_124M, GPT3_125M], ids=["gpt2_124M", "gpt3_125M"])
def test_a_line_of_llm_c_is_one_worker_of_what_mpirun_starts(home, line):
    folder = home / re.search(r"-o (\S+)", line)[1]
    start(home, by_mpirun(), f"{line} {SMALL} -x 1")
    run = run_line(folder)
    assert (run["workers"], run["ranks"], run["options"]["outer-optimizer"]) == (1, 2, "none")


def test_the_350M_line_of_llm_c_numbers_its_processes_by_flags(home):
    line = f"{GPT2_350M} {SMALL} -x 2".replace("-pn 8", "-pn 2")
    start(home, f"{by_mpirun()} bash -c", line, quoted=True)
    run = run_line(home / "log_gpt2_350M")
    assert (run["workers"], run["ranks"], run["options"]["model"]) == (1, 2, "d24")
    assert sorted(streams_of(home / "log_gpt2_350M" / "main.log")["trl"]) == [1, 2]


def test_the_gpt3_line_asks_for_gpt_3_and_for_outliers_to_be_skipped(home):
    start(home, "", f"{GPT3_125M} {SMALL} -x 1")
    options = run_line(home / "log_gpt3_125M")["options"]
    expected = {"model": "gpt3:c768", "skip-loss-zscore": 7, "skip-norm-zscore": 7, "hellaswag": 1,
                "keep-checkpoints": 5, "major-checkpoints": 50000, "lr": 0.0006, "warmup": 700}
    for name, value in expected.items():
        assert options[name] == value if isinstance(value, str) else float(options[name]) == value, name


def test_llm_c_s_loop_goes_on_after_a_crash_and_ends_with_the_done_file(home):
    """Its scripts start the same line again until there is DONE_ with the last step in eight digits. The
    first time it is killed after a checkpoint, the second time it comes to its end, and there is no third."""
    line = f"{GPT2_124M} {SMALL} -n 5 -x 120 -v 60"
    loop = f"""
        for attempt in 1 2 3; do
            if [ -f log_gpt2_124M/DONE_00000120 ]; then break; fi
            echo "attempt $attempt"
            ./train_gpt2cu {' '.join(line.split())} &
            if [ $attempt = 1 ]; then
                while kill -0 $! && ! [ -f log_gpt2_124M/DONE_00000010 ]; do sleep 0.02; done
                kill -KILL $!
            fi
            wait
        done"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        ["bash", "-c", loop], cwd=home, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert re.findall("attempt .", result.stdout) == ["attempt 1", "attempt 2"], result.stdout + result.stderr
    (step,) = map(int, re.findall(r"resumed after step (\d+)", result.stdout))
    assert 10 <= step < 120 and (home / "log_gpt2_124M" / "DONE_00000120").exists()
    streams = streams_of(home / "log_gpt2_124M" / "main.log")
    assert sorted(streams["trl"]) == list(range(1, 121))
    again = start(home, "", line)  # without the loop: nothing is left to do
    assert "resumed after step 120" in again.stdout
