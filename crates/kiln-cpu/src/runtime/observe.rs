//! Observing a step: its memory after each kernel.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::marker::PhantomData;

use crate::runtime::library::{KernelEvent, StepHooks};

/// Called after each kernel with its number and the step's memory.
pub type Observer<'a> = dyn FnMut(usize, &StepMemory<'_>) + 'a;

/// The memory of a step between two kernels.
#[derive(Debug)]
pub struct StepMemory<'a> {
    arena: *const u8,
    arena_bytes: usize,
    outputs: &'a [*mut u8],
    alive: PhantomData<&'a u8>,
}

impl StepMemory<'_> {
    /// `bytes` bytes of the arena from `offset`.
    ///
    /// # Panics
    ///
    /// If the arena ends before.
    pub fn arena(&self, offset: usize, bytes: usize) -> &[u8] {
        assert!(offset + bytes <= self.arena_bytes, "beyond the arena");
        // SAFETY: within the arena, which `observed` was promised to be valid; no kernel runs while the
        // observer does.
        unsafe { std::slice::from_raw_parts(self.arena.add(offset), bytes) }
    }

    /// The `bytes` bytes of an output; the size of the output's tensor.
    pub fn output(&self, index: usize, bytes: usize) -> &[u8] {
        if bytes == 0 {
            return &[];
        }
        // SAFETY: the caller of the step promised memory of the size of each output; no kernel runs while the
        // observer does.
        unsafe { std::slice::from_raw_parts(self.outputs[index], bytes) }
    }
}

/// Hooks that pass everything on, and call an observer between kernels.
pub(crate) struct Observed<'a, 'o> {
    hooks: &'a dyn StepHooks,
    memory: StepMemory<'a>,
    observer: RefCell<&'a mut Observer<'o>>,
    /// The kernel that ended last. It may consist of several loops: it is over when another begins.
    ended: Cell<Option<usize>>,
}

impl<'a, 'o> Observed<'a, 'o> {
    /// # Safety
    /// `arena` must be valid for `arena_bytes` bytes, and `outputs` for the sizes of their tensors, as long
    /// as the step runs.
    pub unsafe fn new(
        hooks: &'a dyn StepHooks,
        arena: *const u8,
        arena_bytes: usize,
        outputs: &'a [*mut u8],
        observer: &'a mut Observer<'o>,
    ) -> Self {
        Self {
            hooks,
            memory: StepMemory {
                arena,
                arena_bytes,
                outputs,
                alive: PhantomData,
            },
            observer: RefCell::new(observer),
            ended: Cell::new(None),
        }
    }

    /// Shows the memory after the last kernel. To be called when the step is over.
    pub fn finish(&self) {
        if let Some(kernel) = self.ended.take() {
            (self.observer.borrow_mut())(kernel, &self.memory);
        }
    }
}

impl StepHooks for Observed<'_, '_> {
    fn call_extern(&self, index: usize, buffers: *mut *mut c_void) -> Result<(), String> {
        self.hooks.call_extern(index, buffers)
    }

    fn over(&self) {
        self.hooks.over();
    }

    fn wants_events(&self) -> bool {
        true
    }

    fn kernel_event(&self, kernel: usize, event: KernelEvent) {
        match event {
            KernelEvent::Begin if self.ended.get() != Some(kernel) => self.finish(),
            KernelEvent::Begin => {}
            KernelEvent::End => self.ended.set(Some(kernel)),
        }
        if self.hooks.wants_events() {
            self.hooks.kernel_event(kernel, event);
        }
    }

    fn piece_event(&self, kernel: usize, thread: usize, begin: u64, end: u64) {
        if self.hooks.wants_events() {
            self.hooks.piece_event(kernel, thread, begin, end);
        }
    }
}
