"""Gives each of several processes a share of a core, as if each had its own machine that is slower than this one.

    with Quotas() as quotas:
        process = subprocess.Popen([*quotas.inside("worker3", 0.15), "some", "program"])

A share is the quota of a control group (cgroup v1 or v2, Linux's CFS bandwidth). When a group has used its quota of a
period of some ten milliseconds, the kernel stops all of its threads until the next period: with half the share every
step takes twice the time, and heartbeats continue. Processes whose shares together are less than the machine do not
compete for it.
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

LEAST_PERIOD, LEAST_QUOTA = 10_000, 1_000  # microseconds; the quota is the kernel's minimum


@dataclass(frozen=True)
class Hierarchy:
    """The files through which the kernel is told the shares."""
    root: Path
    version: int

    def limit(self, group, period, quota):
        if self.version == 1:
            (group / "cpu.cfs_period_us").write_text(str(period))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {period}")


def find_hierarchy(mounts):
    """Finds the hierarchy in /proc/mounts; None if shares are not possible."""
    for line in mounts.splitlines():
        _, root, kind, options, *_ = line.split()
        if kind == "cgroup" and "cpu" in options.split(","):
            return Hierarchy(Path(root), 1)
        controllers = Path(root) / "cgroup.controllers"
        if kind == "cgroup2" and controllers.exists() and "cpu" in controllers.read_text().split():
            return Hierarchy(Path(root), 2)
    return None


def period_and_quota(share):
    """(period, quota) in microseconds. The period is as short as the kernel allows, to keep each stop short."""
    period = max(LEAST_PERIOD, round(LEAST_QUOTA / share))
    return period, max(LEAST_QUOTA, round(period * share))


class Quotas:
    def __init__(self):
        self.groups = []
        self.hierarchy = find_hierarchy(Path("/proc/mounts").read_text())
        if self.hierarchy is None:
            raise UserError("there are no control groups for the CPU here: run this where they are mounted "
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
        """The words before a command that give this share of a core to it and the processes that it starts."""
        group = self.hierarchy.root / f"diloco-{os.getpid()}-{name}"
        try:
            group.mkdir(exist_ok=True)
            self.groups.append(group)
            self.hierarchy.limit(group, *period_and_quota(share))
        except OSError as error:
            raise refusal(error) from error
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")]

    def close(self):
        """Removes the groups after the end of their processes, which the kernel takes a moment to notice."""
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
    """Removes groups that killed programs have left behind."""
    for group in root.glob("diloco-*-*"):
        if not Path(f"/proc/{group.name.split('-')[1]}").exists():
            with contextlib.suppress(OSError):  # another program removes it, or its processes are still ending
                group.rmdir()


def refusal(error):
    return UserError(f"{error.filename} cannot be written ({error.strerror}): run this as root where control groups "
                     "are allowed")


# Prints how many seconds a tenth of a second of work takes.
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
        return "quotas of control groups have no effect here: run this on another machine"
    return None
