// What a hook remembers of each parameter, in flat tensors that follow the bucket plan.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "hooks/comm_hook.h"

namespace lockstep {

/// Elements [offset, offset + numel) of a flat tensor, which belong to `name`.
struct NamedSlice {
  std::string name;
  int64_t offset = 0;
  int64_t numel = 0;
};

/// Where the parameters of a bucket lie.
[[nodiscard]] std::vector<NamedSlice> slices_of(const BucketMembers& members);

/// Memory by name that can be laid out anew at any time: state kept between steps survives another bucket plan.
class NamedMemory {
 public:
  /// A flat tensor of `numel` elements. What is known under the name of a slice, and of its size, moves there; all else
  /// is zeros. From now on the name stands for that slice, so that changing the tensor changes what is remembered.
  at::Tensor lay_out(std::span<const NamedSlice> slices, int64_t numel, const at::TensorOptions& options);

  [[nodiscard]] bool knows(const NamedSlice& slice) const;
  void forget(const std::string& name) { memory_.erase(name); }
  /// Remembers copies of these, and nothing else.
  void replace(const std::map<std::string, at::Tensor>& values);

  /// Copies everything into `state`, under `prefix` and the name.
  void save(const std::string& prefix, HookState& state) const;

 private:
  std::map<std::string, at::Tensor> memory_;  // 1-D
};

/// What of a saved state fits the parameters there are.
struct FittingState {
  std::map<std::string, at::Tensor> errors;   ///< By parameter: entries "error/NAME".
  std::map<std::string, at::Tensor> factors;  ///< Entries "factor/NAME".
  std::vector<std::string> complaints;
};

/// Sorts a state by parameter. Errors belong to the rank that saved them; factors are the same on all ranks.
/// @param kind  of the hook: the state must hold "KIND/step" and "KIND/saved_by_rank".
/// @throws lockstep::Error  it is the state of another kind of hook, or no parameter of it is among the subjects.
[[nodiscard]] FittingState fitting(const HookState& state, const std::string& kind,
                                   std::span<const HookSubject> subjects, int rank);

/// A number, as states hold it.
[[nodiscard]] at::Tensor saved_number(int64_t value);
[[nodiscard]] int64_t number_in(const HookState& state, const std::string& name);

}  // namespace lockstep
