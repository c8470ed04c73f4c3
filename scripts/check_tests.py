#!/usr/bin/env python3
"""Checks that every test can fail: it reaches an expectation, in itself or in a function that it can see, and does not skip."""

import pathlib
import re
import sys

EXPECTATION = re.compile(r"\b(?:EXPECT|ASSERT)_\w+\(|\bADD_FAILURE\(|\bFAIL\(")
SKIP = re.compile(r"\b(?:GTEST_SKIP|GTEST_SUCCEED|SUCCEED)\(")
TEST = re.compile(r"\bTEST(?:_P|_F)?\(\s*(\w+)\s*,\s*(\w+)\s*\)\s*")
CALL = re.compile(r"\b(\w+)(?:<[^();]*>)?\(")
NAME = re.compile(r"\b\w+\b")
INCLUDE = re.compile(r'^#include "(tests/[^"]+)"', re.M)
# What may stand between the arguments of a function and its body, a lambda's included.
BEFORE_BODY = re.compile(r"\s*(?:const|noexcept|override|mutable|->\s*[\w:<>&*, ]+)*\s*\{")
LAMBDA = re.compile(r"\b(\w+) = \[[^\]]*\]\s*")
# They run the test's own code and complain only if it throws.
RUNNERS = {"on_mesh", "on_ranks", "on_threads", "each_rank", "run_ranks"}
# Tests of what runs tests.
EXEMPT = {"tests/checks/failing_tests.cpp"}


def without_texts(text):
    """The source without comments and contents of literals, which may hold any bracket."""
    text = re.sub(r'R"(\w*)\(.*?\)\1"', '""', text, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r'"(?:\\.|[^"\\\n])*"', '""', text)
    return re.sub(r"'(?:\\.|[^'\\\n])'", "' '", text)


def end_of(text, at):
    """The place after the bracket that closes the one at `at`."""
    depth = 0
    for place in range(at, len(text)):
        depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place + 1
    return len(text)


def functions_in(text):
    """(name, body) of everything that looks like a function or a named lambda."""
    for match in CALL.finditer(text):
        body = BEFORE_BODY.match(text, end_of(text, match.end() - 1))
        if body and match[1] not in {"if", "for", "while", "switch", "catch", "TEST", "TEST_P", "TEST_F"}:
            yield match[1], text[body.end() - 1:end_of(text, body.end() - 1)]
    for match in LAMBDA.finditer(text):
        at = end_of(text, match.end()) if text[match.end():match.end() + 1] == "(" else match.end()
        if body := BEFORE_BODY.match(text, at):
            yield match[1], text[body.end() - 1:end_of(text, body.end() - 1)]


class Sources:
    def __init__(self, root):
        self.root, self.includes, self.texts, self.functions = root, {}, {}, {}
        for path in sorted((root / "tests").rglob("*")):
            if path.suffix in {".h", ".cpp"}:
                name = path.relative_to(root).as_posix()
                text = path.read_text()
                self.includes[name] = INCLUDE.findall(text)
                self.texts[name] = without_texts(text)
                self.functions[name] = list(functions_in(self.texts[name]))

    def seen_from(self, name):
        """The file, the headers of tests that it reaches, and their sources."""
        seen, new = set(), [name]
        while new:
            other = new.pop()
            if other not in seen and other in self.texts:
                seen.add(other)
                new += self.includes[other] + [re.sub(r"\.h$", ".cpp", other)]
        return seen


def reaches_expectation(body, functions):
    seen, new = set(RUNNERS), [body]
    while new:
        text = new.pop()
        if EXPECTATION.search(text):
            return True
        for name in set(NAME.findall(text)) - seen:
            seen.add(name)
            new += functions.get(name, [])
    return False


def check(root):
    sources, problems = Sources(root), []
    for name, text in sources.texts.items():
        functions = {}
        if name in EXEMPT or not TEST.search(text):
            continue
        for other in sources.seen_from(name):
            for function, body in sources.functions[other]:
                functions.setdefault(function, []).append(body)
        for match in TEST.finditer(text):
            body = text[match.end():end_of(text, match.end())]
            place = f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[1]}.{match[2]}"
            if SKIP.search(body):
                problems.append(f"{place} may skip: let it prove something wherever it runs")
            elif not reaches_expectation(body, functions):
                problems.append(f"{place} expects nothing")
    return problems


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
    problems = check(root)
    print("\n".join(problems) if problems else "tests: every one expects something")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
