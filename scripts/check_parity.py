#!/usr/bin/env python3
"""Checks docs/parity.md: every row is numbered, named, done or limited, and pinned by a test that exists; no number is missing."""

import pathlib
import re
import sys

# The rows that must stand in parity.md or limits.md: prefix, first, last.
REQUIRED = [("P", 1, 80), ("D", 1, 158), ("G", 1, 54), ("T", 1, 233)]

ROW = re.compile(r"^\|\s*([A-Z]\d{3}[a-z]?)\s*\|(.*)\|\s*$")
TEST_NAME = re.compile(r"`([^`]+)`")
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
TEST = re.compile(r"\b(TEST|TEST_F|TEST_P|TYPED_TEST|TYPED_TEST_P)\(\s*(\w+)\s*,\s*(\w+)\s*\)")
INSTANCE = re.compile(r"\bINSTANTIATE_TEST_SUITE_P\(\s*(\w*)\s*,\s*(\w+)\s*,")


def python_tests(root):
    """Class.test_name of those that ctest runs."""
    names = set()
    for path in (root / "tests/python").glob("*_test.py"):
        for suite, body in re.findall(r"^class (\w+)\(.*?$(.*?)(?=^\S|\Z)", path.read_text(), re.MULTILINE | re.DOTALL):
            names |= {f"{suite}.{name}" for name in re.findall(r"^    def (test_\w+)\(", body, re.MULTILINE)}
    return names


def known_tests(root):
    """Every Suite.Name that runs. A parametrised one counts only where its suite is instantiated, also as Prefix/Suite.Name."""
    plain, parametrised, prefixes = set(), set(), {}
    for path in sorted((root / "tests").rglob("*.cpp")):
        text = COMMENT.sub("", path.read_text())
        for macro, suite, name in TEST.findall(text):
            (parametrised if macro in {"TEST_P", "TYPED_TEST_P"} else plain).add((suite, name))
        for prefix, suite in INSTANCE.findall(text):
            prefixes.setdefault(suite, set()).add(prefix)
    names = {f"{suite}.{name}" for suite, name in plain} | python_tests(root)
    for suite, name in parametrised:
        if suite in prefixes:
            names.add(f"{suite}.{name}")
            names |= {f"{prefix}/{suite}.{name}" for prefix in prefixes[suite]}
    return names


def check_row(number, cells, tests):
    """The complaints about one row of the table."""
    if len(cells) != 3:
        return [f"{number}: has {len(cells) + 1} columns instead of 4: number, name, state, test"]
    name, state, pinned_by = cells
    problems = [] if name else [f"{number}: has no name"]
    limited = state.startswith("limited: ") and len(state) > len("limited: ")
    if state != "done" and not limited:
        problems.append(f'{number}: state is "{state}"; it must be "done" or "limited: why"')
    named = TEST_NAME.findall(pinned_by)
    if state == "done" and not named:
        problems.append(f"{number}: is done but names no test as `Suite.Name`")
    problems += [f"{number}: test {test} does not exist in tests/" for test in named if test not in tests]
    return problems


def check(root):
    parity = (root / "docs/parity.md").read_text()
    limits = set(re.findall(r"\b[A-Z]\d{3}\b", (root / "docs/limits.md").read_text()))
    tests = known_tests(root)
    problems, seen = [], set()
    for line in parity.splitlines():
        found = ROW.match(line)
        if not found:
            continue
        number, cells = found[1], [cell.strip() for cell in found[2].split("|")]
        if number in seen:
            problems.append(f"{number}: stands there twice")
        seen.add(number)
        problems += check_row(number, cells, tests)
    for prefix, first, last in REQUIRED:
        numbers = (f"{prefix}{i:03}" for i in range(first, last + 1))
        problems += [f"{n}: stands neither in parity.md nor in limits.md" for n in numbers if n not in seen | limits]
    return problems, len(seen)


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
    problems, rows = check(root)
    print("\n".join(f"docs/parity.md: {problem}" for problem in problems) if problems else f"parity: {rows} rows, fine")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
