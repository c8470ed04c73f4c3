// The text of a failure, and its form on the wire.
#include "serried/launch/cause.h"

#include <signal.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>

#include "serried/launch/error.h"
#include "serried/launch/signals.h"
#include "serried/launch/wire.h"

namespace serried::launch {
namespace {

std::string node_text(const Cause& cause) {
  const std::string node = cause.node == kNodeOfLeader ? "the leader" : "node " + std::to_string(cause.node);
  return cause.host.empty() ? node : node + " (" + cause.host + ")";
}

std::string how_it_ended(const Cause& cause) {
  if (cause.signal == 0) return "exited with code " + std::to_string(cause.exit_code);
  return "was killed by signal " + std::to_string(cause.signal) + " (" + signal_name(cause.signal) + ")";
}

std::string fix_text(const Cause& cause) {
  if (cause.signal == SIGKILL) return "if nobody killed it, memory ran out: see dmesg, lower the batch size";
  if (cause.signal == SIGSEGV || cause.signal == SIGBUS)
    return "run that rank under gdb, or build with -fsanitize=address";
  if (cause.tail.empty()) return "it wrote nothing to stderr; see its stdout above";
  return "see its error above; --log-dir keeps all output";
}

std::string rank_report(const Cause& cause, int world_size, int num_nodes) {
  std::string text = "[run] rank " + std::to_string(cause.rank) + " of " + std::to_string(world_size);
  if (num_nodes > 1) text += " on " + node_text(cause);
  text += " (pid " + std::to_string(cause.pid) + ") " + how_it_ended(cause) + "\n";
  if (!cause.tail.empty()) text += "  its last lines of stderr:\n";
  for (const std::string& line : cause.tail) text += "    " + line + "\n";
  if (!cause.note.empty()) text += "  " + cause.note + "\n";
  if (cause.goes_on && !cause.note.empty()) return text;
  if (!cause.text.empty()) {
    return text + "  before that " + cause.text +
           "\n  fix: see whether all ranks make the same calls and end together; --log-dir keeps all output\n";
  }
  return text + "  fix: " + fix_text(cause) + "\n";
}

std::string loss_text(const Cause& cause, const std::string& ended) {
  const std::string text = (cause.text.empty() ? "" : ": " + cause.text) + ended + "\n";
  if (cause.goes_on) return text;
  if (!cause.note.empty()) return text + "  " + cause.note + "\n";
  return text +
         "  fix: see whether that machine or its launcher died; then start the job again on all nodes, with --nnodes "
         "min:max and --max-restarts if it is to go on without one\n";
}

// How errors of groups speak of other ranks' failures.
constexpr const char* kOfOthers[] = {"group is unusable since: ", " has left the group",     " have left the group",
                                     " died while rank ",         " died or left the group", "the process of rank",
                                     "[Pipeline] rank "};

}  // namespace

bool only_suffers(const Cause& cause) {
  if (cause.kind != Cause::Kind::rank_failed || cause.signal == SIGKILL) return false;
  return std::any_of(cause.tail.begin(), cause.tail.end(), [](const std::string& line) {
    return std::any_of(std::begin(kOfOthers), std::end(kOfOthers),
                       [&](const char* words) { return line.find(words) != std::string::npos; });
  });
}

std::string describe(const Cause& cause, int world_size, int num_nodes) {
  const bool keeps_going = cause.goes_on && !cause.note.empty();
  const std::string ended = keeps_going       ? "; " + cause.note
                            : world_size == 0 ? " before any rank started"
                                              : "; its " + std::to_string(world_size) + " ranks are ended";
  switch (cause.kind) {
    case Cause::Kind::rank_failed: return rank_report(cause, world_size, num_nodes);
    case Cause::Kind::interrupted: {
      const std::string where = num_nodes > 1 ? " on " + node_text(cause) : "";
      if (cause.signal == SIGPIPE) return "[run] nobody reads the output of the job any more" + where + ended + "\n";
      return "[run] the job got " + signal_name(cause.signal) + where + ended + "\n";
    }
    case Cause::Kind::node_lost: {
      const std::string what = cause.node == kNodeOfLeader ? "lost " : "lost the launcher of ";
      return "[run] " + what + node_text(cause) + loss_text(cause, ended);
    }
    case Cause::Kind::changed: return "[run] the job grows by " + cause.host + ended + " to start again\n";
    case Cause::Kind::launch_failed: return cause.text + (num_nodes > 1 ? "\n  at:  " + node_text(cause) : "") + "\n";
  }
  return "";
}

int exit_code(const Cause& cause) {
  if (cause.kind == Cause::Kind::node_lost || cause.kind == Cause::Kind::changed) return kExitFailure;
  return cause.signal != 0 ? kExitSignalBase + cause.signal : cause.exit_code;
}

std::vector<std::string> to_fields(const Cause& cause) {
  std::vector<std::string> fields = {std::to_string(static_cast<int>(cause.kind)),
                                     std::to_string(cause.node),
                                     cause.host,
                                     std::to_string(cause.rank),
                                     std::to_string(cause.pid),
                                     std::to_string(cause.exit_code),
                                     std::to_string(cause.signal),
                                     cause.text,
                                     std::to_string(static_cast<int>(cause.goes_on)),
                                     cause.note};
  fields.insert(fields.end(), cause.tail.begin(), cause.tail.end());
  return fields;
}

Cause cause_from_fields(const std::vector<std::string>& fields, size_t first) {
  if (fields.size() < first + 10) throw std::runtime_error("message too short");
  const auto number = [&](size_t i) { return number_in(fields[first + i]); };
  const int kind = number(0);
  if (kind < 0 || kind > static_cast<int>(Cause::Kind::changed)) throw std::runtime_error("unknown failure");
  const int signal = number(6);
  if (signal < 0 || signal >= NSIG) throw std::runtime_error("unknown signal");
  Cause cause{.kind = static_cast<Cause::Kind>(kind),
              .node = number(1),
              .host = fields[first + 2],
              .rank = number(3),
              .pid = number(4),
              .exit_code = number(5),
              .signal = signal,
              .tail = {fields.begin() + static_cast<std::ptrdiff_t>(first) + 10, fields.end()},
              .text = fields[first + 7],
              .goes_on = number(8) != 0,
              .note = fields[first + 9]};
  return cause;
}

}  // namespace serried::launch
