#include "reducer/guard.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

namespace lockstep {
namespace {

constexpr size_t kFields = 5;
/// Comes back unchanged from a maximum, and only from that: some groups (for tests, written in Python) know sums only.
constexpr int64_t kIsMaximum = 1;
/// A value travels together with its rank: value * kRanks + rank.
constexpr int64_t kRanks = int64_t{1} << 20;
/// What is kept of a fingerprint, to leave room for the rank.
constexpr int64_t kFingerprintMask = (int64_t{1} << 40) - 1;
constexpr int64_t kLowest = INT64_MIN / 2;

std::array<int64_t, kFields> fields(const PassWord& word) {
  return {word.forwards, word.pass, word.mode, static_cast<int64_t>(word.plan) & kFingerprintMask,
          static_cast<int64_t>(word.hook) & kFingerprintMask};
}

std::string difference(size_t field, int64_t low, int64_t low_rank, int64_t high, int64_t high_rank) {
  const auto both = [&](const char* text) { return fmt::format(fmt::runtime(text), high_rank, high, low_rank, low); };
  switch (field) {
    case 0:
      return both(
          "rank {} has begun {} forwards since the last reduction, but rank {} only {}: one of them ran under "
          "no_sync(), skipped its backward, or swallowed an exception. If ranks are meant to run different numbers of "
          "forwards, "
          "pass uneven_forwards=True");
    case 1:
      return both(
          "rank {} has reduced {} backward passes before this one, but rank {} only {}: one of them missed a step");
    case 2:
      return fmt::format(
          "ranks {} and {} reduce in different modes: find_unused_parameters, static_graph, manual finalization or the "
          "skipping of unused buckets is not the same",
          high_rank, low_rank);
    case 3:
      return fmt::format(
          "ranks {} and {} have different bucket plans: sizes of buckets, parameters or their order differ", high_rank,
          low_rank);
    default:
      return fmt::format(
          "ranks {} and {} have different comm hooks: register the same one with the same arguments on every rank",
          high_rank, low_rank);
  }
}

}  // namespace

void Guard::start(Communicator& comm, const PassWord& word, at::Device device) {
  if (transfer_ || comm.size() == 1) return;
  const int64_t rank = comm.rank();
  at::Tensor numbers = at::empty({1 + 2 * kFields}, at::dtype(at::kLong));
  auto* out = numbers.mutable_data_ptr<int64_t>();
  out[0] = kIsMaximum;
  const auto mine = fields(word);
  for (size_t i = 0; i < kFields; ++i) {
    const bool any = mine[i] == PassWord::kAny;
    out[1 + i] = any ? kLowest : mine[i] * kRanks + rank;
    out[1 + kFields + i] = any ? kLowest : -mine[i] * kRanks + rank;
  }
  exchange_ = numbers.to(device);
  transfer_ = comm.max(exchange_);
}

Guard::Finding Guard::finish() {
  if (!transfer_) return {};
  const TransferPtr transfer = std::move(transfer_);
  transfer->wait();
  const at::Tensor numbers = exchange_.to(at::kCPU);
  const auto* in = numbers.const_data_ptr<int64_t>();
  Finding finding;
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
    finding.sizes_may_differ = finding.sizes_may_differ || i >= 2;
  }
  return finding;
}

void Guard::reset() {
  transfer_.reset();
  exchange_.reset();
}

}  // namespace lockstep
