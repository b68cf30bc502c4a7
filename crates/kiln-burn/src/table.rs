//! The table of tensors that exist: id to burn-flex tensor, one for the process.
//!
//! A tensor is here once it is materialised. While it is pending in a recording it is not; [`crate::record`] knows it. If what was to
//! produce it failed, the reason is here, and every use reports it. The state of a replayed step is announced here and kept by the replay: it
//! comes into the table when somebody asks for it.

use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use burn_flex::FlexTensor;
use burn_ir::TensorId;
use rustc_hash::FxHashMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// What is known of a tensor that is not pending.
#[derive(Clone)]
pub enum Slot {
    /// Its elements.
    Ready(FlexTensor),
    /// Why there are none.
    Failed(Arc<str>),
}

/// Keeps tensors on the table's behalf until somebody asks for them: the state of a replayed step stays with the step.
pub trait Keeper: Send + Sync {
    /// Hands tensor `index` over, by [`settle`]. Whoever runs the step meanwhile is waited for.
    fn give_back(&self, index: usize);
}

/// What the table has for an id.
enum Entry {
    Known(Slot),
    /// The tensor of this number of the keeper.
    Kept(Arc<dyn Keeper>, usize),
}

static TENSORS: LazyLock<Mutex<FxHashMap<TensorId, Entry>>> = LazyLock::new(Mutex::default);
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

fn tensors() -> MutexGuard<'static, FxHashMap<TensorId, Entry>> {
    // Every critical section is one map operation: a panic elsewhere cannot leave it half done.
    TENSORS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An id no tensor has had.
pub fn new_id() -> TensorId {
    TensorId::new(NEXT_ID.fetch_add(1, Ordering::Relaxed))
}

/// The id [`new_id`] gives next, or a later one.
pub fn id_watermark() -> u64 {
    NEXT_ID.load(Ordering::Relaxed)
}

/// Enters a tensor.
pub fn insert(id: TensorId, tensor: FlexTensor) {
    let previous = tensors().insert(id, Entry::Known(Slot::Ready(tensor)));
    // A large buffer is freed here, after the lock is gone.
    drop(previous);
}

/// Enters the reason why there is no tensor.
pub fn fail(id: TensorId, reason: Arc<str>) {
    let previous = tensors().insert(id, Entry::Known(Slot::Failed(reason)));
    drop(previous);
}

/// Enters that `keeper` has the tensor, as its number `index`.
pub fn keep(id: TensorId, keeper: Arc<dyn Keeper>, index: usize) {
    let previous = tensors().insert(id, Entry::Kept(keeper, index));
    drop(previous);
}

/// Enters what a keeper had, unless the tensor was dropped meanwhile.
pub fn settle(id: TensorId, slot: Slot) {
    let mut tensors = tensors();
    let previous = match tensors.get_mut(&id) {
        Some(entry @ Entry::Kept(..)) => Some(std::mem::replace(entry, Entry::Known(slot))),
        _ => None,
    };
    drop(tensors);
    drop(previous);
}

/// The tensor, shared with the table.
pub fn get(id: TensorId) -> Option<Slot> {
    loop {
        let (keeper, index) = match tensors().get(&id)? {
            Entry::Known(slot) => return Some(slot.clone()),
            Entry::Kept(keeper, index) => (keeper.clone(), *index),
        };
        // Without the lock: the keeper enters the tensor here.
        keeper.give_back(index);
    }
}

/// The tensor, no longer in the table.
pub fn remove(id: TensorId) -> Option<Slot> {
    loop {
        let mut tensors = tensors();
        let (keeper, index) = match tensors.remove(&id)? {
            Entry::Known(slot) => return Some(slot),
            Entry::Kept(keeper, index) => (keeper, index),
        };
        tensors.insert(id, Entry::Kept(keeper.clone(), index));
        drop(tensors);
        keeper.give_back(index);
    }
}

/// Bytes that all tensors hold, but for those that a keeper has: views of one buffer count once.
pub fn bytes() -> usize {
    let tensors = tensors();
    let buffers = tensors.values().filter_map(|entry| match entry {
        Entry::Known(Slot::Ready(tensor)) => Some((tensor.bytes().as_ptr(), tensor.bytes().len())),
        Entry::Known(Slot::Failed(_)) | Entry::Kept(..) => None,
    });
    let buffers: FxHashMap<*const u8, usize> = buffers.collect();
    buffers.values().sum()
}

/// Number of tensors, for leak tests.
pub fn len() -> usize {
    tensors().len()
}
