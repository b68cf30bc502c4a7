//! The compilations of a build: every object once on a machine.
//!
//! Ranks of a training whose steps differ a little start together, and so do tests of one suite: they would
//! compile the same files at the same time. A build leaves alone what another process is compiling, goes on
//! with the next file, and takes the other's object at the end.

use std::collections::VecDeque;
use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use kiln_store::{Key, Lock};

use super::objects::{Claim, Objects};
use super::{Toolchain, object_name};
use crate::error::{CpuError, Result};

/// Between two looks at whether another process has finished.
const PAUSE: Duration = Duration::from_millis(5);

/// One source of a build.
#[derive(Debug)]
pub(super) struct Unit {
    /// Of everything that its object depends on.
    pub(super) key: Key,
    /// Its file.
    pub(super) name: String,
    /// What the compiler is started with.
    pub(super) arguments: Vec<String>,
}

/// A compiler process.
struct Running {
    unit: Unit,
    lock: Option<Lock>,
    process: Child,
}

impl Toolchain {
    /// Makes the objects of `units` in `folder`, at most `jobs` of them at once, and stops at the first
    /// failure. Returns how many were compiled: `objects` had the others, or other processes made them.
    pub(super) fn compile(
        &self,
        units: Vec<Unit>,
        folder: &Path,
        objects: &Objects,
        jobs: usize,
    ) -> Result<usize> {
        let mut compiled = 0;
        let mut waiting = VecDeque::from(units);
        // What other processes compile, and since when there has been nothing else to do.
        let mut theirs = VecDeque::new();
        let mut idle: Option<Instant> = None;
        let mut running: VecDeque<Running> = VecDeque::new();
        let mut result = Ok(());
        loop {
            while result.is_ok()
                && running.len() < jobs
                && let Some(unit) = waiting.pop_front()
            {
                let lock = match objects.claim(&unit.key) {
                    Claim::Made(object) => {
                        result = write(folder, &object_name(&unit.name), &object);
                        continue;
                    }
                    Claim::Theirs if idle.is_none_or(|since| since.elapsed() < objects.patience) => {
                        theirs.push_back(unit);
                        continue;
                    }
                    Claim::Theirs => None,
                    Claim::Ours(lock) => lock,
                };
                match self.start(&unit.arguments, folder) {
                    Ok(process) => running.push_back(Running { unit, lock, process }),
                    Err(error) => result = Err(error),
                }
            }
            // The oldest process first. The pipe of a younger one holds far more than a compiler with `-w`
            // prints before it fails; to drain that pipe later delays the younger one, not the result.
            if let Some(Running { unit, lock, process }) = running.pop_front() {
                idle = None;
                let object = self.finish(&unit.name, process, folder).and_then(|()| {
                    let path = folder.join(object_name(&unit.name));
                    fs::read(&path).map_err(CpuError::io("reading", path))
                });
                match object {
                    Ok(object) => {
                        objects.insert(unit.key, &unit.name, object, lock);
                        compiled += 1;
                    }
                    Err(error) => result = result.and(Err(error)),
                }
            } else if result.is_err() || theirs.is_empty() {
                return result.map(|()| compiled);
            } else {
                idle.get_or_insert_with(Instant::now);
                std::thread::sleep(PAUSE);
                waiting.append(&mut theirs);
            }
        }
    }

    /// Starts the compiler in `folder`.
    pub(super) fn start(&self, arguments: &[String], folder: &Path) -> Result<Child> {
        self.invoke(arguments)
            .current_dir(folder)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            // A fixed language, so that messages do not depend on the user's locale.
            .env("LC_ALL", "C")
            .spawn()
            .map_err(CpuError::io("starting", self.command()))
    }

    /// Waits for a process that makes something of `file`, which is in `folder`.
    pub(super) fn finish(&self, file: &str, process: Child, folder: &Path) -> Result<()> {
        let output = process
            .wait_with_output()
            .map_err(CpuError::io("waiting for", self.command()))?;
        if output.status.success() {
            return Ok(());
        }
        Err(CpuError::Compile {
            compiler: self.command(),
            file: file.to_owned(),
            status: output.status.to_string(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
            folder: folder.to_owned(),
        })
    }
}

/// Writes a file of a build.
pub(super) fn write(folder: &Path, name: &str, contents: &[u8]) -> Result<()> {
    let path = folder.join(name);
    fs::write(&path, contents).map_err(CpuError::io("writing", path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::{BuildOptions, SourceFile};
    use kiln_store::CacheFolder;

    fn sources() -> Vec<SourceFile> {
        let file = |number: usize| {
            SourceFile::new(
                format!("f{number}.c"),
                format!("int f{number}(void) {{ return {number}; }}\n"),
            )
        };
        (0..6).map(file).collect()
    }

    #[test]
    fn builds_at_the_same_time_compile_each_file_once() {
        let folder = tempfile::tempdir().unwrap();
        let toolchain = Toolchain::detect().unwrap();
        let begin = std::sync::Barrier::new(3);
        let build = || {
            let objects = Objects::in_folder(&CacheFolder::at(folder.path(), 1 << 20));
            begin.wait();
            let built = toolchain.build_reusing(&sources(), &BuildOptions::default(), &objects);
            built.unwrap().compiled
        };
        let compiled: Vec<usize> = std::thread::scope(|scope| {
            let builds: Vec<_> = (0..3).map(|_| scope.spawn(build)).collect();
            builds.into_iter().map(|build| build.join().unwrap()).collect()
        });
        assert_eq!(compiled.iter().sum::<usize>(), sources().len(), "{compiled:?}");
    }

    #[test]
    fn a_process_that_never_finishes_is_not_waited_for_long() {
        let folder = tempfile::tempdir().unwrap();
        let process = || Objects::in_folder(&CacheFolder::at(folder.path(), 1 << 20));
        let toolchain = Toolchain::detect().unwrap();
        let options = BuildOptions::default();
        let commands = toolchain.commands(&sources(), &options);
        let keys = toolchain.object_keys(&sources(), &commands.compile);
        let (stopped, mut objects) = (process(), process());
        let _claims: Vec<Claim> = keys.iter().map(|key| stopped.claim(key)).collect();
        objects.patience = Duration::from_millis(50);
        let built = toolchain.build_reusing(&sources(), &options, &objects).unwrap();
        assert_eq!(built.compiled, sources().len());
        // What was made in spite of the lock is everybody's.
        assert!(
            keys.iter()
                .all(|key| matches!(stopped.claim(key), Claim::Made(_)))
        );
    }
}
