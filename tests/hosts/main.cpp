// Runs the tests, or says why this machine cannot and returns what ctest takes for "skipped".
#include <gtest/gtest.h>

#include <cstdio>

#include "tests/hosts/hosts.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (!GTEST_FLAG_GET(list_tests)) {
    const std::string why = serried::testing::why_no_hosts();
    if (!why.empty()) {
      std::fputs(why.c_str(), stdout);
      return 77;
    }
  }
  return RUN_ALL_TESTS();
}
