// Captured functions whose agreement a stranger writes to.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/rendezvous/signed_store.h"
#include "serried/graph/capture.h"
#include "tests/support/each_rank.h"
#include "tests/support/errors.h"
#include "tests/support/meddling_store.h"

namespace serried {
namespace {

using namespace std::chrono_literals;

TEST(CaptureStrangers, AreRefusedByTheNameOfTheKey) {
  const auto exposed = c10::make_intrusive<testing::MeddlingStore>("capture/", "1\nsettled\n");
  const auto signer = std::make_shared<const detail::Signer>(std::string(32, 's'), "job/0");
  testing::each_rank(2, [&](int rank) {
    const at::NoGradGuard no_grad;
    const auto store = c10::make_intrusive<detail::SignedStore>(exposed, signer);
    const Group group = new_group("shm", {.timeout = 30s, .store = store, .rank = rank, .world_size = 2});
    auto step = capture([&](const at::Tensor& x) { return all_reduce(x, group); });
    const std::string error = testing::error_text<c10::Error>([&] {
      for (int i = 0; i < 4; ++i) step(torch::ones({3}));
    });
    EXPECT_THAT(error, ::testing::HasSubstr("capture/"));
    EXPECT_THAT(error, ::testing::HasSubstr("holds what no rank of this job wrote"));
  });
}

TEST(CaptureStrangers, AreFoundByWhatTheySayWhereTheJobHasNoSecret) {
  const auto exposed = c10::make_intrusive<testing::MeddlingStore>("capture/", "nonsense");
  testing::each_rank(2, [&](int rank) {
    const at::NoGradGuard no_grad;
    const Group group = new_group("shm", {.timeout = 30s, .store = exposed, .rank = rank, .world_size = 2});
    auto step = capture([&](const at::Tensor& x) { return all_reduce(x, group); });
    const std::string error = testing::error_text<c10::DistBackendError>([&] {
      for (int i = 0; i < 4; ++i) step(torch::ones({3}));
    });
    EXPECT_THAT(error, ::testing::HasSubstr(c10::str("[capture] rank ", 1 - rank,
                                                     " left \"nonsense\" in the store, which is no notice\n"
                                                     "  fix: find out who else writes to the store of this job")));
  });
}

}  // namespace
}  // namespace serried
