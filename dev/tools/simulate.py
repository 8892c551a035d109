#!/usr/bin/env python3
"""Simulates how much of their time workers compute, and how much they wait for a slow link.

    dev/tools/simulate.py --paper                            Table 4 of arXiv 2501.18512 beside the paper's numbers
    dev/tools/simulate.py --plot FILE.png                    its figure 4: utilization over the link's rate
    dev/tools/simulate.py --parameters 1e9 --layers 24 --step-time 0.1s --rtt 80ms      any model, any link
    dev/tools/simulate.py --run RUN --link 200mbit --rtt 80ms     a finished run, over this link instead
    dev/tools/simulate.py --plan RUN --link 200mbit --rtt 80ms    the options that would keep its speed

There are two models: the paper's, a graph of each layer's computations and reductions (simulation/graph.py),
and this trainer's, call by call (simulation/trainer.py). The first two commands use the paper's model, the
last two the trainer's, and the third the trainer's, or with --timing paper the paper's.

A link carries its rate in each direction at the same time. A worker's ranks share the link, or with
--ranks-own-links each has its own. With --outer-transport store it is the link to the store, each worker
reads the payloads of all others, and all workers share the store's own link, --store-link
(simulation/store.py). For other programs:

    from simulate import predict, read_measured
    predict(read_measured(Path("log")), 200e6, 0.08)        # the expected utilization, in [0, 1]
"""
import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # simulation/
from compare import size_text
from metrics import Parser, UserError, exit_status, require

require("numpy")
from simulation import general, paper
from simulation.measured import Measured, predict, read_measured
from simulation.payloads import BITS, EXCHANGES, PATTERNS, Shape
from simulation.planner import TARGET, make_plan
from simulation.trainer import Link

__all__ = ["Measured", "predict", "read_measured"]

RATES = tuple(10 ** (6 + n / 2) for n in range(11))  # 1 Mbit/s to 100 Gbit/s
FEW_OUTER_STEPS = 1000  # the trainer takes H = 100 by itself from these on


# ------------------------------------------------------------------------------------------------------ units

def number_with_unit(text, units, example):
    match = re.fullmatch(r"([0-9.eE+-]+)\s*([a-zA-Z/]*)", text)
    try:
        value = float(match[1]) * units[match[2].lower()]
    except (TypeError, ValueError, KeyError):
        raise argparse.ArgumentTypeError(f"'{text}' is not understood: write it like {example}") from None
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not possible: write it like {example}")
    return value


def rate(text):
    value = number_with_unit(text, {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}, "200mbit or 1gbit")
    if value == 0:
        raise argparse.ArgumentTypeError("a link of rate 0 carries nothing: write it like 200mbit")
    return value


def seconds(text):
    return number_with_unit(text, {"us": 1e-6, "ms": 1e-3, "s": 1}, "80ms or 0.5s")


def positive_seconds(text):
    if seconds(text) == 0:
        raise argparse.ArgumentTypeError("a step takes some time: write it like 100ms")
    return seconds(text)


def count(smallest):
    def parse(text):
        try:
            value = float(text)
        except ValueError:
            value = -1
        if not smallest <= value < float("inf") or value != int(value):
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least {smallest}")
        return int(value)
    return parse


def rate_text(bits_per_second):
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits_per_second >= size:
            return f"{bits_per_second / size:.3g} {unit}"
    return f"{bits_per_second:.3g} bit/s"


def percent(share):
    """Rounded down, so that 99.0% has reached 99%."""
    return f"{int(1000 * share + 1e-9) / 10:.1f}%"


def aligned(rows):
    """Aligns the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width
                                                           in zip(row[1:], widths[1:]))]).rstrip()
                     for row in rows)


# ------------------------------------------------------------------------------------------------------ paper

def agreement_text(methods=paper.METHODS):
    exact, near, cells = paper.agreement(paper.table(methods))
    return f"{exact} of {cells} cells as printed in the paper, {near} within one step of its grid"


def paper_text():
    cells = paper.table()
    rows = [["Gbit/s for a utilization of"] + [f"{100 * target:.0f}%" for target in paper.TARGETS]]
    for size in paper.SIZES:
        rows.append([f"{size.name}, {size.layers} layers, {size.step_seconds} s a step"] + [""] * 5)
        for method, row in zip(paper.METHODS, cells[size.name]):
            rows.append([f"  {method.name}"] + [one.text + (" " if one.apart == 0 else f" ({one.published})")
                                               for one in row])
    quantized = paper.METHODS[-1]
    controls = {"tau = 0 instead of 1": [replace(method, overlap=0) for method in paper.METHODS],
                "8 bits a value instead of 4": [*paper.METHODS[:-1], replace(quantized, bits=8)]}
    return "\n".join([
        "Table 4 of arXiv 2501.18512, simulated; the paper's number in brackets where it is another.", "",
        aligned(rows), "", agreement_text() + ".",
        *(f"With {what}: {agreement_text(methods)}." for what, methods in controls.items()), "",
        paper.ASSUMPTIONS])


# ---------------------------------------------------------------------------------------------- any model

def setting_of(arguments):
    missing = [name for name in ("parameters", "layers", "step_time") if getattr(arguments, name) is None]
    if missing:
        name = "--" + missing[0].replace("_", "-")
        raise UserError(f"{name} is not given: give --parameters, --layers and --step-time, or one of "
                        "--paper, --plot, --run and --plan")
    if arguments.parameters < arguments.embedding + arguments.layers:
        raise UserError(f"{arguments.parameters} parameters are too few for {arguments.layers} layers and an "
                        f"embedding of {arguments.embedding}: give all of them by --parameters")
    if arguments.overlap >= arguments.inner_steps:
        raise UserError(f"an overlap of {arguments.overlap} with {arguments.inner_steps} inner steps: "
                        "use less than those")
    layer_values = (arguments.parameters - arguments.embedding) // arguments.layers
    return general.Setting(Shape(arguments.layers, layer_values, arguments.embedding), arguments.step_time,
                           arguments.workers or 2, arguments.inner_steps, arguments.fragment_layers,
                           arguments.fragment_pattern, arguments.overlap, arguments.outer_dtype,
                           arguments.plain_dtype, arguments.outer_exchange or "auto", arguments.timing,
                           arguments.outer_transport or "tcp")


def general_text(arguments):
    setting = setting_of(arguments)
    if setting.workers < 2:
        raise UserError("one worker exchanges nothing: give --workers 2 or more")
    if setting.timing == "paper" and setting.outer_transport == "store":
        raise UserError("the paper's model of time has no store: leave out --timing paper")
    of_link = {} if setting.timing == "paper" else link_options(arguments)
    methods = general.methods(setting)
    columns = [general.utilizations(method, arguments.links, arguments.rtt, **of_link) for method in methods]
    rows = [["link"] + [method.name for method in methods]]
    rows += [[rate_text(link)] + [percent(column[n]) for column in columns]
             for n, link in enumerate(arguments.links)]
    rows += [["sent a step"] + [size_text(round(general.bytes_a_step(method))) for method in methods]]
    if setting.outer_transport == "store":
        by_store = [general.store_bytes_a_step(method) for method in methods]
        rows += [["by the store's link"] + ["-" if count is None else size_text(round(count))
                                       for count in by_store]]
    return (f"Utilization: {arguments.parameters / 1e6:.4g}M parameters in {setting.shape.layers} layers, "
            f"{setting.step_seconds:.4g} s a step, {setting.workers} workers, "
            f"round trip {1000 * arguments.rtt:.4g} ms,\nH = {setting.inner_steps}, "
            f"{setting.fragment_layers} layers a fragment, {setting.fragment_pattern}, "
            f"tau = {setting.overlap}; not quantized is {setting.plain_dtype}; {setting.timing}'s timing\n\n"
            + aligned(rows))


# ---------------------------------------------------------------------------------------------- measured runs

def link_options(arguments):
    return {"mtu": arguments.mtu, "slow_start_after_idle": not arguments.no_slow_start,
            "store_bits_per_second": arguments.store_link or 0}


def measured_of(arguments, folder):
    run = read_measured(folder)
    if arguments.workers is not None:
        run = replace(run, workers=arguments.workers)
    if arguments.outer_transport is not None:
        run = replace(run, outer_transport=arguments.outer_transport)
    if arguments.outer_exchange is not None:
        run = replace(run, outer_exchange=arguments.outer_exchange)
    return replace(run, ranks_share_link=not arguments.ranks_own_links)


def one_link(arguments):
    if len(arguments.links) != 1:
        raise UserError("--run and --plan simulate a run over one link: give its rate, such as --link 200mbit")
    return Link(arguments.links[0], arguments.rtt, **link_options(arguments))


def describe(run, link):
    what = "data-parallel over the link" if run.is_data_parallel else (
        f"H = {run.inner_steps}, {run.fragment_layers} layers a fragment, tau = {run.overlap}, "
        f"{run.outer_dtype}" + ", through a store" * (run.outer_transport == "store"))
    return (f"{run.shape.values / 1e6:.4g}M parameters, {run.workers} x {run.ranks} processes, "
            f"{run.step_seconds:.4g} s a step measured; {what}\n"
            f"link: {rate_text(link.bits_per_second)}, round trip {1000 * link.rtt_seconds:.4g} ms, "
            f"packets of {link.mtu} bytes")


def run_text(arguments):
    run, link = measured_of(arguments, arguments.run), one_link(arguments)

    def expected(jitter):
        return percent(predict(run, link.bits_per_second, link.rtt_seconds, jitter,
                               **link_options(arguments)))

    text = f"{describe(run, link)}\nexpected utilization: {expected(False)}"
    if len(run.step_times) == run.workers > 1:
        text += f"; {expected(True)} if the workers' steps differ as they did in this run"
    return text


def candidate_row(name, candidate):
    average, peak = candidate.bits_per_second()
    sent = candidate.bytes_by_step()
    row = [name, candidate.options, percent(candidate.utilization), size_text(sum(sent.values())),
           size_text(max(sent.values())), rate_text(average), rate_text(peak), str(candidate.in_flight())]
    if candidate.run.outer_transport == "store":
        row.append(size_text(candidate.store_bytes()))
    return row


def verdict(plan, has_run):
    """has_run: whether the run had these options and as many workers, and was not data-parallel"""
    best = plan.best
    if plan.reaches and best.changes == 0 and has_run:
        return f"The run keeps {percent(best.utilization)} of its speed as it is."
    workers = "" if has_run else f"--workers {best.run.workers} "
    if plan.reaches:
        text = f"Start it with {workers}{best.options}."
    else:
        text = (f"Nothing that was tried, with H up to 1000 and tau up to 10, reaches {TARGET:.0%} on this "
                f"link; {workers}{best.options} comes nearest, with {percent(best.utilization)}.")
    return text + cautions(best)


def cautions(candidate):
    """Warnings about options for which the measured run is a poor guide."""
    run, text = candidate.run, ""
    if candidate.is_beyond_paper:
        text += " The paper tried no H above 100 and advises no tau above 5: look at the loss, too."
    if run.inner_steps > run.steps > 0:
        text += f" This run had {run.steps} steps: one with H = {run.inner_steps} needs as many, or more (-x)."
    elif 0 < run.steps < FEW_OUTER_STEPS * run.inner_steps:
        text += (f" {run.steps} steps are only {run.steps // run.inner_steps} outer steps then, and few raise the "
                 "loss: the trainer says at its start how much.")
    if run.overlap > 0 and run.local_weight == 0:
        text += (" With its --local-weight, 0, what is learnt while a fragment is under way is lost: the "
                 "paper's is 0.5.")
    return text


def plan_text(arguments):
    run, link = measured_of(arguments, arguments.plan), one_link(arguments)
    if run.is_data_parallel:
        raise UserError(f"{arguments.plan} is a run of one worker: give the number to plan for, such as "
                        "--workers 2")
    measured = read_measured(arguments.plan)
    has_run = not measured.is_data_parallel and run.workers == measured.workers
    plan = make_plan(run, link)
    header = ["", "options", "utilization", "sent in H steps", "at once", "average", "in that step",
              "in flight"] + ["by the store's link"] * (run.outer_transport == "store")
    rows = [header, candidate_row("as it is" if has_run else "defaults", plan.own)]
    if plan.best.changes > 0:
        rows.append(candidate_row("best" if plan.reaches else "nearest", plan.best))
    rows += [candidate_row("or", one) for one in plan.others if one.changes > 0]
    return f"{describe(run, link)}\n\n{aligned(rows)}\n\n{verdict(plan, run.workers == measured.workers)}"


# ---------------------------------------------------------------------------------------------- command line

def parse_arguments(words):
    parser = Parser(description="Simulates how much of their time workers wait for a slow link.",
                    epilog="For what each means, see the beginning of dev/tools/simulate.py.")
    job = parser.add_mutually_exclusive_group()
    job.add_argument("--paper", action="store_true", help="Table 4 of the paper, simulated and as published")
    job.add_argument("--plot", type=Path, metavar="FILE", help="draw figure 4 of the paper")
    job.add_argument("--run", type=Path, help="finished run: the share of its speed that it would keep")
    job.add_argument("--plan", type=Path, metavar="RUN", help="the options that would keep 99%% of its speed")
    link = parser.add_argument_group("the link of a worker")
    link.add_argument("--link", dest="links", type=rate, nargs="+", default=RATES, metavar="RATE",
                      help="such as 200mbit; several for a table")
    link.add_argument("--rtt", type=seconds, default=0.0, metavar="TIME", help="round trip, such as 80ms")
    link.add_argument("--mtu", type=count(100), default=1500, help="bytes of a packet (1500)")
    link.add_argument("--no-slow-start", action="store_true",
                      help="TCP's window stays open between syncs, as BBR's does")
    link.add_argument("--ranks-own-links", action="store_true", help="each rank of a worker has such a link")
    link.add_argument("--store-link", type=rate, metavar="RATE", help="the store's own (as --link)")
    model = parser.add_argument_group("a model")
    model.add_argument("--parameters", type=count(1), help="in all, such as 1e9")
    model.add_argument("--embedding", type=count(0), default=0, help="parameters outside of the layers (0)")
    model.add_argument("--layers", type=count(1))
    model.add_argument("--step-time", type=positive_seconds, metavar="TIME", help="of computation")
    model.add_argument("--workers", type=count(1), help="(2; with --run or --plan: the run's own)")
    model.add_argument("--inner-steps", "-H", type=count(1), default=100,
                       help="H (100, the trainer's in runs of 100000 or more steps)")
    model.add_argument("--fragment-layers", type=count(0), default=3, help="(3)")
    model.add_argument("--fragment-pattern", choices=PATTERNS, default="strided", help="(strided)")
    model.add_argument("--overlap", type=count(0), default=1, help="tau (1)")
    model.add_argument("--outer-dtype", choices=BITS, default="fp4_e2m1", help="(fp4_e2m1)")
    model.add_argument("--plain-dtype", choices=("bf16", "fp32"), default="bf16", help="not quantized (bf16)")
    model.add_argument("--outer-exchange", choices=EXCHANGES,
                       help="all_to_all: without a store (auto; with --run or --plan: the run's own)")
    model.add_argument("--outer-transport", choices=("tcp", "store"),
                       help="(tcp; with --run or --plan: the run's own)")
    model.add_argument("--timing", choices=("trainer", "paper"), default="trainer",
                       help="whose model of time (trainer)")
    arguments = parser.parse_args(words)
    of_model = ("parameters", "embedding", "layers", "step_time", "inner_steps", "fragment_layers", "fragment_pattern",
                "overlap", "outer_dtype", "plain_dtype", "timing")
    parser.set_defaults(**dict.fromkeys(of_model))
    given = [name for name in of_model if getattr(parser.parse_args(words), name) is not None]
    if given and (arguments.run or arguments.plan):
        raise UserError(f"--{given[0].replace('_', '-')} is not for a measured run: leave it out (--plan tries others)")
    return arguments


def text_of(arguments):
    if arguments.paper:
        return paper_text()
    if arguments.run:
        return run_text(arguments)
    if arguments.plan:
        return plan_text(arguments)
    return general_text(arguments)


def main(words):
    arguments = parse_arguments(words)
    if arguments.plot:
        require("matplotlib")
        from simulation.figure import draw  # matplotlib takes a second to load
        draw(arguments.plot)
        print(f"wrote {arguments.plot}")
    else:
        print(text_of(arguments))


if __name__ == "__main__":
    sys.exit(exit_status(main))
