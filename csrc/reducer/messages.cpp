#include "reducer/messages.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>

namespace lockstep::messages {
namespace {

constexpr size_t kMostNames = 20;

std::string indices_of(const std::vector<ParamId>& ids) {
  std::vector<size_t> indices;
  for (size_t i = 0; i < std::min(ids.size(), kMostNames); ++i) indices.push_back(index(ids[i]));
  return fmt::format("{}", fmt::join(indices, " "));
}

const char* advice(GraphKind graph) {
  switch (graph) {
    case GraphKind::kComplete:
      return "This error indicates that your module has parameters that were not used in producing loss. You can "
             "enable unused parameter detection by passing the keyword argument `find_unused_parameters=True` to "
             "`torch.nn.parallel.DistributedDataParallel`, and by making sure all `forward` function outputs "
             "participate in calculating loss; or set requires_grad=False on parameters that are never used; or pass "
             "`static_graph=True` when the same ones are unused in every step.";
    case GraphKind::kDynamic:
      return "Since `find_unused_parameters=True` is enabled, this likely means that the loss was computed from "
             "something else than the outputs of `forward`, or that they are hidden in a class whose tensors cannot be "
             "found. Return the tensors in a tuple, list, dict or dataclass, and make sure that the `forward` function "
             "outputs participate in calculating loss.";
    case GraphKind::kStatic:
      return "This error indicates that your training graph has changed in this iteration, e.g., one parameter is used "
             "in first iteration, but then got unused in the second iteration. this is not compatible with "
             "static_graph set to True.";
  }
  return "";
}

}  // namespace

std::string names(const ParamList& params, const std::vector<ParamId>& ids) {
  std::vector<std::string_view> first;
  for (size_t i = 0; i < std::min(ids.size(), kMostNames); ++i) first.emplace_back(params.names[index(ids[i])]);
  const std::string text = fmt::format("{}", fmt::join(first, ", "));
  return ids.size() > kMostNames ? fmt::format("{} and {} more", text, ids.size() - kMostNames) : text;
}

std::string local_gradients(const ParamList& params, const std::vector<ParamId>& missing, size_t buckets_left,
                            size_t buckets, const std::string& reasons) {
  return fmt::format(
      "backward has ended, but {} of {} parameters got no gradient, and {} of {} buckets were not reduced: the "
      "gradients "
      "in them are those of this rank alone. {}. Use every output of forward in the loss, freeze what is never used, "
      "or "
      "pass find_unused_parameters=True.",
      missing.size(), params.size(), buckets - buckets_left, buckets, reasons);
}

std::string bad_hint(const ParamList& params, ParamId id) {
  return fmt::format(
      "parameter {} was announced by expect_unused(), but it did get a gradient. The mean is right; it costs one more "
      "small reduction.",
      params.label(id));
}

std::string unfinished(int rank, const ParamList& params, const std::vector<ParamId>& missing, GraphKind graph,
                       const std::string& reasons) {
  return fmt::format(
      "Expected to have finished reduction in the prior iteration before starting a new one. {1}\n"
      "Parameter indices which did not receive grad for rank {0}: {2}\n"
      "Parameters which did not receive grad for rank {0}: {3}\n"
      "{4} of {5} parameters are missing; their buckets and those behind them were not reduced, so gradients differ "
      "between ranks. Likely reasons: {6}. For torch's own logs as well, set the environment variable "
      "TORCH_DISTRIBUTED_DEBUG to either "
      "INFO or DETAIL.",
      rank, advice(graph), indices_of(missing), names(params, missing), missing.size(), params.size(), reasons);
}

std::string ready_twice(const ParamList& params, ParamId id, GraphKind graph) {
  if (graph == GraphKind::kStatic) {
    return fmt::format(
        "Your training graph has changed in this iteration, e.g., one parameter is unused in first "
        "iteration, but then got used in the second iteration. this is not compatible with static_graph set to True. "
        "Parameter {} got more gradients than in the first iteration. Use `find_unused_parameters=True` for graphs "
        "that change.",
        params.label(id));
  }
  return fmt::format(
      "Expected to mark a variable ready only once. Parameter {} got a second gradient in one backward pass, "
      "after its bucket may have been reduced. This happens when 1) it is used outside of the `forward` function or "
      "shared by several forward-backward passes that run at the same time; 2) it lies in a module that is "
      "checkpointed more than once with `use_reentrant=True`; 3) two losses that share it are sent backward one after "
      "the other. Use `use_reentrant=False`, add the losses up and call backward once, or pass `static_graph=True` "
      "when the graph is the same in every step.",
      params.label(id));
}

std::string bucket(const BucketPlan& plan, BucketId id, const ParamList& params) {
  const Bucket& members = plan.bucket(id);
  return fmt::format("bucket {} of {} ({} ... {})", index(id), plan.num_buckets(), params.label(members.params.front()),
                     params.label(members.params.back()));
}

}  // namespace lockstep::messages
