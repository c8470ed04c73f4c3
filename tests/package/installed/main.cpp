// A program of somebody else: under the launcher it meets the other processes, alone it makes two ranks of its own.
#include <serried/serried.h>

#include <cstdlib>
#include <iostream>

void check(const serried::Group& group) {
  at::Tensor x = torch::ones({3});
  serried::all_reduce_(x, group);
  if (x.sum().item<double>() != 3.0 * group->getSize()) std::exit(1);
  if (group->getRank() == 0) std::cout << "consumer: " << group->getSize() << " ranks, " << x[0].item<double>() << "\n";
}

int main() {
  if (std::getenv("RANK")) {
    check(serried::new_group());
    return 0;
  }
  serried::run_ranks(2, check);
}
