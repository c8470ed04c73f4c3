// The public face of Elastic.
#include "serried/elastic/elastic.h"

#include "serried/elastic/elastic_run.h"

namespace serried {

Elastic::Elastic(ElasticOptions options) : run_(std::make_unique<detail::ElasticRun>(std::move(options))) {}

Elastic::~Elastic() = default;

const Group& Elastic::world() const {
  return run_->world();
}

int64_t Elastic::step() const {
  return run_->step();
}

void Elastic::set_step(int64_t step) {
  run_->set_step(step);
}

void Elastic::keep(std::string name, torch::optim::Optimizer& optimizer) {
  run_->keep(std::move(name), optimizer);
}

void Elastic::keep(std::string name, checkpoint::Value value) {
  run_->keep({std::move(name), std::move(value)});
}

void Elastic::rebuild(std::function<checkpoint::Contents(const Group& world)> build) {
  run_->rebuild(std::move(build));
}

void Elastic::on_change(std::function<void(const Group& world)> callback) {
  run_->on_change(std::move(callback));
}

void Elastic::run(const std::function<void()>& fn) {
  run_->run(fn);
}

bool Elastic::commit(bool fine) {
  return run_->commit(fine);
}

}  // namespace serried
