#include "reducer/guard.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <utility>

namespace lockstep {
namespace {

constexpr size_t kFields = 6;
/// Numbers in front of the weights.
constexpr int64_t kHead = 1 + 2 * static_cast<int64_t>(kFields);
/// Comes back unchanged from a maximum, and only from that: some groups (for tests, written in Python) know sums only.
constexpr int64_t kIsMaximum = 1;
/// A value travels together with its rank: value * kRanks + rank.
constexpr int64_t kRanks = int64_t{1} << 20;
/// What is kept of a fingerprint, to leave room for the rank.
constexpr int64_t kFingerprintMask = (int64_t{1} << 40) - 1;
constexpr int64_t kLowest = INT64_MIN / 2;
/// In the places of the other ranks' weights: the bits of one that is not negative are larger.
constexpr int64_t kNoWeight = -1;

std::array<int64_t, kFields> fields(const PassWord& word) {
  return {word.forwards,
          word.pass,
          word.mode,
          static_cast<int64_t>(word.plan) & kFingerprintMask,
          static_cast<int64_t>(word.hook) & kFingerprintMask,
          word.threw};
}

std::string difference(size_t field, int64_t low, int64_t low_rank, int64_t high, int64_t high_rank) {
  const auto both = [&](const char* text) { return fmt::format(fmt::runtime(text), high_rank, high, low_rank, low); };
  switch (field) {
    case 0:
      return both(
          "rank {} has begun {} forwards since the last reduction, but rank {} only {}: one of them ran under "
          "no_sync(), skipped its backward, or swallowed an exception. If ranks are meant to run different numbers of "
          "forwards, pass uneven_forwards=True");
    case 1:
      return both(
          "rank {} has reduced {} backward passes before this one, but rank {} only {}: one of them missed a step");
    case 2:
      return fmt::format(
          "ranks {} and {} reduce in different modes: find_unused_parameters, static_graph, manual finalization, the "
          "skipping of unused buckets or the use of set_step_weight is not the same",
          high_rank, low_rank);
    case 3:
      return fmt::format(
          "ranks {} and {} have different bucket plans: sizes of buckets, parameters or their order differ", high_rank,
          low_rank);
    case 4:
      return fmt::format(
          "ranks {} and {} have different comm hooks: register the same one with the same arguments on every rank",
          high_rank, low_rank);
    default:
      return fmt::format(
          "rank {} swallowed an exception in this backward or the last one, and rank {} had none: the gradients that "
          "rank {} owed went to all ranks as NaN. End the job when a backward raises, or skip that step on every rank",
          high_rank, low_rank, high_rank);
  }
}

Guard::Finding compared(const at::Tensor& numbers) {
  const auto* in = numbers.const_data_ptr<int64_t>();
  Guard::Finding finding;
  if (in[0] != kIsMaximum) return finding;
  for (size_t i = 0; i < kFields; ++i) {
    const int64_t highest = in[1 + i];
    const int64_t lowest = in[1 + kFields + i];
    if (highest == kLowest || lowest == kLowest) continue;
    const int64_t high_rank = highest % kRanks;
    const int64_t low_rank = (lowest % kRanks + kRanks) % kRanks;
    const int64_t high = highest / kRanks;
    const int64_t low = -((lowest - low_rank) / kRanks);
    if (high == low) continue;
    if (!finding.text.empty()) finding.text += "; ";
    finding.text += difference(i, low, low_rank, high, high_rank);
    finding.sizes_may_differ = finding.sizes_may_differ || (i >= 2 && i <= 4);
  }
  return finding;
}

}  // namespace

void Guard::start(Communicator& comm, const PassWord& word, at::Device device) {
  if (transfer_ || comm.size() == 1) return;
  const int64_t rank = comm.rank();
  const at::Tensor numbers = staging(kHead + comm.size(), at::kLong, device);
  auto* out = numbers.mutable_data_ptr<int64_t>();
  out[0] = kIsMaximum;
  const auto mine = fields(word);
  for (size_t i = 0; i < kFields; ++i) {
    const bool any = mine[i] == PassWord::kAny;
    out[1 + i] = any ? kLowest : mine[i] * kRanks + rank;
    out[1 + kFields + i] = any ? kLowest : -mine[i] * kRanks + rank;
  }
  std::fill_n(out + kHead, comm.size(), kNoWeight);
  out[kHead + rank] = std::bit_cast<int64_t>(word.weight);
  // Not one of the training's collectives: tools count those of a profile to find buckets and steps.
  const at::DisableRecordFunctionGuard unrecorded;
  exchange_ = sent_to(numbers, device);
  transfer_ = comm.max(exchange_);
}

Guard::Finding Guard::finish(Communicator& comm, Reading reading) {
  if (!transfer_) return {};
  const at::DisableRecordFunctionGuard unrecorded;
  std::exchange(transfer_, nullptr)->wait();
  weights_ = exchange_.narrow(0, kHead, comm.size()).view(at::kDouble);
  std::optional<HostCopy> earlier = std::exchange(unread_, HostCopy(exchange_));
  Finding finding;
  if (earlier) {
    finding = compared(earlier->await(comm));
    finding.is_late = true;
  }
  if (!finding.text.empty() || reading == Reading::kLater) return finding;
  return compared(std::exchange(unread_, std::nullopt)->await(comm));
}

void Guard::reset() {
  transfer_.reset();
  exchange_.reset();
  unread_.reset();
}

}  // namespace lockstep
