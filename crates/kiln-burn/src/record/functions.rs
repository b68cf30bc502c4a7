//! The functions that a recording calls as one operation ([`super::inline`]), with what their closures were.
//!
//! [`crate::inlined`] knows a function's graph, and nothing of recordings. The guard of the closure's recording
//! stands here beside it: it keeps the functions that the closure calls, and says what differs when another
//! closure is called in its place. Recordings and guards keep the functions among their operations, and with
//! them both.

use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

use burn_ir::OperationIr;
use rustc_hash::FxHashMap;

use super::guard::Guard;
use crate::inlined::{self, Body, Inlined};

/// A function that is one operation of recordings.
#[derive(Debug)]
pub struct Function {
    /// Its id and graph.
    pub(crate) inlined: Arc<Inlined>,
    /// The closure's recording.
    pub(crate) guard: Guard,
}

/// Functions that somebody keeps, by the ids of their operations.
static KNOWN: LazyLock<Mutex<FxHashMap<String, Weak<Function>>>> = LazyLock::new(Mutex::default);

fn known() -> MutexGuard<'static, FxHashMap<String, Weak<Function>>> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A new function, which the program calls `name`.
pub(super) fn register(name: &str, body: Body, guard: Guard) -> Arc<Function> {
    let inlined = inlined::register(name, body);
    let function = Arc::new(Function { inlined, guard });
    let mut known = known();
    known.retain(|_, function| function.strong_count() > 0);
    known.insert(function.inlined.id.clone(), Arc::downgrade(&function));
    function
}

/// The function of an operation; none if it is another operation, or nobody keeps the function.
pub(super) fn find(operation: &OperationIr) -> Option<Arc<Function>> {
    let id = inlined::id(operation)?;
    known().get(id).and_then(Weak::upgrade)
}
