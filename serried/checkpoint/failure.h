// What goes wrong inside a checkpoint, before it is known which ranks it concerns.
#pragma once

#include <cerrno>
#include <exception>
#include <string>

namespace serried::checkpoint::detail {

/// Thrown by everything below save and load, which tell the other ranks and raise one error on all of them.
struct Failure : std::exception {
  enum class Kind { value, system };  // the caller's mistake, or what the machine refused

  Failure(Kind kind_, std::string text_, std::string fix_, int error_ = 0)
      : kind(kind_), text(std::move(text_)), fix(std::move(fix_)), error(error_) {}
  const char* what() const noexcept override { return text.c_str(); }

  Kind kind;
  std::string text;
  std::string fix;
  int error;  // errno, where the machine gave one

  /// Whether this process or the machine has too many open files: that says nothing of the file it was about.
  bool is_for_want_of_files() const { return error == EMFILE || error == ENFILE; }
};

[[noreturn]] inline void fail(std::string text, std::string fix) {
  throw Failure(Failure::Kind::value, std::move(text), std::move(fix));
}

/// The exception that is being handled as one: what a layer below has raised, as for want of memory, ends a step on
/// this rank like what the machine refused, and the other ranks have to hear of it.
Failure current_failure();

/// ValueError for mistakes, c10::Error for what the machine refused.
[[noreturn]] void raise_failure(const char* where, const Failure& failure);

}  // namespace serried::checkpoint::detail
