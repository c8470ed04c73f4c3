// Which ops of a program have no sharding rule.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace serried {

/// Runs `fn` and lists the ops in it that took the replicate default, sorted; all ranks of the mesh call it.
///     ops_without_rule([&] { model->forward(x).sum().backward(); })  ->  {"aten::histc"}
std::vector<std::string> ops_without_rule(const std::function<void()>& fn);

}  // namespace serried
