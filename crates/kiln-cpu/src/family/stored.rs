//! Templates on disk, from which another process starts.
//!
//! An object of functions is an entry of the cache under the hash of its C, and beside it stands what functions its
//! templates stand for. A family has a list of its objects: note number `n` of the family has the key of object `n`.
//! A note never changes; of two processes that learn at the same time, the second writes the next one.

use std::sync::Arc;
use std::time::Duration;

use kiln_compiler::Target as _;
use kiln_graph::Graph;
use kiln_store::Key;
use serde::{Deserialize, Serialize};

use super::Family;
use super::state::{Known, State};
use super::template::{Pattern, Template};
use super::write::{Writer, Written};
use crate::cache::{Origin, step_key};
use crate::error::CpuError;
use crate::runtime::functions::FunctionLibrary;

/// Most objects of a family that are listed.
const LISTED: usize = 64;

/// A function of a stored object.
#[derive(Serialize, Deserialize)]
struct StoredFunction {
    pattern: Pattern,
    written: Written,
}

/// An object that was built.
pub(super) struct Built {
    /// Its key in the cache.
    key: Key,
    /// Time of the C compiler; zero if the cache had the object.
    pub elapsed: Duration,
    /// Whether the cache had it.
    pub from_cache: bool,
}

impl Family {
    /// Builds `templates`, which are known then.
    pub(super) fn build(
        &self,
        state: &mut State,
        name: &str,
        templates: Vec<Template>,
    ) -> Result<Built, CpuError> {
        let mut writer = Writer::default();
        let functions: Vec<StoredFunction> = templates
            .into_iter()
            .map(|template| StoredFunction {
                written: writer.add(&template, &mut state.units.helpers),
                pattern: template.pattern,
            })
            .collect();
        let files = writer.finish(self.target.isa);
        // Patterns are words and numbers.
        let payload = serde_json::to_string(&functions).unwrap_or_default();
        let (key, library, origin) =
            self.cache
                .functions(name, &files, &payload, &self.toolchain, &self.build)?;
        state.stats.builds += 1;
        add(state, functions, library);
        let elapsed = match origin {
            Origin::Cache => Duration::ZERO,
            Origin::Built(elapsed) => elapsed,
        };
        Ok(Built {
            key,
            elapsed,
            from_cache: origin == Origin::Cache,
        })
    }

    /// Puts what was built on the list of the family of `graph`.
    pub(super) fn list(&self, graph: &Graph, built: &Built) {
        let key = built.key.to_string();
        for number in 0..LISTED {
            let make = || Ok::<_, ()>(key.clone());
            let note = self.cache.notes().note(
                &self.note(graph, number),
                |text| text.parse::<Key>().is_ok(),
                make,
            );
            if note.as_ref() == Ok(&key) {
                return;
            }
        }
    }

    /// Loads the objects of the family of `graph` that the cache lists, if that was not done before, and says
    /// whether anything is known.
    pub(super) fn load(&self, graph: &Graph, state: &mut State) -> bool {
        if std::mem::replace(&mut state.loaded, true) {
            return !state.known.is_empty();
        }
        for number in 0..LISTED {
            let Some(note) = self.cache.notes().noted(&self.note(graph, number)) else {
                break;
            };
            // One that was evicted may be made again.
            let Some((payload, library)) = note
                .parse()
                .ok()
                .and_then(|key| self.cache.stored_functions(&key))
            else {
                continue;
            };
            if let Ok(functions) = serde_json::from_str::<Vec<StoredFunction>>(&payload)
                && functions.len() == library.count()
            {
                add(state, functions, library);
            }
        }
        // Another process has sampled what a second shape needs.
        state.learned = usize::from(!state.known.is_empty());
        !state.known.is_empty()
    }

    /// The key of a note of the family of `graph`: of graphs with the same operations on the same operands.
    fn note(&self, graph: &Graph, number: usize) -> Key {
        let nodes = graph
            .nodes()
            .map(|(_, data)| format!("{} {:?} {:?}\n", data.op.name(), data.inputs, data.outputs));
        step_key(&self.toolchain, &self.build)
            .field("compiler", kiln_compiler::identity::COMPILER_SOURCES)
            .field("options", self.options.identity())
            .field("target", self.target.fingerprint())
            .field("family", nodes.collect::<String>())
            .field("object", number.to_string())
            .finish()
    }
}

/// Adds the functions of `library` to what is known.
fn add(state: &mut State, functions: Vec<StoredFunction>, library: FunctionLibrary) {
    let library = Arc::new(library);
    state.stats.functions += library.count();
    for (number, StoredFunction { pattern, written }) in functions.into_iter().enumerate() {
        state.add(Known {
            pattern,
            written,
            library: library.clone(),
            number,
        });
    }
}
