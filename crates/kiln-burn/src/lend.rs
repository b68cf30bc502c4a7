//! Memory of the program's that tensors read where it is, for the length of a call.
//!
//! [`lend`] makes tensors of borrowed slices and takes them back when the call is over. A step reads such a
//! tensor in place. Nothing writes into it: the loan holds a share of the buffer, and whoever writes a buffer
//! that is shared copies it first. What is still held when the call is over (by a tensor that the program
//! kept, by a recording that runs later) gets a copy of its own then.
//!
//! Only the thread that lends sees the borrowed memory. Another one cannot be kept from reading a tensor at
//! the moment when the call ends, so it is given the copy from the start. Compiled code is called with the
//! addresses that the lending thread has found, and has returned before the call ends.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::ThreadId;

use burn_backend::{DType, Shape};
use burn_flex::{FlexTensor, Layout};
use burn_std::{AllocationController, AllocationProperty, Bytes};
use bytemuck::NoUninit;
use kiln_cpu::AlignedBuffer;

use crate::execute::convert;
use crate::storage::Storage;

/// Bytes that were copied because an argument was not where a kernel can read it, or outlived its loan.
static COPIED: AtomicU64 = AtomicU64::new(0);

/// How many bytes of arguments were copied in this process: of arguments that are not row-major, of those
/// that something kept beyond the call they were lent for, and of those that a step writes over.
pub fn copied_bytes() -> u64 {
    COPIED.load(Ordering::Relaxed)
}

/// Counts a copy of an argument.
pub(crate) fn note_copy(bytes: usize) {
    COPIED.fetch_add(bytes as u64, Ordering::Relaxed);
}

/// The elements of a tensor, row-major, in memory of the program's.
#[derive(Clone, Debug)]
pub struct Lend<'a> {
    bytes: &'a [u8],
    shape: Shape,
    dtype: DType,
}

impl<'a> Lend<'a> {
    /// `elements` as a tensor of the given shape and type; none if there are not as many elements as the
    /// shape has, or `dtype` has elements of another size.
    pub fn new<E: NoUninit>(elements: &'a [E], shape: Shape, dtype: DType) -> Option<Self> {
        let fits = elements.len() == shape.num_elements() && size_of::<E>() == dtype.size();
        fits.then(|| Self {
            bytes: bytemuck::cast_slice(elements),
            shape,
            dtype,
        })
    }
}

/// Runs `call` on tensors that read what is lent, one for each, in order.
pub fn lend<R>(lent: Vec<Lend<'_>>, call: impl FnOnce(Vec<Storage>) -> R) -> R {
    let mut tensors = Vec::with_capacity(lent.len());
    let mut loans = Vec::with_capacity(lent.len());
    for it in lent {
        let memory = Arc::new(Lent {
            bytes: it.bytes.as_ptr_range(),
            lender: std::thread::current().id(),
            open: AtomicBool::new(true),
            copy: OnceLock::new(),
        });
        // SAFETY: the controller's memory has that many bytes, all initialised: they are those of a slice.
        let bytes = unsafe { Bytes::from_controller(Box::new(Controller(memory.clone())), it.bytes.len()) };
        let tensor = FlexTensor::new(bytes, Layout::contiguous(it.shape), it.dtype);
        loans.push(Loan {
            buffer: Some(tensor.data_arc()),
            memory: Some(memory),
        });
        tensors.push(Storage::from(tensor));
    }
    // Dropped when `call` returns or panics: `lent` borrows the slices for longer than that.
    let _loans = loans;
    call(tensors)
}

/// A loan that has not ended.
struct Loan {
    /// A share of the buffer, so that nobody takes it for his own and writes into it.
    buffer: Option<Arc<Bytes>>,
    memory: Option<Arc<Lent>>,
}

impl Drop for Loan {
    fn drop(&mut self) {
        let (Some(buffer), Some(memory)) = (self.buffer.take(), self.memory.take()) else {
            return;
        };
        // With one share left nobody can take another: that one is ours.
        if Arc::strong_count(&buffer) > 1 {
            memory.own();
        }
        memory.open.store(false, Ordering::Relaxed);
        // In this order: who has the last share of the buffer may write, and then has the memory alone, too.
        drop(memory);
        drop(buffer);
    }
}

/// Memory that is lent, and what stands for it afterwards.
struct Lent {
    bytes: Range<*const u8>,
    lender: ThreadId,
    /// Whether `bytes` may be read by the lender.
    open: AtomicBool,
    copy: OnceLock<AlignedBuffer>,
}

// SAFETY: the range is of a slice of plain bytes, which any thread may read while the loan is open. After that
// nobody reads it: see `Lent::own`.
unsafe impl Send for Lent {}
// SAFETY: as above.
unsafe impl Sync for Lent {}

impl Lent {
    fn len(&self) -> usize {
        self.bytes.end.addr() - self.bytes.start.addr()
    }

    /// The elements, wherever they are for the calling thread.
    fn read(&self) -> &[u8] {
        if self.open.load(Ordering::Relaxed) && std::thread::current().id() == self.lender {
            // SAFETY: the slice is borrowed for as long as the loan is open, and this thread is the one that
            // ends it: a reference that was handed out inside the call is not in use after it, because tensors
            // hand none out that live longer than an operation.
            return unsafe { std::slice::from_raw_parts(self.bytes.start, self.len()) };
        }
        self.own()
    }

    /// A copy of the elements, made once.
    fn own(&self) -> &[u8] {
        let copy = self.copy.get_or_init(|| {
            let mut buffer = AlignedBuffer::zeroed(self.len()).unwrap_or_else(|error| panic!("{error}"));
            // SAFETY: the slice is borrowed while the loan is open. It is open: whoever gets here has a share
            // of the buffer, and the end of the loan finds that share and waits here for the copy.
            let bytes = unsafe { std::slice::from_raw_parts(self.bytes.start, self.len()) };
            buffer.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
            note_copy(bytes.len());
            buffer
        });
        &copy.as_slice()[..self.len()]
    }
}

/// Reads lent memory on behalf of [`Bytes`].
struct Controller(Arc<Lent>);

impl AllocationController for Controller {
    fn alloc_align(&self) -> usize {
        // What copies by burn-std have: it knows no larger one.
        align_of::<u128>()
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Other
    }

    unsafe fn memory_mut(&mut self) -> &mut [MaybeUninit<u8>] {
        self.0.own();
        let len = self.0.len();
        let copy = Arc::get_mut(&mut self.0).and_then(|lent| lent.copy.get_mut());
        let bytes = copy.expect("while a loan is open it has a share of the buffer, and nobody writes");
        // SAFETY: the caller promises to write initialised bytes only.
        unsafe { convert::as_uninit_mut(&mut bytes.as_mut_slice()[..len]) }
    }

    fn memory(&self) -> &[MaybeUninit<u8>] {
        convert::as_uninit(self.0.read())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(elements: &[f32]) -> Lend<'_> {
        Lend::new(elements, Shape::from(vec![elements.len()]), DType::F32).unwrap()
    }

    fn address(tensor: &Storage) -> *const u8 {
        tensor.buffer().0
    }

    #[test]
    fn tensors_are_where_the_slices_are() {
        let (a, b) = (vec![1.0f32, 2.0, 3.0], vec![4.0f32, 5.0]);
        lend(vec![of(&a), of(&b[1..])], |tensors| {
            assert_eq!(address(&tensors[0]), a.as_ptr().cast());
            assert_eq!(address(&tensors[1]), b[1..].as_ptr().cast());
        });
        assert!(Lend::new(&a, Shape::from(vec![2]), DType::F32).is_none());
        assert!(Lend::new(&a, Shape::from(vec![3]), DType::F64).is_none());
    }

    #[test]
    fn what_is_kept_has_a_copy() {
        let mut a = vec![1.0f32, 2.0];
        let kept = lend(vec![of(&a)], |tensors| tensors[0].clone());
        a.fill(7.0);
        assert_ne!(address(&kept), a.as_ptr().cast());
        assert_eq!(kept.into_host().into_data().to_vec::<f32>().unwrap(), [1.0, 2.0]);
    }

    #[test]
    fn writing_copies() {
        let a = vec![1.0f32, 2.0];
        let kept = lend(vec![of(&a)], |mut tensors| {
            // The tensor given is not taken for unshared, though this is the only one of the call.
            let mut tensor = tensors.remove(0).into_host();
            assert!(!tensor.is_unique() && tensor.try_storage_mut::<f32>().is_none());
            let original = tensor.clone();
            tensor.storage_mut::<f32>()[0] = 9.0;
            assert_eq!(tensor.storage::<f32>(), [9.0, 2.0]);
            original
        });
        assert_eq!(a, [1.0, 2.0]);
        // After the call it is like any other.
        let mut kept = kept;
        kept.try_storage_mut::<f32>().expect("unshared")[1] = 8.0;
        assert_eq!(kept.storage::<f32>(), [1.0, 8.0]);
        assert_eq!(a, [1.0, 2.0]);
    }

    #[test]
    fn other_threads_read_a_copy() {
        let a = vec![1.0f32, 2.0];
        let (sender, receiver) = std::sync::mpsc::channel::<Storage>();
        let reader = std::thread::spawn(move || {
            let tensor = receiver.recv().unwrap();
            let place = address(&tensor) as usize;
            (place, tensor.into_host().into_data().to_vec::<f32>().unwrap())
        });
        lend(vec![of(&a)], |tensors| sender.send(tensors[0].clone()).unwrap());
        let lent = a.as_ptr() as usize;
        drop(a);
        let (place, values) = reader.join().unwrap();
        assert_ne!(place, lent);
        assert_eq!(values, [1.0, 2.0]);
    }

    #[test]
    fn a_panic_ends_the_loan() {
        let a = vec![1.0f32, 2.0];
        let mut kept = None;
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            lend(vec![of(&a)], |tensors| {
                kept = Some(tensors[0].clone());
                panic!("as planned");
            })
        }));
        assert!(result.is_err());
        drop(a);
        let kept = kept.unwrap().into_host().into_data();
        assert_eq!(kept.to_vec::<f32>().unwrap(), [1.0, 2.0]);
    }
}
