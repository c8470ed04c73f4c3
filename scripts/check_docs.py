#!/usr/bin/env python3
"""Checks README and docs: `links` that links lead somewhere, shell lines and the end of the demo name what exists and tables match the source; `environment` rewrites that table."""

import pathlib
import re
import sys

import docs_programs
from docs_programs import FENCE

ROOT = pathlib.Path(__file__).resolve().parent.parent

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
FUNCTION = re.compile(r"`(serried/[\w/]+\.(?:h|cpp)):(\w+)`")
VARIABLE = re.compile(r'\{\s*"([A-Z]\w+)"\s*,\s*"([^"]*)"\s*,\s*"([^"]*)"\s*\}')
VARIABLE_ROW = re.compile(r"^\| `[A-Z]\w+` \|")

OPTION = re.compile(r"(?<![\w-])(--?[a-z][a-z-]*)")

def pages():
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def prose(page):
    """The page's lines without its fenced blocks, numbered."""
    inside = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if FENCE.match(line):
            inside = not inside
        elif not inside:
            yield number, line


def anchors(page):
    """The ids that GitHub gives to the headings of a page."""
    headings = (line.lstrip("#").strip() for _, line in prose(page) if line.startswith("#"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def check_link(page, target):
    if re.match(r"^[a-z]+:", target):
        return None
    path, _, anchor = target.partition("#")
    linked = (page.parent / path).resolve() if path else page
    if not linked.exists():
        return f"{target} does not exist"
    if anchor and linked.suffix == ".md" and anchor not in anchors(linked):
        return f"{target}: no heading of that name"
    return None


def check_links():
    for page in pages():
        for number, line in prose(page):
            for found in LINK.finditer(line):
                if problem := check_link(page, found[1] or found[2]):
                    yield f"{page.relative_to(ROOT)}:{number}: {problem}"


def check_functions():
    """A walk names functions as `file:function`, in prose."""
    for page in pages():
        for number, line in prose(page):
            for file, function in FUNCTION.findall(line):
                path = ROOT / file
                if not path.is_file() or not re.search(rf"\b{function}\(", path.read_text()):
                    yield f"{page.relative_to(ROOT)}:{number}: {file} has no function {function}"


def environment_rows():
    """The rows that docs/environment.md must have: the table of serried/base/env.cpp."""
    variables = VARIABLE.findall((ROOT / "serried/base/env.cpp").read_text())
    return [f"| `{name}` | {f'`{default}`' if default else ''} | {meaning} |" for name, default, meaning in variables]


def check_environment():
    told = [line for _, line in prose(ROOT / "docs/environment.md") if VARIABLE_ROW.match(line)]
    real = environment_rows()
    fix = "  fix: scripts/check_docs.py environment"
    yield from (f"docs/environment.md: lacks the row {row}\n{fix}" for row in real if row not in told)
    yield from (f"docs/environment.md: serried/base/env.cpp has no such row: {row}\n{fix}" for row in told if row not in real)


def write_environment():
    path = ROOT / "docs/environment.md"
    lines = [line for line in path.read_text().splitlines() if not VARIABLE_ROW.match(line)]
    at = next(number for number, line in enumerate(lines) if line.startswith("| ---")) + 1
    path.write_text("\n".join(lines[:at] + environment_rows() + lines[at:]) + "\n")
    return 0


def shell_lines(page):
    """(line, command) of each command in the page's shell blocks, comments left out."""
    for block in docs_programs.blocks(page, ROOT):
        if block.language != "sh":
            continue
        for number, line in enumerate(block.lines, block.start):
            for command in re.split(r"\s&&\s", line.partition(" #")[0].strip()):
                if command:
                    yield number, command


def shell_problem(command):
    """What a command names that this tree does not have; None if it has all of it."""
    words = command.split()
    while words and re.match(r"^[A-Za-z_]\w*=", words[0]):
        words.pop(0)
    if words[:1] == ["make"]:
        targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)[1].split()
        if missing := [word for word in words[1:] if "=" not in word and word not in targets]:
            return f"make has no target {missing[0]}"
        words = [word.replace("EXAMPLE=", "build/bin/") for word in words]
    for word in words:
        program = re.fullmatch(r"(?:\./)?build/bin/(\w+)", word)
        if program and program[1] != "serried" and not (ROOT / f"examples/{program[1]}.cpp").is_file():
            return f"examples/{program[1]}.cpp does not exist"
    if words[1:2] == ["run"] and words[0].endswith("serried"):
        declared = re.findall(r'"(-[\w,-]+)"', (ROOT / "tools/serried/run_command.cpp").read_text())
        known = {option for options in declared for option in options.split(",")}
        return next((f"serried run has no option {option}" for option in run_options(words[2:]) if option not in known), None)
    return None


def run_options(words):
    """The options among the arguments of `serried run`: those before the program, each of which takes a value."""
    while words and OPTION.fullmatch(words[0]):
        yield words[0]
        words = words[2:]


def check_shell():
    for page in pages():
        for number, command in shell_lines(page):
            if problem := shell_problem(command):
                yield f"{page.relative_to(ROOT)}:{number}: {problem}"


def check_next_steps():
    """What `make demo` ends with: one screen that names every example, and nothing that does not exist."""
    path = ROOT / "examples/demo/next.txt"
    lines = path.read_text().splitlines()
    if len(lines) > 24 or any(len(line) > 80 for line in lines):
        yield "examples/demo/next.txt: more than a screen of 24 lines of 80 characters"
    for number, line in enumerate(lines, 1):
        if command := re.search(r"\bmake .*$", line):
            if problem := shell_problem(command[0]):
                yield f"examples/demo/next.txt:{number}: {problem}"
        for page in re.findall(r"docs/\w+\.md", line):
            if not (ROOT / page).is_file():
                yield f"examples/demo/next.txt:{number}: {page} does not exist"
    for example in sorted((ROOT / "examples").glob("*.cpp")):
        if f"EXAMPLE={example.stem} " not in path.read_text().replace("\n", " "):
            yield f"examples/demo/next.txt: does not say how to start {example.stem}"


def links():
    problems = [*check_links(), *check_functions(), *check_environment(), *check_shell(), *check_next_steps()]
    print("\n".join(problems) if problems else "docs: links and tables fine")
    return 1 if problems else 0


def main():
    if sys.argv[1:] == ["links"]:
        return links()
    if sys.argv[1:] == ["environment"]:
        return write_environment()
    print("usage: check_docs.py links | environment", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
