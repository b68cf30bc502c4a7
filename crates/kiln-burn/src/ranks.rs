//! Steps on several ranks: the mean over ranks as an operation, and what a compiled step calls for it.
//!
//! The mean is an operation like one of the program's own ([`crate::custom`]): it is recorded, replayed, and runs on
//! every backend by its function, which waits for the other ranks. For the CPU target it becomes a collective of the
//! graph (`as_collectives`), which the compiler puts into buckets; the step then starts it and waits for it
//! through `Calls`. For a GPU it becomes the same, and the step's graph has NCCL's calls in it ([`connect`]).
//!
//! The ranks are those that `kiln_distributed::current` gives: a process has one world.

mod exchanges;
mod shares;
mod statistics;

use std::any::TypeId;
use std::ffi::c_void;
use std::fmt::Write as _;
use std::sync::{Arc, LazyLock, Once, OnceLock};

use burn_backend::{TensorData, TensorMetadata};
use burn_ir::OperationIr;
use burn_router::RouterTensor;
use kiln_compiler::buckets::Buckets;
use kiln_compiler::overlap::{Event, Overlap};
use kiln_compiler::{CollectiveCall, Contract, ExternCall};
use kiln_cuda::CudaError;
use kiln_cuda::execute::Gpu;
use kiln_cuda::libraries::{Driver, Search, open_nccl};
use kiln_cuda::ranks::DeviceCarrier;
use kiln_distributed::{InFlight, Launcher, Operand, StepTag, World, current};
use kiln_graph::{CollectiveKind, DType, Graph, Op, Rewriter, TypeError};
use kiln_partition::Machine;

use crate::client::KilnClient;
use crate::custom;
use crate::device::KilnDevice;
use crate::execute::{ExecuteError, convert, kib};
pub(crate) use exchanges::meet;
pub use shares::{check_elementwise, joined, mean_share, sum};
pub(crate) use statistics::replaced;
pub use statistics::synchronised;

/// The type that stands for the function of the mean.
struct Mean;

/// The id of the mean over ranks.
static MEAN: LazyLock<String> = LazyLock::new(|| mean_id("mean over ranks"));

fn mean_id(name: &str) -> String {
    let id = custom::register(name, TypeId::of::<Mean>(), None, || Arc::new(mean_of));
    shares::keep_id(&id, CollectiveKind::AllReduce, true);
    id
}

/// The mean of `tensor` over all ranks, on each of them. Every rank takes the same means in the same order. Alone it
/// is the tensor itself.
pub fn mean(tensor: RouterTensor<KilnClient>) -> RouterTensor<KilnClient> {
    if current().is_none() {
        return tensor;
    }
    let shape = tensor.shape();
    shares::call(&MEAN, tensor, shape)
}

/// [`mean`] of the gradient of a parameter, which has this number among those of its model. Ranks whose means are of
/// other parameters do not run the same step, even if all have equal shapes.
pub fn mean_gradient(tensor: RouterTensor<KilnClient>, parameter: usize) -> RouterTensor<KilnClient> {
    if current().is_none() {
        return tensor;
    }
    let id = mean_id(&format!("mean over ranks, parameter {parameter}"));
    let shape = tensor.shape();
    shares::call(&id, tensor, shape)
}

/// The function of the mean, where the step does not call the ranks itself.
///
/// # Panics
///
/// If the ranks are not connected: an error of the step.
fn mean_of(operands: &[TensorData]) -> Vec<TensorData> {
    let world = current().expect("the ranks are connected as long as the training step lives");
    let mean = |operand: &TensorData| {
        let mut result = operand.clone();
        let dtype = convert::dtype(result.dtype).expect("gradients are of a float type");
        world
            .all_reduce(dtype, true, &mut result.bytes)
            .unwrap_or_else(|error| panic!("{error}"));
        result
    };
    operands.iter().map(mean).collect()
}

/// Whether an operation of a recorded graph is one of the ranks together: what compiled steps have a
/// collective for.
pub fn is_of_ranks(op: &Op) -> bool {
    shares::collective(op, 1).is_some()
}

/// Whether a recorded operation is one of the ranks together.
pub(crate) fn is_recorded(operation: &OperationIr) -> bool {
    custom::id(operation).is_some_and(|id| shares::kind_of(id).is_some())
}

/// What leaves a recorded graph and follows from a gradient without any operation of the ranks in between;
/// none if there is nothing of that kind. What has gone through one is the same on all ranks.
pub(crate) fn not_averaged(graph: &Graph) -> Option<String> {
    let mut own = vec![false; graph.num_nodes()];
    for seed in kiln_partition::find_seeds(graph) {
        own[seed.as_u32() as usize] = true;
    }
    for (node, data) in graph.nodes() {
        let mut operands = data.inputs.iter().map(|&it| graph.value(it).node);
        let follows = operands.any(|operand| own[operand.as_u32() as usize]);
        own[node.as_u32() as usize] |= follows && !is_of_ranks(&data.op);
    }
    let leaves = graph.outputs.iter().map(|output| output.value);
    let value = leaves
        .into_iter()
        .find(|&value| own[graph.value(value).node.as_u32() as usize])?;
    let line = &graph.def(value).provenance.location;
    Some(match line {
        Some(line) => format!("a tensor {} of {line}", graph.ty(value)),
        None => format!("a tensor {}", graph.ty(value)),
    })
}

/// `graph` with collectives in place of means over ranks and of shares; none if it has none of them.
///
/// # Errors
///
/// If a mean is not of one tensor of floats, or a tensor does not divide among the ranks.
pub(crate) fn as_collectives(graph: &Graph) -> Result<Option<Graph>, TypeError> {
    let Some(world) = current() else { return Ok(None) };
    let collective = |op: &Op| shares::collective(op, world.size());
    if !graph.nodes().any(|(_, data)| collective(&data.op).is_some()) {
        return Ok(None);
    }
    let mut new = Rewriter::new(graph);
    for (node, data) in graph.nodes() {
        match collective(&data.op) {
            Some(collective) => new.copy_as(node, Op::Collective(collective))?,
            None => new.copy(node)?,
        };
    }
    Ok(Some(new.finish()))
}

/// [`kiln_graph::alias::assign_aliases`] for a graph with operations that become collectives: an output that the
/// ranks join from their shares takes over what it replaces.
pub(crate) fn assign_aliases(graph: &mut Graph, dies: &[bool]) {
    let Ok(Some(mut converted)) = as_collectives(graph) else {
        return kiln_graph::alias::assign_aliases(graph, dies);
    };
    kiln_graph::alias::assign_aliases(&mut converted, dies);
    for (output, converted) in graph.outputs.iter_mut().zip(&converted.outputs) {
        output.alias = converted.alias;
    }
}

/// `graph` with collectives in place of means over ranks, on a GPU that is connected with those of the other ranks;
/// none if it has no such mean, the ranks are only imagined, or no rank has NCCL where MPI does as well. The first such
/// step connects the GPU.
///
/// # Errors
///
/// If a mean is not of one tensor of floats, NCCL is missing, the GPU is not the one that connects the ranks, or
/// other ranks do not take part.
pub(crate) fn connect(gpu: &Gpu, graph: &Graph) -> Result<Option<Graph>, ExecuteError> {
    let Some(world) = current().filter(|world| world.launcher() != Launcher::Alone) else {
        return Ok(None);
    };
    let across = as_collectives(graph).map_err(ExecuteError::Mean)?;
    if across.is_none() {
        return Ok(None);
    }
    // Another rank would not take part in a second connection.
    if world.has_carrier()
        && let Some(connected) = device(&world).place().gpu()
        && connected != gpu.device().ordinal()
    {
        let (rank, used) = (world.rank(), gpu.device().ordinal());
        return Err(kiln_distributed::Error::OtherGpu {
            rank,
            connected,
            used,
        }
        .into());
    }
    match gpu.connect(&world) {
        Ok(_) => {}
        // On all ranks: they compare what they have.
        Err(error @ CudaError::MissingLibrary { .. }) if world.has_mpi() => {
            static WARNED: Once = Once::new();
            WARNED.call_once(|| {
                kiln_log::warn!(
                    target: "kiln",
                    "gradients take the way through the host and MPI, one after the other: {error}"
                );
            });
            return Ok(None);
        }
        Err(CudaError::Ranks(error)) => return Err(error.into()),
        Err(error) => return Err(error.into()),
    }
    Ok(across)
}

/// The GPU of a rank: that of its number on its machine, or one of those that its launcher lets it see; the CPU where
/// there is no GPU.
pub fn device(world: &World) -> KilnDevice {
    let count = Driver::open(&Search::from_env()).and_then(|driver| driver.device_count());
    match count {
        Ok(count) if count > 0 => KilnDevice::cuda(world.local_rank() % count),
        _ => KilnDevice::cpu(),
    }
}

/// Connects ranks that no MPI connects, which `torchrun` started, through NCCL: on the GPU that [`device`] says. The
/// second call does nothing.
///
/// # Errors
///
/// If a rank has no GPU or no NCCL, or other ranks do not take part.
pub fn carry(world: &World) -> Result<(), kiln_distributed::Error> {
    if world.size() == 1 || world.launcher() != Launcher::Torchrun || world.has_carrier() {
        return Ok(());
    }
    let place = device(world).place().gpu();
    let opened = place
        .ok_or_else(|| "this machine has none".to_owned())
        .and_then(|place| Gpu::get(place).map_err(|error| error.to_string()))
        .and_then(|gpu| match open_nccl(&Search::from_env()) {
            Ok(_) => Ok(gpu),
            Err(error) => Err(error.to_string()),
        });
    let has = if opened.is_ok() { "yes" } else { "no" };
    let agreed = world.agree(&[("whether it has a GPU and NCCL", has.to_owned())]);
    let gpu = opened.map_err(|reason| kiln_distributed::Error::NoGpu {
        size: world.size(),
        reason,
    })?;
    agreed?;
    let failed = |error: CudaError| match error {
        CudaError::Ranks(error) => error,
        error => kiln_distributed::Error::NoGpu {
            size: world.size(),
            reason: error.to_string(),
        },
    };
    let ranks = gpu.connect(world).map_err(failed)?;
    world.carry_by(Box::new(DeviceCarrier::new(ranks, gpu.stream())));
    Ok(())
}

/// The rates of rank 0's machine, so that all ranks partition their step alike. Asked once; every rank asks when it
/// compiles its first step with collectives.
pub(crate) fn shared_rates(own: Machine) -> Result<Machine, ExecuteError> {
    static SHARED: OnceLock<Machine> = OnceLock::new();
    let Some(world) = current() else { return Ok(own) };
    if let Some(rates) = SHARED.get() {
        return Ok(*rates);
    }
    let mut rates = own;
    // All of them: a new one is an error here.
    let Machine {
        bytes_per_second,
        flops_per_second,
        bf16_flops_per_second,
        f16_flops_per_second,
        simple_per_second,
        special_per_second,
        random_per_second,
        hidden,
        launch_seconds,
    } = &mut rates;
    for rate in [
        bytes_per_second,
        flops_per_second,
        bf16_flops_per_second,
        f16_flops_per_second,
        simple_per_second,
        special_per_second,
        random_per_second,
        hidden,
        launch_seconds,
    ] {
        let mut bytes = rate.to_ne_bytes();
        world.broadcast_patiently(0, &mut bytes)?;
        *rate = f64::from_ne_bytes(bytes);
    }
    Ok(*SHARED.get_or_init(|| rates))
}

/// Bucket sizes for the link between the ranks, the same on all of them. They change no bit of a result, since
/// kiln-distributed adds up in the order of ranks.
pub(crate) fn chosen_buckets() -> Result<Buckets, ExecuteError> {
    let Some(world) = current() else {
        return Ok(Buckets::default());
    };
    Ok(world.link()?.map_or_else(Buckets::default, |link| {
        let (fixed, byte) = link.of_sums(world.size());
        Buckets::of(fixed, byte)
    }))
}

/// The started collectives of a compiled step, in a line for each kind; none if it has none. What is hidden
/// is counted in kernels: those between the start of the first bucket and the first wait.
pub(crate) fn buckets_text(contract: &Contract) -> Option<String> {
    let overlap = Overlap::of(contract, &[]);
    let ranks = contract
        .externs
        .iter()
        .find_map(|call| call.collective?.collective());
    let ranks = ranks?.ranks;
    let mut text = String::new();
    for (kind, what) in [
        (CollectiveKind::AllReduce, "of sums over"),
        (CollectiveKind::ReduceScatter, "of sums, divided among"),
        (CollectiveKind::AllGather, "of shares, joined from"),
    ] {
        let travels = || overlap.travels.iter().filter(|travel| travel.kind == kind);
        let own = travels().count();
        if own == 0 {
            continue;
        }
        let sizes: Vec<String> = travels()
            .map(|travel| kib(travel.bytes as u64).to_string())
            .collect();
        let total = travels().map(|travel| travel.bytes).sum::<usize>();
        let _ = write!(
            text,
            "\n{} KiB {what} {ranks} ranks in {own} buckets of {} KiB",
            kib(total as u64),
            sizes.join(", ")
        );
    }
    let first = |wanted: fn(&Event) -> bool| overlap.events.iter().position(wanted);
    let start = first(|event| matches!(event, Event::Start(..)))?;
    let wait = first(|event| matches!(event, Event::Wait(..)))?;
    let hidden = overlap.events.get(start..wait).unwrap_or_default();
    let kernels = hidden.iter().filter(|event| matches!(event, Event::Kernel(..)));
    let _ = write!(
        text,
        "; {} kernels run between the first start and the first wait",
        kernels.count()
    );
    Some(text)
}

/// The collectives of a run of a compiled step.
pub(crate) struct Calls {
    world: Option<World>,
    begun: InFlight,
}

impl Calls {
    /// For a run of a step of these calls, which the ranks know by this tag.
    pub(crate) fn of(contract: &Contract, tag: StepTag) -> Self {
        let has = contract.externs.iter().any(|call| call.collective.is_some());
        Self {
            world: has.then(current).flatten(),
            begun: InFlight::of(tag),
        }
    }

    /// Runs a collective, or a part of one.
    ///
    /// # Safety
    ///
    /// `buffers` are the pointers that the step passes for this call; what [`CollectiveCall`] says of their memory
    /// holds until [`Calls::finish`].
    pub(crate) unsafe fn run(
        &self,
        part: CollectiveCall,
        call: &ExternCall,
        buffers: *mut *mut c_void,
    ) -> Result<(), String> {
        let world = self
            .world
            .as_ref()
            .ok_or("the ranks are not connected any more")?;
        let size = |(dtype, dims): &(String, Vec<usize>)| {
            let dtype: DType = dtype.parse().map_err(|_| format!("{dtype} is no element type"))?;
            Ok::<_, String>((dtype, dtype.size() * dims.iter().product::<usize>()))
        };
        let ((dtype, bytes), (_, result)) = (size(&call.inputs[0])?, size(&call.outputs[0])?);
        // SAFETY: one pointer for each operand and one for the result, valid for their types; and the
        // caller's promise.
        let done = unsafe {
            let to = buffers.add(call.inputs.len());
            let (from, to) = ((*buffers).cast::<u8>(), (*to).cast::<u8>());
            match part.collective() {
                Some(collective) => {
                    let operand = Operand { dtype, from, bytes };
                    self.begun.begin(world, &collective, operand, to)
                }
                None => self.begun.wait(from, to, result),
            }
        };
        done.map_err(|error| error.to_string())
    }

    /// Waits for whatever is still under way: the step's memory is in other use from now on.
    pub(crate) fn finish(&self) {
        self.begun.finish();
    }
}
