// Files that are not what was saved: found, and named.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <thread>

#include "serried/checkpoint/checkpoint.h"
#include "serried/checkpoint/blocks.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/index.h"
#include "serried/checkpoint/inspect.h"
#include "serried/tensor/dtensor.h"
#include "tests/checkpoint/folder.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using checkpoint::state_of;

// Reads come in the order of names, and not of the file.
TEST(CheckpointDamage, DamageIsFoundInWhateverOrderTensorsAreRead) {
  const Folder folder;
  const SmallLimits limits({.file_bytes = 1 << 20, .block_bytes = 64, .short_run = 16});
  checkpoint::save(folder / "c", {{"run", {{"z", torch::zeros({400})}, {"a", torch::zeros({400})}}}});
  const std::string path = folder / "c/values-00001-of-00001.safetensors", good = content_of(path);
  for (const size_t behind : {size_t(100), size_t(1700), size_t(3000)}) {
    std::string damaged = good;
    damaged[good.size() - behind] ^= 1;
    write_content(path, damaged);
    const std::string text = error_text<c10::ValueError>([&] { checkpoint::read_value(folder / "c", "run"); });
    EXPECT_NE(text.find(" is damaged: bytes "), std::string::npos) << text;
  }
}

TEST(CheckpointDamage, AHeaderThatWasChangedIsDamageAlsoForAPartOfTheFile) {
  const Folder folder;
  torch::nn::Module net;
  net.register_buffer("a", torch::zeros({100000}));
  const at::Tensor b = net.register_buffer("b", torch::ones({100000}));
  checkpoint::save(folder / "c", {{"model", state_of(net)}});
  const std::string path = folder / "c/model-00001-of-00001.safetensors";
  std::string content = content_of(path);
  const size_t first = content.find("\"a\""), second = content.find("\"b\"");
  std::swap(content[first + 1], content[second + 1]);
  write_content(path, content);
  const std::string text = load_error(folder / "c", {{"model", state_of(net)}}, {.only = "a"});
  EXPECT_NE(text.find(" is damaged: bytes 0 to "), std::string::npos) << text;
  EXPECT_NE(text.find(", of the header and on, are not those that were saved"), std::string::npos) << text;
}

TEST(CheckpointDamage, OneThatIsReplacedWhileItIsReadIsNotCalledDamaged) {
  const Folder folder;
  const auto save = [&](double value) { checkpoint::save(folder / "c", {{"x", torch::full({1000}, value)}}); };
  save(1);
  std::atomic<bool> done = false;
  std::thread saver([&] {
    for (int i = 0; i < 300; ++i) save(i % 2);
    done = true;
  });
  const at::Tensor x = torch::zeros({1000});
  while (!done) {
    try {
      checkpoint::load(folder / "c", {{"x", x}});
      EXPECT_TRUE(x.eq(x[0]).all().item<bool>());
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what()).find(" was replaced or removed by a save while it was read"),
                std::string::npos)
          << error.what();
    }
  }
  saver.join();
}

// By those that read one thing of it, and by the command line.
TEST(CheckpointDamage, OneThatIsReplacedWhileAPartIsReadIsNotCalledDamaged) {
  const Folder folder;
  const std::string path = folder / "c";
  const auto save = [&](double value) { checkpoint::save(path, {{"x", torch::full({20000}, value)}}); };
  save(1);
  std::atomic<bool> done = false;
  std::thread saver([&] {
    for (int i = 0; i < 100; ++i) save(i % 2);
    done = true;
  });
  const std::function<void()> readers[] = {[&] {
                                             const at::Tensor x = checkpoint::read_value(path, "x").toTensor();
                                             EXPECT_TRUE(x.eq(x[0]).all().item<bool>());
                                           },
                                           [&] { checkpoint::detail::text_of(path, "x"); },
                                           [&] { checkpoint::detail::differences(path, path); },
                                           [&] { checkpoint::detail::listing(path); }};
  const auto check = [](const std::string& text) {
    EXPECT_NE(text.find(" was replaced or removed by a save while it was read"), std::string::npos) << text;
  };
  for (size_t i = 0; !done; ++i) {
    try {
      readers[i % 4]();
    } catch (const checkpoint::detail::Failure& failure) {
      check(failure.text);
    } catch (const c10::Error& error) {
      check(error.what());
    }
  }
  saver.join();
}

TEST(CheckpointDamage, ADamagedBlockIsNamed) {
  const Folder folder;
  const SmallLimits limits({.file_bytes = 1 << 20, .block_bytes = 64, .short_run = 16});
  checkpoint::save(folder / "c", {{"x", torch::zeros({40})}, {"y", torch::zeros({40})}});
  const std::string path = folder / "c/values-00001-of-00001.safetensors";
  std::string content = content_of(path);
  content[content.size() - 3] ^= 1;
  write_content(path, content);
  const at::Tensor x = torch::zeros({40}), y = torch::zeros({40});
  const size_t begin = (content.size() - 1) / 64 * 64;
  EXPECT_EQ(
      load_error(folder / "c", {{"x", x}, {"y", y}}),
      c10::str("[checkpoint::load] ", path, " is damaged: bytes ", begin, " to ", content.size(),
               ", of \"y\" and on, are not those that were saved\n  fix: use another checkpoint; serried checkpoint "
               "verify names all that is damaged"));
  checkpoint::load(folder / "c", {{"x", x}});
}

TEST(CheckpointDamage, ADamageThatOneRankSeesIsRaisedOnAll) {
  const Folder folder;
  const SmallLimits limits({.file_bytes = 1 << 20, .block_bytes = 64, .short_run = 16});
  checkpoint::save(folder / "c", {{"x", torch::zeros({400})}});
  const std::string path = folder / "c/values-00001-of-00001.safetensors";
  std::string content = content_of(path);
  content.back() ^= 1;
  write_content(path, content);
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    const DTensor x = distribute_tensor(torch::zeros({400}), mesh, {Shard(0)});
    const std::string text = load_error(folder / "c", {{"x", x}});
    EXPECT_EQ(text.find("[checkpoint::load] rank 1: " + path + " is damaged"), 0u) << text;
  });
}

TEST(CheckpointDamage, ATruncatedFileIsNamed) {
  const Folder folder;
  checkpoint::save(folder / "c", {{"x", torch::zeros({40})}});
  const std::string path = folder / "c/values-00001-of-00001.safetensors";
  const auto size = std::filesystem::file_size(path);
  std::filesystem::resize_file(path, size - 10);
  EXPECT_EQ(load_error(folder / "c", {{"x", torch::zeros({40})}}),
            c10::str("[checkpoint::load] ", path, " has ", size - 10, " bytes, and had ", size,
                     " when it was saved\n  fix: the file is cut short or was changed: use another checkpoint"));
}

TEST(CheckpointDamage, AnIndexThatIsDamagedOrNewerIsRefused) {
  const Folder folder;
  checkpoint::save(folder / "c", {{"x", 1}});
  const std::string path = folder / "c/index.json", good = content_of(path);
  const auto refused = [&](const std::string& text) {
    write_content(path, text);
    return load_error(folder / "c", {});
  };
  std::string newer = good;
  newer.replace(newer.find("\"version\": 3"), 12, "\"version\": 9");
  EXPECT_EQ(refused(newer),
            c10::str("[checkpoint::load] ", path,
                     " is of format 9, and this serried reads format 3\n  fix: read it with a newer serried"));
  std::string older = good;
  older.replace(older.find("\"version\": 3"), 12, "\"version\": 1");
  EXPECT_EQ(refused(older), c10::str("[checkpoint::load] ", path,
                                     " is of format 1, and this serried reads format 3\n  fix: save it again"));
  EXPECT_EQ(refused("{}"), c10::str("[checkpoint::load] ", path,
                                    " is not that of a checkpoint\n  fix: pass a folder that checkpoint::save wrote"));
  EXPECT_EQ(refused(good.substr(0, good.size() / 2)),
            c10::str("[checkpoint::load] ", path, " is no JSON\n  fix: the file is damaged: use another checkpoint"));
  EXPECT_EQ(refused(R"({"a":1,"a":2})"),
            c10::str("[checkpoint::load] ", path,
                     " has the key \"a\" twice\n  fix: the file is damaged: use another checkpoint"));
  std::string deep;
  for (int i = 0; i < 100000; ++i) deep += '[';
  EXPECT_EQ(refused(deep), c10::str("[checkpoint::load] ", path,
                                    " is nested too deeply\n  fix: the file is damaged: use another checkpoint"));
  for (size_t byte = 0; byte + 2 < good.size(); byte += 3) {
    std::string changed = good;
    changed[byte] ^= 1;
    EXPECT_NE(refused(changed), "") << byte;
  }
  std::string value = good;
  value.replace(value.find("\"x\": 1"), 6, "\"x\": 2");
  EXPECT_EQ(refused(value), c10::str("[checkpoint::load] ", path,
                                     " is not as it was saved: its checksum is another\n  fix: use another "
                                     "checkpoint; a file that was changed by hand cannot be loaded"));
  std::string elsewhere = "{" + good.substr(good.find(',') + 1);
  elsewhere.replace(elsewhere.find("\"files\": {"), 10, "\"files\": {\"../x\": {\"bytes\": 0, \"blocks\": []} ");
  EXPECT_EQ(refused(checkpoint::detail::with_checksum(elsewhere)),
            c10::str("[checkpoint::load] ", path,
                     " is damaged: a file has a name that leads elsewhere\n  fix: use another checkpoint"));
}

TEST(CheckpointDamage, ALengthAtTheEndOfAllNumbersIsRefused) {
  const auto refused = [](const std::string& bytes, const std::string& block_bytes) -> std::string {
    const std::string file = R"("f": {"bytes": )" + bytes + R"(, "blocks": []})";
    const std::string text = R"({"format": "serried checkpoint", "version": 2, "saved_at": 1, "world_size": 1, )"
                             R"("block_bytes": )" +
                             block_bytes + R"(, "values": {}, "entries": {}, "files": {)" + file + "}}";
    try {
      checkpoint::detail::parse_index(checkpoint::detail::with_checksum(text), "index.json");
    } catch (const checkpoint::detail::Failure& failure) {
      return failure.text;
    }
    return "no error";
  };
  EXPECT_EQ(refused("0", "64"), "no error");
  for (const char* bytes : {"9223372036854775807", "9223372036854775745", "-1"}) {
    for (const char* block_bytes : {"1", "64", "1073741824"}) {
      EXPECT_EQ(refused(bytes, block_bytes), "index.json is damaged: a file has more or fewer hashes than blocks");
    }
  }
  // The sum of a length and a block would be beyond it.
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  EXPECT_EQ((checkpoint::detail::BlockGrid{kMost, 64}.num_blocks()), kMost / 64 + 1);
}

TEST(CheckpointDamage, LeavesThatAreNoPartsOfABlockAreRefused) {
  const auto refused = [](const std::string& leaf_bytes) -> std::string {
    const std::string text = R"({"format": "serried checkpoint", "version": 3, "saved_at": 1, "world_size": 1, )"
                             R"("block_bytes": 64, "leaf_bytes": )" +
                             leaf_bytes + R"(, "values": {}, "entries": {}, "files": {}})";
    try {
      checkpoint::detail::parse_index(checkpoint::detail::with_checksum(text), "index.json");
    } catch (const checkpoint::detail::Failure& failure) {
      return failure.text;
    }
    return "no error";
  };
  for (const char* leaf_bytes : {"64", "16", "1"}) EXPECT_EQ(refused(leaf_bytes), "no error");
  for (const char* leaf_bytes : {"0", "-16", "24", "128", "9223372036854775807"}) {
    EXPECT_EQ(refused(leaf_bytes), "index.json is damaged: leaf_bytes does not divide block_bytes") << leaf_bytes;
  }
}

TEST(CheckpointDamage, BlocksThatRanksReadInPartsAreComparedByOneOfThem) {
  const Folder folder;
  const SmallLimits limits({.file_bytes = 1 << 20, .block_bytes = 256, .leaf_bytes = 16, .short_run = 16});
  checkpoint::save(folder / "c", {{"x", torch::zeros({100})}, {"y", torch::zeros({9})}});
  const std::string path = folder / "c/values-00001-of-00001.safetensors", good = content_of(path);
  for (size_t byte = good.size() - 436; byte < good.size(); byte += 5) {
    std::string damaged = good;
    damaged[byte] ^= 1;
    write_content(path, damaged);
    on_mesh({2}, [&](const DeviceMesh& mesh) {
      const DTensor x = distribute_tensor(torch::zeros({100}), mesh, {Shard(0)});
      const std::string text = load_error(folder / "c", {{"x", x}, {"y", torch::zeros({9})}});
      EXPECT_NE(text.find(path + " is damaged: bytes "), std::string::npos) << text;
      checkpoint::load(folder / "c", {{"y", torch::zeros({9})}}, {.verify = false});
    });
  }
  EXPECT_NE(error_text<c10::ValueError>([&] { checkpoint::read_value(folder / "c", "y"); }).find(" is damaged: "),
            std::string::npos);
}

}  // namespace
}  // namespace serried::testing
