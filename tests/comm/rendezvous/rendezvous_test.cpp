// How ranks find each other: every scheme, every launcher's environment, every refusal.
#include "serried/comm/rendezvous/rendezvous.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <thread>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "serried/base/error.h"
#include "serried/base/listen.h"
#include "serried/comm/agree/host.h"
#include "serried/comm/agree/rank_texts.h"
#include "serried/comm/rendezvous/launch_environment.h"
#include "serried/comm/rendezvous/signed_store.h"
#include "serried/comm/rendezvous/url.h"
#include "serried/comm/rendezvous/world_store.h"
#include "tests/support/each_rank.h"
#include "tests/support/environment.h"
#include "tests/support/errors.h"

namespace serried {
namespace {

using namespace std::chrono_literals;
using testing::each_rank;
using testing::error_text;
using testing::ScopedEnv;

const std::map<std::string, std::string> kNoLauncher{
    {"RANK", ""},     {"WORLD_SIZE", ""},   {"MASTER_ADDR", ""},          {"MASTER_PORT", ""},   {"PMI_RANK", ""},
    {"PMI_SIZE", ""}, {"SLURM_PROCID", ""}, {"OMPI_COMM_WORLD_RANK", ""}, {"PMIX_NAMESPACE", ""}};

std::map<std::string, std::string> with(std::map<std::string, std::string> values) {
  values.insert(kNoLauncher.begin(), kNoLauncher.end());
  return values;
}

// A port that was free a moment ago.
uint16_t free_port() {
  const int fd = detail::listen_at("127.0.0.1", 0).fd;
  const uint16_t port = detail::port_of(fd);
  ::close(fd);
  return port;
}

std::string tcp_url(uint16_t port, int rank, int world_size) {
  return c10::str("tcp://127.0.0.1:", port, "?rank=", rank, "&world_size=", world_size);
}

std::string refused_url(const std::string& url, RendezvousOptions options = {.timeout = 1s}) {
  return error_text<c10::ValueError>([&] { rendezvous(url, options); });
}

TEST(Url, SplitsIntoItsParts) {
  const detail::Url url = detail::parse_url("tcp://[::1]:29500/a/b?rank=1&world_size=2");
  EXPECT_EQ(url.scheme, "tcp");
  EXPECT_EQ(url.host, "::1");
  EXPECT_EQ(url.port, "29500");
  EXPECT_EQ(url.path, "/a/b");
  EXPECT_EQ(url.query, (std::map<std::string, std::string>{{"rank", "1"}, {"world_size", "2"}}));
}

TEST(Rendezvous, TcpRanksMeetInAnyOrder) {
  const uint16_t port = free_port();
  each_rank(3, [&](int rank) {
    const Meeting meeting = rendezvous(tcp_url(port, rank, 3), {.timeout = 60s});
    EXPECT_EQ(meeting.rank, rank);
    EXPECT_EQ(meeting.world_size, 3);
    const auto all = detail::exchange({meeting.store, rank, 3, 60s}, "test", "name", c10::str("I am ", rank));
    EXPECT_EQ(all, (std::vector<std::string>{"I am 0", "I am 1", "I am 2"}));
  });
}

TEST(Rendezvous, TheSecondMeetingAtOnePlaceSharesTheStore) {
  const std::string url = tcp_url(free_port(), 0, 1);
  const auto first = rendezvous(url, {.timeout = 60s}).store;
  EXPECT_EQ(rendezvous(url, {.timeout = 60s}).store, first);
}

TEST(Rendezvous, ExplicitRanksAreMergedUnlessTheUrlHasThem) {
  const uint16_t port = free_port();
  const Meeting meeting =
      rendezvous(c10::str("tcp://127.0.0.1:", port, "?rank=0"), {.rank = 5, .world_size = 1, .timeout = 60s});
  EXPECT_EQ(meeting.rank, 0);
  EXPECT_EQ(meeting.world_size, 1);
}

TEST(Rendezvous, PlainServerWorksToo) {
  for (const char* use_libuv : {"0", "1"}) {
    const auto store = rendezvous(tcp_url(free_port(), 0, 1) + "&use_libuv=" + use_libuv, {.timeout = 60s}).store;
    store->set("key", std::string("value"));
    EXPECT_EQ(store->get_to_str("key"), "value");
  }
}

TEST(Rendezvous, PortInUseIsSaid) {
  const int fd = detail::listen_at("127.0.0.1", 0).fd;
  const uint16_t port = detail::port_of(fd);
  EXPECT_EQ(error_text<c10::DistNetworkError>([&] { rendezvous(tcp_url(port, 0, 2), {.timeout = 1s}); }),
            c10::str("[rendezvous] rank 0 cannot listen at 127.0.0.1:", port,
                     ": Address already in use\n"
                     "  fix: end the program that uses the port, or choose another (MASTER_PORT)"));
  ::close(fd);
}

TEST(Rendezvous, UnreachableStoreIsSaidWithinTheTimeout) {
  const uint16_t port = free_port();
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(
      error_text<c10::DistNetworkError>([&] { rendezvous(tcp_url(port, 1, 2), {.timeout = 300ms}); }),
      c10::str("[rendezvous] nothing listens at 127.0.0.1:", port,
               " after 300 ms\n"
               "  fix: start rank 0, and check its address and port (MASTER_ADDR, MASTER_PORT) and the firewall"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 60s);
}

TEST(Rendezvous, AStoreThatTakesConnectionsButDoesNotAnswerIsSaid) {
  // As a launcher holds it while rank 0 is in other code. Never closed: c10d's client waits there for as long.
  const int fd = detail::listen_at("127.0.0.1", 0).fd;
  const uint16_t port = detail::port_of(fd);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THAT(error_text<c10::DistNetworkError>([&] { rendezvous(tcp_url(port, 1, 2), {.timeout = 300ms}); }),
              ::testing::MatchesRegex(c10::str(
                  "\\[rendezvous\\] 127.0.0.1:", port,
                  " takes connections, but rank 0 has not answered for [0-9]+ ms\n"
                  "  fix: look at what rank 0 is doing: it must make the group too, and may be stopped; or pass a "
                  "longer timeout")));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 60s);
}

TEST(Rendezvous, ATimeoutNamesTheMissingThePlaceAndTheTime) {
  const ScopedEnv env{{"SERRIED_SHUTDOWN_TIMEOUT", "120"}};
  const uint16_t port = free_port();
  const auto store = rendezvous(tcp_url(port, 0, 3), {.timeout = 60s}).store;
  EXPECT_EQ(error_text<c10::DistBackendError>([&] {
              detail::exchange({store, 0, 3, 50ms}, "new_group", "host", "x");
            }),
            c10::str("[new_group] ranks 1, 2 of 3 did not come to the rendezvous at 127.0.0.1:", port,
                     " within 50 ms\n"
                     "  fix: look at what those ranks are doing; every rank must make the same groups in the same "
                     "order"));
  // Nor does rank 0 wait for the farewells of those who never came.
  const auto begin = std::chrono::steady_clock::now();
  detail::leave_stores();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 60s);
}

TEST(Rendezvous, AStoreThatIsGoneIsSaid) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  auto server = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const uint16_t port = server->getPort();
  const auto store = rendezvous(tcp_url(port, 1, 2), {.timeout = 60s}).store;
  std::thread rank([&] {
    EXPECT_EQ(error_text<c10::DistBackendError>([&] {
                detail::exchange({store, 1, 2, 60s}, "new_group", "host", "x");
              }),
              c10::str("[new_group] the store at 127.0.0.1:", port,
                       " is gone: the process that served it, rank 0's, has ended\n"
                       "  fix: see what rank 0 says; it may have waited for this rank and given up"));
  });
  server->wait({"host/1"}, 10s);
  server.reset();
  rank.join();
}

TEST(Rendezvous, TcpNamesAllThatIsMissing) {
  EXPECT_EQ(refused_url("tcp://host"),
            "[rendezvous] tcp://host: port is missing; rank is missing; world_size is missing\n"
            "  fix: write tcp://host:29500?rank=0&world_size=2");
  EXPECT_EQ(refused_url("tcp://host:99999?rank=x&world_size=2"),
            "[rendezvous] tcp://host:99999?rank=x&world_size=2: port is \"99999\", not 0..65535; "
            "rank is \"x\", not a whole number\n"
            "  fix: write tcp://host:29500?rank=0&world_size=2");
}

TEST(Rendezvous, RanksThatNoIntHoldsAreNotCut) {
  EXPECT_EQ(refused_url("tcp://h:1?rank=4294967296&world_size=4294967298"),
            "[rendezvous] tcp://h:1?rank=4294967296&world_size=4294967298: rank is \"4294967296\", not a number of 32 "
            "bits; world_size is \"4294967298\", not a number of 32 bits\n"
            "  fix: write tcp://host:29500?rank=0&world_size=2");
  ScopedEnv env(with({{"RANK", "4294967296"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "1"}}));
  EXPECT_EQ(refused_url("env://"),
            "[rendezvous] env://: RANK is \"4294967296\", not a number of 32 bits\n"
            "  fix: start the program with serried run, torchrun, mpirun or srun, or set the variables");
}

TEST(Rendezvous, RankAndWorldSizeMustFit) {
  EXPECT_EQ(refused_url("tcp://h:1?rank=2&world_size=2"),
            "[rendezvous] tcp://h:1?rank=2&world_size=2: rank 2 is not in 0..1\n"
            "  fix: pass each rank once, counted from 0");
  EXPECT_EQ(refused_url("file:///tmp/x?rank=0&world_size=0"),
            "[rendezvous] file:///tmp/x?rank=0&world_size=0: world_size is 0\n"
            "  fix: pass the number of ranks, 1 or more");
}

TEST(Rendezvous, UnknownSchemeListsTheKnownOnes) {
  for (const std::string url : {"udp://host:1", "host:1"}) {
    std::string text = refused_url(url);
    const size_t added = text.find("pigeon://, ");  // by another test of this process
    if (added != std::string::npos) text.erase(added, std::strlen("pigeon://, "));
    EXPECT_EQ(text, c10::str("[rendezvous] nobody handles \"", url,
                             "\"; known: env://, file://, tcp://\n"
                             "  fix: use one of the known schemes, or register_rendezvous_handler"));
  }
}

TEST(Rendezvous, HandlersCanBeAddedOnce) {
  static bool added = false;
  const auto handler = [](const std::string&, const RendezvousOptions&) { return Meeting{nullptr, 3, 7}; };
  if (!std::exchange(added, true)) register_rendezvous_handler("pigeon", handler);
  EXPECT_EQ(rendezvous("pigeon://x", {.timeout = 1s}).world_size, 7);
  EXPECT_EQ(error_text<c10::ValueError>([&] { register_rendezvous_handler("tcp", handler); }),
            "[register_rendezvous_handler] the scheme \"tcp\" is taken\n  fix: choose another name");
}

TEST(Rendezvous, FileRanksMeetAndTheLastRemovesTheFile) {
  const std::string path = ::testing::TempDir() + "serried_meet_" + std::to_string(::getpid());
  each_rank(2, [&](int rank) {
    const std::string url = c10::str("file://", path, "?rank=", rank, "&world_size=2");
    const auto store = rendezvous(url, {.timeout = 60s}).store;
    EXPECT_EQ(rendezvous(url, {.timeout = 60s}).store, store);
    const auto all = detail::exchange({store, rank, 2, 60s}, "test", "who", std::to_string(rank));
    EXPECT_EQ(all, (std::vector<std::string>{"0", "1"}));
  });
  EXPECT_TRUE(std::filesystem::exists(path));
  detail::leave_stores();
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(Rendezvous, FileRefusals) {
  EXPECT_EQ(refused_url("file://?rank=0&world_size=1"),
            "[rendezvous] file://?rank=0&world_size=1: path is missing\n"
            "  fix: write file:///path/to/file?rank=0&world_size=2");
  EXPECT_EQ(refused_url("file://folder/x?rank=0&world_size=1"),
            "[rendezvous] file://folder/x?rank=0&world_size=1: \"folder\" stands where a host would; "
            "the path must be absolute\n"
            "  fix: write file:///path/to/file?rank=0&world_size=2");
  EXPECT_EQ(refused_url("file:///no/such/folder/x?rank=0&world_size=1"),
            "[rendezvous] cannot write file:///no/such/folder/x: No such file or directory\n"
            "  fix: pass a path in a folder that exists and that all ranks can write");
}

TEST(Rendezvous, APipeInTheFilesPlaceIsRefused) {
  const std::string path = ::testing::TempDir() + "serried_pipe_" + std::to_string(::getpid());
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_EQ(refused_url(c10::str("file://", path, "?rank=0&world_size=1")),
            c10::str("[rendezvous] file://", path,
                     " is no regular file\n"
                     "  fix: pass a path where there is nothing yet"));
  std::filesystem::remove(path);
}

TEST(Rendezvous, EnvNamesEveryMissingVariableAtOnce) {
  ScopedEnv env(kNoLauncher);
  EXPECT_EQ(refused_url("env://"),
            "[rendezvous] env://: RANK is not set; WORLD_SIZE is not set; MASTER_ADDR is not set; "
            "MASTER_PORT is not set\n"
            "  fix: start the program with serried run, torchrun, mpirun or srun, or set the variables");
}

TEST(Rendezvous, EnvNamesMalformedVariables) {
  ScopedEnv env(with({{"RANK", "one"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "70000"}}));
  EXPECT_EQ(refused_url("env://"),
            "[rendezvous] env://: RANK is \"one\", not a whole number; MASTER_PORT is \"70000\", not 0..65535\n"
            "  fix: start the program with serried run, torchrun, mpirun or srun, or set the variables");
}

TEST(Rendezvous, EnvMeetsByTorchrunsNames) {
  const uint16_t port = free_port();
  ScopedEnv env(with({{"RANK", "0"},
                      {"WORLD_SIZE", "1"},
                      {"MASTER_ADDR", "127.0.0.1"},
                      {"MASTER_PORT", std::to_string(port)},
                      {"OMPI_COMM_WORLD_RANK", "5"}}));
  const Meeting meeting = rendezvous("env://", {.timeout = 60s});
  EXPECT_EQ(meeting.rank, 0);
  EXPECT_EQ(meeting.world_size, 1);
}

TEST(Rendezvous, TheQueryWinsOverTheEnvironment) {
  const uint16_t port = free_port();
  ScopedEnv env(with({{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", std::to_string(port)}}));
  EXPECT_EQ(rendezvous("env://?rank=0&world_size=1", {.timeout = 60s}).world_size, 1);
}

TEST(Rendezvous, AgentStoreMakesRankZeroAClient) {
  const uint16_t port = free_port();
  ScopedEnv env(with({{"RANK", "0"},
                      {"WORLD_SIZE", "1"},
                      {"MASTER_ADDR", "127.0.0.1"},
                      {"MASTER_PORT", std::to_string(port)},
                      {"TORCHELASTIC_USE_AGENT_STORE", "True"}}));
  EXPECT_THROW(rendezvous("env://", {.timeout = 100ms}), c10::DistNetworkError);
  const auto agent = rendezvous(tcp_url(port, 0, 1), {.timeout = 60s}).store;
  agent->set("from", std::string("agent"));
  EXPECT_EQ(rendezvous("env://", {.timeout = 60s}).store->get_to_str("from"), "agent");
}

TEST(Rendezvous, RankZeroTakesOverAListeningSocketOnce) {
  const int fd = detail::listen_at("127.0.0.1", 0).fd;
  const uint16_t port = detail::port_of(fd);
  ScopedEnv env(with({{"RANK", "0"},
                      {"WORLD_SIZE", "1"},
                      {"MASTER_ADDR", "127.0.0.1"},
                      {"MASTER_PORT", std::to_string(port)},
                      {"SERRIED_MASTER_LISTEN_FD", std::to_string(fd)}}));
  const auto store = rendezvous("env://", {.timeout = 60s}).store;
  store->set("a", std::string("b"));
  EXPECT_EQ(store->get_to_str("a"), "b");
  EXPECT_EQ(std::getenv("SERRIED_MASTER_LISTEN_FD"), nullptr);
}

TEST(Rendezvous, AWrongListeningSocketIsRefused) {
  const int fd = ::open("/dev/null", O_RDONLY);
  ScopedEnv env(with({{"RANK", "0"},
                      {"WORLD_SIZE", "1"},
                      {"MASTER_ADDR", "127.0.0.1"},
                      {"MASTER_PORT", "23456"},
                      {"SERRIED_MASTER_LISTEN_FD", std::to_string(fd)}}));
  EXPECT_EQ(refused_url("env://"),
            c10::str("[rendezvous] SERRIED_MASTER_LISTEN_FD is ", fd,
                     ", which does not listen on port 23456\n"
                     "  fix: unset SERRIED_MASTER_LISTEN_FD, or pass a socket that listens on MASTER_PORT"));
  ::close(fd);
}

TEST(LaunchEnvironment, OpenMpiOnOneHostNeedsNoAddress) {
  ScopedEnv env(with({{"OMPI_COMM_WORLD_RANK", "3"},
                      {"OMPI_COMM_WORLD_SIZE", "4"},
                      {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                      {"PMIX_NAMESPACE", "1234@0"}}));
  const auto job = detail::read_launch_environment({});
  EXPECT_EQ(job.rank, 3);
  EXPECT_EQ(job.world_size, 4);
  EXPECT_EQ(job.master_addr, "127.0.0.1");
  EXPECT_GE(job.master_port, 10000);
  EXPECT_EQ(detail::read_launch_environment({}).master_port, job.master_port);
  ScopedEnv other_job{{"PMIX_NAMESPACE", "1235@0"}};
  EXPECT_NE(detail::read_launch_environment({}).master_port, job.master_port);
}

TEST(LaunchEnvironment, OpenMpiOnSeveralHostsNeedsTheAddress) {
  ScopedEnv env(
      with({{"OMPI_COMM_WORLD_RANK", "3"}, {"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}));
  EXPECT_EQ(refused_url("env://"),
            "[rendezvous] env://: MASTER_ADDR is not set\n"
            "  fix: start the program with serried run, torchrun, mpirun or srun, or set the variables");
}

TEST(LaunchEnvironment, MpichIsUnderstood) {
  ScopedEnv env(with({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALNRANKS", "2"}}));
  const auto job = detail::read_launch_environment({});
  EXPECT_EQ(job.rank, 1);
  EXPECT_EQ(job.world_size, 2);
  EXPECT_EQ(job.master_addr, "127.0.0.1");
}

TEST(LaunchEnvironment, SrunGivesTheFirstHost) {
  ScopedEnv env(with({{"SLURM_PROCID", "5"},
                      {"SLURM_NTASKS", "8"},
                      {"SLURM_STEP_NUM_TASKS", ""},
                      {"SLURM_STEP_NODELIST", ""},
                      {"SLURM_JOB_NODELIST", "node[07-09,12],gpu1"},
                      {"SLURM_JOB_ID", "991"}}));
  const auto job = detail::read_launch_environment({});
  EXPECT_EQ(job.rank, 5);
  EXPECT_EQ(job.world_size, 8);
  EXPECT_EQ(job.master_addr, "node07");
  EXPECT_GE(job.master_port, 10000);
}

TEST(LaunchEnvironment, FirstHostOfSlurmLists) {
  EXPECT_EQ(detail::first_host("alone"), "alone");
  EXPECT_EQ(detail::first_host("a1,a2"), "a1");
  EXPECT_EQ(detail::first_host("n[3,5-6]"), "n3");
  EXPECT_EQ(detail::first_host("rack[1-2]-node,x"), "rack1-node");
  EXPECT_EQ(detail::first_host(""), "");
}

TEST(LaunchEnvironment, SetAddressesWinOverDerivedOnes) {
  ScopedEnv env(with({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MASTER_ADDR", "head"}, {"MASTER_PORT", "77"}}));
  const auto job = detail::read_launch_environment({});
  EXPECT_EQ(job.master_addr, "head");
  EXPECT_EQ(job.master_port, 77);
}

TEST(WorldStore, TheServerWaitsUntilTheOthersHaveLeft) {
  const uint16_t port = free_port();
  std::atomic<bool> client_left{false};
  const auto server = rendezvous(tcp_url(port, 0, 2), {.timeout = 60s}).store;
  std::thread client([&] {
    // Not through rendezvous: leave_stores below must not speak for it, as it cannot for another process.
    c10d::TCPStoreOptions options;
    options.port = port;
    options.waitWorkers = false;
    c10d::TCPStore store("127.0.0.1", options);
    store.wait({"go"}, 10s);
    client_left = true;
    store.set("serried/farewell/1", std::vector<uint8_t>{1});
  });
  server->set("go", std::string("now"));
  detail::leave_stores();
  EXPECT_TRUE(client_left);
  client.join();
}

TEST(WorldStore, TheWaitIsBounded) {
  ScopedEnv env{{"SERRIED_SHUTDOWN_TIMEOUT", "1"}};
  const auto server = rendezvous(tcp_url(free_port(), 0, 2), {.timeout = 60s}).store;
  const auto begin = std::chrono::steady_clock::now();
  ::testing::internal::CaptureStderr();
  detail::leave_stores();
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  const auto took = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(took, 900ms);
  EXPECT_LT(took, 60s);
}

TEST(WorldStore, AStrangersFarewellIsNone) {
  const std::string key = "serried/farewell/1";
  for (const bool true_one : {false, true}) {
    const ScopedEnv env{{"SERRIED_SHUTDOWN_TIMEOUT", true_one ? "120" : "1"},
                        {"SERRIED_JOB_SECRET", std::string(32, 's')}};
    const uint16_t port = free_port();
    const auto server = rendezvous(tcp_url(port, 0, 2), {.timeout = 60s}).store;
    const std::vector<uint8_t> word{1};
    detail::innermost_store(server)->set(key, true_one ? detail::job_signer()->seal(key, word) : word);
    const auto begin = std::chrono::steady_clock::now();
    detail::leave_stores();
    const auto took = std::chrono::steady_clock::now() - begin;
    if (true_one) {
      EXPECT_LT(took, 60s);
    } else {
      EXPECT_GE(took, 900ms);
    }
  }
}

TEST(WorldStore, AfterADeathNobodyIsWaitedFor) {
  const ScopedEnv env{{"SERRIED_SHUTDOWN_TIMEOUT", "120"}};
  const auto server = rendezvous(tcp_url(free_port(), 0, 2), {.timeout = 60s}).store;
  detail::abandon(c10::make_intrusive<c10d::PrefixStore>("a", c10::make_intrusive<c10d::PrefixStore>("b", server)));
  const auto begin = std::chrono::steady_clock::now();
  detail::leave_stores();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 60s);
}

TEST(WorldStore, LeavingAfterTheServerIsGoneIsQuiet) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  auto server = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  rendezvous(tcp_url(server->getPort(), 1, 2), {.timeout = 60s});
  server.reset();
  ::testing::internal::CaptureStderr();
  detail::leave_stores();
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST(Exchange, NamesTheRanksThatDoNotCome) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  store->set("host/2", std::vector<uint8_t>{1});
  EXPECT_EQ(error_text<c10::DistBackendError>([&] {
              detail::exchange({store, 0, 4, 50ms}, "new_group", "host", "x");
            }),
            "[new_group] ranks 1, 3 of 4 did not come within 50 ms\n"
            "  fix: look at what those ranks are doing; every rank must make the same groups in the same order");
}

TEST(Host, IdentityIsStable) {
  EXPECT_EQ(detail::host_identity(), detail::host_identity());
  EXPECT_NE(detail::host_identity().find("pid:["), std::string::npos);
}

}  // namespace
}  // namespace serried
