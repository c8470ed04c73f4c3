// How our programs run under a sanitizer, and what it must not report, each with its reason. Part of every sanitized
// test program, so that one that is started by hand, or by another test, runs the same way.
#include <gtest/gtest.h>

extern "C" {

// LibTorch is not instrumented, so nothing here may depend on that: memory that it hands over counts as written.
const char* __asan_default_options() {
  return "detect_stack_use_after_return=1:strict_init_order=1:check_initialization_order=1:abort_on_error=0";
}

const char* __ubsan_default_options() {
  return "print_stacktrace=1";
}

const char* __lsan_default_suppressions() {
  // gloo does not free its list of interfaces where it finds none of the name asked for, and raises.
  return "leak:gloo::transport::tcp::CreateDeviceAttr\n";
}

const char* __tsan_default_options() {
  // LibTorch and OpenMP synchronise with locks and atomics that are not seen; only what our code reads or writes
  // counts.
  return "ignore_noninstrumented_modules=1:second_deadlock_stack=1:halt_on_error=0";
}

// Else a report would fail the program at its end, and name no test.
void __tsan_on_report() {
  ADD_FAILURE() << "the thread sanitizer reports what stands above";
}

const char* __tsan_default_suppressions() {
  // Lets go of the last reference to our works, whose count LibTorch's code lowers unseen: what the thread that ran the
  // work did before it lowered the count seems unordered.
  // So does the last reference to an exception that two threads have had: its count is the standard library's.
  return "race:c10d::broadcast_coalesced\nrace:std::__exception_ptr::exception_ptr::_M_release\n";
}

}  // extern "C"
