//! Templates on disk, from which another process starts.
//!
//! What a batch of templates stands for, and how its kernels are written, is an entry of the store of steps;
//! the machine code of its programs is in the store of machine code. A family has a list of its batches: note
//! number `n` of the family has the key of batch `n`. A note never changes; of two processes that learn at
//! the same time, the second writes the next one.

use std::sync::Arc;

use kiln_compiler::{Target as _, identity};
use kiln_family::{Batch, LISTED, Pattern, Stored, Template};
use kiln_graph::Graph;
use serde::{Deserialize, Serialize};

use super::backend::Backend;
use super::write::{FamilyFunction, Written};
use super::{Built, CudaMaker};
use crate::build::{Key, Source};
use crate::error::CudaError;

/// A batch of templates.
#[derive(Serialize, Deserialize)]
struct StoredBatch {
    /// What each stands for, how it is written, and which of the programs has it.
    templates: Vec<(Pattern, Written, usize)>,
    /// Names and texts of the programs.
    programs: Vec<(String, String)>,
}

impl<B: Backend> CudaMaker<B> {
    /// Builds the programs of `templates`.
    pub(super) fn build_programs(
        &self,
        name: &str,
        templates: &[Template<FamilyFunction>],
    ) -> Result<Batch<Built>, CudaError> {
        let (written, sources, places) = self.written(templates)?;
        let named = |source: &Source| (source.name.clone(), source.text.clone());
        let stored = StoredBatch {
            programs: sources.iter().map(named).collect(),
            templates: templates
                .iter()
                .zip(&written)
                .zip(&places)
                .map(|((template, written), &place)| (template.pattern.clone(), written.clone(), place))
                .collect(),
        };
        let (programs, elapsed, from_cache) = self.programs(sources)?;
        // Patterns are words and numbers.
        let content = serde_json::to_vec(&stored).unwrap_or_default();
        let key = Key::of([b"family batch", &content[..]]);
        self.backend.store().put(&key, &content, name, "");
        let built = written.into_iter().zip(places).map(|(written, place)| Built {
            written: Arc::new(written),
            program: programs[place].clone(),
        });
        Ok(Batch {
            built: built.collect(),
            object: key.to_string(),
            elapsed,
            from_cache,
        })
    }

    /// Puts a batch on the list of the family of `graph`.
    pub(super) fn list_object(&self, graph: &Graph, object: &str) {
        for number in 0..LISTED {
            let make = || Ok::<_, ()>(object.to_owned());
            let sound = |text: &str| text.parse::<Key>().is_ok();
            let note = self.backend.store().note(&self.note(graph, number), sound, make);
            if note.as_deref() == Ok(object) {
                return;
            }
        }
    }

    /// Batch `number` on that list, if there are so many; none in it if the cache has lost a part.
    pub(super) fn stored_object(&self, graph: &Graph, number: usize) -> Option<Stored<Built>> {
        let store = self.backend.store();
        let note = store.noted(&self.note(graph, number))?;
        let found = || {
            let content = store.get(&note.parse().ok()?)?.content;
            let StoredBatch { templates, programs } = serde_json::from_slice(&content).ok()?;
            let source = |(name, text)| Source { name, text };
            let sources: Vec<Source> = programs.into_iter().map(source).collect();
            if !sources.iter().all(|source| self.backend.has(source)) {
                return None;
            }
            let (programs, ..) = self.programs(sources).ok()?;
            let built = templates.into_iter().map(|(pattern, written, place)| {
                let program = programs.get(place)?.clone();
                let written = Arc::new(written);
                Some((pattern, Built { written, program }))
            });
            built.collect()
        };
        Some(found())
    }

    /// The key of a note of the family of `graph`: of graphs with the same operations on the same operands.
    fn note(&self, graph: &Graph, number: usize) -> Key {
        let nodes = graph
            .nodes()
            .map(|(_, data)| format!("{} {:?} {:?}\n", data.op.name(), data.inputs, data.outputs));
        Key::builder()
            .field("compiler", identity::COMPILER_SOURCES)
            .field("options", self.options.identity())
            .field("target", self.target.fingerprint())
            .field("family", nodes.collect::<String>())
            .field("batch", number.to_string())
            .finish()
    }
}
