//! The guard: is this the step that was compiled, and if not, what differs.

use std::fmt;

use super::recording::{Identity, Recorded};
use crate::stream;

/// What is kept of a recorded step to recognise it again.
#[derive(Debug)]
pub struct Guard {
    identity: Identity,
    ends: Vec<u32>,
    names: Vec<String>,
    inputs: Vec<String>,
    /// Per result position: the operation that defines it.
    producers: Vec<u32>,
}

/// The first difference between a recording and a compiled step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Mismatch {
    /// Input number `index` has another type or shape.
    Input {
        /// Position among the inputs, in order of first use.
        index: usize,
        /// Type and shape when compiled.
        before: String,
        /// Type and shape now.
        after: String,
    },
    /// Operation number `index` is another one.
    Operation {
        /// Position in the recorded stream.
        index: usize,
        /// Its name when compiled; none if the compiled stream ended before.
        before: Option<String>,
        /// Its name now; none if the stream ends before.
        after: Option<String>,
    },
    /// Operation number `index` is the same but has other operands, result shapes or attributes.
    Attributes {
        /// Position in the recorded stream.
        index: usize,
        /// Its name.
        operation: String,
        /// Whether what differs is a scalar, operand or attribute, as far as can be told: the words before and after.
        detail: String,
    },
    /// The operations agree, but another set of results outlives the region.
    Outputs {
        /// Operations whose results were kept when compiled and are not now.
        dropped: Vec<String>,
        /// Operations whose results are kept now and were not when compiled.
        kept: Vec<String>,
    },
}

impl Mismatch {
    /// What most likely makes the step the same again.
    pub const fn remedy(&self) -> &'static str {
        match self {
            Self::Input { .. } => {
                "give every call inputs of the same shape and type: pad batches, or drop the last one if it is smaller"
            }
            Self::Operation { .. } => {
                "control flow took another way: replace branches on host values by tensor operations (mask_where), or compile each way as a region of its own"
            }
            Self::Attributes { .. } => {
                "an index, dimension or other attribute changes from call to call: pass it as a tensor (select, gather) instead of a host number"
            }
            Self::Outputs { .. } => {
                "the program keeps other tensors than before: keep or drop the same ones at every call (metrics logged only now and then, say)"
            }
        }
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |operation: &Option<String>| operation.clone().unwrap_or_else(|| "the end".to_owned());
        match self {
            Self::Input { index, before, after } => write!(f, "input {index}: {before} became {after}"),
            Self::Operation { index, before, after } => {
                write!(f, "operation {index}: {} became {}", name(before), name(after))
            }
            Self::Attributes {
                index,
                operation,
                detail,
            } => write!(f, "operation {index}, {operation}: {detail}"),
            Self::Outputs { dropped, kept } => {
                let list = |names: &[String]| {
                    if names.is_empty() {
                        "none".to_owned()
                    } else {
                        names.join(", ")
                    }
                };
                write!(
                    f,
                    "other results outlive the region: no longer {}; newly {}",
                    list(dropped),
                    list(kept)
                )
            }
        }
    }
}

impl Guard {
    /// A guard that accepts what has the identity of `recorded`.
    pub fn new(recorded: &Recorded) -> Self {
        let producers = recorded
            .operations
            .iter()
            .enumerate()
            .flat_map(|(index, operation)| operation.outputs().map(move |_| index as u32).collect::<Vec<_>>())
            .collect();
        Self {
            identity: recorded.identity.clone(),
            ends: recorded.ends.clone(),
            names: recorded.operations.iter().map(stream::name).collect(),
            inputs: input_types(recorded),
            producers,
        }
    }

    /// Whether `recorded` is the same step.
    pub fn accepts(&self, recorded: &Recorded) -> bool {
        self.identity == recorded.identity
    }

    /// The first difference to `recorded`; none if it is the same step. A changed input is named before the operations that differ
    /// because of it.
    pub fn mismatch(&self, recorded: &Recorded) -> Option<Mismatch> {
        let now = &recorded.identity;
        let common = self
            .identity
            .words
            .iter()
            .zip(&now.words)
            .take_while(|(before, after)| before == after)
            .count();
        if common == self.identity.words.len() && common == now.words.len() {
            return self.output_mismatch(recorded);
        }
        let inputs = input_types(recorded);
        let changed = self
            .inputs
            .iter()
            .zip(&inputs)
            .position(|(before, after)| before != after);
        let index = self.operation_at(common);
        let name = recorded.operations.get(index).map(stream::name);
        let before = self.names.get(index).cloned();
        match changed {
            // If the operations part before the input is used, the input is a consequence.
            Some(input) if before == name => {
                let (before, after) = (self.inputs[input].clone(), inputs[input].clone());
                Some(Mismatch::Input {
                    index: input,
                    before,
                    after,
                })
            }
            _ if before != name => Some(Mismatch::Operation {
                index,
                before,
                after: name,
            }),
            _ => {
                let detail = format!(
                    "operands, result shape or attributes changed ({} became {})",
                    self.word(common),
                    now.words.get(common).map_or("nothing".to_owned(), u64::to_string)
                );
                Some(Mismatch::Attributes {
                    index,
                    operation: name.unwrap_or_default(),
                    detail,
                })
            }
        }
    }

    /// How many operations agree before the first that differs: the measure by which the nearest of several guards is chosen.
    pub fn agreement(&self, recorded: &Recorded) -> usize {
        let words = self.identity.words.iter().zip(&recorded.identity.words);
        self.operation_at(words.take_while(|(before, after)| before == after).count())
    }

    /// Type and shape of each input, as text.
    pub fn inputs(&self) -> &[String] {
        &self.inputs
    }

    fn word(&self, position: usize) -> String {
        self.identity
            .words
            .get(position)
            .map_or("nothing".to_owned(), u64::to_string)
    }

    fn operation_at(&self, word: usize) -> usize {
        self.ends.partition_point(|&end| end as usize <= word)
    }

    fn output_mismatch(&self, recorded: &Recorded) -> Option<Mismatch> {
        let (before, after) = (&self.identity.outputs, &recorded.identity.outputs);
        if before == after {
            return None;
        }
        let only_in = |these: &[u32], those: &[u32]| -> Vec<String> {
            let producer = |&result: &u32| {
                let operation = self.producers[result as usize] as usize;
                format!("operation {operation} ({})", self.names[operation])
            };
            these
                .iter()
                .filter(|result| !those.contains(result))
                .map(producer)
                .collect()
        };
        Some(Mismatch::Outputs {
            dropped: only_in(before, after),
            kept: only_in(after, before),
        })
    }
}

fn input_types(recorded: &Recorded) -> Vec<String> {
    let show = |dims: &burn_backend::Shape| dims.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    recorded
        .inputs
        .iter()
        .map(|input| format!("{:?} [{}]", input.ir.dtype, show(&input.ir.shape)).to_lowercase())
        .collect()
}
