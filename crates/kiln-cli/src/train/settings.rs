//! What `kiln train` is to do, from its command line and a config.

use std::path::{Path, PathBuf};

use super::place::locate;
use crate::CliError;
use crate::args::{TrainArguments, autocast_name};
use crate::config::{Config, DataSource, Decoding};

/// What a run is to do.
#[derive(Debug)]
pub(super) struct Settings {
    /// The config, with what the command line changes.
    pub(super) config: Config,
    /// Of a resumed run its folder, and the checkpoint if there is one.
    pub(super) folder: Option<PathBuf>,
    pub(super) from: Option<PathBuf>,
}

impl Settings {
    pub(super) fn of(arguments: &TrainArguments) -> Result<Self, CliError> {
        let (folder, from) = match &arguments.resume {
            Some(place) => {
                let (folder, from) = locate(place)?;
                // The command that begins a run may be the one that goes on with it, too.
                if let Some(out) = arguments.out.as_ref().filter(|out| !is_same(out, &folder)) {
                    return Err(CliError::Branch {
                        resume: place.clone(),
                        out: out.clone(),
                    });
                }
                (Some(folder), from)
            }
            None => (None, None),
        };
        let mut config = match (&arguments.config, &folder) {
            (Some(path), _) => Config::read(path, &arguments.set)?,
            (None, Some(folder)) => Config::read(&folder.join("config.toml"), &arguments.set)?,
            (None, None) => return Err(CliError::Usage("give --config FILE, or --resume DIR".to_owned())),
        };
        config.train.steps = arguments.steps.unwrap_or(config.train.steps);
        if let Some(backend) = arguments.backend {
            config.train.backend = backend.name().to_owned();
        }
        if let Some(device) = &arguments.device {
            config.train.device.clone_from(device);
        }
        if let Some(dtype) = arguments.autocast {
            config.train.autocast = autocast_name(dtype).to_owned();
        }
        if let Some(weights) = &arguments.weights {
            config.train.weights.clone_from(weights);
        }
        Ok(Self { config, folder, from })
    }
}

/// Whether two paths are of one folder.
fn is_same(one: &Path, other: &Path) -> bool {
    let [one, other] = [one, other].map(|path| path.canonicalize().ok());
    one.is_some() && one == other
}

/// Whether a GPU will be asked to decode the pictures of this run. Not if there is no such run.
#[must_use]
pub fn decodes_on_device(arguments: &TrainArguments) -> bool {
    Settings::of(arguments).is_ok_and(|Settings { config, .. }| {
        config.data.source == DataSource::Images
            && config.data.decoding != Decoding::Host
            && config.train.device.starts_with("cuda")
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Arguments, Command};

    #[test]
    fn pictures_are_decoded_on_a_device_that_trains_on_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.toml");
        let text = include_str!("../../../../configs/resnet50-imagenet.toml");
        std::fs::write(&path, text).unwrap();
        let decodes = |more: &[&str]| {
            let words = ["kiln", "train", "--config", path.to_str().unwrap()];
            let arguments = Arguments::try_parse_from(words.iter().chain(more)).unwrap();
            let Command::Train(arguments) = arguments.command else {
                panic!()
            };
            decodes_on_device(&arguments)
        };
        assert!(decodes(&["--device", "cuda:1"]));
        assert!(!decodes(&["--device", "cpu"]));
        assert!(!decodes(&["--device", "cuda", "--set", "data.decoding=\"host\""]));
        let shapes = [
            "--device",
            "cuda",
            "--set",
            "data.source=\"shapes\"",
            "--set",
            "data.paths=[]",
        ];
        assert!(!decodes(&shapes));
        std::fs::remove_file(&path).unwrap();
        assert!(!decodes(&["--device", "cuda"]));
    }
}
