// Every message of save and load, and what is left behind.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <torch/torch.h>

#include "serried/checkpoint/checkpoint.h"
#include "serried/comm/groups/ranks.h"
#include "serried/graph/capture.h"
#include "serried/tensor/dtensor.h"
#include "tests/checkpoint/folder.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using checkpoint::state_of;

std::string save_error(const std::string& path, const checkpoint::Contents& contents) {
  return error_text<c10::ValueError>([&] { checkpoint::save(path, contents); });
}

TEST(CheckpointErrors, NamesThatOnlyOneSideHas) {
  const Folder folder;
  torch::nn::Linear saved(3, 2), loaded(torch::nn::LinearOptions(3, 2).bias(false));
  torch::nn::Sequential other(torch::nn::Linear(3, 2));
  checkpoint::save(folder / "c", {{"model", state_of(*saved)}});
  EXPECT_EQ(
      load_error(folder / "c", {{"model", state_of(*other)}}),
      "[checkpoint::load] \"model\" has other names in the checkpoint: missing there: 0.weight, 0.bias; only there: "
      "bias, weight\n  fix: load into the same model, pass {.rename = {{pattern, to}}}, or {.strict = false} to load "
      "what both have");
  EXPECT_EQ(load_error(folder / "c", {{"model", state_of(*loaded)}}),
            "[checkpoint::load] \"model\" has other names in the checkpoint: only there: bias\n  fix: "
            "load into the same model, pass {.rename = {{pattern, to}}}, or {.strict = false} to load what both have");
  checkpoint::load(folder / "c", {{"model", state_of(*loaded)}}, {.strict = false});
  expect_equal(loaded->weight.detach(), saved->weight.detach());
}

TEST(CheckpointErrors, SizesAndDtypesShowBothValues) {
  const Folder folder;
  torch::nn::Linear saved(3, 2), larger(3, 4);
  checkpoint::save(folder / "c", {{"model", state_of(*saved)}});
  EXPECT_EQ(
      load_error(folder / "c", {{"model", state_of(*larger)}}),
      "[checkpoint::load] \"model.weight\" has sizes [2,3] in the checkpoint, and [4,3] here\n  fix: load into a model "
      "of the same sizes, or give it another name, so that {.strict = false} passes over it");
  saved->to(at::kDouble);
  EXPECT_EQ(
      load_error(folder / "c", {{"model", state_of(*saved)}}),
      "[checkpoint::load] \"model.weight\" is f32[2,3] in the checkpoint, and f64[2,3] here\n  fix: pass {.convert = "
      "true}, or give the model the dtype that was saved");
  checkpoint::save(folder / "n", {{"x", torch::arange(3)}});
  EXPECT_EQ(
      load_error(folder / "n", {{"x", torch::zeros({3})}}, {.convert = true}),
      "[checkpoint::load] \"x\" is i64[3] in the checkpoint, and f32[3] here\n  fix: load into a tensor of the dtype "
      "that was saved");
}

TEST(CheckpointErrors, WhatIsNotThereIsNamed) {
  const Folder folder;
  checkpoint::save(folder / "c", {{"step", 1}, {"x", torch::zeros({2})}});
  torch::nn::Linear net(3, 2);
  EXPECT_EQ(
      load_error(folder / "c", {{"model", state_of(*net)}}),
      c10::str("[checkpoint::load] ", folder / "c", " has no \"model\"; it has: step, x\n  fix: load what is there"));
  EXPECT_EQ(error_text<c10::ValueError>([&] { checkpoint::read_value(folder / "c", "epoch"); }),
            c10::str("[checkpoint::read_value] ", folder / "c",
                     " has no value \"epoch\"; it has: step, x\n  fix: read one that is there"));
  EXPECT_EQ(load_error(folder / "d", {}), c10::str("[checkpoint::load] ", folder / "d",
                                                   " does not exist\n  fix: pass the folder of a checkpoint; one that "
                                                   "ends with .partial-... was never finished"));
  std::filesystem::create_directory(folder / "empty");
  EXPECT_EQ(load_error(folder / "empty", {}),
            c10::str("[checkpoint::load] ", folder / "empty",
                     " has no index.json: it is no checkpoint\n  fix: pass the folder "
                     "of a checkpoint; one that ends with .partial-... was never finished"));
}

TEST(CheckpointErrors, ConstantsAndWrongVariablesCannotBeLoaded) {
  const Folder folder;
  const at::Tensor kept = torch::ones({1});
  checkpoint::save(folder / "c", {{"step", 1}, {"note", "a"}, {"large", int64_t(1) << 40}, {"t", torch::zeros({1})}});
  double number = 0;
  int64_t whole = 0;
  int small = 0;
  EXPECT_EQ(load_error(folder / "c", {{"t", kept}, {"large", &small}}),
            "[checkpoint::load] \"large\" is 1099511627776 in the checkpoint, and is loaded into an int\n  fix: pass a "
            "pointer to "
            "a variable of the type that was saved");
  EXPECT_EQ(kept.item<double>(), 1) << "nothing is written before all is compared";
  EXPECT_EQ(load_error(folder / "c", {{"step", 5}}),
            "[checkpoint::load] \"step\" is loaded into a constant\n  fix: pass a pointer to a variable, or call "
            "read_value(path, \"step\")");
  EXPECT_EQ(
      load_error(folder / "c", {{"note", &whole}}),
      "[checkpoint::load] \"note\" is \"a\" in the checkpoint, and is loaded into an int64_t\n  fix: pass a pointer to "
      "a variable of the type that was saved");
  EXPECT_EQ(load_error(folder / "c", {{"note", &number}}),
            "[checkpoint::load] \"a\" in the checkpoint is no number\n  fix: load a value of the type that was saved");
  EXPECT_EQ(
      load_error(folder / "c", {{"note", torch::zeros({1})}}),
      "[checkpoint::load] \"note\" is \"a\" in the checkpoint, and is loaded into a tensor\n  fix: pass a pointer to a "
      "variable of the type that was saved");
}

TEST(CheckpointErrors, NamesThatCannotBe) {
  const Folder folder;
  EXPECT_EQ(
      save_error(folder / "c", {{"a/b", 1}}),
      "[checkpoint::save] the name \"a/b\" cannot be part of a file's\n  fix: use letters, digits, _, - and . in the "
      "names of what is saved");
  EXPECT_EQ(save_error(folder / "c", {{"index", 1}}),
            "[checkpoint::save] the name \"index\" is taken by the format\n  fix: use another name");
  EXPECT_EQ(save_error(folder / "c", {{"a", 1}, {"a", 2}}),
            "[checkpoint::save] the name \"a\" is there twice\n  fix: give each thing a name of its own");
  EXPECT_EQ(save_error("", {{"a", 1}}),
            "[checkpoint::save] the path \"\" names no folder of its own\n  fix: pass one like \"ckpt/step100\"");
  EXPECT_EQ(folder.names(), std::set<std::string>{});
}

TEST(CheckpointErrors, TensorsThatCannotBeSaved) {
  const Folder folder;
  EXPECT_EQ(save_error(folder / "c", {{"x", torch::zeros({2}, at::kComplexDouble)}}),
            "[checkpoint::save] \"values.x\", c128[2], has the dtype ComplexDouble, which safetensors does not have\n  "
            "fix: save "
            "it in another one, a complex one as at::view_as_real(x)");
  EXPECT_EQ(save_error(folder / "c", {{"x", torch::zeros({2, 2}).to_sparse()}}),
            "[checkpoint::save] \"values.x\", f32[2,2], has the layout Sparse\n  fix: save it dense: x.to_dense()");
  EXPECT_EQ(
      save_error(folder / "c", {{"x", torch::empty({2}, at::kMeta)}}),
      "[checkpoint::save] \"values.x\", f32[2], is on the meta device and has no data\n  fix: give it memory first");
  EXPECT_EQ(
      save_error(folder / "c", {{"x", c10::IValue(c10::complex<double>(1, 2))}}),
      "[checkpoint::save] \"x\" is of type ComplexDouble\n  fix: save numbers, texts, truth values, tensors, lists and "
      "dicts of these by text, or a state_of(...) by itself");
}

TEST(CheckpointErrors, APartialIsRefusedOnAllRanks) {
  const Folder folder;
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    const DTensor pending = DTensor::from_local(torch::ones({2}), mesh, {Partial()});
    const std::string text = save_error(folder / "c", {{"x", pending}});
    EXPECT_EQ(
        text.substr(0, text.rfind('\n')),
        "[checkpoint::save] rank 0: \"values.x\" is f32[2] P on mesh 2: no rank holds values of the whole\n  fix: "
        "redistribute it to Replicate or Shard first");
  });
}

TEST(CheckpointErrors, NothingIsLoadedIntoAPartial) {
  const Folder folder;
  checkpoint::save(folder / "c", {{"x", torch::zeros({2})}});
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    const DTensor pending = DTensor::from_local(torch::ones({2}), mesh, {Partial()});
    const std::string text = load_error(folder / "c", {{"x", pending}});
    EXPECT_EQ(
        text.substr(0, text.rfind('\n')),
        "[checkpoint::load] rank 0: \"x\" is loaded into f32[2] P on mesh 2, which is Partial\n  fix: load into one "
        "that is Replicate or Shard");
    expect_equal(pending.to_local(), torch::ones({2}));
  });
}

TEST(CheckpointErrors, RanksThatSaveDifferentThings) {
  const Folder folder;
  run_ranks(2, [&](const Group& group) {
    const std::string text = save_error(folder / "c", {{"step", group->getRank()}});
    EXPECT_EQ(text.substr(0, text.find('\n')),
              "[checkpoint::save] ranks save different things: rank 0 has step = 0, rank 1 has step = 1");
    const std::string sizes = save_error(folder / "c", {{"x", torch::zeros({2 + group->getRank()})}});
    EXPECT_EQ(sizes.substr(0, sizes.find('\n')),
              "[checkpoint::save] ranks save different things: \"values.x\" is f32[2] on rank 0, and f32[3] on rank 1");
    EXPECT_NE(
        sizes.find("\n  fix: save the same names, sizes and values on every rank; ranks whose modules are "
                   "different parts of a model, as the stages of a pipeline are, need names that tell these apart"),
        std::string::npos)
        << sizes;
    // One byte of many.
    const at::Tensor large = torch::zeros({200001}, at::kByte);
    large[150001] = group->getRank();
    const std::string content = save_error(folder / "c", {{"x", large}});
    EXPECT_EQ(content.find("[checkpoint::save] \"values.x\", u8[200001], has other values on rank 1 than on rank 0\n  "
                           "fix: make copies equal first, with DistributedDataParallel or broadcast_; what is no copy "
                           "needs another name, as in the stages of a pipeline"),
              0u)
        << content;
  });
  EXPECT_EQ(folder.names(), std::set<std::string>{});
}

TEST(CheckpointErrors, OptionsThatDifferBetweenRanksAreNamed) {
  const Folder folder;
  run_ranks(2, [&](const Group& group) {
    torch::nn::Linear net = seeded(1, [] { return torch::nn::Linear(2, 2); });
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    if (group->getRank() == 1) {
      net(torch::ones({1, 2})).sum().backward();
      at::NoGradGuard no_grad;
      optimizer.step();
    }
    const std::string text = save_error(folder / "c", {{"optim", state_of(optimizer)}});
    EXPECT_EQ(text.find("[checkpoint::save] ranks save different things: rank 1 has "
                        "\"optim.group0.param0.momentum_buffer\", and rank 0 does not, nor anything that rank 1 lacks"),
              0u)
        << text;
  });
}

TEST(CheckpointErrors, RanksOfWhichSomeAreStrictAreTold) {
  const Folder folder;
  torch::nn::Module less;
  less.register_parameter("a", torch::ones({2}));
  checkpoint::save(folder / "c", {{"model", state_of(less)}});
  run_ranks(3, [&](const Group& group) {
    torch::nn::Module net;
    net.register_parameter("a", torch::zeros({2}));
    net.register_parameter("b", torch::zeros({2}));
    const std::string text = load_error(folder / "c", {{"model", state_of(net)}}, {.strict = group->getRank() == 2});
    EXPECT_EQ(text.find("[checkpoint::load] rank 2 loads with {.strict = true}, and rank 0 with {.strict = false}\n"
                        "  fix: pass the same on every rank"),
              0u)
        << text;
    EXPECT_EQ(net.parameters()[0].sum().item<double>(), 0);
    checkpoint::load(folder / "c", {{"model", state_of(net)}}, {.strict = false});  // and they go on together
    EXPECT_EQ(net.parameters()[0].sum().item<double>(), 2);
  });
}

TEST(CheckpointErrors, AFolderThatIsNoCheckpointIsNotReplaced) {
  const Folder folder;
  std::filesystem::create_directory(folder / "data");
  write_content(folder / "data/file", "x");
  EXPECT_EQ(save_error(folder / "data", {{"a", 1}}),
            c10::str("[checkpoint::save] ", folder / "data",
                     " is there and is no checkpoint\n  fix: pass a path of its own: a save replaces what is there"));
  EXPECT_EQ(folder.names(), std::set<std::string>{"data"});
  EXPECT_EQ(content_of(folder / "data/file"), "x");
}

TEST(CheckpointErrors, AnIndexOfSomebodyElseIsNoCheckpoint) {
  const Folder folder;
  for (const char* name : {"site1", "site2"}) {
    std::filesystem::create_directory(folder / name);
    write_content(folder / name + "/index.json", R"({"my": "web site"})");
  }
  EXPECT_EQ(save_error(folder / "site1", {{"a", 1}}),
            c10::str("[checkpoint::save] ", folder / "site1",
                     " is there and is no checkpoint\n  fix: pass a path of its own: a save replaces what is there"));
  checkpoint::save(folder / "site3", {{"a", 1}}, {.keep_last = 1});
  EXPECT_EQ(folder.names(), (std::set<std::string>{"site1", "site2", "site3"}));
}

TEST(CheckpointErrors, RanksHaveOnePath) {
  const Folder folder;
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    const std::string mine = folder / ("r" + std::to_string(rank));
    const std::string text = save_error(mine, {{"a", 1}});
    EXPECT_NE(text.find(c10::str("rank 1 saves to ", folder / "r1", ", and rank 0 writes ", folder / "r0.partial-")),
              std::string::npos)
        << text;
    EXPECT_NE(text.find("\n  fix: pass the same path on every rank"), std::string::npos);
    barrier(group);
    EXPECT_EQ(folder.names(), std::set<std::string>{});
    barrier(group);
    checkpoint::save(folder / "one", {{"step", 1}});
    checkpoint::save(folder / "two/", {{"step", 2}});
    int64_t step = 0;
    const std::string path = folder / (rank == 0 ? "one" : "two");
    EXPECT_EQ(load_error(path, {{"step", &step}}).substr(0, 80 + path.size()),
              c10::str("[checkpoint::load] rank 1 loads another checkpoint than rank 0; this rank loads ", path)
                  .substr(0, 80 + path.size()));
    EXPECT_EQ(step, 0);
  });
}

TEST(CheckpointErrors, APrefixThatNoNameHasIsNamed) {
  const Folder folder;
  torch::nn::Linear net(3, 2);
  checkpoint::save(folder / "c", {{"model", state_of(*net)}});
  EXPECT_EQ(
      load_error(folder / "c", {{"model", state_of(*net)}}, {.only = "model.weight"}),
      "[checkpoint::load] no name of these begins with \"model.weight\"\n  fix: pass the beginning of a name of the "
      "module, without that of the entry, as in {.only = \"layers.0\"}");
}

TEST(CheckpointErrors, WhoSavesAPartAloneIsToldOfTheOthers) {
  const Folder folder;
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    const DTensor t = distribute_tensor(at::arange(5), mesh, {Shard(0)});
    const ProcessGroupGuard forgotten(nullptr);
    const std::string own = folder / c10::str("c", mesh.get_rank());
    const std::string text = save_error(own, {{"t", t}});
    EXPECT_EQ(text.substr(0, text.rfind('\n')),
              c10::str("[checkpoint::save] rank ", 1 - mesh.get_rank(),
                       " of the mesh of \"values.t\" does not take part\n  fix: save on every rank, inside of a "
                       "ProcessGroupGuard or with a .process_group that has all ranks of the mesh"));
  });
  EXPECT_TRUE(folder.names().empty());
}

TEST(CheckpointErrors, TwoJobsCannotSaveToOnePath) {
  const Folder folder;
  const checkpoint::detail::PartialFolder other(folder / "c");
  EXPECT_EQ(
      save_error(folder / "c", {{"a", 1}}),
      c10::str("[checkpoint::save] another job is saving to ", folder / "c", " now: it writes ", other.path(),
               "\n  fix: save to another path, or wait for the other job; where it is another rank of this one, save "
               "together: inside of a ProcessGroupGuard, or with .process_group"));
  checkpoint::save(folder / "d", {{"a", 1}});
  EXPECT_TRUE(std::filesystem::exists(other.path()));
}

// A file of another user, which this one may only read.
TEST(CheckpointErrors, TwoJobsOfDifferentUsersCannotSaveToOnePath) {
  const Folder folder;
  const checkpoint::detail::PartialFolder other(folder / "c");
  std::filesystem::permissions(other.path() + "/.lock", std::filesystem::perms::owner_read);
  EXPECT_EQ(save_error(folder / "c", {{"a", 1}}).find("[checkpoint::save] another job is saving to "), 0u);
  EXPECT_TRUE(std::filesystem::exists(other.path()));
}

TEST(CheckpointErrors, NamesOfLeftoversAreNotSavedTo) {
  const Folder folder;
  for (const char* name : {"c.partial-0123456789abcdef", "c.replaced-0123456789abcdef"}) {
    EXPECT_EQ(save_error(folder / name, {{"a", 1}}),
              c10::str("[checkpoint::save] the name \"", name,
                       "\" is one that saves give to what they leave behind when they are killed\n  fix: choose a name "
                       "without .partial- or .replaced- and 16 hex digits at its end"));
  }
  EXPECT_TRUE(folder.names().empty());
}

TEST(CheckpointErrors, APipeInPlaceOfAFileMakesNobodyWait) {
  const Folder folder;
  std::filesystem::create_directory(folder / "c");
  ASSERT_EQ(::mkfifo((folder / "c/index.json").c_str(), 0600), 0);
  EXPECT_EQ(load_error(folder / "c", {}),
            c10::str("[checkpoint::load] ", folder / "c/index.json", " is no regular file\n  fix: pass one that is"));
  EXPECT_EQ(checkpoint::latest(folder.path().string()), std::nullopt);
}

TEST(CheckpointErrors, NamesAreUtf8) {
  const Folder folder;
  torch::nn::Module net;
  net.register_buffer("b\xff", torch::zeros({1}));
  EXPECT_EQ(save_error(folder / "c", {{"model", state_of(net)}}),
            "[checkpoint::save] a name of \"model\" is not UTF-8: \"b?\"\n  fix: give it another name: the format "
            "takes no other");
  EXPECT_EQ(save_error(folder / "c", {{"run", {{"k\xff", 1}}}})
                .find("[checkpoint::save] \"run\" is a dict with a key "
                      "that is not UTF-8: \"k?\"\n  fix: save "),
            0u);
  EXPECT_EQ(error_text<c10::ValueError>([] { checkpoint::Value(uint64_t(1) << 63); }),
            "[checkpoint] the value 9223372036854775808 is more than an int64_t holds\n  fix: save it as a text, or as "
            "a tensor of uint64");
}

TEST(CheckpointErrors, AnyNameThatIsUtf8ComesBack) {
  const Folder folder;
  const std::vector<std::string> names = {"größe",      "a/b",     "/up",      "\"quoted\"", "back\\slash",
                                          "line\nfeed", "$tensor", "__meta__", "层",         std::string("nul\0nul", 7),
                                          " ",          "{}"};
  torch::nn::Module saved, loaded, plain;
  for (size_t i = 0; i < names.size(); ++i) {
    saved.register_parameter(names[i], torch::full({3}, double(i + 1)));
    for (torch::nn::Module* each : {&loaded, &plain}) each->register_parameter(names[i], torch::zeros({3}));
  }
  const auto optimizer_of = [](torch::nn::Module& module) {
    return torch::optim::SGD(module.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  };
  torch::optim::SGD first = optimizer_of(saved), second = optimizer_of(loaded);
  for (at::Tensor& p : saved.parameters()) p.mutable_grad() = p.detach().clone();
  first.step();
  checkpoint::save(folder / "c", {{"model", state_of(saved)}, {"optim", state_of(first)}});
  checkpoint::load(folder / "c", {{"model", state_of(loaded)}, {"optim", state_of(second)}});
  save_safetensors(folder / "f", saved);
  load_safetensors(folder / "f", plain);
  for (size_t i = 0; i < names.size(); ++i) {
    const at::Tensor value = loaded.named_parameters()[names[i]];
    EXPECT_NEAR(value[0].item<double>(), 0.9 * double(i + 1), 1e-6) << names[i];
    expect_equal(plain.named_parameters()[names[i]].detach(), value.detach());
    const auto& state = static_cast<torch::optim::SGDParamState&>(*second.state().at(value.unsafeGetTensorImpl()));
    EXPECT_EQ(state.momentum_buffer()[0].item<double>(), double(i + 1)) << names[i];
  }
}

TEST(CheckpointErrors, ValuesThatAreTooDeepToBeReadAreNotSaved) {
  const Folder folder;
  const auto nested = [](int depth) {
    c10::IValue value = 1;
    for (int i = 0; i < depth; ++i) {
      c10::impl::GenericList list(c10::AnyType::get());
      list.push_back(value);
      value = list;
    }
    return value;
  };
  checkpoint::save(folder / "c", {{"x", nested(64)}});
  EXPECT_TRUE(checkpoint::read_value(folder / "c", "x").isList());
  const std::string text = save_error(folder / "d", {{"x", nested(65)}});
  EXPECT_NE(text.find("\" is nested more than 64 deep\n  fix: save numbers, "), std::string::npos) << text;
  EXPECT_EQ(folder.names(), std::set<std::string>{"c"});
}

TEST(CheckpointErrors, InsideACaptureNothingIsSavedOrLoaded) {
  const Folder folder;
  auto step = capture([&](const at::Tensor& x) {
    checkpoint::save(folder / "c", {{"a", 1}});
    return x + 1;
  });
  step(torch::ones({2}));  // runs as it is
  EXPECT_EQ(error_text<c10::ValueError>([&] { step(torch::ones({2})); }),
            "[checkpoint::save] inside a captured function, whose replays would not repeat it\n  fix: call it outside");
}

}  // namespace
}  // namespace serried::testing
