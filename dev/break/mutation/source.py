"""C++ as tokens with brackets, statements and functions, and the changes that can be made to it."""
import dataclasses
import re

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
    within: int = -1     # the token that opens the innermost brackets around this one
    partner: int = -1    # a bracket's counterpart
    statement: int = 0   # the first token of this one's statement


@dataclasses.dataclass
class Function:
    name: str
    on_device: bool
    body: int  # the token of its opening brace


def without_nvcc(source):
    """The source with the parts that g++ does not compile, the branches of __CUDACC__, replaced by blanks."""
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
    """Finds functions: a brace after a parameter list, outside of a function, opens one."""
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


@dataclasses.dataclass(frozen=True)
class Change:
    file: str
    kind: str
    function: str
    begin: int
    end: int
    text: str      # replaces source[begin:end]
    id: str = ""
    was: str = ""      # the changed lines before
    becomes: str = ""  # and after the change


class Source:
    """A file and the changes to it, which visit() adds."""

    def __init__(self, file, source, first=0):
        self.file, self.source = file, source
        self.tokens = tokenize(source)
        self.changes = []
        self.prepare()
        for i, token in enumerate(self.tokens):
            if token.begin >= first and self.may_change(i):
                self.visit(i)
        self.changes = self.with_ids()

    def prepare(self):
        """Computes what has to be known of the file before its first token is visited."""

    def may_change(self, i):
        raise NotImplementedError

    def visit(self, i):
        """Adds the changes at token i."""
        raise NotImplementedError

    def text(self, i):
        return self.tokens[i].text if 0 <= i < len(self.tokens) else ""

    def span(self, first, last):
        return self.source[self.tokens[first].begin:self.tokens[last].end]

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

    def enclosing(self, i):
        """Opening tokens of the brackets around token i, innermost first."""
        while self.tokens[i].within >= 0:
            i = self.tokens[i].within
            yield i

    def add(self, kind, first, last, text):
        """Replaces tokens first to last."""
        begin, end = self.tokens[first].begin, self.tokens[last].end
        function = self.tokens[first].function
        if self.source[begin:end] != text:
            self.changes.append(Change(self.file, kind, function.name if function else "constants", begin, end, text))

    def arguments(self, opener):
        """The texts between commas inside these brackets."""
        return [self.span(first, last) for first, last in self.argument_spans(opener)]

    def argument_spans(self, opener, separator=","):
        spans, first = [], opener + 1
        for j in range(opener + 1, self.tokens[opener].partner + 1):
            if j == self.tokens[opener].partner or self.text(j) == separator and self.tokens[j].within == opener:
                if j > first:
                    spans.append((first, j - 1))
                first = j + 1
        return spans

    def with_ids(self):
        """The changes without duplicates, sorted by place and numbered within a line and kind."""
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
