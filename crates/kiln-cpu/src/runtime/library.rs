//! Loading a shared object and calling its entry, or the functions of a list.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_void};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{CpuError, Result};
use crate::runtime::abi::{ABI_VERSION, RawRuntime, RawStep, Signature, Task};
use crate::runtime::buffer::{ALIGNMENT, AlignedBuffer};
use crate::runtime::functions::{self, CallList};
use crate::runtime::thread_pool::ThreadPool;

/// A loaded shared object; unloaded when the last [`Step`] of it is gone.
#[derive(Debug, Clone)]
pub struct Library {
    inner: Arc<Loaded>,
}

#[derive(Debug)]
struct Loaded {
    entry: RawStep,
    signature: Signature,
    path: PathBuf,
    /// Last, so that nothing above outlives the mapping it points into.
    _object: libloading::Library,
}

impl Library {
    /// Loads a shared object made by [`Toolchain::build`](crate::Toolchain::build).
    ///
    /// # Errors
    /// [`CpuError::Load`] when the file is no shared object or lacks `kiln_step` or `kiln_step_signature`;
    /// [`CpuError::Abi`] when it was built for another version of the contract.
    pub fn load(path: &Path) -> Result<Self> {
        let failed = |error| CpuError::Load {
            path: path.to_owned(),
            reason: in_full(&error),
        };
        let object = open(path).map_err(failed)?;
        // SAFETY: the build declares both symbols with exactly these types, in `kiln_runtime.h`.
        let (entry, signature) = unsafe {
            let entry = *object.get::<RawStep>(b"kiln_step\0").map_err(failed)?;
            let signature = **object
                .get::<*const Signature>(b"kiln_step_signature\0")
                .map_err(failed)?;
            (entry, signature)
        };
        if signature.abi() != ABI_VERSION {
            let (found, expected) = (signature.abi(), ABI_VERSION);
            return Err(CpuError::Abi {
                path: path.to_owned(),
                found,
                expected,
            });
        }
        let inner = Arc::new(Loaded {
            entry,
            signature,
            path: path.to_owned(),
            _object: object,
        });
        Ok(Self { inner })
    }

    /// Where the object was loaded from (it may be gone since).
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// The step inside.
    pub fn step(&self) -> Step {
        Step {
            code: StepCode::Library(self.clone()),
        }
    }
}

/// A compiled step, ready to be called any number of times, from one thread at a time or several.
#[derive(Debug, Clone)]
pub struct Step {
    code: StepCode,
}

/// What a step runs.
#[derive(Debug, Clone)]
enum StepCode {
    /// The entry of a shared object.
    Library(Library),
    /// A list of calls.
    Calls(Arc<CallList>),
}

/// The arguments of a call of a step.
#[derive(Debug)]
pub struct StepArguments<'a> {
    /// One pointer for each input, in the order of the graph's inputs.
    pub inputs: &'a [*const u8],
    /// One pointer for each output; an output that reuses an input's buffer has the same pointer.
    pub outputs: &'a [*mut u8],
    /// Working memory of at least the signature's `arena_bytes`; its contents need not survive.
    pub arena: &'a mut AlignedBuffer,
    /// Scalar arguments, 8 bytes each, as the generated code reads them.
    pub scalars: &'a [u64],
}

/// Start or end of one kernel of a profiled step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelEvent {
    /// The kernel is about to run.
    Begin,
    /// The kernel is done.
    End,
}

/// Callbacks of a running step into its caller.
pub trait StepHooks {
    /// Runs operation `index` that stayed outside the compiled code. `buffers` points to the operation's
    /// input and output pointers, as many as the compiler recorded for it. The step stops at the first error.
    fn call_extern(&self, index: usize, buffers: *mut *mut c_void) -> std::result::Result<(), String>;

    /// Called when the step is over, however it ended, before its working memory is in other use.
    fn over(&self) {}

    /// Whether [`kernel_event`](Self::kernel_event) wants to be called.
    fn wants_events(&self) -> bool {
        false
    }

    /// Called on the calling thread around each kernel.
    fn kernel_event(&self, _kernel: usize, _event: KernelEvent) {}

    /// Called on the calling thread after each parallel loop of a kernel, once for each other thread that had
    /// a piece of it, with the times ([`kiln_profile::now`]) at which that thread began and ended. Only if
    /// [`wants_events`](Self::wants_events).
    fn piece_event(&self, _kernel: usize, _thread: usize, _begin: u64, _end: u64) {}
}

/// Hooks of a step without operations outside its code.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoHooks;

impl StepHooks for NoHooks {
    fn call_extern(&self, _: usize, _: *mut *mut c_void) -> std::result::Result<(), String> {
        Err("the caller gave no way to run operations outside the step".into())
    }
}

/// The context that `kiln_runtime.pool` points to during a call.
struct Context<'a> {
    pool: &'a ThreadPool,
    hooks: &'a dyn StepHooks,
    failure: RefCell<Option<String>>,
    /// The kernel that runs now; kept only for hooks that want events.
    kernel: Cell<usize>,
}

impl Step {
    /// The step's signature.
    pub fn signature(&self) -> &Signature {
        match &self.code {
            StepCode::Library(library) => &library.inner.signature,
            StepCode::Calls(calls) => calls.signature(),
        }
    }

    /// A step that is a list of calls.
    pub(crate) fn of_calls(calls: CallList) -> Self {
        Self {
            code: StepCode::Calls(Arc::new(calls)),
        }
    }

    /// Runs the step once on the threads of `pool`; returns when it is done.
    ///
    /// # Errors
    /// [`CpuError::Arguments`] before anything ran; [`CpuError::Extern`] when an operation outside the step
    /// failed, in which case the outputs hold no meaningful values; [`CpuError::Check`] when a check of the
    /// step failed.
    ///
    /// # Safety
    /// Every pointer must be valid for the whole size of the tensor it stands for, aligned to its element (an
    /// output to 64 bytes), and nobody else may write the inputs or touch the outputs
    /// during the call. Buffers may only coincide where the compiled step aliases an output with an input.
    /// The shared object must come from a source this process trusts.
    pub unsafe fn run(
        &self,
        pool: &ThreadPool,
        arguments: StepArguments<'_>,
        hooks: &dyn StepHooks,
    ) -> Result<()> {
        self.check(&arguments)?;
        let context = Context {
            pool,
            hooks,
            failure: RefCell::new(None),
            kernel: Cell::new(0),
        };
        let runtime = RawRuntime {
            pool: (&raw const context).cast_mut().cast(),
            parallel_for: if hooks.wants_events() {
                timed_parallel_for
            } else {
                parallel_for
            },
            threads: pool.threads() as c_int,
            kernel_event: hooks.wants_events().then_some(kernel_event),
            call_extern,
        };
        let _awake = pool.keep_awake();
        // SAFETY: the counts were checked against the signature, the rest is this function's own contract.
        // `runtime` and `context` outlive the call, and the callbacks below are given back exactly the
        // context they expect.
        let status = unsafe {
            match &self.code {
                StepCode::Library(library) => (library.inner.entry)(
                    &runtime,
                    arguments.inputs.as_ptr().cast(),
                    arguments.outputs.as_ptr().cast(),
                    arguments.arena.as_mut_ptr().cast(),
                    arguments.scalars.as_ptr(),
                ),
                StepCode::Calls(calls) => calls.run(&functions::Call {
                    runtime: &runtime,
                    inputs: arguments.inputs,
                    outputs: arguments.outputs,
                    arena: arguments.arena.as_mut_ptr(),
                    scalars: arguments.scalars,
                }),
            }
        };
        hooks.over();
        if status == 0 {
            return Ok(());
        }
        if status < 0 {
            let number = (-1 - status) as usize;
            return Err(CpuError::Check { number });
        }
        let message = context.failure.take().unwrap_or_else(|| "no message".into());
        Err(CpuError::Extern {
            index: (status - 1) as usize,
            message,
        })
    }

    fn check(&self, arguments: &StepArguments<'_>) -> Result<()> {
        let signature = self.signature();
        let given = [
            ("inputs", signature.inputs, arguments.inputs.len() as u64),
            ("outputs", signature.outputs, arguments.outputs.len() as u64),
            ("scalars", signature.scalars, arguments.scalars.len() as u64),
        ];
        for (what, expected, given) in given {
            if expected != given {
                return Err(CpuError::Arguments {
                    what,
                    expected,
                    given,
                });
            }
        }
        let arena = arguments.arena.len() as u64;
        if arena < signature.arena_bytes {
            return Err(CpuError::Arguments {
                what: "arena bytes",
                expected: signature.arena_bytes,
                given: arena,
            });
        }
        debug_assert_eq!(arguments.arena.as_ptr() as usize % ALIGNMENT, 0);
        Ok(())
    }
}

/// Resolves every symbol now: a missing one is an error here and not a crash in the middle of a step.
#[cfg(unix)]
pub(super) fn open(path: &Path) -> std::result::Result<libloading::Library, libloading::Error> {
    use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
    // SAFETY: loading runs the object's initialisers; generated sources have none.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map(Into::into)
}

#[cfg(not(unix))]
pub(super) fn open(path: &Path) -> std::result::Result<libloading::Library, libloading::Error> {
    // SAFETY: loading runs the object's initialisers; generated sources have none.
    unsafe { libloading::Library::new(path) }
}

/// SAFETY of the three callbacks: generated code passes `kiln_runtime.pool` back unchanged, and `Step::run`
/// points it at a `Context` that lives until the entry returns.
unsafe fn context<'a>(pool: *mut c_void) -> &'a Context<'a> {
    // SAFETY: see above.
    unsafe { &*pool.cast::<Context<'a>>() }
}

unsafe extern "C" fn parallel_for(pool: *mut c_void, n: i64, grain: i64, task: Task, ctx: *mut c_void) {
    // SAFETY: see `context`. The task and its context come from generated code, which keeps the context alive
    // on its stack and splits its work so that pieces do not overlap.
    unsafe { context(pool).pool.run_task(n, grain, task, ctx) };
}

/// A task whose pieces are timed.
struct Timed {
    task: Task,
    ctx: *mut c_void,
    /// When each thread began its first part and ended its last; 0 if it had none.
    times: Box<[(AtomicU64, AtomicU64)]>,
}

unsafe extern "C" fn timed_piece(ctx: *mut c_void, begin: i64, end: i64, thread: c_int) {
    // SAFETY: `timed_parallel_for` passes its `Timed`, which outlives the loop.
    let timed = unsafe { &*ctx.cast::<Timed>() };
    let started = kiln_profile::now();
    // SAFETY: the contract of `parallel_for`.
    unsafe { (timed.task)(timed.ctx, begin, end, thread) };
    if let Some((start, stop)) = timed.times.get(thread as usize) {
        // Only this thread writes its times.
        if start.load(Ordering::Relaxed) == 0 {
            start.store(started, Ordering::Relaxed);
        }
        stop.store(kiln_profile::now(), Ordering::Relaxed);
    }
}

unsafe extern "C" fn timed_parallel_for(pool: *mut c_void, n: i64, grain: i64, task: Task, ctx: *mut c_void) {
    // SAFETY: see `context`.
    let context = unsafe { context(pool) };
    let times = (0..context.pool.threads()).map(|_| Default::default());
    let timed = Timed {
        task,
        ctx,
        times: times.collect(),
    };
    // SAFETY: as in `parallel_for`; `timed` lives until the loop is done, and is only read but for its
    // atomics.
    unsafe {
        context
            .pool
            .run_task(n, grain, timed_piece, (&raw const timed).cast_mut().cast());
    }
    for (thread, (start, stop)) in timed.times.iter().enumerate().skip(1) {
        // The pool has synchronised with the pieces: their stores are visible.
        let (start, stop) = (start.load(Ordering::Relaxed), stop.load(Ordering::Relaxed));
        if stop > 0 {
            let _ = catch_unwind(AssertUnwindSafe(|| {
                context
                    .hooks
                    .piece_event(context.kernel.get(), thread, start, stop);
            }));
        }
    }
}

unsafe extern "C" fn kernel_event(pool: *mut c_void, kernel: c_int, begin: c_int) {
    // SAFETY: see `context`.
    let context = unsafe { context(pool) };
    let event = if begin != 0 {
        KernelEvent::Begin
    } else {
        KernelEvent::End
    };
    context.kernel.set(kernel as usize);
    // A panic must not cross the C frames above; a lost profiling event is the smaller harm.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        context.hooks.kernel_event(kernel as usize, event)
    }));
}

unsafe extern "C" fn call_extern(pool: *mut c_void, index: c_int, buffers: *mut *mut c_void) -> c_int {
    // SAFETY: see `context`.
    let context = unsafe { context(pool) };
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        context.hooks.call_extern(index as usize, buffers)
    }));
    let message = match outcome {
        Ok(Ok(())) => return 0,
        Ok(Err(message)) => message,
        Err(payload) => format!("it panicked: {}", panic_message(payload.as_ref())),
    };
    *context.failure.borrow_mut() = Some(message);
    1
}

/// The loader's error with its cause, which is where the missing symbol is named.
pub(super) fn in_full(error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

fn panic_message(payload: &(dyn Any + Send)) -> &str {
    payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            inputs,
            outputs,
            scalars,
            arena_bytes,
            ..
        } = self;
        write!(
            f,
            "{inputs} inputs, {outputs} outputs, {scalars} scalars, arena of {arena_bytes} bytes"
        )
    }
}
