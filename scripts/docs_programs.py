#!/usr/bin/env python3
"""The C++ blocks of README and docs as programs: `source OUT` writes one source that holds them all, `run BINARY SERRIED` starts each of them,
`quickstart BUILD` types what the quickstart says.

A block that has `int main(` is a program. Any other is a fragment of the program before it on its page, and a comment on the line above it says where it goes:

    <!-- in main -->        at the end of main, in a scope of its own
    <!-- before main -->    at namespace scope

More may stand there, after a comma or by itself: `ranks: 2` in place of 4, `prints: 6` for what every rank must print, `arguments: 0 meet | 1 meet` for a program that is
started by hand as often as that, in one folder ($PWD), and `compiled only: why` for what cannot run on any machine.
Nothing is added to a block but `return 0;` at the end of main, which is a function of another name here."""

import dataclasses
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^\s*```\s*(\S*)\s*(.*)$")
COMMENT = re.compile(r"^<!-- (.*) -->$")
MAIN = re.compile(r"^int main\(")
SHELL = re.compile(r"^serried (explain|doctor|plan)\b")
MEETS_OTHERS = re.compile(r"\bnew_group\(|\bElastic \w+[(;]")
DEFAULT_RANKS = 4
LIMIT = 60  # seconds per program

DISPATCH = """\
static int start(int (*program)(), int, char**) { return program(); }
static int start(int (*program)(int, char**), int argc, char** argv) { return program(argc, argv); }

int main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "";
"""


@dataclasses.dataclass
class Block:
    place: str      # "docs/concepts.md:12", of its first line
    start: int      # that line
    language: str
    comment: str    # on the line above it, empty if there is none
    lines: list


@dataclasses.dataclass
class Program:
    name: str
    block: Block
    marks: dict
    before: list    # fragments for namespace scope
    inside: list    # (fragment, marks) for the end of main


class Mistake(Exception):
    """A block that is neither a program nor a fragment of one."""


def pages(root):
    return [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))]


def blocks(page, root):
    """The fenced blocks of a page."""
    block, above = None, ""
    name = page.relative_to(root).as_posix()
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = FENCE.match(line)
        if fence and block is None:
            comment = COMMENT.match(above)
            block = Block(f"{name}:{number + 1}", number + 1, fence[1], comment[1] if comment else "", [])
        elif fence:
            yield block
            block = None
        elif block is not None:
            block.lines.append(line)
        above = line
    if block is not None:
        raise SystemExit(f"{block.place}: block is not closed")


def marks_of(block):
    """What the comment above a block says, as a dict: {"in main": "", "ranks": "2"}."""
    marks = {}
    rest = block.comment
    while rest:
        if rest.startswith("compiled only"):
            head, rest = rest, ""
        else:
            head, _, rest = rest.partition(", ")
        key, _, value = head.partition(": ")
        if key not in ("in main", "before main", "ranks", "prints", "arguments", "compiled only"):
            raise Mistake(f"{block.place}: the comment above this block says {key!r}, which means nothing here")
        if key == "compiled only" and not value:
            raise Mistake(f"{block.place}: say why it cannot run: <!-- compiled only: needs two hosts -->")
        marks[key] = value
    return marks


def programs_of(page, root):
    """The programs of a page, each with its fragments."""
    programs = []
    for block in blocks(page, root):
        if block.language != "cpp":
            continue
        marks = marks_of(block)
        if any(MAIN.match(line) for line in block.lines):
            if "#include <serried/serried.h>" not in block.lines:
                raise Mistake(f"{block.place}: this program does not include <serried/serried.h>")
            programs.append(Program(f"{page.stem.lower()}_{len(programs) + 1}", block, marks, [], []))
        elif not programs:
            raise Mistake(f"{block.place}: this block has no main, and no program stands before it on its page")
        elif "before main" in marks:
            programs[-1].before.append(block)
        elif "in main" in marks:
            programs[-1].inside.append((block, marks))
        else:
            raise Mistake(f"{block.place}: this block has no main; write <!-- in main --> or <!-- before main --> on the line above it")
    return programs


def placed(block, lines, offset=0):
    file = block.place.rpartition(":")[0]
    return [f'#line {block.start + offset} "{file}"', *("" if line.startswith("#include") else line for line in lines)]


def text_of(program):
    """The program in a namespace of its own, with its fragments where they belong."""
    lines = program.block.lines
    main = next(number for number, line in enumerate(lines) if MAIN.match(line))
    end = next((number for number in range(main, len(lines)) if lines[number] == "}"), None)
    if end is None:
        raise Mistake(f"{program.block.place}: no }} at the margin ends main")
    text = [f"namespace {program.name} {{", *placed(program.block, lines[:main])]
    for block in program.before:
        text += placed(block, block.lines)
    body = [lines[main].replace("int main(", "int program(", 1), *lines[main + 1:end]]
    text += placed(program.block, body, main)
    for block, marks in program.inside:
        text.append("if (false) {" if "compiled only" in marks else f'{{ std::cerr << "{block.place}" << std::endl;')
        text += [*placed(block, block.lines), "}"]
    text += ["return 0;", *placed(program.block, lines[end:], end), f"}}  // namespace {program.name}", ""]
    return text


def all_programs(root):
    return [program for page in pages(root) for program in programs_of(page, root)]


def source(root):
    programs = all_programs(root)
    used = [block for program in programs for block in [program.block, *program.before, *(block for block, _ in program.inside)]]
    headers = [line for block in used for line in block.lines if line.startswith("#include")]
    text = ["// Every C++ block of README and docs, each program with its fragments in a namespace of its own.",
            *dict.fromkeys(headers), "#include <iostream>", ""]
    for program in programs:
        text += text_of(program)
    text.append(DISPATCH + "\n".join(
        f'  if (name == "{program.name}") return start({program.name}::program, argc - 1, argv + 1);' for program in programs))
    return "\n".join([*text, '  std::cerr << "no program " << name << "\\n";', "  return 2;", "}", ""])


def write_source(out):
    text = source(ROOT)
    path = pathlib.Path(out)
    # Unchanged text keeps its time stamp, so an edit of prose compiles nothing.
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def commands_of(program, binary, serried):
    """What starts a program, all at once: the launcher, the program if it makes its ranks itself, or one command per rank."""
    start = [binary, program.name]
    if "arguments" in program.marks:
        return [["sh", "-c", f'exec "$0" {program.name} {arguments}', binary] for arguments in program.marks["arguments"].split(" | ")]
    if not any(MEETS_OTHERS.search(line) for line in program.block.lines):
        return [start]
    return [[serried, "run", "-n", program.marks.get("ranks", str(DEFAULT_RANKS)), *start]]


def problem_of(commands, prints=None, times=1):
    """Why a run of `commands`, side by side, was not what the page says; None if it was."""
    with tempfile.TemporaryDirectory() as folder:
        started = [subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for command in commands]
        try:
            outputs = [process.communicate(timeout=LIMIT) for process in started]
        except subprocess.TimeoutExpired:
            for process in started:
                process.terminate()
                process.communicate()
            return f"takes longer than {LIMIT} s"
    for process, (out, err) in zip(started, outputs):
        if process.returncode != 0:
            return f"exit code {process.returncode}\n{out[-2000:]}{err[-6000:]}"
    lines = [line for out, _ in outputs for line in out.splitlines()]
    count = sum(prints is not None and line.endswith(prints) for line in lines)
    if prints is not None and count != times:
        return f"printed {prints!r} {count} times, not {times}:\n" + "\n".join(lines)
    return None


def runs(binary, serried):
    """(place, commands, what every rank prints, ranks) of all that is run."""
    for program in all_programs(ROOT):
        if "compiled only" not in program.marks:
            commands = commands_of(program, binary, serried)
            ranks = int(program.marks.get("ranks", DEFAULT_RANKS)) if commands[0][0] == serried else len(commands)
            yield program.block.place, commands, program.marks.get("prints"), ranks
    for page in pages(ROOT):
        for block in blocks(page, ROOT):
            for number, line in enumerate(block.lines if block.language == "sh" else [], block.start):
                if SHELL.match(line):
                    command = line.partition(" #")[0].replace("serried", '"$0"', 1)
                    yield f"{page.relative_to(ROOT)}:{number}", [["sh", "-c", command, serried]], None, 1


def run(binary, serried):
    problems, count = [], 0
    for place, commands, prints, ranks in runs(str(pathlib.Path(binary).resolve()), str(pathlib.Path(serried).resolve())):
        count += 1
        if problem := problem_of(commands, prints, ranks):
            problems.append(f"{place}: {problem}")
    print("\n".join([*problems, f"docs: {count} programs and commands ran, {len(problems)} of them wrong"]))
    return 1 if problems or count == 0 else 0


def quickstart(build):
    """Makes the project of docs/quickstart.md and types its lines; the home folder is one below `build`, and serried is installed there."""
    page = list(blocks(ROOT / "docs/quickstart.md", ROOT))
    project = next(number for number, block in enumerate(page) if block.language == "cmake")
    listing, program, shell = page[project:project + 3]
    if (program.language, shell.language) != ("cpp", "sh"):
        raise Mistake(f"{listing.place}: the program and the lines that build it do not follow")
    home = pathlib.Path(build).resolve() / "package/quickstart"
    shutil.rmtree(home, ignore_errors=True)
    folder = home / "project"
    folder.mkdir(parents=True)
    (folder / "CMakeLists.txt").write_text("\n".join(listing.lines) + "\n")
    (folder / "train.cpp").write_text("\n".join(program.lines) + "\n")
    subprocess.run(["cmake", "--install", build, "--prefix", home / "serried"], check=True, stdout=subprocess.DEVNULL)
    lines = [line.replace("~/", f"{home}/") for line in shell.lines]
    done = subprocess.run(["sh", "-ec", "\n".join(lines)], cwd=folder, capture_output=True, text=True)
    count = sum(line.endswith(" 6") for line in done.stdout.splitlines())
    if done.returncode != 0 or count != DEFAULT_RANKS:
        print(f"{shell.place}: exit code {done.returncode}, {count} ranks printed 6\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        return 1
    print("quickstart: every rank printed 6")
    return 0


def main():
    try:
        if len(sys.argv) == 3 and sys.argv[1] == "source":
            write_source(sys.argv[2])
            return 0
        if len(sys.argv) == 4 and sys.argv[1] == "run":
            return run(sys.argv[2], sys.argv[3])
        if len(sys.argv) == 3 and sys.argv[1] == "quickstart":
            return quickstart(sys.argv[2])
    except Mistake as mistake:
        print(mistake, file=sys.stderr)
        return 1
    print("usage: docs_programs.py source OUT | run BINARY SERRIED | quickstart BUILD", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
