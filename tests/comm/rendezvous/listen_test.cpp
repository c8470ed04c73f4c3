// A store listens at the address it was given and at no other.
#include "serried/base/listen.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>

#include <c10/util/StringUtil.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "serried/comm/rendezvous/rendezvous.h"
#include "tests/support/each_rank.h"
#include "tests/support/environment.h"
#include "tests/support/errors.h"
#include "tests/support/listening.h"

namespace serried {
namespace {

using namespace std::chrono_literals;
using testing::each_rank;
using testing::error_text;
using testing::listening_sockets;
using testing::ScopedEnv;

std::string address_of(int fd) {
  EXPECT_GE(fd, 0);
  return listening_sockets()[detail::port_of(fd)];
}

int unused_port() {
  const int fd = detail::listen_at("127.0.0.1", 0).fd;
  const int port = detail::port_of(fd);
  ::close(fd);
  return port;
}

std::string listens_at(const std::string& host, const detail::ListenOptions& options = {}) {
  const detail::Listening made = detail::listen_at(host, 0, options);
  const std::string address = made.fd < 0 ? made.why : address_of(made.fd);
  if (made.fd >= 0) ::close(made.fd);
  return address;
}

TEST(Listen, WhatIsAskedForIsBound) {
  EXPECT_EQ(listens_at("127.0.0.1"), "127.0.0.1");
  EXPECT_EQ(listens_at("127.0.0.2"), "127.0.0.2");
  EXPECT_EQ(listens_at("localhost"), "127.0.0.1");
  EXPECT_EQ(listens_at("0.0.0.0"), "0.0.0.0");
  EXPECT_THAT(listens_at(""), ::testing::AnyOf("::", "0.0.0.0"));
}

TEST(Listen, OtherHostsDoNotChangeWhatLoopbackMeans) {
  EXPECT_EQ(listens_at("127.0.0.1", {.several_hosts = true}), "127.0.0.1");
  EXPECT_EQ(listens_at("localhost", {.several_hosts = true}), "127.0.0.1");
}

TEST(Listen, AnAddressOfAnotherMachineIsRefused) {
  const detail::Listening made = detail::listen_at("192.0.2.1", 0);
  EXPECT_EQ(made.fd, -1);
  EXPECT_EQ(made.error, EADDRNOTAVAIL);
  EXPECT_EQ(made.why, "192.0.2.1 is no address of this machine");
}

TEST(Listen, APortInUseIsSaid) {
  const detail::Listening first = detail::listen_at("127.0.0.1", 0);
  EXPECT_EQ(detail::listen_at("127.0.0.1", detail::port_of(first.fd)).error, EADDRINUSE);
  EXPECT_EQ(detail::listen_at("0.0.0.0", detail::port_of(first.fd)).error, EADDRINUSE);
  ::close(first.fd);
}

TEST(Listen, TheLocalAddressReachesIt) {
  for (const char* host : {"127.0.0.1", "127.0.0.3", "0.0.0.0", ""}) {
    const int fd = detail::listen_at(host, 0).fd;
    const std::string address = detail::local_address_of(fd);
    EXPECT_EQ(address, std::string(host) == "127.0.0.3" ? "127.0.0.3" : "127.0.0.1") << host;
    ::close(fd);
  }
}

TEST(RendezvousListens, OnLoopbackForLoopbackUrls) {
  for (const char* host : {"127.0.0.1", "localhost"}) {
    for (const char* use_libuv : {"0", "1"}) {
      const int port = unused_port();
      const std::string url = c10::str("tcp://", host, ":", port, "?rank=0&world_size=1&use_libuv=", use_libuv);
      const auto store = rendezvous(url, {.timeout = 5s}).store;
      EXPECT_EQ(listening_sockets()[port], "127.0.0.1") << url;
      store->set("key", std::string("value"));
      EXPECT_EQ(store->get_to_str("key"), "value");
    }
  }
}

TEST(RendezvousListens, OnIPv6LoopbackWhereThatIsAskedFor) {
  const detail::Listening probe = detail::listen_at("::1", 0);
  const int port = unused_port();
  const std::string url = c10::str("tcp://[::1]:", port, "?rank=0&world_size=1");
  if (probe.fd < 0) {  // a machine without IPv6 says so
    EXPECT_THAT(error_text<c10::DistNetworkError>([&] { rendezvous(url, {.timeout = 5s}); }),
                ::testing::HasSubstr("rank 0 cannot listen at ::1:"));
    return;
  }
  ::close(probe.fd);
  rendezvous(url, {.timeout = 5s}).store->set("key", std::string("value"));
  EXPECT_EQ(listening_sockets()[port], "::1");
}

TEST(RendezvousListens, OnLoopbackForMasterAddr) {
  const int port = unused_port();
  const ScopedEnv env{{"RANK", "0"},
                      {"WORLD_SIZE", "1"},
                      {"MASTER_ADDR", "127.0.0.1"},
                      {"MASTER_PORT", std::to_string(port)},
                      {"SERRIED_MASTER_LISTEN_FD", ""}};
  rendezvous("env://", {.timeout = 5s});
  EXPECT_EQ(listening_sockets()[port], "127.0.0.1");
}

TEST(RendezvousListens, OnAllAddressesWhereThatIsAskedFor) {
  const int port = unused_port();
  each_rank(2, [&](int rank) {
    const std::string url =
        c10::str("tcp://", rank == 0 ? "0.0.0.0" : "127.0.0.1", ":", port, "?world_size=2&rank=", rank);
    const auto store = rendezvous(url, {.timeout = 10s}).store;
    if (rank == 0) store->set("key", std::string("value"));
    EXPECT_EQ(store->get_to_str("key"), "value");
  });
  EXPECT_EQ(listening_sockets()[port], "0.0.0.0");
}

TEST(RendezvousListens, NowhereElseThanAsked) {
  EXPECT_EQ(error_text<c10::DistNetworkError>(
                [] { rendezvous("tcp://192.0.2.1:29555?rank=0&world_size=2", {.timeout = 1s}); }),
            "[rendezvous] rank 0 cannot listen at 192.0.2.1:29555: 192.0.2.1 is no address of this machine\n"
            "  fix: start rank 0 on the machine that the address names; behind NAT or in a container let rank 0 listen "
            "on all addresses (MASTER_ADDR=0.0.0.0 for rank 0 only)");
}

TEST(GlooListens, OnLoopbackOnOneHost) {
  const auto before = listening_sockets();
  run_ranks(2,
            [&](const Group& group) {
              barrier(group);
              int found = 0;
              for (const auto& [port, address] : listening_sockets()) {
                if (before.contains(port)) continue;
                EXPECT_EQ(address, "127.0.0.1") << port;
                ++found;
              }
              EXPECT_GE(found, 1);
              barrier(group);
            },
            {.backend = "gloo"});
}

}  // namespace
}  // namespace serried
