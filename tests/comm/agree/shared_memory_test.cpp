// Shared memory of peers: what is taken, and all that is refused.
#include "serried/comm/agree/shared_memory.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <filesystem>

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "serried/comm/agree/group_status.h"
#include "serried/comm/agree/host.h"
#include "serried/comm/backends/shm/segment.h"
#include "tests/support/errors.h"

namespace serried::detail {
namespace {

using serried::testing::error_text;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;

constexpr int64_t kBytes = 3 * 4096;

// A descriptor of this process, as a place that a peer might name.
class Offered {
 public:
  explicit Offered(int fd) : fd_(fd) { EXPECT_GE(fd, 0); }
  ~Offered() { ::close(fd_); }
  Offered(const Offered&) = delete;
  Offered& operator=(const Offered&) = delete;

  SharedFilePlace place() const { return {.pid = ::getpid(), .fd = fd_}; }
  int fd() const { return fd_; }

 private:
  const int fd_;
};

std::string refusal(const SharedFilePlace& place, int64_t bytes = kBytes, uid_t owner = ::geteuid()) {
  const SharedMemory memory = SharedMemory::open(place, bytes, owner);
  EXPECT_FALSE(memory.has_file());
  EXPECT_EQ(memory.data(), nullptr);
  EXPECT_TRUE(memory.is_foreign());
  const std::string head = c10::str("refused /proc/", place.pid, "/fd/", place.fd, ": ");
  EXPECT_EQ(memory.problem().substr(0, head.size()), head);
  return memory.problem().substr(head.size());
}

std::string refusal(const Offered& offered) {
  return refusal(offered.place());
}

int unsealed_memory(int seals) {
  const int fd = ::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  EXPECT_EQ(::ftruncate(fd, kBytes), 0);
  EXPECT_EQ(::fcntl(fd, F_ADD_SEALS, seals), 0);
  return fd;
}

std::string temporary_path(const char* name) {
  return c10::str(::testing::TempDir(), "serried_", name, "_", ::getpid());
}

TEST(SharedMemory, WhatOneRankMakesAnotherMaps) {
  const SharedMemory mine = SharedMemory::make("test", kBytes);
  char* there = static_cast<char*>(::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, mine.fd(), 0));
  mine.data()[kBytes - 1] = 'x';
  EXPECT_EQ(there[kBytes - 1], 'x');
  ::munmap(there, kBytes);
  const SharedMemory theirs = SharedMemory::open(*SharedFilePlace::parse(mine.place().text()), kBytes);
  ASSERT_EQ(theirs.problem(), "");
  EXPECT_EQ(theirs.data()[kBytes - 1], 'x');
}

TEST(SharedMemory, IsMappedOnceForAllThreadsOfAProcess) {
  SharedMemory first = SharedMemory::make("test", kBytes);
  const SharedMemory second = SharedMemory::open(first.place(), kBytes);
  EXPECT_EQ(first.data(), second.data());
  first.data()[kBytes - 1] = 'x';
  first = SharedMemory();
  EXPECT_EQ(second.data()[kBytes - 1], 'x');
  EXPECT_NE(SharedMemory::make("test", kBytes).data(), second.data());
}

TEST(SharedMemory, EndsWithItsLastOwner) {
  const char* const address = SharedMemory::make("test", kBytes).data();
  unsigned char resident[kBytes / 4096];
  EXPECT_EQ(::mincore(const_cast<char*>(address), kBytes, resident), -1);
  EXPECT_EQ(errno, ENOMEM);
}

TEST(SharedMemory, OutlivesItsFile) {
  SharedMemory mine = SharedMemory::make("test", kBytes);
  const SharedFilePlace place = mine.place();
  mine.close_file();
  EXPECT_FALSE(mine.has_file());
  EXPECT_EQ(mine.data()[kBytes - 1], 0);
  EXPECT_FALSE(SharedMemory::open(place, kBytes).has_file());
}

TEST(SharedMemory, SaysWhatCannotBeMade) {
  const SharedMemory memory = SharedMemory::make("test", -1);
  EXPECT_FALSE(memory.has_file());
  EXPECT_EQ(memory.data(), nullptr);
  EXPECT_EQ(memory.problem(), "Invalid argument");
}

TEST(SharedMemory, SaysWhatCannotBeMapped) {
  const SharedMemory memory = SharedMemory::make("test", 0);
  EXPECT_TRUE(memory.has_file());
  EXPECT_EQ(memory.data(), nullptr);
  EXPECT_EQ(memory.problem(), "Invalid argument");
}

TEST(SharedMemory, PrivateZerosHaveNoFile) {
  const SharedMemory memory = SharedMemory::make_private(kBytes);
  EXPECT_FALSE(memory.has_file());
  EXPECT_EQ(memory.problem(), "");
  EXPECT_EQ(memory.data()[kBytes - 1], 0);
}

TEST(SharedMemory, ItsSizeStays) {
  const SharedMemory mine = SharedMemory::make("test", kBytes);
  EXPECT_EQ(::ftruncate(mine.fd(), 0), -1);
  EXPECT_EQ(::ftruncate(mine.fd(), 2 * kBytes), -1);
  EXPECT_EQ(::fcntl(mine.fd(), F_ADD_SEALS, F_SEAL_WRITE), -1);
}

TEST(SharedMemory, PlacesAreTwoNumbers) {
  EXPECT_EQ(SharedFilePlace::parse("12 3")->fd, 3);
  for (const char* text : {"", "12", "0 3", "-1 3", "12 -1", "12 3 4", "/etc/passwd", "12 3x", "99999999999 3"}) {
    EXPECT_FALSE(SharedFilePlace::parse(text)) << text;
  }
}

TEST(SharedMemory, NothingThereIsNoStrangersWork) {
  const SharedMemory memory = SharedMemory::open({.pid = ::getpid(), .fd = 999999}, kBytes);
  EXPECT_FALSE(memory.has_file());
  EXPECT_FALSE(memory.is_foreign());
  EXPECT_EQ(memory.problem(), c10::str("cannot open /proc/", ::getpid(), "/fd/999999: No such file or directory"));
}

TEST(SharedMemory, AnotherSizeIsRefused) {
  const SharedMemory mine = SharedMemory::make("test", kBytes);
  EXPECT_EQ(refusal(mine.place(), kBytes + 1), "it has 12288 bytes, not 12289");
  EXPECT_EQ(refusal(mine.place(), kBytes - 1), "it has 12288 bytes, not 12287");
}

TEST(SharedMemory, WhatCanStillChangeIsRefused) {
  for (const int seals : {0, F_SEAL_SHRINK, F_SEAL_SHRINK | F_SEAL_GROW, F_SEAL_GROW | F_SEAL_SEAL,
                          F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL}) {
    EXPECT_EQ(refusal(Offered(unsealed_memory(seals))), "its size or its use can still be changed") << seals;
  }
}

TEST(SharedMemory, FilesOnDiskAreRefused) {
  const std::string path = temporary_path("plain");
  const Offered plain(::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  EXPECT_EQ(::ftruncate(plain.fd(), kBytes), 0);
  EXPECT_EQ(refusal(plain), "it is a file on disk, not shared memory");
  std::filesystem::remove(path);
  EXPECT_THAT(refusal(plain), HasSubstr("it"));  // without a name it is still no shared memory, or not sealed
}

TEST(SharedMemory, PipesDevicesAndSocketsAreRefusedWithoutBeingOpened) {
  const std::string path = temporary_path("fifo");
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  // Opening the pipe for reading alone would block; the look at it must not.
  EXPECT_EQ(refusal(Offered(::open(path.c_str(), O_RDWR | O_CLOEXEC))), "it is no regular file");
  std::filesystem::remove(path);
  EXPECT_EQ(refusal(Offered(::open("/dev/null", O_RDWR | O_CLOEXEC))), "it is no regular file");
  EXPECT_EQ(refusal(Offered(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0))), "it is no regular file");
  EXPECT_EQ(refusal(Offered(::open("/tmp", O_RDONLY | O_DIRECTORY | O_CLOEXEC))), "it is no regular file");
}

TEST(SharedMemory, AnotherOwnersIsRefused) {
  const SharedMemory mine = SharedMemory::make("test", kBytes);
  EXPECT_EQ(refusal(mine.place(), kBytes, ::geteuid() + 1),
            c10::str("it belongs to user ", ::geteuid(), ", not to user ", ::geteuid() + 1));
}

// The process of another user, which keeps memory that looks just like a rank's.
class AnotherUser {
 public:
  AnotherUser() {
    EXPECT_EQ(::pipe2(ends_, O_CLOEXEC), 0);
    pid_ = ::fork();
    if (pid_ != 0) {
      EXPECT_EQ(::read(ends_[0], &fd_, sizeof fd_), ssize_t(sizeof fd_));
      return;
    }
    const SharedMemory memory = ::setuid(65534) == 0 ? SharedMemory::make("test", kBytes) : SharedMemory();
    const int fd = memory.fd();
    [[maybe_unused]] const ssize_t told = ::write(ends_[1], &fd, sizeof fd);
    ::pause();
    ::_exit(0);
  }
  ~AnotherUser() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    ::close(ends_[0]);
    ::close(ends_[1]);
  }
  SharedFilePlace place() const { return {.pid = pid_, .fd = fd_}; }

 private:
  int ends_[2] = {};
  pid_t pid_ = -1;
  int fd_ = -1;
};

// Root can become another user, and is let in by the kernel.
void expect_refused_by_root() {
  const AnotherUser user;
  ASSERT_GE(user.place().fd, 0);
  EXPECT_EQ(refusal(user.place()), "it belongs to user 65534, not to user 0");
}

// The first process is another user's, save in a container that has one user only: there it has a terminal or a pipe.
void expect_refused_by_others() {
  const SharedMemory memory = SharedMemory::open({.pid = 1, .fd = 0}, kBytes);
  EXPECT_FALSE(memory.has_file());
  EXPECT_THAT(memory.problem(), ::testing::AnyOf("cannot open /proc/1/fd/0: Permission denied",
                                                 "refused /proc/1/fd/0: it is no regular file"));
}

TEST(SharedMemory, MemoryOfAnotherUserIsRefusedEvenByRoot) {
  ::geteuid() == 0 ? expect_refused_by_root() : expect_refused_by_others();
}

TEST(SharedMemory, ASegmentOfAnotherShapeIsNotMapped) {
  const shm::SegmentShape small{.world_size = 2, .heap_bytes = 0};
  const shm::SegmentShape large{.world_size = 2, .heap_bytes = 1 << 20};
  const shm::Segment segment = shm::Segment::create(small);
  const SharedFilePlace place = segment.place();
  EXPECT_NO_THROW(shm::Segment::attach(small, place));
  EXPECT_THAT(
      error_text<c10::DistBackendError>([&] { shm::Segment::attach(large, place); }),
      MatchesRegex("\\[shm\\] the shared memory of rank 0 cannot be used: refused /proc/[0-9]+/fd/[0-9]+: it has "
                   "[0-9]+ bytes, not [0-9]+\n"
                   "  fix: find out who writes to the store of this job: rank 0 did not make this"));
}

TEST(SharedMemory, NoPathIsOpenedThatAStrangerNames) {
  const std::string path = temporary_path("victim");
  const Offered victim(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  EXPECT_EQ(::ftruncate(victim.fd(), 1 << 20), 0);
  for (const std::string& place : {path, victim.place().text(), std::string("0 0")}) {
    const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
    store->set("host/0", host_identity());
    store->set("page/0", place);
    EXPECT_THAT(error_text<c10::DistBackendError>([&] { GroupStatus(store, 1, 2, std::chrono::seconds(5)); }),
                HasSubstr("[new_group] the watch page of rank 0 cannot be used: "))
        << place;
  }
  EXPECT_EQ(std::filesystem::file_size(path), 1 << 20);
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace serried::detail
