// Trains a small byte-level GPT on a text file with several processes; in bf16 where there are GPUs.
//
//   torchrun --standalone --nproc-per-node 2 --no-python ./build/release/examples/gpt --text book.txt
//
// One process needs no launcher. Progress goes to stderr: the mean loss over all ranks in nats a byte, and tokens
// (bytes) per second of all ranks together. The last line of rank 0's stdout is one JSON object.
#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <fstream>
#include <iostream>
#include <iterator>

#include "examples/arguments.h"
#include "lockstep/lockstep.h"

namespace {

using lockstep::ProcessGroup;
using lockstep::examples::UsageError;
using torch::Tensor;

constexpr int64_t kBytes = 256;

struct Settings {
  std::string text;
  int64_t layers, width, heads, context, batch_size, steps, seed, log_every;
  double lr, clip;
};

Settings read_settings(int count, char** values) {
  lockstep::examples::Arguments arguments(count, values);
  Settings settings{
      .text = arguments.text("text", ""),
      .layers = arguments.whole("layers", 4, 1),
      .width = arguments.whole("width", 128, 1),
      .heads = arguments.whole("heads", 4, 1),
      .context = arguments.whole("context", 128, 1),
      .batch_size = arguments.whole("batch-size", 8, 1),
      .steps = arguments.whole("steps", 200, 1),
      .seed = arguments.whole("seed", 0, 0),
      .log_every = arguments.whole("log-every", 20, 1),
      .lr = arguments.positive("lr", 1e-3),
      .clip = arguments.positive("clip", 1.0),
  };
  arguments.finish();
  if (settings.text.empty()) throw UsageError("say which text to train on: --text FILE");
  if (settings.width % settings.heads != 0) throw UsageError("--width must be divisible by --heads");
  return settings;
}

struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t width, int64_t heads)
      : heads_(heads),
        norm1(register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        norm2(register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        qkv(register_module("qkv", torch::nn::Linear(width, 3 * width))),
        out(register_module("out", torch::nn::Linear(width, width))),
        up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))) {}

  /// x: (batch, context, width), and so is the result.
  Tensor forward(const Tensor& x) {
    const int64_t batch = x.size(0), context = x.size(1), width = x.size(2);
    const auto heads =
        qkv(norm1(x)).view({batch, context, 3, heads_, width / heads_}).permute({2, 0, 3, 1, 4}).unbind(0);
    const Tensor mixed = at::scaled_dot_product_attention(heads[0], heads[1], heads[2], /*attn_mask=*/{},
                                                          /*dropout_p=*/0.0, /*is_causal=*/true);
    const Tensor attended = x + out(mixed.transpose(1, 2).reshape({batch, context, width}));
    return attended + down(torch::gelu(up(norm2(attended))));
  }

  int64_t heads_;
  torch::nn::LayerNorm norm1, norm2;
  torch::nn::Linear qkv, out, up, down;
};
TORCH_MODULE(Block);

struct GptImpl : torch::nn::Module {
  explicit GptImpl(const Settings& settings)
      : token(register_module("token", torch::nn::Embedding(kBytes, settings.width))),
        position(register_module("position", torch::nn::Embedding(settings.context, settings.width))),
        blocks(register_module("blocks", torch::nn::ModuleList())),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({settings.width})))) {
    for (int64_t i = 0; i < settings.layers; ++i) blocks->push_back(Block(settings.width, settings.heads));
    const torch::NoGradGuard no_grad;
    torch::nn::init::normal_(token->weight, 0, 0.02);
    torch::nn::init::normal_(position->weight, 0, 0.02);
  }

  /// Returns the mean loss, in nats, of predicting `next` (batch, context) from `bytes`, both int64. The head shares
  /// its weights with the embedding.
  Tensor forward(const Tensor& bytes, const Tensor& next) {
    Tensor x = token(bytes) + position(torch::arange(bytes.size(1), bytes.options()));
    for (const auto& block : *blocks) x = block->as<BlockImpl>()->forward(x);
    const Tensor logits = torch::nn::functional::linear(norm(x), token->weight);
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1).to(torch::kFloat), next.flatten());
  }

  torch::nn::Embedding token, position;
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm;
};
TORCH_MODULE(Gpt);

/// Operators that profit compute in bf16, while it lives; parameters and gradients stay float32.
class InBfloat16 {
 public:
  explicit InBfloat16(at::Device device) : device_(device.type()), before_(at::autocast::is_autocast_enabled(device_)) {
    at::autocast::set_autocast_dtype(device_, at::kBFloat16);
    at::autocast::set_autocast_enabled(device_, true);
  }
  ~InBfloat16() {
    at::autocast::clear_cache();  // casts of parameters are void after the optimizer's step
    at::autocast::set_autocast_enabled(device_, before_);
  }
  InBfloat16(const InBfloat16&) = delete;
  InBfloat16& operator=(const InBfloat16&) = delete;

 private:
  at::DeviceType device_;
  bool before_;
};

Tensor read_text(const Settings& settings) {
  std::ifstream file(settings.text, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!file || bytes.size() < static_cast<size_t>(settings.context) + 2) {
    throw UsageError(fmt::format("{} cannot be read, or has fewer than --context + 2 bytes", settings.text));
  }
  return torch::from_blob(const_cast<char*>(bytes.data()), {static_cast<int64_t>(bytes.size())}, torch::kUInt8).clone();
}

/// This rank's part of a batch that depends on seed, step and size of the whole batch only: (samples, context + 1),
/// int64.
Tensor draw_batch(const Tensor& text, int64_t step, const Settings& settings, const ProcessGroup& group) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(settings.seed * 1'000'003 + step));
  const Tensor starts = at::randint(text.numel() - settings.context, {settings.batch_size * group.size()}, generator,
                                    at::TensorOptions(at::kLong));
  const Tensor mine = starts.narrow(0, settings.batch_size * group.rank(), settings.batch_size);
  const Tensor places = mine.unsqueeze(1) + torch::arange(settings.context + 1).unsqueeze(0);
  return text.index_select(0, places.flatten()).view(places.sizes()).to(group.device(), torch::kLong);
}

void run(const Settings& settings) {
  const Tensor text = read_text(settings);
  const ProcessGroup group = lockstep::init_process_group_from_env(lockstep::GroupOptions{}.allow_single(true));
  const bool on_host = group.device().is_cpu();
  if (on_host && group.size() > 1) torch::set_num_threads(1);

  torch::manual_seed(settings.seed);
  Gpt net(settings);
  net->to(group.device());
  lockstep::DistributedDataParallel model(net, group, lockstep::Options{}.gradient_as_bucket_view(true));
  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(settings.lr));

  const auto tokens_of_step = static_cast<double>(settings.batch_size * settings.context * group.size());
  double loss_of_all = 0, tokens_per_second = 0;
  auto since = std::chrono::steady_clock::now();
  int64_t steps_since = 0;
  for (int64_t step = 0; step < settings.steps; ++step) {
    const Tensor batch = draw_batch(text, step, settings, group);
    Tensor loss;
    {
      std::optional<InBfloat16> low_precision;
      if (!on_host) low_precision.emplace(group.device());
      loss = model(batch.narrow(1, 0, settings.context), batch.narrow(1, 1, settings.context));
    }
    optimizer.zero_grad();
    loss.backward();
    model.clip_grad_norm(settings.clip);
    optimizer.step();
    ++steps_since;
    if ((step + 1) % settings.log_every != 0 && step + 1 != settings.steps) continue;
    loss_of_all = lockstep::mean(group, loss.item<double>());
    if (!std::isfinite(loss_of_all)) throw UsageError("the loss is no number: try a smaller --lr");
    const auto now = std::chrono::steady_clock::now();
    tokens_per_second =
        tokens_of_step * static_cast<double>(steps_since) / std::chrono::duration<double>(now - since).count();
    since = now;
    steps_since = 0;
    lockstep::log0(group, "step {}/{}: loss {:.4f}, {:.0f} tokens/s", step + 1, settings.steps, loss_of_all,
                   tokens_per_second);
  }
  model.assert_in_sync();
  lockstep::print0(group,
                   R"({{"world_size": {}, "device": "{}", "backend": "{}", "steps": {}, "loss": {:.5f}, )"
                   R"("tokens_per_second": {:.1f}}})",
                   group.size(), c10::DeviceTypeName(group.device().type(), true), group.backend(), settings.steps,
                   loss_of_all, tokens_per_second);
}

}  // namespace

int main(int count, char** values) {
  try {
    run(read_settings(count, values));
  } catch (const UsageError& error) {
    std::cerr << "gpt: " << error.what() << '\n';
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "gpt: " << error.what() << '\n';
    return 1;
  }
}
