// Graphs that go into files and come back.
#include "serried/graph/text/serialize.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>

#include "serried/graph/capture.h"
#include "serried/graph/replay/program.h"
#include "serried/graph/text/archive.h"
#include "serried/mesh/placement.h"
#include "tests/graph/text/sample_graph.h"
#include "tests/support/errors.h"

namespace serried::graph {
namespace {

using c10::IValue;
using serried::testing::error_text;
using serried::testing::f32_meta;
using serried::testing::group_argument;
using serried::testing::op_named;
using serried::testing::reduce_op;
using serried::testing::sample_graph;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// Ops that take one argument of every kind; nobody calls them.
TORCH_LIBRARY(serried_graph_test, m) {
  m.def("values(Tensor x, Tensor? y, Tensor[] list, Tensor?[] maybe, Tensor[][] nested) -> (Tensor, Tensor[], int)");
  m.def("numbers(int i, float f, bool b, Scalar s, int[] ints, float[] floats, bool[] bools, Scalar[] scalars) -> ()");
  m.def("names(str text, str[] texts, ScalarType? dtype, Layout? layout, MemoryFormat? format, Device? device) -> ()");
  m.def("float(float f) -> ()");
  m.def("reduce(__torch__.torch.classes.c10d.ReduceOp op) -> ()");
  m.def("random(Generator? generator) -> ()");
}

Node test_node(const char* name, std::vector<Argument> arguments) {
  return {op_named(std::string("serried_graph_test::") + name), std::move(arguments), {}};
}

Graph round_trip(const Graph& g) {
  const std::string text = to_text(g);
  Graph read = parse_graph(text);
  EXPECT_EQ(to_text(read), text);
  return read;
}

Graph with_phase(Graph g, size_t node, Phase phase) {
  g.nodes()[node].phase = phase;
  return g;
}

const IValue& constant_of(const Graph& g, size_t k, size_t node = 0) {
  return g.nodes()[node].arguments[k].constant;
}

// A path that is gone when the test is.
struct TemporaryFile {
  TemporaryFile() : path(::testing::TempDir() + "serried_graph_" + std::to_string(::getpid())) {}
  ~TemporaryFile() { std::filesystem::remove(path); }
  const std::string path;
};

TEST(GraphSerialize, WritesAllThereIs) {
  EXPECT_EQ(to_text(sample_graph()),
            "serried graph 2\n"
            "value %0 input f32[4, 3] storage 0 name \"x\"\n"
            "value %1 persistent f32[3, 2] storage 1\n"
            "value %2 constant f32[] storage 2\n"
            "value %3 computed f32[4, 2] storage 3\n"
            "value %4 computed f32[4, 2] storage 4\n"
            "value %5 computed f32[4, 2] storage 5\n"
            "value %6 computed f32[3, 4] strides [1, 3] storage 0\n"
            "value %7 computed f32[3, 2] storage 6\n"
            "inputs [%0, undefined]\n"
            "node %3 = aten::mm(%0, %1)\n"
            "node %4 = aten::mul.Tensor(%3, %2)\n"
            "node %5 = serried::all_reduce(%4, group=\"dp\", op=sum, timeout_ms=none)\n"
            "node %6 = aten::t(%0)\n"
            "node %7 = aten::mm(%6, %5)\n"
            "node %1 = aten::add_.Tensor(%1, %7, alpha=-0.1)\n"
            "gradient %7 of \"f32[3, 2]\"\n"
            "outputs [%5]\n"
            "end\n");
}

TEST(GraphSerialize, ArgumentsThatOpsHaveGotSinceHaveTheirDefaults) {
  const std::string text = to_text(sample_graph());
  std::string older = text;
  const std::string added = ", timeout_ms=none";
  older.erase(older.find(added), added.size());
  EXPECT_EQ(to_text(parse_graph(older)), text);
}

TEST(GraphSerialize, KeepsPhasesAndReadsTextWithoutThem) {
  Graph g = sample_graph();
  g.nodes()[0].phase = Phase::forward;
  g.nodes()[2].phase = Phase::backward;
  g.nodes()[5].phase = Phase::optimizer;
  EXPECT_EQ(to_text(with_phase(g, 3, Phase::collective)), to_text(g)) << "no phase of a node";
  const std::string text = to_text(g);
  EXPECT_THAT(text, HasSubstr("node %3 = aten::mm(%0, %1) phase forward\n"));
  EXPECT_THAT(text, HasSubstr("node %6 = aten::t(%0)\n"));
  EXPECT_THAT(text, HasSubstr("alpha=-0.1) phase optimizer\n"));
  const Graph read = parse_graph(text);
  for (size_t i = 0; i < g.nodes().size(); ++i) EXPECT_EQ(read.nodes()[i].phase, g.nodes()[i].phase) << i;
  EXPECT_EQ(parse_graph(to_text(sample_graph())).nodes()[0].phase, Phase::other);
}

TEST(GraphSerialize, RefusesAPhaseThatThereIsNot) {
  Graph g = sample_graph();
  g.nodes()[0].phase = Phase::forward;
  for (const char* word : {"sideward", "collective", "other"}) {
    std::string text = to_text(g);
    text.replace(text.find("phase forward"), 13, std::string("phase ") + word);
    EXPECT_EQ(error_text<c10::ValueError>([&] { parse_graph(text); }),
              std::string("[graph] line 11: unknown phase \"") + word +
                  "\"\n  fix: give it what serried::graph::to_text wrote, unchanged and whole");
  }
}

TEST(GraphSerialize, ReadsWhatItWrote) {
  const Graph g = round_trip(sample_graph());
  EXPECT_EQ(g.nodes().size(), 6);
  EXPECT_EQ(g.nodes()[2].group_name(), "dp");
  EXPECT_EQ(g.gradients()[0].parameter, "f32[3, 2]");
  EXPECT_EQ(g.value(6).meta, sample_graph().value(6).meta);
  EXPECT_EQ(g.inputs(), (std::vector<ValueId>{0, kNoValue}));
}

TEST(GraphSerialize, KeepsEveryFactOfAValue) {
  Graph g;
  Value value{.kind = ValueKind::buffer, .meta = f32_meta({2, 3}), .storage = 9, .arena_offset = 128};
  value.meta.strides = {5, 1};
  value.meta.offset = 7;
  value.meta.dtype = at::kComplexDouble;
  value.meta.device = at::Device("cuda:1");
  value.name = "layer \"0\".weight";
  g.add_value(value);
  g.add_value({.kind = ValueKind::work});
  g.set_arena_bytes(4096);
  const Graph read = round_trip(g);
  EXPECT_EQ(read.value(0).meta, value.meta);
  EXPECT_EQ(read.value(0).storage, 9);
  EXPECT_EQ(read.value(0).arena_offset, 128);
  EXPECT_EQ(read.value(0).name, value.name);
  EXPECT_EQ(read.value(1).kind, ValueKind::work);
  EXPECT_EQ(read.arena_bytes(), 4096);
}

TEST(GraphSerialize, KeepsValuesOfEveryShape) {
  Graph g;
  for (int i = 0; i < 5; ++i) g.add_value({.meta = f32_meta({i})});
  const IValue lengths = c10::List<int64_t>({2, 0, 1});
  Node node = test_node("values", {Argument::of_value(0),
                                   Argument::of(IValue()),
                                   Argument::of_values({1, 0}),
                                   {Argument::Kind::optional_values, {}, {kNoValue, 2}},
                                   {Argument::Kind::nested_values, lengths, {0, 1, 2}}});
  node.results = {{kNoValue}, {3, 4}, {}};
  g.add_node(node);
  node.arguments[1] = Argument::of_value(kNoValue);
  node.arguments[2] = Argument::of_values({});
  g.add_node(node);
  const Graph read = round_trip(g);
  for (size_t i = 0; i < 2; ++i) {
    for (size_t k = 0; k < 5; ++k) {
      EXPECT_EQ(read.nodes()[i].arguments[k].kind, g.nodes()[i].arguments[k].kind) << k;
      EXPECT_EQ(read.nodes()[i].arguments[k].ids, g.nodes()[i].arguments[k].ids) << k;
    }
    EXPECT_EQ(read.nodes()[i].results, g.nodes()[i].results);
  }
  EXPECT_EQ(constant_of(read, 4).toIntVector(), (std::vector<int64_t>{2, 0, 1}));
}

TEST(GraphSerialize, KeepsDoublesToTheLastBit) {
  using Limits = std::numeric_limits<double>;
  double other_nan = Limits::quiet_NaN();
  const uint64_t bits = 0xfff8000000000123;
  std::memcpy(&other_nan, &bits, sizeof(bits));
  for (double number : {0.1, -0.0, 1.0, 1e22, 0.1 + 0.2, Limits::min(), Limits::denorm_min(), Limits::max(),
                        Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN(), other_nan}) {
    Graph g;
    g.add_node(test_node("float", {Argument::of(number)}));
    const double read = constant_of(round_trip(g), 0).toDouble();
    EXPECT_EQ(std::memcmp(&read, &number, sizeof(number)), 0) << number;
  }
}

TEST(GraphSerialize, KeepsTheTypesOfNumbers) {
  Graph g;
  c10::impl::GenericList scalars(c10::NumberType::get());
  for (const IValue& scalar : {IValue(2), IValue(2.0), IValue(true), IValue(c10::complex<double>(0.5, -1))}) {
    scalars.push_back(scalar);
  }
  g.add_node(test_node("numbers", {Argument::of(std::numeric_limits<int64_t>::min()), Argument::of(3.0),
                                   Argument::of(false), Argument::of(4.0), Argument::of(std::vector<int64_t>{1, -2}),
                                   Argument::of(c10::List<double>({1, 0.5})),
                                   Argument::of(c10::List<bool>({true, false})), Argument::of(scalars)}));
  g.add_node(test_node("numbers", {Argument::of(0), Argument::of(3.0), Argument::of(true), Argument::of(4),
                                   Argument::of(c10::List<int64_t>()), Argument::of(c10::List<double>()),
                                   Argument::of(c10::List<bool>()), Argument::of(scalars.copy())}));
  const Graph read = round_trip(g);
  for (size_t i = 0; i < 2; ++i) {
    for (size_t k = 0; k < 8; ++k) {
      EXPECT_EQ(constant_of(read, k, i).tagKind(), constant_of(g, k, i).tagKind()) << k;
      EXPECT_EQ(*constant_of(read, k, i).type(), *constant_of(g, k, i).type()) << k;
      EXPECT_EQ(constant_of(read, k, i), constant_of(g, k, i)) << k;
    }
  }
}

TEST(GraphSerialize, KeepsNames) {
  Graph g;
  const auto add = [&](const IValue& dtype, const IValue& layout, const IValue& format, const IValue& device) {
    g.add_node(
        test_node("names", {Argument::of("a, \"b\" = c)\n\\x41"), Argument::of(c10::List<std::string>({"", "]"})),
                            Argument::of(dtype), Argument::of(layout), Argument::of(format), Argument::of(device)}));
  };
  add({}, {}, {}, {});
  for (int i = 0; i < int(at::ScalarType::NumOptions); ++i) {
    add(i, i % int(at::Layout::NumOptions), i % int(at::MemoryFormat::NumOptions), at::Device(at::kCUDA, i % 4));
  }
  const Graph read = round_trip(g);
  for (size_t i = 0; i < g.nodes().size(); ++i) {
    for (size_t k = 0; k < 6; ++k) EXPECT_EQ(constant_of(read, k, i), constant_of(g, k, i));
  }
  EXPECT_THAT(to_text(g), HasSubstr("dtype=f32, layout=sparse_bsc, format=channels_last, device=cuda:2)"));
}

TEST(GraphSerialize, KeepsReduceOps) {
  Graph g;
  for (int i = 0; i < c10d::ReduceOp::PREMUL_SUM; ++i) {
    g.add_node(test_node("reduce", {reduce_op(c10d::ReduceOp::RedOpType(i))}));
  }
  g.add_node(test_node("reduce", {reduce_op(c10d::makePreMulSum(0.1))}));
  g.add_node(test_node("reduce", {reduce_op(c10d::makePreMulSum(at::scalar_tensor(0.1, at::kHalf)))}));
  const Graph read = round_trip(g);
  for (size_t i = 0; i < g.nodes().size(); ++i) {
    EXPECT_EQ(constant_of(read, 0, i).toCustomClass<c10d::ReduceOp>()->op_,
              constant_of(g, 0, i).toCustomClass<c10d::ReduceOp>()->op_);
  }
  const auto& by_number = static_cast<const c10d::PreMulSumSupplement&>(
      *constant_of(read, 0, 8).toCustomClass<c10d::ReduceOp>()->supplement_);
  EXPECT_EQ(by_number.double_factor, 0.1);
  const auto& by_tensor = static_cast<const c10d::PreMulSumSupplement&>(
      *constant_of(read, 0, 9).toCustomClass<c10d::ReduceOp>()->supplement_);
  EXPECT_TRUE(at::equal(by_tensor.tensor_factor, at::scalar_tensor(0.1, at::kHalf)));
}

TEST(GraphSerialize, KeepsTheDefaultGeneratorAndRefusesOthers) {
  Graph g;
  g.add_node(test_node("random", {Argument::of(at::detail::getDefaultCPUGenerator())}));
  EXPECT_EQ(constant_of(round_trip(g), 0).toGenerator(), at::detail::getDefaultCPUGenerator());
  g.nodes()[0].arguments[0].constant = at::make_generator<at::CPUGeneratorImpl>(uint64_t(1));
  EXPECT_EQ(error_text<c10::ValueError>([&] { to_text(g); }),
            "[save] argument \"generator\" of serried_graph_test::random is a generator, which exists in this process "
            "only\n  fix: use the default generator in the captured function, and no op that takes a storage");
}

TEST(GraphSerialize, PlacementsKeepAllTheirArguments) {
  Placements all = {Replicate(), Shard(0), Shard(3), Shard(-1), StridedShard(0, 2), StridedShard(1, 4096)};
  for (ReduceKind kind : {ReduceKind::sum, ReduceKind::avg, ReduceKind::min, ReduceKind::max, ReduceKind::product,
                          ReduceKind::band, ReduceKind::bor, ReduceKind::bxor}) {
    all.push_back(Partial(kind));
  }
  EXPECT_EQ(parse_placements(to_string(all)), all);
  for (const Placement& p : all) EXPECT_EQ(parse_placements(to_string(p)), Placements{p}) << p;
}

// What it computes depends on a parameter, a constant and the input.
struct Scaled {
  at::Tensor weight = torch::randn({3, 5});
  at::Tensor operator()(const at::Tensor& x) const {
    return at::relu(x.mm(weight)) * at::tensor({0.5f, 0.25f, 3.f, 1.f, 7.f});
  }
};

Graph captured_graph(const Scaled& fn) {
  auto step = capture(fn);
  for (int i = 0; i < 3; ++i) step(torch::randn({4, 3}));
  return step.graph();
}

at::Tensor run_graph(const Graph& g, const at::Tensor& x) {
  Program program(g, {});
  program.run({x});
  return program.value(g.outputs()[0]);
}

TEST(GraphArchive, RunsAsBeforeAfterLoad) {
  const Scaled fn;
  const Graph g = captured_graph(fn);
  const TemporaryFile file;
  save(g, file.path, {.persistent_data = true});
  const Graph loaded = load(file.path);
  EXPECT_EQ(to_text(loaded), to_text(g));
  EXPECT_EQ(loaded.to_string(), g.to_string());
  const at::Tensor x = torch::randn({4, 3});
  EXPECT_TRUE(at::equal(run_graph(loaded, x), fn(x)));
}

TEST(GraphArchive, TakesOtherParametersByOrderAndByName) {
  const TemporaryFile file;
  Graph g = captured_graph({});
  const std::vector<ValueId> ids = persistent_values(g);
  ASSERT_EQ(ids.size(), 1);
  g.value(ids[0]).name = "weight";
  save(g, file.path);
  Graph loaded = load(file.path);
  EXPECT_FALSE(loaded.value(ids[0]).tensor.defined());
  const Scaled first, second;
  const at::Tensor x = torch::randn({4, 3});
  bind_persistent(loaded, {first.weight});
  EXPECT_TRUE(at::equal(run_graph(loaded, x), first(x)));
  bind_persistent_by_name(loaded, {{"weight", second.weight}});
  EXPECT_TRUE(at::equal(run_graph(loaded, x), second(x)));
}

TEST(GraphArchive, KeepsConstantsBitForBit) {
  const TemporaryFile file;
  Graph g;
  const at::Tensor numbers = at::empty({2, 3}, at::kFloat).t();
  for (int i = 0; i < 6; ++i) {
    const uint32_t bits[] = {0x7fc00123, 0x00000001, 0x80000000, 0x7f800000, 0x3dcccccd, 0xffffffff};
    std::memcpy(numbers.mutable_data_ptr<float>() + i, &bits[i], 4);
  }
  g.add_value({.kind = ValueKind::constant, .meta = meta_of(numbers), .tensor = numbers});
  save(g, file.path);
  const at::Tensor loaded = load(file.path).value(0).tensor;
  EXPECT_EQ(meta_of(loaded), meta_of(numbers));
  EXPECT_EQ(std::memcmp(loaded.const_data_ptr<float>(), numbers.const_data_ptr<float>(), 24), 0);
}

TEST(GraphArchive, KeepsMemoryShared) {
  const TemporaryFile file;
  const at::Tensor bucket = at::arange(10, at::kFloat);
  Graph g;
  for (const at::Tensor& t : {bucket, bucket.narrow(0, 4, 6).view({2, 3})}) {
    g.add_value({.kind = ValueKind::persistent, .meta = meta_of(t), .tensor = t, .storage = 0});
  }
  save(g, file.path, {.persistent_data = true});
  const Graph loaded = load(file.path);
  EXPECT_TRUE(at::equal(loaded.value(1).tensor, bucket.narrow(0, 4, 6).view({2, 3})));
  loaded.value(0).tensor.zero_();
  EXPECT_EQ(loaded.value(1).tensor.sum().item<float>(), 0);
}

std::string bytes_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST(GraphArchive, RefusesFilesThatAreNotWholeOrNotOurs) {
  const TemporaryFile file;
  const std::string fix = "\n  fix: give the path of a file that serried::graph::save wrote";
  EXPECT_EQ(error_text<c10::ValueError>([&] { load(file.path); }), "[load] cannot read " + file.path + fix);
  EXPECT_EQ(error_text<c10::ValueError>([] { load("/"); }), "[load] cannot read /" + fix);
  save(captured_graph({}), file.path);
  const std::string whole = bytes_of(file.path);
  for (const std::string& part :
       {whole.substr(0, whole.size() / 2), whole.substr(0, whole.size() - 1), std::string("hello")}) {
    std::ofstream(file.path, std::ios::binary) << part;
    EXPECT_EQ(error_text<c10::ValueError>([&] { load(file.path); }),
              c10::str("[load] ", file.path, " (", part.size(), " bytes) is no saved graph, or a damaged one", fix));
  }
}

// LibTorch's reader alone takes more than half of these, and some numbers are then others.
TEST(GraphArchive, RefusesFilesWithOneBitChanged) {
  const TemporaryFile file;
  Graph g;
  g.add_value({.kind = ValueKind::constant, .meta = f32_meta({6}), .tensor = at::arange(6, at::kFloat)});
  save(g, file.path);
  const std::string whole = bytes_of(file.path);
  for (size_t i = 0; i < whole.size(); ++i) {
    std::string damaged = whole;
    damaged[i] = char(damaged[i] ^ (1 << i % 8));
    std::ofstream(file.path, std::ios::binary) << damaged;
    EXPECT_THAT(error_text<c10::ValueError>([&] { load(file.path); }), HasSubstr("or a damaged one")) << "byte " << i;
  }
}

// A whole archive of the graph with one constant f32[2], and a tensor for value `id`.
std::string archive_error(int64_t id, const at::Tensor& t) {
  const TemporaryFile file;
  Graph g;
  g.add_value({.kind = ValueKind::constant, .meta = f32_meta({2})});
  std::ofstream out(file.path, std::ios::binary);
  pack({.text = to_text(g), .ids = {id}, .tensors = {t}}, out);
  out.close();
  std::string text = error_text<c10::ValueError>([&] { load(file.path); });
  const size_t at = text.find(file.path);
  return at == std::string::npos ? text : text.replace(at, file.path.size(), "FILE");
}

TEST(GraphArchive, RefusesTensorsThatDoNotFitTheGraph) {
  const std::string fix = "\n  fix: give the path of a file that serried::graph::save wrote";
  for (int64_t id : {int64_t(1), int64_t(-1), int64_t(1) << 32}) {
    EXPECT_EQ(archive_error(id, at::zeros({2})),
              c10::str("[load] FILE has a tensor for value %", id, ", which its graph lacks", fix));
  }
  EXPECT_EQ(archive_error(0, at::zeros({3})),
            "[load] FILE: %c0 is f32[2], and its tensor f32[3] with strides [1] on cpu" + fix);
  EXPECT_EQ(archive_error(0, at::zeros({2}, at::kLong)),
            "[load] FILE: %c0 is f32[2], and its tensor i64[2] with strides [1] on cpu" + fix);
}

TEST(GraphArchive, SaysWhereItCannotWrite) {
  EXPECT_EQ(error_text<c10::ValueError>([] { save({}, "/no/such/folder/graph"); }),
            "[save] cannot write /no/such/folder/graph\n"
            "  fix: give the path of a file in a folder that can be written");
}

TEST(GraphArchive, BindRefusesWhatDoesNotFitAndBindsNothing) {
  Graph g;
  for (int i = 0; i < 2; ++i) {
    g.add_value({.kind = ValueKind::persistent, .meta = f32_meta({2, 3}), .name = "w" + std::to_string(i)});
  }
  const at::Tensor good = at::ones({2, 3});
  EXPECT_EQ(error_text<c10::ValueError>([&] { bind_persistent(g, {good}); }),
            "[bind_persistent] 1 tensors for 2 persistent values\n"
            "  fix: give one tensor for each of serried::graph::persistent_values(graph), in that order");
  const std::string fix = "\n  fix: bind the tensors that the function was captured with, or others of the same layout";
  EXPECT_EQ(error_text<c10::ValueError>([&] {
              bind_persistent(g, {good, at::ones({3, 2}, at::kDouble).t()});
            }),
            "[bind_persistent] %w1 is f32[2, 3] with strides [3, 1] on cpu, and the tensor f64[2, 3] with strides [1, "
            "2] on cpu" +
                fix);
  EXPECT_EQ(error_text<c10::ValueError>([&] {
              bind_persistent(g, {good, at::Tensor()});
            }),
            "[bind_persistent] %w1 is f32[2, 3], and the tensor is undefined" + fix);
  EXPECT_EQ(error_text<c10::ValueError>([&] {
              bind_persistent_by_name(g, {{"w0", good}});
            }),
            "[bind_persistent] there is no tensor for %w1\n  fix: name every persistent value, and give a tensor for "
            "each name");
  EXPECT_FALSE(g.value(0).tensor.defined());
}

// What parse_graph says of a text with these lines between the first and the last.
std::string parse_error(const std::string& lines) {
  const std::string text = error_text<c10::ValueError>([&] { parse_graph("serried graph 2\n" + lines + "end\n"); });
  const std::string fix = "\n  fix: give it what serried::graph::to_text wrote, unchanged and whole";
  return text.ends_with(fix) ? text.substr(0, text.size() - fix.size()) : text;
}

TEST(GraphParse, NamesTheLineThatItCannotRead) {
  const std::string x = "value %0 computed f32[2]\n";
  EXPECT_EQ(parse_error(x + "node %0 = aten::nothing(%0)\n"),
            "[graph] line 3: unknown op \"aten::nothing\"\n  fix: load the library that registers it first");
  EXPECT_EQ(parse_error(x + "node %0 = aten::neg(%7)\n"), "[graph] line 3: there is no value %7");
  EXPECT_EQ(parse_error(x + "node aten::neg(%0)\n"), "[graph] line 3: aten::neg has 1 results, not 0");
  EXPECT_EQ(parse_error(x + "node %0 = aten::neg(%0\n"), "[graph] line 3: expected ) before \"\"");
  EXPECT_EQ(parse_error(x + "node %0 = aten::neg(%0) twice\n"),
            "[graph] line 3: more than a line should have: \"twice\"");
  EXPECT_EQ(parse_error("value %1 computed f32[2]\n"), "[graph] line 2: expected %0 before \"%1 computed f32[2]\"");
  EXPECT_EQ(parse_error("value %0 fancy f32[2]\n"), "[graph] line 2: unknown kind of value \"fancy\"");
  EXPECT_EQ(parse_error("value %0 computed f33[2]\n"), "[graph] line 2: unknown dtype \"f33\"");
  EXPECT_EQ(parse_error("value %0 computed f32[2] device moon\n"), "[graph] line 2: unknown device \"moon\"");
  EXPECT_EQ(parse_error("value %0 computed f32[two]\n"), "[graph] line 2: \"two\" is no number");
  EXPECT_EQ(parse_error("node serried_graph_test::reduce(op=most)\n"), "[graph] line 2: unknown reduce op \"most\"");
  EXPECT_EQ(parse_error("node serried_graph_test::float(f=)\n"),
            "[graph] line 2: expected a word or a number before \")\"");
  EXPECT_EQ(parse_error("gradient %0 of \"w\n"), "[graph] line 2: there is no value %0");
  EXPECT_EQ(parse_error(x + "gradient %0 of \"w\n"), "[graph] line 3: the line ends in the middle of a string");
  EXPECT_EQ(parse_error("node serried_graph_test::float(f=nan:0xyz)\n"),
            "[graph] line 2: \"yz\" is no hexadecimal number");
  const std::string names = "node serried_graph_test::names(text=\"\", texts=[], dtype=none, ";
  EXPECT_EQ(parse_error(names + "layout=round)\n"), "[graph] line 2: unknown layout \"round\"");
  EXPECT_EQ(parse_error(names + "layout=strided, format=new)\n"), "[graph] line 2: unknown memory format \"new\"");
  EXPECT_EQ(parse_error("poem\n"), "[graph] line 2: there is no such line: \"poem\"");
}

TEST(GraphParse, RefusesTensorsThatCannotBe) {
  EXPECT_EQ(parse_error("value %0 computed 999[2]\n"), "[graph] line 2: there is no dtype 999");
  EXPECT_EQ(parse_error("value %0 computed -1[2]\n"), "[graph] line 2: there is no dtype -1");
  EXPECT_EQ(parse_error("value %0 computed f32[2] device none\n"), "[graph] line 2: unknown device \"none\"");
  EXPECT_EQ(parse_error("value %0 computed f32[2, -3]\n"), "[graph] line 2: no tensor has the shape [2, -3]");
  EXPECT_EQ(parse_error("value %0 computed f32[4294967296, 4294967296]\n"),
            "[graph] line 2: no tensor has the shape [4294967296, 4294967296]");
  EXPECT_EQ(parse_error("value %0 computed f32[2, 3] strides [1]\n"),
            "[graph] line 2: no tensor f32[2, 3] has strides [1] and offset 0");
  EXPECT_EQ(parse_error("value %0 computed f64[2] strides [4611686018427387904]\n"),
            "[graph] line 2: no tensor f64[2] has strides [4611686018427387904] and offset 0");
  EXPECT_EQ(parse_error("value %0 computed f32[2] offset -1\n"),
            "[graph] line 2: no tensor f32[2] has strides [1] and offset -1");
  EXPECT_EQ(parse_error("value %0 computed f32[2] storage 4294967296\n"),
            "[graph] line 2: there is no storage 4294967296");
}

TEST(GraphParse, RefusesBuffersOutsideOfTheArena) {
  EXPECT_EQ(parse_error("arena -1\n"), "[graph] line 2: -1 bytes are below 0");
  EXPECT_EQ(parse_error("arena 64\nvalue %0 buffer f32[4] at 52\n"),
            "[graph] line 3: a buffer of 16 bytes at 52 is outside of the arena of 64 bytes");
  EXPECT_EQ(parse_error("value %0 buffer f32[0]\narena 64\n"),
            "[graph] line 3: the arena stands in front of all values");
}

TEST(GraphParse, RefusesConstantsOfAnotherType) {
  EXPECT_EQ(parse_error("node serried_graph_test::float(f=none)\n"),
            "[graph] line 2: argument \"f\" is a float, not none");
  EXPECT_EQ(parse_error("node serried_graph_test::float(f=1)\n"), "[graph] line 2: argument \"f\" is a float, not 1");
  EXPECT_EQ(parse_error("value %0 input f32[2]\nnode %0 = aten::sum.dim_IntList(%0, dim=[0, 1.5], false, none)\n"),
            "[graph] line 3: argument \"dim\" is a int[]?, not [0, 1.5]");
  EXPECT_EQ(parse_error("value %0 input f32[2]\nnode %0 = aten::neg(7)\n"),
            "[graph] line 3: argument \"self\" is a Tensor, not 7");
  EXPECT_EQ(parse_error("value %0 input f32[2]\nnode %0 = aten::unsqueeze(%0, dim=%0)\n"),
            "[graph] line 3: expected a word or a number before \"%0)\"");
  EXPECT_EQ(parse_error("node serried_graph_test::reduce(op=premul_sum(0.5, c64))\n"),
            "[graph] line 2: a factor cannot be of dtype c64");
  EXPECT_EQ(parse_error("node serried_graph_test::reduce(op=premul_sum(1e300, i8))\n"),
            "[graph] line 2: the factor 1e+300 does not fit into i8");
}

TEST(GraphParse, RefusesOtherVersionsAndTruncatedText) {
  for (const std::string other : {"serried graph 1", "serried graph 3"}) {
    EXPECT_EQ(error_text<c10::ValueError>([&] { parse_graph(other + "\nend\n"); }),
              "[graph] line 1: \"" + other +
                  "\" is not \"serried graph 2\"\n  fix: capture the function again, and save its graph with this "
                  "version");
  }
  EXPECT_EQ(error_text<c10::ValueError>([] { parse_graph("a poem\n"); }),
            "[graph] line 1: \"a poem\" is not \"serried graph 2\"\n  fix: give it what serried::graph::to_text wrote, "
            "unchanged and whole");
  const std::string text = to_text(sample_graph());
  for (size_t length = 0; length + 1 < text.size(); ++length) {
    EXPECT_THAT(error_text<c10::ValueError>([&] { parse_graph(text.substr(0, length)); }), StartsWith("[graph] line "));
  }
}

}  // namespace
}  // namespace serried::graph
