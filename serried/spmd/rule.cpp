// Rules given at run time: parsed, kept, and malformed ones shown with the place marked.
#include "serried/spmd/rule.h"

#include <mutex>
#include <set>

#include "serried/base/error.h"

namespace serried::spmd {

namespace {

/// Rules are views, and those of users must live as long as any plan: the few distinct texts are kept for ever.
std::string_view keep(std::string_view text) {
  static std::mutex mutex;
  static std::set<std::string, std::less<>> texts;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = texts.find(text);
  return found == texts.end() ? *texts.emplace(text).first : *found;
}

}  // namespace

Rule parse_or_raise(std::string_view where, std::string_view op, std::string_view text) {
  Rule rule;
  const ParseError error = parse(keep(text), rule);
  if (error.what == nullptr) return rule;
  raise<c10::ValueError>({where,
                          "rule for " + std::string(op) + ": " + error.what + "\n  " + std::string(text) + "\n  " +
                              std::string(error.position, ' ') + "^",
                          "change the text at the mark; \"mk, kn -> mn\" is a rule, docs/rules.md has the grammar"});
}

}  // namespace serried::spmd
