// Plain modules as single safetensors files.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <thread>

#include "serried/checkpoint/checkpoint.h"
#include "serried/checkpoint/commit.h"
#include "serried/parallel/fsdp/fully_shard.h"
#include "serried/parallel/tensor_parallel/parallelize.h"
#include "serried/tensor/making/modules.h"
#include "tests/checkpoint/folder.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

TEST(PlainFiles, AModuleComesBackAsItWas) {
  const Folder folder;
  torch::nn::Sequential saved(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4)),
      loaded(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4));
  saved->forward(torch::randn({5, 3}));
  save_safetensors(folder / "net.safetensors", *saved);
  load_safetensors(folder / "net.safetensors", *loaded);
  const auto expected = saved->named_parameters(), buffers = saved->named_buffers();
  EXPECT_EQ(expected.size() + buffers.size(), 7u);
  for (const auto& item : loaded->named_parameters())
    expect_equal(item.value().detach(), expected[item.key()].detach(), item.key());
  for (const auto& item : loaded->named_buffers()) expect_equal(item.value(), buffers[item.key()], item.key());
  EXPECT_EQ(folder.names(), std::set<std::string>{"net.safetensors"});
}

TEST(PlainFiles, NamesAndDtypesAreAdaptedOnRequest) {
  const Folder folder;
  torch::nn::Linear saved(3, 2);
  torch::nn::Sequential loaded(torch::nn::Linear(3, 2));
  loaded->to(at::kBFloat16);
  save_safetensors(folder / "f", *saved);
  load_safetensors(folder / "f", *loaded, {.convert = true, .rename = {{"^", "0."}}});
  expect_equal(loaded->parameters()[0].detach(), saved->weight.detach().to(at::kBFloat16));
}

TEST(PlainFiles, WhatDoesNotFitIsRefused) {
  const Folder folder;
  torch::nn::Linear saved(3, 2), no_bias(torch::nn::LinearOptions(3, 2).bias(false));
  save_safetensors(folder / "f", *no_bias);
  EXPECT_EQ(
      error_text<c10::ValueError>([&] { load_safetensors(folder / "f", *saved); }),
      c10::str("[load_safetensors] ", folder / "f",
               " has other names than the module: missing there: bias\n  fix: load "
               "into the same model, pass {.rename = {{pattern, to}}}, or {.strict = false} to load what both have"));
  load_safetensors(folder / "f", *saved, {.strict = false});
  expect_equal(saved->weight.detach(), no_bias->weight.detach());
  write_content(folder / "bad", "no file of this kind");
  EXPECT_EQ(error_text<c10::ValueError>([&] { load_safetensors(folder / "bad", *saved); }),
            c10::str("[load_safetensors] ", folder / "bad",
                     ": the header is not that of a safetensors file: it would have 2334391181802237806 "
                     "bytes, and may have 100000000\n  fix: the file is damaged or of another format: use a copy"));
  EXPECT_EQ(error_text<c10::Error>([&] { load_safetensors(folder / "none", *saved); }),
            c10::str("[load_safetensors] cannot open ", folder / "none",
                     ": No such file or directory\n  fix: check the path"));
  EXPECT_EQ(error_text<c10::Error>([&] {
              save_safetensors(folder / "x/f", *saved);
            }).find(c10::str("[save_safetensors] cannot open ", folder / "x", ": No such file or directory")),
            0u);
  EXPECT_EQ(error_text<c10::ValueError>([&] {
              load_safetensors(folder / "f", *saved, {.strict = false, .rename = {{"(", ""}}});
            }).find("[load_safetensors] \"(\" is no regular expression: "),
            0u);
}

TEST(PlainFiles, DTensorsGoIntoCheckpoints) {
  const Folder folder;
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    torch::nn::Linear net(2, 2);
    distribute_module(*net, mesh);
    const std::string text = error_text<c10::ValueError>([&] { save_safetensors(folder / "f", *net); });
    EXPECT_EQ(text.substr(0, text.rfind('\n')),
              "[save_safetensors] \"weight\" is a DTensor\n  fix: save it with checkpoint::save, whose files are "
              "safetensors, too; load_safetensors takes DTensors");
  });
}

TEST(PlainFiles, WhatCannotBeWrittenLeavesTheFileThatIsThere) {
  const Folder folder;
  const auto error_for = [&](const std::string& name, const at::Tensor& buffer) {
    torch::nn::Module net;
    net.register_buffer(name, buffer);
    return error_text<c10::ValueError>([&] { save_safetensors(folder / "f", net); });
  };
  torch::nn::Linear old(2, 2);
  save_safetensors(folder / "f", *old);
  const std::string before = content_of(folder / "f");
  EXPECT_EQ(error_for("s", torch::eye(3).to_sparse()),
            "[save_safetensors] \"s\", f32[3,3], has the layout Sparse\n  fix: save it dense: x.to_dense()");
  EXPECT_EQ(error_for("m", torch::empty({3}, at::kMeta)),
            "[save_safetensors] \"m\", f32[3], is on the meta device and has no data\n  fix: give it memory first");
  EXPECT_EQ(error_for("__metadata__", torch::zeros({1})),
            "[save_safetensors] a tensor has the name \"__metadata__\", which the format has for something else\n  "
            "fix: give it another name");
  EXPECT_EQ(folder.names(), std::set<std::string>{"f"});
  EXPECT_EQ(content_of(folder / "f"), before);
}

TEST(PlainFiles, ThreadsMayWriteTheSameFile) {
  const Folder folder;
  const auto save_often = [&](double value) {
    torch::nn::Module net;
    net.register_buffer("b", torch::full({1000}, value));
    for (int i = 0; i < 50; ++i) save_safetensors(folder / "f", net);
  };
  std::thread first([&] { save_often(1); }), second([&] { save_often(2); });
  first.join();
  second.join();
  torch::nn::Module net;
  const at::Tensor b = net.register_buffer("b", torch::zeros({1000}));
  load_safetensors(folder / "f", net);
  EXPECT_TRUE(b.eq(b[0]).all().item<bool>());
  EXPECT_EQ(folder.names(), std::set<std::string>{"f"});
}

TEST(PlainFiles, OnesThatAKillHasLeftAreRemovedAndOthersAreNot) {
  const Folder folder;
  const auto live = checkpoint::detail::create_partial_file(folder / "f");
  write_content(folder / "f.partial-0123456789abcdef", "cut");
  write_content(folder / "g.partial-0123456789abcdef", "cut");
  torch::nn::Linear net(2, 2);
  save_safetensors(folder / "f", *net);
  const std::string live_name = std::filesystem::path(live.path()).filename();
  EXPECT_EQ(folder.names(), (std::set<std::string>{"f", live_name, "g.partial-0123456789abcdef"}));
  checkpoint::save(folder / "c", {{"step", 1}});
  EXPECT_EQ(folder.names(), (std::set<std::string>{"c", "f", live_name}));
}

// Each rank reads what it holds.
TEST(PlainFiles, AreLoadedIntoModulesThatAreCut) {
  const Folder folder;
  const auto make = [] {
    return torch::nn::Sequential(torch::nn::Linear(5, 7), torch::nn::BatchNorm1d(7), torch::nn::Linear(7, 3));
  };
  torch::nn::Sequential saved = make();
  save_safetensors(folder / "f", *saved);
  const auto expected = saved->named_parameters();
  const auto check = [&](torch::nn::Sequential& net) {
    load_safetensors(folder / "f", *net);
    for (const auto& item : net->named_parameters()) {
      expect_equal(full(item.value().detach()), expected[item.key()].detach(), item.key());
    }
  };
  on_mesh({3}, [&](const DeviceMesh& mesh) {
    torch::nn::Sequential styled = make(), sharded = make();
    parallelize_module(*styled, mesh, {{"0", ColwiseParallel()}, {"2", RowwiseParallel()}});
    check(styled);
    fully_shard(*sharded, {.mesh = mesh});
    sharded->forward(at::ones({2, 5}));  // gathered values are not to be used again
    check(sharded);
    saved->eval();
    sharded->eval();
    expect_close(sharded->forward(at::ones({2, 5})), saved->forward(at::ones({2, 5})));
  });
}

TEST(PlainFiles, AFolderOfSeveralIsReadByItsIndex) {
  const Folder folder;
  std::filesystem::create_directories(folder / "hub");
  torch::nn::Sequential saved(torch::nn::Linear(3, 4), torch::nn::Linear(4, 2)),
      loaded(torch::nn::Linear(3, 4), torch::nn::Linear(4, 2));
  torch::nn::Module first, second;
  first.register_module("0", saved[0]);
  second.register_module("1", saved[1]);
  second.register_buffer("not_of_the_model", torch::ones({2}));
  save_safetensors(folder / "hub/model-00001-of-00002.safetensors", first);
  save_safetensors(folder / "hub/model-00002-of-00002.safetensors", second);
  const std::string index = folder / "hub/model.safetensors.index.json";
  const auto text = [](const std::string& of_bias) {
    return R"({"metadata": {"total_size": 104}, "weight_map": {"0.weight": "model-00001-of-00002.safetensors",
      "0.bias": "model-00001-of-00002.safetensors", "1.weight": "model-00002-of-00002.safetensors", "1.bias": )" +
           of_bias + "}}";
  };
  const std::string good = text("\"model-00002-of-00002.safetensors\"");
  for (const std::string& path : {folder / "hub", index}) {
    write_content(index, good);
    for (const at::Tensor& parameter : loaded->parameters()) parameter.detach().zero_();
    load_safetensors(path, *loaded);
    const auto expected = saved->named_parameters();
    for (const auto& item : loaded->named_parameters()) {
      expect_equal(item.value().detach(), expected[item.key()].detach(), item.key());
    }
  }
  const auto refused = [&](const std::string& content) {
    write_content(index, content);
    return error_text<c10::Error>([&] { load_safetensors(folder / "hub", *loaded); });
  };
  EXPECT_EQ(refused(text("\"model-00001-of-00002.safetensors\"")),
            c10::str("[load_safetensors] ", index,
                     " says that \"1.bias\" is in model-00001-of-00002.safetensors, where it is not\n  fix: a file of "
                     "another model is among them: copy all files anew"));
  for (const char* bad : {"\"../f\"", "\"/etc/passwd\"", "\"\"", "3"}) {
    EXPECT_EQ(refused(text(bad)),
              c10::str("[load_safetensors] ", index,
                       " has no name of a file beside it for \"1.bias\"\n  fix: the index is damaged or of another "
                       "format: use a copy"));
  }
  for (const char* bad : {"[]", "{}", "{\"weight_map\": []}"}) {
    EXPECT_EQ(refused(bad),
              c10::str("[load_safetensors] ", index,
                       " has no weight_map\n  fix: the index is damaged or of another format: use a copy"));
  }
  EXPECT_EQ(refused("{").find("[load_safetensors] " + index + " is no JSON"), 0u);
  EXPECT_EQ(refused(text("\"gone.safetensors\"")).find("[load_safetensors] cannot open " + (folder / "hub/gone")), 0u);
  std::filesystem::remove(index);
  EXPECT_EQ(error_text<c10::ValueError>([&] { load_safetensors(folder / "hub", *loaded); }),
            c10::str("[load_safetensors] ", folder / "hub",
                     " is a folder without model.safetensors and model.safetensors.index.json\n  fix: pass a "
                     "safetensors file"));
  save_safetensors(folder / "hub/model.safetensors", *saved);
  load_safetensors(folder / "hub", *loaded);
}

// A sparse file, of which next to nothing is on the disk or read.
TEST(PlainFiles, ATensorBeyondFourGiBIsReadFromItsPlace) {
  constexpr int64_t kHuge = int64_t(5) << 30;
  const Folder folder;
  const std::string header =
      c10::str(R"({"huge": {"dtype": "U8", "shape": [)", kHuge, R"(], "data_offsets": [0, )", kHuge,
               R"(]}, "small": {"dtype": "I64", "shape": [7, 2], "data_offsets": [)", kHuge, ", ", kHuge + 112, "]}}");
  const auto length = int64_t(header.size());
  const at::Tensor small = torch::arange(14).view({7, 2}) + 5;
  {
    std::ofstream file(folder / "f", std::ios::binary);
    file.write(reinterpret_cast<const char*>(&length), 8);
    file << header;
    file.seekp(8 + length + kHuge);
    file.write(static_cast<const char*>(small.const_data_ptr()), 112);
  }
  torch::nn::Module plain;
  const at::Tensor loaded = plain.register_buffer("small", torch::zeros({7, 2}, at::kLong));
  load_safetensors(folder / "f", plain, {.strict = false});
  expect_equal(loaded, small);
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    torch::nn::Module cut;
    const DTensor part = distribute_tensor(torch::zeros({7, 2}, at::kLong), mesh, {Shard(0)});
    cut.register_buffer("small", part);
    load_safetensors(folder / "f", cut, {.strict = false});
    expect_equal(full(part), small);
  });
}

}  // namespace
}  // namespace serried::testing
