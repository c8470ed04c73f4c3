// The factory.
#include "serried/comm/backends/factories.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "serried/comm/backends/hierarchical/group.h"
#include "serried/comm/net/make_wire.h"

namespace serried {

Group make_hierarchical_group(const FactoryArgs& args) {
  FactoryArgs rest = args;
  const auto wire = rest.options.extract("wire");
  const std::string engine = wire.empty() ? "auto" : wire.mapped().toStringRef();
  return hierarchical::make_group_over(
      rest, {.make_wire = [engine](const shm::ConnectArgs& of_group) {
        const auto store = c10::make_intrusive<c10d::PrefixStore>("wire", of_group.store);
        return net::make_wire({store, of_group.rank, of_group.world_size, of_group.timeout}, {.engine = engine});
      }});
}

}  // namespace serried
