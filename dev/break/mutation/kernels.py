"""Changes to kernels and to their launches."""
import re

from mutation.source import CLOSE, OPEN, Source

ALWAYS = {"barrier", "wait", "mask"}  # a selection contains all changes of these kinds

# Where the changes to a file begin: in the device seam, after the machine's own instructions.
BEGINNINGS = {"llmc/cuda/device.cuh": "// ---- reductions"}

FLOAT_TYPES = {"float", "floatX", "double", "__nv_bfloat16", "bf16"}
FLOAT_CALLS = {"float", "double", "floatX", "fmaf", "fma", "sqrtf", "rsqrtf", "expf", "exp2f", "logf", "log2f", "__expf",
               "fmaxf", "fminf", "fabsf", "warp_sum", "block_sum", "block_max", "__logf", "tanhf"}
COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&"}
SWAPPED = {"min": "max", "max": "min", "fminf": "fmaxf", "fmaxf": "fminf", "block_sum": "block_max",
           "block_max": "block_sum"}
LEAVING = {"return", "continue", "break"}


class KernelSource(Source):
    """A CUDA source, and changes to its boundaries, masks, indices, scales, initial values, barriers, launches, ..."""

    def __init__(self, file, source):
        super().__init__(file, source, source.find(BEGINNINGS[file]) if file in BEGINNINGS else 0)

    def prepare(self):
        self.floats, self.float_arrays = self.float_names()

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
        """The comma or semicolon after an initializer."""
        while i < len(self.tokens) - 1 and self.text(i) not in (",", ";", ")", "}"):
            i = self.tokens[i].partner + 1 if self.text(i) in OPEN and self.tokens[i].partner > i else i + 1
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

    def may_change(self, i):
        """Not declarations outside of functions, conditions that the compiler checks, or texts of errors."""
        token = self.tokens[i]
        if token.function is None:
            return token.text == "INFINITY" or token.kind == "number" and self.is_float(i, i)
        if i <= token.function.body or token.kind == "string":
            return False
        if self.text(token.statement) in ("static_assert", "using", "throw", "template", "SHARED"):
            return False
        callers = [self.text(opener - 1) for opener in self.enclosing(i)]
        return not set(callers) & {"static_assert", "require", "invalid_argument", "runtime_error", "sizeof"}

    # -- changes by token

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
        """Whether this is a binary operator and not a template's bracket: the sources are formatted."""
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
        if word == "require":
            for condition in self.argument_spans(i + 1, "&&"):
                self.add("check", *condition, "true")
        if word in ("__syncthreads", "__syncwarp", "sync_threads"):
            self.add("barrier", i, last, "")
        elif word == "copy_async_commit":
            self.add("wait", i, last, "")
        elif word.startswith("__shfl_"):
            self.add("shuffle", i, last, self.arguments(i + 1)[1])
        elif word in ("shuffle_xor", "warp_reduce", "block_reduce", "warp_sum", "block_sum", "block_max"):
            self.add("shuffle", i, last, f"({self.arguments(i + 1)[0]})")
            if word.startswith("block_"):
                self.add("shuffle", i, i, word.replace("block_", "warp_"))
        if word in SWAPPED and not self.is_only_speed(i):
            self.add("minmax", i, i, SWAPPED[word])

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
        """Whether this, on the host, chooses the number of threads of a block, for which any number works."""
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
            return  # visit_loop skips rounds of such a loop
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
        """Whether this stores a number in memory or in an array on the device; declarations, and types without +=, do
        not count."""
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
            return  # part of a division that rounds up: the change would add a block that does nothing
        elif operator in "+-":
            self.add(kind, i, i, "-" if operator == "+" else "+")
        elif operator == "/" and is_float:
            self.add(kind, i, i, "*")
        elif operator in "/%":
            self.add(kind, i, i, "%" if operator == "/" else "/")
            if self.tokens[i + 1].kind == "number" and right == i + 1:
                number = int(self.text(i + 1).rstrip("uUlL"))  # on the host double it, for fewer blocks
                self.add(kind, i + 1, i + 1, str(number // 2 if on_device else number * 2))
        else:
            self.add(kind, i, i, {"&": "|", "|": "&", "^": "|", "<<": ">>", ">>": "<<"}[operator])

    # -- loops

    def loop_part(self, i):
        """0, 1 or 2 if token i is in the beginning, condition or step of a for loop; else None."""
        opener = self.tokens[i].within
        if opener < 1 or self.text(opener - 1) != "for":
            return None
        return sum(self.text(j) == ";" and self.tokens[j].within == opener for j in range(opener, i))

    def loop_semicolons(self, opener):
        return [j for j in range(opener, self.tokens[opener].partner)
                if self.text(j) == ";" and self.tokens[j].within == opener]

    def loop_step(self, opener):
        """(variable, operator, amount, last token) of a for loop's first step; or None."""
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
        """Skips the first round, the last one, or every second one."""
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


def selection(changes, count):
    """About `count` of the changes: at least one of each function and kind, and an even spread of the others."""
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
