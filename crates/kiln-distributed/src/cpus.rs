//! The CPUs that a rank may use, and how many ranks share them.
//!
//! A launcher binds each rank to cores of its own, or all ranks of a socket to that socket, or binds nobody;
//! a container or a batch system leaves all of them a part of the machine. None of that shows in the number
//! of CPUs alone. So ranks tell each other their sets of CPUs when they are connected, and each counts whose
//! meet its own.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Words of a set: Linux numbers at most 8192 CPUs.
const WORDS: usize = 256;

/// Bytes that the CPUs of a rank are told in.
pub(crate) const BYTES: usize = 16 + 4 * WORDS;

/// CPUs of some machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cpus {
    /// The machine since it was started; zero if the system does not tell which CPUs they are.
    machine: u64,
    /// The container whose limit allows less time than these CPUs have; zero if there is no such limit.
    container: u64,
    /// A bit for each CPU.
    set: [u32; WORDS],
}

/// How many CPUs the calling thread may keep busy.
pub(crate) fn allowed() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

impl Cpus {
    const UNKNOWN: Self = Self {
        machine: 0,
        container: 0,
        set: [0; WORDS],
    };

    /// Those of the calling thread.
    pub(crate) fn own() -> Self {
        let boot = fs::read("/proc/sys/kernel/random/boot_id");
        let status = fs::read_to_string("/proc/thread-self/status");
        let (Ok(boot), Some(set)) = (boot, status.ok().and_then(|status| set_in(&status))) else {
            return Self::UNKNOWN;
        };
        let number = |what: &dyn Fn(&mut DefaultHasher)| {
            let mut hasher = DefaultHasher::new();
            what(&mut hasher);
            hasher.finish() | 1
        };
        let count: u32 = set.iter().map(|word| word.count_ones()).sum();
        let processes = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        Self {
            machine: number(&|hasher| boot.hash(hasher)),
            container: match allowed() < count as usize {
                true => number(&|hasher| (&boot, &processes).hash(hasher)),
                false => 0,
            },
            set,
        }
    }

    /// The CPUs as bytes.
    pub(crate) fn told(&self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        bytes[..8].copy_from_slice(&self.machine.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.container.to_le_bytes());
        for (bytes, word) in bytes[16..].chunks_exact_mut(4).zip(self.set) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// The CPUs that these bytes tell.
    pub(crate) fn heard(bytes: &[u8; BYTES]) -> Self {
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        Self {
            machine: long(0),
            container: long(8),
            set: std::array::from_fn(|i| word(16 + 4 * i)),
        }
    }

    /// Whether two ranks take time of the same CPUs. Ranks of two containers with limits do not: each has the
    /// time of its own limit.
    fn meet(&self, other: &Self) -> bool {
        let apart = self.container != other.container && self.container != 0 && other.container != 0;
        let common = self
            .set
            .iter()
            .zip(&other.set)
            .any(|(one, other)| one & other != 0);
        self.machine != 0 && self.machine == other.machine && common && !apart
    }
}

/// Threads for rank `rank`: its share of the `allowed` CPUs, given those of all ranks. Where they are not
/// known the `local_size` ranks of the machine share them.
pub(crate) fn share(all: &[Cpus], rank: usize, allowed: usize, local_size: usize) -> usize {
    let sharing = match all.get(rank) {
        Some(own) if own.machine != 0 => all.iter().filter(|other| own.meet(other)).count(),
        _ => local_size,
    };
    (allowed / sharing.max(1)).max(1)
}

/// The set of CPUs in the status of a thread: words of 32 in hexadecimal, the highest first.
fn set_in(status: &str) -> Option<[u32; WORDS]> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed:"))?;
    let mut set = [0; WORDS];
    for (word, text) in set.iter_mut().zip(line.trim().rsplit(',')) {
        *word = u32::from_str_radix(text, 16).ok()?;
    }
    set.iter().any(|&word| word != 0).then_some(set)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank of a machine with this line in its status.
    fn rank(machine: u64, line: &str) -> Cpus {
        let status = format!("Name:\tkiln\nCpus_allowed:\t{line}\nCpus_allowed_list:\t0\n");
        Cpus {
            machine,
            container: 0,
            set: set_in(&status).expect("a set"),
        }
    }

    /// The threads of each of these ranks, which may use so many CPUs each.
    fn threads(all: &[Cpus], allowed: usize) -> Vec<usize> {
        let of = |rank| share(all, rank, allowed, all.len());
        (0..all.len()).map(of).collect()
    }

    #[test]
    fn ranks_divide_the_cpus_that_they_share() {
        let unbound = rank(1, "ffff");
        assert_eq!(threads(&vec![unbound.clone(); 4], 16), [4; 4]);
        assert_eq!(threads(&vec![unbound.clone(); 3], 2), [1; 3], "never none");
        // Four cores of its own for each rank.
        let bound = ["f", "f0", "f00", "f000"].map(|line| rank(1, line));
        assert_eq!(threads(&bound, 4), [4; 4]);
        // Open MPI binds more than two ranks to sockets, in turn.
        let sockets = ["ff", "ff00", "ff", "ff00"].map(|line| rank(1, line));
        assert_eq!(threads(&sockets, 8), [4; 4]);
        assert_eq!(threads(&sockets[..3], 8), [4, 8, 4]);
        // The same numbers on other machines are other CPUs.
        let machines = [rank(1, "ffff"), rank(2, "ffff"), rank(1, "ffff")];
        assert_eq!(threads(&machines, 16), [8, 16, 8]);
        // Above the first 32.
        let high = ["1,00000000", "1,00000000", "00000000,00000001"].map(|line| rank(1, line));
        assert_eq!(threads(&high, 6), [3, 3, 6]);
    }

    #[test]
    fn a_limit_is_shared_in_its_container() {
        let in_container = |container| Cpus {
            container,
            ..rank(1, "ffff")
        };
        let ranks = [3, 3, 5, 0].map(in_container);
        assert_eq!(threads(&ranks[..2], 4), [2; 2]);
        assert_eq!(threads(&ranks[1..3], 4), [4; 2]);
        // One without a limit may take the time of all others.
        assert_eq!(threads(&ranks[2..], 4), [2; 2]);
    }

    #[test]
    fn where_nothing_is_known_the_machine_is_divided() {
        assert_eq!(threads(&[Cpus::UNKNOWN, Cpus::UNKNOWN], 8), [4; 2]);
        assert_eq!(share(&[], 3, 8, 4), 2, "no rank has told");
        for status in ["", "Cpus_allowed:\t0\n", "Cpus_allowed:\tmany\n"] {
            assert_eq!(set_in(status), None, "{status}");
        }
    }

    #[test]
    fn what_is_told_is_heard() {
        let own = Cpus::own();
        assert_eq!(Cpus::heard(&own.told()), own);
        let made = Cpus {
            container: 7,
            ..rank(u64::MAX, "80000001,ffffffff")
        };
        assert_eq!(Cpus::heard(&made.told()), made);
        if own == Cpus::UNKNOWN {
            eprintln!("skipped: the system does not tell the CPUs of a thread");
            return;
        }
        assert!(own.meet(&own));
    }
}
