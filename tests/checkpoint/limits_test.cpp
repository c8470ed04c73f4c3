// What is beyond a limit of the machine, of a library or of the format is refused by name, or takes no more for it.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <torch/torch.h>

#include <locale>

#include "serried/base/error.h"
#include "serried/checkpoint/checkpoint.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/inspect.h"
#include "serried/checkpoint/reader.h"
#include "serried/checkpoint/state_dict.h"
#include "serried/comm/agree/shared_memory.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "tests/checkpoint/folder.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"

namespace serried::testing {
namespace {

using checkpoint::state_of;

// Lets this process open `more` files than it has now, while alive.
class FewFiles {
 public:
  explicit FewFiles(rlim_t more) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    const int next = ::dup(0);
    ::close(next);
    const rlimit limit{rlim_t(next) + more, before_.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &limit);
  }
  ~FewFiles() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  FewFiles(const FewFiles&) = delete;

 private:
  rlimit before_;
};

torch::nn::Sequential many_layers(int64_t count) {
  torch::nn::Sequential net;
  for (int64_t i = 0; i < count; ++i) net->push_back(torch::nn::Linear(torch::nn::LinearOptions(8, 8).bias(false)));
  return net;
}

TEST(CheckpointLimits, OneOfMoreFilesThanAProcessMayOpenIsReadAll) {
  const Folder folder;
  const SmallLimits limits({.file_bytes = 256, .block_bytes = 64, .short_run = 16});
  torch::nn::Sequential saved = many_layers(60), loaded = many_layers(60);
  checkpoint::save(folder / "c", {{"model", state_of(*saved)}});
  checkpoint::save(folder / "same", {{"model", state_of(*saved)}});
  const FewFiles few(2 * checkpoint::detail::kFilesThatStayOpen + 8);
  checkpoint::load(folder / "c", {{"model", state_of(*loaded)}});
  const auto expected = saved->parameters(), found = loaded->parameters();
  for (size_t i = 0; i < expected.size(); ++i) expect_equal(found[i].detach(), expected[i].detach());
  EXPECT_TRUE(checkpoint::detail::verify(folder / "c").empty());
  EXPECT_TRUE(checkpoint::detail::differences(folder / "c", folder / "same").empty());
  load_safetensors(folder / "c/model.safetensors.index.json", *loaded);
}

TEST(CheckpointLimits, TooManyOpenFilesAreNotTakenForDamage) {
  const Folder folder;
  torch::nn::Linear net(2, 2);
  checkpoint::save(folder / "c", {{"model", state_of(*net)}});
  const auto expect_said = [](const std::string& text) {
    EXPECT_NE(
        text.find("Too many open files\n  fix: raise the number of files that a process may have open: ulimit -n"),
        std::string::npos)
        << text;
  };
  for (const rlim_t more : {0, 1}) {
    const FewFiles few(more);
    const auto load = [&] { checkpoint::load(folder / "c", {{"model", state_of(*net)}}); };
    // With one a file is read after the other.
    more == 0 ? expect_said(error_text<c10::Error>(load)) : load();
    if (more > 0) continue;
    expect_said(error_text<c10::Error>([&] { checkpoint::save(folder / "c", {{"model", state_of(*net)}}); }));
    expect_said(error_text<c10::Error>([&] { checkpoint::latest(folder.path().string()); }));
    expect_said(error_text<c10::Error>([&] { checkpoint::read_value(folder / "c", "x"); }));
    try {
      checkpoint::detail::verify(folder / "c");
      ADD_FAILURE();
    } catch (const checkpoint::detail::Failure& failure) {
      expect_said(format_error({"", failure.text, failure.fix}));
    }
  }
  checkpoint::load(folder / "c", {{"model", state_of(*net)}});
}

TEST(CheckpointLimits, NamesTooLongForARegularExpressionAreRefused) {
  const Folder folder;
  for (const size_t letters : {size_t(4096), size_t(4097), size_t(200000)}) {
    const std::string name(letters, 'a');
    torch::nn::Module saved, loaded;
    saved.register_parameter(name, torch::ones({2}));
    loaded.register_parameter(name, torch::zeros({2}));
    save_safetensors(folder / "f", saved);
    checkpoint::save(folder / "c", {{"model", state_of(saved)}});
    load_safetensors(folder / "f", loaded);
    const std::vector<checkpoint::Rename> rename = {{"(x|y)+$", "z"}};
    const auto load = [&] { load_safetensors(folder / "f", loaded, {.rename = rename}); };
    if (letters <= 4096) {
      load();
      checkpoint::load(folder / "c", {{"model", state_of(loaded)}}, {.rename = rename});
      continue;
    }
    const std::string said = c10::str("the name \"", name.substr(0, 60), "...\" has ", letters,
                                      " letters, and may have 4096 where names are changed by {.rename}\n  fix: load "
                                      "without .rename, into a module with the names that were saved");
    EXPECT_EQ(error_text<c10::ValueError>(load), "[load_safetensors] " + said);
    EXPECT_EQ(load_error(folder / "c", {{"model", state_of(loaded)}}, {.rename = rename}),
              "[checkpoint::load] " + said);
  }
}

TEST(CheckpointLimits, AnIndexThatIsTooLongIsNeitherWrittenNorRead) {
  const Folder folder;
  const std::vector<int64_t> list(300, 7);
  checkpoint::save(folder / "c", {{"list", list}});
  const std::string text = content_of(folder / "c/index.json");
  const auto save = [&] { checkpoint::save(folder / "d", {{"list", list}}); };
  const auto load = [&] { checkpoint::read_value(folder / "c", "list"); };
  {
    const SmallLimits limits({.json_values = 200});
    EXPECT_EQ(error_text<c10::ValueError>(save),
              "[checkpoint::save] index.json would have 313 values, and may have 200\n  fix: save long lists and texts "
              "as tensors, or in several checkpoints");
    EXPECT_EQ(error_text<c10::ValueError>(load),
              c10::str("[checkpoint::read_value] ", folder / "c/index.json",
                       " has more than 200 values\n  fix: the file is damaged: use another checkpoint"));
  }
  {
    const SmallLimits limits({.json_bytes = 1000});
    EXPECT_EQ(error_text<c10::ValueError>(save).find("[checkpoint::save] index.json would have "), 0u);
    EXPECT_EQ(error_text<c10::ValueError>(load),
              c10::str("[checkpoint::read_value] ", folder / "c/index.json", " has ", text.size(),
                       " bytes, and may have 1000\n  fix: the file is damaged: use a copy"));
  }
  const SmallLimits limits({.json_bytes = int64_t(text.size()), .json_values = 313});
  load();
  EXPECT_EQ(folder.names(), std::set<std::string>{"c"});
}

TEST(CheckpointLimits, AParameterInTwoGroupsIsRefusedByTheSave) {
  const Folder folder;
  torch::nn::Linear net(2, 2);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
  optimizer.param_groups().push_back(torch::optim::OptimizerParamGroup(
      {net->weight}, std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(0.2))));
  EXPECT_EQ(
      error_text<c10::ValueError>([&] {
        checkpoint::save(folder / "c", {{"model", state_of(*net)}, {"optim", state_of(optimizer)}});
      }),
      "[checkpoint::save] the parameter \"weight\" is in group 0 and in group 1 of an optimizer\n  fix: give each "
      "parameter to one group: it has one state and would be stepped twice");
  EXPECT_EQ(folder.names(), std::set<std::string>{});
}

TEST(CheckpointLimits, StateThatIsMadeInInferenceModeIsThatOfTraining) {
  const Folder folder;
  torch::nn::Linear net(2, 2);
  const auto make = [&] { return torch::optim::AdamW(net->parameters(), torch::optim::AdamWOptions(0.1)); };
  torch::optim::AdamW saved = make(), loaded = make();
  const auto step = [&](torch::optim::Optimizer& optimizer) {
    optimizer.zero_grad();
    net(torch::ones({1, 2})).sum().backward();
    optimizer.step();
  };
  step(saved);
  const checkpoint::Contents contents = {{"model", state_of(*net)}, {"optim", state_of(loaded)}};
  checkpoint::save(folder / "c", {{"model", state_of(*net)}, {"optim", state_of(saved)}});
  const checkpoint::StateDict state = checkpoint::get_state({{"model", state_of(*net)}, {"optim", state_of(saved)}});
  for (const bool is_file : {true, false}) {
    loaded.state().clear();
    {
      const c10::InferenceMode inference;
      is_file ? checkpoint::load(folder / "c", contents) : checkpoint::set_state(contents, state);
    }
    const auto& made = *loaded.state().at(net->weight.unsafeGetTensorImpl());
    EXPECT_FALSE(static_cast<const torch::optim::AdamWParamState&>(made).exp_avg().is_inference());
    step(loaded);
  }
}

// With a search through all tensors for each of them this takes minutes.
TEST(CheckpointLimits, StateOfManyParametersGoesFromOneRankToAll) {
  constexpr int64_t kCount = 60000;
  checkpoint::StateDict state;
  for (int64_t i = 0; i < kCount; ++i) state["model"].tensors["p" + std::to_string(i)] = torch::tensor(float(i));
  run_ranks(2, [&](const Group& world) {
    torch::nn::Module net;
    for (int64_t i = 0; i < kCount; ++i) net.register_parameter("p" + std::to_string(i), torch::zeros({}));
    checkpoint::set_state({{"model", state_of(net)}}, world->getRank() == 0 ? state : checkpoint::StateDict(),
                          {.from_first_rank = true});
    const std::vector<at::Tensor> parameters = net.parameters();
    for (int64_t i = 0; i < kCount; ++i) EXPECT_EQ(parameters[size_t(i)].item<float>(), float(i));
  });
}

TEST(CheckpointLimits, AFileOfAModuleReplacesRegularFilesOnly) {
  const Folder folder;
  torch::nn::Linear net(1, 1);
  save_safetensors(folder / "f", *net);
  std::filesystem::create_symlink(folder / "f", folder / "link");
  std::filesystem::create_symlink(folder / "nowhere", folder / "dangling");
  std::filesystem::create_directory(folder / "folder");
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  const auto refused = [&](const std::string& name) {
    return error_text<c10::ValueError>([&] { save_safetensors(folder / name, *net); });
  };
  const std::string start = "[save_safetensors] ",
                    fix = "\n  fix: pass a path of its own: a save replaces what is there",
                    fix_of_link =
                        "\n  fix: save to what it leads to: a save replaces what is at the path, here the link";
  EXPECT_EQ(refused("link"), start + (folder / "link") + " is a symbolic link to " + (folder / "f") + fix_of_link);
  EXPECT_EQ(refused("dangling"),
            start + (folder / "dangling") + " is a symbolic link to " + (folder / "nowhere") + fix_of_link);
  EXPECT_EQ(refused("pipe"), start + (folder / "pipe") + " is there and is no regular file" + fix);
  EXPECT_EQ(refused("folder"), start + (folder / "folder") + " is there and is a folder" + fix);
  EXPECT_TRUE(std::filesystem::is_fifo(folder / "pipe"));
  EXPECT_EQ(folder.names(), (std::set<std::string>{"dangling", "f", "folder", "link", "pipe"}));
  save_safetensors(folder / "f", *net);
}

// As "de_DE" has it.
struct Grouping : std::numpunct<char> {
  char do_thousands_sep() const override { return '.'; }
  char do_decimal_point() const override { return ','; }
  std::string do_grouping() const override { return "\3"; }
};

class GroupingLocale {
 public:
  GroupingLocale() : before_(std::locale::global(std::locale(std::locale::classic(), new Grouping))) {}
  ~GroupingLocale() { std::locale::global(before_); }
  GroupingLocale(const GroupingLocale&) = delete;

 private:
  std::locale before_;
};

TEST(CheckpointLimits, NumbersAreWrittenWithoutSeparatorsOfTheLocale) {
  const Folder folder;
  std::vector<at::Tensor> list(1100, torch::ones({1}));
  std::vector<at::Tensor> parameters;
  for (int i = 0; i < 1100; ++i) parameters.push_back(torch::zeros({1}).requires_grad_());
  const auto save = [&](const std::string& path) {
    torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(0.1));
    for (const at::Tensor& p : parameters) p.mutable_grad() = torch::ones({1});
    optimizer.step();
    checkpoint::save(path, {{"list", list}, {"optim", state_of(optimizer)}, {"step", 12345}, {"lr", 1234.5}});
  };
  save(folder / "classic");
  const GroupingLocale grouping;
  EXPECT_EQ((serried::detail::SharedFilePlace{25916, 4}).text(), "25916 4");
  run_ranks(2, [&](const Group& world) {
    at::Tensor sum = torch::ones({1});
    all_reduce_(sum, world);
    EXPECT_EQ(sum.item<float>(), 2);
  });
  save(folder / "grouping");
  EXPECT_EQ(checkpoint::detail::differences(folder / "classic", folder / "grouping"), std::vector<std::string>{});
  torch::optim::AdamW loaded(parameters, torch::optim::AdamWOptions(0.1));
  int64_t step = 0;
  double lr = 0;
  checkpoint::load(folder / "grouping", {{"optim", state_of(loaded)}, {"step", &step}, {"lr", &lr}});
  EXPECT_EQ(step, 12345);
  EXPECT_EQ(lr, 1234.5);
}

}  // namespace
}  // namespace serried::testing
