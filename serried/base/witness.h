// What a recorded function relied on without an op to show it: code that answers such a question tells the listener.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace serried {

/// A fact as a number that changes with it.
struct Witness {
  std::string name;
  std::function<uint64_t()> value;
  const void* subject = nullptr;                  // same name and subject: the same fact, whoever tells it
  std::string (*text)(uint64_t value) = nullptr;  // for readers; the number itself if null
};

class WitnessListener {
 public:
  virtual ~WitnessListener() = default;
  /// The running function is about to read something that no op shows: which module, which group.
  virtual void rely_on(Witness witness) = 0;
  /// It was told something that holds as long as `object` is there.
  virtual void rely_on_life(const std::string& name, std::weak_ptr<const void> object) = 0;
};

namespace detail {
extern constinit thread_local WitnessListener* current_listener;  // constinit: read without a check
}

/// Null unless this thread is being recorded.
inline WitnessListener* witness_listener() {
  return detail::current_listener;
}

}  // namespace serried
