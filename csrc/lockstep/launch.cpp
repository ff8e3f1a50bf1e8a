#include "lockstep/launch.h"

#include <charconv>
#include <cstdlib>

#include "core/error.h"

namespace lockstep {
namespace {

constexpr std::string_view kHowToLaunch =
    "Start the program with `torchrun --standalone --nproc-per-node 2 --no-python ./program`, with mpirun or srun, or "
    "by "
    "hand, once for each rank: RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29500 ./program";

int whole(const std::string& name, const std::string& text, int lowest, int highest) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < lowest || value > highest) {
    fail(Code::kLaunch, "the environment variable {} is '{}', but must be a whole number from {} to {}. {}.", name,
         text, lowest, highest, kHowToLaunch);
  }
  return value;
}

/// The names under which one launcher says who a process is.
struct Names {
  const char* started_by;
  const char* rank;
  const char* world_size;
  const char* local_rank;
  const char* local_world_size;
  const char* only_with;  // set by this launcher only; null: rank or world size show it
};

constexpr Names kLaunchers[] = {
    {"hand", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", nullptr},
    {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", nullptr},
    {"mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", nullptr},
    // A shell inside a job has the variables of the job, but only srun makes processes of a step.
    {"srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", "SLURM_STEP_ID"},
};

bool speaks(const Names& names, const Environment& environment) {
  if (names.only_with != nullptr && !environment(names.only_with)) return false;
  return environment(names.rank) || environment(names.world_size);
}

std::string required(const Environment& environment, const std::string& name, std::string_view meaning) {
  if (auto value = environment(name); value && !value->empty()) return *value;
  fail(Code::kLaunch, "the environment variable {} ({}) is not set. {}.", name, meaning, kHowToLaunch);
}

bool is_loopback(const std::string& host) { return host == "localhost" || host == "::1" || host.starts_with("127."); }

/// "node[03-05,9],other" -> "node03".
std::string first_host(const std::string& list) {
  const size_t bracket = list.find_first_of("[,");
  if (bracket == list.npos || list[bracket] == ',') return list.substr(0, bracket);
  const size_t end = list.find_first_of("-,]", bracket);
  return list.substr(0, bracket) + list.substr(bracket + 1, end - bracket - 1);
}

void read_meeting_point(Launch& launch, const Environment& environment) {
  const bool own_machine = launch.local_world_size == launch.world_size;
  const auto hosts = environment("SLURM_STEP_NODELIST");
  if (auto address = environment("MASTER_ADDR"); address && !address->empty()) {
    launch.master_addr = *address;
  } else if (launch.started_by != "hand" && own_machine) {
    launch.master_addr = "127.0.0.1";
  } else if (launch.started_by == "srun" && hosts) {
    launch.master_addr = first_host(*hosts);
  } else {
    launch.master_addr = required(environment, "MASTER_ADDR", "the machine of rank 0");
  }
  if (const auto port = environment("MASTER_PORT"); port && !port->empty()) {
    launch.master_port = whole("MASTER_PORT", *port, 1, 65535);
  } else if (const auto job = environment("SLURM_JOB_ID"); launch.started_by == "srun" && job) {
    launch.master_port = 20'000 + whole("SLURM_JOB_ID", *job, 0, INT32_MAX) % 10'000;  // jobs share machines
  } else if (launch.started_by != "hand") {
    launch.master_port = 29'500;
  } else {
    launch.master_port =
        whole("MASTER_PORT", required(environment, "MASTER_PORT", "a free port of rank 0's machine"), 1, 65535);
  }
}

}  // namespace

Environment process_environment() {
  return [](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    return value == nullptr ? std::nullopt : std::optional<std::string>(value);
  };
}

Launch read_launch(const Environment& environment, bool allow_single) {
  const Names* names = nullptr;
  for (const Names& candidate : kLaunchers) {
    if (names == nullptr && speaks(candidate, environment)) names = &candidate;
  }
  if (names == nullptr && allow_single) return {.local_rank = 0, .local_world_size = 1, .started_by = "hand"};
  if (names == nullptr) names = kLaunchers;  // the error is about RANK

  Launch launch{.started_by = names->started_by};
  launch.world_size =
      whole(names->world_size, required(environment, names->world_size, "how many processes train"), 1, 1'000'000);
  launch.rank =
      whole(names->rank, required(environment, names->rank, "which of them this is, from 0"), 0, launch.world_size - 1);
  if (const auto size = environment(names->local_world_size)) {
    launch.local_world_size = whole(names->local_world_size, *size, 1, launch.world_size);
  }
  if (const auto rank = environment(names->local_rank)) {
    launch.local_rank = whole(names->local_rank, *rank, 0, launch.local_world_size.value_or(launch.world_size) - 1);
  }
  if (environment("TORCHELASTIC_RUN_ID")) launch.started_by = "torchrun";
  launch.agent_store = environment("TORCHELASTIC_USE_AGENT_STORE") == "True";
  launch.attempt = environment("TORCHELASTIC_RESTART_COUNT").value_or("0");
  if (launch.world_size > 1) read_meeting_point(launch, environment);
  if (!launch.local_rank && (launch.world_size == 1 || is_loopback(launch.master_addr))) {
    launch.local_rank = launch.rank;
    launch.local_world_size = launch.world_size;
  }
  return launch;
}

}  // namespace lockstep
