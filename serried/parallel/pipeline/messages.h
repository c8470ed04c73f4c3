// What travels between the stages of a pipeline: each message tells its own shape, so that nobody has to agree on one.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "serried/comm/collectives/async.h"
#include "serried/comm/groups/group.h"
#include "serried/mesh/mesh.h"
#include "serried/parallel/pipeline/table.h"

namespace serried::detail {

/// The bytes in front of the data of a message.
struct MessageHeader {
  static constexpr size_t kMostDims = 8;
  enum class Content : uint8_t { none, data, failure };
  /// No tensor of floats is as long: what a rank that replays sends instead of a header does not fit.
  static constexpr int64_t kSentBytes = 257;
  static constexpr uint64_t kMagic = 0x7365727269656421;

  uint64_t magic = kMagic;
  Content content = Content::none;
  uint8_t is_gradient = 0;
  uint8_t requires_grad = 0;
  uint8_t is_distributed = 0;
  int8_t dtype = 0;  // at::ScalarType; of a failure: the type of the error
  uint8_t num_dims = 0;
  uint8_t failed_kind = 0;  // of a failure: at which action
  uint8_t pipeline = 0;     // of those on the group: its number, as far as it fits
  int32_t stage = 0;        // that has made it, or where it failed
  int32_t microbatch = 0;
  int32_t rank = 0;
  int32_t step = 0;
  int64_t batch_rows = 0;                  // of the input that the first stage got
  int64_t num_elements = 0;                // that follow: of this rank's part, or bytes of a text
  std::array<int64_t, kMostDims> sizes{};  // global
  std::array<uint8_t, kMostDims> order{};  // of the dims in memory: a transposed activation arrives as one
  std::array<char, 136> layout{};          // "S0 R on 2x2" of a DTensor
};
static_assert(sizeof(MessageHeader) < MessageHeader::kSentBytes);

/// One that has come.
struct Message {
  MessageHeader header;
  at::Tensor data;  // flat; undefined where there is none
};

/// A tensor that a stage gets, or none.
struct Received {
  at::Tensor tensor;  // without gradient; undefined: the sender had none
  bool requires_grad = false;
};

/// Messages into one stage from one neighbour. They come in the order of the sender; who waits for one of them keeps
/// those before it.
class Inbox {
 public:
  Inbox(Group group, int peer, int tag) : group_(std::move(group)), peer_(peer), tag_(tag) {}

  /// As many as will come in this step.
  void expect(int64_t count);
  /// Moves on without waiting, but keeps no more than two that nobody has asked for.
  void poll();
  /// Blocks until that of `microbatch` is there.
  Message take(int64_t microbatch);
  /// Takes what is left of this step, or until the peer fails, for nobody.
  void discard();
  int peer() const { return peer_; }

 private:
  void ask_for_header();
  void ask_for_data();
  void complete();

  const Group group_;
  const int peer_;
  const int tag_;
  int64_t num_left_ = 0;                // whose header is not asked for yet
  at::Tensor bytes_;                    // of the header on its way
  std::optional<Pending> header_;       // none: not asked for
  std::deque<Message> coming_;          // whose data is on its way
  std::deque<Pending> coming_data_;     // of each of them
  std::map<int64_t, Message> is_here_;  // by micro-batch
};

/// All messages of one rank.
class Messages {
 public:
  Messages(Group group, const PipelineTable& table);

  /// `passes_gradients`: backwards run, too. `batch_rows`: where the first stage is; the others are told.
  void begin_step(int64_t step, bool passes_gradients, int64_t batch_rows = 0);
  /// Once a forward has its input.
  int64_t batch_rows() const { return batch_rows_; }
  /// Lets go of what has been sent, and begins to receive what has come.
  void poll();
  /// To the stage after (or before, of gradients): each F but the last stage's makes one, each B or I but the first
  /// stage's another. `x` may be undefined.
  void send(const PipelineAction& made_by, const at::Tensor& x, bool requires_grad);
  /// What `made_by` made, laid on `mesh` where it is a DTensor. ValueError where that does not fit.
  Received receive(const PipelineAction& made_by, const std::optional<DeviceMesh>& mesh);
  /// All that was sent has been taken.
  void end_step();
  /// Tells all neighbours: in this step, if they still wait for this rank, else in their next one. Returns when these
  /// have sent what they had for it.
  void tell_failure(const PipelineAction& failed_at, const std::exception& error);

  /// Whether this stage and the next one are on one rank.
  bool is_local(int64_t stage) const { return table_.rank_of(stage) == table_.rank_of(stage + 1); }

 private:
  struct Outgoing {
    int peer = 0;
    int64_t num_left = 0;
  };
  using Way = std::pair<bool, int64_t>;  // gradient or not, and the stage that makes it

  void post(const MessageHeader& header, const at::Tensor& data, int peer, int tag);
  int tag_of(const Way& way) const;
  void add_ways();
  std::set<int> peers_that_wait() const;
  Message failure_of(const PipelineAction& failed_at, const std::exception& error) const;

  const Group group_;
  const PipelineTable& table_;
  const uint8_t pipeline_;
  int64_t step_ = 0;
  int64_t batch_rows_ = 0;
  std::map<Way, Inbox> incoming_;
  std::map<Way, Outgoing> outgoing_;
  std::deque<Pending> headers_sent_;
  std::deque<Pending> data_sent_;
  std::optional<Message> failure_;  // of a step: there is none after it
};

}  // namespace serried::detail
