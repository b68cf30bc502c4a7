//! Operations of the program's own: functions on the host that stay in the graph.

use std::any::TypeId;
use std::sync::Arc;

use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::NoCheckpointing;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_backend::{DType, Shape, TensorMetadata};
use burn_tensor::{Bool, Int, Tensor, TensorData, TensorPrimitive};
use kiln_burn::{Kiln, custom};

use crate::input::{KilnBackend, KilnTensor, StepInput, TensorMap};
use crate::tracked::{TrackedTensor, inner, untracked};

/// A function on the host that computes an operation's result from its inputs. See [`custom_op`].
pub trait HostFunction: Fn(&[TensorData]) -> TensorData + Copy + Send + Sync + 'static {}

impl<F: Fn(&[TensorData]) -> TensorData + Copy + Send + Sync + 'static> HostFunction for F {}

/// The gradient of an operation of the program's own: a function on the host, or [`NoGradient`]. See
/// [`custom_op`].
///
/// The function is given the inputs, the result, and the loss's gradient with respect to the result. It
/// returns one gradient for each float input, in order, each with the shape and type of its input.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no gradient of a `custom_op`",
    note = "it is a function `fn(&[TensorData], &TensorData, &TensorData) -> Vec<TensorData>` of inputs, result and \
            gradient of the result that captures nothing, or `kiln::NoGradient`"
)]
pub trait HostGradient: Copy + Send + Sync + 'static {
    /// Whether there is a gradient.
    const EXISTS: bool;

    /// One gradient for each float input.
    fn gradients(&self, inputs: &[TensorData], result: &TensorData, gradient: &TensorData)
    -> Vec<TensorData>;
}

impl<F> HostGradient for F
where
    F: Fn(&[TensorData], &TensorData, &TensorData) -> Vec<TensorData> + Copy + Send + Sync + 'static,
{
    const EXISTS: bool = true;

    fn gradients(
        &self,
        inputs: &[TensorData],
        result: &TensorData,
        gradient: &TensorData,
    ) -> Vec<TensorData> {
        self(inputs, result, gradient)
    }
}

/// No gradient: the result of a [`custom_op`] is detached from its inputs.
#[derive(Clone, Copy, Debug)]
pub struct NoGradient;

impl HostGradient for NoGradient {
    const EXISTS: bool = false;

    fn gradients(&self, _: &[TensorData], _: &TensorData, _: &TensorData) -> Vec<TensorData> {
        Vec::new()
    }
}

/// The inputs of a [`custom_op`]: tensors of one backend, of any kinds and ranks; one of them, a tuple, or a
/// `Vec`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no input of a `custom_op`",
    note = "inputs are tensors of `Kiln` or `Autodiff<Kiln>`, one, in a tuple or in a `Vec`; make plain values tensors of \
            one element"
)]
pub trait HostInputs<B: KilnBackend> {
    /// Shows every tensor to `map`, in order.
    fn show(self, map: &mut dyn TensorMap);
}

impl<B: KilnBackend, const D: usize> HostInputs<B> for Tensor<B, D> {
    fn show(self, map: &mut dyn TensorMap) {
        drop(StepInput::map(self, map));
    }
}

impl<B: KilnBackend, const D: usize> HostInputs<B> for Tensor<B, D, Int> {
    fn show(self, map: &mut dyn TensorMap) {
        drop(StepInput::map(self, map));
    }
}

impl<B: KilnBackend, const D: usize> HostInputs<B> for Tensor<B, D, Bool> {
    fn show(self, map: &mut dyn TensorMap) {
        drop(StepInput::map(self, map));
    }
}

impl<B: KilnBackend, T: HostInputs<B>> HostInputs<B> for Vec<T> {
    fn show(self, map: &mut dyn TensorMap) {
        self.into_iter().for_each(|input| input.show(map));
    }
}

macro_rules! tuple {
    ($($name:ident $index:tt),*) => {
        impl<B: KilnBackend, $($name: HostInputs<B>),*> HostInputs<B> for ($($name,)*) {
            fn show(self, map: &mut dyn TensorMap) {
                $(self.$index.show(map);)*
            }
        }
    };
}
tuple!(T0 0, T1 1);
tuple!(T0 0, T1 1, T2 2);
tuple!(T0 0, T1 1, T2 2, T3 3);
tuple!(T0 0, T1 1, T2 2, T3 3, T4 4);
tuple!(T0 0, T1 1, T2 2, T3 3, T4 4, T5 5);
tuple!(T0 0, T1 1, T2 2, T3 3, T4 4, T5 5, T6 6);
tuple!(T0 0, T1 1, T2 2, T3 3, T4 4, T5 5, T6 6, T7 7);

/// Computes a tensor by a function of the program's own that runs on the host.
///
/// `inputs` are tensors of any kinds and ranks: one, a tuple, a `Vec`. The result has the given `shape` and
/// the type of the first float input (f32 without one). In a compiled step the operation is one node of the
/// graph: nothing is cut, the step is planned around it and replayed with it, lazily and under Burn's
/// autograd as well. `explain` names it.
///
/// `forward` is given the inputs' elements, in order, and returns the result. `gradient` is the function for
/// the backward pass ([`HostGradient`]), which is an operation of this kind itself and has no gradient of its
/// own, or [`NoGradient`].
///
/// Each call copies the elements in and out, on CPU backends within main memory; on a GPU it waits for the
/// inputs and copies between the GPU and the host, and one warning says so. Use it for computations that
/// tensor operations cannot express. [`custom_op_with_c`] takes the operation in C as well, which has no such
/// cost on the CPU.
///
/// ```
/// use burn_autodiff::Autodiff;
/// use burn_tensor::{Tensor, TensorData};
/// use kiln::{CompileBackend, CompileOptions, Kiln, KilnDevice};
///
/// /// `x` where it is positive, a tenth of its size elsewhere.
/// fn leaky(inputs: &[TensorData]) -> TensorData {
///     let x = inputs[0].as_slice::<f32>().expect("f32");
///     let y: Vec<f32> = x.iter().map(|&x| if x > 0.0 { x } else { 0.1 * x }).collect();
///     TensorData::new(y, inputs[0].shape.clone())
/// }
///
/// fn leaky_gradient(inputs: &[TensorData], _: &TensorData, gradient: &TensorData) -> Vec<TensorData> {
///     let x = inputs[0].as_slice::<f32>().expect("f32");
///     let g = gradient.as_slice::<f32>().expect("f32");
///     let slopes = x.iter().zip(g).map(|(&x, &g)| if x > 0.0 { g } else { 0.1 * g });
///     vec![TensorData::new(slopes.collect::<Vec<f32>>(), inputs[0].shape.clone())]
/// }
///
/// type B = Autodiff<Kiln>;
/// let x = Tensor::<B, 1>::from_floats([-2.0, 3.0], &KilnDevice::cpu()).require_grad();
/// let y = kiln::custom_op("leaky", x.clone(), x.dims(), leaky, leaky_gradient);
/// let gradients = y.sum().backward();
/// assert_eq!(x.grad(&gradients).unwrap().into_data().to_vec::<f32>().unwrap(), [0.1, 1.0]);
///
/// let options = CompileOptions::default().with_backend(CompileBackend::AotEager).with_fullgraph(true);
/// let mut step = kiln::compile(options);
/// let x = x.inner();
/// let y = step.run(|| kiln::custom_op("leaky", x.clone() * 2.0, x.dims(), leaky, kiln::NoGradient) + 1.0)?;
/// assert_eq!(y.into_data().to_vec::<f32>().unwrap(), [0.6, 7.0]);
/// # Ok::<(), kiln::Error>(())
/// ```
///
/// # What the functions must keep to
///
/// A function is called when the step runs, which may be never (its result is not used), on whichever thread
/// runs the step, and more than once at a time if several steps run. Therefore:
///
/// - It is deterministic: equal inputs give equal results, at every call. A replayed step relies on that,
///   and so do comparisons with another backend.
/// - It has no side effects and reads only its inputs: no counters, files, clocks or random numbers. It
///   captures nothing, which the compiler checks; a value that varies has to be an input.
/// - It may be called from several threads at once. Safe Rust ensures that this is sound; no `unsafe` is
///   needed.
/// - It works on the data it is given and calls no tensor operations of this backend.
/// - It does not panic. A panic, and a result of another shape or type, is an error of the step. If that has
///   begun to overwrite parameters by then, a [`crate::TrainStep`] has lost them and says so.
///
/// Operations of one name and different functions are different operations; the name is for people.
///
/// # Panics
///
/// If `inputs` is an empty `Vec`, or has more than eight float tensors of which some are tracked. In a part
/// that is not recorded: with the function's panic, and if its result has another shape or type.
pub fn custom_op<B, const D: usize, I, F, G>(
    name: &str,
    inputs: I,
    shape: [usize; D],
    forward: F,
    gradient: G,
) -> Tensor<B, D>
where
    B: KilnBackend,
    I: HostInputs<B>,
    F: HostFunction,
    G: HostGradient,
{
    operation(name, inputs, shape, forward, gradient, None)
}

/// An operation in C, for [`custom_op_with_c`].
#[derive(Clone, Copy, Debug)]
pub struct CSource {
    /// The function.
    pub forward: &'static str,
    /// Its gradient; none if the host function runs for it, also on the CPU.
    pub gradient: Option<&'static str>,
}

/// [`custom_op`] with the operation in C as well, which is compiled into steps for the backend `cpu`: nothing is
/// copied, no code outside the step runs, and an exported step takes it along. The host function is the
/// reference: it runs on all other backends, and outside of steps.
///
/// A source is a file of its own, that includes none but those of the system (`include_str!` takes its text
/// from a file), and defines
///
/// ```c
/// void operation(const kiln_tensor *inputs, const kiln_tensor *outputs);
/// ```
///
/// with what is declared before it:
///
/// ```c
/// #include <stddef.h>
/// #include <stdint.h>
/// typedef struct kiln_tensor {
///     void *data;            // row-major, of the C type of the elements; 16-bit floats are uint16_t, bools uint8_t
///     int64_t elements;
///     int64_t rank;
///     const int64_t *shape;
/// } kiln_tensor;
/// ```
///
/// The forward pass has the inputs in order and one output. The gradient has the inputs, the result and the
/// gradient of the result as inputs, and one output for each float input, in order. `operation` is a macro, and
/// no other name of the file is seen elsewhere. The source is part of the step's identity and of the key in the
/// disk cache. One that the C compiler refuses is an error of the step with the compiler's words, and so is
/// one that calls what neither it nor C's library has.
///
/// ```
/// use burn_tensor::{Tensor, TensorData};
/// use kiln::{CSource, CompileOptions, Kiln, KilnDevice, NoGradient};
///
/// fn cubes(inputs: &[TensorData]) -> TensorData {
///     let x = inputs[0].as_slice::<f32>().expect("f32");
///     TensorData::new(x.iter().map(|x| x * x * x).collect::<Vec<f32>>(), inputs[0].shape.clone())
/// }
///
/// const CUBES: CSource = CSource {
///     forward: "void operation(const kiln_tensor *in, const kiln_tensor *out) {
///                   const float *x = in[0].data;
///                   float *y = out[0].data;
///                   for (int64_t i = 0; i < in[0].elements; i++) y[i] = x[i] * x[i] * x[i];
///               }",
///     gradient: None,
/// };
///
/// let x = Tensor::<Kiln, 1>::from_floats([1.0, 2.0], &KilnDevice::cpu());
/// let mut step = kiln::compile(CompileOptions::default().check_against("interpret", 1e-6)?);
/// // SAFETY: it reads the elements of the input and writes those of the output, which has its shape.
/// let y = step.run(|| unsafe { kiln::custom_op_with_c("cubes", x, [2], cubes, NoGradient, CUBES) })?;
/// assert_eq!(y.into_data().to_vec::<f32>().unwrap(), [1.0, 8.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Safety
///
/// The source runs inside the program. For every shape and type that the operation is called with, each function
///
/// - computes what its host function computes, up to rounding, and ends;
/// - reads the elements of its inputs and writes the elements of its outputs, all of them, and no other memory
///   that it has not allocated and freed itself. Inputs are not written, and no pointer is kept;
/// - has no undefined behaviour in GNU C11, and none that depends on `errno` or floating-point traps;
/// - keeps nothing from call to call, may be called from several threads at once, calls neither `exit` nor
///   `longjmp`, and raises no exception.
///
/// # Panics
///
/// As [`custom_op`], and if the source includes a file by a name in quotes: what is in such a file is no part
/// of the key in the disk cache, and a step would keep the code of an earlier version.
pub unsafe fn custom_op_with_c<B, const D: usize, I, F, G>(
    name: &str,
    inputs: I,
    shape: [usize; D],
    forward: F,
    gradient: G,
    source: CSource,
) -> Tensor<B, D>
where
    B: KilnBackend,
    I: HostInputs<B>,
    F: HostFunction,
    G: HostGradient,
{
    operation(name, inputs, shape, forward, gradient, Some(source))
}

/// # Panics
///
/// If a source in C includes a file by a name in quotes.
fn assert_includes_no_file(name: &str, source: &str) {
    let included = source.lines().find_map(|line| {
        let rest = line.trim_start().strip_prefix('#')?.trim_start();
        rest.strip_prefix("include")?.trim_start().strip_prefix('"')
    });
    if let Some(file) = included {
        panic!(
            "{name}: the C source includes \"{file}, whose text is no part of the key in the disk cache; put it \
             into the source, with `include_str!` for instance"
        );
    }
}

/// The operation, with or without C.
fn operation<B, const D: usize, I, F, G>(
    name: &str,
    inputs: I,
    shape: [usize; D],
    forward: F,
    gradient: G,
    source: Option<CSource>,
) -> Tensor<B, D>
where
    B: KilnBackend,
    I: HostInputs<B>,
    F: HostFunction,
    G: HostGradient,
{
    const {
        assert!(
            size_of::<F>() == 0,
            "the function of a `custom_op` captures nothing: what varies is an input"
        );
        assert!(
            size_of::<G>() == 0,
            "the gradient of a `custom_op` captures nothing: what varies is an input"
        );
    }
    let sources = source
        .iter()
        .flat_map(|it| [Some(it.forward), it.gradient])
        .flatten();
    sources.for_each(|text| assert_includes_no_file(name, text));
    let operands = Operands::of(name, inputs);
    let dtype = operands.float_type();
    let id = custom::register(name, TypeId::of::<F>(), source.map(|it| it.forward), || {
        Arc::new(move |data| vec![forward(data)])
    });
    let tensors: Vec<KilnTensor> = operands.0.iter().map(Operand::tensor).collect();
    let client = tensors[0].client;
    let value = single(client.custom(&id, tensors, &[(Shape::from(shape), dtype)]));
    let tracked = operands
        .0
        .iter()
        .any(|operand| matches!(operand, Operand::Float(it) if it.is_tracked()));
    let result = match tracked && G::EXISTS {
        true => differentiable(name, operands, value, gradient, source.and_then(|it| it.gradient)),
        false => untracked(value),
    };
    // A tensor of `B` has the kind of primitive that the result needs: `Kiln` has the tensor itself,
    // `Autodiff` the one that tracks it.
    let stand_in = B::from_kiln(inner(result.clone()));
    let primitive = B::map_float(stand_in, &mut Give(result));
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

fn single(results: Vec<KilnTensor>) -> KilnTensor {
    let [result]: [KilnTensor; 1] = results.try_into().expect("one result for one shape");
    result
}

/// An input of an operation.
#[derive(Clone, Debug)]
enum Operand {
    /// A float tensor of `Autodiff`, tracked or not.
    Float(TrackedTensor),
    /// Any tensor of `Kiln`, and integers and bools of `Autodiff`.
    Plain(KilnTensor),
}

impl Operand {
    fn tensor(&self) -> KilnTensor {
        match self {
            Self::Float(tensor) => inner(tensor.clone()),
            Self::Plain(tensor) => tensor.clone(),
        }
    }
}

/// The inputs of an operation, in order.
#[derive(Default)]
struct Operands(Vec<Operand>);

impl TensorMap for Operands {
    fn tensor(&mut self, tensor: KilnTensor) -> KilnTensor {
        self.0.push(Operand::Plain(tensor.clone()));
        tensor
    }

    fn tracked(&mut self, tensor: TrackedTensor) -> TrackedTensor {
        self.0.push(Operand::Float(tensor.clone()));
        tensor
    }
}

impl Operands {
    fn of<B: KilnBackend>(name: &str, inputs: impl HostInputs<B>) -> Self {
        let mut operands = Self::default();
        inputs.show(&mut operands);
        assert!(!operands.0.is_empty(), "custom_op `{name}`: it has no input");
        operands
    }

    /// The type of the first float input.
    fn float_type(&self) -> DType {
        let types = self.0.iter().map(|operand| operand.tensor().dtype());
        types.clone().find(DType::is_float).unwrap_or(DType::F32)
    }
}

/// Gives a tensor in the place of another.
struct Give(TrackedTensor);

impl TensorMap for Give {
    fn tensor(&mut self, _: KilnTensor) -> KilnTensor {
        inner(self.0.clone())
    }

    fn tracked(&mut self, _: TrackedTensor) -> TrackedTensor {
        self.0.clone()
    }
}

/// The parts of an operation that its backward pass needs.
#[derive(Clone, Debug)]
struct Saved {
    /// Id of the operation that computes the gradients.
    id: String,
    inputs: Vec<KilnTensor>,
    result: KilnTensor,
    /// Positions of the float inputs, which have gradients; parents are these, in order.
    floats: Vec<usize>,
}

/// An operation of the program's own in Burn's graph, with `N` float inputs.
#[derive(Debug)]
struct Custom;

impl<const N: usize> Backward<Kiln, N> for Custom {
    type State = Saved;

    fn backward(self, ops: Ops<Saved, N>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let gradient = gradients.consume::<Kiln>(&ops.node);
        let Saved {
            id,
            inputs,
            result,
            floats,
        } = ops.state;
        let types: Vec<(Shape, DType)> = floats
            .iter()
            .map(|&input| (inputs[input].shape(), inputs[input].dtype()))
            .collect();
        let client = result.client;
        let operands = inputs.into_iter().chain([result, gradient]).collect();
        let found = client.custom(&id, operands, &types);
        for (node, gradient) in ops.parents.into_iter().zip(found) {
            if let Some(node) = node {
                gradients.register::<Kiln>(node.id, gradient);
            }
        }
    }
}

/// The most float inputs of an operation with a gradient.
const MOST_FLOATS: usize = 8;

/// `value` as the result of an operation in Burn's graph.
fn differentiable<G: HostGradient>(
    name: &str,
    operands: Operands,
    value: KilnTensor,
    gradient: G,
    c_source: Option<&'static str>,
) -> TrackedTensor {
    let run = move |data: &[TensorData]| match data {
        [inputs @ .., result, upstream] => gradient.gradients(inputs, result, upstream),
        _ => Vec::new(),
    };
    let id = custom::register(&format!("{name}, gradient"), TypeId::of::<G>(), c_source, || {
        Arc::new(run)
    });
    let parents: Vec<(usize, &TrackedTensor)> = operands
        .0
        .iter()
        .enumerate()
        .filter_map(|(position, operand)| match operand {
            Operand::Float(tensor) => Some((position, tensor)),
            Operand::Plain(_) => None,
        })
        .collect();
    let saved = Saved {
        id,
        inputs: operands.0.iter().map(Operand::tensor).collect(),
        result: value.clone(),
        floats: parents.iter().map(|(position, _)| *position).collect(),
    };
    // Burn fixes the number of parents of an operation.
    macro_rules! with_parents {
        ($($count:literal),*) => {
            match parents.len() {
                $($count => {
                    let nodes: [_; $count] = std::array::from_fn(|index| parents[index].1.node.clone());
                    let prepared = Backward::<Kiln, $count>::prepare::<NoCheckpointing>(Custom, nodes);
                    match prepared.compute_bound().stateful() {
                        OpsKind::Tracked(prepared) => prepared.finish(saved, value),
                        OpsKind::UnTracked(prepared) => prepared.finish(value),
                    }
                })*
                more => panic!("custom_op `{name}`: {more} float inputs, of at most {MOST_FLOATS} with a gradient"),
            }
        };
    }
    with_parents!(1, 2, 3, 4, 5, 6, 7, 8)
}
