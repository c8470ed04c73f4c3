#!/usr/bin/env python3
"""Tests of the checks themselves: each finds the mistake it is there for, in a small tree made up for it."""

import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
sys.dont_write_bytecode = True
import check_docs  # noqa: E402
import docs_programs  # noqa: E402
import check_layers  # noqa: E402
import check_parity  # noqa: E402
import check_tests  # noqa: E402


class TreeTest(unittest.TestCase):
    """A test with an empty tree at self.root."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class Layers(TreeTest):
    def test_a_lower_layer_is_fine(self):
        self.write("serried/comm/groups/group.h", '// A group.\n#include "serried/base/error.h"\n#include <vector>\n')
        self.assertEqual(check_layers.check(self.root), [])

    def test_a_higher_layer_is_found(self):
        self.write("serried/base/error.cpp", '// Errors.\n#include "serried/comm/groups/group.h"\n')
        self.assertEqual(check_layers.check(self.root),
                         ["serried/base/error.cpp:2: includes serried/comm/groups/group.h: layer comm (2) is not below base (0)"])

    def test_rooms_of_a_layer_include_only_rooms_below(self):
        self.write("serried/graph/passes/freeze.cpp",
                   '// One.\n#include "serried/graph/graph.h"\n#include "serried/graph/text/text.h"\n#include "serried/graph/passes/a.h"\n')
        self.write("serried/graph/capture.cpp", '// One.\n#include "serried/graph/replay/program.h"\n')
        self.assertEqual(check_layers.check(self.root), [])
        self.write("serried/graph/replay/program.cpp", '// One.\n#include "serried/graph/passes/access.h"\n')
        self.write("serried/graph/passes/pairs.cpp", '// One.\n#include "serried/graph/record/recorder.h"\n')
        self.write("serried/graph/graph.h", '// One.\n#include "serried/graph/text/text.h"\n')
        self.write("serried/graph/attic/old.cpp", '// One.\n#include "serried/graph/graph.h"\n')
        self.assertEqual(check_layers.check(self.root), [
            "serried/graph/attic/old.cpp:2: folder serried/graph/attic/ is not among the rooms of scripts/check_layers.py",
            "serried/graph/graph.h:2: includes serried/graph/text/text.h: room text of graph is not below graph",
            "serried/graph/passes/pairs.cpp:2: includes serried/graph/record/recorder.h: room record of graph is not below passes",
            "serried/graph/replay/program.cpp:2: includes serried/graph/passes/access.h: room passes of graph is not below replay"])

    def test_a_sibling_layer_and_the_umbrella_are_found(self):
        self.write("serried/graph/a.h", '// A.\n#include "serried/parallel/b.h"\n#include "serried/serried.h"\n')
        self.assertEqual(len(check_layers.check(self.root)), 2)

    def test_torch_behind_a_header_of_the_launcher_is_found(self):
        self.write("serried/base/error.h", "// Errors.\n#include <c10/util/Exception.h>\n")
        self.write("serried/launch/spawn.cpp", '// Spawns.\n#include "serried/base/error.h"\n')
        self.assertIn("which brings c10/util/Exception.h", check_layers.check(self.root)[0])

    def test_long_files_and_files_without_a_sentence_are_found(self):
        self.write("tests/a.cpp", "#include <vector>\n")
        self.write("tests/b.cpp", "// B.\n" * 601)
        self.assertEqual(len(check_layers.check(self.root)), 2)


class Tests(TreeTest):
    def problems(self, text):
        self.write("tests/support/close.h", "// Compares.\nvoid expect_close(int a, int b = {});\n")
        self.write("tests/support/close.cpp", "// Compares.\nvoid expect_close(int a, int b) { EXPECT_EQ(a, b); }\n")
        self.write("tests/other_test.cpp", "// Another file.\nvoid helper() { ASSERT_TRUE(true); }\n")
        self.write("tests/a_test.cpp", '// Tests.\n#include "tests/support/close.h"\n' + text)
        return check_tests.check(self.root)

    def test_expectations_in_the_test_and_in_functions_it_sees_are_found(self):
        self.assertEqual(self.problems(
            "template <class T>\nvoid twice(T t, int n = {}) { expect_close(t, n); }\n"
            "TEST(A, Itself) { EXPECT_EQ(1, 1); }\n"
            "TEST_P(A, ByAHelper) { twice<int>(1); }\n"
            "TEST_F(A, ByALambda) { const auto fn = [&](int i) { FAIL(); }; run_ranks(2, fn); }\n"
            "TEST(A,\n     OnRanks) { run_ranks(2, [] { expect_close(1, 1); }); }\n"), [])

    def test_a_test_that_expects_nothing_is_found(self):
        self.assertEqual(self.problems(
            'TEST(A, Runs) { work("EXPECT_EQ(1, 1)"); }  // EXPECT_EQ(1, 1)\n'
            "TEST(A, OfAnotherFile) {\n  helper();\n}\n"
            "void on_ranks(int fn) { ADD_FAILURE(); }\n"
            "TEST(A, OnlyMayNotThrow) { on_ranks([] { work(); }); }\n"),
            ["tests/a_test.cpp:3: A.Runs expects nothing", "tests/a_test.cpp:4: A.OfAnotherFile expects nothing",
             "tests/a_test.cpp:8: A.OnlyMayNotThrow expects nothing"])

    def test_a_test_that_may_skip_is_found(self):
        self.assertEqual(self.problems('TEST(A, Skips) { if (!root()) GTEST_SKIP() << "no"; EXPECT_EQ(1, 1); }\n'),
                         ["tests/a_test.cpp:3: A.Skips may skip: let it prove something wherever it runs"])


class Parity(TreeTest):
    def problems(self, table):
        numbers = [f"{prefix}{i:03}" for prefix, first, last in check_parity.REQUIRED for i in range(first, last + 1)]
        rows = "".join(f"| {number} | row | limited: made up | |\n" for number in numbers if number not in {"P001", "P080"})
        self.write("docs/parity.md", table + rows)
        self.write("docs/limits.md", "P080 is not there.\n")
        self.write("tests/a_test.cpp", "TEST(Group, IsMade) {}\nTEST_P(\n    Conformance, Sums) {}\nTEST_P(Idle, Runs) {}\n"
                   "// TEST(Group, WasRemoved)\nINSTANTIATE_TEST_SUITE_P(Shm, Conformance, values());\n")
        return check_parity.check(self.root)[0]

    def test_named_tests_are_found(self):
        self.assertEqual(self.problems("| P001 | row | done | `Group.IsMade`, `Conformance.Sums`, `Shm/Conformance.Sums` |\n"), [])

    def test_tests_of_python_count_with_their_class(self):
        self.write("tests/python/a_test.py", "class Groups(unittest.TestCase):\n    def test_they_go(self):\n        pass\n\n\ndef test_free():\n    pass\n")
        self.assertEqual(self.problems("| P001 | row | done | `Groups.test_they_go` |\n"), [])
        self.assertEqual(self.problems("| P001 | row | done | `Groups.test_free` |\n"), ["P001: test Groups.test_free does not exist in tests/"])

    def test_tests_that_do_not_run_are_found(self):
        for name in ["Group.WasRemoved", "Idle.Runs", "Gloo/Conformance.Sums"]:
            self.assertEqual(self.problems(f"| P001 | row | done | `{name}` |\n"), [f"P001: test {name} does not exist in tests/"])

    def test_missing_and_half_written_rows_are_found(self):
        self.assertEqual(self.problems(""), ["P001: stands neither in parity.md nor in limits.md"])
        self.assertEqual(self.problems("| P001 | row | done | |\n"), ["P001: is done but names no test as `Suite.Name`"])
        self.assertEqual(len(self.problems("| P001 | row | limited | |\n")), 1)
        self.assertEqual(self.problems("| P002 | row | limited: x | |\n"),
                         ["P002: stands there twice", "P001: stands neither in parity.md nor in limits.md"])


class Docs(TreeTest):
    def setUp(self):
        super().setUp()
        self.addCleanup(setattr, check_docs, "ROOT", check_docs.ROOT)
        check_docs.ROOT = self.root
        self.write("README.md", "# Top\n")
        self.write("CONTRIBUTING.md", "# Help\n")
        self.write("docs/environment.md", "| Name | Default | Meaning |\n| --- | --- | --- |\n| `SERRIED_LOG` | `none` | x |\n\nEnd.\n")
        self.write("serried/base/env.cpp", '{"SERRIED_LOG", "none", "x"},\n')

    def test_dead_links_and_headings_are_found(self):
        self.write("docs/a.md", "[a](b.md) [c](../README.md#top) [d](../README.md#bottom) [e](https://example.org)\n")
        self.assertEqual(list(check_docs.check_links()),
                         ["docs/a.md:1: b.md does not exist", "docs/a.md:1: ../README.md#bottom: no heading of that name"])

    def test_functions_that_walks_name_are_looked_for(self):
        self.write("serried/a.cpp", "int first() { return 1; }\n")
        self.write("docs/a.md", "`serried/a.cpp:first`, then `serried/a.cpp:second` and `serried/b.cpp:first`\n")
        self.assertEqual(list(check_docs.check_functions()), ["docs/a.md:1: serried/a.cpp has no function second",
                                                              "docs/a.md:1: serried/b.cpp has no function first"])

    def test_a_table_that_differs_is_found(self):
        self.assertEqual(list(check_docs.check_environment()), [])
        self.write("serried/base/env.cpp", '{"SERRIED_LOG", "all", "x"},\n{"SERRIED_NEW", "", "y"},\n')
        self.assertEqual(len(list(check_docs.check_environment())), 3)
        check_docs.write_environment()
        self.assertEqual(list(check_docs.check_environment()), [])
        self.assertTrue((self.root / "docs/environment.md").read_text().endswith("| `SERRIED_NEW` |  | y |\n\nEnd.\n"))

    def test_shell_lines_that_name_what_is_missing_are_found(self):
        self.write("Makefile", ".PHONY: demo test\n")
        self.write("examples/01_sum.cpp", "")
        self.write("tools/serried/run_command.cpp", 'run.add_option("-n,--nproc", x); run.add_option("--grace", y);\n')
        self.write("docs/a.md", "```sh\nmake demo test RANKS=2 # all\nmake dmo\nA=1 build/bin/serried run -n 4 --grace 2 build/bin/01_sum --x\n"
                                "serried run -m 4 ./train && build/bin/02_sum\n```\n")
        self.assertEqual(list(check_docs.check_shell()), ["docs/a.md:3: make has no target dmo", "docs/a.md:5: serried run has no option -m",
                                                          "docs/a.md:5: examples/02_sum.cpp does not exist"])

    def test_a_demo_that_ends_with_what_is_not_there_is_found(self):
        self.write("Makefile", ".PHONY: demo run\n")
        self.write("examples/01_sum.cpp", "")
        self.write("examples/02_mean.cpp", "")
        self.write("examples/demo/next.txt", "  sum   make run EXAMPLE=01_sum RANKS=2\n  mode   make run EXAMPLE=03_mode\n  more   docs/a.md\n" + "\n" * 30)
        self.assertEqual(list(check_docs.check_next_steps()),
                         ["examples/demo/next.txt: more than a screen of 24 lines of 80 characters",
                          "examples/demo/next.txt:2: examples/03_mode.cpp does not exist", "examples/demo/next.txt:3: docs/a.md does not exist",
                          "examples/demo/next.txt: does not say how to start 02_mean"])


PROGRAM = "```cpp\n#include <serried/serried.h>\nint main() {\n  new_group();\n}\n```\n"


class Programs(TreeTest):
    def setUp(self):
        super().setUp()
        self.write("README.md", "# Top\n")
        self.write("CONTRIBUTING.md", "# Help\n")

    def source(self, page):
        self.write("docs/a.md", page)
        return docs_programs.source(self.root)

    def mistake(self, page):
        with self.assertRaises(docs_programs.Mistake) as raised:
            self.source(page)
        return str(raised.exception)

    def test_blocks_are_compiled_as_printed(self):
        text = self.source(PROGRAM + "<!-- in main -->\n```cpp\n#include <map>\none();\n```\n<!-- before main -->\n```cpp\nvoid one();\n```\n```sh\nmake\n```\n"
                           "<!-- in main, compiled only: needs two hosts, or three -->\n```cpp\ntwo();\n```\n")
        self.assertIn('namespace a_1 {\n#line 2 "docs/a.md"\n\n#line 14 "docs/a.md"\nvoid one();\n#line 3 "docs/a.md"\nint program() {\n  new_group();\n'
                      '{ std::cerr << "docs/a.md:9" << std::endl;\n#line 9 "docs/a.md"\n\none();\n}\n'
                      'if (false) {\n#line 21 "docs/a.md"\ntwo();\n}\nreturn 0;\n#line 5 "docs/a.md"\n}\n}  // namespace a_1\n', text)
        self.assertIn("#include <serried/serried.h>\n#include <map>\n", text)
        self.assertNotIn("make", text)

    def test_a_block_that_no_reader_could_run_is_found(self):
        self.assertEqual(self.mistake("```cpp\none();\n```\n"), "docs/a.md:2: this block has no main, and no program stands before it on its page")
        self.assertEqual(self.mistake(PROGRAM + "```cpp\none();\n```\n"),
                         "docs/a.md:8: this block has no main; write <!-- in main --> or <!-- before main --> on the line above it")
        self.assertEqual(self.mistake("```cpp\nint main() {\n}\n```\n"), "docs/a.md:2: this program does not include <serried/serried.h>")
        self.assertEqual(self.mistake("<!-- rank: 2 -->\n" + PROGRAM), "docs/a.md:3: the comment above this block says 'rank', which means nothing here")
        self.assertEqual(self.mistake("<!-- compiled only -->\n" + PROGRAM), "docs/a.md:3: say why it cannot run: <!-- compiled only: needs two hosts -->")

    def test_programs_are_started_as_their_page_says(self):
        self.write("docs/a.md", PROGRAM + "<!-- ranks: 2 -->\n" + PROGRAM + PROGRAM.replace("new_group", "run_ranks") + "<!-- arguments: 0 $PWD/m | 1 $PWD/m -->\n" + PROGRAM)
        commands = [docs_programs.commands_of(program, "docs", "serried") for program in docs_programs.all_programs(self.root)]
        self.assertEqual(commands, [[["serried", "run", "-n", "4", "docs", "a_1"]], [["serried", "run", "-n", "2", "docs", "a_2"]], [["docs", "a_3"]],
                                    [["sh", "-c", 'exec "$0" a_4 0 $PWD/m', "docs"], ["sh", "-c", 'exec "$0" a_4 1 $PWD/m', "docs"]]])

    def test_a_run_that_fails_or_prints_something_else_is_found(self):
        self.assertIsNone(docs_programs.problem_of([["echo", "[rank 0] 6"]], "6", 1))
        self.assertEqual(docs_programs.problem_of([["echo", "7"], ["echo", "6"]], "6", 2), "printed '6' 1 times, not 2:\n7\n6")
        self.assertEqual(docs_programs.problem_of([["true"], ["sh", "-c", "echo why >&2; exit 3"]]), "exit code 3\nwhy\n")


if __name__ == "__main__":
    unittest.main()
