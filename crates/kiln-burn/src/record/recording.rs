//! One recording: the operations of a region between two points where values are needed, in relative form.
//!
//! While operations arrive, three things are kept: the operations themselves (to import them if this is a
//! new step), their *words* (the same stream without tensor ids, to compare with steps seen before), and
//! their runtime scalars. A tensor is named by position: input number or result number. Positions follow
//! from the order of operations alone, so two runs of a step have the same words exactly if they are the
//! same step.
//!
//! Not part of the words: the scalars that are runtime arguments, the numbers of random streams, and *when*
//! tensors die. The order in which Burn drops tensors is not stable from run to run (maps with random seeds);
//! only what is alive at the end matters, and that is compared separately as the list of outputs.

mod hoist;

use std::sync::Arc;

use burn_backend::Shape;
use burn_ir::{OperationIr, ScalarIr, TensorId, TensorIr, TensorStatus};
use rustc_hash::{FxHashMap, FxHashSet};

use super::functions::{self, Function};
use super::gradient::Source;
use super::marks::Mark;
use super::sighting::Sighting;
use crate::device::Place;
use crate::precision;
use crate::random::Stream;
use crate::ranks;
use crate::storage::Storage;
use crate::stream::{self, Visitor};
use crate::table;

/// Added to the kind of a scalar that belongs to the identity of the step.
const STATIC: u64 = 4;

/// Added to the identity of an operation that autocast leaves as it is.
const FULL_PRECISION: u64 = u64::MAX;

/// A tensor that existed before the recording and is read in it.
#[derive(Debug)]
pub struct Input {
    /// Its id, type and shape.
    pub ir: TensorIr,
    /// Its elements. If the program dropped the tensor meanwhile this is the last reference, and the
    /// executable may overwrite it.
    pub tensor: Storage,
    dies: bool,
    surrendered: bool,
    host_data: bool,
    /// Dimensions that the program marked.
    pub marks: Vec<Mark>,
}

impl Input {
    /// Whether the program dropped the tensor while recording.
    pub fn tensor_dies(&self) -> bool {
        self.dies
    }

    /// Whether the program keeps the id for the case that the step fails ([`Recording::surrender`]).
    pub fn is_surrendered(&self) -> bool {
        self.surrendered
    }

    /// Whether the program made the tensor from data on the host while recording.
    pub fn is_host_data(&self) -> bool {
        self.host_data
    }
}

/// A result of a recorded operation.
#[derive(Clone, Copy, Debug)]
struct Pending {
    id: TensorId,
    alive: bool,
}

/// Operations recorded and not run yet.
#[derive(Debug, Default)]
pub struct Recording {
    /// Numbers of ids from here on are dense enough for a table: `results` has the position of
    /// `number - base`.
    base: u64,
    /// Position plus one, by `number - base`; 0 for ids that are no results.
    results: Vec<u32>,
    /// Positions of results with numbers below `base`: those of an operation that was on its way when the
    /// recording began.
    early: FxHashMap<TensorId, u32>,
    pending: Vec<Pending>,
    inputs: Vec<Input>,
    input_positions: FxHashMap<TensorId, u32>,
    consumed: Vec<TensorId>,
    host_data: FxHashSet<TensorId>,
    operations: Vec<OperationIr>,
    words: Vec<u64>,
    /// End of each operation's words.
    ends: Vec<u32>,
    scalars: Vec<ScalarIr>,
    streams: Vec<Stream>,
    /// Operations that autocast leaves as they are.
    full_precision: Vec<u32>,
    /// The sighting of each operation; shorter than `operations` if only the first ones were looked up.
    lines: Vec<Sighting>,
    /// The functions among the operations.
    functions: Vec<Arc<Function>>,
}

/// The role that a dropped tensor had in a recording.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Killed {
    /// A result, pending.
    Result,
    /// An input, still in the table.
    Input,
    /// An input that belongs to another recording, which this one is a part of: it is let go of when this
    /// one is complete.
    Borrowed,
    /// Neither.
    Unknown,
}

/// The identity of a recorded step: operations in relative form, and which results leave.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Identity {
    /// Relative form of the operations.
    pub words: Vec<u64>,
    /// Positions of the results that are alive at the end.
    pub outputs: Vec<u32>,
}

/// A recording that is complete.
#[derive(Debug)]
pub struct Recorded {
    /// The operations, in order.
    pub operations: Vec<OperationIr>,
    /// End of each operation's words in [`Identity::words`].
    pub ends: Vec<u32>,
    /// The identity of the step.
    pub identity: Identity,
    /// Tensors read, in order of first use.
    pub inputs: Vec<Input>,
    /// Ids of [`Identity::outputs`].
    pub output_ids: Vec<TensorId>,
    /// Runtime scalars, in order.
    pub scalars: Vec<ScalarIr>,
    /// Streams of the random operations, in order.
    pub streams: Vec<Stream>,
    /// Positions of the operations that autocast leaves as they are ([`crate::full_precision`]).
    pub full_precision: Vec<u32>,
    /// The sighting of each operation on the stack; empty unless it was looked up.
    pub lines: Vec<Sighting>,
    /// The functions among the operations.
    pub functions: Vec<Arc<Function>>,
}

impl Recorded {
    /// Where operation `position` comes from, by `sources` as far as they tell.
    pub fn source(&self, sources: &[Source], position: usize) -> Source {
        let mut source = sources.get(position).cloned().unwrap_or_default();
        source.full_precision |= self.full_precision.contains(&(position as u32));
        source
    }

    /// Takes the results `ids` out of those that outlive the recording: nobody is going to use them.
    pub fn forget(&mut self, ids: &[TensorId]) {
        if ids.is_empty() {
            return;
        }
        let outputs = self.identity.outputs.iter().copied();
        let outputs = outputs.zip(self.output_ids.iter().copied());
        (self.identity.outputs, self.output_ids) = outputs.filter(|(_, id)| !ids.contains(id)).unzip();
    }

    /// The shapes of the float tensors that outlive the recording, beside those of these ids.
    pub fn kept_besides(&self, ids: &[&[TensorId]]) -> Vec<Shape> {
        let known: FxHashSet<TensorId> = ids.iter().copied().flatten().copied().collect();
        let outputs = self.output_ids.iter().copied();
        let kept: FxHashSet<TensorId> = outputs.filter(|id| !known.contains(id)).collect();
        if kept.is_empty() {
            return Vec::new();
        }
        let results = self.operations.iter().flat_map(|operation| operation.outputs());
        let kept = results.filter(|ir| ir.dtype.is_float() && kept.contains(&ir.id));
        kept.map(|ir| ir.shape.clone()).collect()
    }

    /// The GPU that the step runs on: that of its tensors; none if they are all the host's.
    pub fn gpu(&self) -> Option<usize> {
        let inputs = self.inputs.iter().map(|input| input.ir.id);
        let mut places = self.output_ids.iter().copied().chain(inputs).map(table::place);
        places.find_map(Place::gpu)
    }

    /// Whether the recording has something that all ranks compute together.
    pub fn is_of_ranks(&self) -> bool {
        self.operations.iter().any(ranks::is_recorded)
    }
}

impl Recording {
    /// An empty recording. Most results of its operations will have ids with numbers of at least `base`.
    pub fn new(base: u64) -> Self {
        Self {
            base,
            ..Self::default()
        }
    }

    /// Whether nothing was recorded.
    pub fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// Number of operations.
    pub fn len(&self) -> usize {
        self.operations.len()
    }

    /// Number of runtime scalars so far.
    pub fn num_scalars(&self) -> usize {
        self.scalars.len()
    }

    /// Number of inputs so far.
    pub fn num_inputs(&self) -> usize {
        self.inputs.len()
    }

    /// Position of a result of this recording.
    fn position(&self, id: TensorId) -> Option<u32> {
        match table::number(id).checked_sub(self.base) {
            Some(offset) => self.results.get(usize::try_from(offset).ok()?)?.checked_sub(1),
            None => self.early.get(&id).copied(),
        }
    }

    /// Whether `id` is a result of this recording that is still alive.
    pub fn is_pending(&self, id: TensorId) -> bool {
        self.position(id)
            .is_some_and(|position| self.pending[position as usize].alive)
    }

    /// Whether `id` is a result of this recording, alive or not.
    pub fn is_result(&self, id: TensorId) -> bool {
        self.position(id).is_some()
    }

    /// Makes the result `id` outlive the recording, and says whether an operation has consumed it. Other ids
    /// are ignored.
    pub fn revive(&mut self, id: TensorId) -> bool {
        self.position(id)
            .is_some_and(|position| !std::mem::replace(&mut self.pending[position as usize].alive, true))
    }

    /// Whether the recording already knows the tensor `id`, as an input or a result.
    pub fn knows(&self, id: TensorId) -> bool {
        self.position(id).is_some() || self.input_positions.contains_key(&id)
    }

    /// The operands of `operation` that the recording does not know, in order.
    pub fn unknown_operands(&self, operation: &OperationIr) -> Vec<TensorIr> {
        let mut unknown = Unknown {
            recording: self,
            found: Vec::new(),
        };
        stream::walk(operation, &mut unknown);
        unknown.found
    }

    /// The name of the operation that defines the pending tensor `id`.
    pub fn producer(&self, id: TensorId) -> Option<String> {
        let defines = |operation: &&OperationIr| operation.outputs().any(|output| output.id == id);
        self.operations.iter().rev().find(defines).map(stream::name)
    }

    /// Notes that the program will not use the tensor `id` any more; returns its role.
    pub fn kill(&mut self, id: TensorId) -> Killed {
        if let Some(position) = self.position(id) {
            self.pending[position as usize].alive = false;
            return Killed::Result;
        }
        match self.input_positions.get(&id) {
            Some(&position) => {
                self.inputs[position as usize].dies = true;
                Killed::Input
            }
            None => Killed::Unknown,
        }
    }

    /// Notes that the program keeps the input `id` only for the case that the step fails: the step may
    /// overwrite it. Returns whether it is an input.
    pub fn surrender(&mut self, id: TensorId) -> bool {
        let Some(&position) = self.input_positions.get(&id) else {
            return false;
        };
        let input = &mut self.inputs[position as usize];
        input.surrendered = !input.dies;
        input.dies = true;
        input.surrendered
    }

    /// Inputs that were consumed since the last call: the table can drop them.
    pub fn take_consumed(&mut self) -> Vec<TensorId> {
        std::mem::take(&mut self.consumed)
    }

    /// Notes that the program makes the tensor `id` from data on the host now.
    pub fn note_host_data(&mut self, id: TensorId) {
        self.host_data.insert(id);
    }

    /// Tells this recording from others that have the same operations and another number here.
    pub fn push_word(&mut self, word: u64) {
        self.words.push(word);
    }

    /// Makes a materialised tensor the next input.
    pub fn add_input(&mut self, ir: &TensorIr, tensor: Storage) {
        self.input_positions.insert(ir.id, self.inputs.len() as u32);
        self.inputs.push(Input {
            ir: ir.clone(),
            tensor,
            dies: false,
            surrendered: false,
            host_data: self.host_data.contains(&ir.id),
            marks: table::marks(ir.id),
        });
    }

    /// Makes a tensor the next input without its elements: the recording will never run.
    pub fn add_placeholder(&mut self, ir: &TensorIr) {
        self.add_input(ir, Storage::nothing(ir.dtype));
    }

    /// Notes the sighting of the operation that is recorded next.
    pub fn note_line(&mut self, line: Sighting) {
        self.lines.push(line);
    }

    /// Appends an operation all of whose operands are known ([`Recording::knows`]). `take_stream` is called
    /// once for each stream that it takes.
    pub fn push(&mut self, operation: OperationIr, take_stream: impl FnMut() -> Stream) {
        self.push_in(precision::is_full(), operation, take_stream);
    }

    /// As [`Recording::push`], of an operation that autocast leaves as it is, or not.
    fn push_in(&mut self, full_precision: bool, operation: OperationIr, take_stream: impl FnMut() -> Stream) {
        let described = stream::describe(&operation);
        self.words.push(described.code);
        if full_precision {
            self.words.push(FULL_PRECISION);
            self.full_precision.push(self.operations.len() as u32);
        }
        if let Some(dtype) = described.dtype {
            self.words.push(dtype_word(dtype));
        }
        let draws = stream::draws(&operation);
        self.streams
            .extend(std::iter::repeat_with(take_stream).take(draws));
        self.functions.extend(functions::find(&operation));
        let keep_scalars = !stream::scalars_are_static(&operation);
        described.parts.visit(&mut Encoder {
            recording: self,
            keep_scalars,
        });
        self.ends.push(self.words.len() as u32);
        self.operations.push(operation);
    }

    /// Ends the recording.
    pub fn finish(self) -> Recorded {
        let alive = self.pending.iter().enumerate().filter(|(_, result)| result.alive);
        let (outputs, output_ids) = alive
            .map(|(position, result)| (position as u32, result.id))
            .unzip();
        Recorded {
            operations: self.operations,
            ends: self.ends,
            identity: Identity {
                words: self.words,
                outputs,
            },
            inputs: self.inputs,
            output_ids,
            scalars: self.scalars,
            streams: self.streams,
            full_precision: self.full_precision,
            lines: self.lines,
            functions: self.functions,
        }
    }
}

/// Collects operands that a recording does not know. (`OperationIr::inputs` allocates for each operation.)
struct Unknown<'a> {
    recording: &'a Recording,
    found: Vec<TensorIr>,
}

impl Visitor for Unknown<'_> {
    fn input(&mut self, tensor: &TensorIr) {
        if !self.recording.knows(tensor.id) {
            self.found.push(tensor.clone());
        }
    }

    fn output(&mut self, _: &TensorIr) {}

    fn scalar(&mut self, _: ScalarIr) {}

    fn word(&mut self, _: u64) {}
}

/// Writes the words of one operation and tracks its tensors.
struct Encoder<'a> {
    recording: &'a mut Recording,
    keep_scalars: bool,
}

impl Visitor for Encoder<'_> {
    fn input(&mut self, tensor: &TensorIr) {
        // Results are even, inputs odd; the first mention of an input also gives its type.
        if let Some(position) = self.recording.position(tensor.id) {
            self.recording.words.push(u64::from(position) << 1);
            if tensor.status == TensorStatus::ReadWrite {
                self.recording.pending[position as usize].alive = false;
            }
        } else {
            let position = self.recording.input_positions.get(&tensor.id).copied();
            debug_assert!(
                position.is_some(),
                "operands are made inputs before the operation is recorded"
            );
            self.recording
                .words
                .push(u64::from(position.unwrap_or(u32::MAX)) << 1 | 1);
            self.ty(tensor);
            if tensor.status == TensorStatus::ReadWrite && self.recording.kill(tensor.id) == Killed::Input {
                self.recording.consumed.push(tensor.id);
            }
        }
    }

    fn output(&mut self, tensor: &TensorIr) {
        self.ty(tensor);
        let recording = &mut *self.recording;
        let position = recording.pending.len() as u32;
        recording.pending.push(Pending {
            id: tensor.id,
            alive: true,
        });
        match table::number(tensor.id).checked_sub(recording.base) {
            Some(offset) => {
                let offset = offset as usize;
                if recording.results.len() <= offset {
                    recording.results.resize(offset + 1, 0);
                }
                recording.results[offset] = position + 1;
            }
            None => {
                recording.early.insert(tensor.id, position);
            }
        }
    }

    fn scalar(&mut self, scalar: ScalarIr) {
        let (kind, bits) = match scalar {
            ScalarIr::Float(x) => (0, x.to_bits()),
            ScalarIr::Int(x) => (1, x as u64),
            ScalarIr::UInt(x) => (2, x),
            ScalarIr::Bool(x) => (3, u64::from(x)),
        };
        // Whether an operation's scalars are kept may depend on their values, so the words record that.
        if self.keep_scalars {
            self.recording.words.push(kind);
            self.recording.scalars.push(scalar);
        } else {
            self.recording.words.extend([STATIC | kind, bits]);
        }
    }

    fn word(&mut self, word: u64) {
        self.recording.words.push(word);
    }
}

impl Encoder<'_> {
    fn ty(&mut self, tensor: &TensorIr) {
        let words = &mut self.recording.words;
        words.push(dtype_word(tensor.dtype) << 8 | tensor.shape.num_dims() as u64);
        words.extend(tensor.shape.iter().map(|&dim| dim as u64));
    }
}

/// A number for each element type.
fn dtype_word(dtype: burn_backend::DType) -> u64 {
    use burn_backend::DType;
    use burn_std::BoolStore;
    match dtype {
        DType::F64 => 0,
        DType::F32 => 1,
        DType::Flex32 => 2,
        DType::F16 => 3,
        DType::BF16 => 4,
        DType::I64 => 5,
        DType::I32 => 6,
        DType::I16 => 7,
        DType::I8 => 8,
        DType::U64 => 9,
        DType::U32 => 10,
        DType::U16 => 11,
        DType::U8 => 12,
        DType::Bool(BoolStore::Native) => 13,
        DType::Bool(BoolStore::U8) => 14,
        DType::Bool(BoolStore::U32) => 15,
        // Refused by import, whatever the scheme.
        DType::QFloat(_) => 16,
    }
}
