//! Templates on disk, from which another process starts.
//!
//! An object of functions is an entry of the cache under the hash of its C, and beside it stands what functions its
//! templates stand for. A family has a list of its objects: note number `n` of the family has the key of object `n`.
//! A note never changes; of two processes that learn at the same time, the second writes the next one.

use std::sync::Arc;
use std::time::Duration;

use kiln_compiler::Target as _;
use kiln_family::{Batch, LISTED, Pattern, Stored, Template};
use kiln_graph::Graph;
use kiln_store::Key;
use serde::{Deserialize, Serialize};

use super::unit::Helpers;
use super::write::{Writer, Written};
use super::{Built, CpuMaker};
use crate::cache::{Origin, step_key};
use crate::emit::calls::StepFunction;
use crate::error::CpuError;
use crate::runtime::functions::FunctionLibrary;

/// A function of a stored object.
#[derive(Serialize, Deserialize)]
struct StoredFunction {
    pattern: Pattern,
    written: Written,
}

impl CpuMaker {
    /// Builds the object of `templates`.
    pub(super) fn build_object(
        &self,
        name: &str,
        templates: &[Template<StepFunction>],
        helpers: &mut Helpers,
    ) -> Result<Batch<Built>, CpuError> {
        let mut writer = Writer::default();
        let functions: Vec<StoredFunction> = templates
            .iter()
            .map(|template| StoredFunction {
                written: writer.add(template, helpers),
                pattern: template.pattern.clone(),
            })
            .collect();
        let files = writer.finish(self.target.isa);
        // Patterns are words and numbers.
        let payload = serde_json::to_string(&functions).unwrap_or_default();
        let (key, library, origin) =
            self.cache
                .functions(name, &files, &payload, &self.toolchain, &self.build)?;
        let elapsed = match origin {
            Origin::Cache => Duration::ZERO,
            Origin::Built(elapsed) => elapsed,
        };
        let built = in_library(functions, library).into_iter();
        Ok(Batch {
            built: built.map(|(_, built)| built).collect(),
            object: key.to_string(),
            elapsed,
            from_cache: origin == Origin::Cache,
        })
    }

    /// Puts what was built on the list of the family of `graph`.
    pub(super) fn list_object(&self, graph: &Graph, key: &str) {
        for number in 0..LISTED {
            let make = || Ok::<_, ()>(key.to_owned());
            let note = self.cache.notes().note(
                &self.note(graph, number),
                |text| text.parse::<Key>().is_ok(),
                make,
            );
            if note.as_deref() == Ok(key) {
                return;
            }
        }
    }

    /// Object `number` on that list, if there are so many.
    pub(super) fn stored_object(&self, graph: &Graph, number: usize) -> Option<Stored<Built>> {
        let note = self.cache.notes().noted(&self.note(graph, number))?;
        let found = || {
            let (payload, library) = self.cache.stored_functions(&note.parse().ok()?)?;
            let functions = serde_json::from_str::<Vec<StoredFunction>>(&payload).ok()?;
            (functions.len() == library.count()).then(|| in_library(functions, library))
        };
        Some(found())
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

/// The functions of `library`.
fn in_library(functions: Vec<StoredFunction>, library: FunctionLibrary) -> Vec<(Pattern, Built)> {
    let library = Arc::new(library);
    let numbered = functions.into_iter().enumerate();
    let built = numbered.map(|(number, StoredFunction { pattern, written })| {
        let library = library.clone();
        let built = Built {
            written,
            library,
            number,
        };
        (pattern, built)
    });
    built.collect()
}
