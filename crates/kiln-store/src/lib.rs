//! Kiln's disk cache, so that a second process need not make anything again.
//!
//! ```text
//! $KILN_CACHE_DIR                  CacheFolder: one limit for everything below it
//! ├── steps/                       a Store of kiln-cpu: shared objects
//! │   ├── 3f0c..9a.so              an entry: what was made
//! │   ├── 3f0c..9a.json            its description: checksums, a name for people, a text beside it
//! │   ├── 3f0c..9a.lock            held by the process that makes it
//! │   └── 77d1..02.note            a text that was dear to find out
//! ├── objects/                     a Store of kiln-cpu: what shared objects are linked from
//! ├── cubins/                      Stores of kiln-cuda: machine code,
//! └── cuda/                        steps and choices of algorithms
//! ```
//!
//! The folder is `$KILN_CACHE_DIR`, else `$XDG_CACHE_HOME/kiln`, else `~/.cache/kiln`. An entry's name is a
//! [`Key`], a hash of everything that the entry depends on, so entries never change and never become wrong.
//!
//! Losing the cache is never an error. A damaged entry is made again, with a warning. A folder that cannot be
//! written (read-only, full, no home) costs one warning, and then everything is made for the process alone.
//!
//! Entries together stay under a limit (`$KILN_CACHE_BYTES`, 2 GiB by default): the entry used longest ago
//! is removed first, whichever target made it. A process that has loaded an evicted object keeps it,
//! because the pages of a file outlive its name.

mod entry;
mod error;
mod folder;
mod key;
mod store;

pub use error::StoreError;
pub use folder::{CacheFolder, Listing};
pub use key::{Key, KeyBuilder};
pub use store::{Entry, Found, Held, Lock, Store};
