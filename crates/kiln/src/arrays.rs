//! Arrays of the crate `ndarray` as inputs and outputs of compiled functions and training steps.
//!
//! ```
//! use burn_tensor::Tensor;
//! use kiln::arrays::HostArray;
//! use kiln::{CompileBackend, CompileOptions, Kiln, KilnDevice};
//! use ndarray::{Ix2, array, s};
//!
//! let options = CompileOptions::default().with_backend(CompileBackend::AotEager);
//! let double = kiln::compile_fn(|x: Tensor<Kiln, 2>| x * 2.0).with_options(options);
//! let data = array![[1.0f32, 2.0], [3.0, 4.0], [5.0, 6.0]];
//! let rows = data.slice(s![1.., ..]);
//! let y: HostArray<f32, Ix2> = double.call_arrays(rows, &KilnDevice::cpu())?;
//! assert_eq!(y.view(), array![[6.0, 8.0], [10.0, 12.0]]);
//! # Ok::<(), kiln::arrays::ArrayError>(())
//! ```
//!
//! What is copied, on the host:
//!
//! - An array that goes in is not: a compiled step reads it where it is. It must lie row-major; one that does
//!   not is an error ([`ArrayError::Layout`]), and `as_standard_layout` makes one that does. What a step writes
//!   over, or the program keeps (a function that returns its argument, a tensor stored in a cell), is copied
//!   once. Arguments of the backends that run a step operation by operation are read in place, too.
//! - A result as a [`HostArray`] is not: it owns the memory that the step has written, and shows it as a view.
//! - A result as an `ndarray::Array` is, once: such an array owns a `Vec`, which frees its memory as one that is
//!   aligned to an element, and a step writes its results on borders of 64 bytes.
//!
//! [`copied_bytes`] counts the copies of arguments. On a GPU arguments and results are copied there and back, as
//! always.

use std::fmt;

use burn_tensor::{Bool, DType, Float, Int, Shape, Tensor, TensorKind, TensorPrimitive, bf16, f16};
use bytemuck::{CheckedBitPattern, NoUninit};
use kiln_burn::lend::{self, Lend};
use kiln_burn::record::{BreakReason, session};
use kiln_burn::storage::Storage;
use kiln_burn::{Error, Kiln, KilnClient, KilnDevice};
use ndarray::{Array, ArrayBase, ArrayView, Data, Dimension, IntoDimension, IxDyn};

use crate::function::CompiledFn;
use crate::input::{KilnBackend, KilnTensor, StepInput};
use crate::train::{StepOutput, TrainBackend, TrainError, TrainStep};
use burn_core::module::AutodiffModule;
use burn_optim::{LearningRate, SimpleOptimizer};

/// Why an array is no input of a step, or a result no array.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArrayError {
    /// The elements of an input are not row-major.
    #[error(
        "array {argument} of shape {shape:?} has strides {strides:?}, and only row-major arrays are read where they are: \
         pass `array.as_standard_layout()`, which copies"
    )]
    Layout {
        /// Number of the array among those of the input.
        argument: usize,
        /// Its shape.
        shape: Vec<usize>,
        /// Its strides, in elements.
        strides: Vec<isize>,
    },
    /// An array has not as many dimensions as its tensor.
    #[error("{array} has {found} dimensions, and {expected} are needed")]
    Rank {
        /// Which array.
        array: ArrayName,
        /// How many dimensions there must be.
        expected: usize,
        /// How many there are.
        found: usize,
    },
    /// A result has other elements than the array it is to be.
    #[error("{array} has elements of type {found:?}, and an array of {expected:?} was asked for")]
    ElementType {
        /// Which array.
        array: ArrayName,
        /// What was asked for.
        expected: DType,
        /// What the step gave.
        found: DType,
    },
    /// Compiling or running failed.
    #[error(transparent)]
    Kiln(#[from] Error),
    /// The training step failed.
    #[error(transparent)]
    Train(#[from] TrainError),
}

/// Which array an error is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ArrayName {
    /// The array of this number in the input.
    Argument(usize),
    /// A result.
    Result,
}

impl fmt::Display for ArrayName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Argument(number) => write!(f, "array {number} of the input"),
            Self::Result => f.write_str("a result"),
        }
    }
}

/// How many bytes of arguments were copied in this process; the module's description says which are.
pub fn copied_bytes() -> u64 {
    lend::copied_bytes()
}

/// Elements of arrays that tensors have, too: floats, integers and `bool`.
pub trait ArrayElement: NoUninit + CheckedBitPattern + Send + Sync + 'static {
    /// The kind of tensor: `Float`, `Int` or `Bool`.
    type Kind;

    /// The type of a tensor's elements.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($kind:ident: $($ty:ty = $dtype:expr),*;)*) => {$($(
        impl ArrayElement for $ty {
            type Kind = $kind;
            const DTYPE: DType = $dtype;
        }
    )*)*};
}
elements! {
    Float: f64 = DType::F64, f32 = DType::F32, f16 = DType::F16, bf16 = DType::BF16;
    Int: i64 = DType::I64, i32 = DType::I32, i16 = DType::I16, i8 = DType::I8,
        u64 = DType::U64, u32 = DType::U32, u16 = DType::U16, u8 = DType::U8;
    Bool: bool = DType::Bool(burn_backend::BoolStore::Native);
}

/// Kinds of tensors that arrays can stand for.
pub trait ArrayKind<B: KilnBackend>: TensorKind<B> + Sized {
    /// A tensor of this kind.
    fn tensor<const D: usize>(tensor: KilnTensor) -> Tensor<B, D, Self>;

    /// What is in a tensor of this kind.
    fn inner<const D: usize>(tensor: Tensor<B, D, Self>) -> KilnTensor;
}

impl<B: KilnBackend> ArrayKind<B> for Float {
    fn tensor<const D: usize>(tensor: KilnTensor) -> Tensor<B, D> {
        Tensor::from_primitive(TensorPrimitive::Float(B::from_kiln(tensor)))
    }

    fn inner<const D: usize>(tensor: Tensor<B, D>) -> KilnTensor {
        B::to_kiln(tensor.into_primitive().tensor())
    }
}

impl<B: KilnBackend> ArrayKind<B> for Int {
    fn tensor<const D: usize>(tensor: KilnTensor) -> Tensor<B, D, Int> {
        Tensor::from_primitive(tensor)
    }

    fn inner<const D: usize>(tensor: Tensor<B, D, Int>) -> KilnTensor {
        tensor.into_primitive()
    }
}

impl<B: KilnBackend> ArrayKind<B> for Bool {
    fn tensor<const D: usize>(tensor: KilnTensor) -> Tensor<B, D, Bool> {
        Tensor::from_primitive(tensor)
    }

    fn inner<const D: usize>(tensor: Tensor<B, D, Bool>) -> KilnTensor {
        tensor.into_primitive()
    }
}

/// Arrays that are lent to a call, in order.
#[derive(Debug, Default)]
pub struct Lending<'a>(Vec<Lend<'a>>);

impl<'a> Lending<'a> {
    /// Lends an array as a tensor of `rank` dimensions.
    fn array<T, S, Dm>(&mut self, array: &'a ArrayBase<S, Dm>, rank: usize) -> Result<(), ArrayError>
    where
        T: ArrayElement,
        S: Data<Elem = T>,
        Dm: Dimension,
    {
        let argument = self.0.len();
        if array.ndim() != rank {
            return Err(ArrayError::Rank {
                array: ArrayName::Argument(argument),
                expected: rank,
                found: array.ndim(),
            });
        }
        let shape = Shape::from(array.shape().to_vec());
        let elements = array.as_slice();
        let lend = elements.and_then(|elements| Lend::new(elements, shape, T::DTYPE));
        self.0.push(lend.ok_or_else(|| ArrayError::Layout {
            argument,
            shape: array.shape().to_vec(),
            strides: array.strides().to_vec(),
        })?);
        Ok(())
    }
}

/// The tensors of lent arrays, in order.
#[derive(Debug)]
pub struct LentTensors {
    tensors: std::vec::IntoIter<Storage>,
    device: KilnDevice,
}

impl LentTensors {
    fn next(&mut self) -> KilnTensor {
        let storage = self
            .tensors
            .next()
            .expect("one tensor for each array that was lent");
        KilnClient::new(self.device).adopt(storage.at_home(self.device.place()))
    }
}

/// What stands for an input `T` of a step: arrays for its tensors, by value, by reference or as views, one,
/// in tuples or in a `Vec`; [`Plain`] for what is no array.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not stand for `{T}`",
    note = "arrays stand for tensors of their kind: those of floats for `Tensor<B, D>`, of integers for `Tensor<B, D, Int>`, of `bool` \
            for `Tensor<B, D, Bool>`; wrap what is no array in `kiln::arrays::Plain`"
)]
pub trait ArrayInput<T> {
    /// Lends every array, in order.
    ///
    /// # Errors
    ///
    /// [`ArrayError`] if one cannot be lent.
    fn lend<'a>(&'a self, lending: &mut Lending<'a>) -> Result<(), ArrayError>;

    /// The input, made of the arrays' tensors.
    fn input(&self, tensors: &mut LentTensors) -> T;
}

/// A part of the input that is no array: a number, a tensor.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Plain<T>(pub T);

impl<T: StepInput + Clone> ArrayInput<T> for Plain<T> {
    fn lend<'a>(&'a self, _: &mut Lending<'a>) -> Result<(), ArrayError> {
        Ok(())
    }

    fn input(&self, _: &mut LentTensors) -> T {
        self.0.clone()
    }
}

impl<B, T, S, Dm, K, const D: usize> ArrayInput<Tensor<B, D, K>> for ArrayBase<S, Dm>
where
    B: KilnBackend,
    K: ArrayKind<B>,
    T: ArrayElement<Kind = K>,
    S: Data<Elem = T>,
    Dm: Dimension,
{
    fn lend<'a>(&'a self, lending: &mut Lending<'a>) -> Result<(), ArrayError> {
        lending.array(self, D)
    }

    fn input(&self, tensors: &mut LentTensors) -> Tensor<B, D, K> {
        K::tensor(tensors.next())
    }
}

impl<T, A: ArrayInput<T>> ArrayInput<T> for &A {
    fn lend<'a>(&'a self, lending: &mut Lending<'a>) -> Result<(), ArrayError> {
        A::lend(self, lending)
    }

    fn input(&self, tensors: &mut LentTensors) -> T {
        A::input(self, tensors)
    }
}

impl<T, A: ArrayInput<T>> ArrayInput<Vec<T>> for Vec<A> {
    fn lend<'a>(&'a self, lending: &mut Lending<'a>) -> Result<(), ArrayError> {
        self.iter().try_for_each(|array| array.lend(lending))
    }

    fn input(&self, tensors: &mut LentTensors) -> Vec<T> {
        self.iter().map(|array| array.input(tensors)).collect()
    }
}

/// Tuples of arrays and of results.
macro_rules! tuple {
    ($($array:ident $tensor:ident $index:tt),*) => {
        impl<$($tensor, $array: ArrayInput<$tensor>),*> ArrayInput<($($tensor,)*)> for ($($array,)*) {
            fn lend<'a>(&'a self, lending: &mut Lending<'a>) -> Result<(), ArrayError> {
                $(self.$index.lend(lending)?;)*
                Ok(())
            }

            fn input(&self, tensors: &mut LentTensors) -> ($($tensor,)*) {
                ($(self.$index.input(tensors),)*)
            }
        }

        impl<$($tensor, $array: ArrayOutput<$tensor>),*> ArrayOutput<($($tensor,)*)> for ($($array,)*) {
            fn of(result: ($($tensor,)*)) -> Result<Self, ArrayError> {
                Ok(($($array::of(result.$index)?,)*))
            }
        }
    };
}
tuple!(A0 T0 0);
tuple!(A0 T0 0, A1 T1 1);
tuple!(A0 T0 0, A1 T1 1, A2 T2 2);
tuple!(A0 T0 0, A1 T1 1, A2 T2 2, A3 T3 3);
tuple!(A0 T0 0, A1 T1 1, A2 T2 2, A3 T3 3, A4 T4 4);
tuple!(A0 T0 0, A1 T1 1, A2 T2 2, A3 T3 3, A4 T4 4, A5 T5 5);

/// What a result `R` of a step is made: an array for each tensor, one, in tuples or in a `Vec`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not made of `{R}`",
    note = "a result is made a `HostArray<T, D>`, or an `Array<T, D>` by a copy, of elements of its kind"
)]
pub trait ArrayOutput<R>: Sized {
    /// The arrays of a result.
    ///
    /// # Errors
    ///
    /// [`ArrayError`] if a tensor has no elements, or other ones.
    fn of(result: R) -> Result<Self, ArrayError>;
}

/// A result of a step in the memory that the step has written.
///
/// It shows its elements as a view. It is no `ndarray::Array`, because such an array owns a `Vec`.
#[derive(Clone, Debug)]
pub struct HostArray<T, D> {
    storage: Storage,
    shape: D,
    element: std::marker::PhantomData<T>,
}

impl<T: ArrayElement, D: Dimension> HostArray<T, D> {
    fn new(storage: Storage) -> Result<Self, ArrayError> {
        let found = storage.dtype();
        let same = found == T::DTYPE || matches!((found, T::DTYPE), (DType::Bool(_), DType::Bool(_)));
        if !same || found.size() != size_of::<T>() {
            return Err(ArrayError::ElementType {
                array: ArrayName::Result,
                expected: T::DTYPE,
                found,
            });
        }
        let storage = storage.try_into_row_major().map_err(Error::from)?;
        let shape: IxDyn = storage
            .shape()
            .iter()
            .copied()
            .collect::<Vec<usize>>()
            .into_dimension();
        let rank = shape.ndim();
        let shape = D::from_dimension(&shape).ok_or(ArrayError::Rank {
            array: ArrayName::Result,
            expected: D::NDIM.unwrap_or(rank),
            found: rank,
        })?;
        Ok(Self {
            storage,
            shape,
            element: std::marker::PhantomData,
        })
    }

    /// The elements, where they are.
    ///
    /// # Panics
    ///
    /// If the elements are bools and one of them is neither 0 nor 1, which no operation makes.
    pub fn view(&self) -> ArrayView<'_, T, D> {
        let bytes = self.storage.row_major().expect("made row-major on the host");
        let elements = bytemuck::checked::cast_slice(bytes);
        ArrayView::from_shape(self.shape.clone(), elements).expect("as many elements as the shape has")
    }

    /// A copy of the elements in an array of its own.
    pub fn to_owned(&self) -> Array<T, D> {
        self.view().to_owned()
    }
}

impl<B, T, Dm, K, const D: usize> ArrayOutput<Tensor<B, D, K>> for HostArray<T, Dm>
where
    B: KilnBackend,
    K: ArrayKind<B>,
    T: ArrayElement<Kind = K>,
    Dm: Dimension,
{
    fn of(result: Tensor<B, D, K>) -> Result<Self, ArrayError> {
        // The last use, so that the memory is the array's alone.
        let tensor = K::inner(result).into_ir();
        Self::new(session::fetch(&tensor, BreakReason::Read)?)
    }
}

impl<B, T, Dm, K, const D: usize> ArrayOutput<Tensor<B, D, K>> for Array<T, Dm>
where
    B: KilnBackend,
    K: ArrayKind<B>,
    T: ArrayElement<Kind = K>,
    Dm: Dimension,
{
    fn of(result: Tensor<B, D, K>) -> Result<Self, ArrayError> {
        HostArray::of(result).map(|array: HostArray<T, Dm>| array.to_owned())
    }
}

impl<R, A: ArrayOutput<R>> ArrayOutput<Vec<R>> for Vec<A> {
    fn of(result: Vec<R>) -> Result<Self, ArrayError> {
        result.into_iter().map(A::of).collect()
    }
}

/// Runs `call` on tensors that read `arrays` where they are, on `device`.
///
/// The tensors last for the call. One that is kept beyond it gets a copy of its elements then; so does one
/// that a region around the call, or a lazy device, reads only later.
///
/// # Errors
///
/// [`ArrayError`] if an array cannot be lent.
///
/// # Panics
///
/// If `call` does, with the same payload.
pub fn with_arrays<A, T, R>(
    arrays: A,
    device: &KilnDevice,
    call: impl FnOnce(T) -> R,
) -> Result<R, ArrayError>
where
    A: ArrayInput<T>,
{
    let mut lending = Lending::default();
    arrays.lend(&mut lending)?;
    Ok(lend::lend(lending.0, |tensors| {
        let mut tensors = LentTensors {
            tensors: tensors.into_iter(),
            device: *device,
        };
        call(arrays.input(&mut tensors))
    }))
}

impl<F> CompiledFn<F> {
    /// [`CompiledFn::call`] on arrays, with an array for each result: see [`crate::arrays`].
    ///
    /// # Errors
    ///
    /// [`ArrayError`] if an array does not fit, or the call fails.
    ///
    /// # Panics
    ///
    /// As [`CompiledFn::call`].
    pub fn call_arrays<A, T, R, O>(&self, arrays: A, device: &KilnDevice) -> Result<O, ArrayError>
    where
        F: Fn(T) -> R,
        A: ArrayInput<T>,
        T: StepInput + Clone,
        R: StepInput,
        O: ArrayOutput<R>,
    {
        let result = with_arrays(arrays, device, |input| self.call(input))?;
        O::of(result?)
    }
}

impl<B, M, O, F, I, L> TrainStep<B, M, O, F, I, L>
where
    B: TrainBackend,
    M: AutodiffModule<B> + Clone,
    O: SimpleOptimizer<Kiln>,
    F: Fn(&M, I) -> L,
    I: StepInput,
    L: StepOutput<B>,
{
    /// [`TrainStep::step`] on arrays: see [`crate::arrays`].
    ///
    /// # Errors
    ///
    /// [`ArrayError`] if an array does not fit, or the step fails.
    ///
    /// # Panics
    ///
    /// As [`TrainStep::step`].
    pub fn step_arrays(
        &mut self,
        lr: LearningRate,
        arrays: impl ArrayInput<I>,
        device: &KilnDevice,
    ) -> Result<L, ArrayError> {
        let result = with_arrays(arrays, device, |input| self.step(lr, input))?;
        Ok(result?)
    }
}
