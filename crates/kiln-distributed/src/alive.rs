//! Whether the other ranks of this machine are still there.
//!
//! MPI does not say that a rank has died; mostly the launcher ends the others then, but not always: not if a
//! rank dies while ranks start, for example. Ranks tell each other their processes when they are connected,
//! so that whoever waits for a rank of its own machine sees that its process is gone, long before the
//! timeout. Of other machines nothing is known.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::ErrorKind;

/// Bytes that a process is told in.
pub(crate) const BYTES: usize = 24;

/// A process of some machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    /// The machine since it was started, and the numbering of its processes; zero if that is not known.
    machine: u64,
    number: u64,
    /// When it was started, in ticks of the machine.
    started: u64,
}

impl Process {
    /// This process.
    pub(crate) fn own() -> Self {
        let unknown = Self {
            machine: 0,
            number: 0,
            started: 0,
        };
        let number = u64::from(std::process::id());
        let boot = fs::read("/proc/sys/kernel/random/boot_id");
        let numbering = fs::read_link("/proc/self/ns/pid");
        match (boot, numbering, state(number)) {
            (Ok(boot), Ok(numbering), State::Runs { started }) => {
                let mut hasher = DefaultHasher::new();
                (boot, numbering).hash(&mut hasher);
                Self {
                    machine: hasher.finish() | 1,
                    number,
                    started,
                }
            }
            _ => unknown,
        }
    }

    /// The process as bytes.
    pub(crate) fn told(self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        let words = [self.machine, self.number, self.started];
        for (bytes, word) in bytes.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// The process that these bytes tell.
    pub(crate) fn heard(bytes: &[u8; BYTES]) -> Self {
        let (words, _) = bytes.as_chunks::<8>();
        let [machine, number, started] = std::array::from_fn(|i| u64::from_le_bytes(words[i]));
        Self {
            machine,
            number,
            started,
        }
    }

    /// Whether the process is one of the machine of `own` and has ended for certain.
    pub(crate) fn has_ended(self, own: Self) -> bool {
        let is_known = self.machine != 0 && self.machine == own.machine;
        is_known
            && match state(self.number) {
                State::Runs { started } => started != self.started,
                State::Ended => true,
                State::Unknown => false,
            }
    }
}

/// What the system says of a process.
enum State {
    Runs { started: u64 },
    Ended,
    Unknown,
}

fn state(number: u64) -> State {
    let text = match fs::read_to_string(format!("/proc/{number}/stat")) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return State::Ended,
        Err(_) => return State::Unknown,
    };
    // Behind the name, which may contain anything: the state, and 19 fields further the start.
    let fields = text.rsplit(')').next().unwrap_or_default();
    let mut fields = fields.split_whitespace();
    match (
        fields.next(),
        fields.nth(18).and_then(|started| started.parse().ok()),
    ) {
        (Some("Z" | "X" | "x"), _) => State::Ended,
        (Some(_), Some(started)) => State::Runs { started },
        _ => State::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_ended_is_known_to_have() {
        let own = Process::own();
        if own.machine == 0 {
            eprintln!("skipped: the system tells nothing of processes");
            return;
        }
        assert_eq!(Process::heard(&own.told()), own);
        assert!(!own.has_ended(own));
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let number = u64::from(child.id());
        let State::Runs { started } = state(number) else {
            panic!("it runs")
        };
        let other = Process {
            number,
            started,
            ..own
        };
        assert!(!other.has_ended(own));
        let elsewhere = Process {
            machine: own.machine ^ 2,
            ..other
        };
        let namesake = Process {
            started: started + 1,
            ..other
        };
        assert!(namesake.has_ended(own), "another process has its number");
        child.kill().unwrap();
        // Nobody has asked for its status: it is a zombie.
        while !other.has_ended(own) {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(other.has_ended(own) && !elsewhere.has_ended(own));
    }
}
