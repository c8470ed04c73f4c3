// The table of what is mapped.
#include "serried/comm/agree/shared_mapping.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <map>
#include <mutex>
#include <tuple>

namespace serried::detail {
namespace {

std::shared_ptr<char> map_memory(int fd, int64_t bytes, int flags) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, fd, 0);
  if (memory == MAP_FAILED) return nullptr;
  return {static_cast<char*>(memory), [bytes](char* mapped) { ::munmap(mapped, bytes); }};
}

class Mappings {
 public:
  std::shared_ptr<char> get(int fd, int64_t bytes) {
    struct stat file {};
    if (::fstat(fd, &file) != 0) return nullptr;
    std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(mapped_, [](const auto& entry) { return entry.second.expired(); });
    // What is mapped keeps its file, so that no other can have the same number meanwhile.
    std::weak_ptr<char>& known = mapped_[{file.st_dev, file.st_ino, bytes}];
    std::shared_ptr<char> memory = known.lock();
    if (!memory) known = memory = map_memory(fd, bytes, MAP_SHARED);
    return memory;
  }

 private:
  std::mutex mutex_;
  std::map<std::tuple<dev_t, ino_t, int64_t>, std::weak_ptr<char>> mapped_;
};

}  // namespace

std::shared_ptr<char> map_shared_file(int fd, int64_t bytes) {
  static Mappings mappings;
  return mappings.get(fd, bytes);
}

std::shared_ptr<char> map_private_zeros(int64_t bytes) {
  return map_memory(-1, bytes, MAP_PRIVATE | MAP_ANONYMOUS);
}

}  // namespace serried::detail
