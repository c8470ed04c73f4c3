// Headers first, then data: both are asked for before they are needed.
#include "serried/parallel/pipeline/messages.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <numeric>

#include "serried/base/error.h"
#include "serried/comm/collectives/own_tags.h"
#include "serried/comm/collectives/watch.h"
#include "serried/parallel/pipeline/group_use.h"
#include "serried/tape/tape.h"
#include "serried/tensor/meta.h"

namespace serried::detail {
namespace {

using Content = MessageHeader::Content;
using Kind = PipelineAction::Kind;

// Of one way, that are there before they are asked for.
constexpr size_t kMostAhead = 2;

bool is_gradient(const PipelineAction& action) {
  return action.kind != Kind::F;
}

std::string shape_text(const DeviceMesh& mesh) {
  std::string text;
  for (const int64_t size : mesh.shape()) text += (text.empty() ? "" : "x") + std::to_string(size);
  return text;
}

std::string layout_text(const Spec& spec) {
  return to_string(spec.placements) + " on " + shape_text(spec.mesh);
}

std::string text_of(const MessageHeader& header) {
  std::string text = watch::dtype_name(at::ScalarType(header.dtype)) +
                     sizes_text(c10::IntArrayRef(header.sizes.data(), header.num_dims));
  if (header.is_distributed != 0) text += std::string(" ") + header.layout.data();
  return text;
}

[[noreturn]] void refuse_sent(const at::Tensor& x, const std::string& what, const std::string& fix) {
  raise<c10::NotImplementedError>({"Pipeline", watch::describe_tensor(x) + " between stages " + what, fix});
}

void write_shape(const at::Tensor& x, MessageHeader& header) {
  if (x.dim() > int64_t(MessageHeader::kMostDims)) refuse_sent(x, "has more than 8 dims", "flatten some of them");
  header.content = Content::data;
  header.dtype = int8_t(x.scalar_type());
  header.num_dims = uint8_t(x.dim());
  std::copy(x.sizes().begin(), x.sizes().end(), header.sizes.begin());
  const DTensorMeta* meta = dtensor_meta(x);
  if (meta == nullptr) return;
  header.is_distributed = 1;
  const std::string layout = layout_text(*meta->spec);
  if (layout.size() >= header.layout.size()) {
    refuse_sent(x, "lies as \"" + layout + "\", which is too long a text", "use a mesh with fewer axes");
  }
  std::copy(layout.begin(), layout.end(), header.layout.begin());
}

// Its dims, those that are far apart in memory first; as they stand where it has holes, or memory of its own twice.
c10::DimVector memory_order(const at::Tensor& x) {
  c10::DimVector order(size_t(x.dim()));
  std::iota(order.begin(), order.end(), int64_t(0));
  if (x.is_contiguous() || !x.is_non_overlapping_and_dense()) return order;
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return x.stride(a) > x.stride(b); });
  return order;
}

// This rank's part as it can be sent: the next stage computes on what lies as it would without a border between them,
// since kernels may add in the order of memory. Parts of DTensors are row-major.
at::Tensor sent_part(const at::Tensor& x, MessageHeader& header) {
  const DTensorMeta* meta = dtensor_meta(x);
  const at::Tensor part = meta != nullptr ? meta->local : x;
  if (part.layout() != at::kStrided) refuse_sent(x, "is not dense", "call to_dense() at the end of the stage");
  const at::Tensor plain = part.detach().resolve_conj().resolve_neg();
  const c10::DimVector order = memory_order(meta != nullptr ? plain.contiguous() : plain);
  for (size_t i = 0; i < std::min(order.size(), header.order.size()); ++i) header.order[i] = uint8_t(order[i]);
  return plain.permute(order).contiguous();
}

// The other way round.
at::Tensor in_order_of(const MessageHeader& header, const at::Tensor& data) {
  c10::DimVector sizes, places(size_t(header.num_dims));
  for (int64_t i = 0; i < header.num_dims; ++i) {
    sizes.push_back(header.sizes[header.order[size_t(i)]]);
    places[header.order[size_t(i)]] = i;
  }
  return data.view(sizes).permute(places);
}

// On its own mesh, with the placements of the sender's: parts travel between equal coordinates.
at::Tensor wrapped(const Message& message, const std::optional<DeviceMesh>& mesh, const std::string& from) {
  const MessageHeader& header = message.header;
  if (!mesh) {
    raise<c10::ValueError>({"Pipeline", from + " is " + text_of(header) + ", and the stage that gets it is on no mesh",
                            "give this stage parameters on a mesh, pass .mesh, or make it plain at the end of the "
                            "stage before: full_tensor() or to_local()"});
  }
  const std::string layout = header.layout.data();
  const size_t end = layout.rfind(" on ");
  if (layout.substr(end + 4) != shape_text(*mesh)) {
    raise<c10::ValueError>({"Pipeline",
                            from + " is " + text_of(header) + ", and the stage that gets it is on " + mesh->to_string(),
                            "give all stages meshes of one shape, or pass .mesh"});
  }
  const Placements placements = parse_placements(layout.substr(0, end));
  const c10::IntArrayRef sizes(header.sizes.data(), header.num_dims);
  const c10::DimVector local = local_sizes(sizes, placements, mesh->position());
  if (c10::multiply_integers(local) != header.num_elements) {
    raise<c10::ValueError>({"Pipeline",
                            from + " is " + text_of(header) + " with " + std::to_string(header.num_elements) +
                                " elements on the sender, and this rank's part would be " + sizes_text(local),
                            "let neighbours in the pipeline have equal coordinates on their meshes"});
  }
  const at::Tensor part = message.data.view(local);
  return wrap(part, spec_of_result(part, *mesh, placements, sizes));
}

bool has_order(const MessageHeader& header) {
  unsigned dims = 0;
  for (size_t i = 0; i < header.num_dims; ++i) dims |= 1u << header.order[i];
  return dims + 1 == 1u << header.num_dims;
}

// What came where a header should be may be the data of a rank whose step is a replay.
bool is_header(const MessageHeader& header) {
  return header.magic == MessageHeader::kMagic && header.content <= Content::failure &&
         header.num_dims <= MessageHeader::kMostDims && header.num_elements >= 0 && has_order(header);
}

[[noreturn]] void refuse_header(int peer) {
  raise<c10::DistBackendError>(
      {"Pipeline", "what came from rank " + std::to_string(peer) + " of the pipeline's group is no message of a step",
       "capture the step on all ranks or on none, pass arguments of the same sizes on all of them, and let nobody else "
       "send over the pipeline's group"});
}

// A peer that counts its micro-batches otherwise, or somebody who sends under its name.
[[noreturn]] void refuse_missing(int peer, int64_t microbatch) {
  raise<c10::DistBackendError>({"Pipeline",
                                c10::str("rank ", peer,
                                         " of the pipeline's group has sent all its messages of this "
                                         "step, and none of micro-batch ",
                                         microbatch),
                                "run the same version of serried on every rank, and let nobody else send over the "
                                "pipeline's group"});
}

enum class ErrorType : int8_t { plain, value, type, index, not_implemented, backend };

ErrorType type_of(const std::exception& error) {
  if (dynamic_cast<const c10::ValueError*>(&error) != nullptr) return ErrorType::value;
  if (dynamic_cast<const c10::TypeError*>(&error) != nullptr) return ErrorType::type;
  if (dynamic_cast<const c10::IndexError*>(&error) != nullptr) return ErrorType::index;
  if (dynamic_cast<const c10::NotImplementedError*>(&error) != nullptr) return ErrorType::not_implemented;
  if (dynamic_cast<const c10::DistBackendError*>(&error) != nullptr) return ErrorType::backend;
  return ErrorType::plain;
}

std::string text_of(const std::exception& error) {
  const auto* known = dynamic_cast<const c10::Error*>(&error);
  return known != nullptr ? known->what_without_backtrace() : error.what();
}

// The error of another rank, with its type.
[[noreturn]] void raise_failure(const Message& message) {
  const MessageHeader& header = message.header;
  const PipelineAction at{PipelineAction::Kind(header.failed_kind), header.stage, header.microbatch};
  const std::string text(static_cast<const char*>(message.data.const_data_ptr()), size_t(header.num_elements));
  const ErrorText error{"Pipeline", "rank " + std::to_string(header.rank) + " failed at " + to_string(at) + ": " + text,
                        "look at that rank; make a new group and a new Pipeline to go on"};
  switch (ErrorType(header.dtype)) {
    case ErrorType::value: raise<c10::ValueError>(error);
    case ErrorType::type: raise<c10::TypeError>(error);
    case ErrorType::index: raise<c10::IndexError>(error);
    case ErrorType::not_implemented: raise<c10::NotImplementedError>(error);
    case ErrorType::backend: raise<c10::DistBackendError>(error);
    default: raise<c10::Error>(error);
  }
}

}  // namespace

// A recorded step has its sizes from the recording: its replays send data and no headers.
void Inbox::ask_for_header() {
  const tape::Pause no_part_of_a_step;
  bytes_ = at::empty({MessageHeader::kSentBytes}, at::kByte);
  header_ = async::recv(bytes_, group_, {.peer = peer_, .tag = tag_});
  --num_left_;
}

void Inbox::ask_for_data() {
  Message message;
  {
    const tape::Pause no_part_of_a_step;
    header_->wait();
    std::memcpy(&message.header, bytes_.const_data_ptr(), sizeof(MessageHeader));
  }
  header_.reset();
  if (!is_header(message.header)) refuse_header(peer_);
  const bool has_data = message.header.content != Content::none;
  if (has_data) {
    const bool is_text = message.header.content == Content::failure;
    message.data = at::empty({message.header.num_elements}, is_text ? at::kChar : at::ScalarType(message.header.dtype));
  }
  const bool travels = has_data && message.header.num_elements > 0;
  coming_data_.push_back(travels ? async::recv(message.data, group_, {.peer = peer_, .tag = tag_}) : Pending(nullptr));
  // Nothing follows a failure, and who waits for a rank that left would be told of that alone.
  if (message.header.content == Content::failure) num_left_ = 0;
  coming_.push_back(std::move(message));
  if (num_left_ > 0) ask_for_header();
}

void Inbox::complete() {
  Message message = std::move(coming_.front());
  coming_.pop_front();
  const Pending data = std::move(coming_data_.front());
  coming_data_.pop_front();
  if (message.data.defined() && message.header.num_elements > 0) data.wait();
  constexpr int64_t kBehindAll = std::numeric_limits<int64_t>::max();
  const int64_t microbatch = message.header.content == Content::failure ? kBehindAll : message.header.microbatch;
  is_here_.emplace(microbatch, std::move(message));
}

void Inbox::expect(int64_t count) {
  num_left_ = count;
  header_.reset();
  coming_.clear();
  coming_data_.clear();
  is_here_.clear();
  if (count > 0) ask_for_header();
}

// Which message comes first is a matter of chance: a recorded step asks for each where it needs it.
void Inbox::poll() {
  if (!tape::is_recording() && header_ && coming_.size() + is_here_.size() < kMostAhead && header_->ready())
    ask_for_data();
}

void Inbox::discard() {
  while (header_ || !coming_.empty()) {
    if (coming_.empty()) ask_for_data();
    complete();
    is_here_.clear();
  }
}

Message Inbox::take(int64_t microbatch) {
  auto found = is_here_.find(microbatch);
  while (found == is_here_.end()) {
    if (coming_.empty() && !header_) refuse_missing(peer_, microbatch);
    if (coming_.empty()) ask_for_data();
    complete();
    // Of a failure it does not matter which micro-batch it met.
    const bool has_failed = is_here_.rbegin()->second.header.content == Content::failure;
    found = has_failed ? std::prev(is_here_.end()) : is_here_.find(microbatch);
  }
  Message message = std::move(found->second);
  is_here_.erase(found);
  poll();
  return message;
}

Messages::Messages(Group group, const PipelineTable& table)
    : group_(std::move(group)), table_(table), pipeline_(uint8_t(count_pipeline(group_))) {
  add_ways();
}

int Messages::tag_of(const Way& way) const {
  return kPipelineTags + int(2 * way.second) + int(way.first);
}

// Between every two stages that are neighbours on different ranks.
void Messages::add_ways() {
  const int64_t rank = group_->getRank();
  for (int64_t stage = 0; stage + 1 < table_.stages(); ++stage) {
    if (is_local(stage)) continue;
    const int64_t here = table_.rank_of(stage), next = table_.rank_of(stage + 1);
    const Way forward{false, stage}, backward{true, stage + 1};
    if (here == rank) {
      outgoing_.emplace(forward, Outgoing{int(next)});
      incoming_.try_emplace(backward, group_, int(next), tag_of(backward));
    }
    if (next == rank) {
      incoming_.try_emplace(forward, group_, int(here), tag_of(forward));
      outgoing_.emplace(backward, Outgoing{int(here)});
    }
  }
}

void Messages::begin_step(int64_t step, bool passes_gradients, int64_t batch_rows) {
  step_ = step;
  batch_rows_ = batch_rows;
  headers_sent_.clear();
  data_sent_.clear();
  for (auto& [way, inbox] : incoming_) inbox.expect(way.first && !passes_gradients ? 0 : table_.microbatches());
  for (auto& [way, out] : outgoing_) out.num_left = way.first && !passes_gradients ? 0 : table_.microbatches();
}

void Messages::poll() {
  while (!headers_sent_.empty() && headers_sent_.front().ready()) headers_sent_.pop_front();
  // A recorded step waits where a replay has to.
  while (!tape::is_recording() && !data_sent_.empty() && data_sent_.front().ready()) data_sent_.pop_front();
  for (auto& [way, inbox] : incoming_) inbox.poll();
}

void Messages::post(const MessageHeader& header, const at::Tensor& data, int peer, int tag) {
  {
    const tape::Pause no_part_of_a_step;
    const at::Tensor bytes = at::zeros({MessageHeader::kSentBytes}, at::kByte);
    std::memcpy(bytes.mutable_data_ptr(), &header, sizeof header);
    headers_sent_.push_back(async::send(bytes, group_, {.peer = peer, .tag = tag}));
  }
  if (data.defined() && data.numel() > 0) data_sent_.push_back(async::send(data, group_, {.peer = peer, .tag = tag}));
}

void Messages::send(const PipelineAction& made_by, const at::Tensor& x, bool requires_grad) {
  const Way way{is_gradient(made_by), made_by.stage};
  MessageHeader header;
  header.is_gradient = uint8_t(way.first);
  header.requires_grad = uint8_t(requires_grad);
  header.stage = int32_t(made_by.stage);
  header.microbatch = int32_t(made_by.microbatch);
  header.rank = group_->getRank();
  header.step = int32_t(step_);
  header.pipeline = pipeline_;
  header.batch_rows = batch_rows_;
  at::Tensor part;
  if (x.defined()) {
    write_shape(x, header);
    part = sent_part(x, header);
    header.num_elements = part.numel();
  }
  Outgoing& out = outgoing_.at(way);
  post(header, part, out.peer, tag_of(way));
  --out.num_left;
}

Received Messages::receive(const PipelineAction& made_by, const std::optional<DeviceMesh>& mesh) {
  const Way way{is_gradient(made_by), made_by.stage};
  const Message message = incoming_.at(way).take(made_by.microbatch);
  const MessageHeader& header = message.header;
  if (header.content == Content::failure) {
    failure_ = message;
    raise_failure(message);
  }
  if (header.pipeline != pipeline_) {
    raise<c10::ValueError>({"Pipeline",
                            c10::str("pipeline ", int(pipeline_), " of this group meets pipeline ",
                                     int(header.pipeline), " of rank ", header.rank, " at ", to_string(made_by)),
                            "call step() and eval() of several pipelines in the same order on every rank, or give each "
                            "a group of its own"});
  }
  if (header.step != int32_t(step_)) {
    raise<c10::ValueError>({"Pipeline",
                            "step " + std::to_string(step_) + " of this rank meets step " +
                                std::to_string(header.step) + " of rank " + std::to_string(header.rank) + " at " +
                                to_string(made_by),
                            "call step() and eval() in the same order on every rank"});
  }
  if (!way.first) batch_rows_ = header.batch_rows;
  if (header.content == Content::none) return {};
  const std::string from = "what " + to_string(made_by) + " on rank " + std::to_string(header.rank) + " made";
  if (header.is_distributed != 0) return {wrapped(message, mesh, from), header.requires_grad != 0};
  return {in_order_of(header, message.data), header.requires_grad != 0};
}

void Messages::end_step() {
  for (const Pending& sent : data_sent_) sent.wait();
  data_sent_.clear();
  const tape::Pause no_part_of_a_step;
  for (const Pending& sent : headers_sent_) sent.wait();
  headers_sent_.clear();
}

// What another rank has told is told on as it is.
Message Messages::failure_of(const PipelineAction& failed_at, const std::exception& error) const {
  if (failure_) return *failure_;
  Message failure;
  const std::string text = text_of(error);
  failure.data = at::empty({int64_t(text.size())}, at::kChar);
  std::memcpy(failure.data.mutable_data_ptr(), text.data(), text.size());
  failure.header.content = Content::failure;
  failure.header.dtype = int8_t(type_of(error));
  failure.header.failed_kind = uint8_t(failed_at.kind);
  failure.header.stage = int32_t(failed_at.stage);
  failure.header.microbatch = int32_t(failed_at.microbatch);
  failure.header.rank = group_->getRank();
  failure.header.num_elements = int64_t(text.size());
  return failure;
}

std::set<int> Messages::peers_that_wait() const {
  std::set<int> peers;
  for (const auto& [way, out] : outgoing_) {
    if (out.num_left > 0) peers.insert(out.peer);
  }
  return peers;
}

void Messages::tell_failure(const PipelineAction& failed_at, const std::exception& error) {
  const tape::Pause no_part_of_a_step;
  failure_ = failure_of(failed_at, error);
  note_failed_step(group_, c10::str("at ", to_string(failed_at), " on rank ", group_->getRank()));
  // Who has had all messages of this step meets the failure where the first one of the next step should be.
  for (auto& [way, out] : outgoing_) {
    try {
      post(failure_->header, failure_->data, out.peer, tag_of(way));
    } catch (const std::exception&) {  // NOLINT: a rank that cannot be reached knows already
    }
  }
  // Such a rank goes on with its step, and could not end it if nobody took what it sends.
  const std::set<int> told = peers_that_wait();
  for (auto& [way, inbox] : incoming_) {
    if (told.contains(inbox.peer())) continue;
    try {
      inbox.discard();
    } catch (const std::exception&) {  // NOLINT: it has failed, too, or is gone
    }
  }
}

}  // namespace serried::detail
