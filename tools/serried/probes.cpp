// Probes of the operating system. Each does what the library does: between sibling processes, as ranks are.
#include "tools/serried/probes.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <thread>

#include "serried/base/cores.h"
#include "serried/launch/fd.h"

namespace serried::tools {
namespace {

using launch::Fd;
constexpr uint64_t kPattern = 0x5e771ed5e771ed00;

Probe probe_cores() {
  return {"cores", true,
          std::to_string(num_usable_cores()) + " usable of " + std::to_string(::sysconf(_SC_NPROCESSORS_ONLN))};
}

Probe probe_memory() {
  std::ifstream file("/proc/meminfo");
  double available_gib = 0;
  for (std::string name, rest; file >> name && std::getline(file, rest);) {
    if (name == "MemAvailable:") available_gib = std::stod(rest) / (1 << 20);
  }
  const double total_gib =
      static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE)) / (1 << 30);
  char text[64];
  std::snprintf(text, sizeof text, "%.1f GiB available of %.1f GiB", available_gib, total_gib);
  return {"memory", true, text};
}

// Runs `fn` in a child; 0 if it returned 0, else the errno it returned.
int in_child(const std::function<int()>& fn) {
  const pid_t pid = ::fork();
  if (pid < 0) return errno;
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::_exit(fn());
  }
  int status = 0;
  if (::waitpid(pid, &status, 0) != pid) return errno;
  return WIFEXITED(status) ? WEXITSTATUS(status) : ECHILD;
}

int read_shared(const std::string& path) {
  const Fd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd) return errno;
  void* memory = ::mmap(nullptr, sizeof kPattern, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (memory == MAP_FAILED) return errno;
  return std::memcmp(memory, &kPattern, sizeof kPattern) == 0 ? 0 : EIO;
}

Probe probe_shared_memory() {
  Probe probe{.name = "shared memory", .detail = "memfd, opened by another process through /proc"};
  const Fd fd(static_cast<int>(::memfd_create("serried-doctor", MFD_CLOEXEC)));
  if (!fd) return {probe.name, false, std::string("memfd_create: ") + std::strerror(errno)};
  if (::pwrite(fd.get(), &kPattern, sizeof kPattern, 0) != sizeof kPattern) {
    return {probe.name, false, std::string("writing a memfd: ") + std::strerror(errno)};
  }
  const std::string path = "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(fd.get());
  const int error = in_child([&] { return read_shared(path); });
  if (error != 0) return {probe.name, false, "opening " + path + " from another process: " + std::strerror(error)};
  probe.works = true;
  return probe;
}

Probe probe_pidfd() {
  const Fd fd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  if (fd) return {"pidfd", true, "a dead rank is noticed at once"};
  return {"pidfd", false, std::string("pidfd_open: ") + std::strerror(errno) + "; needs Linux 5.3"};
}

int read_memory_of(pid_t pid, uint64_t* address) {
  uint64_t value = 0;
  const iovec here{.iov_base = &value, .iov_len = sizeof value};
  const iovec there{.iov_base = address, .iov_len = sizeof value};
  if (::process_vm_readv(pid, &here, 1, &there, 1, 0) != sizeof value) return errno;
  return value == kPattern ? 0 : EIO;
}

Probe probe_cross_memory_attach() {
  static uint64_t value = kPattern;  // at the same address in both children
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return {"cross-memory attach", false, std::strerror(errno)};
  const Fd read_end(ends[0]);
  Fd write_end(ends[1]);
  const pid_t sibling = ::fork();
  if (sibling == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    write_end.reset();
    char byte;
    [[maybe_unused]] const ssize_t count = ::read(read_end.get(), &byte, 1);  // lives until the pipe is closed
    ::_exit(0);
  }
  const int error = sibling < 0 ? errno : in_child([&] { return read_memory_of(sibling, &value); });
  write_end.reset();
  if (sibling > 0) ::waitpid(sibling, nullptr, 0);
  if (error == 0)
    return {"cross-memory attach", true, "process_vm_readv between sibling processes; nothing of serried needs it"};
  return {"cross-memory attach", false,
          std::string("process_vm_readv: ") + std::strerror(error) + "; nothing of serried needs it"};
}

}  // namespace

std::vector<Probe> probe_machine() {
  return {probe_cores(), probe_memory(), probe_shared_memory(), probe_pidfd(), probe_cross_memory_attach()};
}

}  // namespace serried::tools
