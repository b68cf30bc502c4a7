//! Who started the process, and which rank it is.
//!
//! | started by | rank, number of ranks | on its machine |
//! |---|---|---|
//! | Open MPI's `mpirun` | `OMPI_COMM_WORLD_RANK`, `_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK`, `_LOCAL_SIZE` |
//! | MPICH's `mpirun` | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` |
//! | Slurm's `srun` | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` | `SLURM_LOCALID`, `SLURM_STEP_TASKS_PER_NODE` |
//! | `torchrun` | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` |
//!
//! The first line whose two variables are there counts: an `mpirun` inside a Slurm job is that `mpirun`.
//! `torchrun` goes before all of them if it left [`ELASTIC`]: its ranks inherit the variables of the `srun`
//! or `mpirun` that it was started by, once on each machine.
//!
//! `srun --mpi=pmi2` sets `PMI_RANK` and `PMI_SIZE` but no `MPI_LOCALRANKID`. Where a launcher's own
//! variables do not say which rank of its machine a process is, those of Cray's PMI do, or Slurm's, if the
//! rank is the one of the Slurm step.

use crate::error::Error;

/// What `torchrun` leaves in the environment of its ranks, and nobody else does.
const ELASTIC: &str = "TORCHELASTIC_RUN_ID";

/// Rank and number of ranks of a Slurm step.
const SLURM: [&str; 2] = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS"];

/// The same among the tasks of the step on one machine.
const SLURM_LOCAL: [&str; 2] = ["SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"];

/// Rank and number of ranks on one machine, in the words of Cray's PMI.
const PMI_LOCAL: [&str; 2] = ["PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"];

/// Who started the process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Launcher {
    /// Nobody who starts ranks: the process is alone.
    Alone,
    /// `mpirun` of Open MPI.
    OpenMpi,
    /// `mpirun` of MPICH or of an MPI that follows it.
    Mpich,
    /// `srun`.
    Slurm,
    /// `torchrun`.
    Torchrun,
}

impl Launcher {
    /// The name that messages use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Alone => "nobody",
            Self::OpenMpi => "Open MPI's mpirun",
            Self::Mpich => "MPICH's mpirun",
            Self::Slurm => "srun",
            Self::Torchrun => "torchrun",
        }
    }
}

/// Which rank a process is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Place {
    /// Who says so.
    pub launcher: Launcher,
    /// Its number, below `size`.
    pub rank: usize,
    /// Number of ranks, at least 1.
    pub size: usize,
    /// Its number among the ranks of its machine; also the number of the GPU that it should take.
    pub local_rank: usize,
    /// Number of ranks on its machine.
    pub local_size: usize,
}

impl Place {
    /// A process that is alone.
    pub const ALONE: Self = Self {
        launcher: Launcher::Alone,
        rank: 0,
        size: 1,
        local_rank: 0,
        local_size: 1,
    };

    /// Reads the environment, through `variable`. A rank of several for which nothing says which one of its
    /// machine it is counts as the first one there, with a warning: a launcher that Kiln does not know may
    /// start one rank on each machine.
    ///
    /// # Errors
    /// [`Error::Environment`] if a rank is no number, or not below the number of ranks.
    pub fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Self, Error> {
        let launchers = [
            (
                Launcher::OpenMpi,
                ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"],
                ["OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"],
            ),
            (
                Launcher::Mpich,
                ["PMI_RANK", "PMI_SIZE"],
                ["MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
            ),
            (Launcher::Slurm, SLURM, SLURM_LOCAL),
            (
                Launcher::Torchrun,
                ["RANK", "WORLD_SIZE"],
                ["LOCAL_RANK", "LOCAL_WORLD_SIZE"],
            ),
        ];
        let there = |names: &[&str; 2]| names.iter().all(|name| variable(name).is_some());
        let is_elastic = variable(ELASTIC).is_some();
        let nearest = |(launcher, global, _): &(Launcher, [&str; 2], _)| {
            is_elastic && *launcher == Launcher::Torchrun && there(global)
        };
        let found = launchers.iter().find(|&line| nearest(line));
        let found = found.or_else(|| launchers.iter().find(|(_, global, _)| there(global)));
        let Some(&(launcher, global, local)) = found else {
            return Ok(Self::ALONE);
        };
        let wrong = |name, expected| Error::Environment {
            name,
            value: variable(name).unwrap_or_default(),
            expected,
        };
        let number = |name: &'static str| {
            let text = variable(name)?;
            // Slurm writes `4(x2),3`: so many on the first machines.
            let digits = text.trim().split(|c: char| !c.is_ascii_digit()).next()?;
            digits.parse::<usize>().ok()
        };
        let [rank_name, size_name] = global;
        let size = number(size_name).filter(|&size| size > 0);
        let size = size.ok_or_else(|| wrong(size_name, "number of ranks"))?;
        let rank = number(rank_name).filter(|&rank| rank < size);
        let rank = rank.ok_or_else(|| wrong(rank_name, "number below the number of ranks"))?;
        let own = local[0];
        let mut known = vec![local];
        if launcher == Launcher::Mpich {
            known.push(PMI_LOCAL);
        }
        // Where `mpirun` was started in a step of Slurm, the step's tasks are others than the ranks.
        if SLURM.map(number) == [Some(rank), Some(size)] {
            known.push(SLURM_LOCAL);
        }
        let mut known = known.into_iter();
        let local = known.find_map(|[rank, size]| Some((number(rank)?, number(size))));
        if local.is_none() && size > 1 {
            kiln_log::warn!(
                target: "kiln",
                "{} started rank {rank} of {size}, and no variable says which one of its machine it is: it takes \
                 itself for the first, and the first GPU. Set {} if there are several ranks on a machine",
                launcher.name(), own
            );
        }
        let (local_rank, local_size) = local.unwrap_or((0, None));
        Ok(Self {
            launcher,
            rank,
            size,
            local_rank,
            local_size: local_size.unwrap_or(1).max(local_rank + 1),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Place, Error> {
        Place::read(|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn nobody_means_one_rank() {
        assert_eq!(read(&[]), Ok(Place::ALONE));
        // A batch script of Slurm is no task of a step.
        assert_eq!(
            read(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")]),
            Ok(Place::ALONE)
        );
    }

    #[test]
    fn each_launcher_is_known() {
        let place = |launcher, local_size| Place {
            launcher,
            rank: 3,
            size: 8,
            local_rank: 1,
            local_size,
        };
        let ompi = [
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "8"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
        ];
        assert_eq!(read(&ompi), Ok(place(Launcher::OpenMpi, 4)));
        let slurm = [
            ("SLURM_PROCID", "3"),
            ("SLURM_STEP_NUM_TASKS", "8"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_STEP_TASKS_PER_NODE", "4(x2)"),
        ];
        assert_eq!(read(&slurm), Ok(place(Launcher::Slurm, 4)));
        let mpich = [("PMI_RANK", "3"), ("PMI_SIZE", "8"), ("MPI_LOCALRANKID", "1")];
        assert_eq!(read(&mpich), Ok(place(Launcher::Mpich, 2)));
        let torch = [
            ("RANK", "3"),
            ("WORLD_SIZE", "8"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "8"),
        ];
        assert_eq!(read(&torch), Ok(place(Launcher::Torchrun, 8)));
        // The launcher that is nearest to the process counts.
        let both: Vec<_> = slurm.into_iter().chain(ompi).collect();
        assert_eq!(read(&both).map(|place| place.launcher), Ok(Launcher::OpenMpi));
    }

    #[test]
    fn torchrun_inside_a_step_of_another_launcher_counts() {
        let torch = [
            ("RANK", "3"),
            ("WORLD_SIZE", "8"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "2"),
        ];
        let slurm = [("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1")];
        let ompi = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "4")];
        let mpich = [("PMI_RANK", "1"), ("PMI_SIZE", "4")];
        for outer in [slurm, ompi, mpich] {
            let both = [&torch[..], &outer].concat();
            let launcher = |variables: &[_]| read(variables).map(|place| place.launcher);
            assert_ne!(launcher(&both), Ok(Launcher::Torchrun), "{outer:?}");
            let elastic = [&both[..], &[("TORCHELASTIC_RUN_ID", "none")]].concat();
            let expected = Place {
                launcher: Launcher::Torchrun,
                rank: 3,
                size: 8,
                local_rank: 1,
                local_size: 2,
            };
            assert_eq!(read(&elastic), Ok(expected), "{outer:?}");
            // What a program that torchrun started starts in turn is no rank of torchrun's, if it has none.
            let other = [&outer[..], &[("TORCHELASTIC_RUN_ID", "none")]].concat();
            assert_eq!(launcher(&other), launcher(&outer));
        }
    }

    #[test]
    fn the_rank_on_a_machine_is_known_from_whoever_says_it() {
        let local = |variables: &[(&str, &str)]| {
            let pmi = [("PMI_RANK", "5"), ("PMI_SIZE", "8")];
            let place = read(&[&pmi, variables].concat()).expect("it makes sense");
            assert_eq!((place.launcher, place.rank, place.size), (Launcher::Mpich, 5, 8));
            (place.local_rank, place.local_size)
        };
        let own = [("MPI_LOCALRANKID", "2"), ("MPI_LOCALNRANKS", "3")];
        let cray = [("PMI_LOCAL_RANK", "1"), ("PMI_LOCAL_SIZE", "4")];
        let slurm = [
            ("SLURM_PROCID", "5"),
            ("SLURM_STEP_NUM_TASKS", "8"),
            ("SLURM_LOCALID", "3"),
            ("SLURM_STEP_TASKS_PER_NODE", "5(x2)"),
        ];
        assert_eq!(local(&[&slurm[..], &cray, &own].concat()), (2, 3));
        assert_eq!(local(&[&slurm[..], &cray].concat()), (1, 4));
        // `srun --mpi=pmi2`.
        assert_eq!(local(&slurm), (3, 5));
        // Inherited from the step that `mpirun` runs in.
        let outer = [
            ("SLURM_PROCID", "0"),
            ("SLURM_STEP_NUM_TASKS", "1"),
            ("SLURM_LOCALID", "3"),
        ];
        assert_eq!(local(&outer), (0, 1));
        assert_eq!(local(&[]), (0, 1));
    }

    #[test]
    fn nonsense_is_refused() {
        let error = read(&[("PMI_RANK", "2"), ("PMI_SIZE", "2")]).expect_err("there is no rank 2 of 2");
        assert_eq!(
            error.to_string(),
            "the environment says PMI_RANK=2, which is no number below the number of ranks"
        );
        assert!(read(&[("RANK", "0"), ("WORLD_SIZE", "many")]).is_err());
        assert!(read(&[("RANK", "0"), ("WORLD_SIZE", "0")]).is_err());
    }
}
