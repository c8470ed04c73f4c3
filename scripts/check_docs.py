#!/usr/bin/env python3
"""Checks README and docs: `links` that links lead somewhere and tables match the source; `environment` rewrites that table; `blocks OUT` gathers all C++ blocks into one source to compile."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^\s*```\s*(\S*)\s*(.*)$")
FUNCTION = re.compile(r"`(serried/[\w/]+\.(?:h|cpp)):(\w+)`")
VARIABLE = re.compile(r'\{\s*"([A-Z]\w+)"\s*,\s*"([^"]*)"\s*,\s*"([^"]*)"\s*\}')
VARIABLE_ROW = re.compile(r"^\| `[A-Z]\w+` \|")

# A function at the margin: such a block stands at namespace scope, any other inside a function.
DEFINITION = re.compile(r"^(?!for\b|if\b|while\b|switch\b|return\b|else\b|do\b)[A-Za-z_][\w:<>,&* ]* [&*]?\w+\([^=\[]*\)\s*\{")

# Names that blocks may use without declaring them; a block that declares its own hides these.
PREAMBLE = """\
// All C++ blocks of README and docs, each in a namespace of its own: compiled, never run.
#include <serried/serried.h>
#include <chrono>
#include <iostream>

using namespace std::chrono_literals;
using serried::Group;
[[maybe_unused]] static Group world;
[[maybe_unused]] static at::Tensor x;
"""


def pages():
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page):
    """(line of the first content line, language, text) of each fenced block."""
    language, start, body = None, 0, []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = FENCE.match(line)
        if fence and language is None:
            language, start, body = fence[1], number + 1, []
        elif fence:
            yield start, language, body
            language = None
        elif language is not None:
            body.append(line)
    if language is not None:
        raise SystemExit(f"{page.relative_to(ROOT)}:{start}: block is not closed")


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


def links():
    problems = [*check_links(), *check_functions(), *check_environment()]
    print("\n".join(problems) if problems else "docs: links and tables fine")
    return 1 if problems else 0


def write_blocks(out):
    headers, bodies = [], []
    for page in pages():
        for start, language, body in blocks(page):
            if language != "cpp":
                continue
            headers += [line for line in body if line.startswith("#include")]
            code = ["" if line.startswith("#include") else line for line in body]
            at_namespace_scope = any(DEFINITION.match(line) for line in code)
            opening, closing = ("", "") if at_namespace_scope else ("[[maybe_unused]] static void block() {", "}")
            name = f"block_{len(bodies)}"
            place = f'#line {start} "{page.relative_to(ROOT).as_posix()}"'
            bodies.append("\n".join([f"namespace {name} {{", opening, place, *code, closing, f"}}  // namespace {name}"]))
    text = PREAMBLE + "\n".join(dict.fromkeys(headers)) + "\n\n" + "\n".join(bodies) + "\n"
    path = pathlib.Path(out)
    # Unchanged text keeps its time stamp, so an edit of prose compiles nothing.
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return 0


def main():
    if sys.argv[1:] == ["links"]:
        return links()
    if sys.argv[1:] == ["environment"]:
        return write_environment()
    if len(sys.argv) == 3 and sys.argv[1] == "blocks":
        return write_blocks(sys.argv[2])
    print("usage: check_docs.py links | environment | blocks OUT", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
