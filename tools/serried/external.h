// Commands that are programs of their own, because they link LibTorch: serried-doctor for `serried doctor`.
#pragma once

#include <string>

namespace serried::tools {

/// "doctor, ..." as found beside this program and in ../libexec/serried.
std::string list_external_commands();

/// Becomes serried-<command>; `arguments` are its arguments, the command itself first. Returns only if there is no
/// such command: the code to exit with, after an error that lists the commands.
int exec_external_command(const std::string& command, char** arguments);

}  // namespace serried::tools
