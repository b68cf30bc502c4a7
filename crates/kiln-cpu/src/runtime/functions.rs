//! Shared objects of functions, and steps that are lists of calls of them.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use kiln_graph::DType;

use crate::emit::calls::{Place, StepCall, StepCalls};
use crate::error::{CpuError, Result};
use crate::runtime::abi::{ABI_VERSION, RawRuntime, Signature, Task};
use crate::runtime::library::{in_full, open};

/// `@_call` of a kernel: `(rt, list, workspace)`.
type RawKernel = unsafe extern "C" fn(*const RawRuntime, *const *mut c_void, *mut u8);

/// A shared object of functions; unloaded when the last step that calls one is gone.
pub struct FunctionLibrary {
    functions: Vec<*const c_void>,
    /// Last, so that nothing above outlives the mapping it points into.
    _object: libloading::Library,
}

// SAFETY: the pointers are to code, which nobody writes.
unsafe impl Send for FunctionLibrary {}
// SAFETY: as above.
unsafe impl Sync for FunctionLibrary {}

impl fmt::Debug for FunctionLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FunctionLibrary({})", self.functions.len())
    }
}

impl FunctionLibrary {
    /// Loads an object of [`crate::family`].
    ///
    /// # Errors
    /// [`CpuError::Load`] when the file is no such object; [`CpuError::Abi`] when it was built for another version of
    /// the contract.
    pub fn load(path: &Path) -> Result<Self> {
        let failed = |error| CpuError::Load {
            path: path.to_owned(),
            reason: in_full(&error),
        };
        let object = open(path).map_err(failed)?;
        // SAFETY: the object's index declares these symbols with exactly these types.
        let (found, functions) = unsafe {
            let abi = **object
                .get::<*const u64>(b"kiln_functions_abi\0")
                .map_err(failed)?;
            let count = **object
                .get::<*const u64>(b"kiln_functions_count\0")
                .map_err(failed)?;
            let first = *object
                .get::<*const *const c_void>(b"kiln_functions\0")
                .map_err(failed)?;
            (abi, std::slice::from_raw_parts(first, count as usize).to_vec())
        };
        if found != ABI_VERSION {
            return Err(CpuError::Abi {
                path: path.to_owned(),
                found,
                expected: ABI_VERSION,
            });
        }
        Ok(Self {
            functions,
            _object: object,
        })
    }

    /// Number of functions.
    pub fn count(&self) -> usize {
        self.functions.len()
    }
}

/// A function that a step calls, with the numbers that the step's shapes give it.
#[derive(Debug, Clone)]
pub struct BoundFunction {
    /// Where it is.
    pub library: Arc<FunctionLibrary>,
    /// Position in there.
    pub number: usize,
    /// Its table.
    pub table: Vec<i64>,
}

/// Where an argument of a call is.
#[derive(Clone, Copy, Debug)]
enum Argument {
    Place(Place),
    /// The table of the function: its first word among those of the step.
    Table(usize),
}

/// A step that is a list of calls.
#[derive(Debug)]
pub struct CallList {
    signature: Signature,
    calls: Vec<StepCall>,
    /// Of each function, where it is.
    functions: Vec<*const c_void>,
    /// Of each function, the first word of its table.
    tables: Vec<usize>,
    words: Box<[i64]>,
    _libraries: Vec<Arc<FunctionLibrary>>,
}

// SAFETY: the pointers are to code of the libraries that are held.
unsafe impl Send for CallList {}
// SAFETY: as above; nothing is written after construction.
unsafe impl Sync for CallList {}

/// What a call of the step works on.
pub(crate) struct Call<'a> {
    pub runtime: &'a RawRuntime,
    pub inputs: &'a [*const u8],
    pub outputs: &'a [*mut u8],
    pub arena: *mut u8,
    pub scalars: &'a [u64],
}

/// A task over several tensors: `kiln_tensors` of `kiln_calls.h`.
struct Tensors<'a> {
    task: Task,
    list: &'a [*mut c_void],
    count: usize,
    ends: &'a [i64],
}

unsafe extern "C" fn walk(ctx: *mut c_void, mut begin: i64, end: i64, thread: c_int) {
    // SAFETY: `CallList::each` passes its `Tensors`, which outlives the loop.
    let all = unsafe { &*ctx.cast::<Tensors<'_>>() };
    let mut tensor = all.ends.partition_point(|&stop| stop <= begin);
    while begin < end {
        let first = if tensor == 0 { 0 } else { all.ends[tensor - 1] };
        let stop = all.ends[tensor].min(end);
        if stop > begin {
            let list = all.list[tensor * all.count..].as_ptr().cast_mut();
            // SAFETY: the task takes `count` pointers; its elements are those of this tensor.
            unsafe { (all.task)(list.cast(), begin - first, stop - first, thread) };
            begin = stop;
        }
        tensor += 1;
    }
}

impl CallList {
    /// The calls of `step`, whose functions are `functions`, with a signature.
    pub fn new(step: StepCalls, functions: Vec<BoundFunction>, signature: Signature) -> Self {
        let mut words = Vec::new();
        let mut tables = Vec::new();
        let mut pointers = Vec::new();
        let mut libraries: Vec<Arc<FunctionLibrary>> = Vec::new();
        for function in functions {
            tables.push(words.len());
            words.extend(function.table);
            pointers.push(function.library.functions[function.number]);
            if !libraries.iter().any(|it| Arc::ptr_eq(it, &function.library)) {
                libraries.push(function.library);
            }
        }
        Self {
            signature,
            calls: step.calls,
            functions: pointers,
            tables,
            words: words.into(),
            _libraries: libraries,
        }
    }

    /// What the step expects.
    pub fn signature(&self) -> &Signature {
        &self.signature
    }

    /// Runs the step: what `kiln_step` of a source tree does.
    ///
    /// # Safety
    /// As [`Step::run`](crate::Step::run), whose arguments were checked against the signature.
    pub(crate) unsafe fn run(&self, call: &Call<'_>) -> c_int {
        let mut list: Vec<*mut c_void> = Vec::new();
        for step in &self.calls {
            // SAFETY: this function's contract.
            let status = unsafe { self.call(call, step, &mut list) };
            if status != 0 {
                return status;
            }
        }
        0
    }

    /// The pointer that an argument is.
    fn resolve(&self, call: &Call<'_>, argument: Argument) -> *mut c_void {
        match argument {
            // The plan keeps offsets inside of the arena, whose size was checked.
            Argument::Place(Place::Arena(at)) => call.arena.wrapping_add(at).cast(),
            Argument::Place(Place::Input(index)) => call.inputs[index].cast_mut().cast(),
            Argument::Place(Place::Output(index)) => call.outputs[index].cast(),
            Argument::Place(Place::Scalar(index)) => (&raw const call.scalars[index]).cast_mut().cast(),
            Argument::Table(word) => self.words.as_ptr().wrapping_add(word).cast_mut().cast(),
        }
    }

    fn list(&self, call: &Call<'_>, places: &[Place], function: usize, list: &mut Vec<*mut c_void>) {
        list.extend(
            places
                .iter()
                .map(|&place| self.resolve(call, Argument::Place(place))),
        );
        list.push(self.resolve(call, Argument::Table(self.tables[function])));
    }

    /// SAFETY: as [`CallList::run`]; functions of tasks are tasks.
    unsafe fn task(&self, function: usize) -> Task {
        // SAFETY: this function's contract.
        unsafe { std::mem::transmute::<*const c_void, Task>(self.functions[function]) }
    }

    /// SAFETY: as [`CallList::run`].
    unsafe fn call(&self, call: &Call<'_>, step: &StepCall, list: &mut Vec<*mut c_void>) -> c_int {
        list.clear();
        match step {
            StepCall::Task {
                kernel,
                function,
                n,
                grain,
                places,
            } => {
                self.list(call, places, *function, list);
                // SAFETY: the function is a task, and takes these pointers.
                unsafe {
                    share(
                        call,
                        *kernel,
                        self.task(*function),
                        *n,
                        *grain,
                        list.as_mut_ptr().cast(),
                    )
                };
            }
            StepCall::Each {
                kernel,
                function,
                grain,
                ends,
                places,
            } => {
                let count = places.len() / ends.len();
                for places in places.chunks(count) {
                    self.list(call, places, *function, list);
                }
                let mut tensors = Tensors {
                    // SAFETY: the function is a task.
                    task: unsafe { self.task(*function) },
                    list,
                    count: count + 1,
                    ends,
                };
                let n = ends.last().copied().unwrap_or(0);
                // SAFETY: `walk` takes `Tensors`.
                unsafe { share(call, *kernel, walk, n, *grain, (&raw mut tensors).cast()) };
            }
            StepCall::Kernel {
                kernel,
                function,
                places,
                workspace,
            } => {
                self.list(call, places, *function, list);
                event(call, *kernel, 1);
                // SAFETY: the function is `@_call` of a kernel, and takes these pointers.
                unsafe {
                    let function = std::mem::transmute::<*const c_void, RawKernel>(self.functions[*function]);
                    function(call.runtime, list.as_ptr(), call.arena.wrapping_add(*workspace));
                }
                event(call, *kernel, 0);
            }
            StepCall::Extern {
                kernel,
                index,
                places,
            } => {
                list.extend(
                    places
                        .iter()
                        .map(|&place| self.resolve(call, Argument::Place(place))),
                );
                event(call, *kernel, 1);
                // SAFETY: the runtime's own function, with its own pool.
                let failed = unsafe {
                    (call.runtime.call_extern)(call.runtime.pool, *index as c_int, list.as_mut_ptr())
                };
                event(call, *kernel, 0);
                if failed != 0 {
                    return 1 + *index as c_int;
                }
            }
            StepCall::Guard {
                number,
                dtype,
                least,
                most,
                extent,
            } => {
                // SAFETY: a check's outputs are a number of its type each.
                let (least, most) = unsafe {
                    (
                        read(*dtype, call.outputs[*least]),
                        read(*dtype, call.outputs[*most]),
                    )
                };
                // A u64 that is no i64 is a negative number here, and outside all the same.
                if least < 0 || most as u64 >= *extent as u64 {
                    return -1 - *number as c_int;
                }
            }
        }
        0
    }
}

/// SAFETY: `ctx` is what `task` takes.
unsafe fn share(call: &Call<'_>, kernel: usize, task: Task, n: i64, grain: i64, ctx: *mut c_void) {
    event(call, kernel, 1);
    // SAFETY: this function's contract; the runtime's own function, with its own pool.
    unsafe {
        if grain > 0 {
            (call.runtime.parallel_for)(call.runtime.pool, n, grain, task, ctx);
        } else {
            task(ctx, 0, n, 0);
        }
    }
    event(call, kernel, 0);
}

fn event(call: &Call<'_>, kernel: usize, begin: c_int) {
    if let Some(event) = call.runtime.kernel_event {
        // SAFETY: the runtime's own function, with its own pool.
        unsafe { event(call.runtime.pool, kernel as c_int, begin) };
    }
}

/// An integer of type `dtype`.
///
/// SAFETY: `at` points to one.
unsafe fn read(dtype: DType, at: *const u8) -> i64 {
    // SAFETY: this function's contract.
    unsafe {
        match dtype {
            DType::I8 => i64::from(at.cast::<i8>().read_unaligned()),
            DType::I16 => i64::from(at.cast::<i16>().read_unaligned()),
            DType::I32 => i64::from(at.cast::<i32>().read_unaligned()),
            DType::U8 | DType::Bool => i64::from(at.read()),
            DType::U16 => i64::from(at.cast::<u16>().read_unaligned()),
            DType::U32 => i64::from(at.cast::<u32>().read_unaligned()),
            _ => at.cast::<i64>().read_unaligned(),
        }
    }
}
