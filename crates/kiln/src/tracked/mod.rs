//! A compiled function inside an eager autograd graph: its backward pass is compiled, too.
//!
//! The function is traced on leaves of its own, one for each tracked tensor that it takes, together with its
//! gradients: every tracked output is multiplied by a *tangent*, the gradient that the program will have for
//! it, and Burn's autograd differentiates the sum. The trace is split and compiled by kiln-burn
//! ([`SplitRegion`]); the forward pass runs at once. [`graph`] makes the call a part of the program's own
//! autograd graph.
//!
//! The function runs exactly once in every case. If it reads a value, the trace is cut: the operations
//! recorded so far run, the others are recorded and run as in any region with a graph break, and the
//! backward pass is Burn's own, through the operations of the function. A tensor that the function captures
//! and that is trained is found by its gradient ([`captured`]).

mod captured;
pub(crate) mod graph;

use burn_autodiff::Autodiff;
use burn_autodiff::grads::Gradients;
use burn_backend::backend::BackendTypes;
use burn_backend::ops::FloatTensorOps;
use burn_backend::{AutodiffBackend, TensorMetadata};
use burn_ir::TensorId;
use kiln_burn::record::{Differentiated, Recorded, SplitRegion, Traced, position};
use kiln_burn::{CompiledRegion, Error, Kiln};

use crate::input::{KilnTensor, StepInput, TensorMap};
use captured::{Forward, Kind, Others};
use graph::{Attach, Call, Inside, Link, Place, Places};

pub(crate) type Tracking = Autodiff<Kiln>;

/// A float tensor in a program's autograd graph.
pub type TrackedTensor = <Tracking as BackendTypes>::FloatTensorPrimitive;

/// The tensor inside.
pub(crate) fn inner(tensor: TrackedTensor) -> KilnTensor {
    <Tracking as AutodiffBackend>::inner(tensor)
}

/// A tensor outside any autograd graph.
pub(crate) fn untracked(tensor: KilnTensor) -> TrackedTensor {
    <Tracking as AutodiffBackend>::from_inner(tensor)
}

pub(crate) fn id(tensor: &KilnTensor) -> TensorId {
    // A copy beside the original: its status is read-only, so this is no last use.
    tensor.clone().into_ir().id
}

/// The tracked tensors of an input, in order; the input stays as it is.
pub(crate) fn tracked_tensors<A: StepInput>(input: A) -> (A, Vec<TrackedTensor>) {
    let mut found = Collect::default();
    let input = input.map(&mut found);
    (input, found.tracked)
}

/// Collects the tracked tensors that it is shown, and the ids of all.
#[derive(Default)]
pub(crate) struct Collect {
    pub(crate) tracked: Vec<TrackedTensor>,
    pub(crate) ids: Vec<TensorId>,
}

impl TensorMap for Collect {
    fn tensor(&mut self, tensor: KilnTensor) -> KilnTensor {
        self.ids.push(id(&tensor));
        tensor
    }

    fn tracked(&mut self, tensor: TrackedTensor) -> TrackedTensor {
        self.ids.push(id(&inner(tensor.clone())));
        if tensor.is_tracked() {
            self.tracked.push(tensor.clone());
        }
        tensor
    }
}

/// Collects the tracked tensors that it is shown, each with its position among all tensors.
#[derive(Default)]
struct Numbered {
    seen: usize,
    tracked: Vec<(usize, TrackedTensor)>,
}

impl TensorMap for Numbered {
    fn tensor(&mut self, tensor: KilnTensor) -> KilnTensor {
        self.seen += 1;
        tensor
    }

    fn tracked(&mut self, tensor: TrackedTensor) -> TrackedTensor {
        if tensor.is_tracked() {
            self.tracked.push((self.seen, tensor.clone()));
        }
        self.seen += 1;
        tensor
    }
}

/// Collects the ids of the tracked tensors that it is shown. A detached one has the elements of another that
/// may have been kept.
#[derive(Default)]
struct Ids(Vec<TensorId>);

impl TensorMap for Ids {
    fn tensor(&mut self, tensor: KilnTensor) -> KilnTensor {
        tensor
    }

    fn tracked(&mut self, tensor: TrackedTensor) -> TrackedTensor {
        if tensor.is_tracked() {
            self.0.push(id(&inner(tensor.clone())));
        }
        tensor
    }
}

/// Puts the leaves of a trace in the place of the tracked tensors, in order.
pub(crate) struct Leaves(std::vec::IntoIter<TrackedTensor>);

impl TensorMap for Leaves {
    fn tensor(&mut self, tensor: KilnTensor) -> KilnTensor {
        tensor
    }

    fn tracked(&mut self, tensor: TrackedTensor) -> TrackedTensor {
        if tensor.is_tracked() {
            self.0.next().unwrap_or(tensor)
        } else {
            tensor
        }
    }
}

/// A call's result, and the kind of its backward pass.
pub(crate) enum Called<R> {
    /// A compiled one.
    Compiled(R),
    /// Burn's own, since the function read a value.
    Read(R),
    /// A compiled one. The function captures tensors that are trained, and compiled gradients for such
    /// tensors are found in this call only.
    Captured(R),
}

/// The result of a trace.
struct Trace<R> {
    result: R,
    /// Outputs that the leaves lead to; none if the function read a value.
    outputs: Vec<KilnTensor>,
    /// For each of the outputs, its position among the tensors of the result.
    positions: Vec<usize>,
    tangents: Vec<KilnTensor>,
    /// For each leaf, its gradient; none if no output depends on it.
    gradients: Vec<Option<KilnTensor>>,
    /// The other gradients, if there are any: those of captured leaves, and of detached ones.
    rest: Option<Gradients>,
    /// Numbers of the nodes of the outputs.
    nodes: Vec<u64>,
    /// Those of leaves that the function made and returned.
    made: Vec<u64>,
    /// Number of tensors that the forward pass reads.
    reads: usize,
    /// Whether the gradients were recorded.
    differentiated: bool,
}

/// Whether a value was needed since the recording began.
fn is_cut() -> bool {
    position().is_some_and(|position| position.segment > 0)
}

/// Runs `function` on leaves in the place of its tracked tensors, and differentiates it if that read no
/// value.
fn differentiate<R: StepInput>(places: &Places, function: impl FnOnce(&mut Leaves) -> R) -> Trace<R> {
    let result = function(&mut Leaves(places.leaves.clone().into_iter()));
    let mut numbered = Numbered::default();
    let result = result.map(&mut numbered);
    let mut trace = Trace {
        result,
        outputs: Vec::new(),
        positions: Vec::new(),
        tangents: Vec::new(),
        gradients: vec![None; places.leaves.len()],
        rest: None,
        nodes: Vec::new(),
        made: Vec::new(),
        reads: position().map_or(0, |position| position.inputs),
        differentiated: false,
    };
    if is_cut() {
        return trace;
    }
    trace.differentiated = true;
    let mut sum: Option<TrackedTensor> = None;
    for (position, output) in numbered.tracked {
        let number = output.node.id.value;
        match places.of(&output) {
            Place::Output => trace.nodes.push(number),
            Place::Leaf => {
                trace.made.push(number);
                continue;
            }
            Place::Input(_) | Place::Captured => continue,
        }
        let value = inner(output.clone());
        let tangent = value.client.zeros(value.shape(), value.dtype());
        let weighted = Tracking::float_sum(Tracking::float_mul(output, untracked(tangent.clone())));
        sum = Some(match sum {
            Some(sum) if sum.dtype() == weighted.dtype() => Tracking::float_add(sum, weighted),
            Some(sum) => {
                let dtype = sum.dtype();
                Tracking::float_add(sum, Tracking::float_cast(weighted, dtype.into()))
            }
            None => weighted,
        });
        trace.tangents.push(tangent);
        trace.outputs.push(value);
        trace.positions.push(position);
    }
    let Some(sum) = sum else { return trace };
    let mut found = <Tracking as AutodiffBackend>::backward(sum);
    let of = |leaf: &TrackedTensor| <Tracking as AutodiffBackend>::grad_remove(leaf, &mut found);
    trace.gradients = places.leaves.iter().map(of).collect();
    trace.rest = Some(found);
    trace
}

/// Calls `function` with leaves in the place of the tracked ones among its `arguments`, of which there is at
/// least one, and returns its result as part of the program's autograd graph.
pub(crate) fn call<R: StepInput>(
    region: &CompiledRegion,
    split: &SplitRegion,
    arguments: Collect,
    function: impl FnOnce(&mut Leaves) -> R,
) -> Result<Called<R>, Error> {
    let places = Places::new(arguments.tracked);
    let traced = region.trace(
        split.count() == 0,
        || differentiate(&places, function),
        |trace, recorded| compiled(split, &places, &arguments.ids, trace, recorded),
    )?;
    match traced {
        Traced::Whole(called) => Ok(called),
        // The gradients needed a value: they went through a tensor from outside that another compiled
        // function made.
        Traced::Cut(trace) if trace.differentiated => Err(split.tracked_capture()),
        Traced::Cut(trace) => Ok(Called::Read(trace.result.map(&mut Link::new(&places)))),
    }
}

/// Runs the forward pass, and attaches the result to the program's graph by operations whose backward pass is
/// the compiled one.
fn compiled<R: StepInput>(
    split: &SplitRegion,
    places: &Places,
    arguments: &[TensorId],
    trace: Trace<R>,
    mut recorded: Recorded,
) -> Result<Called<R>, Error> {
    let Trace {
        result,
        outputs,
        positions,
        tangents,
        gradients,
        rest,
        nodes,
        made,
        reads,
        ..
    } = trace;
    let tangent_ids: Vec<TensorId> = tangents.iter().map(id).collect();
    let mut has_gradient: Vec<bool> = gradients.iter().map(Option::is_some).collect();
    let mut wanted: Vec<TensorId> = gradients.iter().flatten().map(id).collect();
    let mut inputs = places.inputs.clone();
    let mut captures = false;
    // Until the trace has run: it has the handles of the gradients.
    let mut others = None;
    if let Some(rest) = rest {
        let gradients = gradients.into_iter().flatten();
        let others = others.insert(Others::new(rest, gradients, &recorded, &tangent_ids));
        let forward = Forward {
            recorded: &recorded,
            reads,
            first: places.first(),
            arguments,
            tangents: &tangent_ids,
            outputs: &outputs.iter().map(id).collect::<Vec<_>>(),
            made: &made,
        };
        let mut gone = Vec::new();
        for captured in others.find(&places.leaves[0], captured::newest_first()) {
            let kind = forward.kind(&captured);
            if kind == Kind::Older && !forward.reads(&captured) {
                split.salvage(recorded);
                return Err(split.tracked_capture());
            }
            captures |= matches!(kind, Kind::Older | Kind::Drawn);
            if kind == Kind::Gone {
                gone.push(captured.gradient.id);
            } else {
                inputs.push(captured.tensor);
                has_gradient.push(true);
                wanted.push(captured.gradient.id);
            }
        }
        // A gradient may be that of another leaf, too.
        gone.retain(|id| !wanted.contains(id));
        recorded.forget(&gone);
    }
    let mut returned = Ids::default();
    let result = result.map(&mut returned);
    let kept = recorded.kept_besides(&[&returned.0, &wanted, &tangent_ids]);
    let (step, saved) = split.run(
        recorded,
        Differentiated {
            gradients: &wanted,
            tangents: &tangent_ids,
            outputs: &positions,
        },
    )?;
    drop(others);
    let call = Call::new(inputs, has_gradient, outputs.len(), (step, saved));
    let result = result.map(&mut Attach::new(places, Inside::new(nodes, made, kept), call));
    Ok(match captures {
        true => Called::Captured(result),
        false => Called::Compiled(result),
    })
}
