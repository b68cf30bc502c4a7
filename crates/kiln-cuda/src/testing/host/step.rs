//! A step on the host.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::path::Path;

use kiln_compiler::checks::Check;
use kiln_graph::collective::combine;
use kiln_graph::{Collective, HostTensor, TensorType};

use super::HostError;
use super::library::{Kernels, Shape};
use super::memory::Region;
use super::{convolution, product};
use crate::code::{Across, Address, CallKind, Function, FunctionText, Pointer, StepCall, StepCode};
use crate::convolutions::Task;
use crate::target::CudaStep;

/// Inputs of at most so many bytes in all are checked for writes after each kernel, larger ones after the
/// last call only.
const SMALL_INPUTS: usize = 1 << 20;

/// A step of one kernel, whose arguments are the inputs and then the outputs, of so many bytes.
pub fn one_kernel(
    text: FunctionText,
    grid: [u32; 3],
    shared_bytes: u32,
    inputs: Vec<usize>,
    outputs: Vec<usize>,
) -> StepCode {
    let numbered = |all: &[usize]| 0..all.len() as u32;
    let given = numbered(&inputs).map(|number| Pointer::To(Address::Input(number, 0)));
    let made = numbered(&outputs).map(|number| Pointer::To(Address::Output(number, 0)));
    let kind = CallKind::Launch {
        function: 0,
        grid,
        shared_bytes,
        arguments: given.chain(made).collect(),
    };
    StepCode {
        functions: vec![Function {
            name: "one".into(),
            text,
            guarded: false,
        }],
        calls: vec![StepCall {
            kernel: 0,
            stage: 0,
            kind,
        }],
        inputs,
        outputs,
        ..StepCode::default()
    }
}

/// An order of stages that the graph on a device allows ([`StepCode::orders`]). Stages that race show in a
/// difference between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StageOrder {
    /// That of the calls.
    #[default]
    Calls,
    /// Of those that may run always the last: it overtakes whom it need not wait for.
    LatestFirst,
    /// Branches in turn: who may run first does so first.
    InTurn,
}

/// A step whose kernels were built for the host.
#[derive(Debug)]
pub struct HostStep {
    code: StepCode,
    kernels: Kernels,
    aliases: Vec<Option<u32>>,
    backward: bool,
    order: StageOrder,
}

impl HostStep {
    /// Builds the kernels of `code`. No output takes over an input's memory, unless [`Self::with_aliases`]
    /// says so.
    ///
    /// # Errors
    /// What the compiler says, if it rejects the sources; the name of a kernel that needs a GPU.
    pub fn build(code: &StepCode) -> Result<Self, String> {
        // The host's library takes every convolution.
        let (code, _) = code.clone().decided(|_, _| Ok::<_, String>(true))?;
        Ok(Self {
            kernels: Kernels::build(&code)?,
            aliases: vec![None; code.outputs.len()],
            code,
            backward: false,
            order: StageOrder::default(),
        })
    }

    /// A compiled step, whose plan says which outputs take over inputs.
    ///
    /// # Errors
    /// Those of [`Self::build`].
    pub fn of(step: &CudaStep) -> Result<Self, String> {
        Ok(Self::build(&step.code)?.with_aliases(&step.plan.aliases))
    }

    /// For each output, the input whose memory it takes over.
    #[must_use]
    pub fn with_aliases(mut self, aliases: &[Option<u32>]) -> Self {
        self.aliases = aliases.to_vec();
        self.aliases.resize(self.code.outputs.len(), None);
        self
    }

    /// Blocks and threads run from the last to the first. Threads that race show in a difference.
    #[must_use]
    pub fn backward(mut self, backward: bool) -> Self {
        self.backward = backward;
        self
    }

    /// Stages run in another order.
    #[must_use]
    pub fn stages(mut self, order: StageOrder) -> Self {
        self.order = order;
        self
    }

    /// The program that was built, for people.
    pub fn source(&self) -> &Path {
        self.kernels.source()
    }

    /// Runs the step once. Scalars are given as their bits. Outputs that take over an input are written there
    /// as well.
    ///
    /// # Errors
    /// [`HostError::Index`] if indices were out of range; [`HostError::Fault`] for kernels that hang, write
    /// where they may not, or cannot run here.
    pub fn run(&self, inputs: &mut [Vec<u8>], scalars: &[u64]) -> Result<Vec<Vec<u8>>, HostError> {
        let mut run = Run::new(self, inputs, scalars).map_err(HostError::Fault)?;
        for call in self.ordered() {
            run.call(&call.kind).map_err(HostError::Fault)?;
        }
        run.inputs_kept("the step").map_err(HostError::Fault)?;
        let outputs = run.outputs();
        for (own, input) in inputs.iter_mut().zip(&run.inputs) {
            own.copy_from_slice(input.as_slice());
        }
        match run.wrong {
            Some(error) => Err(error),
            None => Ok(outputs),
        }
    }

    /// Whether stages run in another order than that of calls, if in this one.
    pub fn reorders(&self, order: StageOrder) -> bool {
        let in_order = 0..self.code.orders.len();
        !in_order.eq(self.stages_in(order))
    }

    /// The calls in the order in which they run.
    fn ordered(&self) -> Vec<&StepCall> {
        let StepCode { calls, orders, .. } = &self.code;
        if orders.is_empty() {
            return calls.iter().collect();
        }
        let mut of_stage = vec![Vec::new(); orders.len()];
        for call in calls {
            of_stage[call.stage as usize].push(call);
        }
        let stages = self.stages_in(self.order);
        stages
            .into_iter()
            .flat_map(|stage| std::mem::take(&mut of_stage[stage]))
            .collect()
    }

    /// The stages in an order that the graph on a device allows.
    fn stages_in(&self, order: StageOrder) -> Vec<usize> {
        let orders = &self.code.orders;
        let mut behind = vec![Vec::new(); orders.len()];
        for (stage, after) in orders.iter().enumerate() {
            after
                .iter()
                .for_each(|&before| behind[before as usize].push(stage));
        }
        let mut missing: Vec<usize> = orders.iter().map(Vec::len).collect();
        let mut ready: VecDeque<usize> = (0..orders.len()).filter(|&stage| missing[stage] == 0).collect();
        let mut ordered = Vec::with_capacity(orders.len());
        loop {
            let next = match order {
                StageOrder::Calls | StageOrder::InTurn => 0,
                StageOrder::LatestFirst => ready.len().saturating_sub(1),
            };
            let Some(stage) = ready.remove(next) else {
                return ordered;
            };
            ordered.push(stage);
            for &next in &behind[stage] {
                missing[next] -= 1;
                if missing[next] == 0 {
                    ready.push_back(next);
                }
            }
            if order != StageOrder::InTurn {
                ready.make_contiguous().sort_unstable();
            }
        }
    }
}

impl HostStep {
    /// Runs the step once on several ranks, each with inputs of its own, in an order of stages that the graph on a
    /// device allows and that differs most from the order of calls: collectives, and what comes after them, are
    /// put off until something else must come after them.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn run_ranks(
        &self,
        inputs: &mut [Vec<Vec<u8>>],
        scalars: &[u64],
    ) -> Result<Vec<Vec<Vec<u8>>>, HostError> {
        let runs = inputs.iter().map(|inputs| Run::new(self, inputs, scalars));
        let mut runs = runs.collect::<Result<Vec<_>, _>>().map_err(HostError::Fault)?;
        for stage in self.put_off() {
            for call in self.code.calls.iter().filter(|call| call.stage as usize == stage) {
                let CallKind::Across {
                    across,
                    operand,
                    result,
                } = &call.kind
                else {
                    let mut each = runs.iter_mut().map(|run| run.call(&call.kind));
                    each.try_for_each(|done| done).map_err(HostError::Fault)?;
                    continue;
                };
                let given = runs.iter_mut().map(|run| run.operand(across, *operand));
                let given = given.collect::<Result<Vec<_>, _>>().map_err(HostError::Fault)?;
                let shape = across
                    .shape()
                    .ok_or_else(|| HostError::Fault("an unknown collective".into()))?;
                let collective = Collective {
                    mean: shape.mean,
                    root: shape.root,
                    ..Collective::new(shape.kind, across.ranks)
                };
                let results = combine(&collective, &given).map_err(HostError::Fault)?;
                for (run, own) in runs.iter_mut().zip(&results) {
                    run.receive(across, *result, own).map_err(HostError::Fault)?;
                }
            }
        }
        for (run, inputs) in runs.iter().zip(inputs) {
            run.inputs_kept("the step").map_err(HostError::Fault)?;
            for (own, input) in inputs.iter_mut().zip(&run.inputs) {
                own.copy_from_slice(input.as_slice());
            }
        }
        Ok(runs.iter().map(Run::outputs).collect())
    }

    /// The stages in the order of [`HostStep::run_ranks`].
    fn put_off(&self) -> Vec<usize> {
        let orders = &self.code.orders;
        let mut late = vec![false; orders.len()];
        for call in &self.code.calls {
            late[call.stage as usize] |= matches!(call.kind, CallKind::Across { .. });
        }
        for stage in 0..orders.len() {
            late[stage] |= orders[stage].iter().any(|&before| late[before as usize]);
        }
        let early = (0..orders.len()).filter(|&stage| !late[stage]);
        let later = (0..orders.len()).filter(|&stage| late[stage]);
        early.chain(later).collect()
    }
}

/// One run.
struct Run<'a> {
    step: &'a HostStep,
    originals: Vec<Vec<u8>>,
    inputs: Vec<Region>,
    outputs: Vec<Region>,
    arena: Region,
    scalars: Region,
    stopped: Region,
    wrong: Option<HostError>,
}

impl<'a> Run<'a> {
    fn new(step: &'a HostStep, inputs: &[Vec<u8>], scalars: &[u64]) -> Result<Self, String> {
        let code = &step.code;
        let sizes: Vec<usize> = inputs.iter().map(Vec::len).collect();
        if sizes != code.inputs || scalars.len() != code.scalars {
            return Err(format!(
                "the step takes inputs of {:?} bytes and {} scalars, not {sizes:?} and {}",
                code.inputs,
                code.scalars,
                scalars.len()
            ));
        }
        let bits: Vec<u8> = scalars.iter().flat_map(|bits| bits.to_ne_bytes()).collect();
        Ok(Self {
            step,
            originals: inputs.to_vec(),
            inputs: inputs.iter().map(|input| Region::of(input)).collect(),
            outputs: code.outputs.iter().map(|&bytes| Region::noise(bytes)).collect(),
            arena: Region::noise(code.arena_bytes),
            scalars: Region::of(&bits),
            stopped: Region::of(&0_i32.to_ne_bytes()),
            wrong: None,
        })
    }

    /// The memory that `address` lies in, and its offset there.
    fn region(&mut self, address: Address) -> (&mut Region, usize) {
        match address {
            Address::Input(index, bytes) => (&mut self.inputs[index as usize], bytes),
            Address::Output(index, bytes) => match self.step.aliases[index as usize] {
                Some(input) => (&mut self.inputs[input as usize], bytes),
                None => (&mut self.outputs[index as usize], bytes),
            },
            Address::Arena(bytes) => (&mut self.arena, bytes),
            Address::Scalar(index) => (&mut self.scalars, 8 * index as usize),
        }
    }

    fn pointer(&mut self, address: Address) -> Result<*mut u8, String> {
        let (region, offset) = self.region(address);
        if offset > region.len() {
            return Err(format!("{address:?} lies outside of {} bytes", region.len()));
        }
        // SAFETY: inside the region, or just behind it.
        Ok(unsafe { region.as_mut_ptr().add(offset) })
    }

    /// The operand of a collective.
    fn operand(&mut self, across: &Across, at: Address) -> Result<HostTensor, String> {
        let shape = across.shape().ok_or("an unknown collective")?;
        let bytes = self.bytes(at);
        let own = bytes.get(..shape.elements * shape.dtype.size());
        let own = own.ok_or_else(|| format!("{shape}: the operand ends behind its memory"))?;
        HostTensor::from_bytes(TensorType::new(shape.dtype, vec![shape.elements]), own.to_vec())
            .ok_or_else(|| format!("{shape}: the operand has another size"))
    }

    /// Writes the result of a collective.
    fn receive(&mut self, across: &Across, at: Address, result: &HostTensor) -> Result<(), String> {
        let bytes = result.bytes();
        let room = self.bytes(at).len();
        if room < bytes.len() {
            return Err(format!("{}: the result ends behind its memory", across.kind));
        }
        let to = self.pointer(at)?;
        // SAFETY: inside the region, as was just seen.
        unsafe { std::slice::from_raw_parts_mut(to, bytes.len()) }.copy_from_slice(bytes);
        self.kept(&across.kind)
    }

    /// The bytes from `address` to the end of its memory.
    fn bytes(&mut self, address: Address) -> Vec<u8> {
        let (region, offset) = self.region(address);
        region.as_slice().get(offset..).unwrap_or_default().to_vec()
    }

    fn call(&mut self, kind: &CallKind) -> Result<(), String> {
        match kind {
            CallKind::Launch {
                function,
                grid,
                shared_bytes,
                arguments,
            } => {
                let function_of = &self.step.code.functions[*function];
                let shape = Shape {
                    function: *function,
                    grid: *grid,
                    threads: function_of.text.threads,
                    shared_bytes: *shared_bytes,
                    backward: self.step.backward,
                };
                self.launch(shape, arguments)
                    .and_then(|()| self.kept(&function_of.name))
            }
            CallKind::Product {
                product,
                left,
                right,
                result,
                workspace: _,
            } => {
                let (left, right) = (self.bytes(*left), self.bytes(*right));
                let mut sums = self.bytes(*result);
                product::compute(product, &left, &right, &mut sums)?;
                let to = self.pointer(*result)?;
                // SAFETY: the region goes on for as many bytes.
                unsafe { std::slice::from_raw_parts_mut(to, sums.len()) }.copy_from_slice(&sums);
                self.kept(&format!("product {product}"))
            }
            CallKind::Convolution {
                convolution,
                tensors,
                workspace,
            } => {
                let at = match convolution.task {
                    Task::Forward => [tensors[0], tensors[1], tensors[2]],
                    Task::InputGradient => [tensors[2], tensors[1], tensors[0]],
                    Task::WeightGradient => [tensors[0], tensors[2], tensors[1]],
                };
                let (first, second) = (self.bytes(at[0]), self.bytes(at[1]));
                let mut sums = self.bytes(at[2]);
                convolution::compute(convolution, [&first, &second], &mut sums)?;
                let to = self.pointer(at[2])?;
                // SAFETY: the region goes on for as many bytes.
                unsafe { std::slice::from_raw_parts_mut(to, sums.len()) }.copy_from_slice(&sums);
                // No kernel may rely on what the library leaves in its working memory.
                let (at, bytes) = *workspace;
                let to = self.pointer(at)?;
                let room = self.bytes(at).len();
                if room < bytes {
                    return Err(format!(
                        "{convolution}: {bytes} bytes of working memory, of which {room} are there"
                    ));
                }
                // SAFETY: inside the region, as was just seen.
                unsafe { std::slice::from_raw_parts_mut(to, bytes) }.fill(0xa5);
                self.kept(&convolution.to_string())
            }
            CallKind::Either { .. } => Err("a call that is not decided".into()),
            CallKind::Guard {
                check,
                dtype,
                extent,
                least,
                most,
            } => {
                let number = |bytes: Vec<u8>| {
                    let mut first = [0; 8];
                    let count = bytes.len().min(8);
                    first[..count].copy_from_slice(&bytes[..count]);
                    let dtype = dtype.clone();
                    Check {
                        dtype,
                        uses: Vec::new(),
                    }
                    .number(first)
                };
                let (least, most) = (number(self.bytes(*least)), number(self.bytes(*most)));
                if least < 0 || most >= i128::from(*extent) {
                    let check = *check;
                    self.wrong.get_or_insert(HostError::Index { check, least, most });
                    self.stopped = Region::of(&1_i32.to_ne_bytes());
                }
                Ok(())
            }
            CallKind::Across {
                across,
                operand,
                result,
            } => match across.ranks {
                1 => {
                    let given = self.operand(across, *operand)?;
                    self.receive(across, *result, &given)
                }
                ranks => Err(format!(
                    "a step of {ranks} ranks runs with the others: `run_ranks`"
                )),
            },
            CallKind::Extern(number, _) => Err(format!(
                "operation {number} runs outside: the host has nobody to run it"
            )),
        }
    }

    fn launch(&mut self, shape: Shape, arguments: &[Pointer]) -> Result<(), String> {
        let function = &self.step.code.functions[shape.function];
        let (name, declared) = (&function.name, function.text.parameters.len());
        if declared != arguments.len() {
            return Err(format!(
                "kernel {name} takes {declared} arguments and is given {}",
                arguments.len()
            ));
        }
        let mut pointers: Vec<*mut c_void> = Vec::new();
        let mut tables = Vec::new();
        for argument in arguments {
            pointers.push(match argument {
                Pointer::To(address) => self.pointer(*address)?.cast(),
                Pointer::Table(rows) => {
                    let mut table = Vec::new();
                    for (addresses, numbers) in rows {
                        for &address in addresses {
                            table.extend((self.pointer(address)? as u64).to_ne_bytes());
                        }
                        table.extend(numbers.iter().flat_map(|number| number.to_ne_bytes()));
                    }
                    let mut table = Region::of(&table);
                    let at = table.as_mut_ptr().cast();
                    tables.push(table);
                    at
                }
                Pointer::Copied(..) => return Err(format!("kernel {name} needs a GPU")),
                // The host is given a pointer to them (`numbers.cuh`).
                Pointer::Words(words) => {
                    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
                    let mut region = Region::of(&bytes);
                    let at = region.as_mut_ptr().cast();
                    tables.push(region);
                    at
                }
            });
        }
        if function.guarded {
            pointers.push(self.stopped.as_mut_ptr().cast());
        }
        // SAFETY: every pointer is to memory of the step, or to a table that lives until the kernel has
        // ended.
        unsafe { self.step.kernels.launch(shape, &mut pointers) }
    }

    /// Whether `name`, which has just run, wrote into its own memory alone.
    fn kept(&self, name: &str) -> Result<(), String> {
        let named = |regions: &'a str| move |number: usize| format!("{regions} {number}");
        let (input, output) = (named("input"), named("output"));
        let inputs = self
            .inputs
            .iter()
            .enumerate()
            .map(|(number, region)| (input(number), region));
        let outputs = self
            .outputs
            .iter()
            .enumerate()
            .map(|(number, region)| (output(number), region));
        let others = [
            ("the arena".to_owned(), &self.arena),
            ("the scalars".to_owned(), &self.scalars),
            ("the stop flag".to_owned(), &self.stopped),
        ];
        for (what, region) in inputs.chain(outputs).chain(others) {
            if !region.is_intact() {
                return Err(format!(
                    "kernel {name} writes outside of {what} ({} bytes)",
                    region.len()
                ));
            }
        }
        let bytes: usize = self.originals.iter().map(Vec::len).sum();
        match bytes <= SMALL_INPUTS {
            true => self.inputs_kept(&format!("kernel {name}")),
            false => Ok(()),
        }
    }

    /// Whether inputs that no output takes over are as they were.
    fn inputs_kept(&self, name: &str) -> Result<(), String> {
        for (number, (region, original)) in self.inputs.iter().zip(&self.originals).enumerate() {
            let taken = self.step.aliases.contains(&Some(number as u32));
            if !taken && region.as_slice() != original {
                return Err(format!("{name} overwrites input {number}"));
            }
        }
        Ok(())
    }

    fn outputs(&self) -> Vec<Vec<u8>> {
        let outputs = self.outputs.iter().zip(&self.step.aliases);
        outputs
            .map(|(own, alias)| match alias {
                Some(input) => self.inputs[*input as usize].as_slice().to_vec(),
                None => own.as_slice().to_vec(),
            })
            .collect()
    }
}
