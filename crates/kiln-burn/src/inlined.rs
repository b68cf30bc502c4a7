//! Functions that are one operation of a recording.
//!
//! A transformed function (`kiln::func`) that is called inside a region is recorded by itself, transformed,
//! and put into the region's recording as one operation ([`crate::record::inline`]). The operation is an
//! `OperationIr::Custom` whose id stands for one graph; this file knows the graph of each id. Import puts the
//! graph in the place of the operation (`import/inline.rs`), so that no executor meets it.
//!
//! Equal calls (the same recording of the closure, under the same transforms) have one id. Guards compare
//! ids with the other words of a recording, so a guard that accepts a call accepts a graph. An id is that of
//! its graph for as long as somebody keeps the graph: recordings with the operation and guards of compiled
//! steps do (`record/functions.rs`).
//!
//! Runtime scalars of the closure are operands, tensors of one element that an operation in front of it
//! fills, so they are runtime scalars of the region's recording. Random draws take their streams when the
//! closure calls them; the operation has them all ([`Inlined::draws`]).

use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

use burn_ir::OperationIr;
use kiln_graph::Graph;
use rustc_hash::FxHashMap;

/// The beginning of the ids of these operations; the name and a number follow.
const PREFIX: &str = "function ";

/// A function that is one operation.
#[derive(Debug)]
pub(crate) struct Inlined {
    pub(crate) id: String,
    pub(crate) body: Body,
}

/// A graph, and where its arguments come from.
#[derive(Debug)]
pub(crate) struct Body {
    pub(crate) graph: Graph,
    /// For each parameter of the graph, the operand that it is; none if nothing reads it.
    pub(crate) parameters: Vec<Option<usize>>,
    /// The parameters that the caller's tensors are, in their order, whether or not something reads them.
    pub(crate) given: Vec<usize>,
    /// The source of each runtime scalar of the graph.
    pub(crate) scalars: Vec<Number>,
    /// The operands, in order.
    pub(crate) operands: Vec<Operand>,
    /// How many random operations the closure has.
    pub(crate) draws: usize,
}

/// Where a runtime scalar of a function's graph comes from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Number {
    /// The only element of this operand.
    Operand(usize),
    /// The seed of this draw.
    Seed(usize),
    /// The stream of this draw.
    Stream(usize),
    /// Nothing reads it.
    Unused,
}

/// An operand of a function's operation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operand {
    /// A tensor that the caller gives.
    Given(usize),
    /// An input of the closure's recording.
    Captured(usize),
    /// A result of the closure that it did not compute.
    Result(usize),
    /// A runtime scalar of the closure's recording, of this type.
    Scalar(usize, kiln_graph::DType),
}

#[derive(Default)]
struct Known {
    by_id: FxHashMap<String, Weak<Inlined>>,
    /// How many functions were registered.
    count: u64,
}

static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);

fn known() -> MutexGuard<'static, Known> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `body`, which the program calls `name`, under a new id.
pub(crate) fn register(name: &str, body: Body) -> Arc<Inlined> {
    let mut known = known();
    known.by_id.retain(|_, function| function.strong_count() > 0);
    known.count += 1;
    let function = Arc::new(Inlined {
        id: format!("{PREFIX}{name} {}", known.count),
        body,
    });
    known.by_id.insert(function.id.clone(), Arc::downgrade(&function));
    function
}

/// The id of a function's operation; none if it is another operation.
pub(crate) fn id(operation: &OperationIr) -> Option<&str> {
    match operation {
        OperationIr::Custom(op) => Some(&*op.id).filter(|id| is_function(id)),
        _ => None,
    }
}

/// The function of an operation; none if it is another operation, or nobody keeps the function.
pub(crate) fn find(operation: &OperationIr) -> Option<Arc<Inlined>> {
    known().by_id.get(id(operation)?).and_then(Weak::upgrade)
}

/// Whether an id is that of a function.
pub(crate) fn is_function(id: &str) -> bool {
    id.starts_with(PREFIX)
}

/// The name of a function's operation: the program's name for it, and the same for all its graphs.
pub(crate) fn name(operation: &OperationIr) -> Option<String> {
    let (name, _) = id(operation)?.strip_prefix(PREFIX)?.rsplit_once(' ')?;
    Some(format!("func.{name}"))
}

impl Inlined {
    /// How many streams of the generator a call takes.
    pub(crate) fn draws(&self) -> usize {
        self.body.draws
    }
}
