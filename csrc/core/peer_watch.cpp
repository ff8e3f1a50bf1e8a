#include "core/peer_watch.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>

#include "core/error.h"

namespace lockstep {
namespace {

constexpr char kSeparator = '\x1f';
constexpr size_t kMostRanks = 8;  // named in one report

/// What a stage is called in a sentence: "rank 1 ...".
std::string doing(const Standing& standing) {
  std::string of_step = fmt::format("of step {}", standing.step);
  const bool says_why = is_waiting(standing.stage) || has_ended(standing.stage) || standing.detail.empty();
  if (!says_why) of_step += fmt::format(", waiting for {},", standing.detail);
  switch (standing.stage) {
    case Stage::kConstruction:
      return "is wrapping its model";
    case Stage::kBetweenSteps:
      return standing.step == 0 ? std::string("has not begun its first forward")
                                : fmt::format("is between steps, after step {}", standing.step);
    case Stage::kForward:
      return fmt::format("is in forward {}", of_step);
    case Stage::kBeforeBackward:
      return fmt::format("has not entered backward {}", of_step);
    case Stage::kBackward:
      return fmt::format("is in backward {}", of_step);
    case Stage::kBucketWait:
      return fmt::format("waits for {} {}", standing.detail, of_step);
    case Stage::kBufferWait:
      return standing.step == 0 ? std::string("waits for the other ranks to wrap their model")
                                : fmt::format("waits for buffers or a bucket plan in forward {}", of_step);
    case Stage::kGaveUp:
      return fmt::format("has given up in step {}", standing.step);
    case Stage::kFailed:
      return fmt::format("has failed in step {}", standing.step);
    case Stage::kLeft:
      return fmt::format("has dropped its model or ended after step {}", standing.step);
    case Stage::kLeftInStep:
      return fmt::format("has dropped its model or ended in the middle of step {}", standing.step);
  }
  return "";
}

std::string seconds(int64_t ms) { return fmt::format("{:.1f} s", static_cast<double>(ms) / 1000); }

std::string listed(const std::vector<std::string>& sentences) {
  std::string text;
  for (size_t i = 0; i < std::min(sentences.size(), kMostRanks); ++i) text += (i == 0 ? "" : "; ") + sentences[i];
  if (sentences.size() > kMostRanks) text += fmt::format("; and {} ranks more", sentences.size() - kMostRanks);
  return text;
}

}  // namespace

Standing Progress::look() const {
  const uint64_t place = place_.load(std::memory_order_relaxed);
  const Clock::time_point since{Clock::duration(since_.load(std::memory_order_relaxed))};
  Standing standing;
  standing.stage = static_cast<Stage>(place >> 56);
  standing.step = static_cast<uint32_t>(place);
  standing.since_ms = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - since).count();
  const std::lock_guard lock(texts_);
  if (has_ended(standing.stage)) standing.detail = failure_;
  if (standing.stage == Stage::kBucketWait) {
    const size_t bucket = (place >> 32) & kNoBucket;
    const bool known = labels_ && !labels_->empty();
    standing.detail = known && bucket < labels_->size() ? (*labels_)[bucket] : "the other ranks to agree on the pass";
    if (known && bucket >= labels_->size()) standing.detail += " that begins with " + labels_->front() + ",";
  }
  return standing;
}

std::string encode(const Standing& standing) {
  return fmt::format("{1}{0}{2}{0}{3}{0}{4}{0}{5}", kSeparator, standing.beat, static_cast<int>(standing.stage),
                     standing.step, standing.since_ms, standing.detail);
}

std::optional<Standing> decode(std::string_view line) {
  std::array<int64_t, 4> numbers{};
  for (int64_t& number : numbers) {
    const size_t end = line.find(kSeparator);
    if (end == std::string_view::npos) return std::nullopt;
    if (std::from_chars(line.data(), line.data() + end, number).ec != std::errc()) return std::nullopt;
    line.remove_prefix(end + 1);
  }
  if (numbers[1] < 0 || numbers[1] > static_cast<int64_t>(Stage::kLeftInStep)) return std::nullopt;
  return Standing{.beat = static_cast<uint64_t>(numbers[0]),
                  .stage = static_cast<Stage>(numbers[1]),
                  .step = static_cast<uint32_t>(numbers[2]),
                  .since_ms = numbers[3],
                  .detail = std::string(line)};
}

std::string sentence(int rank, const Standing& standing) {
  return fmt::format("rank {} {} since {}", rank, doing(standing), seconds(standing.since_ms));
}

std::chrono::milliseconds PeerWatch::silence(size_t rank, const Standing& line, TimePoint now) {
  std::optional<Sighting>& seen = seen_[rank];
  if (!seen || seen->beat != line.beat) seen = Sighting{line.beat, now};
  return std::chrono::duration_cast<std::chrono::milliseconds>(now - seen->changed);
}

PeerWatch::Judgement PeerWatch::judge(const Lines& lines, const Standing& mine, TimePoint now, Because because) {
  const auto dead_after = because == Because::kCollectiveFailed ? kSilence : threshold_;
  const bool surely = because != Because::kPerhapsWaiting;
  seen_.resize(lines.size());
  std::vector<std::string> missing;
  std::vector<std::string> elsewhere;  // wait as we do, but for something else
  std::string hopeless;
  std::string passed_on;  // the verdict of another rank
  Code code = Code::kPeerLost;
  Judgement judgement;
  bool all_wait = true;
  for (size_t r = 0; r < lines.size(); ++r) {
    const int rank = static_cast<int>(r);
    if (rank == rank_) continue;
    if (!lines[r]) {
      all_wait = false;
      missing.push_back(fmt::format(
          "rank {} has not reached the construction of its model (it may have failed before; see its log)", rank));
      continue;
    }
    const Standing& line = *lines[r];
    const std::string told = sentence(rank, line);
    if (line.stage == Stage::kFailed) {
      if (hopeless.empty()) {
        hopeless = fmt::format("rank {} has failed: {}", rank, line.detail);
        code = Code::kPeerFailed;
      }
      continue;
    }
    if (line.stage == Stage::kGaveUp && !line.detail.empty()) {
      all_wait = false;
      if (passed_on.empty()) passed_on = fmt::format("rank {} has given up: {}", rank, line.detail);
      continue;
    }
    if (has_left(line.stage)) {
      // What a device waits for, a rank that has left may have done.
      const bool done = line.step > mine.step || (line.step == mine.step && line.stage == Stage::kLeft);
      if ((surely || !done) && hopeless.empty()) hopeless = told;
      continue;
    }
    const auto quiet = silence(r, line, now);
    if (quiet >= kSilence) {
      judgement.silent = true;
      missing.push_back(fmt::format("rank {} has not been heard of for {} and has probably died; at last it {}", rank,
                                    seconds(quiet.count()), doing(line)));
      if (quiet >= dead_after && hopeless.empty()) hopeless = missing.back();
      continue;
    }
    all_wait = all_wait && is_waiting(line.stage) && line.since_ms >= threshold_.count();
    const bool here = line.stage == mine.stage && line.step == mine.step;
    if (!surely || !is_waiting(line.stage)) missing.push_back(told);
    if (surely && is_waiting(line.stage) && !here) elsewhere.push_back(told);
  }
  if (surely && hopeless.empty() && all_wait && !elsewhere.empty() && mine.since_ms >= threshold_.count()) {
    hopeless =
        fmt::format("all ranks wait, but not for the same: {}. Their collectives do not match", listed(elsewhere));
    code = Code::kMismatchedWaits;
  }
  // One that is silent, but not yet for long enough, is about to be the better reason.
  if (hopeless.empty() && !judgement.silent) hopeless = passed_on;
  const char* alone =
      mine.stage == Stage::kBufferWait && mine.step > 0
          ? " A forward that not every rank runs, such as an evaluation, must go through `model.module`."
          : "";
  const std::string here = fmt::format("[rank {}] {} since {}", rank_, doing(mine), seconds(mine.since_ms));
  if (!hopeless.empty()) {
    judgement.error = coded(
        code, fmt::format("{}, in vain: {}. The ranks are no longer in step; look at the log of the rank named here, "
                          "and restart the job from its last checkpoint.{}",
                          here, hopeless, alone));
  }
  missing.insert(missing.end(), elsewhere.begin(), elsewhere.end());
  const std::string nobody = hopeless.empty() ? "All other ranks are here too" : hopeless;
  judgement.report = coded(Code::kStalled, fmt::format("{}. {}.", here, missing.empty() ? nobody : listed(missing)));
  return judgement;
}

}  // namespace lockstep
