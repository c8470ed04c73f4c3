// Files of a checkpoint: every call either does all it should or says which file and why not.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace serried::checkpoint::detail {

/// An open file or folder, closed at the end.
class File {
 public:
  /// `was_there`: whether it was seen before, which an error then says.
  static File open_to_read(const std::string& path, bool was_there = false);
  static File open_to_write(const std::string& path);  // must exist
  static File create(const std::string& path);         // must not exist
  static File open_folder(const std::string& path);
  File(File&& other) noexcept;
  File& operator=(File&&) = delete;
  ~File();

  int fd() const { return fd_; }
  const std::string& path() const { return path_; }
  int64_t size() const;
  /// Differs between any two files that were ever at one path.
  struct Identity {
    uint64_t device, number;
    int64_t written_at, num_bytes;
    bool operator==(const Identity&) const = default;
  };
  Identity identity() const;
  void resize(int64_t size) const;
  /// All of `size` bytes, however many calls it takes. A file that ends before is a Failure.
  void read(int64_t offset, void* data, int64_t size) const;
  void write(int64_t offset, const void* data, int64_t size) const;
  /// Lets the disk begin with what is written there. A hint: nothing is promised before `sync`.
  void start_writing(int64_t begin, int64_t end) const;
  /// Returns when the content is on the disk.
  void sync() const;
  /// Whether this process has it now; the kernel gives it back when the process ends, however that comes.
  bool try_lock() const;
  /// Waits for it. Where the file system has no locks, nothing happens.
  void lock() const;

 private:
  File(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  int fd_;
  std::string path_;
};

/// A new file that is on the disk when it returns; `time`, in nanoseconds since 1970, is when it was changed last.
void write_file(const std::string& path, std::string_view content, std::optional<int64_t> time = {});
/// Of at most `max_bytes`.
std::string read_file(const std::string& path, int64_t max_bytes);

/// "cannot `verb` `path`: No space left on device", with what helps. `was_there`: whether the file or its folder was
/// seen before, so that somebody has taken it away.
[[noreturn]] void fail_with_errno(const char* verb, const std::string& path, int error, bool was_there = true);

/// Failure for a path that the system would see only the beginning of.
void check_no_nul(const std::string& path);

}  // namespace serried::checkpoint::detail
