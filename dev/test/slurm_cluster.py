"""A SLURM cluster on this machine for as long as a test needs one: munged, slurmctld and a slurmd for each
node, with a key, a socket and ports of their own, in a temporary folder. It runs as the user who starts it,
needs no systemd, no cgroups and no configuration of the system, and leaves nothing behind.
"""

import ctypes
import getpass
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time

PROGRAMS = "munged slurmctld slurmd sbatch srun salloc sinfo scontrol squeue scancel".split()

CONFIGURATION = """
ClusterName=test
SlurmctldHost={machine}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
# More processors than the machine may have: tests are small.
SlurmdParameters=config_overrides
KillWait=5
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=10 State=UP
"""


def path():
    """Where to look for programs: a user's PATH may lack the daemons' folders."""
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def missing_programs():
    return [program for program in PROGRAMS if not shutil.which(program, path=path())]


def free_ports(count):
    """Ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def end_with_parent():
    """In a new process: the kernel ends it when the test is killed."""
    prctl_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(prctl_set_pdeathsig, signal.SIGTERM)


class SlurmCluster:
    """Nodes of `cpus` processors each, all of them this machine. RuntimeError where it does not come up."""

    def __init__(self, nodes=2, cpus=4):
        self.daemons = []
        # Sockets have short names: not pytest's folder, which is deep.
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        try:
            self.nodes = [f"n{i}" for i in range(nodes)]
            self.environment = {
                **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "OMPI_"))},
                "PATH": path(),
                "SLURM_CONF": str(self.folder / "slurm.conf"),
            }
            self.configure(cpus)
            self.start_munge()
            self.start("slurmctld", "-D", "-i")
            for node in self.nodes:
                self.start("slurmd", "-D", "-N", node, log=f"slurmd-{node}.log")
            self.wait_for(self.all_are_idle, "nodes")
        except BaseException:
            self.close()
            raise

    def configure(self, cpus):
        ports = free_ports(1 + len(self.nodes))
        machine = socket.gethostname().split(".")[0]
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={machine} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} State=UNKNOWN"
            for node, port in zip(self.nodes, ports[1:])
        )
        text = CONFIGURATION.format(
            machine=machine, folder=self.folder, ports=ports, nodes=nodes, user=getpass.getuser()
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "state").mkdir()
        for node in self.nodes:
            (self.folder / f"spool-{node}").mkdir()

    def start_munge(self):
        secrets = self.folder / "munge"
        secrets.mkdir(mode=0o700)
        (secrets / "key").write_bytes(os.urandom(1024))
        (secrets / "key").chmod(0o400)
        files = {"key": "key", "pid": "pid", "log": "log", "seed": "seed"}
        self.start(
            "munged",
            "--foreground",
            "--force",  # although others may write to /tmp
            f"--socket={self.folder}/munge.socket",
            *(f"--{kind}-file={secrets}/{name}" for kind, name in files.items()),
        )
        self.wait_for((self.folder / "munge.socket").exists, "munge's socket")

    def start(self, program, *arguments, log=None):
        with open(self.folder / (log or f"{program}.log"), "wb") as output:
            daemon = subprocess.Popen(
                [shutil.which(program, path=path()), *arguments],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C in the terminal reaches the test alone
                preexec_fn=end_with_parent,
            )
        self.daemons.append(daemon)

    def wait_for(self, condition, what, seconds=120):
        end = time.time() + seconds
        while not condition():
            ended = [daemon.args[0] for daemon in self.daemons if daemon.poll() is not None]
            if ended or time.time() > end:
                logs = "\n".join(file.read_text() for file in sorted(self.folder.glob("*.log")))
                raise RuntimeError(f"the SLURM cluster has no {what} (ended: {ended})\n{logs}")
            time.sleep(0.05)

    def query(self, *words):
        return subprocess.run(words, env=self.environment, capture_output=True, text=True).stdout.split()

    def all_are_idle(self):
        return self.query("sinfo", "-h", "-N", "-o", "%t") == ["idle"] * len(self.nodes)

    def state(self, job):
        """What SLURM says of a job, by name."""
        words = self.query("scontrol", "-o", "show", "job", job)
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job, seconds=240):
        """(state, exit code) of a batch job once it has ended, as ("FAILED", "2:0"). sbatch --wait looks only
        every few seconds."""
        end = time.time() + seconds
        while time.time() < end:
            fields = self.state(job)
            if fields["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                return fields["JobState"], fields["ExitCode"]
            time.sleep(0.1)
        raise RuntimeError(f"job {job} is {fields['JobState']} after {seconds} s")

    def wait_until_requeued(self, job, seconds=240):
        """Until a job is back in the queue, from where it may start soon: SLURM would wait a minute or two,
        since a node refuses a start that was granted up to the second in which it had to end the job."""
        end = time.time() + seconds
        while time.time() < end:
            fields = self.state(job)
            if fields["JobState"] == "PENDING" and fields["Restarts"] != "0":
                time.sleep(3)
                self.query("scontrol", "update", f"JobId={job}", "StartTime=now")
                return
            time.sleep(0.1)
        raise RuntimeError(f"job {job} is {fields['JobState']} after {seconds} s, and was not requeued")

    def close(self):
        """Ends jobs, then daemons, the last started first."""
        if (self.folder / "munge.socket").exists() and self.query("squeue", "-h", "-o", "%i"):
            self.query("scancel", "--full", "-u", getpass.getuser())
            end = time.time() + 30
            while self.query("squeue", "-h", "-o", "%i") and time.time() < end:
                time.sleep(0.1)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
