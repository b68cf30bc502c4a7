//! The graph of other sizes, from one recording.
//!
//! A program that is called with longer sentences records the same operations with other extents. Which
//! extents become others, and which stay, is found here from one graph and the dimensions of its arguments
//! that vary (*marked* dimensions):
//!
//! 1. Every dimension of every value is an *extent*. Operations make extents equal (operands of an addition,
//!    the
//!    contracted dimensions of a product): they form [`classes`].
//! 2. Other operations relate classes by arithmetic ([`relate`]): a reshape keeps the product, a
//!    concatenation
//!    adds, a convolution has its formula. Sizes of marked dimensions spread over these relations until nothing
//!    changes.
//! 3. The graph is written again with attributes that fit ([`rewrite`]), and every node is typed on the way.
//!
//! What does not fit is *pinned*: [`Pinned`] names the operation and the reason. A number of the program that
//! equals a size by chance, or that follows it by a formula of the program's own, cannot be told from one
//! recording. So the result is a guess, of which it is known that it is well typed: it serves as a sample,
//! and nothing is run in its place ([`crate::Line`] does the same with two recordings).

mod classes;
mod relate;
mod rewrite;

use std::fmt;

use crate::{Graph, Node, Provenance};
use classes::Classes;
use relate::Solver;

/// A dimension of an argument of a graph.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Dimension {
    /// Number of the parameter.
    pub parameter: u32,
    /// The dimension, from 0.
    pub axis: usize,
}

/// Why a dimension cannot have another size.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub struct Pinned {
    /// The operation that stands in the way: its name in the graph, and where it comes from; none if an
    /// argument does.
    pub operation: Option<(String, Provenance)>,
    /// What it requires.
    pub reason: String,
}

impl Pinned {
    fn by(graph: &Graph, node: Node, reason: impl Into<String>) -> Self {
        let data = graph.node(node);
        Self {
            operation: Some((data.op.name().to_owned(), data.provenance.clone())),
            reason: reason.into(),
        }
    }
}

/// `BaseFloat.Reshape at src/model.rs:30: ..`
impl fmt::Display for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((name, provenance)) = &self.operation {
            f.write_str(provenance.operation.as_deref().unwrap_or(name))?;
            if let Some(gradient_of) = &provenance.gradient_of {
                write!(f, " (gradient of {gradient_of})")?;
            }
            if let Some(location) = &provenance.location {
                write!(f, " at {location}")?;
            }
            f.write_str(": ")?;
        }
        f.write_str(&self.reason)
    }
}

/// Makes graphs of other sizes from one graph.
#[derive(Debug)]
pub struct Resizer<'a> {
    graph: &'a Graph,
    classes: Classes,
}

impl<'a> Resizer<'a> {
    /// For `graph`. `varies` says for each parameter whether its extents may become others: weights and
    /// optimizer state keep theirs.
    pub fn new(graph: &'a Graph, varies: &[bool]) -> Self {
        Self {
            graph,
            classes: Classes::new(graph, varies),
        }
    }

    /// The dimensions of arguments that always have the size of `dimension`, itself included.
    pub fn equals(&self, dimension: Dimension) -> Vec<Dimension> {
        let all = self.graph.parameters().iter().enumerate();
        let all = all.flat_map(|(parameter, &value)| {
            (0..self.graph.shape(value).rank()).map(move |axis| Dimension {
                parameter: parameter as u32,
                axis,
            })
        });
        let class = self.class(dimension);
        all.filter(|&other| self.class(other) == class).collect()
    }

    fn class(&self, dimension: Dimension) -> usize {
        let value = self.graph.parameters()[dimension.parameter as usize];
        self.classes.of(value, dimension.axis)
    }

    /// The graph in which dimensions of arguments have other sizes, and what follows from them.
    ///
    /// # Errors
    ///
    /// [`Pinned`] if a dimension must have the size that it has, or two of them must have one size.
    pub fn at(&self, sizes: &[(Dimension, usize)]) -> Result<Graph, Pinned> {
        let mut solver = Solver::new(self.graph, &self.classes);
        for &(dimension, size) in sizes {
            let value = self.graph.parameters()[dimension.parameter as usize];
            if self.graph.shape(value)[dimension.axis] <= 1 {
                return Err(Pinned {
                    operation: None,
                    reason:
                        "a dimension of size 1 is repeated where another size is not: it is a step of its own"
                            .to_owned(),
                });
            }
            solver.mark(self.class(dimension), size);
        }
        if let Some(conflict) = solver.conflict {
            return Err(conflict);
        }
        solver.solve();
        rewrite::rewrite(&solver).map_err(|pinned| solver.conflict.unwrap_or(pinned))
    }
}
