// The command line: help, mistakes, programs that cannot start, other commands.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/stat.h>

#include <algorithm>

#include "tests/process/command.h"

namespace serried::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

TEST(LaunchCommand, AloneItPrintsHelp) {
  const Result result = serried({});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out, AllOf(HasSubstr("Usage: serried"), HasSubstr("run ")));
}

TEST(LaunchCommand, HelpAndVersion) {
  EXPECT_THAT(serried({"--version"}).out, StartsWith("serried "));
  const Result help = serried({"run", "--help"});
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_THAT(help.out, AllOf(HasSubstr("Usage: serried run [options] [--] program [arguments]"),
                              HasSubstr("serried run -n 4 ./train --steps 100"), HasSubstr("--max-restarts")));
}

TEST(LaunchCommand, MistakesInOptionsExitWith2) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"run", "-n", "0", "true"}, "[run] -n is 0\n  fix: pass 1 or more ranks\n"},
      {{"run", "-n", "two", "true"},
       "[run] -n is two, which is no number of ranks\n  fix: pass one, for example -n 4, or auto\n"},
      {{"run"}, "[run] no program to run\n  fix: "},
      {{"run", "-n", "2"}, "[run] no program to run\n  fix: "},
      {{"run", "-n", "2", "--"}, "[run] no program to run\n  fix: "},
      {{"run", "--bogus", "true"}, "[run] unknown option \"--bogus\"\n  fix: serried run --help"},
      {{"run", "--nnodes", "2", "true"}, "[run] --nnodes is 2, but --rendezvous is missing\n  fix: "},
      {{"run", "--nnodes", "2", "--node-rank", "5", "--rendezvous", "a:1", "true"},
       "[run] --node-rank is 5 of --nnodes 2"},
      {{"run", "--nproc-per-node", "gpu", "true"},
       "[run] -n is gpu, and the launcher counts no devices\n  fix: pass their number, for example -n 4\n"},
      {{"run", "--nnodes", "1:4", "true"},
       "[run] --nnodes is 1:4, but --rendezvous is missing\n"
       "  fix: pass --rendezvous host:port, the same on every node, where host is node 0\n"},
      {{"run", "--nnodes", "two", "true"},
       "[run] --nnodes is two, which is no number of nodes\n"
       "  fix: pass one, for example 2, or min:max, for example 2:4\n"},
  };
  for (const auto& [arguments, text] : cases) {
    const Result result = serried(arguments);
    EXPECT_EQ(result.exit_code, 2) << text;
    EXPECT_THAT(result.err, HasSubstr(text));
    EXPECT_EQ(result.out, "");
  }
}

TEST(LaunchCommand, NamesOfTorchrunAreTaken) {
  for (const std::string option : {"--nproc-per-node", "--nproc_per_node"}) {
    const Result result =
        serried({"run", "--nnodes=1", "--node_rank=0", "--max_restarts=0", option + "=2", "echo", "a"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    std::vector<std::string> lines = lines_of(result.out);
    std::sort(lines.begin(), lines.end());
    EXPECT_EQ(lines, lines_of("[rank 0] a\n[rank 1] a\n"));
  }
  const std::string port = std::to_string(free_port());
  EXPECT_EQ(serried({"run", "--master_port", port, "sh", "-c", "echo $MASTER_PORT"}).out, "[rank 0] " + port + "\n");
  for (const std::string option : {"--rdzv-endpoint", "--rdzv_endpoint"}) {
    EXPECT_THAT(
        serried({"run", "--nnodes", "2", "--node-rank", "1", option, "nowhere", "true"}).err,
        StartsWith("[run] --rendezvous \"nowhere\" is not host:port\n  fix: for example --rendezvous node0:29500\n"));
  }
}

TEST(LaunchCommand, AsManyRanksAsCores) {
  for (const char* word : {"auto", "cpu"}) {
    EXPECT_EQ(
        serried({"run", "-n", word, "sh", "-c", "test $LOCAL_WORLD_SIZE = $(env -u OMP_NUM_THREADS nproc)"}).exit_code,
        0)
        << word;
  }
  // Cores that this process may not use do not count.
  const Result bound =
      serried({"run", "taskset", "-c", "0", SERRIED_BINARY, "run", "-n", "auto", "sh", "-c", "echo $LOCAL_WORLD_SIZE"});
  EXPECT_EQ(bound.out, "[rank 0] [rank 0] 1\n") << bound.err;
}

TEST(LaunchCommand, OtherOptionsOfTorchrunAreAnswered) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"--standalone", "leave it out: one node needs no rendezvous"},
      {"--rdzv_backend=c10d", "leave it out: node 0's launcher is the rendezvous, at --rendezvous host:port"},
      {"--rdzv-id=7", "leave it out: each --rendezvous host:port is one job"},
      {"--master_addr=head", "pass --rendezvous host:port, where host is node 0; one node needs none"},
      {"--no-python", "leave it out: the program is an executable"},
      {"-m", "leave it out: the program is an executable"},
      {"--tee=3", "pass --log-dir: output is shown and kept"},
  };
  for (const auto& [option, instead] : cases) {
    const Result result = serried({"run", "--nproc-per-node", "2", option, "true"});
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(result.err, "[run] " + option + " is an option of torchrun\n  fix: " + instead + "\n");
  }
}

TEST(LaunchCommand, TwoDashesEndTheOptions) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"run", "-n", "2", "--", "echo", "a"}, "[rank 0] a\n[rank 1] a\n"},
      {{"run", "--", "echo", "--help", "-n", "2"}, "[rank 0] --help -n 2\n"},
      {{"run", "--", "echo", "a", "--", "b"}, "[rank 0] a -- b\n"},
      {{"run", "echo", "--", "a", "--"}, "[rank 0] -- a --\n"},
      {{"run", "-n", "1", "--", "echo"}, "[rank 0] \n"},
  };
  for (const auto& [arguments, out] : cases) {
    const Result result = serried(arguments);
    EXPECT_EQ(result.exit_code, 0) << out;
    std::vector<std::string> lines = lines_of(result.out);
    std::sort(lines.begin(), lines.end());
    EXPECT_EQ(lines, lines_of(out));
  }
}

TEST(LaunchCommand, OptionsAfterTwoDashesAreNone) {
  const Result result = serried({"run", "--", "-n", "2", "true"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, StartsWith("[run] unknown option \"-n\"\n  fix: "));
}

TEST(LaunchCommand, MissingProgramExitsWith127) {
  const Result path = serried({"run", "-n", "4", "./not_there"});
  EXPECT_EQ(path.exit_code, 127);
  EXPECT_THAT(path.err, StartsWith("[run] program ./not_there does not exist\n  fix: check the path"));
  const Result name = serried({"run", "-n", "4", "not_there_either"});
  EXPECT_EQ(name.exit_code, 127);
  EXPECT_THAT(name.err, StartsWith("[run] program not_there_either is not in PATH\n  fix: write its path"));
}

TEST(LaunchCommand, FileThatIsNoProgramExitsWith126) {
  TemporaryFolder folder;
  const std::string path = folder.path() + "/file";
  write_file(path, "not a program");
  const Result plain = serried({"run", "-n", "2", path});
  EXPECT_EQ(plain.exit_code, 126);
  EXPECT_EQ(plain.err, "[run] " + path + " is not executable\n  fix: chmod +x " + path + "\n");
  ::chmod(path.c_str(), 0700);
  const Result garbage = serried({"run", "-n", "2", path});
  EXPECT_EQ(garbage.exit_code, 126);
  EXPECT_THAT(garbage.err, HasSubstr("is no binary of this machine and has no #! line\n  fix: "));
  const Result directory = serried({"run", folder.path()});
  EXPECT_EQ(directory.exit_code, 126);
  EXPECT_THAT(directory.err, HasSubstr("is a directory"));
}

TEST(LaunchCommand, ScriptWithoutItsInterpreterExitsWith127) {
  TemporaryFolder folder;
  const std::string path = folder.path() + "/script";
  write_file(path, "#!/not/there\n");
  ::chmod(path.c_str(), 0700);
  const Result result = serried({"run", "-n", "3", path});
  EXPECT_EQ(result.exit_code, 127);
  EXPECT_THAT(result.err, HasSubstr("its interpreter or loader does not exist\n  fix: "));
}

TEST(LaunchCommand, UnknownCommandListsTheKnownOnes) {
  const Result result = serried({"dance"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, AllOf(StartsWith("[serried] unknown command \"dance\"; known: "),
                                HasSubstr("run, token, top, trace\n  fix: serried --help, or serried run -n 4 dance to "
                                          "start a program\n")));
  EXPECT_THAT(serried({"tokne"}).err, HasSubstr("fix: serried token?\n"));
}

TEST(LaunchCommand, HelpComesHoweverItIsAskedFor) {
  for (const std::vector<std::string>& asked : {std::vector<std::string>{"help"}, {"--help"}, {}}) {
    const Result result = serried(asked);
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_THAT(result.out, HasSubstr("Other commands:"));
  }
  EXPECT_THAT(serried({"token", "--help"}).out, Not(HasSubstr("Other commands")));
}

TEST(LaunchCommand, AnUnknownOptionIsAnsweredWithTheNearest) {
  EXPECT_EQ(serried({"top", "--onec"}).err,
            "[serried] there is no option --onec; did you mean --once?\n  fix: serried top --help lists the options\n");
  EXPECT_EQ(serried({"token", "please"}).err,
            "[serried] \"please\" was not expected\n  fix: serried token --help lists the options\n");
}

TEST(LaunchCommand, ProgramsBesideItAreCommands) {
  TemporaryFolder folder;
  const std::string copy = folder.path() + "/serried";
  write_file(copy, read_file(SERRIED_BINARY));
  write_file(folder.path() + "/serried-dance", "#!/bin/sh\necho dancing \"$@\"\nexit 12\n");
  ::chmod(copy.c_str(), 0700);
  ::chmod((folder.path() + "/serried-dance").c_str(), 0700);
  const Result result = serried(shell({}, copy + " dance --fast 'a b'"));
  EXPECT_EQ(result.exit_code, 12);
  EXPECT_EQ(result.out, "[rank 0] dancing --fast a b\n");
  write_file(folder.path() + "/serried-checkpoint", "#!/bin/sh\n");
  ::chmod((folder.path() + "/serried-checkpoint").c_str(), 0700);
  EXPECT_THAT(serried(shell({}, copy + " --help")).out,
              HasSubstr("Other commands:\n[rank 0]   checkpoint                  List, verify and compare checkpoints\n"
                        "[rank 0]   dance\n"));
}

}  // namespace
}  // namespace serried::testing
