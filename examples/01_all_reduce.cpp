// Four processes add up their ranks. Start it with: serried run -n 4 build/bin/01_all_reduce
#include <serried/serried.h>

#include <cstdlib>
#include <iostream>

int main() {
  // Every process calls this; the launcher has told each of them its rank and where to meet.
  serried::Group world = serried::new_group();

  // In place: each rank brings its own number, all leave with the sum.
  at::Tensor x = torch::full({3}, world->getRank());
  serried::all_reduce_(x, world);
  std::cout << "sum of all ranks: " << x[0].item<int64_t>() << std::endl;

  // As a function, with a gradient: x itself is left alone, and backward communicates too.
  at::Tensor weight = torch::full({2}, world->getRank() + 1.0, torch::requires_grad());
  at::Tensor mean = serried::all_reduce(weight, world, c10d::ReduceOp::AVG);
  mean.sum().backward();
  std::cout << "mean " << mean[0].item<double>() << ", gradient " << weight.grad()[0].item<double>() << std::endl;

  const int64_t size = world->getSize();
  const bool right = x[0].item<int64_t>() == size * (size - 1) / 2 && weight.grad()[0].item<double>() == 1.0;
  return right ? EXIT_SUCCESS : EXIT_FAILURE;
}
