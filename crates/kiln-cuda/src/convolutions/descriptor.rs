//! A descriptor of cuDNN's backend API, and its attributes.

use std::ffi::c_void;

use super::check;
use crate::error::Result;
use crate::sys::cudnn::{
    CudnnFunctions, CudnnHandle, Descriptor as Raw, attribute_type as kinds, descriptor as types,
};

/// A descriptor, destroyed when dropped. A descriptor that is an attribute of another must outlive the
/// other.
#[derive(Debug)]
pub(super) struct Descriptor {
    functions: CudnnFunctions,
    raw: Raw,
    name: &'static str,
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: created by `new`, destroyed here once.
        unsafe { (self.functions.cudnnBackendDestroyDescriptor)(self.raw) };
    }
}

/// Name of a type of descriptors in messages.
fn name(kind: i32) -> &'static str {
    match kind {
        types::CONVOLUTION => "making the convolution's descriptor",
        types::ENGINE => "looking at an engine",
        types::ENGINE_CONFIGURATION => "looking at an engine's configuration",
        types::HEURISTICS => "asking the heuristic",
        types::EXECUTION_PLAN => "making the execution plan",
        types::OPERATION_GRAPH => "making the operation graph",
        types::VARIANT_PACK => "making the variant pack",
        types::TENSOR => "making a tensor's descriptor",
        _ => "making the operation",
    }
}

impl Descriptor {
    /// A new descriptor of type `kind`.
    pub(super) fn new(functions: &CudnnFunctions, kind: i32) -> Result<Self> {
        let mut raw = Raw::NULL;
        // SAFETY: the pointer is to a handle on this stack.
        let status = unsafe { (functions.cudnnBackendCreateDescriptor)(kind, &raw mut raw) };
        check(status, name(kind), || "it".into())?;
        Ok(Self {
            functions: *functions,
            raw,
            name: name(kind),
        })
    }

    pub(super) fn raw(&self) -> Raw {
        self.raw
    }

    /// Sets an attribute whose elements are of `kind` and lie in memory as those of `T`.
    ///
    /// # Safety
    /// Elements of `kind` must be of the size of `T`.
    unsafe fn set<T>(&mut self, attribute: i32, kind: i32, elements: &[T]) -> Result<()> {
        let count = i64::try_from(elements.len()).unwrap_or(i64::MAX);
        // SAFETY: the descriptor is alive; the library copies `count` elements, of the size that the caller
        // promises.
        let status = unsafe {
            (self.functions.cudnnBackendSetAttribute)(
                self.raw,
                attribute,
                kind,
                count,
                elements.as_ptr().cast::<c_void>(),
            )
        };
        check(status, self.name, || format!("it (attribute {attribute})"))
    }

    /// Sets integers.
    pub(super) fn integers(&mut self, attribute: i32, numbers: &[i64]) -> Result<()> {
        // SAFETY: an integer of 64 bits.
        unsafe { self.set(attribute, kinds::INT64, numbers) }
    }

    /// Sets a number of f32.
    pub(super) fn float(&mut self, attribute: i32, number: f32) -> Result<()> {
        // SAFETY: an f32.
        unsafe { self.set(attribute, kinds::FLOAT, &[number]) }
    }

    /// Sets a value of an enumeration, whose type is `kind`.
    pub(super) fn choice(&mut self, attribute: i32, kind: i32, value: i32) -> Result<()> {
        // SAFETY: the library's enumerations are of the size of an `int`.
        unsafe { self.set(attribute, kind, &[value]) }
    }

    /// Sets another descriptor, which must be finalized and live as long as this one.
    pub(super) fn descriptor(&mut self, attribute: i32, other: &Self) -> Result<()> {
        // SAFETY: a descriptor is a pointer.
        unsafe { self.set(attribute, kinds::DESCRIPTOR, &[other.raw]) }
    }

    /// Sets the library's state.
    pub(super) fn handle(&mut self, attribute: i32, handle: CudnnHandle) -> Result<()> {
        // SAFETY: a handle is a pointer.
        unsafe { self.set(attribute, kinds::HANDLE, &[handle]) }
    }

    /// Sets addresses of the device's memory.
    pub(super) fn addresses(&mut self, attribute: i32, addresses: &[u64]) -> Result<()> {
        const { assert!(size_of::<u64>() == size_of::<*const c_void>()) };
        // SAFETY: an address of the device is as wide as a pointer.
        unsafe { self.set(attribute, kinds::POINTER, addresses) }
    }

    /// Sets a text.
    pub(super) fn text(&mut self, attribute: i32, text: &str) -> Result<()> {
        // SAFETY: characters are bytes.
        unsafe { self.set(attribute, kinds::CHAR, text.as_bytes()) }
    }

    /// Has the library check the attributes. Nothing can be set afterwards.
    pub(super) fn finalize(&mut self) -> Result<()> {
        // SAFETY: the descriptor is alive.
        let status = unsafe { (self.functions.cudnnBackendFinalize)(self.raw) };
        check(status, self.name, || "it".into())
    }

    /// Reads up to `elements.len()` elements of an attribute; returns how many the attribute has.
    ///
    /// # Safety
    /// Elements of `kind` must be of the size of `T`, and have no invalid values.
    unsafe fn get<T>(&self, attribute: i32, kind: i32, elements: &mut [T]) -> Result<usize> {
        let mut count = 0;
        let room = i64::try_from(elements.len()).unwrap_or(i64::MAX);
        let to = if elements.is_empty() {
            std::ptr::null_mut()
        } else {
            elements.as_mut_ptr().cast::<c_void>()
        };
        // SAFETY: the descriptor is alive, and the array has as many places as the library is told.
        let status = unsafe {
            (self.functions.cudnnBackendGetAttribute)(self.raw, attribute, kind, room, &raw mut count, to)
        };
        check(status, self.name, || format!("it (attribute {attribute})"))?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// An integer.
    pub(super) fn integer_of(&self, attribute: i32) -> Result<i64> {
        let mut number = [0];
        // SAFETY: an integer of 64 bits.
        unsafe { self.get(attribute, kinds::INT64, &mut number) }?;
        Ok(number[0])
    }

    /// The values of an enumeration with fewer than `COUNT` of them.
    pub(super) fn choices_of<const COUNT: usize>(&self, attribute: i32, kind: i32) -> Result<Vec<i32>> {
        // Later versions may know more.
        let mut values = vec![-1; 2 * COUNT];
        // SAFETY: the library's enumerations are of the size of an `int`.
        let count = unsafe { self.get(attribute, kind, &mut values) }?;
        values.truncate(count);
        Ok(values)
    }

    /// A text.
    pub(super) fn text_of(&self, attribute: i32) -> Result<String> {
        // SAFETY: characters are bytes.
        let length = unsafe { self.get::<u8>(attribute, kinds::CHAR, &mut []) }?;
        let mut bytes = vec![0_u8; length];
        // SAFETY: as above.
        let written = unsafe { self.get(attribute, kinds::CHAR, &mut bytes) }?;
        bytes.truncate(written);
        while bytes.last() == Some(&0) {
            bytes.pop();
        }
        String::from_utf8(bytes).map_err(|error| crate::CudaError::Convolution {
            convolution: "it".into(),
            call: self.name,
            what: format!("a text that is none: {error}"),
        })
    }

    /// Has the library write a descriptor into `other`.
    pub(super) fn descriptor_of(&self, attribute: i32, other: &mut Self) -> Result<()> {
        let mut raw = [other.raw];
        // SAFETY: a descriptor is a pointer; the library fills the object that it leads to.
        unsafe { self.get(attribute, kinds::DESCRIPTOR, &mut raw) }?;
        Ok(())
    }

    /// How many descriptors an attribute has.
    pub(super) fn descriptor_count(&self, attribute: i32) -> Result<usize> {
        // SAFETY: nothing is written.
        unsafe { self.get::<Raw>(attribute, kinds::DESCRIPTOR, &mut []) }
    }

    /// Has the library write descriptors into `others`; returns how many it wrote.
    pub(super) fn descriptors_of(&self, attribute: i32, others: &[Self]) -> Result<usize> {
        let mut raw: Vec<Raw> = others.iter().map(|other| other.raw).collect();
        // SAFETY: as in `descriptor_of`.
        unsafe { self.get(attribute, kinds::DESCRIPTOR, &mut raw) }
    }
}
