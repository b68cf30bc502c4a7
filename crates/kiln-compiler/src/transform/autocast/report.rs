//! The report on autocast, for people: stored in the cache with the step, without references to the graph.

use std::fmt;

use kiln_graph::op::Op;
use kiln_graph::{DType, Graph, NodeData, TensorType, Users, Value};
use serde::{Deserialize, Serialize};

use crate::decision::OriginReport;

/// The types in which values live, and the casts between them.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct AutocastReport {
    /// The type of 16 bits, by name.
    pub dtype: String,
    /// The values whose type was decided, in the order of the graph.
    pub stored: Vec<StoredReport>,
    /// The casts, one entry for each value that is cast.
    pub casts: Vec<CastReport>,
    /// The arguments that are read in place of a cast of another argument, whose copies they are.
    #[serde(default)]
    pub copies: Vec<CopyReport>,
}

/// An argument that holds the rounded elements of another ([`Graph::note_copy`]) and is read for them.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct CopyReport {
    /// Its number.
    pub argument: u32,
    /// The number of the other.
    pub of: u32,
    /// Its element type and shape.
    pub ty: String,
}

/// A value whose type was decided.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct StoredReport {
    /// Element type in memory, and shape.
    pub ty: String,
    /// Size in that type.
    pub bytes: u64,
    /// Why that type.
    pub reason: Reason,
    /// The operation that makes it.
    pub origin: OriginReport,
}

/// Why a value is stored in 16 bits or in f32.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq, Hash)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// 16 bits: a product, a convolution or attention made it.
    Product,
    /// 16 bits: one of those, or a pooling, reads it.
    Operand,
    /// 16 bits: it follows from a product, and another kernel reads it again after the next product, as
    /// with a residual stream.
    ReadAgain,
    /// 16 bits: it is a gradient, and read again by what depends on its sum over the batch, as with batch
    /// normalisation.
    Summed,
    /// 16 bits behind the forward pass: a gradient multiplies by it, and it was expensive to compute.
    Factor,
    /// 16 bits: a pooling of 16 bits made it.
    Pool,
    /// f32: an update reads it, as it does the gradient of a parameter.
    Update,
    /// f32: it leaves the step.
    Output,
    /// f32: operations that support no other type read it as a whole.
    Whole,
    /// f32: the program asked for full precision.
    FullPrecision,
}

impl Reason {
    /// The reason in words.
    pub const fn words(self) -> &'static str {
        match self {
            Reason::Product => "made by a product",
            Reason::Operand => "operand of a product",
            Reason::ReadAgain => "read again behind a product",
            Reason::Summed => "read again behind its sum over the batch",
            Reason::Factor => "factor of a gradient",
            Reason::Pool => "made by a pooling",
            Reason::Update => "read by an update",
            Reason::Output => "leaves the step",
            Reason::Whole => "read by an operation of f32",
            Reason::FullPrecision => "full precision was asked for",
        }
    }
}

/// A value of which there is a cast.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct CastReport {
    /// Its own element type, and shape.
    pub from: String,
    /// The element type that it is cast to.
    pub to: String,
    /// The tensor argument that it is, if it is one: such casts run at the start of the step, all others
    /// where the value is made or read.
    pub argument: Option<u32>,
    /// The operation that makes it.
    pub origin: OriginReport,
    /// The operations that read the cast.
    pub users: Vec<OriginReport>,
}

impl StoredReport {
    pub(super) fn new(ty: &TensorType, reason: Reason, data: &NodeData) -> Self {
        Self {
            ty: ty.to_string(),
            bytes: ty.bytes() as u64,
            reason,
            origin: OriginReport::of(data),
        }
    }
}

impl AutocastReport {
    /// The report on `graph`, as autocast made it.
    pub(super) fn new(dtype: DType, stored: Vec<StoredReport>, graph: &Graph) -> Self {
        let users = graph.users();
        let mut casts: Vec<(Value, CastReport)> = Vec::new();
        for (_, data) in graph.nodes() {
            let Op::Cast(to) = data.op else { continue };
            let value = data.inputs[0];
            let from = graph.dtype(value);
            if !from.is_float() || from != dtype && to != dtype {
                continue;
            }
            let readers = readers(graph, &users, data.outputs[0]);
            match casts
                .iter_mut()
                .find(|(own, cast)| *own == value && cast.to == to.name())
            {
                Some((_, cast)) => cast.users.extend(readers),
                None => {
                    let maker = graph.def(value);
                    let argument = match maker.op {
                        Op::Parameter { index, .. } => Some(index),
                        _ => None,
                    };
                    let cast = CastReport {
                        from: graph.ty(value).to_string(),
                        to: to.to_string(),
                        argument,
                        origin: OriginReport::of(maker),
                        users: readers,
                    };
                    casts.push((value, cast));
                }
            }
        }
        let mut casts: Vec<CastReport> = casts.into_iter().map(|(_, cast)| cast).collect();
        casts.iter_mut().for_each(CastReport::merge_users);
        Self {
            dtype: dtype.to_string(),
            stored,
            casts,
            copies: copies(graph, &users),
        }
    }

    /// Every origin of the report, to put lines in place of marks.
    pub(crate) fn origins(&mut self) -> impl Iterator<Item = &mut OriginReport> {
        let stored = self.stored.iter_mut().map(|value| &mut value.origin);
        let casts = self.casts.iter_mut();
        stored.chain(casts.flat_map(|cast| std::iter::once(&mut cast.origin).chain(&mut cast.users)))
    }

    /// Leaves out readers that are named twice.
    pub(crate) fn merge_users(&mut self) {
        self.casts.iter_mut().for_each(CastReport::merge_users);
    }
}

impl CastReport {
    fn merge_users(&mut self) {
        let mut seen: Vec<OriginReport> = Vec::new();
        for user in self.users.drain(..) {
            if !seen.contains(&user) {
                seen.push(user);
            }
        }
        self.users = seen;
    }
}

/// The arguments of `graph` that are copies of others and are read.
fn copies(graph: &Graph, users: &Users) -> Vec<CopyReport> {
    let copy = |&value: &Value| match graph.def(value).op {
        Op::Parameter {
            index,
            copy_of: Some(of),
            ..
        } if users.count(value) > 0 => Some(CopyReport {
            argument: index,
            of,
            ty: graph.ty(value).to_string(),
        }),
        _ => None,
    };
    graph.parameters().iter().filter_map(copy).collect()
}

/// The operations that read `value`.
fn readers(graph: &Graph, users: &Users, value: Value) -> Vec<OriginReport> {
    users
        .of(value)
        .iter()
        .map(|&user| OriginReport::of(graph.node(user)))
        .collect()
}

impl fmt::Display for AutocastReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "autocast to {}", self.dtype)?;
        for value in &self.stored {
            writeln!(f, "  {}: {} ({})", value.ty, value.origin, value.reason.words())?;
        }
        for cast in &self.casts {
            let of = match cast.argument {
                Some(index) => format!("argument {index}"),
                None => cast.origin.to_string(),
            };
            let users: Vec<String> = cast.users.iter().map(ToString::to_string).collect();
            writeln!(
                f,
                "  cast of {} to {}: {of}, for {}",
                cast.from,
                cast.to,
                users.join(", ")
            )?;
        }
        for CopyReport { argument, of, ty } in &self.copies {
            writeln!(
                f,
                "  {ty}: argument {argument}, a copy of argument {of} that the caller keeps"
            )?;
        }
        Ok(())
    }
}
