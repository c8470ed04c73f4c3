// The thread that goes on with what is open while nobody waits for it.
#pragma once

#include <exception>
#include <string>
#include <thread>
#include <utility>

#include "serried/base/log.h"

namespace serried::shm {

/// None where the system gives no more threads: whoever waits does the work himself.
template <class Fn>
std::thread start_helper_thread(Fn run) {
  try {
    return std::thread(std::move(run));
  } catch (const std::exception& error) {
    log::warn_once(std::string("[shm] no thread of its own for what nobody waits for (") + error.what() +
                   "): asynchronous calls make progress only in wait()");
    return {};
  }
}

}  // namespace serried::shm
