"""How many clocks an SM's scheduler needs for a loop of tensor core instructions: a model of what nvcc made of it.

The warps that share a scheduler issue in order, one instruction a clock among them. An instruction waits for the
registers that it reads and writes, for its pipe, and at a barrier for its block's other warps. Copies from global
memory are taken to have arrived: the kernels request a tile one step ahead.

PIPES: clocks for which a warp's instruction keeps a pipe of the scheduler, which is 32 over the lanes a clock in
"Throughput of Native Arithmetic Instructions" (CUDA C++ Programming Guide), a quarter of the SM's for each scheduler:
fp32 64 lanes on 8.0 and 128 on 9.0, integers, comparisons and conversions to 16 bits 64, special functions 16. Shared
memory moves 128 bytes a clock for all four. mma.m16n8k16 is 4096 flops: on 8.0 at the data sheet's 2048 a clock and
SM, on 9.0 at 62.9% of 4096, the share that arXiv 2402.13499 measures for mma.sync on Hopper (wgmma reaches the peak).

LATENCIES: clocks until a result can be read, assumed: 33 is what loads from the L1 cache take (34 and 36 clocks on H100
and A100, gpu-benches) and about what published microbenchmarks find for mma.m16n8k16. They matter little, since other
warps issue meanwhile: with three quarters of them the clocks of attention's loops change by up to 10%
(kernel_figures.json has both, test_predict.py compares them). QUEUED and the choice of a warp (the last one if it can
go on, else the youngest) are those of arXiv 2503.20481.
"""
import re

PIPES = {"sm_80": {"tensor": 8.0, "fp32": 2, "int": 2, "special": 8, "uniform": 2, "none": 1},
         "sm_90": {"tensor": 4096 / (0.629 * 1024), "fp32": 1, "int": 2, "special": 8, "uniform": 2, "none": 1}}
LATENCIES = {"tensor": 33, "fp32": 4, "int": 5, "special": 20, "uniform": 10, "shared": 33, "none": 5}
QUEUED = 5  # instructions that may wait for a pipe of memory or of special functions
BYTES_A_CLOCK = 128 / 4  # of shared memory, a scheduler's share
WIDTHS = {"LDSM.16.M88.4": 512, "LDSM.16.MT88.4": 512, ".128": 512, ".64": 256}  # bytes a warp moves

FP32 = r"FFMA|FMUL|FADD|HFMA2|HMUL2|HADD2"
NO_PIPE = r"BRA|BAR|NOP|BSSY|BSYNC|DEPBAR|LDGDEPBAR|WARPSYNC|LDC|S2R|EXIT"


class Instruction:
    def __init__(self, opcode, operands):
        self.opcode = opcode
        self.pipe = pipe_of(opcode)
        registers = [expanded(text, opcode, place) for place, text in enumerate(operands)]
        stores = re.match(r"ST|BAR|BRA|LDGSTS|ISETP|FSETP", opcode)
        self.writes = set() if stores else set(registers[0]) if registers else set()
        self.registers = set().union(*registers)

    def clocks(self, architecture):
        """For which it keeps its pipe."""
        if self.pipe != "shared":
            return PIPES[architecture][self.pipe]
        if self.opcode.startswith("LDGSTS"):
            return 512 / BYTES_A_CLOCK
        return next((size for part, size in WIDTHS.items() if part in self.opcode), 128) / BYTES_A_CLOCK


def pipe_of(opcode):
    if opcode.startswith("HMMA"):
        return "tensor"
    if opcode.startswith("MUFU"):
        return "special"
    if re.match(r"LDS|STS|LDGSTS|SHFL", opcode):
        return "shared"
    if re.match(NO_PIPE, opcode):
        return "none"
    if opcode.startswith("U"):
        return "uniform"
    return "fp32" if re.match(FP32, opcode) else "int"


def width_of(opcode, place):
    """Registers of an operand, the result being operand 0."""
    if opcode.startswith("HMMA"):
        return (4, 4, 2, 4)[min(place, 3)]
    if opcode.startswith("LDSM") and place == 0:
        return 4
    if place == 0 and ".128" in opcode:
        return 4
    return 2 if ".64" in opcode and place == 0 else 1


def expanded(text, opcode, place):
    """The registers that an operand names: R12 of an mma's result is R12 to R15."""
    width = width_of(opcode, place)
    return [kind + str(int(number) + i) for kind, number in re.findall(r"\b(U?R)(\d+)\b", text) for i in range(width)]


# ---- from SASS to the instructions of one turn of a loop

def listing(lines):
    """[(opcode, operands)], with the names of labels in between."""
    found = []
    for line in lines:
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            found.append(label[1])
        elif text := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);", line):
            found.append((text[1], [part.strip() for part in text[2].split(",")]))
    return found


def loops(lines):
    """The bodies of loops, innermost or not: from a label to a branch back to it."""
    entries = listing(lines)
    places = {entry: i for i, entry in enumerate(entries) if isinstance(entry, str)}
    for end, entry in enumerate(entries):
        if not isinstance(entry, str) and entry[0].startswith("BRA"):
            target = re.search(r"\.L_x_\d+", entry[1][-1])
            if target and places.get(target[0], end) < end - 1:
                yield entries[places[target[0]]:end + 1]


def count(entries, opcode):
    return sum(not isinstance(entry, str) and entry[0].startswith(opcode) for entry in entries)


def turn(body):
    """What a turn of a loop with tensor core instructions issues where nothing is masked: a branch ahead that skips
    none of them is taken."""
    path, i = [], 0
    while i < len(body):
        entry = body[i]
        i += 1
        if isinstance(entry, str):
            continue
        path.append(entry)
        target = re.search(r"\.L_x_\d+", entry[1][-1]) if entry[0].startswith("BRA") else None
        if target and target[0] in body[i:]:
            ahead = body.index(target[0], i)
            if count(body[i:ahead], "HMMA") == 0 and count(body[i:ahead], "LDGSTS") == 0:
                i = ahead
    return [Instruction(opcode, operands) for opcode, operands in path]


def tensor_loop(lines):
    """The turn of the loop that has the most tensor core instructions, or None."""
    found = [body for body in loops(lines) if count(body, "HMMA")]
    return turn(max(found, key=lambda body: count(body, "HMMA"))) if found else None


# ---- the scheduler

def busy_clocks(instructions, architecture):
    """{pipe: clocks for which a warp's turn occupies it}, and under "issue" the clocks in which it issues."""
    busy = {"issue": float(len(instructions))}
    for one in instructions:
        busy[one.pipe] = busy.get(one.pipe, 0) + one.clocks(architecture)
    busy.pop("none", None)
    return busy


class Queues:
    """The pipes of a scheduler. Shared memory and special functions have a queue of instructions that were issued."""

    def __init__(self):
        self.free = {}                                      # pipe: from when on it is
        self.begins = {"shared": [], "special": []}         # of queued instructions: when the pipe takes them

    def takes(self, pipe, clock):
        if pipe not in self.begins:
            return self.free.get(pipe, 0) < clock + 1
        self.begins[pipe] = [begin for begin in self.begins[pipe] if begin > clock]
        return len(self.begins[pipe]) < QUEUED

    def put(self, pipe, clock, cost):
        """When the pipe begins with an instruction that is issued now."""
        begin = max(self.free.get(pipe, 0), clock)
        self.free[pipe] = begin + cost
        if pipe in self.begins:
            self.begins[pipe].append(begin)
        return begin


def clocks_of_turn(instructions, architecture, warps, warps_of_block, turns=24, latencies=None):
    """Clocks that a scheduler needs for a turn of each of its `warps`, of which `warps_of_block` wait for each other:
    the mean over the second half of so many turns."""
    latencies = latencies or LATENCIES
    costs = [(one, one.clocks(architecture), latencies[one.pipe]) for one in instructions]
    length, half = len(costs), len(costs) * warps * turns // 2
    at, ready, arrived = [0] * warps, [{} for _ in range(warps)], [0] * warps
    queues, clock, issued, last, begin = Queues(), 0, 0, 0, 0

    def can_issue(warp):
        one = costs[at[warp] % length][0]
        if one.opcode.startswith("BAR"):
            arrived[warp] = at[warp] // length + 1
            first = warp // warps_of_block * warps_of_block
            if min(arrived[first:first + warps_of_block]) < arrived[warp]:
                return False
        times = ready[warp]
        return (one.pipe == "none" or queues.takes(one.pipe, clock)) and all(
            times.get(register, 0) <= clock for register in one.registers)

    while issued < 2 * half:
        for warp in (last, *(w for w in reversed(range(warps)) if w != last)):  # greedy, then the youngest
            if can_issue(warp):
                one, cost, latency = costs[at[warp] % length]
                start = clock if one.pipe == "none" else queues.put(one.pipe, clock, cost)
                ready[warp].update(dict.fromkeys(one.writes, start + latency))
                at[warp] += 1
                issued += 1
                last = warp
                begin = clock if issued == half else begin
                break
        clock += 1
    return (clock - begin) / (turns - turns // 2)
