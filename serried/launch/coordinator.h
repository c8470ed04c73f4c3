// The decisions of a job over nodes: who starts what, when all stop, whether they start again. Pure: no sockets.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "serried/launch/cause.h"
#include "serried/launch/order.h"

namespace serried::launch {

struct CoordinatorOptions {
  int num_nodes = 1;
  int max_restarts = 0;
  std::string run_id = {};
  std::string job_secret = {};
  std::function<int()> new_master_port;  // called once per attempt
};

/// Node 0's view of all nodes, itself included. Each call may add orders, which `take_orders` hands out.
class Coordinator {
 public:
  explicit Coordinator(CoordinatorOptions options);

  /// Adds a node. When it was the last one missing, orders every node to start.
  /// Returns why it is refused; "" if it is not.
  std::string join(int node, int num_nodes, int num_local, const std::string& host);

  /// All of the node's ranks have exited with 0.
  void done(int node);
  /// The node's ranks cannot go on; the first cause of an attempt counts.
  void failed(int node, Cause cause);
  /// The node was ordered to stop and has no rank left.
  void ended(int node);
  /// The node's launcher is gone.
  void lost(int node);

  std::vector<NodeOrder> take_orders();

  /// Nodes that have not joined.
  std::vector<int> missing() const;
  bool started() const { return attempt_ >= 0; }
  bool stopping() const { return cause_.has_value(); }
  /// Nodes that were told to stop and have not said `ended`.
  std::vector<int> still_ending() const;

 private:
  enum class State { missing, running, done, ended, lost };
  struct Node {
    State state = State::missing;
    int num_local = 0;
    std::string host;
  };

  void start();
  void stop(const Cause& cause);
  void conclude_if_all_ended();
  void order_all(const Order& order);

  CoordinatorOptions options_;
  std::vector<Node> nodes_;
  std::vector<NodeOrder> orders_;
  std::optional<Cause> cause_;
  int attempt_ = -1;
  bool concluded_ = false;
};

}  // namespace serried::launch
