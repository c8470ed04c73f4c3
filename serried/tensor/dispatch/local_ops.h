// The names that tensor/dispatch has for the tape.
#pragma once

#include "serried/tape/recorder.h"

namespace serried {

inline void execute_local(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  tape::run(op, stack);
}

inline tape::Recorder* local_op_tap() {
  return tape::current_recorder();
}

}  // namespace serried
