//! A run on several ranks: `mpirun -n 4 kiln train --config ..`.
//!
//! `train.batch_size` counts the examples of all ranks together. Every rank goes through the same batches, in
//! the order of a run on one rank, and reads, decodes and augments its share of each. So the place in the
//! data is the same on all ranks, and a checkpoint goes on with any number of them. Rank 0 prepares the folder
//! of the run, logs and saves; the others wait for the folder, and evaluate along with it so that nobody
//! waits.
//!
//! An example that cannot be read is an error on the rank that has it in its share. That rank ends, and the
//! others notice it as they notice any rank that ends early.

use std::path::PathBuf;
use std::time::Duration;

use kiln::distributed::{self, Error, Options, World};
use kiln_graph::DType;
use kiln_hub::data::Share;

use super::state::State;
use crate::config::Config;
use crate::error::CliError;

/// The ranks of a run; one, most often.
#[derive(Debug)]
pub struct Ranks {
    world: World,
}

impl Ranks {
    /// Connects the ranks that the process was started as one of.
    ///
    /// # Errors
    ///
    /// [`CliError::Ranks`] if they cannot be connected, or have different configs; [`CliError::Config`] if a
    /// batch does not divide among them.
    pub fn connect(config: &Config) -> Result<Self, CliError> {
        let timeout = Duration::try_from_secs_f64(config.distributed.timeout_seconds);
        let timeout = timeout.map_err(|error| CliError::config("distributed.timeout_seconds", error))?;
        let world = distributed::init_with(Options {
            timeout,
            ..Options::default()
        })?;
        let keys = keys(config);
        let facts = keys.iter().map(|(name, value)| (name.as_str(), value.clone()));
        world.agree(&facts.collect::<Vec<_>>())?;
        divides(config.train.batch_size, world.size())?;
        Ok(Self { world })
    }

    /// Makes sure that all ranks go on from the same checkpoint, or none does from any.
    ///
    /// # Errors
    ///
    /// [`CliError::Start`] if they do not; [`CliError::Ranks`] if another rank ended.
    pub fn agree_on(&self, state: Option<&State>) -> Result<(), CliError> {
        let facts = start(state);
        self.world
            .agree(&facts)
            .map_err(|source| match matches!(source, Error::Disagreement { .. }) {
                true => CliError::Start(source),
                false => source.into(),
            })
    }

    /// All ranks.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// The number of this rank.
    pub fn rank(&self) -> usize {
        self.world.rank()
    }

    /// What this rank prepares and trains of each batch.
    pub fn share(&self) -> Share {
        Share {
            rank: self.world.rank(),
            ranks: self.world.size(),
        }
    }

    /// Whether there is more than one rank.
    pub fn are_several(&self) -> bool {
        self.world.size() > 1
    }

    /// Whether this is the rank that logs and saves.
    pub fn is_first(&self) -> bool {
        self.world.is_first()
    }

    /// `config` for this rank: where it names GPUs without a number, each rank of a machine takes its own.
    pub fn config(&self, mut config: Config) -> Config {
        if self.world.size() > 1 && config.train.device == "cuda" {
            let own = distributed::device(&self.world).place().gpu();
            config.train.device = format!("cuda:{}", own.unwrap_or(self.world.local_rank()));
        }
        config
    }

    /// Threads of this rank's steps: [`threads`].
    pub fn threads(&self) -> usize {
        threads(&self.world)
    }

    /// The folder of the run, on every rank but the first: waits until that has prepared it. `own` is rank
    /// 0's.
    ///
    /// # Errors
    ///
    /// [`CliError::Ranks`] if rank 0 ended.
    pub fn folder(&self, own: PathBuf) -> Result<PathBuf, CliError> {
        match self.is_first() {
            true => Ok(own),
            false => self.exchange(own),
        }
    }

    /// Lets the other ranks go on, when the first one has prepared the folder.
    ///
    /// # Errors
    ///
    /// [`CliError::Ranks`] if another rank ended.
    pub fn prepared(&self, folder: &std::path::Path) -> Result<(), CliError> {
        match self.is_first() {
            true => self.exchange(folder.to_path_buf()).map(drop),
            false => Ok(()),
        }
    }

    /// The path that rank 0 has.
    fn exchange(&self, own: PathBuf) -> Result<PathBuf, CliError> {
        let mut bytes = own.to_string_lossy().into_owned().into_bytes();
        let mut length = (bytes.len() as u64).to_le_bytes();
        self.world.broadcast_patiently(0, &mut length)?;
        bytes.resize(u64::from_le_bytes(length) as usize, 0);
        self.world.broadcast(0, &mut bytes)?;
        Ok(PathBuf::from(String::from_utf8_lossy(&bytes).into_owned()))
    }

    /// Each rank's own random numbers, from rank 0's generator.
    ///
    /// # Errors
    ///
    /// [`CliError::Ranks`] if another rank ended.
    pub fn share_random(&self) -> Result<(), CliError> {
        Ok(distributed::share_random(&self.world)?)
    }

    /// Whether any rank says so.
    ///
    /// # Errors
    ///
    /// [`CliError::Ranks`] if another rank ended.
    pub fn any(&self, own: bool) -> Result<bool, CliError> {
        if self.world.size() == 1 {
            return Ok(own);
        }
        let mut count = u32::from(own).to_ne_bytes();
        self.world.all_reduce(DType::U32, false, &mut count)?;
        Ok(u32::from_ne_bytes(count) > 0)
    }

    /// [`Ranks::any`], where one rank may be busy for long before it answers, as rank 0 with a checkpoint.
    ///
    /// # Errors
    ///
    /// [`CliError::Ranks`] if another rank ended.
    pub fn any_patiently(&self, own: bool) -> Result<bool, CliError> {
        match self.world.agree(&[("what it says", own.to_string())]) {
            Ok(()) => Ok(own),
            // One of them says `true`.
            Err(Error::Disagreement { .. }) => Ok(true),
            Err(error) => Err(error.into()),
        }
    }
}

/// What ranks that go on from the same checkpoint have in common.
fn start(state: Option<&State>) -> [(&'static str, String); 3] {
    let none = || "none".to_owned();
    let place = |state: &State| serde_json::to_string(&state.data).unwrap_or_default();
    let weights = |state: &State| state.files.get("model.safetensors").cloned();
    [
        (
            "the step of the checkpoint that it starts from",
            state.map_or_else(none, |state| state.step.to_string()),
        ),
        (
            "the place in the data of that checkpoint",
            state.map_or_else(none, place),
        ),
        (
            "the SHA-256 of the weights of that checkpoint",
            state.and_then(weights).unwrap_or_else(none),
        ),
    ]
}

/// The keys of a config that must be the same on all ranks, with their values. Each rank may have a device of
/// its own.
fn keys(config: &Config) -> Vec<(String, String)> {
    fn collect(path: &str, value: &serde_json::Value, found: &mut Vec<(String, String)>) {
        match value {
            serde_json::Value::Object(map) => {
                for (key, value) in map {
                    let path = if path.is_empty() {
                        key.clone()
                    } else {
                        format!("{path}.{key}")
                    };
                    collect(&path, value, found);
                }
            }
            value => found.push((format!("its config's `{path}`"), value.to_string())),
        }
    }
    let mut config = config.clone();
    config.train.device = String::new();
    // By way of the text, in which numbers of 32 bits are as they were written.
    let text = serde_json::to_string(&config).unwrap_or_default();
    let mut found = Vec::new();
    collect("", &serde_json::from_str(&text).unwrap_or_default(), &mut found);
    found
}

/// Threads of a rank's steps: its share of the CPUs that it may use ([`World::threads`]); 0, for all, where
/// it is alone.
pub fn threads(world: &World) -> usize {
    match world.size() {
        1 => 0,
        _ => world.threads(),
    }
}

/// That the examples of a batch divide among the ranks.
///
/// # Errors
///
/// [`CliError::Config`] if they do not.
pub fn divides(batch: usize, ranks: usize) -> Result<(), CliError> {
    match batch.is_multiple_of(ranks) {
        true => Ok(()),
        false => Err(CliError::config(
            "train.batch_size",
            format!(
                "{batch} examples do not divide among {ranks} ranks; it counts those of all ranks together"
            ),
        )),
    }
}
