#include "comm/agree.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "comm/checksum.h"
#include "core/error.h"
#include "core/fingerprint.h"

namespace lockstep {
namespace {

constexpr size_t kMostDifferences = 10;  // named in one message
constexpr char kNewline = '\n';

/// What two ranks must agree on for one parameter, as a person would read it. One line, no newline inside.
std::string describe(const at::Tensor& param, const std::string& name) {
  return fmt::format("'{}' size {} stride {} {} on {}{}", name, param.sizes().vec(), param.strides().vec(),
                     c10::toString(param.scalar_type()), c10::DeviceTypeName(param.device().type(), true),
                     param.requires_grad() ? "" : " (frozen)");
}

std::string describe_all(const std::vector<at::Tensor>& params, const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < params.size(); ++i) text += describe(params[i], names[i]) + kNewline;
  return text;
}

std::vector<std::string_view> lines(std::string_view text) {
  std::vector<std::string_view> result;
  while (!text.empty()) {
    const size_t end = text.find(kNewline);
    result.push_back(text.substr(0, end));
    text.remove_prefix(end + 1);
  }
  return result;
}

/// Every rank's row of `mine`, on the host. Row r belongs to rank r.
at::Tensor gather_rows(Communicator& comm, const at::Tensor& mine, at::Device device) {
  const at::Tensor input = mine.to(device);
  at::Tensor output = at::empty({comm.size(), mine.numel()}, input.options());
  comm.all_gather(output.view(-1), input)->wait();
  return output.to(at::kCPU);
}

std::string padded(std::string text, int64_t size) {
  text.resize(static_cast<size_t>(size), '\0');
  return text;
}

/// Raises the difference between rank 0 and rank `other`, from both sides' full descriptions.
[[noreturn]] void raise_difference(int here, int other, std::string_view theirs_zero, std::string_view theirs_other) {
  const auto zero_lines = lines(theirs_zero);
  const auto other_lines = lines(theirs_other);
  if (zero_lines.size() != other_lines.size()) {
    const auto& longer = zero_lines.size() > other_lines.size() ? zero_lines : other_lines;
    fail(Code::kDifferentModels,
         "[rank {}] DDP expects same model across all ranks, but Rank 0 has {} params, while rank {} has inconsistent "
         "{} params. The first one that only rank {} has: {}. Gradients of different parameters would be averaged. "
         "Build the same model, with the same parameters frozen, on every rank.",
         here, zero_lines.size(), other, other_lines.size(), &longer == &zero_lines ? 0 : other,
         longer[std::min(zero_lines.size(), other_lines.size())]);
  }
  const auto differ = std::mismatch(zero_lines.begin(), zero_lines.end(), other_lines.begin());
  fail(Code::kDifferentModels,
       "[rank {}] DDP expects same model across all ranks, but parameter {} on rank {} appears not to match rank 0: "
       "rank 0 has {}, rank {} has {}. Gradients of different parameters would be averaged. Build the same model, with "
       "parameters registered in the same order, on every rank.",
       here, differ.first - zero_lines.begin(), other, *differ.first, other, *differ.second);
}

}  // namespace

void verify_same_model(Communicator& comm, const std::vector<at::Tensor>& params,
                       const std::vector<std::string>& names) {
  const at::Device device = params.empty() ? at::Device(at::kCPU) : params.front().device();
  std::string mine = describe_all(params, names);
  const at::Tensor header =
      at::tensor({static_cast<int64_t>(mine.size()), static_cast<int64_t>(fingerprint(mine))}, at::dtype(at::kLong));
  const at::Tensor headers = gather_rows(comm, header, device);

  int other = 0;
  while (other < comm.size() && headers[other].equal(headers[0])) ++other;
  if (other == comm.size()) return;

  const auto longest = headers.select(1, 0).max().item<int64_t>();
  mine = padded(std::move(mine), longest);
  const at::Tensor text = at::from_blob(mine.data(), {longest}, at::dtype(at::kByte)).clone();
  const at::Tensor texts = gather_rows(comm, text, device);
  const auto of_rank = [&](int rank) {
    const auto size = static_cast<size_t>(headers[rank][0].item<int64_t>());
    return std::string_view(static_cast<const char*>(texts[rank].const_data_ptr()), size);
  };
  raise_difference(comm.rank(), other, of_rank(0), of_rank(other));
}

void verify_same_values(Communicator& comm, const std::vector<at::Tensor>& tensors,
                        const std::vector<std::string>& names) {
  if (tensors.empty()) return;
  const at::Device device = tensors.front().device();
  std::vector<int64_t> sums;
  int64_t all = 0;
  for (const at::Tensor& tensor : tensors) {
    sums.push_back(checksum(tensor));
    all = combined(all, sums.back());
  }
  const at::Tensor totals =
      gather_rows(comm, at::tensor({all, static_cast<int64_t>(tensors.size())}, at::dtype(at::kLong)), device);
  const auto differs_from_zero = [](const at::Tensor& rows, int rank) { return !rows[rank].equal(rows[0]); };
  bool any = false;
  for (int rank = 1; rank < comm.size(); ++rank) {
    any = any || differs_from_zero(totals, rank);
    if (totals[rank][1].item<int64_t>() == totals[0][1].item<int64_t>()) continue;
    fail(Code::kReplicasDiffer,
         "[rank {}] the replicas differ: rank 0 has {} parameters and buffers, rank {} has {}. Wrap the same model on "
         "every rank.",
         comm.rank(), totals[0][1].item<int64_t>(), rank, totals[rank][1].item<int64_t>());
  }
  if (!any) return;

  const at::Tensor rows = gather_rows(comm, at::tensor(sums, at::dtype(at::kLong)), device);
  std::vector<std::string> found;
  size_t more = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    std::vector<int> ranks;
    for (int rank = 1; rank < comm.size(); ++rank) {
      const auto place = static_cast<int64_t>(i);
      if (rows[rank][place].item<int64_t>() != rows[0][place].item<int64_t>()) ranks.push_back(rank);
    }
    if (ranks.empty()) continue;
    if (found.size() == kMostDifferences) {
      ++more;
    } else {
      found.push_back(fmt::format("'{}' on rank {}", names[i], fmt::join(ranks, ", ")));
    }
  }
  fail(Code::kReplicasDiffer,
       "[rank {}] the replicas differ from rank 0: {}{}. They were loaded, cast or edited on some ranks only, or "
       "updated with gradients that were not reduced. Copy rank 0's values to all ranks, for example by wrapping the "
       "module again.",
       comm.rank(), fmt::join(found, "; "), more == 0 ? "" : fmt::format(" and {} more", more));
}

void adopt_from_rank_zero(Communicator& comm, std::vector<int32_t>& values, at::Device device) {
  if (comm.size() == 1) return;
  const auto count = static_cast<int64_t>(values.size());
  at::Tensor exchange = at::from_blob(values.data(), {count}, at::dtype(at::kInt)).to(device, at::kInt, false, true);
  comm.broadcast(exchange, 0)->wait();
  const at::Tensor received = exchange.to(at::kCPU);
  std::memcpy(values.data(), received.const_data_ptr(), values.size() * sizeof(int32_t));
}

}  // namespace lockstep
