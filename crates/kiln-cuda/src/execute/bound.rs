//! The calls of a step at given addresses.

use std::sync::Arc;

use kiln_distributed::nccl::Shape;

use crate::code::{Address, CallKind, Pointer, StepCode};
use crate::convolutions::{ConvolutionArguments, PreparedConvolution};
use crate::error::{CudaError, Result};
use crate::products::{Choice, Multiplier, Place as At, PreparedProduct, ProductArguments};
use crate::ranks::Ranks;
use crate::runtime::{Arguments, GraphBuilder, Kernel, Launch, Node, Storage, Stream};

/// A storage, and the bytes in front of what is meant.
pub type Place = (Arc<Storage>, usize);

/// Where everything of a call of the step is.
#[derive(Clone, Copy)]
pub struct Memory<'a> {
    /// Tensor arguments.
    pub inputs: &'a [Place],
    /// The tensor arguments that are elsewhere at each launch of a graph.
    pub moving: &'a [u32],
    /// Outputs, those of the checks included.
    pub outputs: &'a [Place],
    /// Intermediate values.
    pub arena: &'a Arc<Storage>,
    /// Eight bytes for each runtime scalar.
    pub scalars: &'a Arc<Storage>,
    /// The mark that guards leave, four bytes.
    pub stopped: &'a Arc<Storage>,
}

impl Memory<'_> {
    /// The storage of an address, and the bytes in front of it.
    pub fn place(&self, address: Address) -> (&Arc<Storage>, usize) {
        fn inside((storage, at): &Place, bytes: usize) -> (&Arc<Storage>, usize) {
            (storage, at + bytes)
        }
        match address {
            Address::Input(index, bytes) => inside(&self.inputs[index as usize], bytes),
            Address::Output(index, bytes) => inside(&self.outputs[index as usize], bytes),
            Address::Arena(bytes) => (self.arena, bytes),
            Address::Scalar(index) => (self.scalars, 8 * index as usize),
        }
    }
}

/// What the calls of a step need besides memory.
pub struct Parts<'a> {
    /// The step.
    pub code: &'a StepCode,
    /// The kernel of each function.
    pub kernels: &'a [Kernel],
    /// The kernel of each guard, by the check's number.
    pub guards: &'a [Kernel],
    /// How the libraries compute each call.
    pub choices: &'a [Chosen],
    /// The other ranks, if the step has collectives.
    pub ranks: Option<&'a Ranks>,
}

/// How a library computes a call.
#[derive(Debug)]
pub enum Chosen {
    /// The call is none of a library.
    Nothing,
    /// A product's algorithm.
    Product(Choice),
    /// A convolution with its plan.
    Convolution(Arc<PreparedConvolution>),
}

/// Where calls go: a stream, which runs them, or a graph, which keeps them.
pub trait Sink {
    /// Takes a kernel.
    ///
    /// # Safety
    /// With these arguments the kernel must touch only the storages among them, inside their sizes.
    unsafe fn kernel(&mut self, launch: &Launch) -> Result<()>;

    /// Takes a product.
    fn product(&mut self, product: &mut PreparedProduct<'_>, arguments: &ProductArguments<'_>) -> Result<()>;

    /// Takes a convolution.
    fn convolution(
        &mut self,
        convolution: &PreparedConvolution,
        arguments: &ConvolutionArguments<'_>,
    ) -> Result<()>;

    /// Takes a collective of all ranks, from one place to the other.
    fn across(&mut self, ranks: &Ranks, shape: &Shape, from: At<'_>, to: At<'_>) -> Result<()>;

    /// Takes the filling of a storage with zeros.
    fn clear(&mut self, storage: &Arc<Storage>) -> Result<()>;
}

impl Sink for Stream {
    unsafe fn kernel(&mut self, launch: &Launch) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch(launch) }
    }

    fn product(&mut self, product: &mut PreparedProduct<'_>, arguments: &ProductArguments<'_>) -> Result<()> {
        product.run(self, arguments)
    }

    fn convolution(
        &mut self,
        convolution: &PreparedConvolution,
        arguments: &ConvolutionArguments<'_>,
    ) -> Result<()> {
        convolution.run(self, arguments)
    }

    fn across(&mut self, ranks: &Ranks, shape: &Shape, from: At<'_>, to: At<'_>) -> Result<()> {
        ranks.queue(self, shape, from, to)
    }

    fn clear(&mut self, storage: &Arc<Storage>) -> Result<()> {
        self.fill(storage, 0..storage.bytes(), 0)
    }
}

/// A graph whose calls follow each other where their order counts ([`StepCode::orders`]).
pub struct Branches<'a> {
    builder: GraphBuilder,
    orders: &'a [Vec<u32>],
    /// The nodes that the next call comes after.
    last: Vec<Node>,
    /// What everything comes after.
    first: Vec<Node>,
    /// Of each stage that was begun, the nodes that whoever comes after it comes after.
    ends: Vec<Vec<Node>>,
    /// Working memory of products, and the product that was given it last.
    workspace: Option<Arc<Storage>>,
    working: Option<Node>,
}

impl<'a> Branches<'a> {
    /// Calls are added to `builder`; stages come after each other as `orders` says. `workspace` is as large as that
    /// of any product ([`Bound::workspace_bytes`]), and only one product at a time has it.
    pub fn new(builder: GraphBuilder, orders: &'a [Vec<u32>], workspace: Option<Arc<Storage>>) -> Self {
        Self {
            builder,
            orders,
            workspace,
            working: None,
            last: Vec::new(),
            first: Vec::new(),
            ends: Vec::new(),
        }
    }

    /// What was added so far comes before all stages.
    pub fn begin(&mut self) {
        self.first = self.last.clone();
    }

    /// What is added from here on is of stage `number`, which is none before the latest.
    pub fn enter(&mut self, number: u32) {
        let number = number as usize;
        // Stages without calls end where they begin.
        while self.ends.len() <= number {
            self.leave();
            let Some(after) = self.orders.get(self.ends.len()) else {
                // Without orders stages follow each other.
                self.ends.push(self.last.clone());
                continue;
            };
            let before = after.iter().filter_map(|&stage| self.ends.get(stage as usize));
            let mut before: Vec<Node> = before.flatten().copied().collect();
            if before.is_empty() {
                before.clone_from(&self.first);
            }
            self.last.clone_from(&before);
            self.ends.push(before);
        }
    }

    /// Notes where the latest stage ends.
    fn leave(&mut self) {
        if let Some(end) = self.ends.last_mut() {
            end.clone_from(&self.last);
        }
    }

    /// The graph with all calls.
    pub fn finish(self) -> GraphBuilder {
        self.builder
    }
}

impl Sink for Branches<'_> {
    unsafe fn kernel(&mut self, launch: &Launch) -> Result<()> {
        // SAFETY: the caller's promise; a node comes after all that touch the same bytes, by the step's orders.
        self.last = vec![unsafe { self.builder.kernel(&self.last, launch) }?];
        Ok(())
    }

    fn product(&mut self, product: &mut PreparedProduct<'_>, arguments: &ProductArguments<'_>) -> Result<()> {
        let workspace = self.workspace.clone().filter(|_| product.workspace_bytes() > 0);
        let arguments = ProductArguments {
            workspace: workspace.as_ref().map(|storage| (storage, 0)),
            ..*arguments
        };
        let mut after = self.last.clone();
        after.extend(self.working.filter(|_| workspace.is_some()));
        let node = self.builder.capture(&after, &arguments.storages(), |stream| {
            product.run(stream, &arguments)
        })?;
        if workspace.is_some() {
            self.working = Some(node);
        }
        self.last = vec![node];
        Ok(())
    }

    fn convolution(
        &mut self,
        convolution: &PreparedConvolution,
        arguments: &ConvolutionArguments<'_>,
    ) -> Result<()> {
        let node = convolution.capture(&mut self.builder, &self.last, arguments)?;
        self.last = vec![node];
        Ok(())
    }

    fn across(&mut self, ranks: &Ranks, shape: &Shape, from: At<'_>, to: At<'_>) -> Result<()> {
        let queue = |stream: &Stream| ranks.queue(stream, shape, from, to);
        let node = self.builder.capture_apart(&self.last, &[from.0, to.0], queue)?;
        self.builder.keep_ranks(ranks);
        self.last = vec![node];
        Ok(())
    }

    fn clear(&mut self, storage: &Arc<Storage>) -> Result<()> {
        self.last = vec![self.builder.fill(&self.last, storage, 0..storage.bytes(), 0)?];
        Ok(())
    }
}

/// A call that is ready to be queued.
pub enum Bound<'a> {
    /// A kernel.
    Kernel(Launch),
    /// A product.
    Product(Box<PreparedProduct<'a>>, &'a CallKind),
    /// A convolution, the places of its tensors, and of its working memory.
    Convolution(&'a PreparedConvolution, [Address; 3], Address),
    /// A collective of all ranks, its operand and its result.
    Across(&'a Ranks, Shape, [Address; 2]),
    /// Operation `.0` that runs outside, with its operands and results.
    Extern(u32, &'a [Address]),
}

/// Binds the step's calls, in order. Tables are written to the device, which waits for `stream`.
pub fn bind<'a>(
    parts: &Parts<'a>,
    memory: &Memory<'_>,
    multiplier: Option<&'a Multiplier>,
    stream: &Stream,
) -> Result<Vec<Bound<'a>>> {
    let mut bound = Vec::with_capacity(parts.code.calls.len());
    for (call, choice) in parts.code.calls.iter().zip(parts.choices) {
        bound.push(match &call.kind {
            CallKind::Launch {
                function,
                grid,
                shared_bytes,
                arguments,
            } => {
                let mut given = Arguments::new();
                for pointer in arguments {
                    given = match pointer {
                        Pointer::To(Address::Input(index, bytes)) if memory.moving.contains(index) => {
                            given.moving(*index, *bytes)
                        }
                        Pointer::To(address) => {
                            let (storage, at) = memory.place(*address);
                            given.memory(storage, at)
                        }
                        Pointer::Copied(address, copied) => {
                            let (storage, at) = memory.place(*address);
                            given.copied(stream.device(), storage, at, copied)?
                        }
                        Pointer::Table(rows) => table(rows, memory, given, stream)?,
                        Pointer::Words(words) => {
                            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
                            given.raw(&bytes)
                        }
                    };
                }
                let function = *function;
                if parts.code.functions[function].guarded {
                    given = given.memory(memory.stopped, 0);
                }
                Bound::Kernel(Launch {
                    kernel: parts.kernels[function].clone(),
                    grid: *grid,
                    block: [parts.code.functions[function].text.threads, 1, 1],
                    shared_bytes: *shared_bytes,
                    arguments: given,
                })
            }
            CallKind::Product {
                product, workspace, ..
            } => {
                let (Some(multiplier), Chosen::Product(choice)) = (multiplier, choice) else {
                    unreachable!("every product has an algorithm, from the library")
                };
                let prepared = multiplier.prepare(product, choice)?;
                if prepared.workspace_bytes() > workspace.1 {
                    return Err(CudaError::Product {
                        product: product.to_string(),
                        call: "Kiln",
                        what: format!(
                            "that its algorithm needs {} bytes of working memory, and the step has {} for it",
                            prepared.workspace_bytes(),
                            workspace.1
                        ),
                    });
                }
                Bound::Product(Box::new(prepared), &call.kind)
            }
            CallKind::Convolution {
                tensors, workspace, ..
            } => {
                let Chosen::Convolution(prepared) = choice else {
                    unreachable!("every convolution in the library has a plan")
                };
                Bound::Convolution(prepared, *tensors, workspace.0)
            }
            CallKind::Either { .. } => unreachable!("a step is bound after it was decided"),
            CallKind::Guard {
                check, least, most, ..
            } => {
                let mut given = Arguments::new();
                for address in [*least, *most] {
                    let (storage, at) = memory.place(address);
                    given = given.memory(storage, at);
                }
                Bound::Kernel(Launch {
                    kernel: parts.guards[*check as usize].clone(),
                    grid: [1; 3],
                    block: [1; 3],
                    shared_bytes: 0,
                    arguments: given.memory(memory.stopped, 0),
                })
            }
            CallKind::Across {
                across,
                operand,
                result,
            } => {
                let (Some(ranks), Some(shape)) = (parts.ranks, across.shape()) else {
                    unreachable!("a step with collectives has ranks, and was checked when it was made")
                };
                Bound::Across(ranks, shape, [*operand, *result])
            }
            CallKind::Extern(index, addresses) => Bound::Extern(*index, addresses),
        });
    }
    Ok(bound)
}

/// Writes a table to the device and adds it to the arguments, with everything that it leads to.
fn table(
    rows: &[(Vec<Address>, Vec<u64>)],
    memory: &Memory<'_>,
    mut given: Arguments,
    stream: &Stream,
) -> Result<Arguments> {
    let mut bytes: Vec<u8> = Vec::new();
    for (addresses, numbers) in rows {
        for &address in addresses {
            let (storage, at) = memory.place(address);
            given = given.reaching(storage);
            bytes.extend((storage.address() + at as u64).to_ne_bytes());
        }
        numbers
            .iter()
            .for_each(|number| bytes.extend(number.to_ne_bytes()));
    }
    let storage = Arc::new(Storage::allocate(stream, bytes.len())?);
    stream.write(&bytes, &storage, 0)?;
    Ok(given.memory(&storage, 0))
}

impl Bound<'_> {
    /// Bytes of working memory that the call asks for if it is a product.
    pub fn workspace_bytes(&self) -> usize {
        match self {
            Self::Product(prepared, _) => prepared.workspace_bytes(),
            _ => 0,
        }
    }

    /// Gives the call to `sink`; not one that runs outside, which neither a stream nor a graph can take.
    pub fn give(&mut self, sink: &mut impl Sink, memory: &Memory<'_>) -> Result<()> {
        match self {
            // SAFETY: the compiler's plan gave every pointer memory of the size that the kernel touches, and
            // the sizes of the storages were checked against the plan's.
            Self::Kernel(launch) => unsafe { sink.kernel(launch) },
            Self::Product(prepared, kind) => {
                let CallKind::Product {
                    left,
                    right,
                    result,
                    workspace,
                    ..
                } = kind
                else {
                    unreachable!("a product's call")
                };
                let mut arguments =
                    ProductArguments::new(memory.place(*left), memory.place(*right), memory.place(*result));
                arguments.workspace = Some(memory.place(workspace.0));
                sink.product(prepared, &arguments)
            }
            Self::Convolution(prepared, [x, w, y], workspace) => {
                let arguments = ConvolutionArguments {
                    x: memory.place(*x),
                    w: memory.place(*w),
                    y: memory.place(*y),
                    workspace: Some(memory.place(*workspace)),
                };
                sink.convolution(prepared, &arguments)
            }
            Self::Across(ranks, shape, [from, to]) => {
                let ((from, at), (to, into)) = (memory.place(*from), memory.place(*to));
                sink.across(ranks, shape, (from, at), (to, into))
            }
            Self::Extern(..) => unreachable!("operations outside are not queued"),
        }
    }
}
