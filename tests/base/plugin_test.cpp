// Plug-ins that are there, missing, broken, or of another version.
#include "serried/base/plugin.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include <c10/util/StringUtil.h>

#include "tests/support/environment.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(Plugin, IsSoughtInThePathFirst) {
  const ScopedEnv environment{{"SERRIED_PLUGIN_PATH", "/nowhere::" SERRIED_OLD_PLUGINS}};
  EXPECT_EQ(detail::find_plugin("ucx", "serried_ucx_plugin").path, SERRIED_OLD_PLUGINS "/libserried_ucx.so");
}

TEST(Plugin, OfAnotherVersionIsRefused) {
  const ScopedEnv environment{{"SERRIED_PLUGIN_PATH", SERRIED_OLD_PLUGINS}};
  const detail::FoundPlugin found = detail::find_plugin("ucx", "serried_ucx_plugin");
  EXPECT_EQ(found.function, nullptr);
  EXPECT_THAT(found.why_not, StartsWith(SERRIED_OLD_PLUGINS "/libserried_ucx.so was built with serried 0.0.1, LibTorch "
                                                            "1.0, this library is serried 0.1.0, LibTorch 2.13."));
}

TEST(Plugin, WithoutTheSymbolIsRefused) {
  const ScopedEnv environment{{"SERRIED_PLUGIN_PATH", SERRIED_OLD_PLUGINS}};
  EXPECT_EQ(detail::find_plugin("ucx", "another").why_not,
            SERRIED_OLD_PLUGINS "/libserried_ucx.so has no symbol another");
}

TEST(Plugin, ThatIsMissingIsNamedWithTheFolders) {
  const ScopedEnv environment{{"SERRIED_PLUGIN_PATH", "/nowhere"}};
  const detail::FoundPlugin found = detail::find_plugin("missing", "symbol");
  EXPECT_EQ(found.function, nullptr);
  EXPECT_THAT(found.why_not, StartsWith("libserried_missing.so is not in /nowhere, /"));
}

TEST(Plugin, ThatIsNoLibraryIsRefused) {
  const std::string folder = c10::str(::testing::TempDir(), "serried_plugin_", ::getpid());
  std::filesystem::create_directory(folder);
  std::ofstream(folder + "/libserried_broken.so") << "not a library";
  const ScopedEnv environment{{"SERRIED_PLUGIN_PATH", folder}};
  const detail::FoundPlugin found = detail::find_plugin("broken", "symbol");
  EXPECT_EQ(found.function, nullptr);
  EXPECT_THAT(found.why_not, HasSubstr("cannot be opened: "));
  EXPECT_THAT(found.why_not, HasSubstr(folder + "/libserried_broken.so"));
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace serried::testing
