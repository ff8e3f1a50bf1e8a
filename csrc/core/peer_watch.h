// What a waiting rank can conclude from the lines that all ranks write about themselves.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/progress.h"

namespace lockstep {

/// One line for the store, and back; empty when the text is no such line.
[[nodiscard]] std::string encode(const Standing& standing);
[[nodiscard]] std::optional<Standing> decode(std::string_view line);

/// "rank 1 is in forward of step 41 since 12.0 s".
[[nodiscard]] std::string sentence(int rank, const Standing& standing);

/// Follows the ranks of one group through their lines. No clocks are compared between machines: a rank is silent when
/// its line has not changed between our own looks. Not thread-safe.
class PeerWatch {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  using Lines = std::vector<std::optional<Standing>>;  // by rank; empty: that rank has never written

  /// Lines change every second; a rank that is silent for this long is presumed dead.
  static constexpr std::chrono::milliseconds kSilence{3500};

  /// Why we ask.
  enum class Because {
    kWaiting,
    kCollectiveFailed,  ///< Silence needs no threshold to be the reason.
    kPerhapsWaiting,    ///< A device is behind, or a call takes long; who has left may have done its part.
  };

  struct Judgement {
    std::string error;    ///< Waiting is hopeless, and why; empty: it is not. With its code.
    std::string report;   ///< Who is missing, as far as we know.
    bool silent = false;  ///< Somebody is presumed dead.
  };

  /// @param threshold  how long a wait, or a silence, is nobody's business.
  PeerWatch(int rank, std::chrono::milliseconds threshold) : rank_(rank), threshold_(threshold) {}

  /// Takes note of what all ranks say at `now`; `mine` is our own standing.
  Judgement judge(const Lines& lines, const Standing& mine, TimePoint now, Because because = Because::kWaiting);

 private:
  struct Sighting {
    uint64_t beat = 0;
    TimePoint changed;
  };

  [[nodiscard]] std::chrono::milliseconds silence(size_t rank, const Standing& line, TimePoint now);

  int rank_;
  std::chrono::milliseconds threshold_;
  std::vector<std::optional<Sighting>> seen_;
};

}  // namespace lockstep
