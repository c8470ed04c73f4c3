// Sparse gradients whose rows are known beforehand are reduced as dense tensors.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/parallel/ddp/ddp.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/models.h"
#include "tests/support/on_ranks.h"

namespace serried::sparse_metadata_test {
namespace {

using testing::error_text;
using testing::expect_close;
using testing::expect_equal;
using testing::OnRanks;
using testing::models::SparseLookup;

std::shared_ptr<SparseLookup> filled_lookup() {
  auto net = std::make_shared<SparseLookup>();
  testing::models::fill_parameters(*net);
  return net;
}

/// Rows that any rank looks up, unsorted and with repetitions.
at::Tensor rows_of_all(int world_size) {
  std::vector<at::Tensor> rows;
  for (int rank = world_size - 1; rank >= 0; --rank) {
    rows.push_back(testing::models::indices(testing::models::batch_of(rank), 3, 11, rank).reshape({-1}));
  }
  return at::cat(rows);
}

class SparseMetadata : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(Backends, SparseMetadata, ::testing::ValuesIn(testing::settings({1, 2, 3})), testing::name_of);

TEST_P(SparseMetadata, AveragesTheRowsGivenAsADenseTensor) {
  on_ranks([&](const Group& group) {
    at::Tensor expected = at::zeros({11, 4});
    for (int rank = 0; rank < world_size(); ++rank) {
      auto plain = filled_lookup();
      const auto run = [&](const at::Tensor& x) { return plain->forward(x); };
      SparseLookup::loss(run, rank).backward();
      expected = expected + plain->table->weight.grad().to_dense() / world_size();
    }
    auto net = filled_lookup();
    DistributedDataParallel ddp(net, {.process_group = group});
    const at::Tensor rows = std::get<0>(at::_unique(rows_of_all(world_size())));
    for (const bool is_given : {true, true, false}) {  // it holds for one backward
      ddp.zero_grad();
      if (is_given) ddp.set_sparse_metadata({{"table.weight", rows_of_all(world_size())}});
      SparseLookup::loss(ddp, group->getRank()).backward();
      const at::Tensor grad = net->table->weight.grad();
      ASSERT_TRUE(grad.is_sparse());
      expect_close(grad.to_dense(), expected);
      if (is_given) expect_equal(grad.coalesce().indices()[0], rows);
    }
  });
}

TEST(SparseMetadataHooks, SeeTheRowsAndTheirNumbers) {
  run_ranks(1, [](const Group& group) {
    auto net = filled_lookup();
    DistributedDataParallel ddp(net, {.process_group = group});
    std::vector<at::Tensor> buffers, rows;
    ddp.register_comm_hook([&](c10d::GradBucket& bucket) {
      if (bucket.getSparseGradIndices()) {
        buffers.push_back(bucket.getBuffer());
        rows.push_back(*bucket.getSparseGradIndices());
      }
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
      future->markCompleted(bucket.getBuffer());
      return future;
    });
    ddp.set_sparse_metadata({{"table.weight", rows_of_all(1)}});
    SparseLookup::loss(ddp, 0).backward();
    ASSERT_EQ(rows.size(), 1);
    EXPECT_FALSE(buffers[0].is_sparse());
    EXPECT_EQ(buffers[0].size(0), rows[0].numel());
  });
}

TEST(SparseMetadataHooks, WrongNamesAndRowsAreErrors) {
  run_ranks(1, [](const Group& group) {
    auto net = filled_lookup();
    DistributedDataParallel ddp(net, {.process_group = group});
    std::string text = error_text<c10::ValueError>([&] { ddp.set_sparse_metadata({{"out.weight", at::arange(3)}}); });
    EXPECT_EQ(text.substr(0, text.find("\n  at:")),
              "[set_sparse_metadata] no parameter \"out.weight\" has sparse gradients\n"
              "  fix: use the names of weights of embeddings made with sparse(true)");
    const at::Tensor rows = std::get<0>(at::_unique(rows_of_all(1)));
    ddp.set_sparse_metadata({{"table.weight", rows.slice(0, 1)}});
    text = error_text<c10::ValueError>([&] { SparseLookup::loss(ddp, 0).backward(); });
    EXPECT_EQ(
        text.substr(0, text.find("\n  at:")),
        c10::str("[backward] row ", rows[0].item<int64_t>(), " of table.weight has a gradient but is not among the ",
                 rows.numel() - 1, " rows given\n  fix: pass the rows that any rank uses to set_sparse_metadata"));
  });
}

}  // namespace
}  // namespace serried::sparse_metadata_test
