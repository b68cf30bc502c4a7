//! What the stub target emits, and its interpreter.

use kiln_graph::op::Dims;
use kiln_graph::{Graph, HostTensor, IndexError, InterpretError, Scalar, TensorType, interpret};

use crate::checks::Check;
use crate::index::Index;
use crate::plan::Place;

/// The byte that fills memory before a kernel writes it.
const NOISE: u8 = 0xa5;

/// Where a kernel reads a parameter of its graph.
#[derive(Clone, Debug)]
pub(super) struct Read {
    pub place: Place,
    /// The order of the dimensions in memory, if they are not row-major.
    pub order: Option<Dims>,
}

/// Where a loop nest stores an output of a kernel's graph.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub place: Place,
    /// Extents of the loop variables.
    pub extents: Vec<i64>,
    /// The element of the value at each point.
    pub index: Vec<Index>,
    /// Its position in the buffer.
    pub position: Index,
}

/// Where another operation stores an output of a kernel's graph.
#[derive(Clone, Debug)]
pub(super) struct Whole {
    pub place: Place,
    pub order: Option<Dims>,
}

/// One kernel: its operations, what they read, and where the results go, those of nests first.
#[derive(Clone, Debug)]
pub(super) struct ProgramKernel {
    pub graph: Graph,
    pub reads: Vec<Read>,
    /// Numbers of the runtime scalars that the graph takes.
    pub scalars: Vec<u32>,
    pub pieces: Vec<Piece>,
    pub wholes: Vec<Whole>,
    /// Offset in the arena and bytes.
    pub scratch: (usize, usize),
}

impl ProgramKernel {
    pub fn new(graph: Graph) -> Self {
        Self {
            graph,
            reads: Vec::new(),
            scalars: Vec::new(),
            pieces: Vec::new(),
            wholes: Vec::new(),
            scratch: (0, 0),
        }
    }
}

/// A compiled step as a list of kernels.
#[derive(Clone, Debug)]
pub struct Program {
    pub(super) kernels: Vec<ProgramKernel>,
    pub(super) parameters: Vec<TensorType>,
    pub(super) outputs: Vec<TensorType>,
    pub(super) aliases: Vec<Option<u32>>,
    pub(super) arena_bytes: usize,
    pub(super) checks: Vec<Check>,
    /// For each check, the kernel after which it is decided.
    pub(super) decided_after: Vec<usize>,
}

/// Why a program stopped.
#[derive(Debug, thiserror::Error)]
pub enum Stopped {
    /// An index is out of range.
    #[error(transparent)]
    Index(#[from] IndexError),
    /// A kernel's operations cannot be interpreted.
    #[error(transparent)]
    Interpret(#[from] InterpretError),
}

/// The memory of a run.
struct Memory<'a> {
    arguments: &'a mut [Vec<u8>],
    outputs: Vec<Vec<u8>>,
    aliases: &'a [Option<u32>],
    arena: Vec<u8>,
}

impl Memory<'_> {
    /// The memory from a place on.
    fn at(&mut self, place: Place) -> &mut [u8] {
        match place {
            Place::Arena(offset) => &mut self.arena[offset..],
            Place::Input(argument) => &mut self.arguments[argument as usize],
            Place::Output(output) => match self.aliases[output as usize] {
                Some(argument) => &mut self.arguments[argument as usize],
                None => &mut self.outputs[output as usize],
            },
        }
    }
}

/// Elements between neighbours along each axis, stored in `order`.
fn strides(shape: &[usize], order: Option<&Dims>) -> Vec<usize> {
    let order = order.map_or_else(|| (0..shape.len()).collect(), |order| order.to_vec());
    let mut strides = vec![0; shape.len()];
    let mut stride = 1;
    for axis in order.into_iter().rev() {
        strides[axis] = stride;
        stride *= shape[axis];
    }
    strides
}

/// Calls `each` with every index below `extents`.
fn for_each_index(extents: &[i64], mut each: impl FnMut(&[i64])) {
    let mut index = vec![0; extents.len()];
    let count: i64 = extents.iter().product();
    for _ in 0..count {
        each(&index);
        for axis in (0..extents.len()).rev() {
            index[axis] += 1;
            if index[axis] < extents[axis] {
                break;
            }
            index[axis] = 0;
        }
    }
}

/// Calls `each` with the position of every element of a tensor, row-major and in `order`.
fn for_each_element(ty: &TensorType, order: &Dims, mut each: impl FnMut(usize, usize)) {
    let strides = strides(ty.shape.dims(), Some(order));
    let extents: Vec<i64> = ty.shape.iter().map(|&extent| extent as i64).collect();
    let mut row_major = 0;
    for_each_index(&extents, |index| {
        let stored = index
            .iter()
            .zip(&strides)
            .map(|(&at, stride)| at as usize * stride);
        each(row_major, stored.sum());
        row_major += 1;
    });
}

fn load(memory: &[u8], ty: &TensorType, order: Option<&Dims>) -> HostTensor {
    let size = ty.dtype.size();
    let mut bytes = memory[..ty.bytes()].to_vec();
    if let Some(order) = order {
        for_each_element(ty, order, |to, from| {
            bytes[to * size..][..size].copy_from_slice(&memory[from * size..][..size]);
        });
    }
    HostTensor::from_bytes(ty.clone(), bytes).expect("as many bytes as the type has")
}

fn store(memory: &mut [u8], tensor: &HostTensor, order: Option<&Dims>) {
    let (ty, bytes) = (tensor.ty(), tensor.bytes());
    let size = ty.dtype.size();
    match order {
        None => memory[..bytes.len()].copy_from_slice(bytes),
        Some(order) => for_each_element(ty, order, |from, to| {
            memory[to * size..][..size].copy_from_slice(&bytes[from * size..][..size]);
        }),
    }
}

impl Piece {
    fn store(&self, memory: &mut [u8], tensor: &HostTensor) {
        let (ty, bytes) = (tensor.ty(), tensor.bytes());
        if bytes.is_empty() {
            return;
        }
        let size = ty.dtype.size();
        let strides = strides(ty.shape.dims(), None);
        // Variables that no index mentions would only write the same again.
        let used = self.index.iter().chain([&self.position]);
        let used = used.fold(0, |set, index| set | index.vars());
        let extents = (0..)
            .zip(&self.extents)
            .map(|(var, &extent)| match used >> var & 1 {
                1 => extent,
                _ => 1,
            });
        let extents: Vec<i64> = extents.collect();
        for_each_index(&extents, |point| {
            let at = |index: &Index| {
                index
                    .evaluate(point)
                    .expect("what is stored has no index that is loaded")
            };
            let element = self
                .index
                .iter()
                .zip(&strides)
                .map(|(index, &stride)| at(index) as usize * stride);
            let (from, to) = (element.sum::<usize>() * size, at(&self.position) as usize * size);
            memory[to..][..size].copy_from_slice(&bytes[from..][..size]);
        });
    }
}

impl Program {
    /// Runs the program; the outputs, without those that checks look at. `arguments` are overwritten where
    /// outputs take over their memory.
    ///
    /// # Errors
    /// [`Stopped::Index`], and no argument was overwritten; [`Stopped::Interpret`] for what kiln-graph's
    /// interpreter cannot do.
    pub fn run(&self, arguments: &mut [HostTensor], scalars: &[Scalar]) -> Result<Vec<HostTensor>, Stopped> {
        let mut bytes: Vec<Vec<u8>> = arguments.iter().map(|tensor| tensor.bytes().to_vec()).collect();
        let noise = |ty: &TensorType| vec![NOISE; ty.bytes()];
        let mut memory = Memory {
            arguments: &mut bytes,
            outputs: self.outputs.iter().map(noise).collect(),
            aliases: &self.aliases,
            arena: vec![NOISE; self.arena_bytes],
        };
        let result = self.kernels.iter().enumerate().try_for_each(|(number, kernel)| {
            kernel.run(&mut memory, scalars)?;
            self.check(number, &mut memory)
        });
        let shown = self.outputs.len() - 2 * self.checks.len();
        let outputs = (0..).zip(&self.outputs[..shown]);
        let outputs = outputs
            .map(|(number, ty)| load(memory.at(Place::Output(number)), ty, None))
            .collect();
        for ((tensor, bytes), ty) in arguments.iter_mut().zip(bytes).zip(&self.parameters) {
            *tensor = load(&bytes, ty, None);
        }
        result.map(|()| outputs)
    }

    /// Decides the checks that can be decided after kernel `number`.
    fn check(&self, number: usize, memory: &mut Memory<'_>) -> Result<(), Stopped> {
        let first = self.outputs.len() - 2 * self.checks.len();
        for (at, check) in self
            .checks
            .iter()
            .enumerate()
            .filter(|(at, _)| self.decided_after[*at] == number)
        {
            let mut extreme = |output: usize| {
                let mut bytes = [0; 8];
                let found = memory.at(Place::Output(output as u32));
                let count = found.len().min(8);
                bytes[..count].copy_from_slice(&found[..count]);
                check.number(bytes)
            };
            let (least, most) = (extreme(first + 2 * at), extreme(first + 2 * at + 1));
            if let Some(error) = check.error(least, most) {
                return Err(error.into());
            }
        }
        Ok(())
    }
}

impl ProgramKernel {
    fn run(&self, memory: &mut Memory<'_>, scalars: &[Scalar]) -> Result<(), Stopped> {
        let (offset, bytes) = self.scratch;
        let scratch = offset..offset + bytes;
        // Live buffers must be elsewhere, so scratch memory is filled with noise before the kernel reads
        // and after it has written.
        memory.arena[scratch.clone()].fill(NOISE);
        let types = self.graph.parameters().iter().map(|&value| self.graph.ty(value));
        let reads = self.reads.iter().zip(types);
        let tensors: Vec<HostTensor> = reads
            .map(|(read, ty)| load(memory.at(read.place), ty, read.order.as_ref()))
            .collect();
        let own: Vec<Scalar> = self
            .scalars
            .iter()
            .map(|&index| scalars[index as usize])
            .collect();
        let results = interpret(&self.graph, &tensors, &own)?;
        let (of_nests, others) = results.split_at(self.pieces.len());
        for (piece, tensor) in self.pieces.iter().zip(of_nests) {
            piece.store(memory.at(piece.place), tensor);
        }
        for (whole, tensor) in self.wholes.iter().zip(others) {
            store(memory.at(whole.place), tensor, whole.order.as_ref());
        }
        memory.arena[scratch].fill(NOISE);
        Ok(())
    }
}
