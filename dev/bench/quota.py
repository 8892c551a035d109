"""Processes that get a share of a core each, as if each had a machine of its own, slower than this one.

    with Quotas() as quotas:
        process = subprocess.Popen([*quotas.inside("worker3", 0.15), "some", "program"])

A share is the quota of a control group (cgroup v1 or v2, Linux's CFS bandwidth). The kernel holds the group's
threads up when they have had theirs of a period of some ten milliseconds, all of them: with half the share
every step takes twice the time, and heartbeats go on. Processes whose shares are less than the machine
together do not compete for it.
"""
import contextlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev/tools"))
from metrics import UserError

LEAST_PERIOD, LEAST_QUOTA = 10_000, 1_000  # microseconds; the latter is the kernel's


@dataclass(frozen=True)
class Hierarchy:
    """Where the kernel is told how to share out the cores."""
    root: Path
    version: int

    def limit(self, group, period, quota):
        if self.version == 1:
            (group / "cpu.cfs_period_us").write_text(str(period))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {period}")


def find_hierarchy(mounts):
    """Of /proc/mounts; None where nobody can be given a share."""
    for line in mounts.splitlines():
        _, root, kind, options, *_ = line.split()
        if kind == "cgroup" and "cpu" in options.split(","):
            return Hierarchy(Path(root), 1)
        controllers = Path(root) / "cgroup.controllers"
        if kind == "cgroup2" and controllers.exists() and "cpu" in controllers.read_text().split():
            return Hierarchy(Path(root), 2)
    return None


def period_and_quota(share):
    """In microseconds: a period as short as the kernel takes it, so that nobody stands still for long."""
    period = max(LEAST_PERIOD, round(LEAST_QUOTA / share))
    return period, max(LEAST_QUOTA, round(period * share))


class Quotas:
    def __init__(self):
        self.groups = []
        self.hierarchy = find_hierarchy(Path("/proc/mounts").read_text())
        if self.hierarchy is None:
            raise UserError("there are no control groups for the CPU here: run it where they are mounted "
                            "(/sys/fs/cgroup)")
        if self.hierarchy.version == 2:
            try:
                (self.hierarchy.root / "cgroup.subtree_control").write_text("+cpu")
            except OSError as error:
                raise refusal(error) from error
        remove_abandoned(self.hierarchy.root)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def inside(self, name, share):
        """The words before a command that is to have this share of a core, with all that it starts."""
        group = self.hierarchy.root / f"diloco-{os.getpid()}-{name}"
        try:
            group.mkdir(exist_ok=True)
            self.groups.append(group)
            self.hierarchy.limit(group, *period_and_quota(share))
        except OSError as error:
            raise refusal(error) from error
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")]

    def close(self):
        """When the processes have ended: the kernel takes a moment to notice."""
        end = time.monotonic() + 5
        for group in set(self.groups):
            while group.exists():
                try:
                    group.rmdir()
                except OSError:
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.02)
        self.groups = []


def remove_abandoned(root):
    """Groups of programs that were killed before they could."""
    for group in root.glob("diloco-*-*"):
        if not Path(f"/proc/{group.name.split('-')[1]}").exists():
            with contextlib.suppress(OSError):  # somebody else removes it, or its processes still end
                group.rmdir()


def refusal(error):
    return UserError(f"{error.filename} refuses ({error.strerror}): run it as root, where control groups may "
                     "be made")


# Says how long a tenth of a second of work takes, in seconds.
WORK = """
import time
begin, used = time.monotonic(), time.process_time()
while time.process_time() - used < 0.1: pass
print(time.monotonic() - begin)
"""


def missing():
    """What this machine lacks for shares, or None."""
    try:
        with Quotas() as quotas:
            result = subprocess.run([*quotas.inside("trial", 0.2), sys.executable, "-c", WORK],
                                    capture_output=True, text=True)
    except UserError as error:
        return str(error)
    if result.returncode != 0 or float(result.stdout) < 0.3:
        return "quotas of control groups are not kept here: run it on another machine"
    return None
