#include "comm/nccl_handle.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <future>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/fingerprint.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kPoll{1};
constexpr const char* kIdKey = "nccl_id";
constexpr const char* kOtherHostKey = "nccl_other_host";
constexpr const char* kOtherSizeKey = "nccl_other_in_place_bytes";

std::string joined_key(int rank) { return fmt::format("nccl_joined_{}", rank); }

double seconds(milliseconds time) { return std::chrono::duration<double>(time).count(); }

/// Runs `action` in a thread of its own and waits for it until `limit`. If it takes longer, the thread is left alone
/// with it: `action` must own what it uses.
void run_within(milliseconds limit, std::function<void()> action) {
  auto done = std::make_shared<std::promise<void>>();
  std::future<void> end = done->get_future();
  std::thread([done, action = std::move(action)] {
    action();
    done->set_value();
  }).detach();
  end.wait_for(limit);
}

/// Waits until `comm` is in no operation any more; ncclInProgress when the time is up.
ncclResult_t settled(ncclComm_t comm, Clock::time_point deadline) {
  for (;;) {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(comm, &state);
    if (asked != ncclSuccess) return asked;
    if (state != ncclInProgress || Clock::now() >= deadline) return state;
    std::this_thread::sleep_for(kPoll);
  }
}

milliseconds left_until(Clock::time_point deadline) {
  return std::max(std::chrono::duration_cast<milliseconds>(deadline - Clock::now()), milliseconds(1));
}

/// Equal on ranks of one host, as NCCL tells hosts apart.
uint64_t host_number(int rank) {
  std::string name;
  if (const char* given = std::getenv("NCCL_HOSTID"); given != nullptr && *given != '\0') {
    name = given;
  } else {
    std::array<char, 256> host{};
    (void)gethostname(host.data(), host.size() - 1);
    name = host.data();
    std::string boot;
    if (std::ifstream file("/proc/sys/kernel/random/boot_id"); std::getline(file, boot)) name += boot;
  }
  const char* no_peers = std::getenv("NCCL_P2P_DISABLE");
  if (no_peers != nullptr && std::string_view(no_peers) == "1") name += fmt::format(" rank {}", rank);
  return fingerprint(name);
}

/// What rank 0 hands to all: the id that it made, and what the others compare with their own.
struct Invitation {
  ncclUniqueId id{};
  uint64_t host = 0;
  int64_t in_place_bytes = -1;  // -1: not given
};

Invitation invitation(c10d::Store& store, int rank, const NcclOptions& options, Clock::time_point deadline) {
  Invitation mine{.host = host_number(rank), .in_place_bytes = options.in_place_bytes.value_or(-1)};
  if (rank == 0) {
    const ncclResult_t made = ncclGetUniqueId(&mine.id);
    if (made != ncclSuccess) {
      fail(Code::kNcclNotJoined, "[rank 0] NCCL could not be started: {}. Run with NCCL_DEBUG=INFO to see why.",
           nccl_reason(made));
    }
    const auto* bytes = reinterpret_cast<const uint8_t*>(&mine);
    store.set(kIdKey, std::vector<uint8_t>(bytes, bytes + sizeof(mine)));
    return mine;
  }
  std::string reason;
  try {
    store.wait({kIdKey}, left_until(deadline));
    const std::vector<uint8_t> bytes = store.get(kIdKey);
    if (Invitation theirs; bytes.size() == sizeof(theirs)) {
      std::memcpy(&theirs, bytes.data(), bytes.size());
      // Before joining: who has joined knows that all have said so.
      if (theirs.host != mine.host) store.set(kOtherHostKey, std::vector<uint8_t>{1});
      if (theirs.in_place_bytes != mine.in_place_bytes) store.set(kOtherSizeKey, std::vector<uint8_t>{1});
      (void)store.check({kIdKey});  // a store answers no `set`, but works in order
      return theirs;
    }
    reason = fmt::format("it has {} bytes instead of {}", bytes.size(), sizeof(Invitation));
  } catch (const std::exception& error) {
    reason = error.what();
  }
  fail(Code::kNcclNotJoined,
       "[rank {}] rank 0 has not sent the id of the NCCL communicator within {:.1f} s: {}. All ranks must create the "
       "communicator together; see whether rank 0 got there, or raise NcclOptions::timeout.",
       rank, seconds(options.timeout), reason.substr(0, reason.find('\n')));
}

/// "rank 2, 5", the ranks that have not come as far as joining; "no rank" if all have, or the store does not answer.
std::string missing_ranks(c10d::Store& store, int size) {
  std::string missing;
  try {
    for (int rank = 0; rank < size; ++rank) {
      if (!store.check({joined_key(rank)})) missing += fmt::format("{}{}", missing.empty() ? "rank " : ", ", rank);
    }
  } catch (const std::exception&) {
  }
  return missing.empty() ? "no rank" : missing;
}

ncclConfig_t config_of(const NcclOptions& options, bool blocking) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = blocking ? 1 : 0;
  config.splitShare = options.split_share ? 1 : 0;
  if (options.max_ctas > 0) config.maxCTAs = options.max_ctas;
  if (!options.net_name.empty()) config.netName = options.net_name.c_str();
  return config;
}

}  // namespace

std::string nccl_reason(ncclResult_t result) {
  const char* last = ncclGetLastError(nullptr);  // one per process, whatever communicator is named
  const std::string_view detail = last == nullptr ? std::string_view() : last;
  return fmt::format("{}{}{}", ncclGetErrorString(result), detail.empty() ? "" : "; NCCL's last message: ",
                     detail.substr(0, detail.find_last_not_of('\n') + 1));
}

void NcclHandle::Abort::operator()(ncclComm_t comm) const {
  run_within(kNcclFarewell, [comm] { (void)ncclCommAbort(comm); });
}

NcclHandle::NcclHandle(c10d::Store& store, int rank, int size, const NcclOptions& options) {
  const Clock::time_point deadline = Clock::now() + options.timeout;
  const Invitation invited = invitation(store, rank, options, deadline);
  store.set(joined_key(rank), std::vector<uint8_t>{1});

  // Also what reports success goes on in the background: ncclCommSplit returns before it is done.
  const auto check = [&](ncclResult_t result, ncclComm_t comm) {
    if (result == ncclSuccess || result == ncclInProgress) result = settled(comm, deadline);
    if (result == ncclSuccess) return;
    if (result == ncclInProgress) {
      fail(Code::kNcclNotJoined,
           "[rank {}] the NCCL communicator of {} ranks did not come about within {:.1f} s: {} is missing. See why it "
           "did not get here (an exception, a crash, another number of processes), whether the machines reach each "
           "other (NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME), or raise NcclOptions::timeout.",
           rank, size, seconds(options.timeout), missing_ranks(store, size));
    }
    fail(Code::kNcclNotJoined,
         "[rank {}] the NCCL communicator of {} ranks could not be created: {}. Each rank needs a GPU of its own and "
         "the "
         "same NCCL version; NCCL_DEBUG=INFO shows where it stopped.",
         rank, size, nccl_reason(result));
  };

  ncclConfig_t config = config_of(options, false);
  ncclComm_t joined = nullptr;
  const ncclResult_t joining = ncclCommInitRankConfig(&joined, size, invited.id, rank, &config);
  joined_.reset(joined);
  check(joining, joined);
  one_host_ = !store.check({kOtherHostKey});
  if (store.check({kOtherSizeKey})) {
    fail(Code::kRanksDisagree,
         "[rank {}] the ranks were given different in_place_mb (here {} bytes, on rank 0 {}; -1 is lockstep's choice). "
         "Their collectives would not match: give all ranks the same lockstep.Nccl(...).",
         rank, options.in_place_bytes.value_or(-1), invited.in_place_bytes);
  }

  config = config_of(options, true);
  // NCCL writes it from a thread that may outlast this call when something fails: then it must stay.
  auto split = std::make_unique<ncclComm_t>(nullptr);
  try {
    check(ncclCommSplit(joined, 0, rank, split.get(), &config), joined);
  } catch (...) {
    (void)split.release();
    throw;
  }
  comm_.reset(*split);
  if (!comm_) fail(Code::kNcclNotJoined, "[rank {}] NCCL split off no communicator, and gave no reason.", rank);
  if (!options.split_share) {
    run_within(kNcclFarewell, [comm = joined_.release()] { (void)ncclCommDestroy(comm); });
  }
}

ncclResult_t NcclHandle::async_error() const {
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = ncclCommGetAsyncError(comm_.get(), &state);
  return asked != ncclSuccess ? asked : state;
}

void NcclHandle::close(Farewell farewell) {
  const std::chrono::seconds patience = farewell == Farewell::kWait ? kNcclFarewell : std::chrono::seconds(0);
  for (Owned* owned : {&comm_, &joined_}) {
    if (*owned) run_within(patience, [comm = owned->release()] { (void)ncclCommDestroy(comm); });
  }
}

void NcclHandle::abort() {
  comm_.reset();
  joined_.reset();
}

}  // namespace lockstep
