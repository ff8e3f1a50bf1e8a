// The counterpart of torch.nn.parallel.DistributedDataParallel for C++ programs.
#pragma once

#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <initializer_list>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "hooks/registry.h"
#include "lockstep/function_hook.h"
#include "lockstep/module_traits.h"
#include "lockstep/options.h"
#include "lockstep/process_group.h"
#include "lockstep/replicated_module.h"
#include "lockstep/tensors_in.h"

namespace lockstep {

/// While it lives, backward accumulates gradients on this rank only. The mode is taken when forward runs, so wrap
/// forward and backward together. The next step outside reduces everything accumulated.
class [[nodiscard]] NoSync {
 public:
  explicit NoSync(std::shared_ptr<ReplicatedModule> module)
      : module_(std::move(module)), before_(module_->set_sync(false)) {}
  ~NoSync() { module_->set_sync(before_); }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::shared_ptr<ReplicatedModule> module_;
  bool before_;
};

/// One copy of `Module` on each rank, whose gradients are averaged over the ranks while backward runs.
///
///     auto group = lockstep::init_process_group_from_env();
///     Net net;                                           // TORCH_MODULE(Net)
///     net->to(group.device());
///     lockstep::DistributedDataParallel model(net, group, lockstep::Options{}.gradient_as_bucket_view(true));
///     torch::optim::SGD optimizer(model.parameters(), 0.1);
///     model(inputs).sum().backward();                    // .grad: mean over ranks
///     optimizer.step();
///
/// A handle: copies share the module and the engine. The optimizer is used as without a wrapper. `torch::save(model,
/// ...)` writes what `torch::save` of the module itself would, with the same names; `torch::load(model, ...)` reads
/// both; do it on every rank. One thread at a time may use a wrapper.
///
/// Every member function that is called collective must be called by all ranks, in the same order.
///
/// @tparam Module  a module holder, a std::shared_ptr of a module, or torch::jit::Module (script_module.h).
/// Source: Li et al., VLDB 2020 (arXiv:2006.15704).
template <typename Module>
class DistributedDataParallel {
 public:
  using Traits = ModuleTraits<Module>;
  using Impl = typename Traits::Impl;

  /// Collective. Ranks then hold the parameters and buffers of rank 0.
  /// @throws lockstep::Error  on every rank: ranks wrap different models, one has no trainable parameter, one is on a
  ///                          device that this build does not serve, or an option makes no sense.
  explicit DistributedDataParallel(Module module, ProcessGroup group, Options options = {})
      : module_(std::make_shared<Module>(std::move(module))),
        core_(std::make_shared<ReplicatedModule>(Traits::tensors(*module_), std::move(group), std::move(options))) {}

  /// The module's forward, with any arguments and any result in which tensors are found (tensors_in.h).
  /// @throws lockstep::Error  before the module runs: it was moved or converted since it was wrapped, or the last
  /// backward
  ///                          ended with gradients missing; after it failed: an input is on another device.
  template <typename... Args>
  decltype(auto) forward(Args&&... args) {
    return call(
        [](Module& module, auto&&... inputs) -> decltype(auto) {
          return Traits::forward(module, std::forward<decltype(inputs)>(inputs)...);
        },
        std::forward<Args>(args)...);
  }
  template <typename... Args>
  decltype(auto) operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  /// Runs `function(module, args...)` as if it were forward: its backward is reduced.
  template <typename Function, typename... Args>
  decltype(auto) call(Function&& function, Args&&... args) {
    core_->before_forward(Traits::is_training(*module_));
    std::vector<at::Tensor> inputs;
    (detail::collect<false>(args, inputs), ...);
    const std::string stray = core_->stray_input(inputs);
    inputs.clear();
    using Result = std::invoke_result_t<Function, Module&, Args...>;
    if constexpr (std::is_void_v<Result>) {
      explaining(stray, [&] { std::forward<Function>(function)(*module_, std::forward<Args>(args)...); });
      core_->after_forward({});
    } else {
      Result output = explaining(
          stray, [&]() -> Result { return std::forward<Function>(function)(*module_, std::forward<Args>(args)...); });
      core_->after_forward(tensors_in(output));
      return static_cast<Result>(std::forward<Result>(output));
    }
  }

  /// `model->forward(x)` and `model->parameters()` read as with a module holder.
  DistributedDataParallel* operator->() { return this; }

  /// The wrapped module. What runs through it is not reduced.
  [[nodiscard]] Module& module() { return *module_; }
  [[nodiscard]] const Module& module() const { return *module_; }
  [[nodiscard]] Impl& impl() { return Traits::impl(*module_); }

  /// As those of the module, each once; frozen ones too.
  [[nodiscard]] std::vector<at::Tensor> parameters() const { return core_->tensors().parameters; }
  [[nodiscard]] const ModuleTensors& named_tensors() const { return core_->tensors(); }
  void train(bool on = true) { Traits::train(*module_, on); }
  void eval() { train(false); }
  [[nodiscard]] bool is_training() const { return Traits::is_training(*module_); }
  void zero_grad(bool set_to_none = true) {
    for (at::Tensor parameter : core_->tensors().parameters) {
      if (!parameter.grad().defined()) continue;
      if (set_to_none) {
        parameter.mutable_grad().reset();
      } else {
        parameter.mutable_grad().detach_().zero_();
      }
    }
  }

  NoSync no_sync() { return NoSync(core_); }

  /// Averages what `no_sync` has accumulated, without another forward. Collective.
  /// @throws lockstep::Error  a backward that reduces by itself is expected or running.
  void sync_gradients() { core_->sync_gradients(); }

  /// Compares parameters and buffers over ranks, bit by bit. Collective.
  /// @throws lockstep::Error  on every rank; names the first tensors that differ, and the ranks.
  void assert_in_sync() { core_->assert_in_sync(); }

  /// With `find_unused_parameters`: the next backward will probably not use these parameters, or those of these
  /// submodules. A wrong hint costs a small reduction more; gradients are right in any case.
  /// @throws lockstep::Error  a name is neither.
  void expect_unused(const std::vector<std::string>& names) { core_->expect_unused(names); }

  /// Scales all gradients, those of frozen layers excepted, so that their joint norm is at most `max_norm`. Local:
  /// after a backward that reduces, gradients and so the result are the same on every rank.
  /// @return  the norm before. The host waits for the device.
  /// @throws lockstep::Error  the last backward ran in `no_sync`.
  double clip_grad_norm(double max_norm, double norm_type = 2.0) { return core_->clip_grad_norm(max_norm, norm_type); }

  /// Replaces the comm hook by one of the engine's: "allreduce", "fp16", "bf16", "int8", "power_sgd",
  /// "batched_power_sgd". Between steps, on every rank alike.
  ///
  ///     model.register_comm_hook("power_sgd", {{"rank", int64_t{2}}});
  ///
  /// @throws lockstep::Error  no such hook or argument (the text names the right ones), or a backward is running.
  void register_comm_hook(const std::string& name, const HookArgs& args = {}) {
    core_->set_hook(make_comm_hook(name, args));
  }
  /// By a hook of your own: an object, or a function (see `make_hook`).
  void register_comm_hook(std::unique_ptr<CommHook> hook) { core_->set_hook(std::move(hook)); }
  template <typename Start>
  requires std::invocable<Start&, const GradBucket&, Communicator&>
  void register_comm_hook(std::string name, Start start) {
    core_->set_hook(make_hook(std::move(name), std::move(start)));
  }
  /// What the hook keeps between steps: different on each rank. Save it with the model, and load it after registering
  /// the same hook.
  [[nodiscard]] HookState comm_hook_state() { return core_->reducer().hook_state(); }
  void load_comm_hook_state(const HookState& state) { core_->reducer().load_hook_state(state); }
  [[nodiscard]] HookStats comm_hook_stats() { return core_->reducer().hook_stats(); }

  [[nodiscard]] const ProcessGroup& group() const { return core_->group(); }
  [[nodiscard]] const Options& options() const { return core_->options(); }
  /// The engine itself, for what this class does not offer.
  [[nodiscard]] Reducer& reducer() { return core_->reducer(); }

 private:
  template <typename Action>
  decltype(auto) explaining(const std::string& stray, const Action& action) {
    if (stray.empty()) return action();
    try {
      return action();
    } catch (const c10::Error& error) {
      core_->explain_failure(stray, error.what_without_backtrace());
      throw;
    }
  }

  std::shared_ptr<Module> module_;
  std::shared_ptr<ReplicatedModule> core_;
};

template <typename Module>
torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                            const DistributedDataParallel<Module>& model) {
  ModuleTraits<Module>::impl(model.module()).save(archive);
  return archive;
}

template <typename Module>
torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                           DistributedDataParallel<Module>& model) {
  model.impl().load(archive);
  return archive;
}

}  // namespace lockstep
