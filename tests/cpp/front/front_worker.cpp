// One rank of the tests with real processes (tests/python/test_cpp_front.py), which start it by hand and by torchrun.
//
//   front_worker gradients FILE   steps in several modes; rank r writes all gradients to FILE.r, as raw bytes
//   front_worker train STEPS [RANK STEP]   trains in two worlds after each other; RANK kills itself before STEP
//   front_worker weights FILE   five steps of a net of the size of MNIST; rank r writes its weights to FILE.r, as raw
//   bytes front_worker fork   trains, forks children that compute and that let go of the group, and trains on
//   front_worker join MILLISECONDS   only joins, and gives the others so long to come
#include <signal.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <fstream>
#include <iostream>

#include "lockstep/lockstep.h"

namespace {

using torch::Tensor;

/// That of tests/python/test_cpp_front.py: two convolutions, a normalisation with buffers, and a linear layer.
torch::nn::Sequential make_net() {
  torch::nn::Sequential net(torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3).padding(1)), torch::nn::BatchNorm2d(4),
                            torch::nn::Tanh(), torch::nn::Flatten(), torch::nn::Linear(4 * 6 * 6, 5));
  const torch::NoGradGuard no_grad;
  int64_t salt = 0;
  for (Tensor& parameter : net->parameters()) {
    // Exact in float32, so that both languages start from the same bits.
    parameter.copy_(
        ((torch::arange(parameter.numel()) * 7 + 3 * salt++) % 17 - 8).to(torch::kFloat).view(parameter.sizes()) / 64);
  }
  return net;
}

Tensor make_batch(int rank, int step) {
  return ((torch::arange(3 * 36) * 5 + 11 * rank + 3 * step) % 13 - 6).to(torch::kFloat).view({3, 1, 6, 6}) / 8;
}

struct Mode {
  lockstep::Options options;
  std::string hook = "allreduce";
  lockstep::HookArgs arguments{};
  bool accumulate = false;
};

std::vector<Mode> all_modes() {
  using lockstep::Options;
  return {
      {Options{}},
      {Options{}.gradient_as_bucket_view(true).bucket_cap_mb(0.0002), "allreduce", {}, true},
      {Options{}.find_unused_parameters(true), "fp16"},
      {Options{}.static_graph(true), "power_sgd", {{"rank", int64_t{2}}, {"start_iteration", int64_t{1}}}},
  };
}

void write(std::ofstream& file, const Tensor& tensor) {
  const Tensor plain = tensor.contiguous();
  file.write(static_cast<const char*>(plain.const_data_ptr()), static_cast<std::streamsize>(plain.nbytes()));
}

void write_gradients(const lockstep::ProcessGroup& group, const std::string& path) {
  std::ofstream file(path + "." + std::to_string(group.rank()), std::ios::binary);
  for (const Mode& mode : all_modes()) {
    lockstep::DistributedDataParallel model(make_net(), group, mode.options);
    model.register_comm_hook(mode.hook, mode.arguments);
    torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1));
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      if (mode.accumulate) {
        const auto local = model.no_sync();
        model(make_batch(group.rank(), step + 50)).square().mean().backward();
      }
      model(make_batch(group.rank(), step)).square().mean().backward();
      for (const Tensor& parameter : model.parameters()) write(file, parameter.grad());
      optimizer.step();
    }
  }
}

void train(const lockstep::ProcessGroup& group, int steps, int doomed, int last_step) {
  lockstep::DistributedDataParallel model(make_net(), group);
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.01));
  for (int step = 0; step < steps; ++step) {
    if (group.rank() == doomed && step == last_step) raise(SIGKILL);
    optimizer.zero_grad();
    model(make_batch(group.rank(), step)).square().mean().backward();
    optimizer.step();
  }
  model.eval();  // this forward takes the buffers of rank 0 and changes none
  (void)model(make_batch(group.rank(), steps));
  model.assert_in_sync();
  lockstep::print0(group, "trained {} steps on {} ranks", steps, group.size());
}

void write_weights(const lockstep::ProcessGroup& group, const std::string& path) {
  torch::manual_seed(7);
  torch::nn::Sequential net;  // one after the other: arguments of a call would be drawn in any order
  net->push_back(torch::nn::Linear(784, 128));
  net->push_back(torch::nn::ReLU());
  net->push_back(torch::nn::Linear(128, 10));
  lockstep::DistributedDataParallel model(net, group);
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 5; ++step) {
    const Tensor images =
        ((torch::arange(8 * 784) * 5 + 11 * group.rank() + 3 * step) % 13 - 6).to(torch::kFloat).view({8, 784}) / 8;
    const Tensor labels = (torch::arange(8) + group.rank() + step) % 10;
    optimizer.zero_grad();
    torch::nn::functional::cross_entropy(model(images), labels).backward();
    optimizer.step();
  }
  std::ofstream file(path + "." + std::to_string(group.rank()), std::ios::binary);
  for (const Tensor& parameter : model.parameters()) write(file, parameter.detach());
}

/// Runs `body` in a forked child. Throws unless it ends by itself within 20 s.
template <typename Body>
void in_a_child(const Body& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    body();
    _exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  if (status != 0) throw std::runtime_error("the forked child ended with status " + std::to_string(status));
}

/// @param group  the last handle.
void train_with_children(lockstep::ProcessGroup group) {
  {
    lockstep::DistributedDataParallel model(make_net(), group);
    model(make_batch(group.rank(), 0)).square().mean().backward();
    in_a_child([&] {
      const torch::NoGradGuard no_grad;
      model.eval();
      (void)model(make_batch(group.rank(), 1));
    });
    model(make_batch(group.rank(), 1)).square().mean().backward();
    const Tensor& gradient = model.parameters().front().grad();
    if (!at::equal(lockstep::mean(group, gradient), gradient.to(torch::kDouble))) {
      throw std::runtime_error("gradients differ between ranks after a fork");
    }
  }
  in_a_child([&] { group = {}; });
  train(group, 3, -1, 0);
}

}  // namespace

int main(int count, char** values) {
  const std::vector<std::string> words(values + 1, values + count);
  try {
    torch::set_num_threads(1);
    const char* given = std::getenv("FRONT_WORKER_PATIENCE");  // in seconds
    const std::chrono::seconds patience(given == nullptr ? 20 : std::stoi(given));
    const auto options = lockstep::GroupOptions{}.timeout(patience).start_timeout(patience);
    if (words.at(0) == "gradients") {
      write_gradients(lockstep::init_process_group_from_env(options), words.at(1));
    } else if (words.at(0) == "train") {
      const bool dies = words.size() == 4;
      // Twice, because a process may join again after it has left.
      for (int world = 0; world < 2; ++world) {
        train(lockstep::init_process_group_from_env(options), std::stoi(words.at(1)), dies ? std::stoi(words[2]) : -1,
              dies ? std::stoi(words[3]) : 0);
      }
    } else if (words.at(0) == "weights") {
      write_weights(lockstep::init_process_group_from_env(options), words.at(1));
    } else if (words.at(0) == "fork") {
      train_with_children(lockstep::init_process_group_from_env(options));
    } else if (words.at(0) == "join") {
      (void)lockstep::init_process_group_from_env(
          lockstep::GroupOptions(options).start_timeout(std::chrono::milliseconds(std::stoi(words.at(1)))));
    }
    return 0;
  } catch (const lockstep::Error& error) {
    std::cerr << "lockstep::Error: " << error.what() << '\n';
    return 3;
  } catch (const std::exception& error) {
    std::cerr << "another exception: " << error.what() << '\n';
    return 4;
  }
}
