#include "hooks/named_memory.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <set>

#include "core/error.h"

namespace lockstep {
namespace {

constexpr std::string_view kErrors = "error/";
constexpr std::string_view kFactors = "factor/";
constexpr std::string_view kBucketMark = "[";

}  // namespace

std::vector<NamedSlice> slices_of(const BucketMembers& members) {
  std::vector<NamedSlice> slices;
  for (size_t i = 0; i < members.names.size(); ++i) {
    slices.push_back(
        {members.names[i], static_cast<int64_t>(members.offsets[i]), static_cast<int64_t>(members.lengths[i])});
  }
  return slices;
}

bool NamedMemory::knows(const NamedSlice& slice) const {
  const auto found = memory_.find(slice.name);
  return found != memory_.end() && found->second.numel() == slice.numel;
}

at::Tensor NamedMemory::lay_out(std::span<const NamedSlice> slices, int64_t numel, const at::TensorOptions& options) {
  const at::Tensor flat = at::zeros({numel}, options);
  for (const NamedSlice& slice : slices) {
    const at::Tensor place = flat.narrow(0, slice.offset, slice.numel);
    if (knows(slice)) place.copy_(memory_.at(slice.name));
    memory_.insert_or_assign(slice.name, place);
  }
  return flat;
}

void NamedMemory::replace(const std::map<std::string, at::Tensor>& values) {
  memory_.clear();
  for (const auto& [name, value] : values) memory_.emplace(name, value.clone());
}

void NamedMemory::save(const std::string& prefix, HookState& state) const {
  for (const auto& [name, value] : memory_) state.emplace(prefix + name, value.clone());
}

FittingState fitting(const HookState& state, const std::string& kind, std::span<const HookSubject> subjects, int rank) {
  if (!state.contains(kind + "/step") || !state.contains(kind + "/saved_by_rank")) {
    fail(Code::kHookState, "this is no state of the comm hook '{}'. Register the hook that it was saved from first.",
         kind);
  }
  std::map<std::string, int64_t> sizes;
  for (const HookSubject& subject : subjects) sizes.emplace(subject.name, subject.numel);

  FittingState result;
  std::set<std::string> unknown;
  std::vector<std::string> resized;
  const int64_t saved_by = number_in(state, kind + "/saved_by_rank");
  bool of_other_rank = false;
  size_t of_parameters = 0;
  size_t of_known = 0;
  for (const auto& [key, value] : state) {
    const bool error = key.starts_with(kErrors);
    if (!error && !key.starts_with(kFactors)) continue;
    const std::string name = key.substr(error ? kErrors.size() : kFactors.size());
    const auto size = sizes.find(name);
    const bool of_bucket = name.starts_with(kBucketMark);
    ++of_parameters;
    if (size == sizes.end() && !of_bucket) {
      unknown.insert(name);
      continue;
    }
    ++of_known;
    if (error && !of_bucket && value.numel() != size->second) {
      resized.push_back(fmt::format("'{}' ({} elements, now {})", name, value.numel(), size->second));
    } else if (error && saved_by != rank) {
      of_other_rank = true;
    } else {
      (error ? result.errors : result.factors).emplace(name, value.reshape({-1}));
    }
  }
  if (of_parameters != 0 && of_known == 0) {
    fail(Code::kHookState,
         "the state of the comm hook '{}' is that of another model: it knows none of this model's parameters, but "
         "'{}'. Nothing was loaded.",
         kind, fmt::join(unknown, "', '"));
  }
  if (!unknown.empty()) {
    result.complaints.push_back(
        fmt::format("the state of the comm hook '{}' has parameters that this model lacks, which were dropped: '{}'.",
                    kind, fmt::join(unknown, "', '")));
  }
  if (!resized.empty()) {
    result.complaints.push_back(
        fmt::format("the state of the comm hook '{}' has parameters of another size, whose errors start from zero: {}.",
                    kind, fmt::join(resized, ", ")));
  }
  if (of_other_rank) {
    result.complaints.push_back(fmt::format(
        "the state of the comm hook '{}' was saved by rank {} and is loaded by rank {}: what compression has left out "
        "is different on every rank, so it starts from zero here. Save and load one state per rank to go on exactly.",
        kind, saved_by, rank));
  }
  return result;
}

at::Tensor saved_number(int64_t value) { return at::full({1}, value, at::dtype(at::kLong)); }

int64_t number_in(const HookState& state, const std::string& name) {
  const auto found = state.find(name);
  if (found == state.end() || found->second.numel() != 1) {
    fail(Code::kHookState, "the state of a comm hook lacks the number '{}': it was changed since it was saved.", name);
  }
  return found->second.item<int64_t>();
}

}  // namespace lockstep
