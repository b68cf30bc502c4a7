//! The table of tensors that exist: from id to storage, one table for the process.
//!
//! A tensor is here once it is materialised. While it is pending in a recording it is not;
//! [`crate::record`] knows it. If the step that computes it failed, the reason is here, and every use
//! reports it. The state of a replayed step is announced here and kept by the replay: it moves into the
//! table when a use asks for it.
//!
//! A replayed step relies on tensors that it does not look up at each run: constants and state. It leaves a
//! [`Watch`] on their ids, which trips when the program drops such a tensor or when another step begins to
//! write it.
//!
//! Tensors that several threads use may be dropped by one while another is about to use them: those stay a
//! little longer ([`lingering`]).

mod lingering;

use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::device::Place;
use crate::record::marks::Mark;
use crate::storage::Storage;
use burn_ir::TensorId;
use lingering::Users;
pub use lingering::{User, acting_for, note_operation, this_thread};
use rustc_hash::FxHashMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// The entry of a tensor that is not pending.
#[derive(Clone)]
pub enum Slot {
    /// Its elements.
    Ready(Storage),
    /// Why there are none.
    Failed(Arc<str>),
}

/// Keeps tensors on the table's behalf until a use asks for them: the state of a replayed step stays with
/// the step.
pub trait Keeper: Send + Sync {
    /// Hands tensor `index` over, by [`settle`]. It waits for a run of the step that is under way.
    fn give_back(&self, index: usize);

    /// Whether a tensor that is dropped must be handed over before.
    fn is_needed_for_drop(&self) -> bool {
        true
    }
}

/// Trips when a tensor it watches is dropped, or is written by another step than the watch's owner.
#[derive(Debug, Default)]
pub struct Watch(Mutex<Option<TensorId>>);

impl Watch {
    /// The tensor that tripped the watch first; none if all are as they were.
    pub fn tripped(&self) -> Option<TensorId> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Trips the watch by hand: `id` was found missing.
    pub fn trip(&self, id: TensorId) {
        let mut tripped = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        tripped.get_or_insert(id);
    }
}

/// Where the tensor of an id is.
enum Held {
    Known(Slot),
    /// The tensor of this number of the keeper.
    Kept(Arc<dyn Keeper>, usize),
}

/// The entry of an id.
struct Entry {
    held: Held,
    /// Whether a replayed step has written the tensor behind this id: no other step may regard it as a
    /// constant.
    written: bool,
    watches: Vec<Arc<Watch>>,
    /// Dimensions that the program marked.
    marks: Vec<Mark>,
    users: Users,
}

impl Entry {
    fn new(held: Held) -> Self {
        let mut users = Users::default();
        users.note();
        Self {
            held,
            users,
            written: false,
            watches: Vec::new(),
            marks: Vec::new(),
        }
    }

    /// Trips every watch but `own`.
    fn trip(&self, id: TensorId, own: Option<&Arc<Watch>>) {
        let others = self
            .watches
            .iter()
            .filter(|watch| own.is_none_or(|own| !Arc::ptr_eq(own, watch)));
        others.for_each(|watch| watch.trip(id));
    }
}

static TENSORS: LazyLock<Mutex<FxHashMap<TensorId, Entry>>> = LazyLock::new(Mutex::default);
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

fn tensors() -> MutexGuard<'static, FxHashMap<TensorId, Entry>> {
    // Every critical section is one map operation: a panic elsewhere cannot leave it half done.
    TENSORS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bits of an id that number tensors; those above say where the tensor lives.
const NUMBER_BITS: u32 = 56;

/// An id no tensor has had, of a tensor that lives at `place`.
pub fn new_id(place: Place) -> TensorId {
    let number = NEXT_ID.fetch_add(1, Ordering::Relaxed);
    TensorId::new((u64::from(place.index()) << NUMBER_BITS) | number)
}

/// The place where a tensor lives, by its id. Its elements may be elsewhere for the time being.
pub fn place(id: TensorId) -> Place {
    Place::from_index((id.value() >> NUMBER_BITS) as u8)
}

/// The number of an id: they count up, over all places.
pub fn number(id: TensorId) -> u64 {
    id.value() & ((1 << NUMBER_BITS) - 1)
}

/// The number of the id that [`new_id`] gives next, or a later one.
pub fn id_watermark() -> u64 {
    NEXT_ID.load(Ordering::Relaxed)
}

/// Enters `held` under `id`; watches that are on the id stay there, and trip.
fn enter(id: TensorId, held: Held) {
    let mut tensors = tensors();
    let previous = match tensors.get_mut(&id) {
        Some(entry) => {
            entry.trip(id, None);
            Some(std::mem::replace(&mut entry.held, held))
        }
        None => {
            tensors.insert(id, Entry::new(held));
            None
        }
    };
    drop(tensors);
    // A large buffer is freed here, after the lock is gone.
    drop(previous);
}

/// Enters a tensor.
pub fn insert(id: TensorId, tensor: Storage) {
    enter(id, Held::Known(Slot::Ready(tensor)));
}

/// Enters the reason why there is no tensor.
pub fn fail(id: TensorId, reason: Arc<str>) {
    enter(id, Held::Known(Slot::Failed(reason)));
}

/// Enters the reason why there is no tensor any more, if the program still has the id.
pub fn fail_if_known(id: TensorId, reason: &Arc<str>) {
    if contains(id) {
        fail(id, reason.clone());
    }
}

/// Enters a tensor that `keeper` computes when a use asks for it, as its number `index`.
pub fn defer(id: TensorId, keeper: Arc<dyn Keeper>, index: usize) {
    enter(id, Held::Kept(keeper, index));
}

/// Forgets a tensor that the program dropped; false if there is none.
pub fn discard(id: TensorId) -> bool {
    let mut tensors = tensors();
    let Some(entry) = tensors.get(&id) else {
        return false;
    };
    let unread = match &entry.held {
        Held::Kept(keeper, _) => !keeper.is_needed_for_drop() && !entry.users.are_several(),
        Held::Known(_) => false,
    };
    if !unread {
        drop(tensors);
        return remove(id).is_some();
    }
    let entry = tensors.remove(&id);
    drop(tensors);
    if let Some(entry) = &entry {
        entry.trip(id, None);
    }
    // The keeper may be dropped with its last tensor, so the lock is released first.
    drop(entry);
    true
}

/// Replaces the tensor of an id that a replayed step writes; does nothing if the program dropped the id.
/// `own` is the step's watch.
pub fn overwrite(id: TensorId, tensor: Storage, own: &Arc<Watch>) {
    exchange(id, Held::Known(Slot::Ready(tensor)), own);
}

/// Gives the tensor of `id` to `keeper`, as its number `index`: from now on the table only knows the
/// keeper. `own` is the keeper's watch. None if the program dropped the id.
pub fn keep(id: TensorId, keeper: Arc<dyn Keeper>, index: usize, own: &Arc<Watch>) -> Option<Slot> {
    match exchange(id, Held::Kept(keeper, index), own)? {
        Held::Known(slot) => Some(slot),
        // Another replay had it, which cannot be while this one has it outside; the tensor is with neither.
        Held::Kept(..) => Some(Slot::Failed("two steps had it as their state".into())),
    }
}

/// Replaces the entry of `id` by `held`, in one step: a thread that asks meanwhile finds the old or the new
/// entry.
fn exchange(id: TensorId, held: Held, own: &Arc<Watch>) -> Option<Held> {
    let mut tensors = tensors();
    let entry = tensors.get_mut(&id)?;
    entry.trip(id, Some(own));
    entry.written = true;
    let previous = std::mem::replace(&mut entry.held, held);
    drop(tensors);
    Some(previous)
}

/// Enters the tensor that a keeper had, unless it was dropped meanwhile.
pub fn settle(id: TensorId, slot: Slot) {
    let mut tensors = tensors();
    let previous = match tensors.get_mut(&id) {
        Some(entry) if matches!(entry.held, Held::Kept(..)) => {
            Some(std::mem::replace(&mut entry.held, Held::Known(slot)))
        }
        _ => None,
    };
    drop(tensors);
    drop(previous);
}

/// Puts `watch` on `id`. A tensor that is not there trips the watch at once.
pub fn watch(id: TensorId, watch: &Arc<Watch>) {
    match tensors().get_mut(&id) {
        Some(entry) if entry.watches.iter().any(|other| Arc::ptr_eq(other, watch)) => {}
        Some(entry) => entry.watches.push(watch.clone()),
        None => watch.trip(id),
    }
}

/// Takes `watch` off `id`.
pub fn unwatch(id: TensorId, watch: &Arc<Watch>) {
    if let Some(entry) = tensors().get_mut(&id) {
        entry.watches.retain(|other| !Arc::ptr_eq(other, watch));
    }
}

/// Marks a dimension of a tensor, in place of an earlier mark of it; false if no tensor has this id.
pub fn mark(id: TensorId, mark: Mark) -> bool {
    let mut tensors = tensors();
    let Some(entry) = tensors.get_mut(&id) else {
        return false;
    };
    entry.marks.retain(|other| other.axis != mark.axis);
    entry.marks.push(mark);
    true
}

/// The marked dimensions of a tensor.
pub fn marks(id: TensorId) -> Vec<Mark> {
    tensors()
        .get(&id)
        .map_or_else(Vec::new, |entry| entry.marks.clone())
}

/// Whether the program has a tensor of this id that is not pending.
pub fn contains(id: TensorId) -> bool {
    tensors().contains_key(&id)
}

/// Whether the program has a tensor of this id that has elements, or that a step keeps.
pub fn is_ready(id: TensorId) -> bool {
    let tensors = tensors();
    let entry = tensors.get(&id);
    entry.is_some_and(|entry| !matches!(entry.held, Held::Known(Slot::Failed(_))))
}

/// Whether a replayed step writes, or has written, the tensor behind this id.
pub fn is_written(id: TensorId) -> bool {
    tensors().get(&id).is_some_and(|entry| entry.written)
}

/// The tensor, shared with the table. A thread may ask for one that another has dropped meanwhile.
pub fn get(id: TensorId) -> Option<Slot> {
    loop {
        let mut tensors = tensors();
        let Some(entry) = tensors.get_mut(&id) else {
            return lingering::get(id);
        };
        entry.users.note();
        let (keeper, index) = match &entry.held {
            Held::Known(slot) => return Some(slot.clone()),
            Held::Kept(keeper, index) => (keeper.clone(), *index),
        };
        // Without the lock: the keeper enters the tensor here.
        drop(tensors);
        keeper.give_back(index);
    }
}

/// The tensor, no longer in the table.
pub fn remove(id: TensorId) -> Option<Slot> {
    loop {
        let mut tensors = tensors();
        let Some(entry) = tensors.get_mut(&id) else {
            return lingering::get(id);
        };
        entry.users.note();
        if let Held::Kept(keeper, index) = &entry.held {
            let (keeper, index) = (keeper.clone(), *index);
            drop(tensors);
            keeper.give_back(index);
            continue;
        }
        entry.trip(id, None);
        let Entry { held, users, .. } = tensors.remove(&id)?;
        let Held::Known(slot) = held else {
            unreachable!("looked at under the same lock");
        };
        lingering::linger(id, &slot, &users);
        return Some(slot);
    }
}

/// Says that the program is about to give tensors that exist now to another thread, such as one that writes a
/// checkpoint while the training goes on.
///
/// Burn takes down its count of handles before an operation is handed over. So the last use of a tensor on
/// this thread may arrive while the other thread's first use of that tensor is on its way, and the first use
/// would find no elements. Tensors that are shared stay a second longer than their last use. Kiln knows by
/// itself of threads that have used a tensor before.
pub fn share() {
    tensors().values_mut().for_each(|entry| entry.users.note_others());
}

/// Bytes that all tensors hold, but for those that a keeper has: views of one buffer count once.
pub fn bytes() -> usize {
    lingering::sweep();
    let tensors = tensors();
    let buffers = tensors.values().filter_map(|entry| match &entry.held {
        Held::Known(Slot::Ready(tensor)) => Some(tensor.buffer()),
        Held::Known(Slot::Failed(_)) | Held::Kept(..) => None,
    });
    let buffers: FxHashMap<*const u8, usize> = buffers.collect();
    buffers.values().sum()
}

/// Number of tensors, for leak tests.
pub fn len() -> usize {
    tensors().len()
}
