// What a wrapper does around a forward, whatever class of module it wraps. Programs use data_parallel.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "api/replica.h"
#include "compat.h"
#include "lockstep/options.h"
#include "lockstep/process_group.h"

namespace lockstep {

/// Parameters and buffers of a module, each tensor once, in the order of registration.
struct ModuleTensors {
  std::vector<std::string> parameter_names{};  ///< Qualified: "block.0.weight".
  std::vector<at::Tensor> parameters{};
  std::vector<bool> sparse{};  ///< Whether the gradient is sparse; one per parameter.
  std::vector<std::string> buffer_names{};
  std::vector<at::Tensor> buffers{};
};

/// One rank's copy of a module. One thread at a time may use it; backward may run on others.
class ReplicatedModule {
 public:
  /// Collective. Ranks must wrap the same model with the same options.
  /// @throws lockstep::Error  on every rank: ranks wrap different models, one has no trainable parameter, one is on a
  ///                          device that this build does not serve, or an option makes no sense.
  ReplicatedModule(ModuleTensors tensors, ProcessGroup group, Options options);
  ReplicatedModule(const ReplicatedModule&) = delete;
  ReplicatedModule& operator=(const ReplicatedModule&) = delete;

  /// @param training  whether the module is in training mode.
  /// @throws lockstep::Error  the module has changed since it was wrapped, or what `Reducer::begin_step` throws.
  void before_forward(bool training);
  void after_forward(const std::vector<at::Tensor>& outputs);
  /// Called when forward threw, with what `stray_input` said: raises the error that names it, if it said something.
  void explain_failure(const std::string& stray, const char* text);
  /// Names the first tensor that lies on another device than the module; empty if there is none.
  [[nodiscard]] std::string stray_input(const std::vector<at::Tensor>& inputs) const;

  /// Whether the backward of the next forward is reduced. Returns what it was.
  bool set_sync(bool reduces);
  void sync_gradients();
  void assert_in_sync();
  void expect_unused(const std::vector<std::string>& names);
  void set_hook(std::unique_ptr<CommHook> hook);
  /// See `DistributedDataParallel::clip_grad_norm`.
  double clip_grad_norm(double max_norm, double norm_type);

  [[nodiscard]] const ProcessGroup& group() const { return group_; }
  [[nodiscard]] const Options& options() const { return options_; }
  [[nodiscard]] const ModuleTensors& tensors() const { return tensors_; }
  /// Null where nothing is reduced (`allow_passthrough`).
  [[nodiscard]] Replica* replica() const { return replica_.get(); }
  /// @throws lockstep::Error  nothing is reduced.
  [[nodiscard]] Reducer& reducer() const;

 private:
  void start();
  void check_unchanged();
  void listen_again();
  void sync_buffers();
  [[noreturn]] void raise(Code code, const std::string& text);

  ProcessGroup group_;
  Options options_;
  ModuleTensors tensors_;
  std::set<std::string> ignored_;
  at::Device device_ = at::kCPU;           // of the first trainable parameter
  std::vector<c10::TensorOptions> kinds_;  // of the parameters when they were wrapped
  std::vector<std::vector<int64_t>> shapes_;
  std::vector<compat::NodePtr> accumulators_;  // where the reducer listens; null for what is not trained
  bool reduces_ = true;                        // what the user's switch says
  bool buffers_due_ = true;                    // the last forward with a graph was reduced
  bool local_gradients_ = false;               // what `no_sync` left is still of this rank only
  int64_t reduced_forwards_ = 0;
  std::unique_ptr<Replica> replica_;
};

}  // namespace lockstep
