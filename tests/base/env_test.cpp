// The table of environment variables and how text becomes values.
#include "serried/base/env.h"

#include <cstdlib>
#include <set>

#include "tests/support/environment.h"
#include "tests/support/errors.h"

namespace serried {
namespace {

using testing::ScopedEnv;

TEST(Env, UnsetAndEmptyGiveTheDefault) {
  ScopedEnv env{{"SERRIED_TIMEOUT", ""}};
  EXPECT_EQ(env::integer("SERRIED_TIMEOUT"), 300);
  ::unsetenv("SERRIED_TIMEOUT");
  EXPECT_EQ(env::text("SERRIED_TIMEOUT"), "300");
}

TEST(Env, ValuesAreReadAtEachCall) {
  ScopedEnv env{{"SERRIED_TIMEOUT", "7"}};
  EXPECT_EQ(env::integer("SERRIED_TIMEOUT"), 7);
  ::setenv("SERRIED_TIMEOUT", "8", 1);
  EXPECT_EQ(env::integer("SERRIED_TIMEOUT"), 8);
}

TEST(Env, WithoutDefaultThereIsNoValue) {
  ScopedEnv env{{"RANK", ""}};
  EXPECT_EQ(env::maybe_text("RANK"), std::nullopt);
  EXPECT_EQ(env::maybe_integer("RANK"), std::nullopt);
  EXPECT_EQ(env::text("RANK"), "");
}

TEST(Env, NotANumberNamesTheVariable) {
  ScopedEnv env{{"RANK", "2x"}};
  EXPECT_EQ(testing::error_text<c10::ValueError>([] { env::integer("RANK"); }),
            "[environment] RANK is \"2x\", not a whole number\n  fix: set RANK to a whole number, or unset it");
}

TEST(Env, MissingNumberNamesTheVariable) {
  ScopedEnv env{{"RANK", ""}};
  EXPECT_EQ(testing::error_text<c10::ValueError>([] { env::integer("RANK"); }),
            "[environment] RANK is not set: this process's rank in the job\n  fix: set RANK to a whole number");
}

TEST(Env, FlagsTakeTheUsualWords) {
  for (const char* yes : {"1", "true", "True", "YES", "on"}) {
    ScopedEnv env{{"USE_LIBUV", yes}};
    EXPECT_TRUE(env::flag("USE_LIBUV")) << yes;
  }
  for (const char* no : {"0", "false", "No", "off"}) {
    ScopedEnv env{{"USE_LIBUV", no}};
    EXPECT_FALSE(env::flag("USE_LIBUV")) << no;
  }
  ScopedEnv env{{"USE_LIBUV", "maybe"}};
  EXPECT_EQ(testing::error_text<c10::ValueError>([] { env::flag("USE_LIBUV"); }),
            "[environment] USE_LIBUV is \"maybe\", neither yes nor no\n  fix: set USE_LIBUV to 1 or 0");
}

TEST(Env, AVariableOutsideTheTableIsABug) {
  EXPECT_THROW(env::text("SERRIED_NO_SUCH_THING"), c10::Error);
}

TEST(Env, TableNamesEachVariableOnceWithItsMeaning) {
  std::set<std::string> names;
  for (const env::Variable& variable : env::table()) {
    EXPECT_TRUE(names.insert(variable.name).second) << variable.name;
    EXPECT_NE(std::string(variable.meaning), "") << variable.name;
  }
  EXPECT_TRUE(names.contains("SERRIED_SHM_HEAP_MB"));
}

}  // namespace
}  // namespace serried
