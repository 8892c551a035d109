#!/usr/bin/env python3
"""Breaks the CUDA kernels on purpose, one change at a time, and lists what the tests do not notice.

    dev/mutate.py                     a fixed selection in which each function and each kind of change occurs
    dev/mutate.py --all               every change
    dev/mutate.py --only FILE         those of one file; with --all every one
    dev/mutate.py --id ID             one change: FILE:LINE:KIND:N
    dev/mutate.py --list, --show ID   what would be changed, without a run

A change is made in a private copy of the sources; the test programs of the changed file are then compiled for
the emulator and run. It is killed if a test fails, the emulator or a sanitizer reports it, the program crashes
or exceeds its time. Changes that do not compile are not counted. What survives the plain build is tried in
those builds of `make test` that may tell more: fp32, thread sanitizer, address sanitizer.

dev/mutants.md says of known survivors why they change nothing; they still count as survivors. The status is 1
if less than 97% are killed, if a survivor is not explained there, or if what it says is not so any more.
"""
import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import queue
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
SURVIVORS = ROOT / "dev" / "mutants.md"
LEAST_KILLED = 0.97
SELECTED = 320  # changes in a run without options, if that is enough for each kind in each function
ALWAYS = {"barrier", "wait", "mask"}  # all of these kinds are in it

# What is changed: all CUDA sources that have kernels or call libraries' kernels; not the owners of streams, events
# and memory, and not communication between processes.
PATTERNS = ("llmc/cuda/*.cuh", "streaming/*.cuh")
UNCHANGED = {f"llmc/cuda/{name}.cuh" for name in ("buffer", "host_buffer", "stream", "gpu", "comm_nccl", "comm_staged")}
# Of the seam, what is not an instruction of the machine.
BEGINNINGS = {"llmc/cuda/device.cuh": "// ---- reductions"}

# Kinds that thread sanitizer may notice where results are right.
ORDERED = {"barrier", "wait", "shuffle", "index", "boundary", "loop"}


# ---- tokens, and where they stand

TOKEN = re.compile(r"""
    (?P<comment>//[^\n]*|/\*.*?\*/)
  | (?P<directive>^[ \t]*\#(?:\\\n|[^\n])*)
  | (?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
  | (?P<number>\.?\d(?:[eEpP][+-]|'?[\w.])*)
  | (?P<name>[A-Za-z_]\w*)
  | (?P<op><<=|>>=|\.\.\.|->|::|<<|>>|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|[^\s\w])
""", re.VERBOSE | re.DOTALL | re.MULTILINE)

OPEN, CLOSE = "([{", ")]}"


@dataclasses.dataclass
class Token:
    kind: str
    text: str
    begin: int
    end: int
    function: "Function | None" = None
    within: int = -1     # token that opens the innermost brackets around this one
    partner: int = -1    # of a bracket: the other one
    statement: int = 0   # the first token of its statement


@dataclasses.dataclass
class Function:
    name: str
    on_device: bool
    body: int  # token of its opening brace


def without_nvcc(source):
    """The source with what g++ does not compile, the branches of __CUDACC__, replaced by blanks."""
    lines, states = source.split("\n"), []
    for i, line in enumerate(lines):
        directive = re.match(r"\s*#\s*(if|ifdef|ifndef|elif|else|endif)\b(.*)", line)
        if directive:
            word, condition = directive[1], directive[2].strip()
            if word in ("if", "ifdef", "ifndef"):
                nvcc = re.sub(r"\s*//.*", "", condition) in ("__CUDACC__", "defined(__CUDACC__)")
                states.append((word != "ifndef") if nvcc else None)
            elif word == "else" and states[-1] is not None:
                states[-1] = not states[-1]
            elif word == "endif":
                states.pop()
        elif True in states:
            lines[i] = " " * len(line)
    return "\n".join(lines)


def tokenize(source):
    """Code tokens of C++, with brackets, statements and functions."""
    tokens = [Token(match.lastgroup, match[0], match.start(), match.end())
              for match in TOKEN.finditer(without_nvcc(source)) if match.lastgroup not in ("comment", "directive")]
    stack, statement = [], 0
    for i, token in enumerate(tokens):
        if token.text in CLOSE and token.kind == "op" and stack:
            token.partner = stack.pop()
            tokens[token.partner].partner = i
        token.within = stack[-1] if stack else -1
        token.statement = statement
        if token.text in OPEN and token.kind == "op":
            stack.append(i)
        if token.text in "{};" and not any(tokens[opened].text == "(" for opened in stack):
            statement = i + 1
    find_functions(tokens)
    return tokens


def find_functions(tokens):
    """A brace behind a parameter list, not inside a function, opens one."""
    current = None
    for i, token in enumerate(tokens):
        if current is None and token.text == "{":
            current = function_at(tokens, i)
        token.function = current
        if current and i == tokens[current.body].partner:
            current = None


def function_at(tokens, brace):
    head = tokens[tokens[brace].statement:brace]
    words = {token.text for token in head}
    if "(" not in words or tokens[brace - 1].text not in (")", "const", "noexcept", "override"):
        return None
    for before, token in zip(head, head[1:]):
        if token.text == "(" and before.kind == "name" and token.within == tokens[brace].within and \
                before.text not in ("__launch_bounds__", "alignas", "__align__", "noexcept", "decltype"):
            name = "operator()" if before.text == "operator" else before.text
            return Function(name, bool(words & {"__global__", "__device__", "HD"}), brace)
    return None


# ---- changes

@dataclasses.dataclass(frozen=True)
class Change:
    file: str
    kind: str
    function: str
    begin: int
    end: int
    text: str      # instead of source[begin:end]
    id: str = ""
    was: str = ""      # the lines that it touches, before and after
    becomes: str = ""


FLOAT_TYPES = {"float", "floatX", "double", "__nv_bfloat16", "bf16"}
FLOAT_CALLS = {"float", "double", "floatX", "fmaf", "fma", "sqrtf", "rsqrtf", "expf", "exp2f", "logf", "log2f", "__expf",
               "fmaxf", "fminf", "fabsf", "warp_sum", "warp_max", "block_sum", "block_max", "__logf", "tanhf"}
COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&"}
SWAPPED = {"min": "max", "max": "min", "fminf": "fmaxf", "fmaxf": "fminf", "block_sum": "block_max",
           "block_max": "block_sum", "warp_sum": "warp_max", "warp_max": "warp_sum"}
LEAVING = {"return", "continue", "break"}


class Source:
    """A file and the changes that can be made to it."""

    def __init__(self, file, source):
        self.file, self.source = file, source
        self.tokens = tokenize(source)
        self.changes = []
        self.first = source.find(BEGINNINGS[file]) if file in BEGINNINGS else 0
        self.floats, self.float_arrays = self.float_names()
        for i, token in enumerate(self.tokens):
            if token.begin >= self.first and self.may_change(i):
                self.visit(i)
        self.changes = self.with_ids()

    # -- reading tokens

    def text(self, i):
        return self.tokens[i].text if 0 <= i < len(self.tokens) else ""

    def span(self, first, last):
        return self.source[self.tokens[first].begin:self.tokens[last].end]

    def float_names(self):
        """Names of floating-point variables, and of pointers to and arrays of them."""
        scalars, arrays = set(), set()
        for i, token in enumerate(self.tokens):
            if token.text not in FLOAT_TYPES:
                continue
            is_pack = self.text(i - 2) == "Pack"
            i += 2 if is_pack else 1
            while i < len(self.tokens):
                is_array = is_pack
                while self.text(i) in ("*", "&", "const", "__restrict__") or self.text(i) + self.text(i + 1) == "(&":
                    is_array |= self.text(i) in ("*", "(")
                    i += 1
                if self.tokens[i].kind != "name" or self.tokens[i].text in FLOAT_TYPES:
                    break
                name, i = self.text(i), i + 1
                is_array |= self.text(i) == "[" or self.text(i) + self.text(i + 1) == ")["
                (arrays if is_array else scalars).add(name)
                if self.text(self.tokens[i].within) == "(" or self.text(i) == ")":
                    break  # the next parameter has a type of its own
                i = self.end_of_declarator(i)
                if self.text(i) != ",":
                    break
                i += 1
        return scalars - arrays, arrays

    def end_of_declarator(self, i):
        """The comma or semicolon behind an initializer."""
        while i < len(self.tokens) - 1 and self.text(i) not in (",", ";", ")", "}"):
            i = self.tokens[i].partner + 1 if self.text(i) in OPEN and self.tokens[i].partner > i else i + 1
        return i

    def operand_before(self, i):
        """The first token of the operand that ends at i: a name with its calls, subscripts and members."""
        while True:
            if self.text(i) in CLOSE:
                i = self.tokens[i].partner
                if self.tokens[i - 1].kind == "name" or self.text(i - 1) in ("]", ")"):
                    i -= 1
                    continue
            if self.text(i - 1) in (".", "->", "::"):
                i -= 2
                continue
            return i

    def operand_after(self, i):
        """The last token of the operand that begins at i."""
        while self.text(i) in ("-", "*", "&", "!", "~"):
            i += 1
        if self.text(i) in OPEN:
            i = self.tokens[i].partner
        while True:
            if self.text(i + 1) in ("(", "[", "{") and self.text(i) != ")" or self.text(i + 1) == "[":
                i = self.tokens[i + 1].partner
            elif self.text(i + 1) in (".", "->", "::"):
                i += 2
            elif self.text(i + 1) == "<" and not self.is_spaced(i + 1):
                i = next(j for j in range(i + 1, len(self.tokens)) if self.text(j) == ">")
            else:
                return i

    def is_float(self, first, last):
        """Whether an operand is a floating-point value, as far as its text tells."""
        token = self.tokens[first]
        if token.kind == "number":
            return not token.text.startswith("0x") and ("." in token.text or token.text.endswith("f"))
        if token.text in ("-", "*"):
            return self.is_float(first + 1, last)
        if token.text == "(" and token.partner == last:
            return any(self.is_float(j, j + 3 if self.text(j + 1) == "[" else j) for j in range(first + 1, last))
        if token.text in FLOAT_CALLS and self.text(first + 1) == "(":
            return True
        if token.text in ("INFINITY", "NAN", "FLT_MAX") or token.text in self.floats:
            return True
        return token.text in self.float_arrays and "[" in [self.text(j) for j in range(first, last + 1)]

    def statement_words(self, i):
        words, first = set(), self.tokens[i].statement
        for j in range(first, len(self.tokens)):
            if self.tokens[j].statement != first:
                break
            words.add(self.text(j))
        return words

    def enclosing(self, i):
        """Openers of the brackets around token i, innermost first."""
        while self.tokens[i].within >= 0:
            i = self.tokens[i].within
            yield i

    def may_change(self, i):
        """Not: declarations outside of functions, what is checked by the compiler, texts of errors."""
        token = self.tokens[i]
        if token.function is None:
            return token.text == "INFINITY" or token.kind == "number" and self.is_float(i, i)
        if i <= token.function.body or token.kind == "string":
            return False
        if self.text(token.statement) in ("static_assert", "using", "throw", "template", "SHARED"):
            return False
        callers = [self.text(opener - 1) for opener in self.enclosing(i)]
        return not set(callers) & {"static_assert", "require_aligned", "invalid_argument", "runtime_error", "sizeof"}

    # -- changes by token

    def add(self, kind, first, last, text):
        """Replaces tokens first to last."""
        begin, end = self.tokens[first].begin, self.tokens[last].end
        function = self.tokens[first].function
        if self.source[begin:end] != text:
            self.changes.append(Change(self.file, kind, function.name if function else "constants", begin, end, text))

    def visit(self, i):
        token = self.tokens[i]
        if token.kind == "name":
            self.visit_name(i)
        elif token.kind == "number":
            self.visit_number(i)
        elif token.text in COMPARISONS and self.is_spaced(i):
            self.visit_comparison(i)
        elif token.text == "?":
            self.visit_ternary(i)
        elif token.text in ("=", "+=", "-=", "*="):
            self.visit_assignment(i)
        elif token.text in ("+", "-", "*", "/", "%", "&", "|", "^", "<<", ">>") and self.is_spaced(i):
            self.visit_arithmetic(i)

    def is_spaced(self, i):
        """A binary operator, and no template's bracket: the sources are formatted."""
        token = self.tokens[i]
        return self.source[token.begin - 1].isspace() and self.source[token.end].isspace()

    def visit_name(self, i):
        word = self.text(i)
        if word in ("true", "false"):
            self.add("launch" if not self.tokens[i].function.on_device else "boundary", i, i,
                     "false" if word == "true" else "true")
        elif word in ("if", "while") and self.text(i + 1) == "(":
            self.visit_condition(i)
        elif word == "for" and self.text(i + 1) == "(":
            self.visit_loop(i)
        elif word == "Grid" and self.text(i + 1) == "{":
            self.visit_grid(i + 1)
        elif word == "dim3":
            self.visit_blocks(self.argument_spans(i + 1 if self.text(i + 1) == "(" else i + 2))
        elif word in ("CUBLAS_OP_N", "CUBLAS_OP_T"):
            self.add("launch", i, i, "CUBLAS_OP_T" if word == "CUBLAS_OP_N" else "CUBLAS_OP_N")
        elif word.startswith("CUBLASLT_EPILOGUE_") and word != "CUBLASLT_EPILOGUE_DEFAULT":
            self.add("launch", i, i, "CUBLASLT_EPILOGUE_DEFAULT")
        elif word == "INFINITY" and self.text(i - 1) == "-":
            self.add("init", i - 1, i, "0.0f")
        elif word == "FLT_MAX" and self.text(i - 1) == "-":
            self.add("init", i - 1, i, "0.0f")
        elif self.text(i + 1) == "(" or word == "copy_async_wait":
            self.visit_call(i)

    def visit_call(self, i):
        word = self.text(i)
        if word == "copy_async_wait":
            close = next(j for j in range(i, len(self.tokens)) if self.text(j) == "(")
            groups = self.span(i + 2, close - 2)
            self.add("wait", i, self.tokens[close].partner, f"copy_async_wait<({groups}) + 1>()")
            self.add("wait", i, self.tokens[close].partner, "")
            return
        last = self.tokens[i + 1].partner
        if word in ("__syncthreads", "__syncwarp", "sync_threads"):
            self.add("barrier", i, last, "")
        elif word == "copy_async_commit":
            self.add("wait", i, last, "")
        elif word.startswith("__shfl_"):
            self.add("shuffle", i, last, self.arguments(i + 1)[1])
        elif word in ("shuffle_xor", "warp_reduce", "block_reduce", "warp_sum", "warp_max", "block_sum", "block_max"):
            self.add("shuffle", i, last, f"({self.arguments(i + 1)[0]})")
            if word.startswith("block_"):
                self.add("shuffle", i, i, word.replace("block_", "warp_"))
        if word in SWAPPED and not self.is_only_speed(i):
            self.add("minmax", i, i, SWAPPED[word])

    def arguments(self, opener):
        """Texts of what stands between brackets, separated by commas."""
        return [self.span(first, last) for first, last in self.argument_spans(opener)]

    def argument_spans(self, opener):
        spans, first = [], opener + 1
        for j in range(opener + 1, self.tokens[opener].partner + 1):
            if j == self.tokens[opener].partner or self.text(j) == "," and self.tokens[j].within == opener:
                if j > first:
                    spans.append((first, j - 1))
                first = j + 1
        return spans

    def visit_grid(self, brace):
        """Fewer blocks, less shared memory."""
        spans = self.argument_spans(brace)
        if self.text(spans[0][0]) != "dim3":
            self.visit_blocks(spans[:1])
        if len(spans) > 2 and self.tokens[spans[2][0]].kind != "number":
            first, last = spans[2]
            self.add("launch", first, last, f"({self.span(first, last)}) / 2")

    def visit_blocks(self, spans):
        for first, last in spans:
            if self.tokens[first].kind != "number":
                self.add("launch", first, last, f"{self.span(first, last)} - 1")

    def is_only_speed(self, i):
        """On the host: how many threads a block has; any number does."""
        token = self.tokens[i]
        if token.function is None or token.function.on_device:
            return False
        grid = next((opener for opener in self.enclosing(i) if self.text(opener - 1) == "Grid"), None)
        if grid is not None:
            first, last = self.argument_spans(grid)[1]
            return first <= i <= last
        words = [self.text(j) for j in range(token.statement, i)]
        declared = words[:words.index("=")] if "=" in words else []
        return any(re.fullmatch(r"\w*(threads|warps)", word) for word in [token.function.name, *declared])

    def visit_number(self, i):
        token = self.tokens[i]
        if self.is_float(i, i):
            value = float(token.text.rstrip("fF"))
            kind = "init" if value == 0 else "scale"
            self.add(kind, i, i, "1.0f" if value not in (1.0,) else "2.0f")
        elif self.text(i - 1) == "[" and self.text(i + 1) == "]" and token.text in ("0", "1") and \
                self.text(self.tokens[i].statement) not in FLOAT_TYPES:
            self.add("index", i, i, "1" if token.text == "0" else "0")

    def visit_comparison(self, i):
        if self.loop_part(i) == 1 and not self.counts_by_one(i):
            return  # of such a loop, rounds are skipped
        if self.is_check(i):
            return
        self.add(self.guard_kind(i), i, i, COMPARISONS[self.text(i)])

    def guard_kind(self, i):
        words = self.statement_words(i)
        masks = "INFINITY" in words or any("causal" in word or "mask" in word for word in words)
        return "mask" if masks else "boundary"

    def condition_of(self, i):
        """The if or while in whose condition token i stands."""
        return next((opener - 1 for opener in self.enclosing(i) if self.text(opener - 1) in ("if", "while")), None)

    def is_check(self, i):
        condition = self.condition_of(i)
        return condition is not None and self.body_word(condition) == "throw"

    def body_word(self, condition):
        close = self.tokens[condition + 1].partner
        return self.text(close + 2) if self.text(close + 1) == "{" else self.text(close + 1)

    def visit_condition(self, i):
        first, last = i + 2, self.tokens[i + 1].partner - 1
        if self.text(i) == "while":
            return
        word = self.body_word(i)
        if word == "throw":
            self.add("check", first, last, "false")
            return
        close = self.tokens[i + 1].partner
        has_else = self.text(close + 1) == "{" and self.text(self.tokens[close + 1].partner + 1) == "else"
        kind = self.guard_kind(i)
        if word not in LEAVING:
            self.add(kind, first, last, "true")
        if not has_else:
            self.add(kind, first, last, "false")

    def visit_ternary(self, i):
        first = i - 1
        while first > 0 and self.text(first - 1) not in ("=", "(", "[", "{", ",", ";", "}", "return", "?", ":", "+=",
                                                         "-=", "*="):
            first -= 1
            if self.text(first) in CLOSE:
                first = self.tokens[first].partner
        self.add(self.guard_kind(i), first, i - 1, "true")
        self.add(self.guard_kind(i), first, i - 1, "false")

    def visit_assignment(self, i):
        if self.loop_part(i) is not None:
            return
        operator, statement = self.text(i), self.tokens[i].statement
        words = [self.text(j) for j in range(statement, i)]
        if operator == "+=":
            self.add("init", i, i, "=")
        elif operator == "-=":
            self.add("init", i, i, "+=")
        elif operator == "*=":
            self.add("init", i, i, "=")
        elif words[:1] == ["const"] and "bool" in words[:2] or words[:1] == ["bool"]:
            self.add("boundary", i + 1, self.end_of_declarator(i + 1) - 1, "true")
        elif set(words[:2]) & FLOAT_TYPES and self.text(i + 1) == "0" and self.text(i + 2) in (",", ";"):
            self.add("init", i + 1, i + 1, "1")
        elif self.text(i + 1) == "{":
            if words[:1] != ["const"] and self.text(i + 2) == "}" and self.text(self.operand_before(i - 1)) in \
                    self.float_arrays:
                self.add("init", i + 1, i + 2, "{1.0f}")
        elif self.is_store(i, words):
            self.add("init", i, i, "+=")

    def is_store(self, i, words):
        """Of a number to memory or to an array, on the device; not a declaration, and nothing that has no +=."""
        if not self.tokens[i].function.on_device or \
                self.tokens[i].within != self.tokens[self.tokens[i].statement].within:
            return False
        stores = words[-1:] == ["]"] and words[0] not in FLOAT_TYPES | {"const", "int", "auto"} or \
            words[:1] == ["*"] and words[1] in self.float_arrays
        return stores and not self.text(i + 1).startswith(("load_pack", "make_"))

    def visit_arithmetic(self, i):
        if self.loop_part(i) == 2 or self.is_check(i) or self.text(i - 1) in (")", "]", "}") and \
                self.tokens[i - 1].partner < 0:
            return
        if self.tokens[i - 1].text in FLOAT_TYPES | {"const", "return", "(", ","}:
            return  # a unary operator, or a pointer's declaration
        if self.is_only_speed(i) or "string" in (self.tokens[i - 1].kind, self.tokens[i + 1].kind):
            return
        left, right = self.operand_before(i - 1), self.operand_after(i + 1)
        on_device = self.tokens[i].function.on_device
        is_float = self.is_float(left, i - 1) or self.is_float(i + 1, right)
        kind = "scale" if is_float else "index" if on_device else "launch"
        operator = self.text(i)
        if operator == "*":
            self.add(kind, i, right, "")
        elif operator == "-" and not on_device and self.text(i + 1) == "1":
            return  # of a division that rounds up: one block more, which does nothing
        elif operator in "+-":
            self.add(kind, i, i, "-" if operator == "+" else "+")
        elif operator == "/" and is_float:
            self.add(kind, i, i, "*")
        elif operator in "/%":
            self.add(kind, i, i, "%" if operator == "/" else "/")
            if self.tokens[i + 1].kind == "number" and right == i + 1:
                number = int(self.text(i + 1).rstrip("uUlL"))  # on the host: fewer blocks, not more
                self.add(kind, i + 1, i + 1, str(number // 2 if on_device else number * 2))
        else:
            self.add(kind, i, i, {"&": "|", "|": "&", "^": "|", "<<": ">>", ">>": "<<"}[operator])

    # -- loops

    def loop_part(self, i):
        """0, 1, 2 in the beginning, condition, step of a for loop; else None."""
        opener = self.tokens[i].within
        if opener < 1 or self.text(opener - 1) != "for":
            return None
        return sum(self.text(j) == ";" and self.tokens[j].within == opener for j in range(opener, i))

    def loop_semicolons(self, opener):
        return [j for j in range(opener, self.tokens[opener].partner)
                if self.text(j) == ";" and self.tokens[j].within == opener]

    def loop_step(self, opener):
        """(variable, operator, step, its last token) of a for loop's first step, or None."""
        semicolons = self.loop_semicolons(opener)
        if len(semicolons) != 2:
            return None
        first = semicolons[1] + 1
        last = next(j for j in range(first, len(self.tokens)) if j == self.tokens[opener].partner or
                    self.text(j) == "," and self.tokens[j].within == opener) - 1
        if self.text(last) in ("++", "--"):
            return self.text(first), self.text(last)[0] + "=", "1", last
        if self.text(first + 1) in ("+=", "-=", "/=", "*=", ">>=", "<<="):
            return self.text(first), self.text(first + 1), self.span(first + 2, last), last
        return None

    def counts_by_one(self, i):
        step = self.loop_step(self.tokens[i].within)
        return step is None or step[1:3] in (("+=", "1"), ("-=", "1"))

    def visit_loop(self, i):
        """The first round skipped, the last one, every second one."""
        opener = i + 1
        step = self.loop_step(opener)
        if step is None:
            return
        variable, operator, amount, step_end = step
        first_semicolon, second = self.loop_semicolons(opener)
        start = next((j for j in range(opener, first_semicolon)
                      if self.text(j) == variable and self.text(j + 1) == "="), None)
        if start is not None:
            last = self.end_of_declarator(start + 2) - 1
            self.add("loop", start + 2, last, f"({self.span(start + 2, last)}) {operator[:-1]} ({amount})")
        comparison = next((j for j in range(first_semicolon, second) if self.text(j) in ("<", "<=", ">", ">=") and
                           self.is_spaced(j) and self.tokens[j].within == opener), None)
        if comparison is not None:
            end = self.span(comparison + 1, second - 1)
            if operator in ("+=", "-="):
                opposite = "-" if operator == "+=" else "+"
                self.add("loop", comparison + 1, second - 1, f"({end}) {opposite} ({amount})")
            elif operator in ("/=", ">>="):
                self.add("loop", comparison + 1, second - 1, f"({end}) + 1")
        twice = f"{variable} {operator} " + (f"2 * ({amount})" if operator not in ("/=", "*=") else f"{amount} * {amount}")
        self.add("loop", second + 1, step_end, twice)

    # -- names for changes

    def with_ids(self):
        """Sorted by place, numbered within a line and kind; those that change nothing or the same thing dropped."""
        named, seen, numbers = [], set(), {}
        for change in sorted(self.changes, key=lambda change: (change.begin, change.end, change.kind, change.text)):
            if (change.begin, change.end, change.text) in seen:
                continue
            seen.add((change.begin, change.end, change.text))
            line = self.source.count("\n", 0, change.begin) + 1
            number = numbers[line, change.kind] = numbers.get((line, change.kind), 0) + 1
            begin = self.source.rfind("\n", 0, change.begin) + 1
            end = self.source.find("\n", change.end)
            was = self.source[begin:end]
            becomes = self.source[begin:change.begin] + change.text + self.source[change.end:end]
            named.append(dataclasses.replace(change, id=f"{change.file}:{line}:{change.kind}:{number}",
                                             was=one_line(was), becomes=one_line(becomes)))
        return named


def one_line(text):
    return " ".join(text.split())


def changed(source, change):
    return source[:change.begin] + change.text + source[change.end:]


def selection(changes, count):
    """About `count` of them: of each function and kind at least one, and an even spread of the others."""
    groups = {}
    for change in changes:
        groups.setdefault((change.file, change.function, change.kind), []).append(change)

    def spread(fraction):
        chosen = []
        for group in groups.values():
            some = len(group) if group[0].kind in ALWAYS else max(1, int(len(group) * fraction))
            chosen += [group[int((i + 0.5) * len(group) / some)] for i in range(some)]
        return chosen

    thousandths = max((f for f in range(1001) if len(spread(f / 1000)) <= count), default=0)
    return spread(thousandths / 1000)


# ---- builds and runs

# What most tests include, compiled once. Nothing of it is changed.
PRELUDE = """#include <gtest/gtest.h>
#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>
#include "dev/emulator/emulator.h"
"""


class Failure(Exception):
    """What keeps the tool from telling anything."""


@dataclasses.dataclass
class Program:
    """One test program in one build, unchanged: how it is made, and what it takes."""
    compile: list
    link: list
    seconds: float      # of the processor, for a run
    passed: bool


class Tree:
    """A private copy of the sources, and the unchanged programs built in it."""

    def __init__(self, folder, root=ROOT):
        self.folder = pathlib.Path(folder)
        for part in ("Makefile", "llmc", "streaming", "dev", "train_gpt.cu", "test_gpt.cu"):
            if (root / part).is_dir():
                shutil.copytree(root / part, self.folder / part,
                                ignore=shutil.ignore_patterns("results", "__pycache__", "*.png"))
            elif (root / part).exists():
                shutil.copy(root / part, self.folder / part)
        (self.folder / ".venv").symlink_to(root / ".venv")
        self.programs, self.built, self.lock = {}, set(), threading.Lock()

    def files(self):
        found = [path.relative_to(self.folder).as_posix() for pattern in PATTERNS for path in self.folder.glob(pattern)]
        return sorted(set(found) - UNCHANGED)

    def read(self, file):
        return (self.folder / file).read_text()

    def covering(self, file):
        """The test programs of a file: those with its name, test_NAME or test_NAME_*, else those that include it,
        else those of the files that include it."""
        tests = sorted((self.folder / "dev/test/kernels").glob("test_*.cpp"))
        stem = pathlib.Path(file).stem
        named = [test.stem for test in tests if re.fullmatch(rf"test_{stem}(_\w+)?", test.stem)]
        including = [test.stem for test in tests if f'#include "{file}"' in test.read_text()]
        if named or including:
            return named or including
        users = [user for user in self.files() if f'#include "{file}"' in self.read(user)]
        if not users:
            raise Failure(f"no test in dev/test/kernels is named after {file} or includes it")
        return sorted({test for user in users for test in self.covering(user)})

    def program(self, build, name):
        """Built and run once without a change; at most one at a time."""
        with self.lock:
            if (build, name) not in self.programs:
                self.programs[build, name] = self.make_program(build, name)
            return self.programs[build, name]

    def make_program(self, build, name):
        goal = f"build/{build}/{name}"
        dry = subprocess.run(["make", "-n", "-B", "--no-print-directory", "OPTIMIZE=-O1", goal], cwd=self.folder,
                             capture_output=True, text=True)
        if dry.returncode != 0:
            raise Failure(f"make {goal}: {dry.stderr.strip()}")
        own_compile = link = None
        for line in dry.stdout.splitlines():
            words = shlex.split(line)
            if f"{goal}.o" in words and "-c" in words:
                own_compile = words
            elif goal in words:
                link = words
            elif line not in self.built:
                self.must(words, self.folder)
                self.built.add(line)
        prelude = self.prelude(build, own_compile)
        own_compile = own_compile[:1] + ["-w", "-include", prelude] + own_compile[1:]
        self.must(own_compile, self.folder)
        self.must(link, self.folder)
        began = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = run([self.folder / goal, *TEST_OPTIONS], self.folder, 300)
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
        return Program(own_compile, link, max(seconds, 0.1), result.status == 0)

    def prelude(self, build, compile_command):
        header = self.folder / "build" / build / "prelude.h"
        if not header.exists():
            header.write_text(PRELUDE)
            flags = compile_command[:compile_command.index("-c")]
            self.must(flags + ["-w", "-x", "c++-header", str(header), "-o", f"{header}.gch"], self.folder)
        return str(header)

    @staticmethod
    def must(command, folder):
        result = subprocess.run([str(word) for word in command], cwd=folder, capture_output=True, text=True)
        if result.returncode != 0:
            raise Failure(f"{shlex.join(map(str, command))}\n{result.stdout[-2000:]}{result.stderr[-4000:]}")


# The first failure ends the program.
TEST_OPTIONS = ["--gtest_break_on_failure", "--gtest_fail_fast", "--gtest_brief=1"]


@dataclasses.dataclass
class Result:
    status: int
    output: str
    timed_out: bool


def run(command, folder, cpu_seconds):
    """Runs a program in a process group of its own: at most so many seconds of a processor, and ten times as many
    on the clock, as the machine may be busy."""
    def limits():
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_seconds) + 1, int(cpu_seconds) + 2))

    process = subprocess.Popen([str(word) for word in command], cwd=folder, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=limits)
    try:
        output, timed_out = process.communicate(timeout=10 * cpu_seconds + 10)[0], False
    except subprocess.TimeoutExpired:
        output, timed_out = b"", True
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    timed_out |= process.returncode == -signal.SIGXCPU
    return Result(process.returncode, output.decode(errors="replace"), timed_out)


@dataclasses.dataclass
class Verdict:
    change: Change
    outcome: str    # killed, survived or not compiled
    by: str = ""    # build and program: how


class Mutator:
    """Makes changes, each in a folder that lies before the sources on the include path."""

    def __init__(self, tree, jobs):
        self.tree, self.slots = tree, queue.Queue()
        for i in range(jobs):
            slot = tree.folder / f"slot{i}"
            slot.mkdir()
            self.slots.put(slot)

    def try_change(self, change):
        slot = self.slots.get()
        mutant = slot / change.file
        try:
            mutant.parent.mkdir(parents=True, exist_ok=True)
            mutant.write_text(changed(self.tree.read(change.file), change))
            return self.verdict(change, slot)
        finally:
            mutant.unlink()
            self.slots.put(slot)

    def verdict(self, change, slot):
        builds = ["plain", "fp32"] + (["thread"] if change.kind in ORDERED else []) + ["address"]
        for build in builds:
            for name in self.tree.covering(change.file):
                how = self.kill(build, name, slot)
                if how == "not compiled" and build == "plain":
                    return Verdict(change, how)
                if how and how != "not compiled":  # by another build alone, that is no mistake to notice
                    return Verdict(change, "killed", f"{build} {name}: {how}")
        return Verdict(change, "survived")

    def kill(self, build, name, slot):
        """How one program notices the change in the slot, or nothing."""
        program = self.tree.program(build, name)
        if not program.passed:
            raise Failure(f"build/{build}/{name} fails without a change")
        goal = f"build/{build}/{name}"
        moved = {f"{goal}.o": str(slot / "test.o"), goal: str(slot / "test")}
        for command in (program.compile[:1] + [f"-I{slot}"] + program.compile[1:], program.link):
            command = [moved.get(word, word) for word in command]
            made = subprocess.run(command, cwd=self.tree.folder, capture_output=True, text=True)
            if made.returncode == 0:
                continue
            if "-c" in command and "error:" in made.stderr and "fatal error:" not in made.stderr:
                return "not compiled"
            raise Failure(f"build/{build}/{name} cannot be built with a change: {made.stderr[-500:]}")
        result = run([slot / "test", *TEST_OPTIONS], self.tree.folder, 5 * program.seconds + 2)
        return how_it_ended(result)


def how_it_ended(result):
    if result.status == 0:
        return ""
    if result.timed_out:
        return "time"
    for sign, how in (("Sanitizer", "sanitizer"), ("runtime error:", "sanitizer"), ("in kernel", "emulator's report"),
                      ("Failure", "test")):
        if sign in result.output:
            return how
    return "crash"


# ---- the report

@dataclasses.dataclass
class Explanation:
    """Of a survivor, by the text of its lines: their numbers may change."""
    file: str
    was: str
    becomes: str
    reason: str

    def is_of(self, change):
        return (self.file, self.was, self.becomes) == (change.file, change.was, change.becomes)


def read_explanations(text):
    """Paragraphs that begin with `FILE`: REASON, each followed by the changes it is about, as difference() has them."""
    found, file, reason, was = [], None, "", None
    for paragraph in re.split(r"\n\s*\n", text):
        start = re.match(r"`([^`]+)`:\s*(.*)", paragraph, re.DOTALL)
        if start:
            file, reason = start[1], one_line(start[2])
        for line in paragraph.splitlines():
            if line.startswith("    - "):
                was = one_line(line[6:])
            elif line.startswith("    +"):
                found.append(Explanation(file, was, one_line(line[5:]), reason))
    return found


def difference(change):
    return f"    - {change.was}\n    + {change.becomes}"


def table(verdicts, key, title):
    """Lines: changes, killed, survived and percentage by `key`."""
    rows = {}
    for verdict in verdicts:
        for name in (key(verdict.change), "all"):
            rows.setdefault(name, []).append(verdict.outcome)
    rows["all"] = rows.pop("all")
    width = max(len(name) for name in (*rows, title))
    lines = [f"{title:{width}}  changes  killed  survived  killed, %"]
    for name, outcomes in rows.items():
        killed, survived = outcomes.count("killed"), outcomes.count("survived")
        lines.append(f"{name:{width}}  {killed + survived:7}  {killed:6}  {survived:8}  "
                     f"{100 * killed / max(1, killed + survived):9.1f}")
    return "\n".join(lines)


def report(verdicts, survivors, all_changes):
    """Prints what came of it; whether it is as it should be."""
    ok = True
    survived = [verdict.change for verdict in verdicts if verdict.outcome == "survived"]
    for change in survived:
        reason = next((entry.reason for entry in survivors if entry.is_of(change)), None)
        ok &= reason is not None
        print(f"\n{change.id} in {change.function} survived: {reason or 'NOT EXPLAINED'}\n{difference(change)}")
    killed = [verdict.change for verdict in verdicts if verdict.outcome == "killed"]
    for entry in survivors:
        matching = [change for change in all_changes if entry.is_of(change)]
        where = f"{SURVIVORS.name}: {entry.file}: {entry.becomes}"
        if not matching:
            print(f"\n{where}: the file has no such change any more")
            ok = False
        elif all(change in killed for change in matching):
            print(f"\n{where}: is said to survive, and was killed")
            ok = False
    print()
    print(table(verdicts, lambda change: change.kind, "kind"))
    print()
    print(table(verdicts, lambda change: change.file, "file"))
    broken = [verdict for verdict in verdicts if verdict.outcome == "not compiled"]
    print(f"\nnot counted, as they do not compile: {len(broken)}")
    share = len(killed) / max(1, len(killed) + len(survived))
    if share < LEAST_KILLED:
        print(f"fewer than {100 * LEAST_KILLED:.0f}% were killed: {100 * share:.1f}%")
        ok = False
    return ok


def mutate(tree, changes, jobs, verbose):
    """Verdicts in the order of the changes; the survivors' are printed at once."""
    mutator = Mutator(tree, jobs)
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        verdicts = []
        try:
            for i, verdict in enumerate(pool.map(mutator.try_change, changes), 1):
                verdicts.append(verdict)
                if verbose or verdict.outcome == "survived":
                    print(f"[{i}/{len(changes)}, {time.monotonic() - began:.0f} s] {verdict.change.id}: "
                          f"{verdict.outcome} {verdict.by}\n{difference(verdict.change)}", flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    print(f"\n{len(changes)} changes in {time.monotonic() - began:.0f} s, {jobs} at a time")
    return verdicts


def options():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--all", action="store_true", help="every change")
    parser.add_argument("--only", metavar="FILE", action="append", help="changes of this file alone")
    parser.add_argument("--id", metavar="ID", action="append", help="this change alone")
    parser.add_argument("--list", action="store_true", help="list the changes, without a run")
    parser.add_argument("--show", metavar="ID", help="show one change, without a run")
    parser.add_argument("--jobs", type=int, default=2, help="programs at a time (default 2)")
    parser.add_argument("--verbose", action="store_true", help="print each verdict")
    return parser.parse_args()


def chosen(arguments, changes):
    if arguments.id or arguments.show:
        wanted = set(arguments.id or []) | {arguments.show} - {None}
        unknown = wanted - {change.id for change in changes}
        if unknown:
            raise Failure(f"there is no change {', '.join(sorted(unknown))}: --list shows them")
        return [change for change in changes if change.id in wanted]
    if arguments.only:
        unknown = set(arguments.only) - {change.file for change in changes}
        if unknown:
            raise Failure(f"nothing is changed in {', '.join(sorted(unknown))}")
    some = changes if arguments.all else selection(changes, SELECTED)
    return [change for change in some if change.file in (arguments.only or change.file)]


def main():
    arguments = options()
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        tree = Tree(folder)
        changes = [change for file in tree.files() for change in Source(file, tree.read(file)).changes]
        try:
            some = chosen(arguments, changes)
            if arguments.list or arguments.show:
                for change in some:
                    print(f"{change.id} in {change.function}" + f"\n{difference(change)}")
                return 0
            verdicts = mutate(tree, some, arguments.jobs, arguments.verbose)
        except Failure as failure:
            print(f"error: {failure}", file=sys.stderr)
            return 2
        return 0 if report(verdicts, read_explanations(SURVIVORS.read_text()), changes) else 1


if __name__ == "__main__":
    sys.exit(main())
