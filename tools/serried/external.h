// Commands that are programs of their own, because they link LibTorch: serried-doctor for `serried doctor`.
#pragma once

#include <string>
#include <vector>

namespace serried::tools {

/// A line for each found beside this program and in ../libexec/serried, with what it does.
std::string describe_external_commands();

/// Becomes serried-<command>; `arguments` are its arguments, the command itself first. Returns only if there is no
/// such command: the code to exit with, after an error that lists all commands, this program's `own` among them.
int exec_external_command(const std::string& command, char** arguments, const std::vector<std::string>& own);

}  // namespace serried::tools
