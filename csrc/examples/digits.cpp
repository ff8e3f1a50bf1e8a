// Trains a small convolutional net on handwritten digits with several processes, and no Python in any of them.
//
//   python csrc/examples/export_digits.py digits.bin
//   torchrun --standalone --nproc-per-node 2 --no-python ./build/release/examples/digits --data digits.bin
//
// One process needs no launcher. Progress goes to stderr; the last line of rank 0's stdout is one JSON object, the
// report, with the fields of `python -m lockstep.examples.digits`: `accuracy` on images not trained on,
// `rank_difference` the largest difference of a parameter between two ranks, 0 when data parallelism works.
#include <torch/torch.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iostream>

#include "examples/arguments.h"
#include "lockstep/lockstep.h"

namespace {

using lockstep::ProcessGroup;
using lockstep::examples::UsageError;
namespace fs = std::filesystem;

/// Images (n, 1, 8, 8) between 0 and 1, and labels (n).
struct Images {
  torch::Tensor images;
  torch::Tensor labels;
};
struct Digits {
  Images train;
  Images test;
};

/// Two convolutions and one linear layer: 9,930 parameters. That of the Python example.
struct DigitNetImpl : torch::nn::Module {
  DigitNetImpl()
      : conv1(register_module("conv1", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 16, 3).padding(1)))),
        conv2(register_module("conv2", torch::nn::Conv2d(torch::nn::Conv2dOptions(16, 32, 3).padding(1).stride(2)))),
        head(register_module("head", torch::nn::Linear(32 * 4 * 4, 10))) {}

  /// Returns logits (n, 10).
  torch::Tensor forward(const torch::Tensor& images) {
    return head(torch::gelu(conv2(torch::gelu(conv1(images)))).flatten(1));
  }

  torch::nn::Conv2d conv1, conv2;
  torch::nn::Linear head;
};
TORCH_MODULE(DigitNet);

struct Settings {
  fs::path data, checkpoint;
  int64_t epochs, batch_size, accumulate, seed;
  double lr;
  std::string hook;
  bool views, resume;

  /// What a checkpoint must have been written with.
  [[nodiscard]] std::string identity(int world_size) const {
    return fmt::format(R"("world_size": {}, "seed": {}, "batch_size": {}, "accumulate": {}, "lr": {}, "hook": "{}")",
                       world_size, seed, batch_size, accumulate, lr, hook);
  }
};

Settings read_settings(int count, char** values) {
  lockstep::examples::Arguments arguments(count, values);
  Settings settings{
      .data = arguments.text("data", "digits.bin"),
      .checkpoint = arguments.text("checkpoint", ""),
      .epochs = arguments.whole("epochs", 20, 0),
      .batch_size = arguments.whole("batch-size", 32, 1),
      .accumulate = arguments.whole("accumulate", 1, 1),
      .seed = arguments.whole("seed", 0, 0),
      .lr = arguments.positive("lr", 0.05),
      .hook = arguments.text("hook", "allreduce"),
      .views = arguments.flag("views"),
      .resume = arguments.flag("resume"),
  };
  arguments.finish();
  if (settings.resume && settings.checkpoint.empty()) throw UsageError("--resume needs --checkpoint FILE");
  return settings;
}

Images read_part(std::ifstream& file, int64_t count) {
  std::vector<char> pixels(static_cast<size_t>(count) * 64), labels(static_cast<size_t>(count));
  file.read(pixels.data(), static_cast<std::streamsize>(pixels.size()));
  file.read(labels.data(), static_cast<std::streamsize>(labels.size()));
  return {torch::from_blob(pixels.data(), {count, 1, 8, 8}, torch::kUInt8).to(torch::kFloat) / 16,
          torch::from_blob(labels.data(), {count}, torch::kUInt8).to(torch::kLong)};
}

Digits read_digits(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::array<char, 8> magic{};
  std::array<int32_t, 2> counts{};
  file.read(magic.data(), magic.size());
  file.read(reinterpret_cast<char*>(counts.data()), sizeof(counts));
  if (!file || std::string_view(magic.data(), magic.size()) != "LSDIGITS") {
    throw UsageError(fmt::format("{} is no file of digits: write it with export_digits.py", path.string()));
  }
  Digits digits{read_part(file, counts[0]), read_part(file, counts[1])};
  if (!file) throw UsageError(fmt::format("{} ends early: write it again", path.string()));
  return digits;
}

torch::Tensor summed_loss(const torch::Tensor& logits, const torch::Tensor& labels) {
  return torch::nn::functional::cross_entropy(
      logits, labels, torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum).label_smoothing(0.1));
}

/// The state after some epochs, of model and optimizer: the same on every rank, so rank 0 writes and all read.
class Checkpoint {
 public:
  Checkpoint(const Settings& settings, const ProcessGroup& group)
      : path_(settings.checkpoint), identity_(settings.identity(group.size())) {}

  template <typename Model>
  void save(const Model& model, const torch::optim::SGD& optimizer, int64_t epoch) const {
    if (path_.empty()) return;
    torch::serialize::OutputArchive archive, of_model, of_optimizer;
    of_model << model;
    optimizer.save(of_optimizer);
    archive.write("model", of_model);
    archive.write("optimizer", of_optimizer);
    archive.write("epoch", torch::tensor(epoch));
    archive.write("settings", c10::IValue(identity_));
    // A crash leaves the old file or the new one, never half of one.
    const fs::path temporary = path_.string() + ".tmp";
    archive.save_to(temporary.string());
    fs::rename(temporary, path_);
  }

  /// Returns the number of finished epochs.
  int64_t load(DigitNet& net, torch::optim::SGD& optimizer) const {
    if (!fs::exists(path_)) throw UsageError(fmt::format("--resume: there is no {}", path_.string()));
    torch::serialize::InputArchive archive, of_model, of_optimizer;
    archive.load_from(path_.string());
    c10::IValue settings;
    archive.read("settings", settings);
    if (settings.toStringRef() != identity_) {
      throw UsageError(fmt::format("--resume: {} was written with {}, not with {}", path_.string(),
                                   settings.toStringRef(), identity_));
    }
    archive.read("model", of_model);
    archive.read("optimizer", of_optimizer);
    net->load(of_model);
    optimizer.load(of_optimizer);
    torch::Tensor epoch;
    archive.read("epoch", epoch);
    return epoch.item<int64_t>();
  }

 private:
  fs::path path_;
  std::string identity_;
};

/// Returns mean loss and accuracy; the ranks share the images out, and each counts once.
std::pair<double, double> evaluate(DigitNet& net, const Images& test, const ProcessGroup& group) {
  const torch::NoGradGuard no_grad;
  const auto mine = torch::indexing::Slice(group.rank(), torch::indexing::None, group.size());
  const torch::Tensor labels = test.labels.index({mine}).to(group.device());
  const torch::Tensor logits = net(test.images.index({mine}).to(group.device()));
  const auto samples = static_cast<double>(labels.size(0));
  const double correct = (logits.argmax(1) == labels).to(torch::kDouble).sum().item<double>();
  return {lockstep::mean(group, summed_loss(logits, labels).item<double>() / samples, samples),
          lockstep::mean(group, correct / samples, samples)};
}

double rank_difference(const std::vector<torch::Tensor>& parameters, const ProcessGroup& group) {
  std::vector<torch::Tensor> flat;
  for (const torch::Tensor& parameter : parameters) flat.push_back(parameter.detach().flatten());
  torch::Tensor all = torch::cat(flat);
  // What the ranks have in common is their largest value and their smallest.
  torch::Tensor both = torch::cat({all, -all});
  std::vector<torch::Tensor> tensors{both};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  group.c10d()->allreduce(tensors, options)->wait();
  return (both.narrow(0, 0, all.numel()) + both.narrow(0, all.numel(), all.numel())).max().item<double>();
}

struct Outcome {
  double loss = 0, test_loss = 0, accuracy = 0, seconds = 0;
  int64_t samples = 0;
};

template <typename Model>
Outcome train(Model& model, torch::optim::SGD& optimizer, const Digits& digits, int64_t first_epoch,
              const Settings& settings) {
  const ProcessGroup& group = model.group();
  const auto length = static_cast<size_t>(digits.train.labels.size(0));
  const auto batch_size = static_cast<size_t>(settings.batch_size);
  const size_t of_all = batch_size * static_cast<size_t>(group.size());
  const size_t steps = (length + of_all - 1) / of_all;
  lockstep::OrderPreservingSampler sampler(length, group, {.seed = static_cast<uint64_t>(settings.seed)});
  auto loader =
      torch::data::make_data_loader(torch::data::datasets::TensorDataset(torch::arange(static_cast<int64_t>(length))),
                                    sampler, torch::data::DataLoaderOptions(batch_size));
  Outcome outcome;
  std::tie(outcome.test_loss, outcome.accuracy) = evaluate(model.module(), digits.test, group);
  const auto start = std::chrono::steady_clock::now();
  for (int64_t epoch = first_epoch; epoch < settings.epochs; ++epoch) {
    sampler.set_epoch(epoch);
    lockstep::WeightedMean loss_of_epoch;
    size_t step = 0;
    int64_t samples_of_group = 0;
    for (const auto& batch : *loader) {
      std::vector<torch::Tensor> parts;
      for (const auto& example : batch) parts.push_back(example.data);
      const torch::Tensor chosen = torch::stack(parts);
      if (step % static_cast<size_t>(settings.accumulate) == 0) {
        optimizer.zero_grad();
        const size_t first = step * of_all;
        samples_of_group =
            static_cast<int64_t>(std::min(first + of_all * static_cast<size_t>(settings.accumulate), length) - first);
      }
      const bool last = ++step % static_cast<size_t>(settings.accumulate) == 0 || step == steps;
      const auto backward = [&] {
        const torch::Tensor labels = digits.train.labels.index_select(0, chosen).to(group.device());
        const torch::Tensor loss =
            summed_loss(model(digits.train.images.index_select(0, chosen).to(group.device())), labels);
        // Gradients are means over ranks: this makes them those of one large batch, also where it cannot be divided.
        (loss * (static_cast<double>(group.size()) / static_cast<double>(samples_of_group))).backward();
        loss_of_epoch.add(loss.template item<double>() / static_cast<double>(labels.size(0)),
                          static_cast<double>(labels.size(0)));
      };
      if (last) {
        backward();
        optimizer.step();
      } else {
        const auto local = model.no_sync();
        backward();
      }
    }
    outcome.samples += static_cast<int64_t>(length);
    outcome.loss = loss_of_epoch.reduce(group);
    std::tie(outcome.test_loss, outcome.accuracy) = evaluate(model.module(), digits.test, group);
    if (!std::isfinite(outcome.test_loss)) throw UsageError("the test loss is no number: try a smaller --lr");
    lockstep::log0(group, "epoch {}: loss {:.4f}, test accuracy {:.4f}", epoch + 1, outcome.loss, outcome.accuracy);
    if (group.rank() == 0) Checkpoint(settings, group).save(model, optimizer, epoch + 1);
  }
  outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return outcome;
}

void run(const Settings& settings) {
  const Digits digits = read_digits(settings.data);
  const ProcessGroup group = lockstep::init_process_group_from_env(
      lockstep::GroupOptions{}.timeout(std::chrono::minutes(2)).allow_single(true));
  // A net this small gains nothing from more threads, and waits for them on a busy machine.
  if (group.device().is_cpu()) torch::set_num_threads(1);

  torch::manual_seed(settings.seed);
  DigitNet net;
  net->to(group.device());
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(settings.lr).momentum(0.9));
  const int64_t first_epoch = settings.resume ? Checkpoint(settings, group).load(net, optimizer) : 0;
  lockstep::DistributedDataParallel model(net, group, lockstep::Options{}.gradient_as_bucket_view(settings.views));
  model.register_comm_hook(settings.hook);

  const Outcome outcome = train(model, optimizer, digits, first_epoch, settings);
  const double difference = rank_difference(model.parameters(), group);
  lockstep::print0(group,
                   R"({{"engine": "lockstep", {}, "epochs": {}, "first_epoch": {}, "views": {}, "device": "{}", )"
                   R"("backend": "{}", "torch": "{}", "accuracy": {}, "loss": {}, "test_loss": {}, )"
                   R"("rank_difference": {}, "seconds": {:.3f}, "samples_per_second": {:.1f}}})",
                   settings.identity(group.size()), settings.epochs, first_epoch, settings.views,
                   c10::DeviceTypeName(group.device().type(), true), group.backend(), TORCH_VERSION, outcome.accuracy,
                   outcome.loss, outcome.test_loss, difference, outcome.seconds,
                   static_cast<double>(outcome.samples) / outcome.seconds);
}

}  // namespace

int main(int count, char** values) {
  try {
    run(read_settings(count, values));
  } catch (const UsageError& error) {
    std::cerr << "digits: " << error.what() << '\n';
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "digits: " << error.what() << '\n';
    return 1;
  }
}
