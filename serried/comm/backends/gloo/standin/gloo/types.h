// The gloo types that c10d's ProcessGroupGloo.hpp names: LibTorch ships that header, but not gloo's own.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

// c10d holds these only behind smart pointers, so nothing depends on what they look like, and nothing here may be made,
// derived from or called by us. scripts/check_gloo_layout.py proves that the compiler saw no reason to.
namespace gloo {

class Context {
 public:
  Context() = delete;
  void setTimeout(std::chrono::milliseconds timeout);
};

namespace transport {

class Device;

class UnboundBuffer {
 public:
  virtual ~UnboundBuffer() = 0;
};

}  // namespace transport

namespace rendezvous {

// The virtual functions that c10d's GlooStore overrides: without them its `override` does not compile.
class Store {
 public:
  virtual ~Store() = 0;
  virtual void set(const std::string& key, const std::vector<char>& value) = 0;
  virtual std::vector<char> get(const std::string& key) = 0;
  virtual void wait(const std::vector<std::string>& keys) = 0;
  virtual void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) = 0;
};

}  // namespace rendezvous
}  // namespace gloo
