//! What can go wrong between ranks.

use std::time::Duration;

use crate::environment::Launcher;

/// Why ranks could not be connected, or a collective did not finish.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A variable of the environment is no number, or contradicts another.
    #[error("the environment says {name}={value}, which is no {expected}")]
    Environment {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// What it should be.
        expected: &'static str,
    },
    /// There is no MPI library.
    #[error(
        "the process was started by {launcher} as one of {size} ranks, and there is no MPI library: tried {tried}. Install \
         that MPI's runtime (Debian: libopenmpi3 or libmpich12), or name its library in KILN_MPI"
    )]
    NoLibrary {
        /// Who started the process.
        launcher: &'static str,
        /// Number of ranks.
        size: usize,
        /// Every name, with what the loader said.
        tried: String,
    },
    /// A library is no MPI library that is known.
    #[error("{library} is neither Open MPI nor MPICH, nor has it the interface of MPI 5: {reason}")]
    UnknownLibrary {
        /// Its name.
        library: String,
        /// What is missing.
        reason: String,
    },
    /// The MPI library does not know the ranks that the launcher started.
    #[error(
        "mixed world: {launcher} started rank {rank} of {size}, but {library} says that this is rank {found_rank} of \
         {found_size}. {}",
        remedy(launcher)
    )]
    MixedWorld {
        /// Who started the process.
        launcher: &'static str,
        /// The rank it gave.
        rank: usize,
        /// The number of ranks it gave.
        size: usize,
        /// The library.
        library: String,
        /// The rank that the library gives.
        found_rank: usize,
        /// The number of ranks that the library gives.
        found_size: usize,
    },
    /// Something that only GPUs exchange was asked of ranks that `torchrun` started.
    #[error(
        "{what} of {bytes} bytes: the {size} ranks that torchrun started exchange large data over NCCL, between \
         GPUs, and there is none here. On CPUs ranks are connected by MPI, which torchrun does not start: start them with \
         `mpirun -n {size} PROGRAM` (Debian: openmpi-bin), or with `srun --mpi=pmix PROGRAM` in a Slurm job"
    )]
    Torchrun {
        /// Number of ranks.
        size: usize,
        /// The collective.
        what: String,
        /// Bytes of its operand.
        bytes: usize,
    },
    /// Ranks that `torchrun` started are connected through NCCL, and this one has no GPU for it.
    #[error(
        "torchrun started {size} ranks, which are connected through NCCL, between GPUs: {reason}. On CPUs ranks are \
         connected by MPI: start them with `mpirun -n {size}` or `srun`"
    )]
    NoGpu {
        /// Number of ranks.
        size: usize,
        /// What is missing.
        reason: String,
    },
    /// The step is on another GPU than the one through which the rank is connected.
    #[error(
        "rank {rank} is connected through cuda:{connected}, but its step is on cuda:{used}: each rank takes the GPU that \
         kiln::distributed::device(&world) says; `kiln train` does so with `--device cuda`, without a number"
    )]
    OtherGpu {
        /// The rank.
        rank: usize,
        /// The GPU that connects it.
        connected: usize,
        /// That of its step.
        used: usize,
    },
    /// The ranks cannot meet at the address that the launcher gave them.
    #[error("{what} failed: {reason}")]
    Meeting {
        /// The meeting.
        what: String,
        /// Why.
        reason: String,
    },
    /// Ranks that meet disagree about who they are.
    #[error("{what}: {reason}; all ranks must be started with the same number of ranks")]
    Worlds {
        /// The meeting.
        what: String,
        /// In what.
        reason: String,
    },
    /// MPI does not come back from its start.
    #[error(
        "rank {rank} waited {} s for MPI to connect {size} ranks: one of them did not start, or died meanwhile",
        waited.as_secs_f32()
    )]
    Start {
        /// The own rank.
        rank: usize,
        /// Number of ranks.
        size: usize,
        /// For how long.
        waited: Duration,
    },
    /// Other ranks have ended.
    #[error("rank {rank}: {} ended, and took no part in {what}", ranks(missing))]
    Gone {
        /// The own rank.
        rank: usize,
        /// Who has ended.
        missing: Vec<usize>,
        /// The collective.
        what: String,
    },
    /// All ranks wait for a collective that does not end.
    #[error("rank {rank} waited {} s for {what}, and so did all other ranks", waited.as_secs_f32())]
    Stuck {
        /// The own rank.
        rank: usize,
        /// For how long.
        waited: Duration,
        /// The collective.
        what: String,
    },
    /// A file is no NCCL that does.
    #[error("{library} is no NCCL that Kiln can call: {reason}")]
    NcclLibrary {
        /// The file.
        library: String,
        /// What is missing.
        reason: String,
    },
    /// A function of NCCL failed.
    #[error("rank {rank}: {function} failed with code {code} ({meaning}){about}")]
    Nccl {
        /// The own rank.
        rank: usize,
        /// The function.
        function: &'static str,
        /// What it returned, or what the library reported later.
        code: i32,
        /// What it means, in the library's words.
        meaning: String,
        /// What it was about, in words; may be empty.
        about: String,
    },
    /// A function of MPI failed.
    #[error("rank {rank}: {function} failed with code {code}{about}")]
    Mpi {
        /// The own rank.
        rank: usize,
        /// The function.
        function: &'static str,
        /// What it returned.
        code: i32,
        /// What it was about, in words; may be empty.
        about: String,
    },
    /// Another rank did not take part in time.
    #[error(
        "rank {rank} waited {} s for {}, which did not take part in {what}: it has died, hangs, or runs another program",
        waited.as_secs_f32(), ranks(missing)
    )]
    Timeout {
        /// The own rank.
        rank: usize,
        /// Who is missing.
        missing: Vec<usize>,
        /// For how long.
        waited: Duration,
        /// The collective.
        what: String,
    },
    /// Another rank does something else.
    #[error(
        "rank {rank} is at {own}, but rank {other} is at {theirs}: {}",
        why(own, theirs)
    )]
    Differs {
        /// A rank: the own one if it is one of two that differ.
        rank: usize,
        /// The other rank.
        other: usize,
        /// What the first one does.
        own: String,
        /// What the other one does.
        theirs: String,
    },
    /// Ranks compiled different steps ([`crate::World::agree`]).
    #[error("rank {other} differs from rank {with} in {fact}: it has {theirs}, rank {with} has {first}")]
    Disagreement {
        /// The rank that differs.
        other: usize,
        /// The rank that it was compared with.
        with: usize,
        /// In what.
        fact: String,
        /// What it has.
        theirs: String,
        /// What the rank that it was compared with has.
        first: String,
    },
    /// The operands of a collective do not fit.
    #[error("{0}")]
    Operands(String),
    /// An earlier collective failed, and nothing connects the ranks any more.
    #[error("the ranks are no longer connected: {0}")]
    Broken(String),
}

/// What to do where a launcher and a library do not know each other.
fn remedy(launcher: &str) -> &'static str {
    match launcher == Launcher::Slurm.name() {
        true => {
            "srun gave the library no way to the other ranks: start them with `srun --mpi=pmix` for Open MPI, `srun --mpi=pmi2` \
             for MPICH (`srun --mpi=list` shows which there are), or with `mpirun` inside the job"
        }
        false => "The library belongs to another MPI than the launcher; name the right one in KILN_MPI",
    }
}

/// Some ranks, in words.
fn ranks(list: &[usize]) -> String {
    let mut numbers: Vec<String> = list.iter().take(8).map(ToString::to_string).collect();
    if list.len() > 8 {
        numbers.push(format!("{} more", list.len() - 8));
    }
    match list {
        [_] => format!("rank {}", numbers.concat()),
        _ => format!("ranks {}", numbers.join(", ")),
    }
}

/// The beginning of what a rank does that has ended.
pub(crate) const END: &str = "its end";

/// Why two ranks do not do the same.
fn why(own: &str, theirs: &str) -> &'static str {
    match [own, theirs].iter().any(|it| it.starts_with(END)) {
        true => "it ended before the others did, and what it said itself has the cause",
        false => {
            "the ranks do not run the same step (another program, another set of parameters that have a gradient, \
             another learning rate, or, with synchronised batch norm, a batch of another size)"
        }
    }
}
