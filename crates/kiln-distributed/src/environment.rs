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

use crate::error::Error;

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

    /// Reads the environment, through `variable`.
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
            (
                Launcher::Slurm,
                ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS"],
                ["SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"],
            ),
            (
                Launcher::Torchrun,
                ["RANK", "WORLD_SIZE"],
                ["LOCAL_RANK", "LOCAL_WORLD_SIZE"],
            ),
        ];
        let there = |names: &[&str; 2]| names.iter().all(|name| variable(name).is_some());
        let Some((launcher, global, local)) = launchers.into_iter().find(|(_, global, _)| there(global))
        else {
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
        let local_rank = number(local[0]).unwrap_or(0);
        Ok(Self {
            launcher,
            rank,
            size,
            local_rank,
            local_size: number(local[1]).unwrap_or(1).max(local_rank + 1),
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
