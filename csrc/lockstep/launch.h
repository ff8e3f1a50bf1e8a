// Which rank this process is, as the program that started it says in the environment.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace lockstep {

/// The place of one process among those that train together.
struct Launch {
  int rank = 0;
  int world_size = 1;
  std::optional<int> local_rank{};        ///< Among the processes of this machine; empty: nobody said.
  std::optional<int> local_world_size{};  ///< Processes of this machine.
  std::string master_addr{};              ///< Host of the store: name or address of the machine of rank 0.
  int master_port = 0;
  bool agent_store = false;     ///< Torchrun's agent serves the store; rank 0 must not start another one.
  std::string attempt = "0";    ///< Torchrun's count of restarts: each one meets apart from the others.
  std::string started_by = "";  ///< "torchrun", "mpirun", "srun" or "hand"; for messages.
};

/// Looks up an environment variable; empty where it is not set.
using Environment = std::function<std::optional<std::string>(const std::string& name)>;

/// That of this process.
[[nodiscard]] Environment process_environment();

/// Reads the variables of torchrun (or of a person who sets them by hand), else of mpirun (Open MPI, MPICH, Intel MPI),
/// else of srun (Slurm):
///
/// | here | torchrun, by hand | Open MPI | MPICH, Intel MPI | Slurm |
/// | --- | --- | --- | --- | --- |
/// | rank | RANK | OMPI_COMM_WORLD_RANK | PMI_RANK | SLURM_PROCID |
/// | world_size | WORLD_SIZE | OMPI_COMM_WORLD_SIZE | PMI_SIZE | SLURM_NTASKS |
/// | local_rank | LOCAL_RANK | OMPI_COMM_WORLD_LOCAL_RANK | MPI_LOCALRANKID | SLURM_LOCALID |
/// | local_world_size | LOCAL_WORLD_SIZE | OMPI_COMM_WORLD_LOCAL_SIZE | MPI_LOCALNRANKS | SLURM_NTASKS_PER_NODE |
///
/// MASTER_ADDR and MASTER_PORT are needed in a world of more than one process. mpirun and srun set neither: the address
/// is then 127.0.0.1 where all processes are on one machine, or the first host of Slurm's list, and the port is 29500,
/// or one derived from the number of Slurm's job. A rank started by hand with a loopback MASTER_ADDR has its rank as
/// local rank.
///
/// @param allow_single  without any launcher: a world of one process instead of an error.
/// @throws lockstep::Error  a variable is missing or makes no sense; the text names it and says how to launch.
[[nodiscard]] Launch read_launch(const Environment& environment, bool allow_single = false);

}  // namespace lockstep
