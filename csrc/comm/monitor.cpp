#include "comm/monitor.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <optional>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "comm/store_prefix.h"
#include "core/error.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kHeartbeat{1000};
constexpr milliseconds kTick{200};
constexpr milliseconds kFarewell{1000};
constexpr int kRanksPerSecond = 100;  // lines read by a waiting rank

std::atomic<uint64_t> dumps_requested{0};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "it is written by signal handlers");

std::vector<uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

struct Monitor::State {
  const c10::intrusive_ptr<c10d::Store> store;
  const int rank;
  const int size;
  const std::shared_ptr<Progress> progress;
  const milliseconds threshold;
  const pid_t process = getpid();

  std::mutex mutex;
  std::condition_variable changed;
  bool stop = false;
  bool ended = false;
  std::string verdict;
  std::string lost;  // why the collectives were aborted
  Abort abort;
  DeviceMark mark;

  std::atomic<const char*> call_awaits{nullptr};  // null: in no call
  std::atomic<Clock::rep> call_since{0};

  std::atomic<uint64_t> beat{0};
  std::mutex reading;      // of the next two
  std::vector<bool> seen;  // ranks that have written before
  PeerWatch watch;

  // The thread's own.
  Clock::time_point next_beat{};
  Clock::time_point next_look{};
  int64_t report_at_ms = 0;
  bool reported_silence = false;
  bool store_lost = false;
  uint64_t dumps = dumps_requested.load();

  State(c10::intrusive_ptr<c10d::Store> store_of_all, int this_rank, int ranks, std::shared_ptr<Progress> mine,
        milliseconds patience)
      : store(std::move(store_of_all)),
        rank(this_rank),
        size(ranks),
        progress(std::move(mine)),
        threshold(patience),
        seen(static_cast<size_t>(ranks)),
        watch(this_rank, patience),
        report_at_ms(patience.count()) {}

  /// How long this rank has been in a call.
  [[nodiscard]] milliseconds age_of_call() const {
    if (call_awaits == nullptr) return milliseconds(0);
    return std::chrono::duration_cast<milliseconds>(Clock::now() -
                                                    Clock::time_point(Clock::duration(call_since.load())));
  }

  [[nodiscard]] Standing look() {
    Standing mine = progress->look();
    mine.beat = beat;
    if (is_waiting(mine.stage) || has_ended(mine.stage) || age_of_call() < interval()) return mine;
    if (const char* awaits = call_awaits) mine.detail = awaits;
    return mine;
  }

  void publish(Standing mine) {
    mine.beat = ++beat;
    store->set(std::to_string(rank), bytes(encode(mine)));
  }

  PeerWatch::Lines read() {
    const std::lock_guard lock(reading);
    PeerWatch::Lines lines(static_cast<size_t>(size));
    for (size_t r = 0; r < lines.size(); ++r) {
      const std::string key = std::to_string(r);
      if (!seen[r] && !store->check({key})) continue;
      seen[r] = true;
      const std::vector<uint8_t> value = store->get(key);
      lines[r] = decode({reinterpret_cast<const char*>(value.data()), value.size()});
    }
    return lines;
  }

  PeerWatch::Judgement judge(const Standing& mine, PeerWatch::Because because) {
    const PeerWatch::Lines lines = read();
    const std::lock_guard lock(reading);
    return watch.judge(lines, mine, Clock::now(), because);
  }

  void tick() {
    const Clock::time_point now = Clock::now();
    if (!store_lost) {
      try {
        if (now >= next_beat) {
          note_device_failure();
          publish(look());
          next_beat = now + kHeartbeat;
        }
        look_around(now);
      } catch (const std::exception&) {
        store_lost = true;
      }
    }
    if (store_lost) miss_store();
    if (dumps != dumps_requested.load()) dump();
  }

  [[nodiscard]] milliseconds interval() const { return std::min(kHeartbeat, threshold / 4); }
  /// The next look after one at `now`: later in large jobs, where each reads more lines.
  [[nodiscard]] Clock::time_point look_after(Clock::time_point now) const {
    return now + interval() * std::max(1, size / kRanksPerSecond);
  }

  void look_around(Clock::time_point now) {
    Standing mine = look();
    auto because = PeerWatch::Because::kWaiting;
    if (!is_waiting(mine.stage) && !has_ended(mine.stage) && age_of_call() >= threshold) {
      mine.stage = Stage::kBucketWait;
      mine.since_ms = age_of_call().count();
      because = PeerWatch::Because::kPerhapsWaiting;
    }
    if (!is_waiting(mine.stage)) {
      report_at_ms = threshold.count();
      reported_silence = false;
      {
        const std::lock_guard lock(mutex);
        verdict.clear();
      }
      return look_at_device(mine, now);
    }
    if (mine.since_ms < interval().count() || now < next_look) return;
    next_look = look_after(now);
    const PeerWatch::Judgement judgement = judge(mine, because);
    if (mine.since_ms >= report_at_ms || (judgement.silent && !reported_silence)) {
      fmt::print(stderr, "{}\n", judgement.report);
      while (report_at_ms <= mine.since_ms) report_at_ms *= 2;
      reported_silence = judgement.silent;
    }
    {
      const std::lock_guard lock(mutex);
      verdict = judgement.error;
    }
    give_up_device(judgement.error);
  }

  /// Where a kernel has failed, each collective behind it is one that the other ranks wait for.
  void note_device_failure() {
    if (has_ended(progress->stage())) return;
    const DeviceMark::Sight sight = mark.look();
    if (sight.state != DeviceMark::Sight::State::kDeviceFailed) return;
    progress->fail(coded(Code::kDeviceFailed, fmt::format("[rank {}] its device has failed in step {} or before: {}",
                                                          rank, sight.step, first_line(sight.error))));
  }

  /// The host does not wait, or in code that is not ours; does the device?
  void look_at_device(Standing mine, Clock::time_point now) {
    if (now < next_look) return;
    const DeviceMark::Sight sight = mark.look();
    if (sight.state != DeviceMark::Sight::State::kAhead || sight.age < threshold) return;
    next_look = look_after(now);
    mine.stage = Stage::kBucketWait;
    mine.step = sight.step;
    mine.since_ms = sight.age.count();
    mine.detail = "its device to finish the reduction";
    give_up_device(judge(mine, PeerWatch::Because::kPerhapsWaiting).error);
  }

  /// Nobody will ever take part in what is on its way: whoever waits for the device must be let go.
  void give_up_device(const std::string& reason) {
    Abort act;
    {
      const std::lock_guard lock(mutex);
      if (reason.empty() || !abort) return;
      lost = reason;
      act = std::exchange(abort, nullptr);
    }
    if (act(reason)) return;
    const std::lock_guard lock(mutex);
    lost.clear();
  }

  [[nodiscard]] std::string about_lost_store(const Standing& mine) const {
    return coded(Code::kPeerLost,
                 fmt::format("[rank {}] waits since {:.1f} s, and the process group's store does not answer any more: "
                             "the process that hosts it (rank 0, or the launcher) has probably died. Restart the job "
                             "from its last checkpoint.",
                             rank, static_cast<double>(mine.since_ms) / 1000));
  }

  /// The process that hosts the store is gone, and with it most likely the job.
  void miss_store() {
    const Standing mine = look();
    const bool overdue = is_waiting(mine.stage) && mine.since_ms >= threshold.count();
    const std::lock_guard lock(mutex);
    verdict = overdue ? about_lost_store(mine) : "";
  }

  void dump() {
    dumps = dumps_requested.load();
    std::string text = fmt::format("[rank {}] where all ranks stand:\n", rank);
    try {
      const PeerWatch::Lines lines = read();
      for (size_t r = 0; r < lines.size(); ++r) {
        const int other = static_cast<int>(r);
        const std::optional<Standing> line = other == rank ? look() : lines[r];
        text += "  " + (line ? sentence(other, *line) : fmt::format("rank {} has not been heard of", r)) + "\n";
      }
    } catch (const std::exception& error) {
      text += fmt::format("  {}; the others are unknown: {}\n", sentence(rank, look()), error.what());
    }
    fmt::print(stderr, "{}", text);
  }

  void run() {
    std::unique_lock lock(mutex);
    while (!stop) {
      lock.unlock();
      tick();
      lock.lock();
      changed.wait_for(lock, std::min(kTick, threshold / 4), [this] { return stop; });
    }
    lock.unlock();
    if (!store_lost) {
      try {
        note_device_failure();
        const Stage stage = progress->stage();
        const bool between = stage == Stage::kBetweenSteps || stage == Stage::kConstruction;
        if (!has_ended(stage)) progress->enter(between ? Stage::kLeft : Stage::kLeftInStep);
        publish(progress->look());
      } catch (const std::exception&) {  // the store may have gone first
      }
    }
    lock.lock();
    ended = true;
    changed.notify_all();
  }
};

Monitor::Monitor(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::shared_ptr<Progress> progress,
                 std::chrono::milliseconds threshold)
    : state_(std::make_shared<State>(store, rank, size, std::move(progress), threshold)),
      thread_([state = state_] { state->run(); }) {}

Monitor::~Monitor() {
  if (getpid() != state_->process) {  // a forked child has no such thread
    thread_.detach();
    return;
  }
  std::unique_lock lock(state_->mutex);
  state_->stop = true;
  state_->changed.notify_all();
  const bool ended = state_->changed.wait_for(lock, kFarewell, [this] { return state_->ended; });
  lock.unlock();
  if (ended) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

void Monitor::raise_if_hopeless() {
  const std::lock_guard lock(state_->mutex);
  if (!state_->verdict.empty()) throw PeerError(state_->verdict);
}

void Monitor::raise_if_lost() {
  const std::lock_guard lock(state_->mutex);
  if (!state_->lost.empty()) throw PeerError(state_->lost);
}

void Monitor::give_up(const std::string& reason) {
  state_->give_up_device(reason);
  const std::lock_guard lock(state_->mutex);
  state_->lost = reason;
}

Monitor::Call::Call(Monitor& monitor, const char* awaits)
    : monitor_(monitor), outermost_(monitor.state_->call_awaits == nullptr) {
  if (!outermost_) return;
  monitor_.state_->call_since = Clock::now().time_since_epoch().count();
  monitor_.state_->call_awaits = awaits;
}

Monitor::Call::~Call() {
  if (outermost_) monitor_.state_->call_awaits = nullptr;
}

void Monitor::mark(at::Device device) { state_->mark.set(device, state_->progress->step()); }

void Monitor::set_abort(Abort abort) {
  const std::lock_guard lock(state_->mutex);
  if (state_->lost.empty()) state_->abort = std::move(abort);
}

Monitor::Cause Monitor::explain_failure(const std::string& text) {
  const Standing mine = state_->look();
  state_->progress->give_up("");
  // Counted from look to look: a store that is slow must not use up the time in which silence shows.
  std::optional<Clock::time_point> first_look;
  Clock::time_point last_look;
  std::string report;
  try {
    state_->publish(state_->progress->look());
    do {
      const PeerWatch::Judgement judgement = state_->judge(mine, PeerWatch::Because::kCollectiveFailed);
      if (!judgement.error.empty()) {
        state_->progress->give_up(judgement.error);
        state_->publish(state_->progress->look());
        return {judgement.error, true};
      }
      report = judgement.report;
      last_look = Clock::now();
      if (!first_look) first_look = last_look;
      std::unique_lock lock(state_->mutex);
      state_->changed.wait_for(lock, kTick, [this] { return state_->stop; });
    } while (last_look < *first_look + PeerWatch::kSilence + kHeartbeat);
  } catch (const std::exception&) {
    state_->progress->give_up(text);
    return {state_->about_lost_store(mine), true};
  }
  publish_failure(text);  // the cause may be here
  return {report, false};
}

void Monitor::publish_failure(const std::string& text) {
  state_->progress->fail(text);
  try {
    state_->publish(state_->progress->look());
  } catch (const std::exception&) {  // then nobody can be told
  }
}

PeerWatch::Lines Monitor::lines() {
  PeerWatch::Lines lines = state_->read();
  lines[static_cast<size_t>(state_->rank)] = state_->look();
  return lines;
}

int Monitor::rank() const { return state_->rank; }

void Monitor::request_dump() { ++dumps_requested; }

c10::intrusive_ptr<c10d::Store> monitor_store(const c10::intrusive_ptr<c10d::Store>& group_store,
                                              const std::string& group_name, int rank) {
  if (!group_store) return nullptr;
  c10::intrusive_ptr<c10d::Store> base = group_store;
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(base.get())) base = prefixed->getUnderlyingNonPrefixStore();
  const bool usable = dynamic_cast<c10d::TCPStore*>(base.get()) != nullptr ||
                      dynamic_cast<c10d::FileStore*>(base.get()) != nullptr ||
                      dynamic_cast<c10d::HashStore*>(base.get()) != nullptr;
  if (!usable) return nullptr;
  return c10::make_intrusive<c10d::PrefixStore>(next_store_prefix("lockstep", group_name, rank), group_store->clone());
}

}  // namespace lockstep
