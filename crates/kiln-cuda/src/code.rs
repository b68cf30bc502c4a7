//! What the target makes of a step: functions in CUDA C++ and the calls of them, as plain data.
//!
//! A [`StepCode`] depends on no device. It is stored in the cache, compiled by NVRTC anywhere, run by the host in tests, and bound to addresses by
//! [`crate::execute::executable`].

use std::fmt::Write as _;

use kiln_distributed::nccl::Shape;
use kiln_graph::{CollectiveKind, DType};
use serde::{Deserialize, Serialize};

use crate::build::Source;
use crate::convolutions::Convolution;
use crate::kernels::PRELUDE;
use crate::products::{Number, Product};

/// Where an argument of a call is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Address {
    /// Byte `.1` of tensor argument `.0`.
    Input(u32, usize),
    /// Byte `.1` of output `.0`.
    Output(u32, usize),
    /// Byte `.0` of the arena.
    Arena(usize),
    /// The eight bytes of runtime scalar `.0`.
    Scalar(u32),
}

impl Address {
    /// Bytes in front of it in its argument, output, arena or scalars.
    pub fn bytes(self) -> usize {
        match self {
            Self::Input(_, bytes) | Self::Output(_, bytes) | Self::Arena(bytes) => bytes,
            Self::Scalar(index) => 8 * index as usize,
        }
    }
}

/// A matrix as Hopper's copy engine takes it, box by box: rows of `inner` elements that are next to each other.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Boxes {
    /// Type of the elements, of 16 bits.
    pub number: Number,
    /// Elements of a row.
    pub inner: u64,
    /// Rows.
    pub outer: u64,
    /// Elements from one row to the next.
    pub leading: u64,
    /// Elements of a row of a box: 64, the 128 bytes among which pieces are exchanged.
    pub wide: u32,
    /// Rows of a box.
    pub tall: u32,
}

impl Boxes {
    /// Bytes from the first element to behind the last.
    pub fn bytes(&self) -> usize {
        let elements = self.outer.saturating_sub(1) * self.leading + self.inner;
        usize::try_from(elements)
            .unwrap_or(usize::MAX)
            .saturating_mul(self.number.bytes())
    }
}

/// An image, its channels last, as Hopper's copy engine takes the operand of a convolution out of it: the
/// pixels under one tap of the windows, window after window in the order of the result's pixels, with zeros
/// for those that lie beyond the image. Rows come first in pairs of numbers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Windows {
    /// Type of the elements, of 16 bits.
    pub number: Number,
    /// Number of images.
    pub images: u64,
    /// Channels of a pixel, which are next to each other.
    pub channels: u64,
    /// Rows of an image, and pixels of a row.
    pub extents: [u64; 2],
    /// Elements from one image to the next.
    pub image: u64,
    /// Elements from one row to the next, and from one pixel to the next.
    pub places: [u64; 2],
    /// Where the first window begins.
    pub low: [i32; 2],
    /// Where the last window begins, counted from the last row, or pixel of a row, on.
    pub high: [i32; 2],
    /// From one window to the next.
    pub stride: [u32; 2],
    /// Channels that are taken at once: 64, the 128 bytes among which pieces are exchanged.
    pub wide: u32,
    /// Windows that are taken at once.
    pub tall: u32,
}

impl Windows {
    /// Bytes from the first element to behind the last.
    pub fn bytes(&self) -> usize {
        let distances = [
            (self.images, self.image),
            (self.extents[0], self.places[0]),
            (self.extents[1], self.places[1]),
            (self.channels, 1),
        ];
        let reach = |(extent, distance): (u64, u64)| extent.saturating_sub(1).saturating_mul(distance);
        let elements = distances.into_iter().map(reach).fold(1, u64::saturating_add);
        usize::try_from(elements)
            .unwrap_or(usize::MAX)
            .saturating_mul(self.number.bytes())
    }
}

/// How Hopper's copy engine takes a tensor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Copied {
    /// A matrix, box by box.
    Matrix(Boxes),
    /// The windows of an image, tap by tap.
    Image(Windows),
}

impl Copied {
    /// Type of the elements.
    pub fn number(&self) -> Number {
        match self {
            Self::Matrix(boxes) => boxes.number,
            Self::Image(windows) => windows.number,
        }
    }

    /// Bytes from the first element to behind the last.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Matrix(boxes) => boxes.bytes(),
            Self::Image(windows) => windows.bytes(),
        }
    }
}

/// What the device times before it takes one side of a [`CallKind::Either`] that computes a product.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Trial {
    /// The product.
    pub product: Product,
    /// Whether Kiln's own kernel is taken however long it takes: for tests.
    pub always: bool,
}

/// An argument of a kernel. Every parameter of a kernel is a pointer, but for tensors of the copy engine and
/// the numbers of a template.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Pointer {
    /// To memory of the step.
    To(Address),
    /// A tensor from an address on, described for the copy engine and passed by value.
    Copied(Address, Copied),
    /// To a table in the device's memory, which is written when the step is bound: for each row its addresses, then its numbers, eight bytes each.
    Table(Vec<(Vec<Address>, Vec<u64>)>),
    /// No pointer: words that are passed by value, the numbers of a kernel that steps of several shapes share
    /// ([`crate::family`]).
    Words(Vec<u64>),
}

/// A kernel in CUDA C++, without its name.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
pub struct FunctionText {
    /// Device functions and constants in front of the kernel; `@` stands for the kernel's name, so that two kernels in one program do not share names.
    pub helpers: String,
    /// Declarations of the parameters, all of them pointers, such as `const float* a0`.
    pub parameters: Vec<String>,
    /// Statements; `@` as in `helpers`.
    pub body: String,
    /// Threads of a block: `blockDim.x`. A multiple of 32.
    pub threads: u32,
    /// Whether the kernel uses instructions that only a GPU has (tensor cores, asynchronous copies): such kernels do not run on the host in tests.
    pub device_only: bool,
    /// Blocks of the kernel that a multiprocessor has registers for at least; 0 leaves their number to the
    /// compiler.
    #[serde(default)]
    pub blocks: u32,
}

impl FunctionText {
    /// The source of the kernel called `name`. A guarded kernel has one more parameter, `kiln_stopped`, and does nothing once an index was out of range, unless its statements look at
    /// that parameter themselves.
    pub fn source(&self, name: &str, guarded: bool) -> String {
        let mut parameters = self.parameters.clone();
        if guarded {
            parameters.push("const int* kiln_stopped".into());
        }
        let mut text = self.helpers.replace('@', name);
        let bounds = match self.blocks {
            0 => self.threads.to_string(),
            blocks => format!("{}, {blocks}", self.threads),
        };
        let _ = write!(
            text,
            "\nextern \"C\" __global__ void __launch_bounds__({bounds})\n{name}({})\n{{\n{}{}\n}}\n",
            parameters.join(", "),
            if guarded && !self.body.contains("kiln_stopped") {
                "if (*kiln_stopped) return;\n"
            } else {
                ""
            },
            self.body.replace('@', name)
        );
        text
    }
}

/// A kernel of the step, under its name.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Function {
    /// Its name, unique in the step.
    pub name: String,
    /// What it is.
    pub text: FunctionText,
    /// Whether it looks whether the step was stopped ([`FunctionText::source`]).
    pub guarded: bool,
}

/// A collective of all ranks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Across {
    /// What it computes, by the mnemonic of its kind.
    pub kind: String,
    /// How many ranks the step is one of.
    pub ranks: usize,
    /// Whether sums are divided by their number.
    pub mean: bool,
    /// The rank whose operand all get, if it is of that kind.
    pub root: usize,
    /// Element type, by name.
    pub dtype: String,
    /// Elements of the operand.
    pub elements: usize,
}

impl Across {
    /// What NCCL is asked for; none if a name is unknown, which is so for a damaged cache alone.
    pub fn shape(&self) -> Option<Shape> {
        Some(Shape {
            kind: CollectiveKind::from_name(&self.kind)?,
            mean: self.mean,
            root: self.root,
            dtype: self.dtype.parse::<DType>().ok()?,
            elements: self.elements,
        })
    }
}

/// What a call does.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum CallKind {
    /// Runs a function of [`StepCode::functions`].
    Launch {
        /// Which.
        function: usize,
        /// Blocks in x, y and z.
        grid: [u32; 3],
        /// Bytes of dynamic shared memory.
        shared_bytes: u32,
        /// An argument for each parameter.
        arguments: Vec<Pointer>,
    },
    /// Multiplies matrices through cuBLASLt.
    Product {
        /// What is multiplied.
        product: Box<Product>,
        /// The left operand's first element.
        left: Address,
        /// The right operand's first element.
        right: Address,
        /// The result's first element.
        result: Address,
        /// Working memory, and how much there is.
        workspace: (Address, usize),
    },
    /// Computes a convolution through cuDNN.
    Convolution {
        /// What is computed.
        convolution: Box<Convolution>,
        /// The first elements of `x`, `w` and `y`.
        tensors: [Address; 3],
        /// Working memory, and how much there is.
        workspace: (Address, usize),
    },
    /// The calls of `library` where a library is faster (and cuDNN takes its convolution), those of `own` elsewhere: decided when the step
    /// meets a device ([`StepCode::decided`]).
    Either {
        /// With products or convolutions in the library.
        library: Vec<CallKind>,
        /// Without.
        own: Vec<CallKind>,
        /// What is timed, for a product.
        #[serde(default)]
        trial: Option<Box<Trial>>,
    },
    /// Compares the least and the largest index of a check with its bound, and stops the step if one is outside.
    Guard {
        /// The check's number.
        check: u32,
        /// Element type of the indices, by name.
        dtype: String,
        /// What they must be below.
        extent: u64,
        /// Where the least index is.
        least: Address,
        /// Where the largest index is.
        most: Address,
    },
    /// Computes a collective of all ranks through NCCL.
    Across {
        /// What is computed.
        across: Across,
        /// The operand's first element.
        operand: Address,
        /// The result's first element, which may be the operand's.
        result: Address,
    },
    /// Runs an operation outside: number `.0` of the step's, with its operands and results.
    Extern(u32, Vec<Address>),
}

/// A call.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct StepCall {
    /// The kernel of the schedule that it belongs to.
    pub kernel: u32,
    /// The stage that it belongs to: calls of one stage run one after the other ([`StepCode::orders`]).
    pub stage: u32,
    /// What it does.
    pub kind: CallKind,
}

/// A whole step.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct StepCode {
    /// Kernels, each text once.
    pub functions: Vec<Function>,
    /// Calls, in order.
    pub calls: Vec<StepCall>,
    /// For each stage the earlier ones that it must come after, but for those that these come after in turn. Other stages
    /// touch no common bytes that one of them writes, and may run at the same time.
    pub orders: Vec<Vec<u32>>,
    /// Bytes of the arena.
    pub arena_bytes: usize,
    /// Bytes of each tensor argument.
    pub inputs: Vec<usize>,
    /// Bytes of each output.
    pub outputs: Vec<usize>,
    /// How many runtime scalars there are.
    pub scalars: usize,
}

/// Kernels in one program: NVRTC takes some 30 ms for a program before its first kernel.
pub(crate) const KERNELS_OF_A_PROGRAM: usize = 8;

impl CallKind {
    /// Whether the call reaches input `index` not at all, or by a pointer among the arguments of a kernel: not
    /// through a library, a table or a matrix of the copy engine, which hold the address elsewhere.
    fn reads_by_pointer(&self, index: u32) -> bool {
        let is_input = |address: &Address| matches!(address, Address::Input(input, _) if *input == index);
        match self {
            Self::Launch { arguments, .. } => arguments.iter().all(|argument| match argument {
                Pointer::To(_) | Pointer::Words(_) => true,
                Pointer::Copied(address, _) => !is_input(address),
                Pointer::Table(rows) => !rows.iter().flat_map(|(row, _)| row).any(is_input),
            }),
            Self::Product {
                left,
                right,
                result,
                workspace,
                ..
            } => ![left, right, result, &workspace.0].into_iter().any(is_input),
            Self::Convolution {
                tensors, workspace, ..
            } => !tensors.iter().chain([&workspace.0]).any(is_input),
            Self::Either { library, own, .. } => {
                let mut both = library.iter().chain(own);
                both.all(|call| call.reads_by_pointer(index))
            }
            Self::Guard { least, most, .. } => ![least, most].into_iter().any(is_input),
            Self::Across { operand, result, .. } => ![operand, result].into_iter().any(is_input),
            Self::Extern(_, addresses) => !addresses.iter().any(is_input),
        }
    }

    /// The call and those inside of it.
    fn visit(&mut self, look: &mut impl FnMut(&mut Self)) {
        if let Self::Either { library, own, .. } = self {
            library.iter_mut().chain(own).for_each(|call| call.visit(look));
        }
        look(self);
    }
}

impl StepCode {
    /// Whether all that read input `index` are kernels that have a pointer to it among their arguments.
    pub(crate) fn reads_by_pointers(&self, index: u32) -> bool {
        self.calls.iter().all(|call| call.kind.reads_by_pointer(index))
    }

    /// How many ranks the step is one of; none for a step without collectives.
    pub fn ranks(&self) -> Option<usize> {
        self.calls.iter().find_map(|call| match &call.kind {
            CallKind::Across { across, .. } => Some(across.ranks),
            _ => None,
        })
    }

    /// The step with one side of each [`CallKind::Either`], without the functions that only the other side calls. `takes` is given the
    /// functions and such a call, and says whether the library's side is taken. Returns the kernels, too, of which it is not.
    ///
    /// # Errors
    /// Those of `takes`.
    pub fn decided<E>(
        mut self,
        mut takes: impl FnMut(&[Function], &CallKind) -> Result<bool, E>,
    ) -> Result<(Self, Vec<u32>), E> {
        let mut refused = Vec::new();
        let mut calls = Vec::with_capacity(self.calls.len());
        // Calls to look at, the next one last: a side may have a decision in it.
        let mut left: Vec<StepCall> = std::mem::take(&mut self.calls);
        left.reverse();
        while let Some(StepCall { kernel, stage, kind }) = left.pop() {
            if !matches!(kind, CallKind::Either { .. }) {
                calls.push(StepCall { kernel, stage, kind });
                continue;
            }
            let taken = takes(&self.functions, &kind)?;
            if !taken {
                refused.push(kernel);
            }
            let CallKind::Either { library, own, .. } = kind else {
                continue;
            };
            let chosen = if taken { library } else { own };
            let chosen = chosen.into_iter().rev();
            left.extend(chosen.map(|kind| StepCall { kernel, stage, kind }));
        }
        self.calls = calls;
        self.drop_unused_functions();
        Ok((self, refused))
    }

    /// Forgets functions that no call runs.
    fn drop_unused_functions(&mut self) {
        let mut used = vec![false; self.functions.len()];
        let mut each = |look: &mut dyn FnMut(&mut usize)| {
            for call in &mut self.calls {
                call.kind.visit(&mut |kind| {
                    if let CallKind::Launch { function, .. } = kind {
                        look(function);
                    }
                });
            }
        };
        each(&mut |function| used[*function] = true);
        let mut next = 0;
        let numbers: Vec<usize> = used
            .iter()
            .map(|&used| {
                next += usize::from(used);
                next.saturating_sub(1)
            })
            .collect();
        each(&mut |function| *function = numbers[*function]);
        let mut used = used.into_iter();
        self.functions.retain(|_| used.next() == Some(true));
    }

    /// The programs to compile, and for each function the number of its program.
    pub fn sources(&self) -> (Vec<Source>, Vec<usize>) {
        let mut sources = Vec::new();
        let mut places = Vec::new();
        for (number, functions) in self.functions.chunks(KERNELS_OF_A_PROGRAM).enumerate() {
            let mut text = PRELUDE.to_owned();
            for function in functions {
                text.push_str(&function.text.source(&function.name, function.guarded));
                places.push(number);
            }
            sources.push(Source {
                name: functions[0].name.clone(),
                text,
            });
        }
        (sources, places)
    }
}
