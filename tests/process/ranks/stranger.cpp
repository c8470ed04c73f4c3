// A program that is no rank of the job and writes to its store: `stranger <port> <deed>`.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "serried/comm/agree/shared_memory.h"
#include "serried/comm/rendezvous/signed_store.h"

namespace {

using serried::detail::Bytes;

Bytes bytes(const std::string& text) {
  return {text.begin(), text.end()};
}

// Keys come with the mark that c10d's client puts before each.
std::string plain(const std::string& key) {
  return key.starts_with("/") ? key.substr(1) : key;
}

void meddle(c10d::TCPStore& store, const std::string& deed, const std::string& key) {
  // The secret of this program's own launcher: a signature, but not the job's.
  const serried::detail::Signer own(std::string(32, 'x'), "job/0");
  if (deed == "overwrite") store.set(key, bytes("1"));
  if (deed == "sign") store.set(key, own.seal(key, bytes("1")));
  if (deed == "delete") store.deleteKey(key);
  if (deed == "replay") store.set(key, store.get("serried/0/3/id"));
}

// Groups to come find this process's memory where rank 0's should be.
void offer_memory(c10d::TCPStore& store) {
  // Kept until this program ends.
  static const auto memory = serried::detail::SharedMemory::make("stranger", 1 << 20);
  for (int group = 1; group < 9; ++group) {
    const std::string prefix = "serried/0/3/" + std::to_string(group);
    store.set(prefix + "/shm/greeting/0", bytes(memory.place().text() + " 0 65536 here"));
    store.set(prefix + "/watch/page/0", bytes("/etc/hostname"));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  c10d::TCPStoreOptions options;
  options.port = uint16_t(std::stoi(argv[1]));
  options.waitWorkers = false;
  c10d::TCPStore store("127.0.0.1", options);
  const std::string deed = argv[2];
  int count = 0;
  for (const std::string& key : store.listKeys()) {
    if (plain(key) == "serried/0/3/id" && deed == "replay") continue;
    meddle(store, deed, plain(key));
    ++count;
  }
  if (deed == "offer") offer_memory(store);
  std::printf("meddled with %d keys\n", count);
  return 0;
}
