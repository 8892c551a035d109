"""A finished run's sizes, options and measured time of a step, and how fast it would be over a slower link."""
import dataclasses
import re
from dataclasses import dataclass

from metrics import UserError, read_logs
from model_file import ModelFile
from simulation.payloads import Shape, choose_exchange, exchange_bytes, gpt_shape, make_fragments
from simulation.store import (StoreCalls, check_store_exchange, store_bytes, store_link_bytes,
                              worker_link_bytes)
from simulation.trainer import (Calls, Link, data_parallel_utilization, jittery_utilization,
                                streaming_utilization)

# Layers and channels, of llmc/descriptor.h.
DESCRIPTORS = {"d6": (6, 384), "d12": (12, 768), "d24": (24, 1024), "d36": (36, 1280), "d48": (48, 1600),
               "d60": (60, 1920), "d72": (72, 2880), "d84": (84, 3456), "gpt3:c384": (6, 384),
               "gpt3:c768": (12, 768), "gpt3:c1024": (24, 1024), "gpt3:c1536": (24, 1536),
               "gpt3:c2048": (24, 2048), "gpt3:c2560": (32, 2560), "gpt3:c4096": (32, 4096),
               "gpt3:c12288": (96, 12288)}


@dataclass(frozen=True)
class Measured:
    """Of a run: what it cost, what it did, and how."""
    shape: Shape
    step_seconds: float  # of the slowest worker, without its waits for exchanges
    workers: int         # M
    ranks: int           # R
    inner_steps: int     # H
    fragment_layers: int
    fragment_pattern: str
    overlap: int         # tau; the smallest, where workers differ
    outer_dtype: str
    outer_exchange: str
    micro_steps: int = 1
    parameter_bytes: int = 4  # of a value that ranks gather: 4 on a CPU, 2 on a GPU
    ranks_share_link: bool = True
    local_weight: float = 0.5  # alpha
    steps: int = 0             # that it trained; 0: not known
    outer_transport: str = "tcp"  # or nccl, or store
    step_times: tuple = ()  # of each worker, its seconds in each step, waits left out; none: not known

    @property
    def is_data_parallel(self):
        return self.workers == 1

    def exchanges(self):
        """(offset, bytes of each call) by fragment, of one rank; through a store (offset, store_bytes())."""
        blocks = self.shape.blocks(self.ranks, self.fragment_layers)
        fragments = make_fragments(blocks, self.shape.layers, self.fragment_layers, self.fragment_pattern,
                                   self.inner_steps)
        offsets = [fragment.offset for fragment in fragments]
        values = [sum(blocks[b] for b in fragment.blocks) // self.ranks for fragment in fragments]
        if self.outer_transport == "store":
            check_store_exchange(self.outer_exchange)
            return [(offset, store_bytes(self.outer_dtype, n, self.workers))
                    for offset, n in zip(offsets, values, strict=True)]
        kind = choose_exchange(self.outer_exchange, self.outer_dtype, values, self.workers)
        return [(offset, exchange_bytes(kind, self.outer_dtype, n, self.workers))
                for offset, n in zip(offsets, values, strict=True)]

    def carried(self, counts):
        """Bytes of an exchange that pass a worker's link in the direction that has more of them."""
        ranks = self.ranks if self.ranks_share_link else 1
        return ranks * (worker_link_bytes(counts) if self.outer_transport == "store" else sum(counts))

    def carried_by_store(self, counts):
        """Likewise, of all ranks, over the store's own link."""
        return self.ranks * store_link_bytes(counts, self.workers)


def predict(run, link_bits_per_second, rtt_seconds, jitter=False, **overrides):
    """Expected utilization of a run (read_measured(folder)) over a link: its tokens/s as a share of those
    that it had without one. Of a run with one worker and several ranks, the link is between the ranks; else
    between workers, in either direction at once, and shared by the ranks of a worker (ranks_share_link);
    through a store it is a worker's link to that.

    jitter: the workers' steps differ as they did in the run, so that they wait for each other; it is then the
            mean share of their time in which they do not wait
    overrides: other values of Measured's fields (inner_steps, overlap, outer_dtype, fragment_layers, workers,
    step_seconds, outer_transport, ...) or of Link's (mtu, slow_start_after_idle, store_bits_per_second)."""
    names = ("mtu", "slow_start_after_idle", "store_bits_per_second")
    of_link = {name: overrides.pop(name) for name in names if name in overrides}
    return utilization(dataclasses.replace(run, **overrides),
                       Link(link_bits_per_second, rtt_seconds, **of_link), jitter)


def utilization(run, link, jitter=False):
    if run.is_data_parallel and run.ranks == 1:
        raise UserError("a run of one process sends nothing: give one with several, or --workers")
    if run.is_data_parallel:
        blocks = run.shape.blocks(run.ranks, 0)
        return data_parallel_utilization(run.step_seconds, blocks, run.shape.layers, run.ranks,
                                         run.parameter_bytes, run.micro_steps, Calls(link, run.ranks - 1))
    at_once = run.ranks if run.ranks_share_link else 1
    exchanges = [(offset, [count * at_once for count in counts]) for offset, counts in run.exchanges()]
    calls = (StoreCalls(link, run.workers, at_once) if run.outer_transport == "store"
             else Calls(link, at_once * (run.workers - 1)))
    if not jitter:
        return streaming_utilization(run.step_seconds, run.inner_steps, run.overlap, exchanges, calls)
    if len(run.step_times) != run.workers:
        raise UserError(f"of {len(run.step_times)} workers it is known how their steps differ, not of "
                        f"{run.workers}: give a run with as many")
    return jittery_utilization(run.step_times, run.inner_steps, run.overlap, exchanges, calls)


# ---------------------------------------------------------------------------------------------------- reading

def read_measured(folder):
    """Reads a finished run; of a resumed one, the part since it was resumed. UserError if there is none, or if its
    log does not say enough."""
    logs = [since_resumed(lines) for lines in read_logs(folder)]
    first, run, options = logs[0], logs[0]["run"], logs[0]["run"]["options"]
    try:
        layers, channels = shape_options(folder, options)
        return Measured(
            shape=gpt_shape(layers, channels, run["parameters"]),
            step_seconds=max(mean_step_seconds(log) for log in logs),
            workers=run["workers"], ranks=run["ranks"], inner_steps=int(options["inner-steps"]),
            fragment_layers=int(options["fragment-layers"]), fragment_pattern=options["fragment-pattern"],
            overlap=min(int(log["run"]["options"]["overlap"]) for log in logs),
            outer_dtype=options["outer-dtype"], outer_exchange=options.get("outer-exchange", "all_gather"),
            micro_steps=micro_steps(options, run["ranks"]), parameter_bytes=parameter_bytes(first),
            local_weight=float(options.get("local-weight", 0.5)), steps=first["step"][-1]["step"],
            outer_transport=options.get("outer-transport", "tcp"),
            step_times=step_times(logs[::run["ranks"]]))
    except (KeyError, ValueError) as error:
        raise UserError(f"the log of {folder} does not say what the run was ({error}): start it again with "
                        "this version") from error


def since_resumed(log):
    """{"run": what the process last began as, "step": steps since then, "sync": those sent since then}"""
    run = {**log["run"][0], **(log["resume"][-1] if log["resume"] else {})}
    begin = log["resume"][-1]["step"] if log["resume"] else 0
    return {"run": run, "step": [line for line in log["step"] if line["step"] > begin],
            "sync": [line for line in log["sync"] if line["send_step"] > begin]}


def shape_options(folder, options):
    """(layers, channels), from the options or, where they name a model, from that or from the run's own."""
    layers, channels = int(options["layers"]), int(options["channels"])
    known = DESCRIPTORS.get(re.sub("^gpt2:d?", "d", options["model"]), (0, 0))
    layers, channels = layers or known[0], channels or known[1]
    if layers and channels:
        return layers, channels
    for path in [*sorted(folder.glob("model_*.bin")), folder.cwd() / options["model"]]:
        if path.is_file():
            shape = ModelFile(path).shape
            return shape.layers, shape.channels
    raise UserError(f"{folder} was started from {options['model']}, which is not here, and has no "
                    "model_*.bin: put the model where it was")


def seconds_of_steps(log):
    """{step: its seconds without waits}, except for the first tenth of the steps, in which memory is touched for the
    first time. Waits after the last step, for what is then in flight, belong to no step."""
    steps, overlap = log["step"], int(log["run"]["options"]["overlap"])
    begin = steps[0]["step"] + max(1, len(steps) // 10) if steps else 0
    seconds = {line["step"]: line["seconds"] for line in steps if line["step"] >= begin}
    for line in log["sync"]:
        if line["apply_step"] in seconds and line["apply_step"] >= line["send_step"] + overlap:
            seconds[line["apply_step"]] -= line["waited_seconds"]
    return seconds


def mean_step_seconds(log):
    seconds = seconds_of_steps(log)
    if sum(seconds.values()) <= 0:
        raise UserError("the run is too short to say how long a step takes: give one of 20 steps or more")
    return sum(seconds.values()) / len(seconds)


def step_times(logs):
    """For each log, its seconds in each of the steps that all of them made."""
    all_seconds = [seconds_of_steps(log) for log in logs]
    common = sorted(set.intersection(*map(set, all_seconds)))
    return tuple(tuple(seconds[step] for step in common) for seconds in all_seconds)


def micro_steps(options, ranks):
    tokens = int(options["batch"]) * int(options["seq-len"]) * ranks
    return max(1, int(options["total-batch"]) // tokens)


def parameter_bytes(log):
    """Bytes of a value that ranks gather: what they sent in a step, less the known 4 bytes of its gradient."""
    run, steps = log["run"], log["step"]
    if run["ranks"] == 1:
        return 4
    sent = steps[-1]["inner_bytes_sent"] - steps[-2]["inner_bytes_sent"]
    a_value = sent * run["ranks"] / (run["ranks"] - 1) / run["parameters"] - 4
    return 2 if a_value < 3 else 4
