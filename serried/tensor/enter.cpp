// How a tensor comes to the layout that a consumer asks for: once for all consumers that ask alike in a row.
#include "serried/tensor/enter.h"

#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "serried/tape/edges.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/making/gradient.h"
#include "serried/tensor/making/placing.h"
#include "serried/tensor/meta.h"
#include "serried/tensor/weak_tensor.h"

namespace serried {
namespace {

using torch::autograd::variable_list;

// Which data a tensor has right now. A version says whether it was written, and nothing of set_data: that gives a
// DTensor another meta, and a plain tensor another storage.
class DataSeen {
 public:
  DataSeen() = default;
  explicit DataSeen(const at::Tensor& x) : version_(x._version()) {
    if (dtensor_meta(x) != nullptr) {
      meta_ = x.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr();
      return;
    }
    storage_ = x.storage().getWeakStorageImpl();
    offset_ = x.storage_offset();
    sizes_ = x.sizes();
    strides_ = x.strides();
  }

  bool is_of(const at::Tensor& x) const {
    if (version_ != x._version()) return false;
    if (const DTensorMeta* meta = dtensor_meta(x)) return meta == meta_.get();
    return meta_ == nullptr && storage_._unsafe_get_target() == x.storage().unsafeGetStorageImpl() &&
           offset_ == x.storage_offset() && x.sizes() == c10::IntArrayRef(sizes_) &&
           x.strides() == c10::IntArrayRef(strides_);
  }

 private:
  c10::intrusive_ptr<c10::BackendMeta> meta_;  // of a DTensor; or
  // While it is watched its address is not used again.
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_{c10::intrusive_ptr<c10::StorageImpl>()};
  int64_t version_ = 0;
  int64_t offset_ = 0;
  c10::DimVector sizes_;
  c10::DimVector strides_;
};

struct Question {
  const at::Tensor& x;
  const DeviceMesh& mesh;
  const Placements& placements;
  int64_t last_size;
};

// What was asked for last, and what came of it: q, k and v, fed the same x, share one gather in forward, and their
// gradients meet before the one reduction in backward.
class LastEntered {
 public:
  /// Undefined where the last question was another one, or its answer need not be the same by now.
  at::Tensor find(const Question& q) const {
    if (!result_.defined() || watched_._unsafe_get_target() != q.x.unsafeGetTensorImpl()) return {};
    const bool is_same = data_.is_of(q.x) && requires_grad_ == q.x.requires_grad() &&
                         grad_mode_ == at::GradMode::is_enabled() && inference_ == c10::InferenceMode::is_enabled() &&
                         last_size_ == q.last_size && mesh_id_ == q.mesh.id() &&
                         dtensor_meta(result_)->spec->placements == q.placements;
    return is_same ? result_ : at::Tensor();
  }

  void keep(const Question& q, const at::Tensor& result) {
    watched_ = Watched(q.x.getIntrusivePtr());
    data_ = DataSeen(q.x);
    requires_grad_ = q.x.requires_grad();
    grad_mode_ = at::GradMode::is_enabled();
    inference_ = c10::InferenceMode::is_enabled();
    last_size_ = q.last_size;
    mesh_id_ = q.mesh.id();
    result_ = result;
  }

  // What is watched too: c10 keeps what a DTensor is, and with it the part, as long as anybody watches.
  void forget() {
    if (!result_.defined()) return;
    result_ = at::Tensor();
    watched_ = Watched(Held());
    data_ = DataSeen();
  }

 private:
  using Held = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  using Watched = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  Watched watched_{Held()};
  DataSeen data_;
  bool requires_grad_ = false;
  bool grad_mode_ = false;
  bool inference_ = false;
  int64_t last_size_ = -1;
  uint64_t mesh_id_ = 0;
  at::Tensor result_;  // in the placements that were asked for
};

LastEntered& last_entered() {
  thread_local LastEntered last;
  return last;
}

void forget_last() {
  last_entered().forget();
}

// Writes to an inference tensor leave no trace, so nothing may be remembered of it.
bool may_remember(const at::Tensor& x) {
  return !x.is_inference() && x.has_storage();
}

class EnterBackward final : public torch::autograd::Node {
 public:
  explicit EnterBackward(SpecPtr spec) : spec_(std::move(spec)) {}
  std::string name() const override { return "EnterBackward"; }

 private:
  variable_list apply(variable_list&& grads) override {
    forget_last();  // it would keep the graph alive
    if (!grads[0].defined() || dtensor_meta(grads[0]) == nullptr) return std::move(grads);
    return {DTensor(std::move(grads[0])).redistribute(detail::gradient_placements(spec_->placements))};
  }

  const SpecPtr spec_;  // of what entered
};

// The same part under another name: writing to either is seen by what autograd saved of the other.
at::Tensor renamed(const at::Tensor& x, const DTensorMeta& meta) {
  c10::TensorImpl* impl = x.unsafeGetTensorImpl();
  if (meta.use == nullptr) {
    return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true));
  }
  at::Tensor result = wrap(meta.local, meta.spec, meta.copied_from);
  result.unsafeGetTensorImpl()->set_version_counter(impl->version_counter());
  return result;
}

// Its gradient comes back as it is cut, by itself: nothing is pending on an axis that cuts what entered.
bool is_cut_everywhere(const Placements& placements) {
  return std::all_of(placements.begin(), placements.end(), [](const Placement& p) { return p.is_shard(); });
}

at::Tensor moved(const at::Tensor& x, const DTensorMeta& meta, const Placements& placements) {
  if (meta.spec->placements == placements) return renamed(x, meta);
  const at::NoGradGuard no_grad;
  return DTensor(x).redistribute(placements);
}

at::Tensor from_plain(const Question& q) {
  FromLocalOptions options;
  const int64_t last = q.x.dim() - 1;
  const bool last_is_cut = last >= 0 && num_shards(last, q.placements, q.mesh.shape()) > 1;
  if (last_is_cut && q.last_size >= 0) {
    Sizes sizes(q.x.sizes().begin(), q.x.sizes().end());
    for (int64_t d = 0; d < last; ++d) sizes[size_t(d)] *= num_shards(d, q.placements, q.mesh.shape());
    sizes[size_t(last)] = q.last_size;
    const c10::DimVector strides = contiguous_strides(sizes);
    options.stride = Sizes(strides.begin(), strides.end());
    options.shape = std::move(sizes);
  }
  return DTensor::from_local(q.x, q.mesh, q.placements, std::move(options));
}

template <class Make>
at::Tensor remembered(const Question& q, const Make& make) {
  if (!may_remember(q.x)) return make();
  if (at::Tensor known = last_entered().find(q); known.defined()) return known;
  at::Tensor result = make();
  last_entered().keep(q, result);
  return result;
}

[[maybe_unused]] const int kEdges = (tape::at_edges(forget_last), 0);

}  // namespace

at::Tensor detail::entered(const at::Tensor& x, const Placements& placements) {
  const DTensorMeta& meta = *dtensor_meta(x);
  const bool records = wants_gradient(x);
  if (!records && meta.spec->placements == placements) return x;
  at::Tensor result = moved(x, meta, placements);
  if (!records) return result;
  auto node = c10::make_intrusive<EnterBackward>(meta.spec);
  node->set_next_edges(torch::autograd::collect_next_edges(x));
  torch::autograd::set_history(result, c10::intrusive_ptr<torch::autograd::Node>(std::move(node)));
  return result;
}

at::Tensor detail::enter(const at::Tensor& x, const DeviceMesh& mesh, const AskedLayout& layout, int64_t last_size) {
  const DTensorMeta* meta = dtensor_meta(x);
  if (meta == nullptr) {
    if (dist_meta(x.unsafeGetTensorImpl()) != nullptr || !x.defined()) return x;
    const Placements whole(layout.is_asked() ? 0 : size_t(mesh.ndim()));
    const Question question{x, mesh, layout.is_asked() ? layout.of(x.dim()) : whole, last_size};
    return remembered(question, [&] { return from_plain(question); });
  }
  if (!layout.is_asked() || (mesh.id() != meta->spec->mesh.id() && !(mesh == meta->spec->mesh))) return x;
  const Placements& placements = layout.of(x.dim());
  if (meta->spec->placements == placements && (!wants_gradient(x) || is_cut_everywhere(placements))) return x;
  return remembered({x, mesh, placements, last_size}, [&] { return entered(x, placements); });
}

}  // namespace serried
