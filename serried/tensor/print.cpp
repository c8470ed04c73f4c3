// How tensors read on a stream, in a failed expectation and in a debugger. LibTorch's printer reads memory, which a
// DTensor has not, and calls nothing on its way that could tell printing from computing. So a printer of the same name
// stands in front of it: it shows DTensors, and hands every other tensor on to LibTorch's.
#include <ATen/core/Formatting.h>
#include <dlfcn.h>

#include <algorithm>
#include <iostream>

#include "serried/tensor/dispatch/copied_view.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/meta.h"
#include "serried/tensor/spec.h"

namespace serried {
namespace {

using Printer = std::ostream& (*)(std::ostream&, const at::Tensor&, int64_t);

// LibTorch's at::print: the next one in the order of libraries, or the first where LibTorch comes before this one.
Printer find_libtorch_printer() {
  constexpr const char* kName = "_ZN2at5printERSoRKNS_6TensorEl";
  void* next = ::dlsym(RTLD_NEXT, kName);
  return reinterpret_cast<Printer>(next != nullptr ? next : ::dlsym(RTLD_DEFAULT, kName));
}

std::ostream& print_plain(std::ostream& out, const at::Tensor& t, int64_t line_size) {
  static const Printer printer = find_libtorch_printer();
  return printer(out, t, line_size);
}

bool is_whole_everywhere(const Spec& spec) {
  return std::all_of(spec.placements.begin(), spec.placements.end(),
                     [](const Placement& placement) { return placement.is_replicate(); });
}

std::ostream& print_part(std::ostream& out, const DTensorMeta& meta, int64_t line_size) {
  const Spec& spec = *meta.spec;
  out << "DTensor " << spec.to_string();
  if (!spec.mesh.contains_this_rank()) return out << ", no part on this rank";
  detail::check_fresh("print", "", meta);
  out << ", local " << detail::sizes_text(meta.local.sizes()) << " =\n";
  print_plain(out, meta.local, line_size);
  if (is_whole_everywhere(spec)) return out;
  return out << "\n[ part of rank " << spec.mesh.get_rank()
             << "; the whole: serried::DTensor(x).full_tensor(), called on every rank ]";
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const DTensor& t) {
  const DTensorMeta* meta = dtensor_meta(t);
  return meta == nullptr ? out << "DTensor (undefined)" : print_part(out, *meta, 80);
}

}  // namespace serried

namespace at {

std::ostream& print(std::ostream& out, const Tensor& t, int64_t line_size) {
  const serried::DTensorMeta* meta = serried::dtensor_meta(t);
  return meta != nullptr ? serried::print_part(out, *meta, line_size) : serried::print_plain(out, t, line_size);
}

}  // namespace at

/// For debuggers, which know this name without any debug information: `call (void)serried_print(&loss)`.
extern "C" __attribute__((visibility("default"))) void serried_print(const at::Tensor* t) {
  std::cout << *t << std::endl;
}
