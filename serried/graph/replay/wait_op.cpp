// The op that waits for a collective on its way, so that waiting has a place in a graph.
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>

namespace serried::graph {
namespace {

void wait(const c10::intrusive_ptr<c10d::Work>& work) {
  work->wait();
}

TORCH_LIBRARY_FRAGMENT(serried, m) {
  m.def("wait(__torch__.torch.classes.c10d.Work work) -> ()", wait);
}

}  // namespace
}  // namespace serried::graph
