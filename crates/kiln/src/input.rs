//! Inputs and outputs of a step: tensors, and structures of tensors.

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_backend::AutodiffBackend;
use burn_backend::ops::FloatTensorOps;
use burn_ir::TensorIr;
use burn_router::RouterTensor;
use burn_tensor::backend::Backend;
use burn_tensor::{Bool, Float, Int, Tensor, TensorPrimitive};
use kiln_burn::{Kiln, KilnClient};

use crate::tracked::{self, TrackedTensor};

/// A tensor as the Kiln backend holds it.
pub type KilnTensor = RouterTensor<KilnClient>;

/// An input or output of a step: a tensor, or a structure that holds tensors and plain values.
///
/// Implemented for tensors of `Kiln` and `Autodiff<Kiln>`, tuples, arrays, `Vec`, `Option`, numbers, `bool`
/// and `String`, and for structs through `#[derive(StepInput)]`. Tensors are arguments of the compiled step.
/// Everything else is part of its identity: a step called with another number, length or variant is another
/// step, recorded anew. So is one whose tensors are tracked where they were not: the closure can tell.
///
/// ```
/// use burn_tensor::backend::Backend;
/// use burn_tensor::{Int, Tensor};
/// use kiln::StepInput;
///
/// #[derive(Clone, StepInput)]
/// struct Batch<B: Backend> {
///     images: Tensor<B, 4>,
///     labels: Tensor<B, 1, Int>,
///     classes: usize,
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no input or output of a compiled step",
    label = "holds something that is neither a tensor of Kiln nor a plain value",
    note = "a struct or enum of tensors and plain values derives it: `#[derive(Clone, kiln::StepInput)]`",
    note = "pass tensors by value; in place of `&str` and maps take `String` and `Vec`"
)]
pub trait StepInput: Sized {
    /// Shows every tensor and every plain value to `visitor`, in a fixed order.
    fn visit(&self, visitor: &mut InputVisitor);

    /// The same structure with every tensor replaced by the result of `map`, in the order of
    /// [`StepInput::visit`].
    fn map(self, map: &mut dyn TensorMap) -> Self;
}

/// The map that [`StepInput::map`] applies to each tensor. Closures from tensor to tensor are such maps;
/// they drop a tensor's place in an autograd graph.
pub trait TensorMap {
    /// The replacement of `tensor`.
    fn tensor(&mut self, tensor: KilnTensor) -> KilnTensor;

    /// The replacement of a float tensor of `Autodiff<Kiln>`.
    fn tracked(&mut self, tensor: TrackedTensor) -> TrackedTensor {
        tracked::untracked(self.tensor(tracked::inner(tensor)))
    }
}

impl<F: FnMut(KilnTensor) -> KilnTensor> TensorMap for F {
    fn tensor(&mut self, tensor: KilnTensor) -> KilnTensor {
        self(tensor)
    }
}

/// Collects the tensors and values that [`StepInput::visit`] shows.
#[derive(Default, Debug)]
pub struct InputVisitor {
    tensors: Vec<TensorIr>,
    words: Vec<u64>,
    values: usize,
}

impl InputVisitor {
    /// Collects a tensor.
    pub fn tensor(&mut self, tensor: KilnTensor) {
        // A copy beside the original: its status is read-only, so this is no last use.
        let ir = tensor.clone().into_ir();
        self.words.push(ir.shape.num_dims() as u64);
        self.words.extend(ir.shape.iter().map(|&dim| dim as u64));
        self.words
            .extend(format!("{:?}", ir.dtype).bytes().map(u64::from));
        self.tensors.push(ir);
    }

    /// Collects a plain value, as a number.
    pub fn value(&mut self, word: u64) {
        self.values += 1;
        self.words.push(word);
    }

    /// Collects a property of the structure: a length, a variant.
    pub fn structure(&mut self, word: u64) {
        self.words.push(word);
    }

    /// The tensors, in order, and the words that are equal for two inputs of one step.
    pub(crate) fn finish(mut self) -> (Vec<TensorIr>, Signature) {
        // The signature says which tensors are the same: a step recorded with one tensor in two roles is
        // another step.
        let tensors = &self.tensors;
        let first = |tensor: &TensorIr| tensors.iter().position(|other| other.id == tensor.id);
        self.words
            .extend(tensors.iter().filter_map(first).map(|position| position as u64));
        (self.tensors, Signature(self.words))
    }

    /// How many plain values there are.
    pub(crate) fn values(&self) -> usize {
        self.values
    }
}

/// Types, shapes and plain values of an input, and which of its tensors are the same and which are tracked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Signature(Vec<u64>);

/// Tensors and signature of an input.
pub(crate) fn inspect(input: &impl StepInput) -> (Vec<TensorIr>, Signature) {
    let mut visitor = InputVisitor::default();
    input.visit(&mut visitor);
    visitor.finish()
}

/// `Kiln` or `Autodiff<Kiln>`: the backends whose tensors a step can take.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not the backend `Kiln`",
    note = "put model and data on `Autodiff<Kiln>` (`Kiln` for inference): `type B = Autodiff<Kiln>;`"
)]
pub trait KilnBackend:
    Backend<Device = kiln_burn::KilnDevice, IntTensorPrimitive = KilnTensor, BoolTensorPrimitive = KilnTensor>
{
    /// The tensor inside a float primitive.
    fn to_kiln(primitive: Self::FloatTensorPrimitive) -> KilnTensor;

    /// A float primitive around `tensor`, outside any autodiff graph.
    fn from_kiln(tensor: KilnTensor) -> Self::FloatTensorPrimitive;

    /// How a float primitive is tracked: 0 if it is not, 1 if it is a leaf that is to have a gradient, 2 if
    /// it follows from such leaves.
    fn requirement(primitive: &Self::FloatTensorPrimitive) -> u64;

    /// A float primitive replaced by `map`.
    fn map_float(
        primitive: Self::FloatTensorPrimitive,
        map: &mut dyn TensorMap,
    ) -> Self::FloatTensorPrimitive;
}

impl KilnBackend for Kiln {
    fn to_kiln(primitive: KilnTensor) -> KilnTensor {
        primitive
    }

    fn from_kiln(tensor: KilnTensor) -> KilnTensor {
        tensor
    }

    fn requirement(_: &KilnTensor) -> u64 {
        0
    }

    fn map_float(primitive: KilnTensor, map: &mut dyn TensorMap) -> KilnTensor {
        map.tensor(primitive)
    }
}

impl<C: CheckpointStrategy> KilnBackend for Autodiff<Kiln, C> {
    fn to_kiln(primitive: Self::FloatTensorPrimitive) -> KilnTensor {
        <Self as AutodiffBackend>::inner(primitive)
    }

    fn from_kiln(tensor: KilnTensor) -> Self::FloatTensorPrimitive {
        <Self as AutodiffBackend>::from_inner(tensor)
    }

    fn requirement(primitive: &Self::FloatTensorPrimitive) -> u64 {
        match (primitive.is_tracked(), Self::float_is_require_grad(primitive)) {
            (false, _) => 0,
            (true, true) => 1,
            (true, false) => 2,
        }
    }

    fn map_float(
        primitive: Self::FloatTensorPrimitive,
        map: &mut dyn TensorMap,
    ) -> Self::FloatTensorPrimitive {
        map.tracked(primitive)
    }
}

impl<B: KilnBackend, const D: usize> StepInput for Tensor<B, D, Float> {
    fn visit(&self, visitor: &mut InputVisitor) {
        let primitive = self.clone().into_primitive().tensor();
        visitor.structure(B::requirement(&primitive));
        visitor.tensor(B::to_kiln(primitive));
    }

    fn map(self, map: &mut dyn TensorMap) -> Self {
        let tensor = B::map_float(self.into_primitive().tensor(), map);
        Self::from_primitive(TensorPrimitive::Float(tensor))
    }
}

impl<B: KilnBackend, const D: usize> StepInput for Tensor<B, D, Int> {
    fn visit(&self, visitor: &mut InputVisitor) {
        visitor.tensor(self.clone().into_primitive());
    }

    fn map(self, map: &mut dyn TensorMap) -> Self {
        Self::from_primitive(map.tensor(self.into_primitive()))
    }
}

impl<B: KilnBackend, const D: usize> StepInput for Tensor<B, D, Bool> {
    fn visit(&self, visitor: &mut InputVisitor) {
        visitor.tensor(self.clone().into_primitive());
    }

    fn map(self, map: &mut dyn TensorMap) -> Self {
        Self::from_primitive(map.tensor(self.into_primitive()))
    }
}

impl<T: StepInput> StepInput for Vec<T> {
    fn visit(&self, visitor: &mut InputVisitor) {
        visitor.structure(self.len() as u64);
        self.iter().for_each(|item| item.visit(visitor));
    }

    fn map(self, map: &mut dyn TensorMap) -> Self {
        self.into_iter().map(|item| item.map(map)).collect()
    }
}

impl<T: StepInput, const N: usize> StepInput for [T; N] {
    fn visit(&self, visitor: &mut InputVisitor) {
        self.iter().for_each(|item| item.visit(visitor));
    }

    fn map(self, map: &mut dyn TensorMap) -> Self {
        <[T; N]>::map(self, |item| item.map(map))
    }
}

impl<T: StepInput> StepInput for Option<T> {
    fn visit(&self, visitor: &mut InputVisitor) {
        visitor.structure(u64::from(self.is_some()));
        self.iter().for_each(|item| item.visit(visitor));
    }

    fn map(self, map: &mut dyn TensorMap) -> Self {
        Option::map(self, |item| item.map(map))
    }
}

impl StepInput for String {
    fn visit(&self, visitor: &mut InputVisitor) {
        visitor.value(self.len() as u64);
        self.bytes().for_each(|byte| visitor.value(u64::from(byte)));
    }

    fn map(self, _: &mut dyn TensorMap) -> Self {
        self
    }
}

/// Plain numbers: part of the step's identity.
macro_rules! plain {
    ($($ty:ty => $to_word:expr),* $(,)?) => {$(
        impl StepInput for $ty {
            fn visit(&self, visitor: &mut InputVisitor) {
                let to_word: fn($ty) -> u64 = $to_word;
                visitor.value(to_word(*self));
            }

            fn map(self, _: &mut dyn TensorMap) -> Self {
                self
            }
        }
    )*};
}

impl StepInput for () {
    fn visit(&self, _: &mut InputVisitor) {}

    fn map(self, _: &mut dyn TensorMap) -> Self {}
}

plain!(
    bool => u64::from, char => |x| u64::from(u32::from(x)), f64 => f64::to_bits, f32 => |x| u64::from(x.to_bits()),
    u64 => |x| x, u32 => u64::from, u16 => u64::from, u8 => u64::from, usize => |x| x as u64,
    i64 => |x| x as u64, i32 => |x| x as u64, i16 => |x| x as u64, i8 => |x| x as u64, isize => |x| x as u64,
);

/// Tuples of inputs.
macro_rules! tuple {
    ($($name:ident $index:tt),*) => {
        impl<$($name: StepInput),*> StepInput for ($($name,)*) {
            fn visit(&self, visitor: &mut InputVisitor) {
                $(self.$index.visit(visitor);)*
            }

            fn map(self, map: &mut dyn TensorMap) -> Self {
                ($(self.$index.map(map),)*)
            }
        }
    };
}

tuple!(T0 0);
tuple!(T0 0, T1 1);
tuple!(T0 0, T1 1, T2 2);
tuple!(T0 0, T1 1, T2 2, T3 3);
tuple!(T0 0, T1 1, T2 2, T3 3, T4 4);
tuple!(T0 0, T1 1, T2 2, T3 3, T4 4, T5 5);
tuple!(T0 0, T1 1, T2 2, T3 3, T4 4, T5 5, T6 6);
tuple!(T0 0, T1 1, T2 2, T3 3, T4 4, T5 5, T6 6, T7 7);
