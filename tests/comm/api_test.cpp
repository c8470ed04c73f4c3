// The public API as users write it: what compiles here may not stop compiling.
#include <serried/serried.h>

#include <gtest/gtest.h>

namespace {

using namespace std::chrono_literals;
using serried::Group;

struct NetImpl : torch::nn::Module {
  torch::nn::Linear fc = register_module("fc", torch::nn::Linear(2, 2));
};
TORCH_MODULE(Net);

// Every field of every struct, in the order in which they may be named.
[[maybe_unused]] void options(const Group& g, const c10::intrusive_ptr<c10d::Store>& store) {
  using c10d::ReduceOp;
  (void)serried::GroupOptions{.timeout = 30s,
                              .device = at::kCPU,
                              .init_method = "env://",
                              .store = store,
                              .rank = 0,
                              .world_size = 2,
                              .backend_options = {{"threads", 2}}};
  (void)serried::RunRanksOptions{.backend = "gloo", .timeout = 5s};
  (void)serried::AllReduceOptions{.op = ReduceOp::AVG, .timeout = 5s};
  (void)serried::AllGatherOptions{.dim = 1, .timeout = 5s};
  (void)serried::ReduceScatterOptions{.dim = 1, .op = ReduceOp::AVG, .timeout = 5s};
  (void)serried::AllToAllOptions{.split_dim = 0, .concat_dim = 1, .split_sizes = {1, 2}, .timeout = 5s};
  (void)serried::BroadcastOptions{.src = 1, .timeout = 5s};
  (void)serried::ReduceOptions{.dst = 1, .op = ReduceOp::AVG, .timeout = 5s};
  (void)serried::GatherOptions{.dst = 1, .timeout = 5s};
  (void)serried::ScatterOptions{.src = 1, .timeout = 5s};
  (void)serried::PeerOptions{.peer = 1, .tag = 7, .timeout = 5s};
  serried::barrier(g, {.timeout = 5s});
}

[[maybe_unused]] void groups(const Group& world, const c10::intrusive_ptr<c10d::Store>& store) {
  { Group g = serried::new_group("gloo", {.timeout = 30s, .device = at::kCPU}); }
  { Group g = serried::new_group(); }
  { Group g2 = serried::new_group("shm", {.init_method = "file:///tmp/x?rank=0&world_size=2"}); }
  { Group g3 = serried::new_group("gloo", {.store = store, .rank = 0, .world_size = 2}); }
  { Group g4 = serried::new_group("gloo", {.backend_options = {{"threads", 2}}}); }
  { Group sub = serried::split_group(world, {{0, 1}, {2, 3}}); }
  serried::register_backend("mine", [](const serried::FactoryArgs& a) -> Group {
    return serried::new_group("fake", {.timeout = a.timeout,
                                       .device = a.device,
                                       .store = a.store,
                                       .rank = a.rank,
                                       .world_size = a.world_size,
                                       .backend_options = a.options});
  });
  { std::vector<std::string> names = serried::registered_backends(); }
  {
    bool available = serried::is_backend_available("nccl");
    (void)available;
  }
  const auto fn = [](const Group& g) { serried::barrier(g); };
  serried::run_ranks(4, fn, {.backend = "gloo", .timeout = 5s});
  {
    auto net = serried::seeded(0, [] { return Net(); });
  }
}

[[maybe_unused]] void collectives(const at::Tensor& x, const Group& g) {
  { at::Tensor y = serried::all_reduce(x, g); }
  { at::Tensor y = serried::all_reduce(x, g, c10d::ReduceOp::AVG); }
  { at::Tensor y = serried::all_reduce(x, g, {.op = c10d::ReduceOp::AVG, .timeout = 30s}); }
  { at::Tensor y = serried::all_gather(x, g, {.dim = 1}); }
  { at::Tensor y = serried::reduce_scatter(x, g, {.dim = 0, .op = c10d::ReduceOp::SUM}); }
  { at::Tensor y = serried::all_to_all(x, g, {.split_dim = 0, .concat_dim = 1}); }
  { at::Tensor y = serried::broadcast(x, g, {.src = 0}); }
  { at::Tensor y = serried::reduce(x, g, {.dst = 0, .op = c10d::ReduceOp::AVG}); }
  { std::vector<at::Tensor> parts = serried::gather(x, g, {.dst = 0}); }
  { at::Tensor y = serried::scatter({x, x}, g, {.src = 0}); }
  { at::Tensor y = serried::scatter({}, g, {.src = 0}); }
  { at::Tensor y = serried::scatter(x.tensor_split(2), g); }
  serried::all_reduce_(x, g);
  serried::broadcast_(x, g);
  serried::barrier(g);
  serried::send(x, g, {.peer = 1});
  serried::recv(x, g, {.peer = 0});
}

[[maybe_unused]] void pending(const at::Tensor& x, const Group& g) {
  serried::Pending p = serried::async::all_reduce(x, g);
  { at::Tensor y = p.wait(); }
  {
    at::Tensor z = p.then([](at::Tensor y) { return y * 2; }).wait();
  }
  {
    bool ready = p.ready();
    (void)ready;
  }
  serried::async::barrier(g).wait();
  serried::async::send(x, g, {.peer = 1}).wait();
  for (const serried::Pending& started :
       {serried::async::all_reduce(x, g, c10d::ReduceOp::AVG), serried::async::all_reduce(x, g, {.timeout = 30s}),
        serried::async::all_gather(x, g, {.dim = 1}), serried::async::reduce_scatter(x, g, {.dim = 0}),
        serried::async::all_to_all(x, g, {.split_dim = 0, .concat_dim = 1}),
        serried::async::broadcast(x, g, {.src = 0}), serried::async::reduce(x, g, {.dst = 0}),
        serried::async::scatter({x, x}, g, {.src = 0}), serried::async::all_reduce_(x, g),
        serried::async::broadcast_(x, g), serried::async::recv(x, g, {.peer = 0})}) {
    started.wait();
  }
  serried::PendingTensors parts = serried::async::gather(x, g, {.dst = 0});
  { std::vector<at::Tensor> all = parts.wait(); }
  {
    at::Tensor first = parts.then([](std::vector<at::Tensor> all) { return all[0]; }).wait();
  }
}

TEST(Api, RanksAndGroupsReadAsDocumented) {
  serried::run_ranks(2, [](const Group& g) {
    at::Tensor x = at::full({3}, g->getRank() + 1.);
    EXPECT_TRUE(serried::all_reduce(x, g).equal(at::full({3}, 3.)));
    EXPECT_TRUE(serried::current_process_group() == g);
    const Group world = serried::split_group(g, {{1, 0}});
    {
      serried::ProcessGroupGuard guard(world);
      EXPECT_TRUE(serried::current_process_group() == world);
    }
    EXPECT_TRUE(serried::current_process_group() == g);
  });
  EXPECT_FALSE(serried::current_process_group());
}

TEST(Api, APendingIsWaitedForOrContinued) {
  serried::run_ranks(2, [](const Group& g) {
    at::Tensor x = at::full({3}, g->getRank() + 1.);
    serried::Pending p = serried::async::all_reduce(x, g);
    const at::Tensor z = p.then([](at::Tensor y) { return y * 2; }).wait();
    EXPECT_TRUE(p.ready());
    EXPECT_TRUE(p.wait().equal(at::full({3}, 3.)));
    EXPECT_TRUE(z.equal(at::full({3}, 6.)));
  });
}

TEST(Api, ValuesOfOtherTypesTravel) {
  serried::run_ranks(2, [](const Group& g) {
    std::vector<std::string> all = serried::all_gather_object(std::string("a"), g);
    EXPECT_EQ(all, (std::vector<std::string>{"a", "a"}));
    EXPECT_EQ(serried::broadcast_object(g->getRank() + 0.5, g, {.src = 1}), 1.5);
  });
}

TEST(Api, CollectivesIntoAnOutputAllocateNothing) {
  serried::run_ranks(3, [](const Group& g) {
    const at::Tensor x = at::arange(6, at::kFloat) + 10 * g->getRank();
    at::Tensor all = at::empty({18});
    serried::all_gather_into(all, x, g);
    EXPECT_TRUE(all.narrow(0, 6, 6).equal(at::arange(6, at::kFloat) + 10));
    at::Tensor piece = at::empty({2});
    serried::reduce_scatter_into(piece, x, g);
    EXPECT_TRUE(piece.equal((at::arange(2, at::kFloat) + 2 * g->getRank()) * 3 + 30));
    at::Tensor swapped = at::empty({6});
    const auto version = swapped._version();
    serried::all_to_all_into(swapped, x, g);
    EXPECT_EQ(swapped._version(), version + 1);
    EXPECT_TRUE(swapped.narrow(0, 4, 2).equal(at::arange(2, at::kFloat) + 2 * g->getRank() + 20));
    EXPECT_THROW(serried::all_gather_into(piece, x, g), c10::ValueError);
    EXPECT_THROW(serried::all_to_all_into(piece, piece, g), c10::ValueError);
    const at::Tensor needs_grad = torch::ones({6}, torch::requires_grad());
    EXPECT_THROW(serried::all_to_all_into(swapped, needs_grad, g), c10::ValueError);
  });
}

}  // namespace
