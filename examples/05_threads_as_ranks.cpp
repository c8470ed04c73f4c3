// Four ranks as threads of one process: no launcher, one debugger. Start it with: build/bin/05_threads_as_ranks
#include <serried/serried.h>

#include <cstdlib>
#include <iostream>

int main() {
  // The same code that runs in four processes runs here; the group is also the thread's current one.
  serried::run_ranks(4, [](const serried::Group& world) {
    at::Tensor mine = torch::arange(4) + 10 * world->getRank();
    at::Tensor column = serried::all_to_all(mine, world);  // piece p goes to rank p
    if (world->getRank() == 2)
      std::cout << "rank 2 holds " << column[0].item<int64_t>() << " " << column[3].item<int64_t>() << "\n";
    TORCH_CHECK(column.equal(torch::arange(0, 40, 10) + world->getRank()), "all_to_all gave the wrong column");
  });

  // A rank that fails ends the others at once, and its error comes back with its rank.
  try {
    serried::run_ranks(4, [](const serried::Group& world) {
      if (world->getRank() == 2) TORCH_CHECK_VALUE(false, "no data for me");
      serried::barrier(world);
    });
  } catch (const c10::ValueError& error) {
    std::cout << error.what_without_backtrace() << "\n";
    return EXIT_SUCCESS;
  }
  return EXIT_FAILURE;
}
