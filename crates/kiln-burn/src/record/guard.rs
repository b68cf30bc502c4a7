//! The guard decides whether a recording is the step that was compiled and, if not, what differs.
//!
//! Steps are compared by their words ([`super::recording`]), which takes no time. A difference is described
//! in the terms of the program: the operation, the line that issued it, and the part that changed, before
//! and after. For that a guard keeps the parts of each operation by name ([`super::words`]).

use std::fmt;
use std::sync::Arc;

use burn_ir::OperationIr;

use super::functions::Function;
use super::gradient::Source;
use super::recording::{Identity, Recorded};
use super::words::{Named, Part, Position, Words, dims_of, type_text};
use crate::options::Dynamic;
use crate::stream;

/// The parts of a recorded step by which it is recognised.
#[derive(Debug)]
pub struct Guard {
    identity: Identity,
    ends: Vec<u32>,
    names: Vec<String>,
    /// The source of each operation, if it was looked up.
    lines: Vec<Source>,
    parts: Vec<Box<[Named]>>,
    inputs: Vec<String>,
    /// Per result position: the operation that defines it.
    producers: Vec<u32>,
    /// The functions among the operations: while one is kept, a call of the same function has the same id.
    functions: Vec<Arc<Function>>,
}

/// The first difference between a recording and a compiled step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Mismatch {
    /// Input number `index` has another type or shape.
    Input {
        /// Position among the inputs, in order of first use.
        index: usize,
        /// The operation that uses it first, with the user's line.
        used: Option<String>,
        /// Type and shape when compiled.
        before: String,
        /// Type and shape now.
        after: String,
    },
    /// Operation number `index` is another one.
    Operation {
        /// Position in the recorded stream.
        index: usize,
        /// Its name and line when compiled; none if the compiled stream ended before.
        before: Option<String>,
        /// Its name now; none if the stream ends before.
        after: Option<String>,
    },
    /// Operation number `index` is the same but something about it changed.
    Attributes {
        /// Position in the recorded stream.
        index: usize,
        /// Its name and the user's line.
        operation: String,
        /// What changed.
        part: Changed,
        /// The part when compiled.
        before: String,
        /// The part now.
        after: String,
    },
    /// The operations agree, but another set of results outlives the region.
    Outputs {
        /// Operations whose results were kept when compiled and are not now.
        dropped: Vec<String>,
        /// Operations whose results are kept now and were not when compiled.
        kept: Vec<String>,
    },
}

/// What changed about an operation, with the name of the part.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Changed {
    /// A dimension, the bounds of a slice, a padding.
    Attribute(String),
    /// A number that is part of the step.
    Number(String),
    /// A tensor that it reads.
    Operand(String),
    /// Type or shape of a result.
    Result(String),
    /// The operations of the closure of a transformed function.
    Closure,
}

impl fmt::Display for Changed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Attribute(name) => write!(f, "`{name}`"),
            Self::Number(name) => write!(f, "the number `{name}`"),
            Self::Operand(name) => write!(f, "the operand `{name}`"),
            Self::Result(name) => write!(f, "type or shape of the result `{name}`"),
            Self::Closure => f.write_str("the closure"),
        }
    }
}

impl Mismatch {
    /// What most likely makes the step the same again.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Input { .. } => {
                "give every call inputs of the same shape and type: pad batches, or drop the last one if it is smaller"
            }
            Self::Operation {
                before: Some(before), ..
            } if before.starts_with("Float.Random") => {
                "nothing, if these numbers initialise parameters: Burn draws them when a parameter is first used, and this one is the step that stays; otherwise control flow took another way: draw in every call or in none"
            }
            Self::Operation { .. } => {
                "control flow took another way: replace branches on host values by tensor operations (mask_where), or compile each way as a region of its own"
            }
            Self::Attributes { part, .. } => match part {
                Changed::Attribute(_) => {
                    "a host number that changes from call to call decides an index, dimension or other attribute: pass it as a tensor (select, gather)"
                }
                Changed::Number(_) => {
                    "exponents and the numbers that masks write and comparisons compare with are part of a step: keep it the same at every call, or make it a tensor of one element"
                }
                Changed::Closure => {
                    "the closure of a transformed function took another way, or decides an attribute by a host number: replace branches on host values by tensor operations (mask_where), or pass what varies as a tensor"
                }
                Changed::Operand(_) => {
                    "the program uses other tensors than before: keep control flow the same at every call, or choose by tensor operations (mask_where)"
                }
                Changed::Result(_) => {
                    "a host number that changes from call to call decides a shape: use the same shape at every call (pad to the largest)"
                }
            },
            Self::Outputs { .. } => {
                "the program keeps other tensors than before: keep or drop the same ones at every call (metrics logged only now and then, say)"
            }
        }
    }

    /// The dimensions of an input that are others; none if more than dimensions differs.
    pub fn dimensions(&self) -> Option<Vec<usize>> {
        let Self::Input { before, after, .. } = self else {
            return None;
        };
        let (before_dims, after_dims) = (dims_of(before)?, dims_of(after)?);
        let element = |text: &str| text.split(' ').next().map(str::to_owned);
        if element(before) != element(after) || before_dims.len() != after_dims.len() {
            return None;
        }
        let differing = (0..before_dims.len()).filter(|&dim| before_dims[dim] != after_dims[dim]);
        Some(differing.collect())
    }

    /// The guard that failed.
    pub fn guard(&self) -> String {
        match self {
            Self::Input {
                index, used: None, ..
            } => format!("type and shape of input {index}"),
            Self::Input {
                index,
                used: Some(used),
                ..
            } => format!("type and shape of input {index}, first used by {used}"),
            Self::Operation { index, .. } => format!("operation {index}"),
            Self::Attributes {
                index,
                operation,
                part,
                ..
            } => format!("{part} of operation {index}, {operation}"),
            Self::Outputs { .. } => "results that outlive the region, where they differ".to_owned(),
        }
    }

    /// The description of the part when the step was compiled, and now.
    pub fn change(&self) -> (String, String) {
        let name = |operation: &Option<String>| {
            operation
                .clone()
                .unwrap_or_else(|| "the end of the step".to_owned())
        };
        let list = |names: &[String]| match names {
            [] => "none".to_owned(),
            names => names.join(", "),
        };
        match self {
            Self::Input { before, after, .. } | Self::Attributes { before, after, .. } => {
                (before.clone(), after.clone())
            }
            Self::Operation { before, after, .. } => (name(before), name(after)),
            Self::Outputs { dropped, kept } => (list(dropped), list(kept)),
        }
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (before, after) = self.change();
        write!(f, "{}: {before} became {after}", self.guard())
    }
}

/// What becomes of a new step or function behind the recompile limit, for a warning: of one that `exchanges`
/// something with other ranks, and of any other.
pub fn behind_limit(exchanges: bool) -> &'static str {
    match exchanges {
        true => "are compiled all the same, each for its shapes, because all ranks must exchange the same",
        false => "run on aot_eager, which is slower",
    }
}

/// The advice for compilations that these mismatches made necessary: what differed most often. Of dimensions
/// it has the sizes that were seen. `dynamic` is what becomes of shapes, and none where each shape is
/// compiled.
pub fn advice<'a>(mismatches: impl IntoIterator<Item = &'a Mismatch>, dynamic: Option<Dynamic>) -> String {
    let mismatches: Vec<&Mismatch> = mismatches.into_iter().collect();
    let Some(last) = mismatches.last() else {
        return String::new();
    };
    let mut kinds: Vec<(String, Vec<&Mismatch>)> = Vec::new();
    for mismatch in &mismatches {
        let guard = mismatch.guard();
        match kinds.iter_mut().find(|(known, _)| *known == guard) {
            Some((_, list)) => list.push(mismatch),
            None => kinds.push((guard, vec![mismatch])),
        }
    }
    // The last of those that came most often.
    let most = kinds.iter().max_by_key(|(_, list)| list.len());
    let (_, list) = most.expect("there is a mismatch");
    let often = format!("{} of {} recompilations", list.len(), mismatches.len());
    let failed = format!(" Last guard that failed: {last}.");
    let Some(sizes) = sizes_of(list) else {
        let (what, remedy) = (list[0].guard(), list[0].remedy());
        return format!(
            "{failed} What differs most often ({often}) is {what}. What to do: {remedy}; or raise recompile_limit"
        );
    };
    let dimensions: Vec<String> = sizes
        .iter()
        .map(|(dim, sizes)| describe_sizes(*dim, sizes))
        .collect();
    let what = list[0].guard().replacen("type and shape of ", "", 1);
    let share = match dynamic {
        Some(Dynamic::Auto) => {
            "sizes are variables of the kernels (`Dynamic::Auto`), but these sizes needed kernels of another form: mark the dimension with its range (`kiln::dynamic`), so that they are compiled at once, "
        }
        Some(Dynamic::Marked) => {
            "mark it (`kiln::dynamic`) or compile with `with_dynamic(Dynamic::Auto)`, so that sizes share their kernels, "
        }
        Some(Dynamic::Off) => {
            "compile with `with_dynamic(Dynamic::Auto)`, so that sizes share their kernels, "
        }
        None => "",
    };
    format!(
        "{failed} What differs most often ({often}) is {} of {what}. What to do: {share}pad it to one size, or to a few, and mask what is padded (a last batch that is smaller can be dropped), or raise recompile_limit to the number of sizes",
        dimensions.join(" and "),
    )
}

/// The dimensions in which inputs of mismatches differ, each with its sizes; none if more than dimensions
/// differs.
fn sizes_of(mismatches: &[&Mismatch]) -> Option<Vec<(usize, Vec<usize>)>> {
    let mut all: Vec<(usize, Vec<usize>)> = Vec::new();
    for mismatch in mismatches {
        let (before, after) = mismatch.change();
        let (before, after) = (dims_of(&before)?, dims_of(&after)?);
        for dim in mismatch.dimensions()? {
            let at = all
                .iter()
                .position(|(known, _)| *known == dim)
                .unwrap_or_else(|| {
                    all.push((dim, Vec::new()));
                    all.len() - 1
                });
            for size in [before[dim], after[dim]] {
                if !all[at].1.contains(&size) {
                    all[at].1.push(size);
                }
            }
        }
    }
    all.sort_unstable();
    Some(all)
}

/// `dimension 1 (9 sizes: 12, 7, 31, 8, 10, 22, ..)`
fn describe_sizes(dim: usize, sizes: &[usize]) -> String {
    let shown: Vec<String> = sizes.iter().take(SHOWN_SIZES).map(usize::to_string).collect();
    let more = if sizes.len() > SHOWN_SIZES { ", .." } else { "" };
    format!(
        "dimension {dim} ({} sizes: {}{more})",
        sizes.len(),
        shown.join(", ")
    )
}

/// Sizes of a dimension that a message lists.
const SHOWN_SIZES: usize = 6;

impl Guard {
    /// A guard that accepts recordings with the identity of `recorded`. `lines` has the sources of its
    /// operations, as far as they are known.
    pub fn new(recorded: &Recorded, lines: Vec<Source>) -> Self {
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
            lines,
            parts: Words::of_all(recorded),
            inputs: input_types(recorded),
            producers,
            functions: recorded.functions.clone(),
        }
    }

    /// Whether both are guards of one step.
    pub fn is_same(&self, other: &Self) -> bool {
        self.identity == other.identity
    }

    /// Whether `recorded` is the same step.
    pub fn accepts(&self, recorded: &Recorded) -> bool {
        self.identity == recorded.identity
    }

    /// The first difference to `recorded`; none if it is the same step. A changed input is named before the
    /// operations that differ because of it.
    pub fn mismatch(&self, recorded: &Recorded) -> Option<Mismatch> {
        let (before, now) = (&self.identity, &recorded.identity);
        let common = self.common_words(recorded);
        if common == before.words.len() && common == now.words.len() {
            return self.output_mismatch(recorded);
        }
        let inputs = input_types(recorded);
        let index = self.operation_at(common);
        let name = recorded.operations.get(index).map(stream::name);
        if self.names.get(index) != name.as_ref() {
            return Some(Mismatch::Operation {
                index,
                before: self.names.get(index).map(|_| self.operation(index)),
                after: name,
            });
        }
        // If the operations differ before the input is used, the input differs as a consequence.
        let mut pairs = self.inputs.iter().zip(&inputs).enumerate();
        if let Some((input, (before, after))) = pairs.find(|(_, (before, after))| before != after) {
            return Some(Mismatch::Input {
                index: input,
                used: self.first_use(input),
                before: before.clone(),
                after: after.clone(),
            });
        }
        Some(self.attribute_mismatch(recorded, index))
    }

    /// What the program records otherwise, beside shapes: the first operation that is another one, or the
    /// first number or list of tensors; none if all are the same.
    pub fn pinned_by(&self, recorded: &Recorded) -> Option<String> {
        let names: Vec<String> = recorded.operations.iter().map(stream::name).collect();
        let same = self
            .names
            .iter()
            .zip(&names)
            .take_while(|(before, now)| before == now);
        let at = same.count();
        if at < self.names.len().max(names.len()) {
            let end = || "the end of the step".to_owned();
            let before = self.names.get(at).map_or_else(end, |_| self.operation(at));
            let now = names.get(at).cloned().unwrap_or_else(end);
            return Some(match before == now {
                true => format!(
                    "operation {at} of {} and of {} operations",
                    self.names.len(),
                    names.len()
                ),
                false => format!("operation {at} was {before} and is {now}"),
            });
        }
        let parts = Words::of_all(recorded);
        self.parts
            .iter()
            .zip(&parts)
            .enumerate()
            .find_map(|(at, (before, now))| {
                if before.len() != now.len() {
                    let operation = self.operation(at);
                    let (before, now) = (count_operands(before), count_operands(now));
                    return Some(format!(
                        "operation {at}, {operation}, had {before} tensors and has {now}"
                    ));
                }
                before
                    .iter()
                    .zip(now.iter())
                    .find_map(|(before, now)| match (&before.part, &now.part) {
                        (Part::Scalar(number), Part::Scalar(other)) if number != other => {
                            let operation = self.operation(at);
                            Some(format!(
                                "the number `{}` of operation {at}, {operation}, was {number} and is {other}",
                                before.name
                            ))
                        }
                        _ => None,
                    })
            })
    }

    /// How many operations agree before the first that differs: the measure by which the nearest of several
    /// guards is chosen.
    pub fn agreement(&self, recorded: &Recorded) -> usize {
        self.operation_at(self.common_words(recorded))
    }

    /// The user's line of the operation that takes runtime scalar `index` of the recording; none if it is
    /// not known.
    pub fn scalar_line(&self, index: usize) -> Option<&str> {
        let runtime = |parts: &[Named]| {
            parts
                .iter()
                .filter(|it| matches!(it.part, Part::Runtime(_)))
                .count()
        };
        let mut before = 0;
        let operation = self.parts.iter().position(|parts| {
            before += runtime(parts);
            before > index
        })?;
        self.lines.get(operation)?.line.as_deref()
    }

    /// Type and shape of each input, as text.
    pub fn inputs(&self) -> &[String] {
        &self.inputs
    }

    /// The user's lines of a recording that resembles this one, if none were looked up for it: where the
    /// operations agree by name, from the beginning and from the end, the program most likely is at the
    /// same lines.
    pub fn lines_of(&self, recorded: &Recorded) -> Vec<Source> {
        if self.lines.is_empty() {
            return Vec::new();
        }
        let (before, now) = (self.names.len(), recorded.operations.len());
        let same = |(name, operation): &(&String, &OperationIr)| **name == stream::name(operation);
        let front = self
            .names
            .iter()
            .zip(&recorded.operations)
            .take_while(same)
            .count();
        let back = self.names[front.min(before)..]
            .iter()
            .rev()
            .zip(recorded.operations[front..].iter().rev())
            .take_while(same)
            .count();
        let line = |position: usize| self.lines.get(position).cloned().unwrap_or_default();
        let of = |position: usize| match position {
            _ if position < front => line(position),
            _ if position >= now - back => line(position + before - now),
            _ => Source::default(),
        };
        (0..now).map(of).collect()
    }

    fn common_words(&self, recorded: &Recorded) -> usize {
        let words = self.identity.words.iter().zip(&recorded.identity.words);
        words.take_while(|(before, after)| before == after).count()
    }

    fn operation_at(&self, word: usize) -> usize {
        self.ends.partition_point(|&end| end as usize <= word)
    }

    /// Name and line of an operation.
    fn operation(&self, index: usize) -> String {
        let name = &self.names[index];
        let Some(Source {
            line: Some(line),
            gradient_of,
            ..
        }) = self.lines.get(index)
        else {
            return name.clone();
        };
        match gradient_of {
            Some(forward) => format!("{name} (gradient of `{forward}`) at {line}"),
            None => format!("{name} at {line}"),
        }
    }

    /// The operation that uses an input first.
    fn first_use(&self, input: usize) -> Option<String> {
        let wanted = Part::Operand(Some(Position::Input(input)));
        let uses = |parts: &[Named]| parts.iter().any(|it| it.part == wanted);
        Some(self.operation(self.parts.iter().position(|parts| uses(parts))?))
    }

    /// A part in words.
    fn text(&self, part: &Part) -> String {
        match part {
            Part::Operand(None) => "an unknown tensor".to_owned(),
            Part::Operand(Some(Position::Input(index))) => format!("input {index}"),
            // Operations agree up to this one, so that these are the producers of either step.
            Part::Operand(Some(Position::Result(index))) => {
                let operation = self.producers[*index] as usize;
                format!(
                    "the result of operation {operation}, {}",
                    self.operation(operation)
                )
            }
            Part::Runtime(kind) => format!("a runtime number ({kind})"),
            Part::Scalar(text) | Part::Attribute(text) | Part::Result(_, text) => text.to_string(),
        }
    }

    /// The difference in operation `index`, which has the same name in both steps: a part that the program
    /// decides comes before parts that follow from it.
    fn attribute_mismatch(&self, recorded: &Recorded, index: usize) -> Mismatch {
        let before: &[Named] = &self.parts[index];
        let mut words = Words::new(recorded);
        let after = recorded.operations[..=index]
            .iter()
            .fold(Vec::new(), |_, operation| words.of(operation));
        let differing = || {
            before
                .iter()
                .zip(&after)
                .filter(|(before, after)| before != after)
        };
        let of_rank = |rank: usize| differing().find(move |(before, _)| rank_of(&before.part) == rank);
        let same_length = before.len() == after.len();
        let first = same_length.then(|| (0..4).find_map(of_rank)).flatten();
        let (part, before, after) = match first {
            Some((before, after)) if before.name == stream::CLOSURE => {
                let (before, after) =
                    self.closures(recorded, &self.text(&before.part), &self.text(&after.part));
                (Changed::Closure, before, after)
            }
            Some((before, after)) => (
                changed(before.name, &before.part),
                self.text(&before.part),
                self.text(&after.part),
            ),
            // Lists of operands, as of a concatenation, differ in length.
            None => (
                Changed::Operand("tensors".to_owned()),
                format!("{} of them", count_operands(before)),
                format!("{} of them", count_operands(&after)),
            ),
        };
        Mismatch::Attributes {
            index,
            operation: self.operation(index),
            part,
            before,
            after,
        }
    }

    /// What differs between two functions, named by their ids, of which `recorded` has the second.
    fn closures(&self, recorded: &Recorded, before: &str, after: &str) -> (String, String) {
        let of = |functions: &[Arc<Function>], id: &str| {
            let function = functions.iter().find(|function| function.inlined.id == id);
            function.cloned()
        };
        let functions = (of(&self.functions, before), of(&recorded.functions, after));
        match functions {
            (Some(before), Some(after)) => before.guard.first_difference(&after.guard),
            _ => (before.to_owned(), after.to_owned()),
        }
    }

    /// The first difference between two recordings of closures, in words.
    fn first_difference(&self, other: &Self) -> (String, String) {
        let named = |guard: &Self, index: usize| match index < guard.names.len() {
            true => format!("{} (its operation {index})", guard.operation(index)),
            false => "its end".to_owned(),
        };
        for index in 0..self.names.len().max(other.names.len()) {
            if self.names.get(index) != other.names.get(index) {
                return (named(self, index), named(other, index));
            }
            let (before, after) = (&self.parts[index], &other.parts[index]);
            let mut parts = before.iter().zip(after.iter());
            if let Some((before, after)) = parts.find(|(before, after)| before != after) {
                let of = format!("`{}` of {}", before.name, named(self, index));
                return (
                    format!("{of} {}", self.text(&before.part)),
                    other.text(&after.part),
                );
            }
            if before.len() != after.len() {
                let of = |parts: &[Named]| format!("{} tensors", count_operands(parts));
                return (format!("{} {}", named(self, index), of(before)), of(after));
            }
        }
        match self
            .inputs
            .iter()
            .zip(&other.inputs)
            .find(|(before, after)| before != after)
        {
            Some((before, after)) => (format!("a tensor {before} of it"), after.clone()),
            None => ("its transform or its results".to_owned(), "others".to_owned()),
        }
    }

    fn output_mismatch(&self, recorded: &Recorded) -> Option<Mismatch> {
        let (before, after) = (&self.identity.outputs, &recorded.identity.outputs);
        if before == after {
            return None;
        }
        let only_in = |these: &[u32], those: &[u32]| -> Vec<String> {
            let producer = |&result: &u32| {
                let operation = self.producers[result as usize] as usize;
                format!("operation {operation} ({})", self.operation(operation))
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

/// Parts that the program chose come before those that follow from them.
fn rank_of(part: &Part) -> usize {
    match part {
        Part::Attribute(_) => 0,
        Part::Scalar(_) | Part::Runtime(_) => 1,
        Part::Operand(_) => 2,
        Part::Result(..) => 3,
    }
}

fn changed(name: &str, part: &Part) -> Changed {
    let name = name.to_owned();
    match part {
        Part::Attribute(_) => Changed::Attribute(name),
        Part::Scalar(_) | Part::Runtime(_) => Changed::Number(name),
        Part::Operand(_) => Changed::Operand(name),
        Part::Result(..) => Changed::Result(name),
    }
}

fn count_operands(parts: &[Named]) -> usize {
    parts
        .iter()
        .filter(|it| matches!(it.part, Part::Operand(_)))
        .count()
}

fn input_types(recorded: &Recorded) -> Vec<String> {
    recorded.inputs.iter().map(|input| type_text(&input.ir)).collect()
}
